"""Memory is divided as three frozen algorithms divide it (`tests/references/memory_reference.py`), on random cases."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from references.memory_reference import (
    DoesNotFit,
    divide_evenly,
    divide_mapped_cache,
    divide_memory_on_ranks,
)

from colonnade import (
    SGD,
    Adagrad,
    Adam,
    PlanConfig,
    Table,
    World,
    build_plan,
    column_wise,
    replicated,
    row_wise,
)
from colonnade.config.plan import MemoryConfig
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.plan.cost.memory import Budgets, MemoryDemand, divide, list_rank_demands
from colonnade.store.budget import slot_bytes
from colonnade.topology.sharding import Sharding, table_wise

HOSTS, RANKS = 2, 3


def choose_sharding(rng: random.Random, num_ranks: int) -> Sharding:
    if num_ranks == 1:
        return row_wise(1)
    owners = tuple(sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks))))
    choices = [
        row_wise(num_ranks),
        table_wise(rng.randrange(num_ranks)),
        replicated(num_ranks),
        Sharding("host_wise", owners),
        column_wise(owners[:4]),
    ]
    if num_ranks == HOSTS * RANKS:
        choices.append(Sharding("grid", tuple(range(num_ranks)), HOSTS))
    return rng.choice(choices)


def draw_tables(rng: random.Random) -> list[Table]:
    return [
        Table(
            f"t{t}",
            rng.choice([4, 8, 30, 64]),
            rows=rng.choice([None, rng.randint(1, 40), rng.randint(40, 3000)]),
            dtype=rng.choice(["float32", "float64"]),
            optimizer=rng.choice([SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)]),  # for any columns
        )
        for t in range(rng.randint(1, 6))
    ]


def draw_memory(rng: random.Random, tables: list[Table]) -> MemoryConfig:
    whole = sum(slot_bytes(table) * (table.rows or 500) for table in tables)
    sizes = [None, int(whole * rng.random()), int(whole * 0.1 * rng.random()), 2 * whole]
    fixed = {
        table.name: slot_bytes(table) * rng.randint(1, 60) for table in tables if rng.random() < 0.2
    }
    mapped = rng.choice([None, None, "/m", f"/m:{int(whole * rng.random()) + 1}"])
    return MemoryConfig(dram=rng.choice(sizes), hbm=rng.choice(sizes), mapped=mapped, tables=fixed)


@pytest.mark.parametrize("group", range(8))
def test_a_plan_has_the_rows_of_an_even_split(group):
    """Also with tables' own bytes, device memory, mapped memory, hot rows, slices and uneven owners."""
    compared = 0
    for seed in range(100 * group, 100 * (group + 1)):
        rng = random.Random(seed)
        tables = draw_tables(rng)
        num_hosts = rng.choice([1, HOSTS])
        world = World(num_hosts=num_hosts, ranks_per_host=rng.choice([1, RANKS]))
        settings = {}
        for table in tables:
            sharding = choose_sharding(rng, world.num_ranks)
            hot = ()
            if sharding.kind in ("row_wise", "host_wise", "table_wise") and rng.random() < 0.3:
                hot = tuple(range(min(5, table.rows or 5)))
            exchange = None if sharding.is_replicated else "pooled"
            settings[table.name] = {
                "sharding": sharding,
                "exchange": exchange,
                "replicated_rows": hot,
            }
        try:
            memory = draw_memory(rng, tables)
            plan = build_plan(tables, world, PlanConfig(memory=memory, tables=settings))
        except ConfigError:
            continue
        compared += 1
        rows = [(t.capacity_rows, t.hbm_rows, t.tier, t.fits) for t in plan.tables]
        assert rows == divide_evenly(tables, plan.shardings, world.num_ranks, memory), seed
        assert [t.mapped_rows for t in plan.tables] == divide_mapped_cache(plan, tables), seed
    assert compared > 60


def draw_demand(rng: random.Random, name: str) -> MemoryDemand:
    max_rows = rng.randint(1, 300)
    points = sorted({rng.uniform(0, max_rows) for _ in range(rng.randint(1, 12))} | {max_rows})
    reads = [*sorted((rng.uniform(0, 50) for _ in points[1:]), reverse=True), 0.0]
    least = rng.randint(1, max(1, max_rows // rng.choice([1, 5, 20])))
    demand = MemoryDemand(
        name,
        rng.randint(1, 40),
        least,
        max_rows,
        tuple(map(float, points)),
        tuple(reads),
        5.0,
        1.0,
        is_open=rng.random() < 0.3,
        window_rows=rng.randint(least, max_rows),
    )
    kind = rng.random()
    if kind < 0.15:  # its own bytes
        return replace(
            demand,
            least_rows=max_rows,
            window_rows=max_rows,
            rows=(0.0,),
            reads=(rng.uniform(0, 9),),
        )
    return demand.limit_to(rng.randint(1, 400)) if kind < 0.3 else demand


@pytest.mark.parametrize("group", range(6))
def test_memory_follows_the_reads_that_it_saves(group):
    compared = 0
    for seed in range(100 * group, 100 * (group + 1)):
        rng = random.Random(seed)
        demands = [draw_demand(rng, f"t{t}") for t in range(rng.randint(1, 6))]
        num_ranks = rng.choice([1, 2, 6])
        shardings = [choose_sharding(rng, num_ranks) for _ in demands]
        whole = sum(demand.max_bytes for demand in demands)
        dram = rng.choice([None, int(whole * rng.random()), int(whole * rng.random()), 2 * whole])
        mapped = rng.choice([0, 0, None, int(whole * rng.random())])
        try:
            reference = divide_memory_on_ranks(demands, shardings, num_ranks, dram, mapped)
        except DoesNotFit:
            with pytest.raises(BudgetExceeded):
                divide_on_ranks(demands, shardings, num_ranks, dram, mapped)
            continue
        compared += 1
        result = divide_on_ranks(demands, shardings, num_ranks, dram, mapped)
        assert [(m.name, m.rows, m.tier) for m in result] == [
            (m.name, m.rows, m.tier) for m in reference
        ], seed
        if dram is not None:
            assert np.allclose([m.reads for m in result], [m.reads for m in reference]), seed
    assert compared > 40


def divide_on_ranks(demands, shardings, num_ranks, dram, mapped):
    return divide(demands, Budgets(dram, mapped), list_rank_demands(shardings, num_ranks))
