"""HET (Miao et al. 2022): Wide & Deep whose workers keep copies of rows, at most 100 batches behind each other.

    torchrun --nproc-per-node 2 recipes/het.py [STALENESS]

Copies inside their bounds are used without a word to the rows' owners; gradients wait until their sum is sent."""

import sys

import torch

import colonnade
from colonnade.consistency.row_clock import row_clock
from colonnade.data import open_source
from colonnade.exchange.cached import TableCache
from colonnade.models.wide_deep import WideDeep


def train(mesh: colonnade.Mesh, copies: TableCache) -> tuple[colonnade.Fitted, dict]:
    data = open_source("synthetic", num_train=40_000, num_test=4_000, cardinalities=[4_000] * 8)
    columns, num_dense = data.train.schema.categorical, len(data.train.schema.dense)
    kind = {"dim": {"deep": 16, "wide": 1}, "optimizer": colonnade.SGD(lr=0.5)}
    tables = [colonnade.Table(c.name, rows=c.cardinality, **kind) for c in columns]
    torch.manual_seed(0)
    features = [colonnade.Feature(c.name, c.name) for c in columns]
    model = WideDeep(tables, features, num_dense=num_dense, top=(64, 32))
    caches = dict.fromkeys((c.name for c in columns), copies)
    model.embeddings.open(colonnade.build_plan(tables, mesh.num_ranks, caches=caches), mesh)
    found = colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=256, quiet=True)
    cached = model.embeddings.cached
    return found, {} if cached is None else vars(cached.counts)


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    found, counts = train(mesh, TableCache(400, row_clock(int([*sys.argv, 100][1])), "lfu"))
    sent = sum(mesh.traffic.bytes_of(each) for each in ("route", "fetch", "push"))
    said = found.metrics["test_auc"], sent // found.outcome.steps
    if mesh.rank == 0:
        print("test_auc {:.4f}  bytes a step {:,}".format(*said))
        said = "  ".join(f"{name} {count:,}" for name, count in counts.items())
        print(said or "one rank keeps no copies: run it under torchrun, with two or more")
    colonnade.close_mesh(mesh)
