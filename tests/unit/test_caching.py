"""Copies in plans and configurations: sizes, bounds, and what does not go with them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plans import cache_settings

from colonnade import CountMinAdmission, PlanConfig, Table, build_plan
from colonnade.cache.cached_rows import DeviceCachedRows, NativeCachedRows
from colonnade.cache.directory import Directory, VersionLog
from colonnade.config.run import build_config, override_settings
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.exchange.cached_state import can_load_cache
from colonnade.plan.caching import (
    BOOKKEEPING,
    LOOKAHEAD_WINDOW,
    build_table_caches,
    remote_copy_bytes,
)
from colonnade.plan.plan import Plan
from colonnade.staleness import RowClock, TableCache, row_clock

TABLES = [Table("item", 8, rows=1000), Table("user", 4)]
ONE = TableCache(10, RowClock(1, 2), "lfu")


def configured(**settings):
    text = {f"plan.cache.{name.replace('__', '.')}": value for name, value in settings.items()}
    return override_settings(build_config({}), text).plan.cache


def test_sizes_and_bounds_of_a_configuration():
    size = 5 * remote_copy_bytes(TABLES[1])
    result = build_table_caches(
        configured(
            staleness=7, policy="lfu", tables__user__size=f"{size}B", tables__user__read_bound=3
        ),
        TABLES,
    )
    assert result["item"] == TableCache(1000, RowClock(3, 4, 0.05, 4), "lfu")  # all of its rows
    assert result["user"] == TableCache(5, RowClock(3, 0, 0.05, 4), "lfu")
    (default,) = build_table_caches(configured(policy="lru"), TABLES[:1]).values()
    assert default == TableCache(1000, RowClock(50, 50, 0.05, 4))
    own = configured(write_share=0.5, step_bound=9, tables__item__write_share=1)
    assert build_table_caches(own, TABLES[:1])["item"].clock == RowClock(50, 50, 1.0, 9)
    assert build_table_caches(None, TABLES) == {}
    with pytest.raises(ConfigError, match="which takes any id"):
        build_table_caches(configured(size="3%"), TABLES)
    with pytest.raises(ConfigError, match=r"got 'x', wanted a table of this model"):
        build_table_caches(configured(tables__x__size=3), TABLES)
    for bad in (-1, "101%", "ten", True, "-3%"):
        with pytest.raises(ConfigError, match=r"plan\.cache\.size"):
            configured(size=bad)
    for name, value in {
        "write_share": 1.01,
        "tables__item__write_share": -0.1,
        "step_bound": 0,
        "tables__item__step_bound": 10**20,
    }.items():
        with pytest.raises(ConfigError, match="got " + str(value)):
            configured(**{name: value})


def test_bounds_share_the_staleness():
    assert row_clock(5) == RowClock(2, 3)
    assert row_clock(5, 0) == RowClock(0, 5)
    assert row_clock(5, write_bound=1) == RowClock(4, 1)
    for numbers in ((5, 1, 1), (5, 6), (-1,)):
        with pytest.raises(ConfigError, match="row_clock"):
            row_clock(*numbers)


def test_bounds_that_contradict_are_said_as_they_were_given():
    with pytest.raises(ConfigError, match=r"table 'item'.*got read_bound=30 with staleness=10"):
        build_table_caches(configured(staleness=10, read_bound=30, size=5), TABLES)
    with pytest.raises(ConfigError, match=r"table 'user'.*got write_bound=3 with staleness=2"):
        build_table_caches(
            configured(size=5, tables__user__staleness=2, tables__user__write_bound=3), TABLES
        )


def test_plans_say_copies_and_come_back_from_json():
    copies = PlanConfig(cache=cache_settings({"item": ONE}))
    on_device = build_plan(TABLES, 2, PlanConfig(cache=cache_settings({"item": ONE}, "hbm")))
    assert Plan.from_json(on_device.to_json()) == on_device
    plan = build_plan(TABLES, 2, copies)
    assert (plan.cache_tier, on_device.cache_tier) == ("dram", "hbm")
    assert [table.exchange for table in plan.tables] == ["cached", "rows"]
    assert Plan.from_json(plan.to_json()) == plan
    assert [t.cache for t in build_plan(TABLES, 1, copies).tables] == [None, None]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("plan.cache with staleness_steps", {"staleness_steps": 2}),
        ("set plan.cache.tier=hbm to have the copies", {"memory": {"hbm": 10**9}}),
        ("exchange=pooled", {"exchange": "pooled"}),
    ],
)
def test_what_does_not_go_with_copies_is_refused(words, settings):
    with pytest.raises(ValueError, match=words):
        build_plan(TABLES, 2, PlanConfig(cache=cache_settings({"item": ONE}), **settings))


def test_replicated_tables_need_no_cache():
    settings = {"cache": {"size": 5}, "tables": {"item": {"sharding": "replicated"}}}
    plan = build_plan(TABLES, 2, PlanConfig(**settings))
    assert [(table.exchange, table.cache is None) for table in plan.tables] == [
        ("replicated", True),
        ("cached", False),
    ]


def test_unknown_policies_are_refused():
    with pytest.raises(ConfigError, match="choose from lru, lfu, lookahead"):
        configured(policy="fifo")


def test_windows_of_policies_that_look_ahead():
    """All tables that need one share it; the policy of the others may be another."""
    settings = {"size": 7, "staleness": 1, "policy": "lookahead"}
    result = build_table_caches(configured(**settings, tables__user__policy="lru"), TABLES)
    assert [value.window for value in result.values()] == [LOOKAHEAD_WINDOW, 0]
    result = build_table_caches(
        configured(size=7, staleness=1, window=3, tables__user__policy="lookahead"), TABLES
    )
    assert [(value.policy, value.window) for value in result.values()] == [
        ("lru", 0),
        ("lookahead", 3),
    ]
    plan = build_plan(TABLES, 2, PlanConfig(cache=cache_settings(result)))
    assert Plan.from_json(plan.to_json()) == plan
    assert {table.name: table.cache for table in plan.tables} == result
    with pytest.raises(ConfigError, match=r"window: got 0, wanted greater than or equal to 1"):
        configured(**settings, window=0)


def test_a_copy_costs_what_sizes_in_bytes_take_it_for():
    """A directory's bytes, and those of a slot's tick count and id; records and sums are counted as such."""
    directory, copies = (
        Directory(20_000, RowClock(5, 5), "lfu"),
        NativeCachedRows([TABLES[1]], [20_000]),
    )
    slots = np.arange(1000)
    copies.grow_table(0, len(slots))
    assert len(copies.ids[0]) == len(slots)
    arrays = copies.ids[0].nbytes + copies.num_pending[0].nbytes
    for first in range(0, 40_000, 1000):
        directory.decide_batch(np.arange(first, first + 1000))
    assert directory.num_slots == 21_000
    assert BOOKKEEPING - 6 < directory.num_bytes / 21_000 + arrays / 1000 <= BOOKKEEPING


def test_rows_that_leave_have_no_copies():
    leaving = Table("user", 4, admission=CountMinAdmission(updates=2, expected_ids=10))
    with pytest.raises(ConfigError, match="admission or eviction"):
        build_plan([leaving], 2, PlanConfig(cache={"size": 5}))


def test_steps_of_several_batches_are_refused():
    with pytest.raises(ConfigError, match=r"train\.accumulate=2 with plan\.cache"):
        override_settings(build_config({}), {"plan.cache.staleness": 1, "train.accumulate": 2})


@pytest.mark.parametrize("rows", [1, 2, 37, None])
def test_a_change_is_never_overlooked(rows):
    random, changes, newest = np.random.default_rng(0), VersionLog([rows, 5, rows]), {}
    for number in range(1, 40):
        ids = np.unique(random.integers(0, rows or 2**62, 5)) * (1 if rows else -1)
        tables = random.integers(0, 2, len(ids)) * 2
        changes.record_row_changes(tables, ids, number)
        newest |= dict.fromkeys(zip(tables.tolist(), ids.tolist(), strict=True), number)
    tables, ids = np.array(list(newest)).T
    for read in range(1, 42):
        really = np.array(list(newest.values())) >= read
        assert changes.has_changed_since(tables, ids, np.full(len(ids), read))[really].all()
    assert not changes.has_changed_since(tables, ids, np.full(len(ids), 40)).any()
    newest_of = [changes.table_versions(t).max() for t in range(3)]
    assert newest_of[1] == 0 and max(newest_of) == 39


@pytest.mark.parametrize("rows", [3, 50, None])
def test_marks_are_undone_newest_first(rows):
    """Rows share numbers where a table is small, within a batch and over several."""
    random, changes = np.random.default_rng(1), VersionLog([rows, 5])
    before, marked = [], []
    for number in range(1, 12):
        before.append([changes.table_versions(t).copy() for t in range(2)])
        ids = random.integers(0, 2 if rows is None else rows, 9)
        marked.append(changes.record_row_changes(np.arange(9) % 2, ids % 5, number))
    for number, wanted in enumerate(before):
        undone = changes.copy_versions_before(reversed(marked[number:]))
        assert all(map(np.array_equal, undone, wanted))
    for wanted in reversed(before[4:]):
        changes.undo_row_changes(marked.pop())
        assert all(np.array_equal(changes.table_versions(t), wanted[t]) for t in range(2))


def test_copies_of_checkpoints_go_on_in_a_world_like_theirs_alone():
    """Worlds are alike if ranks, tables and policies are the same, and cached rows outlast their batch in both."""
    directory = Directory(4, RowClock(1, 1), "lfu")
    sender = SimpleNamespace(
        declaration=SimpleNamespace(tables=TABLES[:1]),
        directories=[directory],
        outlasts_batch=[True],
        mesh=SimpleNamespace(num_ranks=2),
        cached_rows=SimpleNamespace(max_slots=[3]),
    )
    facts = {"policy": "lfu", "kept": True, "directory": directory.export_state()}
    state = {"tables": {"item": facts}}
    assert can_load_cache(sender, [state, state])
    of_before = {name: outcome for name, outcome in facts.items() if name != "kept"}
    for other in (
        None,
        {"tables": {"user": facts}},
        {"tables": {"item": facts | {"policy": "lru"}}},
        {"tables": {"item": facts | {"kept": False}}},
        {"tables": {"item": of_before}},
    ):
        assert not can_load_cache(sender, [state, other])
    assert not can_load_cache(sender, [state])
    for num_slots in (3, 4):  # as many as there is room for here, and one more
        slots = {"slots": torch.arange(num_slots, dtype=torch.int32)}
        more = {"tables": {"item": facts | {"directory": directory.export_state() | slots}}}
        assert can_load_cache(sender, [state, more]) == (num_slots == 3)


@pytest.mark.parametrize("late", [{"staleness_steps": 2}, {"tables": {"a": {"staleness_steps": 1}}}])  # fmt: skip
def test_two_kinds_of_lateness_are_refused_on_one_rank_too(late):
    with pytest.raises(ConfigError, match=r"plan.cache with staleness_steps.*leave plan.cache out"):
        build_config({"plan": {"cache": {}, **late}})


def test_a_window_is_for_the_policy_that_looks_ahead():
    with pytest.raises(ConfigError, match="got window=3 with policy=lru, wanted policy=lookahead"):
        build_table_caches(configured(staleness=5, size=7, window=3), TABLES)


@pytest.mark.parametrize("name", ["staleness", "tables__item__staleness"])
def test_staleness_is_a_number_of_batches(name):
    for bad in ("exact", -1, 2.5, True, 2**31 - 1):
        with pytest.raises(
            ConfigError, match=f"staleness: got {bad!r}, wanted a number of batches"
        ):
            configured(**{name: bad})


def test_copies_on_a_device_need_one_that_has_room_for_them():
    with pytest.raises(ConfigError, match=r"tier=hbm with train.device=cpu.*leave tier out"):
        override_settings(build_config({}), {"plan.cache.tier": "hbm"})
    config = override_settings(build_config({}), {"plan.cache.tier": "hbm", "train.device": "cuda"})
    assert config.plan.cache.tier == "hbm"
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"got 10,000,000,000,000,000 copies .*'user' for cpu"):
        DeviceCachedRows(TABLES, [10, 10**16], cpu)
    copies = DeviceCachedRows([Table("user", 2**28)], [0], cpu)
    with pytest.raises(
        BudgetExceeded, match=r"table 'user'.*has room for 0.*leave plan.cache.tier"
    ):
        copies.grow_table(0, 2**20)  # more than addresses reach, wherever memory is promised freely
    assert len(copies.ids[0]) == len(copies.pending[0]) == 0
