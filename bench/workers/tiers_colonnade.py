"""Colonnade over tiers: the rows that a budget holds in memory, the others on the disk.

`python -m workers.tiers_colonnade` serves `bench tiers`; with `fill STORE STREAM DIM` it writes a store that every
budget then opens through links of its own: segments never change once they are written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import colonnade
from colonnade import Batch, Feature, Ids, RowOptimizer, Table
from colonnade.cache.next_use import encode_distance
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.models.dlrm import DLRM
from colonnade.plan.build import add_mapped_rows, build_plan
from colonnade.plan.measure.profile import profile_batches
from colonnade.plan.placement import forecast_batches, place_rows
from colonnade.plan.plan import Plan
from colonnade.planning.placement import MIN_BATCHES, SAMPLE_LOOKUPS
from colonnade.sizes import StorageLocation
from colonnade.store.budget import slot_bytes
from workers.tier_delay import delay_moves
from workers.tier_stream import Stream
from workers.tiers_loop import Case, Gate, serve
from workers.tiers_store import FILL_STEP, Commits, fill, open_backings, store_counts, tables_of

NUM_DENSE = 13
MAX_COUNT = 4096
"""Uses beyond which rows are all alike to a plan."""
AGE_BINS, MAX_LOG_AGE = 4096, 32.0
"""Number of bins for the ages of rows, and log2 of the largest age in batches."""
RUN = 65536
"""Most rows of a table in one batch when memory is warmed."""


class TieredTraining:
    """`System`. A DLRM over the stream; without its network the fields get a fixed gradient."""

    def __init__(self, case: Case, stream: Stream, model: DLRM) -> None:
        self.case, self.stream, self.model = case, stream, model
        self.embeddings = model.embeddings
        self.rows = RowOptimizer(self.embeddings)
        self.dense = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        self.commits = Commits(self.embeddings)
        self.gate = Gate(stream.shape.num_batches, case.lookahead)
        size, generator = stream.shape.batch_size, torch.Generator().manual_seed(case.seed)
        self.inputs = torch.randn(size, NUM_DENSE, generator=generator)
        self.label = (torch.rand(size, 1, generator=generator) < 0.25).float()
        width = len(stream.shape.cardinalities) * case.dim
        self.gradient = torch.randn(size, width, generator=generator) / size
        self.ready = self.embeddings.lookahead(self.batches())

    def batches(self) -> Iterator[Batch]:
        shape, starts = self.stream.shape, self.stream.shape.starts[:-1, None]
        rows, hints = self.stream.rows(), self.stream.hints() if self.case.hints else None
        for number in self.gate:
            ids = torch.from_numpy(rows[number] - starts)  # int64
            values = {f"C{f + 1}": Ids(ids[f]) for f in range(len(ids))}
            batch = Batch(size=shape.batch_size, dense=self.inputs, ids=values, label=self.label)
            if hints is not None:
                codes = torch.from_numpy(hints[number].copy())
                batch.next_use = {f"C{f + 1}": codes[f] for f in range(len(ids))}
            yield batch

    def step(self, network: bool) -> None:
        batch = next(self.ready)
        if network:
            self.dense.zero_grad()
            loss = bce(self.model(batch), self.label)
            loss.backward()
            self.rows.step()
            self.dense.step()
        else:
            self.embeddings(batch)["fields"].backward(self.gradient)
            self.rows.step()

    def settle(self) -> None:
        if self.embeddings.store.tiers is not None:
            self.embeddings.store.tiers.settle()

    def commit(self) -> None:
        self.commits.begin()

    def wait_for_commit(self) -> None:
        self.commits.wait()

    def counts(self) -> Mapping[str, float]:
        return store_counts(self.embeddings)


def open_system(case: Case) -> tuple[TieredTraining, dict[str, float | str]]:
    stream = case.open_stream()
    tables = tables_of(stream, case.dim)
    features = [Feature(table.name, table.name) for table in tables]
    model = DLRM(tables, features, num_dense=NUM_DENSE, bottom=case.bottom, top=case.top)
    plan = plan_of(tables, stream, case)
    on_disk = case.dram_bytes is not None
    if case.mapped:
        plan = add_cache(plan, tables, case)
    step = None if case.starts_empty else FILL_STEP
    backings = open_backings(Path(case.store), tables, step) if on_disk else []
    model.embeddings.open(plan, backings=backings)
    start = time.perf_counter()
    system = TieredTraining(case, stream, model)
    if not case.starts_empty:
        together = min([RUN, *(table.capacity_rows for table in plan.tables if not table.fits)])
        warm(system, [table.capacity_rows + table.mapped_rows for table in plan.tables], together)
    if case.line_ns:
        delay_moves(model.embeddings.store, Path(case.delay), case.line_ns)
    return system, {"colonnade": colonnade.__version__, "warm_seconds": time.perf_counter() - start}


def plan_of(tables: Sequence[Table], stream: Stream, case: Case) -> Plan:
    if case.dram_bytes is None:
        return build_plan(tables, 1, PlanConfig(lookahead=case.lookahead))
    memory = MemoryConfig(dram=case.dram_bytes)
    if case.placement != "history":
        plan = build_plan(tables, 1, PlanConfig(memory=memory, lookahead=case.lookahead))
        return plan if case.placement == "even" else place_by_sample(plan, tables, stream, memory)
    shares = shares_of(tables, stream, case.lookahead, case.dram_bytes)
    return build_plan(
        tables,
        1,
        PlanConfig(memory={"dram": case.dram_bytes, "tables": shares}, lookahead=case.lookahead),
    )


def place_by_sample(
    plan: Plan, tables: Sequence[Table], stream: Stream, memory: MemoryConfig
) -> Plan:
    """Place rows as a run does that resumes behind the history: by a profile of the stream's first batches."""
    shape, starts = stream.shape, stream.shape.starts[:-1, None]
    features = [Feature(table.name, table.name) for table in tables]
    batches = max(MIN_BATCHES, SAMPLE_LOOKUPS // shape.lookups)
    sample = []
    for rows in stream.rows()[:batches]:
        ids = torch.from_numpy(rows - starts)
        values = {table.name: Ids(ids[f]) for f, table in enumerate(tables)}
        sample.append(
            Batch(size=shape.batch_size, dense=torch.zeros(shape.batch_size, 0), ids=values)
        )
    profile = profile_batches(tables, features, sample, is_brief=True)
    first = int(shape.history / shape.batch_size)
    run_batches = forecast_batches(
        plan,
        batch_size=shape.batch_size,
        num_samples=None,
        first_batch=first,
        last_batch=first + shape.num_batches,
    )
    return place_rows(plan, tables, profile, run_batches, memory.tables)


def add_cache(plan: Plan, tables: Sequence[Table], case: Case) -> Plan:
    """Give all mapped memory to evicted rows. A plan of its own would store whole tables there first."""
    return add_mapped_rows(
        replace(plan, mapped=StorageLocation(case.mapped, case.mapped_bytes)), tables
    )


def shares_of(
    tables: Sequence[Table], stream: Stream, lookahead: int, dram_bytes: int
) -> dict[str, int]:
    """Compute the bytes of the budget that each table gets.

    They have room for the rows used most in the history, of equal ones the youngest, whatever their table, as
    `colonnade plan` would give it; and for what a window of batches pins.
    """
    rows, starts = stream.rows(), stream.shape.starts
    window = range(min(lookahead + 2, len(rows)))
    pinned = [
        len(np.unique(np.concatenate([rows[number, f] for number in window])))
        for f in range(len(tables))
    ]
    bytes_of = np.array([slot_bytes(table) for table in tables])
    least = np.minimum(np.array(pinned) * 5 // 4, np.diff(starts))

    def of_table(name: str, t: int) -> NDArray[np.float32]:
        return stream.state(name)[starts[t] : starts[t + 1]]

    used = []  # by table: (rows used u times or more) for u = 0, 1, ...
    for t in range(len(tables)):
        counts = np.minimum(of_table("count", t), MAX_COUNT)
        histogram = np.bincount(counts.astype(np.int64), minlength=MAX_COUNT + 1)
        used.append(np.cumsum(histogram[::-1])[::-1])

    def share(more: Sequence[NDArray[np.int64]], number: int) -> NDArray[np.int64]:
        return np.maximum(least, [curve[number] for curve in more])

    enough = next(c for c in range(MAX_COUNT + 1) if share(used, c) @ bytes_of <= dram_bytes)
    chosen = share(used, enough)
    if enough:  # some of the rows used once less
        older = []  # by table: those and (rows of them whose age is below a bound), by bound
        for t in range(len(tables)):
            ages = of_table("age", t)[of_table("count", t) == enough - 1]
            bins = np.minimum(AGE_BINS * np.log2(1 + ages) / MAX_LOG_AGE, AGE_BINS - 1)
            histogram = np.bincount(bins.astype(np.int64), minlength=AGE_BINS)
            older.append(used[t][enough] + np.cumsum(histogram))
        fits = [b for b in range(AGE_BINS) if share(older, b) @ bytes_of <= dram_bytes]
        if fits:
            chosen = share(older, fits[-1])
        more = share(older, min(len(fits), AGE_BINS - 1)) - chosen
        if more.any():
            chosen = chosen + more * ((dram_bytes - chosen @ bytes_of) / (more @ bytes_of))
    return {
        table.name: max(1, int(count)) * int(row_bytes)
        for table, count, row_bytes in zip(tables, chosen, bytes_of, strict=True)
    }


def warm(system: TieredTraining, capacities: Sequence[int], together: int) -> None:
    """Train the rows that endless training would have left in memory, once each, with gradients of zero.

    They are trained in the order of ids, which is that of the disk: most of it is read in one sweep. together: rows of
    a table in one batch.
    """
    stream, hints = system.stream, system.case.hints
    table_ids = select_warm_rows(system.case, stream, capacities)
    width = len(table_ids) * system.case.dim
    first_use, starts = stream.state("first") if hints else None, stream.shape.starts
    firsts = range(0, max(map(len, table_ids)), together)
    for number, first in enumerate(firsts):
        values, expected = {}, {}
        for t, ids in enumerate(table_ids):
            part = ids[first : first + together]
            name = f"C{t + 1}"
            values[name] = Ids(torch.from_numpy(part), torch.tensor([0, len(part)]))
            if first_use is not None:
                away = first_use[starts[t] + part] + len(firsts) - number
                expected[name] = torch.from_numpy(encode_distance(away))
        batch = Batch(size=1, dense=system.inputs[:1], ids=values, next_use=expected or None)
        system.embeddings(batch)["fields"].backward(torch.zeros(1, width))
        system.rows.step()


def select_warm_rows(
    case: Case, stream: Stream, capacities: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Select the rows of each table that memory has at first; ids ascend.

    These are the rows with the highest counts, then the youngest; with hints those whose next use is nearest, as seen
    from their last.
    """
    starts, table_ids = stream.shape.starts, []
    for t, capacity in enumerate(capacities):
        # A table at a time: the worker's memory is limited, and all rows' numbers would be a gigabyte.
        span = slice(starts[t], starts[t + 1])
        age = np.array(stream.state("age")[span], np.float64)
        if case.hints:
            score = -(age + stream.state("first")[span])
        else:
            score = stream.state("count")[span] - 0.5 * age / age.max()
        del age
        ids = np.arange(len(score))
        if capacity < len(score):
            ids = np.sort(np.argpartition(-score, capacity)[:capacity])
        table_ids.append(ids)
    return table_ids


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "fill":
        print(fill(Path(sys.argv[2]), Stream(Path(sys.argv[3])), int(sys.argv[4])))
    else:
        serve(open_system)
