"""Memory goes where it saves most: against every other way to share it, on small cases; in seconds on large ones."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade import Table
from colonnade.errors import BudgetExceeded
from colonnade.plan.cost import demands
from colonnade.plan.cost.memory import (
    Budgets,
    MemoryDemand,
    average_over_ranks,
    check_batches_fit,
    count_window_bytes,
    divide,
    list_rank_demands,
    lower_convex_hull,
)
from colonnade.plan.measure.profile import Profile, RunBatches, profile_ids
from colonnade.topology.sharding import Sharding, replicated, row_wise, table_wise


def demand(name, savings, *, slot=1, least=0, **more) -> MemoryDemand:
    """Row i of the table saves savings[i] reads."""
    reads = np.append(sum(savings), sum(savings) - np.cumsum(savings)).clip(0)
    rows = np.arange(len(reads), dtype=float)
    return MemoryDemand(
        name, slot, least, len(savings), tuple(rows), tuple(reads.tolist()), 5.0, 1.0, **more
    )


SAVINGS = st.lists(st.integers(0, 20), min_size=1, max_size=6)


def divide_memory(wanted, main, mapped=0):
    return divide(wanted, Budgets(main, mapped))


def divide_memory_on_ranks(wanted, shardings, num_ranks, main, mapped=0):
    return divide(wanted, Budgets(main, mapped), list_rank_demands(shardings, num_ranks))


def predict_demands(tables, result, num_ranks=1, fixed_bytes=None, shardings=None, **batches):
    batches = RunBatches(**batches)
    return demands.predict_demands(
        tables, result, batches, num_ranks=num_ranks, fixed_bytes=fixed_bytes, shardings=shardings
    )


def total(placed) -> float:
    return sum(item.reads for item in placed)


@given(st.lists(SAVINGS, min_size=1, max_size=4), st.integers(0, 14))
def test_convex_curves_are_shared_as_well_as_can_be(savings, budget):
    wanted = [demand(str(t), sorted(item, reverse=True)) for t, item in enumerate(savings)]
    placed = divide_memory(wanted, budget)
    assert sum(item.rows for item in placed) <= budget
    ways = itertools.product(*(range(item.max_rows + 1) for item in wanted))
    best = min(
        sum(item.reads_at(rows) for item, rows in zip(wanted, way, strict=True))
        for way in ways
        if sum(way) <= budget
    )
    assert total(placed) == pytest.approx(best)


@given(
    st.lists(st.tuples(SAVINGS, st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_any_curves_within_one_piece_of_the_best(cases, more):
    wanted = [
        demand(str(t), savings, slot=slot, least=min(least, len(savings)))
        for t, (savings, slot, least) in enumerate(cases)
    ]
    budget = more + sum(item.least_rows * item.slot_bytes for item in wanted)
    placed = divide_memory(wanted, budget)
    spent = 0
    for item, got in zip(wanted, placed, strict=True):
        assert item.least_rows <= got.rows <= item.max_rows
        assert got.reads == item.reads_at(got.rows)
        spent += got.rows * item.slot_bytes
    assert spent <= budget
    ways = itertools.product(*(range(item.least_rows, item.max_rows + 1) for item in wanted))
    costs = [
        sum(item.reads_at(rows) for item, rows in zip(wanted, way, strict=True))
        for way in ways
        if sum(n * item.slot_bytes for n, item in zip(way, wanted, strict=True)) <= budget
    ]
    # The piece of a hull that the budget cuts is all that is lost, and each table's rounding.
    lost = max(item.reads[0] for item in wanted) + sum(
        max(-np.diff(item.reads), default=0) for item in wanted
    )
    assert min(costs) - 1e-9 <= total(placed) <= min(costs) + lost + 1e-9


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_a_hull_is_convex_and_below(values):
    reads = np.sort(np.array(values))[::-1]
    rows, low = lower_convex_hull(list(range(len(reads))), reads.tolist())
    assert rows[0] == 0 and rows[-1] == len(reads) - 1
    assert (np.interp(range(len(reads)), rows, low) <= reads + 1e-9).all()
    slopes = np.diff(low) / np.diff(rows)
    assert (np.diff(slopes) >= -1e-9).all()


def test_what_saves_nothing_is_given_all_the_same():
    placed = divide_memory([demand("a", [3, 0, 0]), demand("b", [0] * 9)], 8)
    assert [item.rows for item in placed] == [3, 5]


def test_open_tables_share_the_rest_up_to_their_limits():
    first, second = (demand(name, [3] * 2, is_open=True) for name in "ab")
    assert [item.rows for item in divide_memory([first, second], 20)] == [10, 10]
    assert [item.rows for item in divide_memory([first.limit_to(4), second], 20)] == [4, 16]


def test_no_limit_holds_everything():
    assert [item.rows for item in divide_memory([demand("a", [1] * 7)], None)] == [7]


def test_a_window_that_does_not_fit_is_refused_and_names_the_table():
    wanted = [demand("a", [1] * 9, slot=10, least=3), demand("big", [1] * 9, slot=10, least=5)]
    assert divide_memory(wanted, 80)
    with pytest.raises(
        BudgetExceeded,
        match=r"plan.memory.dram: got 79 bytes, .*'big' needs 5 rows \(50 bytes\) .*80",
    ):
        divide_memory(wanted, 79)
    check_batches_fit(wanted, Budgets(80))
    check_batches_fit(wanted, Budgets(79, mapped=90))  # where the large table moves
    check_batches_fit(wanted, Budgets(None))
    with pytest.raises(BudgetExceeded, match="'big' needs 5 rows"):
        check_batches_fit(wanted, Budgets(79))


def test_the_window_comes_first_as_far_as_it_fits():
    wanted = [
        demand("cold", [0] * 20, least=2, window_rows=10),
        demand("hot", [9] * 20, least=4, window_rows=8),
    ]
    assert count_window_bytes(wanted) == 18
    assert [item.rows for item in divide_memory(wanted, 6)] == [2, 4]
    assert [item.rows for item in divide_memory(wanted, 12)] == [6, 6]  # half of each window
    assert [item.rows for item in divide_memory(wanted, 18)] == [10, 8]
    assert [item.rows for item in divide_memory(wanted, 25)] == [10, 15]


def test_small_data_has_no_more_rows_than_it_has():
    of = replace(profile_ids("t0", np.arange(10), 10.0), most_unique=10)
    for rows in (None, 5000):
        (result,) = predict_demands(
            [Table("t0", 16, rows=rows)], Profile(10, 1, (of,), 10),
            batch_size=10, window=9, num_samples=10, last_batch=50,
        )  # fmt: skip
        assert result.least_rows == 10 and result.window_rows == 10


def test_what_is_read_most_for_its_size_lies_in_mapped():
    hot, cold = demand("hot", [9] * 10), demand("cold", [1] * 10)
    small = demand("small", [5] * 3)
    by_id = demand("open", [99] * 10, is_open=True)
    placed = {item.name: item for item in divide_memory([hot, cold, small, by_id], 12, 10)}
    assert placed["hot"].tier == "mapped" and placed["hot"].reads == 0
    assert placed["open"].tier == "dram" and placed["open"].rows == 10
    assert placed["small"].rows + placed["cold"].rows == 2 and placed["small"].rows == 2
    everything = divide_memory([hot, cold, small], 0, None)
    assert total(everything) == 0 and {item.tier for item in everything} == {"mapped"}


def test_tables_of_large_batches_are_mapped_if_the_batches_do_not_fit_in_memory():
    small, big = demand("a", [9] * 9, slot=10, least=3), demand("big", [1] * 9, slot=10, least=5)
    placed = divide_memory([small, big], 40, 90)
    assert [(item.rows, item.tier) for item in placed] == [(4, "dram"), (9, "mapped")]
    assert placed[1].reads == 0
    everything = divide_memory([small, big], 10, None)
    assert {item.tier for item in everything} == {"mapped"}
    fixed = replace(big, least_rows=5, max_rows=5, rows=(0.0,), reads=(4.0,))
    for tables, mapped_bytes in (
        ([small, big], 89),
        ([small, replace(big, is_open=True)], 90),
        ([small, fixed], 90),
    ):
        with pytest.raises(BudgetExceeded, match=r"'big' needs 5 rows .* all tables together 80"):
            divide_memory(tables, 40, mapped_bytes)


def sample(num_tables: int, rows: int, *, seed: int = 0) -> tuple[list[Table], Profile]:
    random = np.random.default_rng(seed)
    tables, results = [], []
    for t in range(num_tables):
        exponent = 0.6 + 0.8 * random.random()
        chance = np.arange(1, rows + 1) ** -exponent
        drawn = np.searchsorted(np.cumsum(chance / chance.sum()), random.random(4000))
        tables.append(Table(f"t{t}", 16, rows=rows if t % 7 else None))
        results.append(profile_ids(f"t{t}", drawn.clip(0, rows - 1), 500.0))
    return tables, Profile(4000, 8, tuple(results))


def test_an_open_table_that_fits_whole_has_room_to_grow():
    """A fifth more than the predicted rows, on each owner, so that a table that grows as predicted never evicts."""
    ids = np.arange(5000).repeat(8)  # every row is as popular as any
    profile = Profile(40_000, 80, (profile_ids("t", ids, 499.0),))
    (one,), (four,) = (
        predict_demands([Table("t", 16)], profile, batch_size=500, window=1, last_batch=1000, num_ranks=n)
        for n in (1, 4)
    )  # fmt: skip
    assert one.max_rows == pytest.approx(1.2 * 5000, rel=0.02)
    assert four.max_rows == pytest.approx(1.2 * 5000 / 4, rel=0.02)
    assert divide_memory([one], one.max_bytes)[0].reads == 0


@pytest.mark.parametrize(
    ("num_tables", "seconds"), [(150, 6), pytest.param(550, 20, marks=pytest.mark.slow)]
)
def test_hundreds_of_tables_in_seconds(num_tables, seconds):
    tables, result = sample(num_tables, 5000)
    began = time.process_time()
    wanted = predict_demands(tables, result, batch_size=512, window=3, last_batch=100)
    rows = sum(item.max_bytes for item in wanted)
    placed = divide_memory(wanted, rows // 2)
    assert time.process_time() - began < seconds
    assert sum(p.rows * d.slot_bytes for p, d in zip(placed, wanted, strict=True)) <= rows // 2


def test_steep_tables_need_less_and_more_memory_never_reads_more():
    tables, result = sample(12, 5000)
    wanted = predict_demands(tables, result, batch_size=256, window=2, last_batch=200)
    least = sum(item.least_rows * item.slot_bytes for item in wanted)
    most_bytes = sum(item.max_bytes for item in wanted)
    reads = [
        total(divide_memory(wanted, int(budget))) for budget in np.linspace(least, most_bytes, 9)
    ]
    assert (np.diff(reads) <= 1e-6).all() and reads[0] > 0 and reads[-1] == 0
    # Better than an even share, wherever that is possible.
    even = [int(most_bytes * 0.4 / 12 / item.slot_bytes) for item in wanted]
    budget = sum(n * item.slot_bytes for n, item in zip(even, wanted, strict=True))
    shared = sum(item.reads_at(n) for n, item in zip(even, wanted, strict=True))
    assert total(divide_memory(wanted, budget)) < shared


def test_ranks_share_rows_and_reads():
    tables, result = sample(3, 5000)
    one = predict_demands(tables, result, batch_size=256, window=2, last_batch=200)
    four = predict_demands(tables, result, batch_size=256, window=2, last_batch=200, num_ranks=4)
    for a, b in zip(one, four, strict=True):
        assert b.max_rows == pytest.approx(a.max_rows / 4, abs=1)
        assert b.unique == pytest.approx(a.unique / 4)
        assert b.reads_at(b.max_rows / 8) == pytest.approx(a.reads_at(a.max_rows / 8) / 4, rel=0.01)


def test_memory_goes_to_the_tables_that_a_rank_has():
    """Four ranks: a table on one, a copy on each, one on a host's two, one on all."""
    tables, result = sample(4, 5000)
    tables = [replace(table, rows=5000) for table in tables]
    outcomes = {"batch_size": 256, "window": 2, "last_batch": 200, "num_ranks": 4}
    shardings = [table_wise(1), replicated(4), Sharding("host_wise", (2, 3)), row_wise(4)]
    alone = predict_demands(tables, result, **(outcomes | {"num_ranks": 1}))
    wanted = predict_demands(tables, result, **outcomes, shardings=shardings)
    for t, owners in enumerate((1, 1, 2, 4)):
        assert wanted[t].max_rows == -(-5000 // owners)
        assert wanted[t].unique == pytest.approx(alone[t].unique / owners)
        if owners == 1:
            assert wanted[t] == alone[t]
    budget = wanted[0].slot_bytes * 6000
    placed = divide_memory_on_ranks(wanted, shardings, 4, budget)
    stored = {0: [1, 3], 1: [0, 1, 3], 2: [1, 2, 3], 3: [1, 2, 3]}
    by_rank = [
        divide_memory([wanted[t] for t in own_tables], budget) for own_tables in stored.values()
    ]
    for t in range(4):
        options = [
            result[own_tables.index(t)].rows
            for own_tables, result in zip(stored.values(), by_rank, strict=True)
            if t in own_tables
        ]
        assert placed[t].rows == min(options)
    for own_tables in stored.values():
        assert sum(placed[t].rows * wanted[t].slot_bytes for t in own_tables) <= budget
    evenly = [row_wise(4)] * 4
    same = predict_demands(tables, result, **outcomes, shardings=evenly)
    assert same == predict_demands(tables, result, **outcomes)
    assert divide_memory_on_ranks(same, evenly, 4, budget // 2) == divide_memory(same, budget // 2)
    mean, reads = average_over_ranks(wanted, placed, shardings, 4)
    assert mean[0].unique == wanted[0].unique / 4 and reads[2].reads == placed[2].reads / 2
    assert reads[1].reads == placed[1].reads
    mapped = divide_memory_on_ranks(wanted, shardings, 4, budget // 2, wanted[1].max_bytes)
    assert {item.tier for item in mapped} <= {"dram", "mapped"} and len(mapped) == 4


def test_a_table_with_bytes_of_its_own_gets_these():
    tables, result = sample(3, 5000)
    own = {"t1": 400 * (tables[1].record_bytes + 16)}
    wanted = predict_demands(
        tables, result, batch_size=64, window=2, last_batch=200, fixed_bytes=own
    )
    placed = divide_memory(wanted, 3000 * wanted[1].slot_bytes)
    assert placed[1].rows == 400 and placed[1].reads > 0
    with pytest.raises(BudgetExceeded, match=r"plan.memory.tables.t1: got 84 bytes"):
        predict_demands(
            tables, result, batch_size=64, window=2, last_batch=9, fixed_bytes={"t1": 84}
        )


def test_a_table_with_bytes_of_its_own_reads_files_also_without_a_limit_on_the_others():
    """A run that was predicted to read nothing, because memory without a limit holds all rows."""
    tables, result = sample(2, 5000)
    own = {"t1": 400 * (tables[1].record_bytes + 16)}
    wanted = predict_demands(
        tables, result, batch_size=64, window=2, last_batch=200, fixed_bytes=own
    )
    placed = divide_memory(wanted, None)
    assert placed[0].reads == 0 and placed[1].rows == 400
    assert placed[1].reads == wanted[1].reads_at(400) > 0
