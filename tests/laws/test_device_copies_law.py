"""Copies in a device's memory (`plan.cache.tier=hbm`) have the bits of copies in memory: whatever is kept, and how.

On "cpu" that is exact. On a GPU the network's own products are summed in another order than the processor's, so there
the same trainings are compared closely.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from devices import DEVICES
from plans import cache_settings
from simulated import run_simulated
from test_hbm_law import KINDS, OPTIMIZERS

from colonnade import (
    SGD,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    World,
    build_plan,
)
from colonnade.cache.cached_rows import DeviceCachedRows
from colonnade.exchange import cached_state
from colonnade.exchange.cached_state import apply_planned_bounds
from colonnade.staleness import RowClock, TableCache, row_clock

BOUNDS = [row_clock(6), RowClock(0, 3), row_clock(0), RowClock(2, 0)]
"""Optimizers, assigned to tables in turns."""
LESS = ("float64", "float16", "bfloat16")
"""Kinds of rows that are much like others."""
IDS, STEPS = 40, 11


def declared(kind: str) -> list[Table]:
    widths = {"deep": 7, "wide": 1}
    own = [
        Table(f"t{i}", widths, rows=IDS if i % 2 else None, optimizer=optimizer, max_norm=0.9, **KINDS[kind])
        for i, optimizer in enumerate(OPTIMIZERS if kind == "float32" else OPTIMIZERS[1:5])
    ]  # fmt: skip
    return [*own, Table("plain", 7, optimizer=SGD(lr=0.1), **KINDS[kind])]


def batches(names, rank, num):
    """Skewed ids; bags, some empty, of which every other column is weighted."""
    random = torch.Generator().manual_seed(rank)
    for size in [9, 3, 0, 20, *[9] * num][:num]:
        ids = {}
        for i, name in enumerate(names):
            lengths = torch.randint(0, 4, (size,), generator=random)
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            drawn = (torch.rand(int(ends[-1]), generator=random) ** 3 * IDS).long()
            weights = torch.rand(len(drawn), generator=random) if i % 2 else None
            ids[name] = Ids(drawn, ends, weights)
        yield Batch(size, torch.zeros(size, 0), ids)


def train_with_copies(mesh, kind, tier, device):
    """Return counts and outputs, the owners' rows (with pending gradients half-way, without at the end), and the state
    of cached rows. Bounds change, lookaheads are left, a batch is read and forgotten; an output is shared with a table
    without copies, and every other batch has two backwards."""
    tables = declared(kind)
    looked_up = [Feature(f"{t.name}.{p}", t.name, pooling=p) for t in tables for p in ("mean", "sum")]  # fmt: skip
    fields = ["t0.mean.deep", "plain.sum", "t1.sum.deep"]
    collection = EmbeddingCollection(
        tables, looked_up, consumers={"all": (Concat(), fields)}, seed=2
    )
    collection.to(device)
    caches = {
        t.name: TableCache(12 + i, BOUNDS[i % 4], ("lru", "lfu")[i % 2])
        for i, t in enumerate(tables[:-1])
    }
    plan = build_plan(
        tables, mesh.num_ranks, PlanConfig(cache=cache_settings(caches, tier), lookahead=2)
    )
    collection.open(plan, mesh)
    assert isinstance(collection.cached.cached_rows, DeviceCachedRows) == (tier == "hbm")
    rows, outputs = RowOptimizer(collection), []
    stream = list(batches([item.name for item in looked_up], mesh.rank, STEPS))

    def steps(first, last):
        with collection.lookahead(stream[first:]) as ahead:
            for number in range(first, last):
                result = collection(next(ahead))
                outputs.append({name: value.detach().cpu() for name, value in result.items()})
                terms = enumerate(result.values())
                loss = sum((value.float() - 0.1 * i).square().sum() for i, value in terms)
                for _ in range(1 + number % 2):
                    loss.backward(retain_graph=True)
                rows.step()

    def all_rows():
        every = torch.arange(IDS)
        return {t.name: collection.rows(t.name, every) for t in tables}

    steps(0, 5)
    cached = collection.cached
    cached.caches[0] = replace(cached.caches[0], clock=RowClock(1, 1))
    apply_planned_bounds(cached)
    steps(5, 8)
    with rows.synchronized_view() as before:
        settled = all_rows()
        state = cached_state.capture_cache_state(collection.cached, before)
    for table in state["tables"].values():
        copies = table["copies"]
        copies["pending"][copies["ticks"] == 0] = 0  # whatever is there, it is not used
    with collection.lookahead(stream[8:]) as ahead:
        collection(next(ahead))
    collection.discard_batches()
    steps(8, STEPS)
    return asdict(collection.cached.counts), outputs, settled, all_rows(), state


def flat(value, name=""):
    """Yield (name, tensor) of all tensors in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in parts:
            yield from flat(item, f"{name}/{key}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LESS)) for kind in KINDS],
)
def test_every_optimizer_and_kind_of_row(kind, device):
    world = World(ranks_per_host=2)
    wanted = run_simulated(world, train_with_copies, kind, "dram", "cpu")
    result = run_simulated(world, train_with_copies, kind, "hbm", device)
    for one, other in zip(wanted, result, strict=True):
        assert one[0] == other[0] and all(one[0].values())  # whatever can happen does
        pairs = list(zip(flat(one), flat(other), strict=True))
        assert len(pairs) > 200
        for (name, want), (same, have) in pairs:
            assert name == same
            if device == "cpu":
                assert torch.equal(want, have), name
            elif want.is_floating_point():
                loose = 2e-2 if kind in ("bfloat16", "float16") else 1e-4
                torch.testing.assert_close(want, have, rtol=loose, atol=loose)
