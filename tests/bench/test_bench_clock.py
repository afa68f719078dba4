"""Bench staleness: ratios are of the fastest of a kind, blocks have whole periods, ranks' own ids are their own."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import staleness as bench  # noqa: E402
from cluster import race  # noqa: E402
from harness import Measured  # noqa: E402
from tables import clock as tables  # noqa: E402
from tables.exchange import UPLINK  # noqa: E402
from workers.staleness_colonnade import ClickCase  # noqa: E402

from colonnade.config.plan import CacheConfig  # noqa: E402
from colonnade.plan.caching import build_table_caches  # noqa: E402
from colonnade.table import Table  # noqa: E402

SLOW, FAST = "2x2 mixed 0.2 Gbit/s", "2x2 mixed 10 Gbit/s"
SMALL = "2x2 mixed 128 samples 0.2 Gbit/s"
DCN = "2x2 mixed DCN 0.2 Gbit/s"


def rows(case: str, **ms: float) -> list[Measured]:
    names = {"none": "no cache", "rows": "rows row-wise", "auto": "auto"}
    names |= {"ten": "row_clock(10)", "hundred": "row_clock(100)"}
    names |= {"default": tables.DEFAULT, "none8": tables.NO_CACHE + tables.INT8}
    names |= {"default8": tables.DEFAULT + tables.INT8}
    results = [Measured(case, names[name], "ms/step", [value]) for name, value in ms.items()]
    return results + [Measured(case + UPLINK, m.system, "MB/step", [1.0]) for m in results]


def test_ratios_are_of_the_fastest_of_each_kind():
    measured = [
        *rows(
            SLOW,
            none=300.0,
            rows=200.0,
            auto=180.0,
            ten=120.0,
            hundred=100.0,
            default=150.0,
            none8=90.0,
            default8=30.0,
        ),
        *rows(DCN, none=300.0, rows=200.0, default=200.0),
        *rows(SMALL, none=100.0, default=100.0),
        *rows(FAST, none=50.0, rows=60.0, hundred=100.0, default=500.0),
    ]
    ratios = tables.ratios_of(measured)
    assert ratios["row_clock_vs_no_cache"] == pytest.approx(3.0)
    assert ratios["default_vs_no_cache"] == pytest.approx(1.5), "the worst of the slowest links"
    assert ratios["default_vs_no_cache_128"] == pytest.approx(1.0)
    assert ratios["default_vs_no_cache_int8"] == pytest.approx(3.0)
    assert ratios[f"default_vs_sync_best {SLOW}"] == pytest.approx(1.2)
    assert ratios["row_clock_vs_sync_best"] == pytest.approx(1.8)
    assert ratios[f"row_clock_vs_no_cache {FAST}"] == pytest.approx(0.5)
    assert ratios[f"row_clock_vs_sync_best {FAST}"] == pytest.approx(0.5), "no cache was the best"
    output = io.StringIO()
    machine = {"cpu": "c", "cores": 2, "threads": 1, "others_share": 0.0, "versions": {}}
    machine["left_out"] = ["x: y"]
    result = {"ratios": ratios, "machine": machine, "commit": "c"}
    tables.print_result(Console(file=output, width=200), measured, result)
    assert "default_vs_no_cache: 1.50 (wanted >= 2.2)" in output.getvalue()
    assert "left out: x: y" in output.getvalue()


@pytest.mark.parametrize("system", bench.COLONNADE)
def test_blocks_of_row_clocks_have_whole_periods_and_every_choice_is_a_plan(system):
    steps, choice = bench.steps_of(system), bench.COLONNADE[system]
    cache_settings = choice.get("cache")
    assert (cache_settings is None) == (not system.startswith("row_clock"))
    if cache_settings is None:
        return
    [cache] = build_table_caches(CacheConfig(**cache_settings), [Table("t", 4, rows=1000)]).values()
    assert cache.rows == 1000
    assert steps.block % (cache.clock.read_bound + 1) == 0
    assert steps.block % (cache.clock.write_bound + 1) == 0
    assert steps.history >= 3 * (cache.clock.read_bound + 1)


def case_of(tmp_path, has_own):
    workload = bench.Workload("any", has_own, batch_size=8, num_batches=120)
    return bench.write_case(tmp_path, workload, num_ranks=4, max_rows=12_000)


def test_own_ids_are_used_by_one_rank(tmp_path):
    for has_own in (False, True):
        (tmp_path / str(has_own)).mkdir()
    mixed, own = (case_of(tmp_path / str(has_own), has_own) for has_own in (False, True))
    assert ClickCase(**own.__dict__) == own and own.width == bench.DIM + 1
    ids, before = np.load(own.ids), np.load(mixed.ids)
    for f, rows_of in enumerate(own.rows):
        assert 0 <= ids[:, :, f].min() and ids[:, :, f].max() < rows_of
        ranks = ids[:, :, f] % 4
        if rows_of >= bench.LARGE:
            assert (ranks == np.arange(4)[None, :, None]).all()
        else:
            assert np.array_equal(ids[:, :, f], before[:, :, f])
    ends = np.array([[[[9, 8]], [[10, 9]]]])  # (N, R, F, B); 11 rows, which two ranks do not divide
    bench.give_own(ends, [11], 11)
    assert ends.ravel().tolist() == [8, 8, 1, 9]


def test_a_graph_s_samples_are_links_with_all_neighbours(tmp_path):
    workload = bench.Workload("graph", batch_size=8, num_batches=2, model=bench.GRAPH)
    case = bench.write_case(tmp_path, workload, num_ranks=4, max_rows=50)
    assert case.rows == [1000] and case.lookups == 2 * (1 + 4 + 16) and case.width == bench.DIM
    assert np.load(case.ids).shape == (2, 4, 1, 8 * case.lookups)
    _, _, model = case.build_model()
    rows = torch.randn(8 * case.lookups, bench.DIM)
    columns = torch.zeros(8, 0)
    logits = model.network({"C1": rows}, columns)
    assert logits.shape == (8, 1)
    changed = rows.clone()
    changed[3 * case.lookups + 41] += 1.0
    moved = (model.network({"C1": changed}, columns) != logits).flatten()
    assert moved.tolist() == [n == 3 for n in range(8)], "the last neighbour of the fourth link"


def test_a_question_says_how_many_steps_its_systems_have():
    reported = []

    class Fleet:
        def send(self, message):
            reported.append(message)

        def answers(self):
            return [{"seconds": [0.01]}]

    taken = race.Bench.__new__(race.Bench)
    taken.extent, taken.question = bench.QUICK, bench.QUESTION
    taken.take_turns(
        [race.Turn(name, Fleet()) for name in ("no cache", "row_clock(100)")], rounds=2
    )
    limit = bench.QUICK.max_steps
    assert [item["system"] for item in reported] == ["no cache", "row_clock(100)"] * 2
    assert [item["warm_up"] for item in reported] == [race.WARM_UP_STEPS] * 4
    assert {item["steps"] for item in reported} == {limit}
