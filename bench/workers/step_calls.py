"""Count the Python calls of training steps on one rank: torchrun ... -m workers.step_calls WORLD

WORLD: a key of `WORLDS`. Rank 0 prints one JSON line: calls a step inside the package, and the files they entered.
Imports nothing that a checkout of another commit may not have.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import colonnade
from colonnade import (
    Adagrad,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
    close_mesh,
    open_mesh,
)
from colonnade.topology.sharding import table_wise

WORLDS: dict[str, dict[str, Any]] = {
    "1 process": {"ranks": 1, "hosts": 1, "exchange": "rows"},
    "2 ranks rows": {"ranks": 2, "hosts": 1, "exchange": "rows"},
    "2x2 towers": {"ranks": 4, "hosts": 2, "exchange": "towers"},
}
PACKAGE = str(Path(colonnade.__file__).parent) + os.sep
NAMES = ("user", "item")
ROWS, DIM, SAMPLES = 1000, 8, 64
WARM_UP, STEPS = 10, 20


class Calls:
    """Counter of calls by file of the package, on all threads that are started after it."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self.is_on = False
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(PACKAGE):
            self.by_file[name] += 1


def main(name: str) -> None:
    world = WORLDS[name]
    os.environ["LOCAL_WORLD_SIZE"] = str(world["ranks"] // world["hosts"])
    torch.set_num_threads(1)
    calls = Calls()
    mesh = open_mesh()
    tables = [Table(value, DIM, rows=ROWS, optimizer=Adagrad(lr=0.01)) for value in NAMES]
    is_towered = world["exchange"] == "towers"
    owners = {"user": 0, "item": 2} if is_towered else {}
    plan = build_plan(
        tables,
        mesh.num_ranks,
        PlanConfig(
            exchange=world["exchange"],
            towers=world["hosts"] if is_towered else None,
            tables={name: {"sharding": table_wise(rank)} for name, rank in owners.items()},
        ),
    )
    collection = EmbeddingCollection(
        tables,
        [Feature(value, value) for value in NAMES],
        consumers={"fields": (Concat(), NAMES)},
    ).open(plan, mesh)
    rows = RowOptimizer(collection)
    gradient = torch.full((SAMPLES, len(NAMES) * DIM), 1e-3)
    ready = collection.lookahead(batches(mesh.rank))
    for step in range(WARM_UP + STEPS):
        calls.is_on = step >= WARM_UP
        torch.autograd.backward(collection(next(ready))["fields"], gradient)
        rows.step()
    calls.is_on = False
    ready.close()
    if mesh.rank == 0:
        files = sorted(value.removeprefix(PACKAGE) for value in calls.by_file)
        total = sum(calls.by_file.values())
        print(json.dumps({"calls": total / STEPS, "files": files}), flush=True)
    close_mesh(mesh)


def batches(rank: int) -> Iterator[Batch]:
    """Yield batches of random ids without end, other ones on each rank."""
    random = torch.Generator().manual_seed(rank)
    while True:
        ids = {name: Ids(torch.randint(ROWS, (SAMPLES,), generator=random)) for name in NAMES}
        yield Batch(size=SAMPLES, dense=torch.empty(SAMPLES, 0), ids=ids)


if __name__ == "__main__":
    main(sys.argv[1])
