"""Plans are pure values; a budget is shared fairly and never exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade import Feature, Mesh, Plan, Table, build_plan
from colonnade.errors import ConfigError
from colonnade.exchange import open_exchange
from colonnade.lookup.layout import declare
from colonnade.plan.plan import explain
from colonnade.sizes import Place
from colonnade.store.budget import capacity_rows, slot_bytes
from colonnade.topology.sharding import Shard, replicated, row_wise, table_wise
from colonnade.topology.world import World
from colonnade.wire.codec import Codecs

TABLES = st.lists(
    st.builds(
        lambda name, dim, rows: Table(str(name), dim, rows=rows),
        st.uuids(), st.integers(1, 70), st.one_of(st.none(), st.integers(1, 10**9)),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


SIZES = st.integers(20_000, 10**12)


@given(TABLES, st.integers(1, 10**9), st.integers(1, 9))
def test_budget_is_shared_and_kept(tables, budget, num_ranks):
    rows = capacity_rows(tables, budget, [Shard(num_ranks)] * len(tables))
    assert all(n >= 1 for n in rows)
    # At least one row each; beyond that the budget holds.
    spent = sum(n * slot_bytes(t) for n, t in zip(rows, tables, strict=True) if n > 1)
    assert spent <= budget
    for n, table in zip(rows, tables, strict=True):
        if table.rows:
            assert n <= -(-table.rows // num_ranks)


PLACES = st.one_of(st.none(), st.builds(Place, st.just("/m"), st.one_of(st.none(), SIZES)))


@given(TABLES, st.one_of(st.none(), SIZES), PLACES, st.integers(1, 1000), st.integers(0, 9))
def test_plans_round_trip(tables, budget, mapped, num_ranks, staleness):
    plan = build_plan(
        tables,
        num_ranks,
        dram_bytes=budget,
        mapped=mapped,
        ssd=(Place("/a"), Place("/b", 5)),
        staleness_steps=staleness,
        write_budget=7,
        codecs=Codecs("bf16", "int8", "fp16"),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert len(explain(plan, tables)) == len(tables)
    if budget is None:
        assert not plan.needs_backing
    spent = {"dram": 0, "mapped": 0}
    for table, planned in zip(tables, plan.tables, strict=True):
        spent[planned.tier] += planned.capacity_rows * slot_bytes(table)
        assert planned.rest == ("-" if planned.fits else "ssd")
        if planned.tier == "mapped":
            assert planned.fits
    if budget is not None:
        assert spent["dram"] <= budget + sum(map(slot_bytes, tables))  # a row each at least
    if mapped is None:
        assert spent["mapped"] == 0
    elif mapped.bytes is not None:
        assert spent["mapped"] <= mapped.bytes


def test_single_tables_have_memory_of_their_own():
    tables = [Table(name, 16, rows=10**6) for name in ("a", "b", "c")]
    row = slot_bytes(tables[0])
    plan = build_plan(tables, dram_bytes=600 * row, table_bytes={"b": 200 * row})
    assert [t.capacity_rows for t in plan.tables] == [200, 200, 200]
    plan = build_plan(tables, dram_bytes=600 * row, table_bytes={"b": 400 * row})
    assert [t.capacity_rows for t in plan.tables] == [100, 400, 100]
    plan = build_plan(tables, table_bytes={"b": 400 * row})
    assert [t.fits for t in plan.tables] == [True, False, True]
    assert plan.tables[1].capacity_rows == 400 and plan.tables[1].rest == "run folder"


def test_what_memory_does_not_hold_lies_in_mapped_and_leaves_its_share_to_the_rest():
    tables = [
        Table("small", 16, rows=10),
        Table("mid", 16, rows=1000),
        Table("big", 16, rows=10**6),
    ]
    row = slot_bytes(tables[0])
    plan = build_plan(tables, dram_bytes=510 * row, mapped=Place("/m", 1500 * row))
    assert [t.tier for t in plan.tables] == ["dram", "mapped", "dram"]
    assert [t.capacity_rows for t in plan.tables] == [10, 1000, 500]
    assert [t.fits for t in plan.tables] == [True, True, False]


def test_auto_looks_no_further_ahead_than_there_is_something_to_wait_for():
    table = Table("t", 16, rows=1000)
    assert build_plan([table], lookahead="auto").lookahead == 2
    assert build_plan([table], lookahead="auto", dram_bytes=5000).lookahead == "auto"
    assert build_plan([table], 2, lookahead="auto", dram_bytes=5000).lookahead == 8
    assert build_plan([table], lookahead=0, dram_bytes=5000).lookahead == 0


def test_small_tables_stay_whole():
    tables = [Table("small", 16, rows=10), Table("big", 16, rows=10**6)]
    plan = build_plan(tables, dram_bytes=10**6)
    assert plan.tables[0].fits and not plan.tables[1].fits


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exchange": "rowz"}, "rowz"),
        ({"codecs": Codecs("int9")}, "int9"),
        ({"codecs": Codecs(dense="int7")}, "int7"),
        ({"dram_bytes": 0}, "dram_bytes=0"),
        ({"dram_bytes": 43}, r"plan\.memory\.dram: got 43 bytes, wanted at least 44"),
        ({"dram_bytes": 60, "table_bytes": {"t": 61}}, "wanted at least 61"),
        ({"table_bytes": {"t": 43}}, r"plan\.memory\.tables\.t: .* at least 44"),
        ({"table_bytes": {"u": 43}}, "'u', wanted a table of this model: t"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"lookahead": "deep"}, "lookahead=deep"),
        ({"staleness_steps": -1}, "staleness_steps=-1"),
    ],
)
def test_impossible_plans_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_plan([Table("t", 4)], **settings)


def test_memory_of_a_rank_is_for_the_tables_it_has():
    """Two tables that a budget holds half of, one on each rank: each is whole there."""
    tables = [Table("a", 4, rows=100), Table("b", 4, rows=100), Table("c", 4, rows=10)]
    budget = 110 * slot_bytes(tables[0])
    apart = {"a": table_wise(0), "b": table_wise(1), "c": replicated(2)}
    plan = build_plan(tables, 2, dram_bytes=budget, shardings=apart)
    assert [table.capacity_rows for table in plan.tables] == [100, 100, 10]
    assert not plan.needs_backing
    assert [table.exchange for table in plan.tables] == ["rows", "rows", "replicated"]
    together = {"a": table_wise(1), "b": table_wise(1), "c": replicated(2)}
    plan = build_plan(tables, 2, dram_bytes=budget, shardings=together)
    assert [table.capacity_rows for table in plan.tables] == [50, 50, 10]
    assert [table.fits for table in plan.tables] == [False, False, True]
    assert Plan.from_json(plan.to_json()) == plan


def test_shardings_that_this_world_cannot_use():
    tables, features = [Table("a", 4, rows=100)], [Feature("a", "a")]
    with pytest.raises(ConfigError, match=r"got a sharding on rank 2, wanted ranks 0 \.\. 1"):
        build_plan(tables, 2, shardings={"a": table_wise(2)})
    with pytest.raises(ConfigError, match="got 'b', wanted a table of this model: a"):
        build_plan(tables, 2, shardings={"b": table_wise(0)})
    declaration, mesh = declare(tables, features, {}), Mesh(World(ranks_per_host=2))
    for sharding, exchange, message in (
        (table_wise(2), "rows", "sharding on rank 2, wanted ranks"),
        (replicated(1), "rows", "copies on 1 of 2 ranks, wanted one on each"),
        (row_wise(2), "replicated", "exchange=replicated for rows that are sharded row_wise"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_exchange(declaration, mesh, exchanges=[exchange], shardings=[sharding])
