"""Caches of evicted rows in byte-addressable memory change no bit, and every row that is needed is counted once."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from scenario import STAYS, assert_same_bits, tables, train

from colonnade import Mesh, PlanConfig, build_plan
from colonnade.errors import ConfigError
from colonnade.store.budget import row_bytes_below_dram

SIZES = [23, 1, 0, 37, 23, 23, 2, 23, 23, 31, 23, 7, 23, 23]
DRAM = 26_000
ROWS = {
    name: row_bytes_below_dram(table)
    for name, table in zip(("user", "item", "tag", "wide"), tables(), strict=True)
}
CACHES = {
    "a row": max(ROWS.values()),  # of some tables none, of the largest one
    "a row of each table": sum(ROWS.values()),
    "7 rows": 7 * sum(ROWS.values()),
    "31 rows": 31 * sum(ROWS.values()),
    "97 rows": 97 * sum(ROWS.values()),
    "all": 1 << 20,
}
LARGE = ("97 rows", "all")


@pytest.fixture(scope="module", params=["float32", "float64"])
def all_in_memory(request):
    return request.param, train(Mesh(), sizes=SIZES, dtype=request.param)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("cache", list(CACHES))
def test_any_cache_and_lookahead(all_in_memory, cache, lookahead, tmp_path):
    dtype, wanted = all_in_memory
    result = train(
        Mesh(), sizes=SIZES, dtype=dtype, dram_bytes=DRAM, mapped_bytes=CACHES[cache], lookahead=lookahead,
        folder=tmp_path, evaluate_every=3,
    )  # fmt: skip
    assert_same_bits(wanted, result)
    assert list((tmp_path / "mapped").iterdir()) == []  # its files have no names
    check_counts(result)
    assert cache not in LARGE or result.sources.mapped > 20


def check_counts(result) -> None:
    """Check that every row needed is a hit of one tier, or initialised."""
    sources, tiers = result.sources, result.tiers
    assert list(tiers) == ["dram", "mapped", "ssd"]
    dram, mapped = tiers["dram"], tiers["mapped"]
    assert dram.hits == sources.resident and mapped.hits == sources.mapped
    assert dram.misses == mapped.hits + mapped.misses
    assert mapped.misses == sources.read + sources.copied + sources.born
    evicted = sources.evicted_clean + sources.evicted_dirty
    assert mapped.rows_written <= evicted
    assert mapped.read_bytes >= mapped.hits and mapped.written_bytes >= mapped.rows_written


def test_a_cache_for_all_evicted_rows_leaves_nothing_to_read_or_write(tmp_path):
    result = train(
        Mesh(), sizes=SIZES, dram_bytes=DRAM, mapped_bytes=CACHES["all"], folder=tmp_path
    )
    assert result.sources.mapped > 50 and result.sources.evicted_dirty > 100
    assert result.sources.read == result.sources.copied == 0
    assert result.tiers["ssd"].rows_written == 0


def test_a_cache_saves_reads(tmp_path):
    reads = []
    for number, mapped_bytes in enumerate([None, CACHES["31 rows"], CACHES["97 rows"]]):
        folder = tmp_path / str(number)
        result = train(
            Mesh(), sizes=SIZES, dram_bytes=DRAM, mapped_bytes=mapped_bytes, folder=folder
        )
        reads.append(result.sources.read + result.sources.copied)
    assert reads[0] > reads[1] > reads[2]


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_cache_under_staleness(staleness, tmp_path):
    wanted = train(Mesh(), sizes=SIZES, staleness=staleness)
    result = train(
        Mesh(), sizes=SIZES, staleness=staleness, dram_bytes=60_000, mapped_bytes=CACHES["97 rows"],
        folder=tmp_path, lookahead=1,
    )  # fmt: skip
    assert_same_bits(wanted, result)
    assert result.sources.mapped > 0


@pytest.mark.parametrize("stays", list(STAYS))
def test_a_cache_where_rows_come_and_go(stays, tmp_path):
    wanted = train(Mesh(), sizes=SIZES, stays=stays)
    for cache in ("a row of each table", "7 rows", "all"):
        result = train(
            Mesh(), sizes=SIZES, stays=stays, dram_bytes=DRAM, mapped_bytes=CACHES[cache],
            folder=tmp_path / cache, evaluate_every=2,
        )  # fmt: skip
        assert_same_bits(wanted, result)
        assert cache not in LARGE or result.sources.mapped > 0


def test_a_device_above_main_memory_above_a_cache(tmp_path):
    wanted = train(Mesh(), sizes=SIZES, dram_bytes=100_000, hbm_bytes=25_000, folder=tmp_path / "0")
    for cache in ("a row of each table", "7 rows", "all"):
        result = train(
            Mesh(), sizes=SIZES, hbm_bytes=25_000, dram_bytes=DRAM, mapped_bytes=CACHES[cache],
            folder=tmp_path / cache,
        )  # fmt: skip
        assert_same_bits(wanted, result)
        assert list(result.tiers) == ["hbm", "dram", "mapped", "ssd"]
        assert cache not in LARGE or result.sources.mapped > 20


def train_over_cache(mesh, folder):
    plain = train(mesh, sizes=SIZES)
    cached = train(
        mesh, sizes=SIZES, dram_bytes=14_000, mapped_bytes=CACHES["97 rows"], folder=folder
    )
    return plain, cached


def test_a_cache_on_each_of_two_ranks(tmp_path):
    for plain, cached in run_ranks(2, train_over_cache, tmp_path):
        assert_same_bits(plain, cached)
        check_counts(cached)
        assert cached.sources.mapped > 0


def test_plans_divide_what_whole_tables_leave():
    memory = {"dram": DRAM, "mapped": f"/m:{CACHES['97 rows']}"}
    plan = build_plan(tables(), 1, PlanConfig(memory=memory))
    rows = {table.name: (table.tier, table.mapped_rows) for table in plan.tables}
    assert rows["tag"][1] == 0
    assert rows["item"][1] > 0 and rows["wide"][1] > 0
    used = sum(
        table.mapped_rows * ROWS[table.name]
        + (table.capacity_rows * ROWS[table.name] if table.tier == "mapped" else 0)
        for table in plan.tables
    )
    assert used <= CACHES["97 rows"]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"dram": DRAM, "mapped": "/m:0"}, "got '/m:0', wanted a size of at least 1 byte"),
        ({"dram": DRAM, "mapped": "/m:7"}, r"plan\.memory\.mapped: got 7 bytes, wanted at least"),
        ({"mapped": "/m:1GiB"}, r"plan\.memory\.mapped: got /m without plan\.memory\.dram"),
    ],
)  # fmt: skip
def test_budgets_that_contradict(memory, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        build_plan(tables(), 1, PlanConfig(memory=memory))


def test_different_runs_differ():
    """The comparison can fail."""
    one, other = train(Mesh(), steps=2), train(Mesh(), steps=3)
    assert not torch.equal(one.rows["user"], other.rows["user"])
