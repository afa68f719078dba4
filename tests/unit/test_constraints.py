"""Shardings and exchanges of a configuration: what counts more, what is left open, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from plans import by_table

from colonnade import (
    LAMB,
    SGD,
    Adam,
    MaxRowsEviction,
    RowWiseAdam,
    Table,
    World,
)
from colonnade.config.plan import PlanConfig
from colonnade.config.run import build_config, dump_config, override_settings
from colonnade.errors import ConfigError
from colonnade.plan.build import build_plan, describe_planned_tables
from colonnade.plan.constraints import is_settled, read_table_constraints, resolve_plan_config
from colonnade.plan.plan import Plan
from colonnade.plan.search.candidates import Constraint
from colonnade.topology.sharding import Sharding, build_hot_rows, column_wise, grid, table_wise

TABLES = [Table("a", 4, rows=10), Table("b", 4)]
WORLD = World(num_hosts=2, ranks_per_host=2)


def constraints_of(**plan):
    return read_table_constraints(build_config({"plan": plan}).plan, TABLES, WORLD)


def test_without_a_word_rows_are_dealt_to_all_and_nothing_is_chosen():
    assert constraints_of()["a"] == Constraint("row_wise", "rows")
    assert is_settled(build_config({}).plan, TABLES, WORLD)
    plan = build_plan(TABLES, WORLD)
    assert {(t.sharding.kind, t.exchange) for t in plan.tables} == {("row_wise", "rows")}


def test_a_table_s_own_word_counts_more():
    own = {"a": {"sharding": "table_wise", "ranks": [2]}}
    assert constraints_of(exchange="pooled", tables=own) == {
        "a": Constraint("table_wise", "pooled", (2,)), "b": Constraint("row_wise", "pooled"),
    }  # fmt: skip
    assert constraints_of(exchange="auto", sharding="auto")["a"] == Constraint()
    copies = Constraint("replicated")
    assert constraints_of(sharding="replicated") == {"a": copies, "b": copies}
    assert (
        constraints_of(exchange="pooled", tables={"a": {"sharding": "replicated"}})["a"] == copies
    )
    own = {"a": {"sharding": "row_wise", "exchange": "pooled"}}
    mixed = constraints_of(sharding="replicated", tables=own)
    assert mixed == {"a": Constraint("row_wise", "pooled"), "b": copies}


@pytest.mark.parametrize(
    "plan, is_open",
    [({"exchange": "auto"}, True), ({"sharding": "table_wise"}, True), ({"sharding": "replicated"}, False),
     ({"sharding": "host_wise"}, True), ({"exchange": "pooled"}, False), ({"exchange": "partials"}, False),
     ({"tables": {"a": {"sharding": "host_wise", "ranks": [2, 3]}}}, False)],
)  # fmt: skip
def test_what_is_left_open_is_chosen_from_a_profile(plan, is_open):
    config = build_config({"plan": plan}).plan
    assert is_settled(config, TABLES, WORLD) != is_open
    if not config.tables:
        assert is_settled(config, TABLES, World())  # one rank: nothing to choose


def test_what_is_said_is_planned():
    config = build_config({"plan": {"tables": {"b": {"sharding": "table_wise", "ranks": [3]}}}})
    plan = build_plan(TABLES, WORLD, config.plan)
    assert [table.sharding.ranks for table in plan.tables] == [(0, 1, 2, 3), (3,)]


def test_a_settled_plan_leaves_nothing_open():
    """A table that a sample decides on is row-wise until then; in a world of one rank nothing is sent."""
    config = build_config({"plan": {"exchange": "pooled", "sharding": "table_wise"}}).plan
    with pytest.raises(
        ConfigError, match=r"'a'.* only a sample can decide.* set plan\.tables\.a\.sharding"
    ):
        build_plan(TABLES, WORLD, config)
    for world in (WORLD, World()):
        plan = build_plan(TABLES, world, resolve_plan_config(config, TABLES, world))
        assert {(t.sharding.kind, t.exchange) for t in plan.tables} == {("row_wise", "rows")}
    hot = resolve_plan_config(config, TABLES, WORLD, table_hot_ids={"a": [3, 1]})
    assert build_plan(TABLES, WORLD, hot).tables[0].sharding.hot.ids == (1, 3)
    assert build_plan(TABLES, 1, PlanConfig(exchange="pooled")).exchanges == ("pooled",)


def test_a_file_holds_what_python_gives():
    """A `Sharding` and ids of rows come back from a configuration's file, and go on under `override_settings`."""
    own = {"sharding": table_wise(2), "replicated_rows": torch.tensor([5, 3])}
    config = build_config({"plan": {"tables": {"a": own}}})
    text = yaml.safe_load(dump_config(config))
    assert build_config(text) == override_settings(config, {}) == config
    plan = build_plan(TABLES, WORLD, build_config(text).plan)
    assert plan.tables[0].sharding == replace(table_wise(2), hot=build_hot_rows([3, 5], 4))
    assert is_settled(config.plan, TABLES, WORLD)
    assert resolve_plan_config(config.plan, TABLES, WORLD).tables["a"].replicated_rows == (3, 5)


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"tables": {"c": {}}}, "plan.tables: got 'c', wanted a table of this model: a, b"),
        ({"tables": {"a": {"sharding": table_wise(4)}}}, "a.sharding: got ranks [4], but this world has ranks 0 .. 3"),
        ({"tables": {"a": {"sharding": {"kind": "grid"}}}}, "wanted its kind and ranks"),
        ({"tables": {"a": {"sharding": "row_wize"}}}, "did you mean row_wise"),
        ({"tables": {"a": {"replicated_rows": "some"}}}, "got 'some', wanted a number of rows"),
        ({"tables": {"a": {"sharding": "table_wise", "ranks": [4]}}}, "this world has ranks 0 .. 3"),
        ({"tables": {"a": {"sharding": "host_wise", "ranks": [1, 2]}}}, "wanted all ranks of one host, such as"),
        ({"tables": {"a": {"sharding": "table_wise", "ranks": [0, 1]}}}, "the one rank of a table_wise"),
        ({"tables": {"a": {"ranks": [0]}}}, "wanted sharding=table_wise, host_wise"),
        ({"tables": {"a": {"sharding": "host_wise", "ranks": [1, 1]}}}, "each once"),
        ({"tables": {"a": {"exchange": "pooled", "sharding": "replicated"}}}, "leave exchange out"),
        ({"sharding": "replicated", "tables": {"b": {"exchange": "rows"}}}, "leave exchange out"),
        ({"exchange": "replicated"}, "got 'replicated', choose from rows, pooled"),
        ({"tables": {"a": {"sharding": "grid", "ranks": [0, 1]}}}, "got 1 of 2 hosts, wanted two or more"),
        ({"tables": {"a": {"sharding": "grid", "ranks": [0, 1, 2]}}}, "all ranks of two or more hosts"),
        ({"tables": {"a": {"sharding": "column_wise", "ranks": [0, 4]}}}, "this world has ranks 0 .. 3"),
        ({"exchange": "partials", "sharding": "column_wise"}, "evaluated on whole rows, wanted table_wise"),
        ({"exchange": "row"}, "plan.exchange"),
        ({"tables": {"a": {"exchnage": "rows"}}}, "did you mean plan.tables.a.exchange"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(plan, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        constraints_of(**plan)


def test_a_table_is_forced_from_the_command_line():
    config = override_settings(build_config({}), {"plan.tables.a.exchange": "pooled"})
    assert config.plan.tables["a"].exchange == "pooled"
    with pytest.raises(ConfigError, match=r"did you mean plan\.tables\.a\.sharding"):
        override_settings(build_config({}), {"plan.tables.a.shading": "row_wise"})


def test_rows_of_gpus_are_not_foretold():
    settings = {
        "plan": {"exchange": "auto", "memory": {"hbm": "1GiB"}},
        "train": {"device": "cuda"},
    }
    with pytest.raises(ConfigError, match="which predictions do not cover"):
        build_config(settings)


def cut(plan, tables=None, world=WORLD):
    return build_plan(tables or CUTTABLE, world, build_config({"plan": plan}).plan)


CUTTABLE = [Table("a", 6, rows=10, optimizer=Adam(lr=0.1)), Table("b", 4, optimizer=SGD(lr=0.1))]


def test_columns_are_cut_as_is_said():
    plan = cut({"sharding": "column_wise", "tables": {"a": {"sharding": "grid"}}})
    assert [str(table.sharding) for table in plan.tables] == [
        "grid, ranks 0 .. 3, 2 slices", "column_wise, ranks 0 .. 3",
    ]  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan
    assert [line["rows per rank"] for line in describe_planned_tables(plan, CUTTABLE)] == [
        "5",
        "any",
    ]
    several = cut({"tables": {"b": {"sharding": "column_wise", "ranks": [3, 1]}}})
    assert several.tables[1].sharding == column_wise((1, 3)) == Sharding("column_wise", (1, 3), 2)
    assert several.tables[1].sharding.slice_shardings[1].ranks == (3,)
    assert grid(WORLD, [1, 0]).slice_shardings[1].ranks == (2, 3)
    assert cut({"sharding": "grid"}, world=World()).tables[0].sharding.kind == "row_wise"


def test_memory_is_counted_by_slice():
    """Memory budgets of a table cut in two hold twice the rows that it holds of the whole one."""
    wide = [Table("a", 64, optimizer=SGD(lr=0.1)), Table("b", 64, optimizer=SGD(lr=0.1))]
    pair = {"a": column_wise([0, 1]), "b": column_wise([0, 1])}
    whole = build_plan(wide, 2, PlanConfig(memory={"dram": 1_000_000})).tables[0].capacity_rows
    sliced = (
        build_plan(wide, 2, PlanConfig(memory={"dram": 1_000_000}, tables=by_table(sharding=pair)))
        .tables[0]
        .capacity_rows
    )
    assert 1.7 * whole < sliced < 2 * whole
    own = build_plan(
        wide,
        2,
        PlanConfig(
            memory={"dram": 1_000_000, "tables": {"a": 100_000}}, tables=by_table(sharding=pair)
        ),
    )
    assert 500 < own.tables[0].capacity_rows < 1000 < own.tables[1].capacity_rows


@pytest.mark.parametrize(
    "table, words",
    [
        (Table("a", 6, optimizer=RowWiseAdam(lr=0.1)), "optimizer rowwise_adam; give it sgd, adagrad"),
        (Table("a", {"x": 1, "y": 5}, optimizer={"x": SGD(lr=1), "y": LAMB(lr=1)}), "lamb of part 'y'"),
        (Table("a", 6, optimizer=SGD(lr=0.1), max_norm=1.0), "max_norm=1.0; leave it out"),
        (Table("a", 6, optimizer=SGD(lr=1), eviction=MaxRowsEviction(rows=9, by="norm")), "by norm"),
        (Table("a", 3, optimizer=SGD(lr=1)), "4 slices for rows of 3 columns"),
    ],
)  # fmt: skip
def test_what_needs_whole_rows_is_not_cut(table, words):
    with pytest.raises(ConfigError, match=words):
        cut({"sharding": "column_wise"}, [table])


def test_parts_that_stay_whole_may_have_any_optimizer():
    table = Table("a", {"x": 3, "y": 3}, optimizer={"x": LAMB(lr=1), "y": SGD(lr=1)})
    assert (
        build_plan([table], 2, PlanConfig(tables={"a": {"sharding": column_wise([0, 1])}}))
        .tables[0]
        .fits
    )


def test_grids_need_hosts():
    with pytest.raises(ConfigError, match="got 1 of 1 hosts, wanted two or more"):
        cut({"sharding": "grid"}, world=World(ranks_per_host=4))
