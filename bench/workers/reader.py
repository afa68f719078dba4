"""One core that reads a file of Criteo shape and does nothing else. `Case.data` is the file.

A step is one batch, and counts the processor time that it took on average over BATCHES of them: a Parquet reader
works by row groups, ahead of what it is asked for, and so also between the blocks that are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from colonnade import Batch
from colonnade.data import Position, Source, open_source
from workers.loop import Case, Laps, Step, serve

BATCH_SIZE = 4096
BATCHES = 64
"""Two row groups."""


def build(case: Case) -> tuple[Step, dict[str, str]]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    path = Path(case.data)
    if path.suffix == ".parquet":
        source = open_source("parquet", path).train
    else:
        source = open_source("criteo", path, test_fraction=0.0).train
    batches = read(source)
    last = time.process_time()

    def step(laps: Laps) -> Tensor:
        nonlocal last
        for _ in range(BATCHES):
            batch = next(batches)
        now = time.process_time()
        laps.seconds["wait"] += (now - last) / BATCHES
        last = now
        assert batch.label is not None
        return batch.label.mean()

    return step, {"pyarrow": pa.__version__, "torch": torch.__version__}


def read(source: Source) -> Iterator[Batch]:
    """Epoch after epoch, whole batches only."""
    for epoch in count():
        for batch in source.batches(BATCH_SIZE, start=Position(epoch, 0)):
            if batch.size == BATCH_SIZE:
                yield batch


if __name__ == "__main__":
    serve(build)
