"""Choices: formulas against a count by hand, the search against all there is, budgets, what is forced, large worlds."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade import World
from colonnade.errors import ConfigError
from colonnade.hops.kinds import BY_TOWERS, EXCHANGES, SHARED_BYTES, Split, list_flows
from colonnade.hops.links import tower_call_seconds
from colonnade.hops.load import ColumnLoad, TableLoad
from colonnade.plan.cost.step_time import (
    EXTRA_EXCHANGE_SECONDS,
    interpolate_row_seconds,
    predict_processor_seconds,
    predict_single_rank_seconds,
)
from colonnade.plan.measure.device import RowRate
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Memory, Problem
from colonnade.plan.search.search import MIN_SLICE_COLUMNS, OPTIONS
from colonnade.topology.sharding import Sharding

TWO_BY_TWO = World(num_hosts=2, ranks_per_host=2)


def load_of(
    name, rows, world, *, samples=256, hot=1, width=16, is_pooled=True, may_be_cut=False
) -> TableLoad:
    """Ids drawn evenly out of `rows`."""

    def unique(lookups):
        return rows * -np.expm1(-lookups / rows)

    lookups = samples * hot
    return TableLoad(
        name=name, width=width, value_bytes=4 * width, gradient_bytes=4 * width, bag_bytes=4 * width,
        row_bytes=4 * width, rows=rows, slot_bytes=4 * width + 16, samples=samples, unique_rank=unique(lookups),
        unique_host=unique(lookups * world.ranks_per_host),
        unique_world=unique(lookups * world.num_ranks), lookups=lookups,
        columns=(ColumnLoad(lookups, hot),), is_pooled=is_pooled, may_be_cut=may_be_cut,
    )  # fmt: skip


def sent_between(load, exchange, num_owners=1, slices=1) -> dict[str, float]:
    """Bytes between a trainer and an owner by channel."""
    flows = list_flows(exchange, load, Split(num_owners, slices))
    return {flow.channel: flow.bytes for flow in flows if flow.pattern in ("owners", "bags")}


def counted_by_hand(load, sharding: Sharding, exchange, world):
    """Count bytes out of each rank inside its host, out of each host, and into both, pair by pair."""
    n, size = world.num_ranks, world.ranks_per_host
    exchange = "pooled" if exchange == "partials" else exchange  # where no consumer is known
    if exchange in BY_TOWERS and is_inside(sharding, world):
        return counted_by_towers(load, sharding, world, exchange == "tower_rows")
    exchange = "pooled" if exchange in BY_TOWERS else exchange
    sent = sent_between(load, exchange, len(sharding.ranks) // sharding.slices, sharding.slices)
    result = {p: (np.zeros((2, n)), np.zeros((2, world.num_hosts))) for p in ("fetch", "push")}
    is_added = exchange == "pooled" and sharding.kind == "row_wise"  # inside a host first
    hops = []
    for asker, host in itertools.product(range(n), range(world.num_hosts)):
        owners = [rank for rank in sharding.ranks if rank // size == host]
        relay_rank = host * size + asker % size
        hops += [(owner, relay_rank if is_added else asker) for owner in owners]
        hops += [(relay_rank, asker)] * is_added
    for owner, asker in hops:
        if asker == owner:
            continue
        for channel, source, target, bytes_ in (
            ("fetch", owner, asker, sent.get("fetch", 0.0)), ("push", asker, owner, sent["push"]),
        ):  # fmt: skip
            ranks, hosts = result[channel]
            if source // size == target // size:
                ranks[0, source] += bytes_
                ranks[1, target] += bytes_
            else:
                hosts[0, source // size] += bytes_
                hosts[1, target // size] += bytes_
    return result


def is_inside(sharding: Sharding, world) -> bool:
    """Return whether each slice is on one host, which is a tower."""
    hosts = [
        {rank // world.ranks_per_host for rank in item.ranks} for item in sharding.slice_shardings
    ]
    return all(len(item) == 1 for item in hosts)


def counted_by_towers(load, sharding: Sharding, world, of_rows):
    """The same: from owners to the rank of the asker's number in their host, from there, once, to the asker; of_rows:
    the first not for each asker, but different rows of all these."""
    n, size = world.num_ranks, world.ranks_per_host
    bag = load.bags * 4 * load.width / sharding.slices
    result = {p: (np.zeros((2, n)), np.zeros((2, world.num_hosts))) for p in ("fetch", "push")}
    hops = []
    for asker, item in itertools.product(range(n), sharding.slice_shardings):
        relay_rank = item.ranks[0] // size * size + asker % size
        if not of_rows:
            hops += [(owner, relay_rank, bag) for owner in item.ranks]
        elif asker // size == 0:
            rows = load.expected_unique_rows(world.num_hosts, world) * 4 * load.width
            hops += [(owner, relay_rank, rows / len(sharding.ranks)) for owner in item.ranks]
        hops += [(relay_rank, asker, bag)]
    for source, target, size_of in hops:
        for channel, one, other in (("fetch", source, target), ("push", target, source)):
            ranks, hosts = result[channel]
            if one // size != other // size:
                hosts[0, one // size] += size_of
                hosts[1, other // size] += size_of
            elif one != other:
                ranks[0, one] += size_of
                ranks[1, other] += size_of
    return result


LAID_OUT_IN_TOWERS = [
    (exchange, kind)
    for exchange in BY_TOWERS
    for kind in ("row_wise", "host_wise", "column_wise", "grid")
]
"""Exchanges that only users choose."""


@pytest.mark.parametrize(
    "world", [TWO_BY_TWO, World(num_hosts=3, ranks_per_host=2), World(ranks_per_host=3)]
)
@pytest.mark.parametrize("option", [*OPTIONS, *LAID_OUT_IN_TOWERS])
def test_seconds_are_those_of_the_busiest_link(world, option):
    exchange, kind = option
    if kind in ("host_wise", "grid") and world.num_hosts == 1:
        pytest.skip("row_wise, column_wise")
    load = load_of("t", 500, world, hot=3)
    choice = choose(Problem([load], world, forced={"t": Constraint(kind, exchange)}))
    (table,) = choice.tables
    assert table.chosen.option == option and table.is_forced
    for channel, (ranks, hosts) in counted_by_hand(
        load, table.chosen.sharding, exchange, world
    ).items():
        wanted = max(
            ranks.max() / world.local_bytes_per_second, hosts.max() / world.remote_bytes_per_second
        )
        if exchange != "replicated" or channel == "push":
            by_towers = tower_call_seconds(world, world.num_hosts)
            wanted += by_towers if exchange in BY_TOWERS else world.call_seconds
        assert getattr(choice.seconds, channel) == pytest.approx(wanted)
        sent = table.chosen.sent
        assert sent[channel, "local"] == pytest.approx(ranks[0].sum() / world.num_ranks)
        assert sent[channel, "remote"] == pytest.approx(hosts[0].sum() / world.num_ranks)


def test_every_owner_sends_a_block_of_all_bags():
    load = load_of("t", 1000, TWO_BY_TWO, hot=2, samples=100)
    rows, pooled = (sent_between(load, exchange) for exchange in ("rows", "pooled"))
    assert rows["fetch"] == load.unique_rank * 64 and pooled["fetch"] == 100 * 64
    assert sent_between(load, "pooled", 4)["fetch"] == pooled["fetch"]
    assert sent_between(load, "rows", 4)["fetch"] < rows["fetch"]
    assert (
        2 + 200 * 7 < pooled["route"] < 2 + 200 * 8
    )  # any 64 bits; bags are all alike: no lengths


def check_that_nothing_beats_the_choice(bytes_per_second, shapes) -> None:
    """Force all choices of two tables, of (rows, ids of a sample, width), in a small world."""
    world = World(num_hosts=2, ranks_per_host=1, remote_bytes_per_second=bytes_per_second)
    loads = [
        load_of(f"t{i}", rows, world, hot=hot, width=width, may_be_cut=True)
        for i, (rows, hot, width) in enumerate(shapes)
    ]
    places = [
        Constraint(kind, exchange, ranks)
        for exchange, kind in OPTIONS
        if exchange != "towers"  # as `pooled` where there are no modules
        for ranks in ([(0,), (1,)] if kind in ("table_wise", "host_wise") else [(0, 1)])
        if kind not in ("host_wise", "grid")  # hosts of one rank
        if kind != "column_wise" or all(load.width >= 2 * MIN_SLICE_COLUMNS for load in loads)
    ]
    best = min(
        choose(
            Problem(loads, world, forced={f"t{i}": item for i, item in enumerate(subset)})
        ).seconds.step
        for subset in itertools.product(places, repeat=2)
    )
    assert choose(Problem(loads, world)).seconds.step <= best * 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_per_second", "shapes"),
    [
        (2e7, [(300, 12, 64), (10**5, 1, 4)]),
        (1e9, [(8, 1, 64), (10**5, 12, 64)]),
    ],
)
def test_nothing_beats_the_choice_by_much(bytes_per_second, shapes):
    check_that_nothing_beats_the_choice(bytes_per_second, shapes)


@pytest.mark.slow
@given(
    st.sampled_from([2e7, 1e9]),
    st.lists(
        st.tuples(st.sampled_from([8, 300, 10**5]), st.sampled_from([1, 12]), st.sampled_from([4, 64])),
        min_size=2,
        max_size=2,
    ),
)  # fmt: skip
@settings(max_examples=20)
def test_nothing_beats_any_choice_by_much(bytes_per_second, shapes):
    check_that_nothing_beats_the_choice(bytes_per_second, shapes)


def test_what_is_looked_up_once_travels_as_rows_and_long_bags_pooled():
    once = [load_of(f"o{i}", 300, TWO_BY_TWO) for i in range(8)]
    bags = [load_of(f"b{i}", 10**6, TWO_BY_TWO, hot=20) for i in range(8)]
    choice = choose(Problem(once + bags, TWO_BY_TWO))
    kinds = {table.name: table.chosen.option for table in choice.tables}
    assert {kinds[bag.name] for bag in once} == {("rows", "row_wise")}
    assert {kinds[bag.name] for bag in bags} == {("pooled", "table_wise")}
    places = [table.chosen.sharding.ranks[0] for table in choice.tables[8:]]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]  # in balance
    for table in choice.tables:  # nothing else would be faster
        assert all(other.more >= -1e-9 for other in table.others)
        assert [bag.more for bag in table.others] == sorted(bag.more for bag in table.others)


def test_long_bags_of_wide_rows_are_cut():
    """Each owner of a slice sends a part of every bag once, and all owners as much."""
    wide = [load_of("w", 10**6, TWO_BY_TWO, hot=20, width=256, may_be_cut=True)]
    (table,) = choose(Problem(wide, TWO_BY_TWO)).tables
    assert str(table.chosen.sharding) == "column_wise, ranks 0 .. 3"
    assert table.chosen.exchange == "pooled"
    cut, whole = (sent_between(wide[0], "pooled", 1, slices) for slices in (4, 1))
    assert cut["route"] == whole["route"]
    assert 4 * cut["fetch"] == whole["fetch"] and 4 * cut["push"] == whole["push"]
    many = World(num_hosts=4, ranks_per_host=2)
    narrow = [load_of("n", 10**6, many, hot=20, width=64, may_be_cut=True)]
    assert choose(Problem(narrow, many)).tables[0].chosen.sharding.kind == "grid"
    for whole_rows in (
        replace(wide[0], may_be_cut=False),
        replace(wide[0], width=MIN_SLICE_COLUMNS),
    ):
        (table,) = choose(Problem([whole_rows], TWO_BY_TWO)).tables
        assert not {"column_wise", "grid"} & {
            c.sharding.kind for c in (table.chosen, *table.others)
        }


def test_columns_are_cut_over_servers_only():
    """Trainers have no rows: slices on them could not be served."""
    world = World(num_hosts=2, ranks_per_host=4, servers_per_host=2)
    wide = [load_of(f"w{i}", 10**6, world, hot=20, width=256, may_be_cut=True) for i in range(3)]
    fixed = {load.name: Constraint("column_wise") for load in wide}
    free = choose(Problem(wide, world), num_runners_up=4)
    for decision in (free, *free.runners_up, choose(Problem(wide, world, forced=fixed))):
        for table in decision.tables:
            for cost in (table.chosen, *table.others):
                assert set(cost.sharding.ranks) <= set(world.owners), cost.sharding
    (forced, *_) = choose(Problem(wide, world, forced=fixed)).tables
    assert forced.chosen.sharding.ranks == world.owners


def test_sequences_are_never_pooled():
    loads = [load_of("s", 10**6, TWO_BY_TWO, hot=50, is_pooled=False)]
    (table,) = choose(Problem(loads, TWO_BY_TWO)).tables
    assert table.chosen.exchange == "rows"
    assert "pooled" not in {other.exchange for other in table.others}
    with pytest.raises(ConfigError, match=r"table 's': got pooled, which it cannot have.*sequence"):
        choose(Problem(loads, TWO_BY_TWO, forced={"s": Constraint(exchange="pooled")}))


def test_small_tables_of_slow_messages_are_on_every_rank():
    """Messages cost more than bytes do: a table that never asks saves the asking."""
    slow = World(num_hosts=2, ranks_per_host=1, message_seconds=1e-2, remote_message_seconds=1e-2)
    loads = [load_of(f"t{i}", 4, slow, width=4) for i in range(3)]
    choice = choose(
        Problem(loads, slow, rates=[RowRate(4, 2e4, 2e4)])
    )  # ids travel behind so slow a model
    assert {table.chosen.option for table in choice.tables} == {("replicated", "replicated")}


def test_tables_stay_where_memory_holds_them():
    """A table of most of all rows goes to one rank as the others do, unless it has no room there."""
    world = World(num_hosts=4, ranks_per_host=1)
    loads = [load_of(f"b{i}", 10 ** (6 - (i > 0)), world, hot=20, width=64) for i in range(4)]
    budget = int(0.5 * loads[0].total_bytes)
    memories = {"free": Memory(), "tight": Memory(budget), "cheap": Memory(budget, 1e-16)}
    kinds = {
        name: [
            table.chosen.sharding.kind
            for table in choose(Problem(loads, world, memory=memory)).tables
        ]
        for name, memory in memories.items()
    }
    assert kinds["free"] == kinds["cheap"] == ["table_wise"] * 4
    assert kinds["tight"][0] == "row_wise"


def test_a_step_s_rows_must_be_in_memory_whatever_files_cost():
    world = World(num_hosts=2, ranks_per_host=1)
    load = load_of("b", 10**5, world, hot=20)
    budget = int(0.7 * load.unique_world * load.slot_bytes)
    (table,) = choose(Problem([load], world, memory=Memory(budget, 0.0))).tables
    assert table.chosen.sharding.kind == "row_wise"


def test_forced_ranks_are_kept_and_others_balanced_around_them():
    loads = [load_of(f"b{i}", 10**5, TWO_BY_TWO, hot=20) for i in range(4)]
    forced = {"b0": Constraint("table_wise", "pooled", (2,))}
    choice = choose(Problem(loads, TWO_BY_TWO, forced=forced))
    assert choice.shardings["b0"].ranks == (2,)
    assert sorted(sharding.ranks for sharding in choice.shardings.values()) == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]


def test_rates_of_rows_lie_between_those_measured():
    rates = [RowRate(16, 4e6, 2e6), RowRate(64, 2e6, 1e6)]
    assert interpolate_row_seconds(rates, 16) == pytest.approx((1 / 4e6, 1 / 2e6))
    assert interpolate_row_seconds(rates, 128) == pytest.approx((2 / 2e6, 2 / 1e6))
    assert 1 / 4e6 < interpolate_row_seconds(rates, 40)[0] < 1 / 2e6
    load = load_of("t", 1000, TWO_BY_TWO)
    assert (
        predict_processor_seconds("rows", load, Split(1, trainers=4), []).owner
        == 0
        == predict_single_rank_seconds(load, [])
    )
    one = predict_processor_seconds("rows", load, Split(1), rates)
    assert one.trainer + one.owner > predict_single_rank_seconds(
        load, rates
    )  # messages cost something


def test_planning_and_packing_of_lookups_count_where_they_were_measured():
    """A rank that owns all rows plans everybody's lookups under `pooled`, and their different rows under `rows`."""
    load = load_of("t", 1000, TWO_BY_TWO, hot=20)
    blind, seeing = [RowRate(16, 4e6, 2e6)], [RowRate(16, 4e6, 2e6, 1e7, 5e6)]
    more = {
        exchange: tuple(
            getattr(predict_processor_seconds(exchange, load, Split(1, trainers=4), seeing), who)
            - getattr(predict_processor_seconds(exchange, load, Split(1, trainers=4), blind), who)
            for who in ("trainer", "owner")
        )
        for exchange in ("rows", "pooled", "partials")
    }
    assert more["rows"] == pytest.approx((load.lookups / 1e7, 4 * load.unique_rank / 1e7))
    assert more["pooled"] == pytest.approx((load.lookups / 1e7, 4 * load.lookups * 2e-7))
    assert more["partials"] == pytest.approx(more["pooled"])
    assert predict_single_rank_seconds(load, seeing) - predict_single_rank_seconds(
        load, blind
    ) == pytest.approx(load.lookups / 1e7)


def test_a_processor_that_is_slow_spreads_what_links_would_not():
    """Pooling a table on one rank is the fewest bytes; not where what is waited for is that rank's processor."""
    world = World(num_hosts=4, ranks_per_host=1)
    loads = [load_of(f"b{i}", 10**6, world, hot=20, width=64) for i in range(3)]

    def kinds(rates):
        return {
            table.chosen.sharding.kind
            for table in choose(Problem(loads, world, rates=rates)).tables
        }

    assert kinds([]) == {"table_wise"}
    assert "table_wise" not in kinds([RowRate(64, 1e4, 1e4)])


def test_ranks_that_share_processors_compute_while_others_wait():
    loads = [load_of(f"t{i}", 10**6, TWO_BY_TWO, width=64) for i in range(4)]
    rates = [RowRate(64, 1e6, 1e6)]
    free = choose(Problem(loads, TWO_BY_TWO, rates=rates)).seconds
    assert free.step == free.processor + free.waited
    crowded = choose(Problem(loads, replace(TWO_BY_TWO, crowding=1e3), rates=rates)).seconds
    assert crowded.step == 1e3 * crowded.processor


@pytest.mark.parametrize(("samples", "is_mixed"), [(512, False), (1024, False), (2048, True)])
def test_another_exchange_has_to_save_what_it_takes_of_a_processor(samples, is_mixed):
    """Rows of a table of few are fewer than bags, bags of long ones fewer than rows."""
    loads = [
        load_of("few", 50, TWO_BY_TWO, samples=samples),
        load_of("long", 10**6, TWO_BY_TWO, samples=samples, hot=20),
    ]
    forced = {load.name: Constraint("row_wise") for load in loads}
    by_links = choose(Problem(loads, TWO_BY_TWO, forced=forced))
    assert by_links.exchanges == {"few": "rows", "long": "pooled"}
    # Rows cost nothing to compute: what is left is the exchange's own.
    rates = [RowRate(16, 1e15, 1e15, 1e15, 1e15)]
    choice = choose(Problem(loads, TWO_BY_TWO, forced=forced, rates=rates))
    assert choice.exchanges == {"few": "rows" if is_mixed else "pooled", "long": "pooled"}
    more = choice.seconds.processor - by_links.seconds.processor
    assert more == pytest.approx(EXTRA_EXCHANGE_SECONDS * is_mixed, abs=1e-6)


def test_messages_take_a_processor_s_time():
    loads = [load_of("t", 10**6, TWO_BY_TWO, width=64)]
    forced = {"t": Constraint("row_wise", "rows")}
    costly = replace(TWO_BY_TWO, byte_processor_seconds=1e-9, message_processor_seconds=1e-4)
    free, busy = (choose(Problem(loads, world, forced=forced)) for world in (TWO_BY_TWO, costly))
    assert free.seconds.processor == 0.0
    ids, values, gradients = (
        sum(busy.sent[channel, link] for link in ("local", "remote"))
        for channel in ("route", "fetch", "push")
    )
    # All that a rank sends, others get: as owner and as asker; 4 all-to-alls with 3 others.
    (hop,) = EXCHANGES["rows"]
    (fixed,) = hop.fixed_flows
    (flag,) = (flow for flow in hop.flows(loads[0], Split(4)) if flow.pattern == "everyone")
    headers = 3 * (SHARED_BYTES + fixed.bytes + flag.bytes)
    moved = 2 * (ids - headers + values + gradients)
    assert busy.seconds.processor == pytest.approx(moved * 1e-9 + 4 * 3 * 1e-4)


@pytest.mark.parametrize(
    ("num_hosts", "num_tables", "seconds"),
    [(25, 130, 6), pytest.param(125, 520, 30, marks=pytest.mark.slow)],
)
def test_a_thousand_ranks_and_five_hundred_tables_take_seconds(num_hosts, num_tables, seconds):
    """Search takes a sixth of `seconds` on an idle machine."""
    world = World(num_hosts=num_hosts, ranks_per_host=8)
    loads = [
        load_of(f"t{i}", 10 ** (1 + i % 7), world, hot=1 + i % 20, width=64)
        for i in range(num_tables)
    ]
    began = time.process_time()
    choice = choose(Problem(loads, world))
    assert time.process_time() - began < seconds
    by_host = np.zeros(num_hosts)
    for table in choice.tables:
        if table.chosen.sharding.kind == "table_wise":
            by_host[table.chosen.sharding.ranks[0] // 8] += table.chosen.bytes_over("remote")
    assert by_host.max() < 3 * by_host.mean()
    forced = {load.name: Constraint("row_wise", "rows") for load in loads}
    dealt = choose(Problem(loads, world, forced=forced))
    assert choice.seconds.step < 0.8 * dealt.seconds.step


def test_runners_up_are_plans_of_other_kinds():
    loads = [load_of(f"t{i}", 1000 * (i + 1), TWO_BY_TWO, hot=2) for i in range(5)]
    forced = {"t0": Constraint("row_wise", "rows")}
    choice = choose(Problem(loads, TWO_BY_TWO, forced=forced), num_runners_up=4)
    assert choice == replace(
        choose(Problem(loads, TWO_BY_TWO, forced=forced)), runners_up=choice.runners_up
    )
    kinds = [[table.chosen.option for table in d.tables] for d in (choice, *choice.runners_up)]
    assert len(kinds) == 5 and len({tuple(kind) for kind in kinds}) == 5
    assert len({kind[-1] for kind in kinds}) == 5  # most tables changed, not one
    assert {kind[0] for kind in kinds} == {("rows", "row_wise")}
    steps = [decision.seconds.step for decision in (choice, *choice.runners_up)]
    assert steps == sorted(steps)
    for runner_up in choice.runners_up:  # each is the plan that its constraints give
        fixed = {
            table.name: Constraint(*reversed(table.chosen.option), table.chosen.sharding.ranks)
            for table in runner_up.tables
        }
        again = choose(Problem(loads, TWO_BY_TWO, forced=fixed))
        assert again.seconds.step == pytest.approx(runner_up.seconds.step)
        assert again.shardings == runner_up.shardings


def test_runners_up_keep_to_constraints_and_memory():
    loads = [load_of(f"t{i}", 1000, TWO_BY_TWO) for i in range(4)]
    fixed = {load.name: Constraint("row_wise", "rows") for load in loads}
    assert not choose(Problem(loads, TWO_BY_TWO, forced=fixed), num_runners_up=4).runners_up
    even = Memory(int(sum(load.total_bytes for load in loads) / 4 * 1.01))
    for runner_up in choose(Problem(loads, TWO_BY_TWO, memory=even), num_runners_up=4).runners_up:
        assert "replicated" not in runner_up.exchanges.values()
