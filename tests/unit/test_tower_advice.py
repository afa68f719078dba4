"""Savings of tower modules for a model that has none: numbers of the plan's own formulas, and never a change of it."""

from __future__ import annotations

import pytest
from test_choice import load_of

from colonnade import World
from colonnade.plan.cost.consumers import ConsumerLoad, FieldLoad, ModelLoad
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Memory
from colonnade.plan.towers.advice import advise_tower_modules

SLOW = World(num_hosts=2, ranks_per_host=2, remote_bytes_per_second=25e6)
DIM = 64


def loads_in(world, num=8):
    return [load_of(f"t{i}", 10**6, world, width=DIM) for i in range(num)]


def test_it_is_what_the_plan_of_a_model_with_modules_would_save():
    loads = loads_in(SLOW)
    flat = choose(loads, SLOW)
    result = advise_tower_modules(loads, SLOW, flat, memory=Memory())
    assert [item.ratio for item in result] == [2, 4, 8] and {item.towers for item in result} == {2}
    for item in result:
        out = 4 * DIM // item.ratio
        fields = [FieldLoad(load.name, t, t, DIM, 4.0 * DIM, 4.0 * DIM) for t, load in enumerate(loads)]  # fmt: skip
        modules = [
            ConsumerLoad(
                f"tower{n}", tuple(range(n, 8, 2)), None, is_whole=True, inside_width=out, inside_value_bytes=4.0 * out,
                inside_gradient_bytes=4.0 * out,
            )
            for n in range(2)
        ]  # fmt: skip
        model = ModelLoad(tuple(fields), tuple(modules))
        forced = {
            load.name: Constraint("table_wise", "towers", (2 * (t % 2) + t // 2 % 2,))
            for t, load in enumerate(loads)
        }
        towered = choose(loads, SLOW, model=model, forced=forced).seconds
        saved = flat.seconds.processor + flat.seconds.waited - towered.processor - towered.waited
        assert item.saved_seconds == pytest.approx(saved)
        assert item.products == 2 * 4 * DIM * out and item.parameters == item.products + 2 * out
    assert result[0].saved_seconds < result[1].saved_seconds < result[2].saved_seconds


def test_small_tables_that_every_rank_has_are_better_left_as_they_are():
    world = World(num_hosts=2, ranks_per_host=2, remote_bytes_per_second=1e9)
    loads = [load_of(f"t{i}", 10, world, width=4) for i in range(8)]
    choice = choose(loads, world)
    assert {table.chosen.exchange for table in choice.tables} == {"replicated"}
    assert all(
        item.saved_seconds < 0
        for item in advise_tower_modules(loads, world, choice, memory=Memory())
    )


@pytest.mark.parametrize("kind", ["row_wise", "host_wise", "table_wise", "column_wise", "grid"])
def test_tables_that_cannot_go_stay_as_they_are(kind):
    """A sequence's, wherever it lies, and what has hot rows."""
    loads = loads_in(SLOW)
    sequence = load_of("s", 10**6, SLOW, width=DIM, is_pooled=False, may_be_cut=True)
    hot = [load_of("h[hot]", 10, SLOW, width=DIM), load_of("h[cold]", 10**6, SLOW, width=DIM)]
    forced = {
        "s": Constraint(kind, "rows"),
        "h[hot]": Constraint("replicated"),
        "h[cold]": Constraint("row_wise", "rows"),
    }
    choice = choose([sequence, *loads, *hot], SLOW, forced=forced)
    result = advise_tower_modules([sequence, *loads, *hot], SLOW, choice, memory=Memory())
    assert all(item.products == 2 * (4 * DIM) ** 2 // item.ratio for item in result) and result


@pytest.mark.parametrize(
    ("world", "num", "room"),
    [
        (World(ranks_per_host=4), 8, None),
        (World(num_hosts=2, ranks_per_host=2, servers_per_host=1), 8, None),
        (SLOW, 1, None),
        (SLOW, 8, 10**6),
    ],
)
def test_nothing_is_said_where_nothing_can_be_done(world, num, room):
    loads = loads_in(world, num)
    assert advise_tower_modules(loads, world, choose(loads, world), memory=Memory(room)) == ()
