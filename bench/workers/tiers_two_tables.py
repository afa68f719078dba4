"""`python -m workers.tiers_two_tables STORE DIM ROWS ROUNDS STEPS`: memory for a hot and a cold table of one size.

Each has ROWS rows, all of them on disk; memory is 1/8 of what all take. A sample looks up HOT_LOOKUPS rows of the hot
table, by P(k-th row) ~ 1 / k**SKEW, and every COLD_EVERY-th sample one row of the cold table, any with the same
probability. Two copies train in turns, without a network: one divides memory evenly, one by a profile of its first
batches, as a run does. Prints JSON: by placement, samples/s, and rows read for each sample, of each block.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade import Batch, EmbeddingCollection, Feature, Ids, RowOptimizer, RowWiseAdagrad, Table
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.plan.build import build_plan
from colonnade.plan.measure.profile import profile_batches
from colonnade.plan.placement import forecast_batches, place_rows
from colonnade.planning.placement import MIN_BATCHES, SAMPLE_LOOKUPS
from colonnade.store.budget import slot_bytes
from workers.tier_stream import Law, probabilities
from workers.tiers_loop import Gate
from workers.tiers_store import FILL_STEP, RUN, fill_table, open_backings, store_counts

BATCH_SIZE, LOOKAHEAD = 4096, 16
HOT_LOOKUPS, COLD_EVERY, SKEW = 8, 16, 1.1
HISTORY = 6000
"""Batches that rows were trained in before."""
PLACEMENTS = ("even", "profiled")


class Stream:
    """Batches of both tables: the same for every copy."""

    def __init__(self, rows: int) -> None:
        self.law = Law(rows, SKEW)
        self.rows = rows
        self.place = np.random.default_rng(0).permutation(rows)  # of each rank

    def batch(self, number: int) -> Batch:
        generator = np.random.default_rng([1, number])
        hot = self.place[self.law.draw(generator, HOT_LOOKUPS * BATCH_SIZE)]
        cold = generator.integers(0, self.rows, BATCH_SIZE // COLD_EVERY)
        samples = torch.arange(BATCH_SIZE + 1)
        ids = {
            "hot": Ids(torch.from_numpy(hot), HOT_LOOKUPS * samples),
            "cold": Ids(torch.from_numpy(cold), samples // COLD_EVERY),
        }
        return Batch(size=BATCH_SIZE, dense=torch.zeros(BATCH_SIZE, 0), ids=ids)

    def uses(self) -> dict[str, NDArray[np.float64]]:
        """Return the batches of the history that trained each row, as expected."""
        hot = np.empty(self.rows)
        hot[self.place] = probabilities(self.rows, SKEW) * HOT_LOOKUPS * BATCH_SIZE
        cold = np.full(self.rows, BATCH_SIZE / COLD_EVERY / self.rows)
        return {"hot": -HISTORY * np.expm1(-hot), "cold": -HISTORY * np.expm1(-cold)}


def fill(folder: Path, tables: list[Table], stream: Stream, dim: int) -> None:
    """Write every row into a new store, with the clock that its uses left."""
    uses = stream.uses()
    for table, backing in zip(tables, open_backings(folder, tables, None), strict=True):
        clocks = np.maximum(np.rint(uses[table.name]), 1).astype("<u8")
        fill_table(table, backing, clocks, dim)


class Training:
    """Copy of the model with its own store and placement."""

    def __init__(self, folder: Path, tables: list[Table], stream: Stream, placement: str) -> None:
        self.stream = stream
        features = [Feature(table.name, table.name) for table in tables]
        self.embeddings = EmbeddingCollection(tables, features)
        memory = MemoryConfig(dram=sum(stream.rows * slot_bytes(table) for table in tables) // 8)
        plan = build_plan(tables, 1, PlanConfig(memory=memory, lookahead=LOOKAHEAD))
        if placement == "profiled":
            batches = max(MIN_BATCHES, SAMPLE_LOOKUPS // (HOT_LOOKUPS * BATCH_SIZE))
            sample = [stream.batch(number) for number in range(batches)]
            profile = profile_batches(tables, features, sample, is_brief=True)
            run_batches = forecast_batches(
                plan,
                batch_size=BATCH_SIZE,
                num_samples=None,
                first_batch=HISTORY,
                last_batch=2 * HISTORY,
            )
            plan = place_rows(plan, tables, profile, run_batches, memory.tables)
        self.capacities = {table.name: table.capacity_rows for table in plan.tables}
        self.embeddings.open(plan, backings=open_backings(folder, tables, FILL_STEP))
        self.rows = RowOptimizer(self.embeddings)
        self.gradient = torch.full((BATCH_SIZE, tables[0].width), 1e-4)
        self.warm()
        self.gate = Gate(1 << 30, LOOKAHEAD)
        self.ready = self.embeddings.lookahead(self.batches())

    def batches(self) -> Iterator[Batch]:
        for number in self.gate:
            yield self.stream.batch(number)

    def warm(self) -> None:
        """Train the rows used most in the history once, in the order of ids."""
        best = {
            name: np.sort(
                np.argpartition(-uses, self.capacities[name] - 1)[: self.capacities[name]]
            )
            for name, uses in self.stream.uses().items()
        }
        for first in range(0, max(map(len, best.values())), RUN):
            ids = {}
            for name, rows in best.items():
                part = torch.from_numpy(rows[first : first + RUN])
                ids[name] = Ids(part, torch.tensor([0, len(part)]))
            self.train(
                Batch(size=1, dense=torch.zeros(1, 0), ids=ids), torch.zeros_like(self.gradient[:1])
            )

    def train(self, batch: Batch, gradient: torch.Tensor) -> None:
        pooled = self.embeddings(batch)
        torch.autograd.backward([pooled["hot"], pooled["cold"]], [gradient, gradient])
        self.rows.step()

    def measure_block(self, steps: int) -> tuple[float, float]:
        """Train some batches. Returns samples/s and the rows read for each sample."""
        before, start = store_counts(self.embeddings), time.perf_counter()
        self.gate.allow(steps)
        for _ in range(steps):
            self.train(next(self.ready), self.gradient)
        end = max(time.perf_counter(), self.gate.settle())
        self.embeddings.store.tiers.settle()
        samples = steps * BATCH_SIZE
        reads = store_counts(self.embeddings)["rows_read"] - before["rows_read"]
        return samples / (max(end, time.perf_counter()) - start), reads / samples


def measure(
    folder: Path, dim: int, rows: int, rounds: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    stream = Stream(rows)
    optimizer = RowWiseAdagrad(lr=0.02)
    tables = [Table(name, dim, rows=rows, optimizer=optimizer) for name in ("hot", "cold")]
    fill(folder / PLACEMENTS[0], tables, stream, dim)
    shutil.copytree(folder / PLACEMENTS[0], folder / PLACEMENTS[1])
    copies = {kind: Training(folder / kind, tables, stream, kind) for kind in PLACEMENTS}
    for copy in copies.values():
        copy.measure_block(2 * steps)
    results: dict[str, dict[str, list[float]]] = {
        kind: {"samples/s": [], "rows read/sample": [], "hot rows": [copy.capacities["hot"]],
               "cold rows": [copy.capacities["cold"]]}
        for kind, copy in copies.items()
    }  # fmt: skip
    for _ in range(rounds):
        for kind, copy in copies.items():
            rate, reads = copy.measure_block(steps)
            results[kind]["samples/s"].append(rate)
            results[kind]["rows read/sample"].append(reads)
    return results


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), *map(int, sys.argv[2:6]))))
