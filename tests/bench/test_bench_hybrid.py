"""Benches hybrid and sparse: figures mean what they say."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import sparse  # noqa: E402
from harness import Measured  # noqa: E402
from tables import hybrid as tables  # noqa: E402
from tables.exchange import EXPOSED, PROCESSOR, UPLINK  # noqa: E402


def rows(case: str, ms: dict[str, float], free: dict[str, float] | None = None) -> list[Measured]:
    results = [Measured(case, system, "ms/step", [value]) for system, value in ms.items()]
    results += [Measured(case + UPLINK, system, "MB/step", [1.0]) for system in ms]
    for system, value in (free or {}).items():
        results.append(Measured(case + EXPOSED, system, "ms/step", [ms[system] - value]))
    return results


def test_overlap_is_of_the_best_plans_and_of_cases_that_are_alike():
    alone = {"rows row-wise": 60.0, "pooled table-wise": 80.0}
    one = {"rows row-wise": 100.0, "pooled table-wise": 110.0, "bounded(1) rows row-wise": 75.0}
    one |= {"bounded(4) rows row-wise": 72.0, "torchrec planner ahead": 144.0}
    measured = [
        *rows("2x2 0 units 1 Gbit/s", alone),
        *rows("2x2 128 units 1 Gbit/s", one, {"rows row-wise": 50.0}),
        *rows("2x2 1024 units 1 Gbit/s", one, {"rows row-wise": 10.0}),  # little to hide
        *rows("2x2 128 units 10 Gbit/s", one),  # never measured alone
    ]
    judged, unlike = tables.overlaps(measured)
    assert (judged.compute, judged.communication, judged.late) == (50.0, 60.0, 72.0)
    assert judged.won == pytest.approx(28 / 40) and judged.is_judged and not unlike.is_judged
    ratios = tables.ratios_of(measured)
    assert ratios["overlap_won"] == pytest.approx(0.7)
    assert ratios["hybrid_vs_sync_best"] == pytest.approx(100 / 72)
    assert ratios["hybrid_vs_torchrec_best"] == pytest.approx(2.0)
    assert "overlap_won 2x2 1024 units 1 Gbit/s" not in ratios
    assert "overlap_reached 2x2 128 units 1 Gbit/s" not in ratios, (
        "nobody said what processors need"
    )
    case = "2x2 128 units"
    measured.append(Measured(case + tables.CORES, "machine", "processors", [2.0]))
    measured += [
        Measured(f"{case} {rate:g} Gbit/s" + PROCESSOR, "rows row-wise", "ms/step", [130.0])
        for rate in (1, 10)
    ]
    assert tables.overlaps(measured)[0].processors == 65.0
    ratios = tables.ratios_of(measured)
    assert ratios["overlap_won"] == pytest.approx(0.7), "is as it was"
    assert ratios["overlap_reached 2x2 128 units 1 Gbit/s"] == pytest.approx(28 / 35)


def test_sparse_rates_and_the_bytes_of_a_row():
    measured = [
        Measured("api, 2 threads", "colonnade", "ms/step", [4.0, 5.0, 4.0]),
        Measured("api, 1 threads", "colonnade", "ms/step", [5.0]),
        Measured("api, 2 threads rows", "colonnade", "ms/step", [2.0]),
        Measured("roofline forward", "colonnade", "ms/step", [1.0]),
        Measured("roofline rows", "colonnade", "ms/step", [1.0]),
        Measured("2 ranks, 0 servers", "colonnade", "samples/s", [300_000.0]),
        Measured("4 ranks, 2 servers", "colonnade", "samples/s", [200_000.0]),
    ]
    row = {"payload": 128.0, "clock": 8.0, "beyond": 16.0, "beyond_told": 16.0, "total": 152.0}
    ratios = sparse.ratios_of(measured, {"D=32 SGD": row}, 4096)
    assert ratios["sparse_samples_per_second"] == pytest.approx(1_024_000)
    assert ratios["sparse_across_processes_min"] == 200_000
    assert ratios["sparse_of_roofline"] == pytest.approx(0.5)
    assert ratios["row_bytes_beyond_payload_max"] == 24
    output = io.StringIO()
    sparse.show(Console(file=output, width=sparse.WIDTH), measured, {"D=32 SGD": row}, ratios)
    assert "a row of D=32 SGD: 152.0 bytes = 128 payload + 8 clock + 16.0" in output.getvalue()
    assert "sparse_samples_per_second: 1,024,000 (wanted >= 900,000" in output.getvalue()
