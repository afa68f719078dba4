"""`bench cache` must count what it names: bytes row by row, and a rate of real lookups."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from slow_directory import EXPIRED, HIT, MISS, SlowDirectory

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import cache  # noqa: E402
from tables.cache import Figures, print_figures, print_ratios, ratios_of  # noqa: E402
from workers import cache_rate  # noqa: E402
from workers.cache_streams import RANKS, Shape, Stream, open_stream  # noqa: E402
from workers.cache_traffic import Policy, het, row_clock  # noqa: E402
from workers.light_lfu import LightLfu  # noqa: E402

from colonnade.data.sets.synthetic import CRITEO_CARDINALITIES  # noqa: E402

SHAPE = Shape("zipf", 2, 300, warm=12, measured=20, tail=6)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return open_stream(SHAPE)


def test_streams_are_what_they_say(stream):
    assert len(stream.batches) == 38 and {len(batch) for batch in stream.batches} == {RANKS}
    for ids in stream.batches[3]:
        assert 0 <= ids.min() and ids.max() < 300 and (np.diff(ids) > 0).all()
    uses = stream.next_uses()
    for step, rank in (0, 0), (20, 5), (37, 7):
        for id, distance in zip(stream.batches[step][rank], uses[step][rank], strict=True):
            later = [t for t in range(step + 1, 38) if id in stream.batches[t][rank]]
            assert distance == (later[0] - step if later else 0)
    criteo = open_stream(Shape("criteo", 2, 50, 1, 1, 0))
    assert criteo.num_rows == sum(min(50, n) for n in CRITEO_CARDINALITIES)
    assert max(ids.max() for ids in criteo.batches[0]) < criteo.num_rows


@pytest.mark.parametrize("policy", [Policy("lfu"), Policy("lookahead", 3), Policy("lookahead")])
def test_bytes_of_row_clock_are_those_of_a_count_row_by_row(stream, policy):
    uses = stream.next_uses()
    capacity, staleness = 20, 9
    result = row_clock(stream, uses, policy, capacity, staleness)
    world = [SlowDirectory(capacity, 4, 5, policy.name) for _ in range(RANKS)]
    changed: dict[int, int] = {}
    rows, names, used, hits = 0, 0.0, 0, 0
    for step in range(32):
        all_said = []
        for rank, directory in enumerate(world):
            ids, far = stream.batches[step][rank].tolist(), uses[step][rank].tolist()
            window = policy.window or 99
            coming = stream.batches[step + window][rank].tolist() if step + window < 38 else []
            expected = directory.decide_batch(
                ids, [n if n <= window else 0 for n in far], coming, window
            )
            all_said.append(expected)
            is_counted = step >= 12
            used += len(ids) * is_counted
            for id, (_, outcomes, age, _, pushed, _) in expected.by_row.items():
                hits += (outcomes == HIT) * is_counted
                is_sent = outcomes == MISS or (
                    outcomes == EXPIRED and changed.get(id, -1) >= step - age
                )
                rows += (is_sent + pushed) * is_counted
                names += (outcomes != HIT or pushed) * 8.25 * is_counted
                names += (outcomes == EXPIRED) * 4.125 * is_counted
            rows += len(expected.evicted) * is_counted
            names += len(expected.evicted) * 8.25 * is_counted
        for expected in all_said:
            for id, row in expected.by_row.items():
                if row[4]:
                    changed[id] = step
            changed |= dict.fromkeys(expected.evicted, step)
    assert (result.rows, result.name_bytes, result.uses, result.hits) == (rows, names, used, hits)
    assert result.saved(16) == 1 - (names + rows * 64) / (used * 136)


@pytest.mark.parametrize("read, write, seed", [(0, 5, 0), (4, 5, 1), (10, 0, 2)])
def test_light_lfu_decides_row_by_row(read, write, seed):
    random = np.random.default_rng(seed)
    fast, slow = LightLfu(30, read, write, 90), SlowDirectory(30, read, write, "light_lfu")
    frozen = set()
    for _ in range(150):
        ids = np.unique(random.zipf(1.3, 25) % 90)
        decision, expected = fast.decide_batch(ids), slow.decide_batch(ids.tolist())
        by_row = np.array([expected.by_row[id][1:5] for id in ids.tolist()])
        result = np.stack([decision.outcomes, decision.ages, decision.ticks, decision.pushed], 1)
        assert result.tolist() == by_row.tolist()
        evicted = dict(
            zip(decision.evicted_ids.tolist(), decision.evicted_ticks.tolist(), strict=True)
        )
        assert evicted == {id: ticks for id, (_, ticks) in expected.evicted.items()}
        assert set(np.flatnonzero(fast.score)) == slow.rows.keys()
        assert frozen <= slow.rows.keys()  # used often enough, they never leave
        frozen = {id for id, row in slow.rows.items() if row.uses > 10}
    assert 0 < len(frozen) < 30


def test_hets_protocol_names_every_row_and_never_reads_more_than_it_uses(stream):
    unbounded = het(stream, Policy("light_lfu"), 300, 10**9)
    assert unbounded.rows < unbounded.uses, "only rows that were never here are sent"
    synchronous = het(stream, Policy("light_lfu"), 300, 0)
    assert synchronous.saved(128) < 0.1
    assert synchronous.name_bytes >= 16 * synchronous.uses


def test_the_rate_is_that_of_lookups_and_updates():
    """Steps gather the slab's rows and apply SGD with every key's gradient."""
    torch.manual_seed(0)
    keys = cache_rate.Cache(16, 40, "lfu")
    ids = torch.randint(0, 12, (40,))
    keys.step(ids)
    first = keys.outputs.clone()
    keys.step(ids)
    counts = torch.bincount(ids, minlength=12)[ids].float()
    torch.testing.assert_close(keys.outputs, first - 0.01 * 1e-3 * counts[:, None].expand_as(first))
    assert keys.directory.number == 2 and len(keys.directory) == len(ids.unique())


def test_the_report_has_the_ratios(stream, monkeypatch):
    monkeypatch.setattr(cache, "SHARES", (0.1, 1.0))
    figures = Figures()
    cache.count_traffic(stream, stream.next_uses(), figures)
    cache.count_recovery(Shape("zipf", 4, 300, 20, 10, 0), figures)
    figures.seconds[16, 104] = {name: [1e-6, 2e-6] for name in (*cache_rate.PHASES, "roofline")}
    ratios = ratios_of(figures)
    assert {
        "gap_to_optimum_closed", "saved_row_clock_100_full", "predicted_bytes_error",
        "cache_keys_per_second_d16", "cache_of_roofline_d16",
    } <= set(ratios)  # fmt: skip
    assert ratios["cache_keys_per_second_d16"] == pytest.approx(104 / 6e-6)
    for measured in figures.measured():
        assert measured.values and measured.unit in (
            "bytes saved",
            "bytes predicted",
            "batches",
            "ms",
        )
    console = Console(width=180, record=True, file=io.StringIO())
    print_figures(console, figures)
    print_ratios(console, ratios)
    text = console.export_text()
    assert "million keys/s" in text and "gap_to_optimum_closed" in text
