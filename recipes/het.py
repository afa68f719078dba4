"""HET (Miao et al. 2022): Wide & Deep with a row cache on each rank, at most 100 batches stale.

    torchrun --nproc-per-node 2 recipes/het.py [STALENESS]

A rank uses cached rows within their bounds without a request to the owner, and sends accumulated gradients."""

import sys

import colonnade
import torch
from colonnade.data import open_source
from colonnade.models import WideDeep


def train(mesh: colonnade.Mesh, staleness: int) -> tuple[colonnade.FitResult, dict[str, int]]:
    data = open_source("synthetic", num_train=24_000, num_test=2_000, cardinalities=[4_000] * 8)
    dims, sgd = {"deep": 16, "wide": 1}, colonnade.SGD(lr=0.5)
    sizes = {c.name: c.cardinality for c in data.train.schema.categorical}
    tables = [colonnade.Table(c, dims, rows=n, optimizer=sgd) for c, n in sizes.items()]
    features = [colonnade.Feature(name, name) for name in sizes]
    torch.manual_seed(0)
    model = WideDeep(tables, features, num_dense=len(data.train.schema.dense), top=(64, 32))
    copies = {"size": 400, "staleness": staleness, "policy": "lfu"}
    plan = colonnade.build_plan(tables, mesh.world, colonnade.PlanConfig(cache=copies))
    model.embeddings.open(plan, mesh)
    result = colonnade.fit(model, data, mesh=mesh, epochs=1, batch_size=256, quiet=True)
    cached = model.embeddings.cached  # None on one rank
    return result, vars(cached.counts) if cached else {}


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    result, counts = train(mesh, int(sys.argv[1]) if sys.argv[1:] else 100)
    sent = sum(mesh.traffic.bytes_of(channel) for channel in ("route", "fetch", "push"))
    auc, steps = result.metrics["test_auc"], result.outcome.steps
    if mesh.rank == 0:
        print(f"test_auc {auc:.4f}  bytes a step {sent // steps:,}")
        print("  ".join(f"{name} {count:,}" for name, count in counts.items()) or "no cache")
    colonnade.close_mesh(mesh)
