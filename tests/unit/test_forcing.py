"""What a configuration says of shardings and exchanges: what counts more, what is left open, what is refused."""

from __future__ import annotations

import pytest

from colonnade import Table, World
from colonnade.config import build_config, override
from colonnade.errors import ConfigError
from colonnade.plan.choice import Forced
from colonnade.plan.forcing import forced_by, is_settled
from colonnade.plan.plan import plan_of

TABLES = [Table("a", 4, rows=10), Table("b", 4)]
WORLD = World(num_hosts=2, ranks_per_host=2)


def said(**plan):
    return forced_by(build_config({"plan": plan}).plan, TABLES, WORLD)


def test_without_a_word_rows_are_dealt_to_all_and_nothing_is_chosen():
    assert said()["a"] == Forced("row_wise", "rows")
    assert is_settled(build_config({}).plan, TABLES, WORLD)
    plan = plan_of(build_config({}).plan, TABLES, WORLD)
    assert {(t.sharding.kind, t.exchange) for t in plan.tables} == {("row_wise", "rows")}


def test_a_table_s_own_word_counts_more():
    own = {"a": {"sharding": "table_wise", "ranks": [2]}}
    assert said(exchange="pooled", tables=own) == {
        "a": Forced("table_wise", "pooled", (2,)), "b": Forced("row_wise", "pooled"),
    }  # fmt: skip
    assert said(exchange="auto", sharding="auto")["a"] == Forced()
    copies = Forced("replicated", "replicated")
    assert said(sharding="replicated") == said(exchange="replicated") == {"a": copies, "b": copies}
    assert said(exchange="pooled", tables={"a": {"sharding": "replicated"}})["a"] == copies
    mixed = said(exchange="replicated", tables={"a": {"exchange": "pooled"}})
    assert mixed["a"].exchange == "pooled" and mixed["b"] == copies


@pytest.mark.parametrize(
    "plan, is_open",
    [({"exchange": "auto"}, True), ({"sharding": "table_wise"}, True), ({"sharding": "replicated"}, False),
     ({"sharding": "host_wise"}, True), ({"exchange": "pooled"}, False),
     ({"tables": {"a": {"sharding": "host_wise", "ranks": [2, 3]}}}, False)],
)  # fmt: skip
def test_what_is_left_open_is_chosen_from_a_profile(plan, is_open):
    config = build_config({"plan": plan}).plan
    assert is_settled(config, TABLES, WORLD) != is_open
    if not config.tables:
        assert is_settled(config, TABLES, World())  # one rank: nothing to choose


def test_what_is_said_is_planned():
    config = build_config({"plan": {"tables": {"b": {"sharding": "table_wise", "ranks": [3]}}}})
    plan = plan_of(config.plan, TABLES, WORLD)
    assert [table.sharding.ranks for table in plan.tables] == [(0, 1, 2, 3), (3,)]


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"tables": {"c": {}}}, "plan.tables: got 'c', wanted a table of this model: a, b"),
        ({"tables": {"a": {"sharding": "table_wise", "ranks": [4]}}}, "this world has ranks 0 .. 3"),
        ({"tables": {"a": {"sharding": "host_wise", "ranks": [1, 2]}}}, "wanted all ranks of one host, such as"),
        ({"tables": {"a": {"sharding": "table_wise", "ranks": [0, 1]}}}, "the one rank of a table_wise"),
        ({"tables": {"a": {"ranks": [0]}}}, "wanted sharding=table_wise or host_wise"),
        ({"tables": {"a": {"sharding": "host_wise", "ranks": [1, 1]}}}, "each once"),
        ({"exchange": "pooled", "sharding": "replicated"}, "leave exchange out"),
        ({"exchange": "replicated", "sharding": "table_wise"}, "leave sharding out"),
        ({"exchange": "row"}, "plan.exchange"),
        ({"tables": {"a": {"exchnage": "rows"}}}, "did you mean plan.tables.a.exchange"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(plan, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        said(**plan)


def test_a_table_is_forced_from_the_command_line():
    config = override(build_config({}), {"plan.tables.a.exchange": "pooled"})
    assert config.plan.tables["a"].exchange == "pooled"
    with pytest.raises(ConfigError, match=r"did you mean plan\.tables\.a\.sharding"):
        override(build_config({}), {"plan.tables.a.shading": "row_wise"})


def test_rows_of_gpus_are_not_foretold():
    settings = {
        "plan": {"exchange": "auto", "memory": {"hbm": "1GiB"}},
        "train": {"device": "cuda"},
    }
    with pytest.raises(ConfigError, match="whose rows are not foretold"):
        build_config(settings)
