"""GraphSAGE (Hamilton et al. 2017) with learned node embeddings and a row cache on each rank, as in HET.

    torchrun --nproc-per-node 2 recipes/graphsage.py [STALENESS [FOLDER]]

Trains on a synthetic power-law graph, or on Gowalla's graph of users and places if FOLDER contains its files."""

import sys

import colonnade
import torch
from colonnade import Feature, FitResult, Mesh
from colonnade.data import open_source
from colonnade.models import GraphSAGE


def train(mesh: Mesh, staleness: int, *folder: str) -> tuple[FitResult, dict[str, int]]:
    data = open_source("power_law", nodes=2000, degree=16, communities=20, fan_outs=[5, 3])
    if folder:
        data = open_source("gowalla", folder[0], samples="neighbours", fan_outs=[5, 3])
    columns = data.train.schema.categorical
    nodes, adam = columns[0].cardinality, colonnade.Adam(lr=0.01)
    table = colonnade.Table("node", 32, rows=nodes, optimizer=adam)
    features = [Feature(c.name, "node", pooling="sum" if c.kind == "one" else "sequence") for c in columns]  # fmt: skip
    torch.manual_seed(0)
    model = GraphSAGE([table], features, log_q=0)
    copies = {"size": nodes, "staleness": staleness, "policy": "lfu"}
    plan = colonnade.build_plan([table], mesh.world, colonnade.PlanConfig(cache=copies))
    model.embeddings.open(plan, mesh)
    result = colonnade.fit(model, data, mesh=mesh, epochs=5, batch_size=512, quiet=True)
    return result, vars(cached.counts) if (cached := model.embeddings.cached) else {}


if __name__ == "__main__":
    mesh = colonnade.open_mesh()
    result, counts = train(mesh, *([int(sys.argv[1]), *sys.argv[2:]] if sys.argv[1:] else [10]))
    sent = sum(mesh.traffic.bytes_of(channel) for channel in ("route", "fetch", "push"))
    if mesh.rank == 0:
        print(f"test_recall@20 {result.metrics['test_recall@20']:.4f}  bytes {sent:,}  {counts}")
    colonnade.close_mesh(mesh)
