"""Towers for a model's tower modules: chosen where the formulas say that they pay, unless a person says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_choice import load_of

from colonnade import World
from colonnade.hops.kinds import EXCHANGES, SHARED_BYTES
from colonnade.plan.cost.consumers import ConsumerLoad, FieldLoad, ModelLoad
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Memory, Problem

SLOW = World(num_hosts=2, ranks_per_host=2, remote_bytes_per_second=25e6)
DIM = 64


def model_of(loads, ratio, towers=2, shared=None, is_whole=True):
    """Tables dealt to the modules in turn. shared: a table that each module reads, too. is_whole: else operators that
    are no modules, and that have no partial."""
    fields = [FieldLoad(load.name, t, t, DIM, 4.0 * DIM, 4.0 * DIM) for t, load in enumerate(loads)]
    consumers = []
    for number in range(towers):
        own = {t for t in range(len(loads)) if t % towers == number}
        own |= set() if shared is None else {shared}
        out = len(own) * DIM // ratio
        consumers.append(
            ConsumerLoad(
                f"tower{number}", tuple(sorted(own)), None, inside_width=out,
                inside_value_bytes=4.0 * out, inside_gradient_bytes=4.0 * out,
                is_whole=is_whole,
            )
        )  # fmt: skip
    return ModelLoad(tuple(fields), tuple(consumers))


@pytest.fixture(scope="module")
def loads():
    return [load_of(f"t{i}", 10**6, SLOW, width=DIM) for i in range(8)]


def test_modules_that_leave_little_are_worth_their_towers(loads):
    flat = choose(Problem(loads, SLOW, model=model_of(loads, 1)))
    assert {table.chosen.exchange for table in flat.tables} != {"towers"}
    choice = choose(Problem(loads, SLOW, model=model_of(loads, 8)))
    assert {table.chosen.option for table in choice.tables} == {("towers", "table_wise")}
    assert choice.seconds.step < flat.seconds.step
    hosts = [SLOW.host(table.chosen.sharding.ranks[0]) for table in choice.tables]
    assert hosts[::2] == [hosts[0]] * 4 and hosts[1::2] == [1 - hosts[0]] * 4
    assert not any(table.is_forced for table in choice.tables)
    for table in choice.tables:  # what it would have been is shown beside it
        assert {other.exchange for other in table.others} >= {"rows", "pooled"}
    more = sum(choice.sent[key] for key in choice.sent if key[1] == "remote")
    less = sum(flat.sent[key] for key in flat.sent if key[1] == "remote")
    assert more < less / 2


def test_operators_that_are_no_modules_are_not_worth_a_try(loads):
    choice = choose(Problem(loads, SLOW, model=model_of(loads, 8, is_whole=False)))
    assert not {table.chosen.exchange for table in choice.tables} & {"towers", "tower_rows"}
    flat = choose(Problem(loads, SLOW))
    assert choice.shardings == flat.shardings and choice.exchanges == flat.exchanges


def test_rows_come_together_in_towers_where_many_samples_share_them():
    """Links inside hosts are slow, too, and a row is used by two samples on the mean."""
    world = replace(SLOW, local_bytes_per_second=25e6)
    popular = [load_of(f"t{i}", 300, world, width=DIM) for i in range(8)]
    model = model_of(popular, 8)
    choice = choose(Problem(popular, world, model=model))
    assert {table.chosen.option for table in choice.tables} == {("tower_rows", "table_wise")}
    names = {table.name: table.chosen.sharding.ranks for table in choice.tables}
    forced = {name: Constraint("table_wise", "towers", ranks) for name, ranks in names.items()}
    bags = choose(Problem(popular, world, model=model, forced=forced))
    assert choice.seconds.step < bags.seconds.step
    for channel in ("fetch", "push"):
        assert choice.sent[channel, "remote"] == pytest.approx(bags.sent[channel, "remote"])
        assert choice.sent[channel, "local"] < bags.sent[channel, "local"]


def test_what_a_person_says_of_one_table_keeps_its_module_flat(loads):
    model = model_of(loads, 8)
    forced = {"t1": Constraint(exchange="rows")}
    choice = choose(Problem(loads, SLOW, model=model, forced=forced))
    assert choice.tables[1].chosen.exchange == "rows"
    assert "towers" not in {t.chosen.exchange for t in choice.tables[1::2]}
    assert [table.is_forced for table in choice.tables] == [t == 1 for t in range(8)]


def test_modules_that_share_a_table_are_in_one_tower(loads):
    choice = choose(Problem(loads, SLOW, model=model_of(loads, 8, shared=0)))
    inside = [t.chosen.sharding.ranks[0] for t in choice.tables if t.chosen.exchange == "towers"]
    assert len({SLOW.host(rank) for rank in inside}) <= 1


def test_nothing_is_put_where_there_is_no_room(loads):
    model, whole = model_of(loads, 8), loads[0].total_bytes
    tight = Memory(int(1.5 * whole))  # two tables a rank do not fit whole
    choice = choose(Problem(loads, SLOW, model=model, memory=tight))
    assert "towers" not in {table.chosen.exchange for table in choice.tables}
    one_host = World(num_hosts=1, ranks_per_host=4)
    choice = choose(Problem(loads, one_host, model=model))
    assert "towers" not in {table.chosen.exchange for table in choice.tables}


def test_ids_of_tables_sum_to_those_of_all_but_for_headers(loads):
    forced = {load.name: Constraint("table_wise", "towers") for load in loads}
    choice = choose(Problem(loads, SLOW, forced=forced, model=model_of(loads, 8)))
    local = sum(table.chosen.sent["route", "local"] for table in choice.tables)
    assert 0 < local < choice.sent["route", "local"]


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("hosts, num_towers", [(2, 2), (4, 4), (4, 2), (2, 4)])
def test_processors_move_what_is_sent_and_what_is_got(hosts, num_towers, ratio):
    """Values and gradients by towers: the bytes that are counted, not as many as would go straight."""
    world = World(num_hosts=hosts, ranks_per_host=2)
    tables = [load_of(f"t{i}", 10**6, world, width=DIM) for i in range(world.num_ranks)]
    forced = {f"t{i}": Constraint("table_wise", "towers", (i,)) for i in range(world.num_ranks)}
    model = model_of(tables, ratio, num_towers)
    size = world.num_ranks // num_towers
    own = [
        [t for t in range(world.num_ranks) if t // size == number] for number in range(num_towers)
    ]
    consumers = tuple(
        replace(item, fields=tuple(subset))
        for item, subset in zip(model.consumers, own, strict=True)
    )
    model = replace(model, consumers=consumers)

    def result(byte_seconds):
        target = replace(world, byte_processor_seconds=byte_seconds)
        return choose(Problem(tables, target, forced=forced, model=model, towers=num_towers))

    choice = result(1e-9)
    moved = (choice.seconds.processor - result(0.0).seconds.processor) / 1e-9
    sent = {channel: 0.0 for channel in ("route", "fetch", "push")}
    for (channel, _), item in choice.sent.items():
        sent[channel] += item
    fixed_bytes = sum(flow.bytes for hop in EXCHANGES["towers"] for flow in hop.fixed_flows)
    headers = (world.num_ranks - 1) * (SHARED_BYTES + fixed_bytes)
    assert moved == pytest.approx(2 * (sum(sent.values()) - headers), rel=1e-9)
    assert sent["fetch"] > sent["route"] > 0
