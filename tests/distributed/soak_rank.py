"""Program of every rank of the soak: steps without end of small batches of new ids, and its own memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from scenario import Net, global_batch, loss_of, share_of

from colonnade import RowOptimizer, build_plan, close_mesh, open_mesh
from colonnade.train.dense import DenseGradients

BATCH_SIZE = 64
DIFFERENT = 40
"""Batches; they come again, so that tables do not grow."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder: Path, steps: int, every: int) -> None:
    mesh = open_mesh()
    model = Net("float32")
    collection = model.embeddings
    collection.open(build_plan(collection.tables, mesh.num_ranks), mesh)
    rows = RowOptimizer(collection)
    dense = DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shares = (
        share_of(global_batch(t % DIFFERENT, BATCH_SIZE), mesh.rank, mesh.num_ranks)
        for t in range(steps)
    )
    results = []
    for step, batch in enumerate(collection.lookahead(shares), start=1):
        dense.zero_gradients()
        loss_of(model, batch).backward()
        finite, _, _ = dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        assert finite
        rows.step(agreed=True)
        optimizer.step()
        if step % every == 0:
            results.append(resident_bytes())
    (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(results))
    close_mesh(mesh)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
