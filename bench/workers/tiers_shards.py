"""RocksDB in shards, each a database and a process, reading a batch ahead of the training loop.

Processes, not threads, because keys and values become Python's under its lock. A shard works through its pipe in
order. Shards and loop share buffers of memory, three of each kind: one batch is read while another is trained
and the one before it is written.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from workers.tiers_loop import PAGE_BYTES, Case, Gate, process_counts
from workers.tiers_peer import Store, look_up, update

NUM_BUFFERS = 3


def shard_of(rows: NDArray[np.int64], num_shards: int) -> NDArray[np.int64]:
    """Map rows to shards by a multiplicative hash."""
    hashed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((hashed >> np.uint64(32)) % np.uint64(num_shards)).astype(np.int64)


def apply_newer(
    rows: NDArray[np.int64],
    records: NDArray[np.float32],
    newer_rows: NDArray[np.int64],
    newer_records: NDArray[np.float32],
) -> None:
    """Replace the records of rows that the batch before has updated since they were read, in place. newer_rows may be
    in any order."""
    if not len(newer_rows):
        return
    order = np.argsort(newer_rows)
    places = np.searchsorted(newer_rows, rows, sorter=order)
    places = order[np.minimum(places, len(order) - 1)]
    is_newer = newer_rows[places] == rows
    records[is_newer] = newer_records[places[is_newer]]


def run_shard(
    number: int,
    open_store: Callable[[int], Store],
    pipe: Connection,
    rows: NDArray[np.int64],
    records: NDArray[np.float32],
) -> None:
    """Answer the loop until it sends "leave" or closes the pipe: read rows into a buffer's records, or write them."""
    store = open_store(number)
    pipe.send("ready")
    while True:
        try:
            kind, buffer, first, last = pipe.recv()
        except EOFError:
            os._exit(0)
        if kind == "leave":
            os._exit(0)
        part = slice(first, last)
        if kind == "get" and first < last:
            records[buffer, part] = store.get(rows[buffer, part])
        elif first < last:
            store.put(rows[buffer, part], records[buffer, part])
        pipe.send(kind)


class Shards:
    """Processes of all shards, and the buffers they share with the loop."""

    def __init__(self, num_shards: int, capacity: int, width: int) -> None:
        self.num_shards = num_shards
        self.rows = shared_array((NUM_BUFFERS, capacity), np.int64)
        self.records = shared_array((NUM_BUFFERS, capacity, width), np.float32)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.unanswered: deque[str] = deque()
        """Kinds of the requests that shards work at, oldest first."""

    def open(self, open_store: Callable[[int], Store]) -> None:
        """Start all, and wait until their databases are filled."""
        context = multiprocessing.get_context("fork")
        for number in range(self.num_shards):
            loop_end, shard_end = context.Pipe()
            arguments = number, open_store, shard_end, self.rows, self.records
            process = context.Process(target=run_shard, args=arguments, daemon=True)
            process.start()
            shard_end.close()
            self.pipes.append(loop_end)
            self.processes.append(process)
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"a shard ended with {process.exitcode} while it filled its database (-9: for want of memory)"
                ) from None

    def request(self, kind: str, buffer: int, bounds: NDArray[np.int64]) -> None:
        for number, pipe in enumerate(self.pipes):
            pipe.send((kind, buffer, int(bounds[number]), int(bounds[number + 1])))
        self.unanswered.append(kind)

    def wait(self, kind: str) -> None:
        """Wait for the oldest request of a kind, and for all before it."""
        while kind in self.unanswered:
            oldest = self.unanswered.popleft()
            for pipe in self.pipes:
                assert pipe.recv() == oldest, "a shard answers in order"
            if oldest == kind:
                return

    def wait_all(self) -> None:
        while self.unanswered:
            self.wait(self.unanswered[-1])

    def close(self) -> None:
        """End all. They are asked: a closed pipe alone is not seen while shards forked later hold its other end."""
        for pipe in self.pipes:
            pipe.send(("leave", 0, 0, 0))
            pipe.close()
        for process in self.processes:
            process.join()

    def counts(self) -> Mapping[str, float]:
        """Count what the loop's process and all shards used."""
        counts = process_counts()
        ticks = os.sysconf("SC_CLK_TCK")
        for process in self.processes:
            pid = process.pid
            words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            counts["cpu_seconds"] += (int(words[11]) + int(words[12])) / ticks
            lines = dict(x.split(": ") for x in Path(f"/proc/{pid}/io").read_text().splitlines())
            counts["pages_read"] += int(lines["read_bytes"]) / PAGE_BYTES
            counts["bytes_written"] += int(lines["write_bytes"])
        return counts


def shared_array(shape: tuple[int, ...], dtype: type) -> NDArray:
    """Allocate memory that forked processes share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


class ShardedTraining:
    """`System`, without a dense network. Batch t + 1 is read while t is trained, and t - 1 is written."""

    def __init__(self, case: Case, shards: Shards) -> None:
        self.case, self.shards = case, shards
        stream = case.open_stream()
        shape = stream.shape
        self.gate = Gate(shape.num_batches, 1)
        self.batches = iter(self.gate)
        self.ids = stream.rows()
        generator = torch.Generator().manual_seed(case.seed)
        self.gradient = torch.randn(shape.lookups, case.dim, generator=generator)
        self.gradient /= shape.batch_size
        self.number = 0
        self.ahead: tuple[int, int, NDArray[np.int64], torch.Tensor] | None = None
        self.before = np.empty(0, np.int64), np.empty((0, case.dim + 1), np.float32)

    def request_next(self) -> None:
        """Request the rows of the next batch, those of a shard side by side."""
        number = next(self.batches, None)
        if number is None:
            self.ahead = None
            return
        lookups = torch.from_numpy(self.ids[number].reshape(-1).astype(np.int64))
        unique, inverse = torch.unique(lookups, return_inverse=True)
        shards = shard_of(unique.numpy(), self.shards.num_shards)
        order = np.argsort(shards, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        bounds = np.searchsorted(shards[order], np.arange(self.shards.num_shards + 1))
        buffer, count = self.number % NUM_BUFFERS, len(order)
        self.number += 1
        self.shards.rows[buffer, :count] = unique.numpy()[order]
        self.shards.request("get", buffer, bounds)
        self.ahead = buffer, count, bounds, torch.from_numpy(places)[inverse]

    def step(self, network: bool) -> None:
        assert not network, "peers are measured without a network"
        if self.ahead is None:
            self.request_next()
        assert self.ahead is not None, "the stream has another batch"
        buffer, count, bounds, inverse = self.ahead
        self.shards.wait("get")
        rows, records = self.shards.rows[buffer, :count], self.shards.records[buffer, :count]
        apply_newer(rows, records, *self.before)
        self.request_next()
        trained = torch.from_numpy(records)
        look_up(trained, inverse)
        update(trained, inverse, self.gradient, self.case.embedding_lr)
        self.shards.request("put", buffer, bounds)
        self.before = rows, records

    def settle(self) -> None:
        self.shards.wait_all()

    def counts(self) -> Mapping[str, float]:
        return self.shards.counts()
