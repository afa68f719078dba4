"""AUC of every step's global batch before it is trained, as JSON: the world law on the bench's own stream.

One process is a world of one; under torchrun, rows are split by hash and partial results are sent.
"""

from __future__ import annotations

import json

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from colonnade import Mesh, PlanConfig, RowOptimizer, build_plan, close_mesh, open_mesh
from colonnade.train.dense import DenseGradients
from colonnade.train.metrics import auc
from workers.ads import open_ads
from workers.quality_arms import build

STEPS, BATCH_SIZE, LR = 24, 1024, 0.01


def scores(mesh: Mesh, kind: str) -> list[float]:
    """Return scores by step, the same on every rank. Collective."""
    model = build(kind, LR, "float64").double()
    collection = model.embeddings
    plan = build_plan(collection.tables, mesh.num_ranks, PlanConfig(exchange="partials"))
    collection.open(plan, mesh)
    rows = RowOptimizer(collection)
    late = collection.exchange.pushed_parameters
    dense = DenseGradients(list(model.parameters()), mesh, late=late)
    dense.build_buckets()
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    stream = open_ads(STEPS * BATCH_SIZE)
    source = stream.batches(BATCH_SIZE, rank=mesh.rank, num_ranks=mesh.num_ranks)
    for batch in collection.lookahead(source):
        dense.zero_gradients()
        assert batch.label is not None
        logits, label = model(batch), batch.label.double()
        loss = cross_entropy(logits, label, reduction="sum") / batch.world_weight
        loss.backward()
        collection.pipeline.send_gradients()  # owners' gradients of dense weights come with the rows'
        dense.reduce(finite=True, stop=False)
        rows.step(agreed=True)
        optimizer.step()
        own = torch.cat([logits.detach(), label], 1)
        all_ranks = torch.cat(mesh.all_gather("gather", own.contiguous()))
        results.append(auc(all_ranks[:, 0], all_ranks[:, 1]))
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = open_mesh()
    aucs = {kind: scores(world, kind) for kind in ("lr", "wide_deep", "deepfm")}
    if world.rank == 0:
        print(json.dumps(aucs), flush=True)
    close_mesh(world)
