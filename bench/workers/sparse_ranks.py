"""Lookups and updates of open tables on several processes of one machine, over loopback, as a user's loop has them.

torchrun ... -m workers.sparse_ranks IDS DIM SERVERS ROUNDS STEPS     rank 0 prints one JSON line: seconds of each block

IDS: (N, F, B) int64 of the samples of all ranks together; each trainer takes its share. SERVERS: of the ranks, the last
have rows and nothing else. Legend: N batches, F features, B samples of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import torch

from colonnade import (
    Adagrad,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    Table,
    close_mesh,
    open_mesh,
)
from colonnade.comm.process_groups import assign_server_ranks

WARM_UP = 10


def main(path: str, dim: int, servers: int, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    mesh = assign_server_ranks(open_mesh(), servers)
    ids = torch.from_numpy(np.load(path))
    names = [f"C{f + 1}" for f in range(ids.shape[1])]
    trainers = mesh.world.num_trainers
    share = ids.shape[2] // trainers
    collection = EmbeddingCollection(
        [Table(name, dim, optimizer=Adagrad(lr=0.01)) for name in names],
        [Feature(name, name) for name in names],
        consumers={"fields": (Concat(), names)},
    ).open(mesh=mesh)
    rows = RowOptimizer(collection)
    size = 0 if mesh.is_server else share
    gradient = torch.full((size, len(names) * dim), 1e-3)

    def batches() -> Iterator[Batch]:
        first = 0 if mesh.is_server else mesh.trainers.rank * share
        for batch in cycle(ids):
            own = batch[:, first : first + size]
            values = {name: Ids(own[f].contiguous()) for f, name in enumerate(names)}
            yield Batch(size=size, dense=torch.empty(size, 0), ids=values)

    ready = collection.lookahead(batches())
    seconds = []
    for number in range(rounds + 1):
        mesh.barrier()
        start = time.perf_counter()
        for _ in range(steps if number else WARM_UP):
            fields = collection(next(ready))["fields"]
            if not mesh.is_server:
                torch.autograd.backward(fields, gradient)
            rows.step()
        mesh.barrier()
        if number:
            seconds.append((time.perf_counter() - start) / steps)
    ready.close()
    if mesh.rank == 0:
        print(json.dumps({"seconds": seconds}), flush=True)
    close_mesh(mesh)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], *map(int, sys.argv[2:]))
