"""Batches that leave a note when they are made, and programs that read them in a process and are ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from colonnade.batch import Batch
from colonnade.data import Schema, processes
from colonnade.data.contract import START


@dataclass(frozen=True)
class Noted:
    """Batches of one sample, each noted in a folder when it is made."""

    folder: Path
    schema = Schema((), ())
    num_samples = 1000

    def batches(self, batch_size, *, rank=0, num_ranks=1, start=START) -> Iterator[Batch]:
        for step in range(start.step, 1000):
            (self.folder / str(step)).touch()
            yield Batch(1, torch.full((1, 1), float(step)), {})


def wait_for_a_stopped_reader(notes: Path, end: str) -> None:
    """Interrupt a training loop whose lookahead waits for a reader that is stopped."""
    from test_lookahead import Slow

    processes.RUN_SAMPLES, processes.START_METHOD = 1, "fork"
    lookahead = Slow(0.0, 2, batches=processes.ProcessSource(Noted(notes), 1).batches(1)).lookahead
    next(lookahead)
    (reader,) = multiprocessing.active_children()
    os.kill(reader.pid, signal.SIGSTOP)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            next(lookahead)
    except KeyboardInterrupt:
        if end == "close":
            lookahead.close()
            print(lookahead._prepared._thread.is_alive(), reader.is_alive())


def read_and_sleep(notes: Path) -> None:
    """Print the readers' pids, of which the first is stopped."""
    processes.RUN_SAMPLES, processes.START_METHOD = 1, "fork"
    batches = processes.ProcessSource(Noted(notes), 2).batches(1)
    read: list[Batch] = []  # threads come and go, as those of one lookahead after another
    for _ in range(2):
        thread = threading.Thread(target=lambda: read.extend(islice(batches, 20)))
        thread.start()
        thread.join()
    assert [float(batch.dense) for batch in read] == list(range(40))
    readers = [child.pid for child in multiprocessing.active_children()]
    os.kill(readers[0], signal.SIGSTOP)
    print(*readers, flush=True)
    time.sleep(300)
