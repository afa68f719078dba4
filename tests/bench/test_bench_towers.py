"""`bench towers`: tower modules are the models', and ratios are of systems with the same codec."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from harness import Measured, read_measured  # noqa: E402
from tables.towers import ratios_of  # noqa: E402
from workers import towers_colonnade  # noqa: E402
from workers.exchange_loop import Case  # noqa: E402

from colonnade.models.tower_modules import DCNTower, DLRMTower  # noqa: E402

SYSTEMS = {
    "pooled table-wise": (100.0, 133.0),
    "towers table-wise": (200.0, 180.0),
    "towers CR 2 lossy": (50.0, 40.0),
}


def test_predictions_are_judged_by_what_they_are_of() -> None:
    measured = [Measured("2x2 uplink", name, "MB/step", [1.0]) for name in SYSTEMS]
    for name, (took, text) in SYSTEMS.items():
        measured += [Measured("2x2", name, "ms/step", [took])]
        measured += [Measured("2x2 predicted", name, "ms/step", [text])]
    ratios = ratios_of(measured)
    worst = {
        what: ratios[f"predicted_time_error_of_{what}"] for what in ("flat", "towers", "modules")
    }
    assert worst == pytest.approx({"flat": 0.33, "towers": 0.1, "modules": 0.2})
    assert ratios["predicted_time_error"] == pytest.approx(0.33)
    assert ratios["cr2_vs_best_flat 2x2"] == pytest.approx(2.0)


def test_ratios_are_of_systems_with_the_same_codec() -> None:
    """The geometric mean and the worst case against TorchRec, and the quoted case against flat exchanges."""
    measured = []
    for case, scale in (("2x2 D=64 0.2 Gbit/s", 1.0), ("4x2 D=64 1 Gbit/s", 4.0)):
        steps = {
            "torchrec planner ahead": 80.0 * scale, "torchrec planner ahead fp16 lossy": 30.0,
            "rows row-wise": 60.0, "rows row-wise fp16 lossy": 20.0, "towers table-wise": 5.0,
            "towers CR 4 lossy": 40.0, "towers CR 4 dcnv2 lossy": 160.0, "towers CR 4 fp16 lossy": 10.0,
        }  # fmt: skip
        measured += [Measured(f"{case} uplink", name, "MB/step", [1.0]) for name in steps]
        measured += [Measured(case, name, "ms/step", [ms]) for name, ms in steps.items()]
    ratios = ratios_of(measured)
    wanted = {
        "cr4_vs_best_torchrec_mean": 4.0, "cr4_vs_best_torchrec_worst": 2.0, "cr4_vs_best_flat": 1.5,
        "cr4_vs_best_torchrec_worst fp16": 3.0, "cr4_vs_best_flat fp16": 2.0, "cr4_vs_best_flat dcnv2": 0.375,
    }  # fmt: skip
    assert {name: ratios[name] for name in wanted} == pytest.approx(wanted)
    assert "bags_cr4_vs_best_flat" not in ratios


@pytest.mark.parametrize(("model", "kind"), [("dlrm", DLRMTower), ("dcnv2", DCNTower)])
def test_modules_are_the_models(model: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(ids="", rows=[50] * 5, dim=16, batch_size=4, lookups=1, pooled=True, seed=0)
    towers = [case.names[:2], case.names[2:]]
    monkeypatch.setattr(towers_colonnade, "towers_of", lambda case: towers)
    _, _, consumers = towers_colonnade.Opened.declared(case, {"model": model, "ratio": 4})
    for (module, fields), names in zip(consumers.values(), towers, strict=True):
        assert fields == names and isinstance(module.module, kind)
        assert module.ratio >= 4 and module.out in (len(names) * 4, 2 * (len(towers[0]) * 16 // 8))


def test_what_was_recorded_is_what_its_raw_values_say() -> None:
    file = BENCH / "results" / "towers.json"
    reported = json.loads(file.read_text(encoding="utf-8"))["ratios"]
    assert ratios_of(read_measured(file, "towers")) == pytest.approx(reported, rel=1e-6)
