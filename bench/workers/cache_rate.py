"""Keys per second that one rank's cache looks up and updates: `bench cache`.

A step takes a batch's keys as they come, duplicates and all: it plans them (which are different), decides
(`Directory.step`), gathers every key's row and applies SGD with every key's gradient, in place, in the slab of
the cache. Rows that were missing are not waited for: their slots are gathered and updated as they are. Table, cache and
skew are those HET's own cache was measured with: 400,000 rows, 40,000 copies, Zipf 1.05.

    cache      as above
    roofline   roofline.cc: a bare gather and a bare read-modify-write of the same rows; no planning, no decisions

Legend: E keys of a batch, U different ones, D dim.
"""

from __future__ import annotations

import math
import time
from functools import partial

import torch
from torch import Tensor

from colonnade import _native
from colonnade.cache.directory import Directory
from colonnade.staleness import RowClock
from workers.cache_streams import SKEW
from workers.kernels_loop import SCALE
from workers.roofline import GATHER_SETTINGS, UPDATE_SETTINGS, Lookup, Roofline, Rows, Task, sweep
from workers.workload import draw

ROWS, CAPACITY, BOUND = 400_000, 40_000, 50
SETTLING_KEYS = 1_500_000
"""Looked up before anything is measured, so that the cache is full."""
NUM_SETTINGS, LR_COLUMN, SCALE_COLUMN, UNUSED_LIMITS = 16, 0, 12, slice(9, 12)
SUM = 0
FLOAT = "float32"
PHASES = ("plan", "decide", "gather", "update")


class Cache:
    """A directory, and a slab that its slots are rows of."""

    def __init__(self, dim: int, num_keys: int, policy: str) -> None:
        one, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.dim, self.num_keys = dim, num_keys
        self.directory = Directory(CAPACITY, RowClock(BOUND, BOUND), policy)
        num_slots = CAPACITY + num_keys
        width = torch.tensor([dim], dtype=torch.int32)
        self.table = torch.zeros(1, dtype=torch.int32)
        self.parts = _native.Parts(self.table, zero, width, one)
        self.reads = _native.Reads(self.table, zero, width)
        table = _native.TableSettings(
            parts=[_native.PartInitialValues(dim, 1, SCALE, 0.0, 0)],
            state_elements=0,
            rows=num_slots,
            capacity_rows=num_slots,
            seed=0,
        )
        self.dram = _native.Dram([table], FLOAT, False)
        every = torch.arange(num_slots)
        self.dram.acquire(every, torch.tensor([0, num_slots]), every.to(torch.int32), True)
        self.bases = torch.tensor([self.dram.weights_address(0)])
        self.strides = torch.tensor([self.dram.stride_bytes(0)])
        self.kinds = torch.zeros(1, dtype=torch.int32)
        self.settings = torch.zeros(1, NUM_SETTINGS, dtype=torch.float64)
        self.settings[:, LR_COLUMN], self.settings[:, SCALE_COLUMN] = 0.01, 1.0
        self.settings[:, UNUSED_LIMITS] = math.inf
        self.outputs = torch.zeros(num_keys, dim)
        self.gradients = torch.full((num_keys, dim), 1e-3)
        self.pooling = torch.full((1,), SUM, dtype=torch.uint8)
        self.ends = torch.tensor([0, num_keys])
        # What never changes is made once: a small tensor takes as long as a hundred keys.
        self.declared_rows, self.undealt = torch.tensor([ROWS]), torch.ones(1, dtype=torch.int64)
        self.out_bases = torch.tensor([self.outputs.data_ptr()])
        self.gradient_bases = torch.tensor([self.gradients.data_ptr()])
        self.out_strides = torch.tensor([4 * dim])

    def plan(self, ids: Tensor) -> tuple[_native.Lookups, _native.Plan]:
        lookups = _native.Lookups(
            ids, self.ends, self.table, self.pooling, self.num_keys, None, None
        )
        return lookups, _native.make_plan(lookups, self.declared_rows, self.undealt)

    def decide(self, plan: _native.Plan) -> tuple[Tensor, Tensor]:
        """slots (U,), index (E,), both int32."""
        unique = torch.as_tensor(plan.unique_ids).numpy()
        slots = torch.from_numpy(self.directory.decide_batch(unique).slots)
        inverse = torch.as_tensor(plan.inverse)
        index = torch.empty_like(inverse)
        _native.take(slots, inverse, index)
        return slots, index

    def gather(self, lookups: _native.Lookups, index: Tensor) -> None:
        _native.pool(
            lookups, index, self.bases, self.strides, self.reads,
            self.out_bases, self.out_strides, FLOAT, FLOAT,
        )  # fmt: skip

    def update(self, lookups: _native.Lookups, plan: _native.Plan, slots: Tensor) -> None:
        source = _native.OutputGradients(
            lookups, self.reads, self.gradient_bases, self.out_strides, FLOAT
        )
        _native.update(
            self.dram, slots, plan.block_offsets, plan.segment_offsets, plan.entries, source,
            self.parts, self.kinds, self.settings,
        )  # fmt: skip

    def step(self, ids: Tensor) -> list[float]:
        """Seconds by phase."""
        start = time.perf_counter()
        lookups, plan = self.plan(ids)
        planned = time.perf_counter()
        slots, index = self.decide(plan)
        decided = time.perf_counter()
        self.gather(lookups, index)
        gathered = time.perf_counter()
        self.update(lookups, plan, slots)
        end = time.perf_counter()
        return [planned - start, decided - planned, gathered - decided, end - gathered]


class Bare:
    """The bare loops on a cache's slab."""

    def __init__(self, cache: Cache) -> None:
        self.loops = Roofline(torch.get_num_threads())
        states = torch.ones(CAPACITY + cache.num_keys, 2)
        self.rows = Rows(
            cache.dim, cache.bases, int(cache.strides), torch.tensor([states.data_ptr()]), 8
        )
        self.buffers = states, cache  # the addresses above do not keep them
        self.task = Task(cache.num_keys, 1, cache.outputs, 0, cache.dim, cache.gradients)

    def tune(self, batches: list[Lookup]) -> None:
        self.best = (
            sweep(partial(self.gather_by), batches, GATHER_SETTINGS),
            sweep(partial(self.update_by), batches, UPDATE_SETTINGS),
        )

    def gather_by(self, batch: Lookup, setting: tuple[int, int]) -> None:
        self.loops.gather(self.rows, batch, self.task, setting)

    def update_by(self, batch: Lookup, setting: tuple[int, int]) -> None:
        self.loops.update(self.rows, batch, self.task, setting)

    def step(self, batch: Lookup) -> float:
        start = time.perf_counter()
        self.gather_by(batch, self.best[0])
        self.update_by(batch, self.best[1])
        return time.perf_counter() - start


def measure(
    dim: int, num_keys: int, policy: str, *, rounds: int, steps: int, seed: int = 0
) -> dict[str, list[float]]:
    """Measure seconds of a step by phase of `cache`, and for "roofline", the mean of each block; blocks in turns."""
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(dim, num_keys, policy)
    settling = max(2, SETTLING_KEYS // num_keys)
    ids = draw(SKEW, ROWS, (settling + rounds * steps, 1, num_keys), generator).view(-1, num_keys)
    planned = []
    for batch in ids[:settling]:
        lookups, plan = cache.plan(batch)
        slots, index = cache.decide(plan)
        cache.gather(lookups, index)
        cache.update(lookups, plan, slots)
        planned.append(Lookup(index, slots, torch.tensor([0, len(slots)])))
    bare = Bare(cache)
    bare.tune(planned[-8:])
    results: dict[str, list[float]] = {name: [] for name in (*PHASES, "roofline")}
    for block in ids[settling:].split(steps):
        seconds = torch.tensor([cache.step(batch) for batch in block]).mean(0)
        for name, mean in zip(PHASES, seconds.tolist(), strict=True):
            results[name].append(mean)
        tries = [bare.step(planned[-1 - i % len(planned)]) for i in range(steps)]
        results["roofline"].append(sum(tries) / steps)
    return results
