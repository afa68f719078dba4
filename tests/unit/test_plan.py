"""Plans are pure values; a budget is shared fairly and never exceeded."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade import EmbeddingCollection, Feature, Mesh, Plan, PlanConfig, Table, build_plan
from colonnade.errors import ConfigError, CorruptionError
from colonnade.exchange import TableExchange, open_exchange
from colonnade.lookup.layout import declare
from colonnade.plan.build import describe_planned_tables, find_row_files
from colonnade.plan.cost.memory import Budgets, demand_even_share, divide
from colonnade.plan.plan import Codecs
from colonnade.planning.planner import read_recorded_plan
from colonnade.sizes import StorageLocation
from colonnade.store.budget import row_bytes_below_dram, slot_bytes
from colonnade.topology.sharding import replicated, row_wise, table_wise
from colonnade.topology.world import World

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
    shares = [
        demand_even_share(
            str(t),
            slot_bytes(table),
            2**27 if table.rows is None else -(-table.rows // num_ranks),
            is_open=table.rows is None,
        )
        for t, table in enumerate(tables)
    ]
    rows = [memory.rows for memory in divide(shares, Budgets(budget))]
    assert all(n >= 1 for n in rows)
    # At least one row each; beyond that the budget holds.
    spent = sum(n * slot_bytes(t) for n, t in zip(rows, tables, strict=True) if n > 1)
    assert spent <= budget
    for n, table in zip(rows, tables, strict=True):
        if table.rows:
            assert n <= -(-table.rows // num_ranks)


PLACES = st.one_of(st.none(), st.just("/m"), SIZES.map("/m:{}".format))


@given(TABLES, st.one_of(st.none(), SIZES), PLACES, st.integers(1, 1000), st.integers(0, 9))
def test_plans_round_trip(tables, budget, mapped, num_ranks, staleness):
    plan = build_plan(
        tables,
        num_ranks,
        PlanConfig(
            memory={
                "dram": budget,
                "mapped": mapped if budget else None,
                "ssd": ["/a", "/b:5"],
            },
            staleness_steps=staleness,
            write_budget="7MB",
            codec={"values": "bf16", "gradients": "int8", "dense": "fp16"},
        ),
    )
    assert (
        plan.ssd == (StorageLocation("/a"), StorageLocation("/b", 5))
        and plan.write_budget == 7_000_000
    )
    assert plan.codecs == Codecs("bf16", "int8", "fp16")
    assert Plan.from_json(plan.to_json()) == plan
    assert len(describe_planned_tables(plan, tables)) == len(tables)
    if budget is None:
        assert not plan.needs_backing
    spent = {"dram": 0, "mapped": 0}
    for table, planned in zip(tables, plan.tables, strict=True):
        spent[planned.tier] += planned.capacity_rows * slot_bytes(table)
        assert find_row_files(plan, planned) == ("-" if planned.fits else "ssd")
        if planned.tier == "mapped":
            assert planned.fits
    if budget is not None:
        assert spent["dram"] <= budget + sum(map(slot_bytes, tables))  # a row each at least
    if plan.mapped is None:
        assert spent["mapped"] == 0
    elif plan.mapped.bytes is not None:
        cached = [
            p.mapped_rows * row_bytes_below_dram(t)
            for p, t in zip(plan.tables, tables, strict=True)
        ]
        assert spent["mapped"] + sum(cached) <= plan.mapped.bytes
    for table, planned in zip(tables, plan.tables, strict=True):
        if planned.fits or plan.mapped is None or plan.mapped.bytes is None:
            assert planned.mapped_rows == 0
        elif table.rows is not None:
            assert planned.capacity_rows + planned.mapped_rows <= -(-table.rows // num_ranks)


def test_single_tables_have_memory_of_their_own():
    tables = [Table(name, 16, rows=10**6) for name in ("a", "b", "c")]
    row = slot_bytes(tables[0])

    def plan_with(**memory):
        return build_plan(tables, 1, PlanConfig(memory=memory))

    plan = plan_with(dram=600 * row, tables={"b": 200 * row})
    assert [t.capacity_rows for t in plan.tables] == [200, 200, 200]
    plan = plan_with(dram=600 * row, tables={"b": 400 * row})
    assert [t.capacity_rows for t in plan.tables] == [100, 400, 100]
    plan = plan_with(tables={"b": 400 * row})
    assert [t.fits for t in plan.tables] == [True, False, True]
    assert (
        plan.tables[1].capacity_rows == 400 and find_row_files(plan, plan.tables[1]) == "run folder"
    )


def test_what_memory_does_not_hold_lies_in_mapped_and_leaves_its_share_to_the_rest():
    tables = [
        Table("small", 16, rows=10),
        Table("mid", 16, rows=1000),
        Table("big", 16, rows=10**6),
    ]
    row = slot_bytes(tables[0])
    memory = {"dram": 510 * row, "mapped": f"/m:{1500 * row}"}
    plan = build_plan(tables, 1, PlanConfig(memory=memory))
    assert [t.tier for t in plan.tables] == ["dram", "mapped", "dram"]
    assert [t.capacity_rows for t in plan.tables] == [10, 1000, 500]
    assert [t.fits for t in plan.tables] == [True, True, False]


def test_auto_looks_no_further_ahead_than_there_is_something_to_wait_for():
    table = Table("t", 16, rows=1000)
    tight = PlanConfig(lookahead="auto", memory={"dram": 5000})
    assert build_plan([table], 1, PlanConfig(lookahead="auto")).lookahead == 2
    assert build_plan([table], 1, tight).lookahead == "auto"
    assert build_plan([table], 2, tight).lookahead == 8
    assert build_plan([table], 1, tight.model_copy(update={"lookahead": 0})).lookahead == 0


def test_small_tables_stay_whole():
    tables = [Table("small", 16, rows=10), Table("big", 16, rows=10**6)]
    plan = build_plan(tables, 1, PlanConfig(memory={"dram": 10**6}))
    assert plan.tables[0].fits and not plan.tables[1].fits


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exchange": "rowz"}, "rowz"),
        ({"codec": {"values": "int9"}}, "int9"),
        ({"codec": {"dense": "int7"}}, "int7"),
        ({"memory": {"dram": 0}}, "got 0, wanted a size of at least 1 byte"),
        ({"memory": {"dram": 43}}, r"plan\.memory\.dram: got 43 bytes, wanted at least 44"),
        ({"memory": {"dram": 60, "tables": {"t": 61}}}, "raise dram, or give them less"),
        ({"memory": {"tables": {"t": 43}}}, r"plan\.memory\.tables\.t: .* at least 44"),
        ({"memory": {"tables": {"u": 43}}}, "'u', wanted a table of this model: t"),
        ({"lookahead": -1}, "got -1, wanted a whole number, 0 or more, or auto"),
        ({"lookahead": "deep"}, "got 'deep', wanted a whole number, 0 or more, or auto"),
        ({"staleness_steps": -1}, "got -1, wanted a number of steps"),
        ({"exchange": "auto", "servers": 1}, "only a sample can decide"),
        ({"sharding": "table_wise", "servers": 1}, "only a sample can decide"),
        (
            {"tables": {"t": {"replicated_rows": 3}}, "servers": 1},
            "got 3, the number of rows, wanted their ids",
        ),
        ({"towers": "towers.json", "servers": 1}, "'towers.json', wanted a number of towers"),
    ],
)
def test_impossible_plans_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        build_plan([Table("t", 4)], settings.get("servers", 0) + 1, PlanConfig(**settings))


def test_memory_of_a_rank_is_for_the_tables_it_has():
    """Two tables that a budget holds half of, one on each rank: each is whole there."""
    tables = [Table("a", 4, rows=100), Table("b", 4, rows=100), Table("c", 4, rows=10)]
    budget = 110 * slot_bytes(tables[0])
    own = {
        "a": {"sharding": "table_wise", "ranks": [0]},
        "b": {"sharding": table_wise(1)},
        "c": {"sharding": "replicated"},
    }
    apart = PlanConfig(memory={"dram": budget}, tables=own)
    plan = build_plan(tables, 2, apart)
    assert [table.capacity_rows for table in plan.tables] == [100, 100, 10]
    assert not plan.needs_backing
    assert [table.exchange for table in plan.tables] == ["rows", "rows", "replicated"]
    together = PlanConfig(memory={"dram": budget}, tables=own | {"a": {"sharding": table_wise(1)}})
    assert PlanConfig.model_validate(together.model_dump()) == together
    plan = build_plan(tables, 2, together)
    assert [table.capacity_rows for table in plan.tables] == [50, 50, 10]
    assert [table.fits for table in plan.tables] == [False, False, True]
    assert Plan.from_json(plan.to_json()) == plan


def test_shardings_that_this_world_cannot_use():
    tables, features = [Table("a", 4, rows=100)], [Feature("a", "a")]
    with pytest.raises(
        ConfigError, match=r"a\.sharding: got ranks \[2\], but this world has ranks 0 \.\. 1"
    ):
        build_plan(tables, 2, PlanConfig(tables={"a": {"sharding": table_wise(2)}}))
    with pytest.raises(ConfigError, match="got 'b', wanted a table of this model: a"):
        build_plan(tables, 2, PlanConfig(tables={"b": {"sharding": table_wise(0)}}))
    declaration, mesh = declare(tables, features, {}), Mesh(World(ranks_per_host=2))
    for sharding, exchange, message in (
        (table_wise(2), "rows", "sharding on rank 2, wanted ranks"),
        (replicated(1), "rows", "copies on 1 of 2 ranks, wanted one on each"),
        (row_wise(2), "replicated", "exchange=replicated for rows that are sharded row_wise"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_exchange(declaration, mesh, [TableExchange(exchange=exchange, sharding=sharding)])


def test_a_plan_of_other_tables_is_refused():
    tables = [Table("a", 4, rows=10), Table("b", 4, rows=10)]
    plan = build_plan(tables[::-1])
    collection = EmbeddingCollection(tables, [Feature("a", "a"), Feature("b", "b")])
    with pytest.raises(ConfigError, match="the plan is for tables b, a, this collection has a, b"):
        collection.open(plan)


def test_plans_and_settings_that_name_nothing():
    tables = [Table("a", 4, rows=10)]
    plan = build_plan(tables, 2, PlanConfig())
    for old, new, message in (
        ('"exchange": "rows"', '"exchange": "row"', "got exchange 'row', wanted one of rows, "),
        ('"staleness_steps": null', '"staleness_steps": "-1"', "got staleness_steps='-1', wanted"),
        ('"kind": "row_wise"', '"kind": "foo"', "got kind 'foo', wanted one of row_wise"),
    ):
        text = plan.to_json().replace(old, new)
        assert text != plan.to_json()
        with pytest.raises(ConfigError, match=message):
            Plan.from_json(text)
    for settings, message in (
        ({"exchnge": "rows"}, "unknown setting 'exchnge'; did you mean exchange?"),
        ({"tables": {"a": {"exchnge": "rows"}}}, "did you mean tables.a.exchange?"),
        ({"exchange": "row"}, "exchange: got 'row', did you mean rows?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            PlanConfig(**settings)
    with pytest.raises(ConfigError, match="got 3 towers on 4 ranks"):
        build_plan(tables, 4, PlanConfig(towers=3))


@pytest.mark.parametrize(
    "harm", [{"tables": None}, {"tables": [{"sharding": None}]}, {"codecs": []}, {"more": 1}]
)
def test_a_damaged_plan_is_refused_and_not_resumed(harm, tmp_path):
    tables, world = [Table("a", 4, rows=10)], World(ranks_per_host=2)
    text = json.dumps(json.loads(build_plan(tables, world).to_json()) | harm)
    with pytest.raises(CorruptionError, match=r"plan.json: got fields that no plan has .* wanted"):
        Plan.from_json(text)
    (tmp_path / "plan.json").write_text(text)
    assert read_recorded_plan(tmp_path, tables, world, PlanConfig()) is None
