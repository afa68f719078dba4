"""`bench quality`: arms share their base, a file is continued, and what is compared is paired."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import quality as bench  # noqa: E402
from harness import ArmFile, BenchError, Measured  # noqa: E402
from tables import quality as tables  # noqa: E402
from tables.pilot import choose_next_rate, find_best_rate  # noqa: E402
from workers.quality_case import Run  # noqa: E402

from colonnade.errors import DataError  # noqa: E402


class Calls:
    """Training that records its runs: half of the AUC is lost by each unit of the settings."""

    def __init__(self, num_runs: int = 1000) -> None:
        self.runs: list[tuple[float, Run]] = []
        self.num_runs = num_runs

    def __call__(self, settings: float, run: Run) -> dict[str, list[float]]:
        if len(self.runs) == self.num_runs:
            raise KeyboardInterrupt
        self.runs.append((settings, run))
        score = 0.8 - settings / 2 + 0.01 * run.seed - abs(run.lr - 0.2)
        return {"AUC": [score] * 3, "row messages saved": [0.7]}


def group_of(calls: Calls, **more: object) -> bench.Group:
    arms = {"synchronous": 0.0, "default": 0.001, "late": 0.004}
    return bench.Group(
        "cache", "stream adagrad", arms, calls, **{"samples": 1000, "seeds": 2, **more}
    )


def test_arms_share_the_base_and_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, path = Calls(), tmp_path / "quality.json"
    monkeypatch.setattr(bench, "GROUPS", [group_of(calls, rates=(0.1, 0.2, 0.4))])
    bench.main(["--json", str(path)])
    pilots = [run for _, run in calls.runs if run.is_pilot]
    assert sorted(run.lr for run in pilots) == [0.1, 0.2, 0.4]
    runs = [(settings, run.seed) for settings, run in calls.runs if not run.is_pilot]
    assert runs == [(s, seed) for seed in (0, 1) for s in (0.0, 0.001, 0.004)], "one base a seed"
    assert {run.lr for _, run in calls.runs if not run.is_pilot} == {0.2}
    result = json.loads(path.read_text())
    assert result["bench"] == "quality"
    assert result["ratios"]["auc_lost stream adagrad late"] == pytest.approx(0.002)
    assert "+0.00200" in capsys.readouterr().out


def test_a_cut_file_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cut = tmp_path / "quality.json", Calls(num_runs=4)
    monkeypatch.setattr(bench, "GROUPS", [group_of(cut)])
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--json", str(path)])
    before = json.loads(path.read_text())["cases"]
    assert len(before) == 8
    rest = Calls()
    monkeypatch.setattr(bench, "GROUPS", [group_of(rest)])
    bench.main(["--json", str(path), "--arms", "synchronous", "late"])
    assert [(settings, run.seed) for settings, run in rest.runs] == [(0.004, 1)]
    bench.main(["--json", str(path), "--seeds", "3", "--seconds", "0"])
    assert len(rest.runs) == 1, "no time left"
    bench.main(["--json", str(path)])
    assert [(settings, run.seed) for settings, run in rest.runs[1:]] == [(0.001, 1)]
    after = json.loads(path.read_text())["cases"]
    assert after[:8] == before and len(after) == 12
    bench.main(["--json", str(path), "--samples", "500", "--seeds", "1"])
    assert {run.samples for _, run in rest.runs[2:]} == {500} and len(rest.runs) == 5


def test_a_group_without_its_data_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: float, run: Run) -> dict[str, list[float]]:
        raise DataError("no file ratings.parquet")

    calls = Calls()
    monkeypatch.setattr(bench, "GROUPS", [group_of(fail, samples=0), group_of(calls)])
    bench.main(["--quick"])
    assert "left out, no file ratings.parquet" in capsys.readouterr().err
    assert [run.samples for _, run in calls.runs] == [bench.QUICK_SAMPLES] * 3


def test_groups_differ_and_have_a_base_first() -> None:
    names = [group.name for group in bench.GROUPS]
    assert len(set(names)) == len(names)
    assert {next(iter(group.arms)) for group in bench.GROUPS} == set(tables.BASES)


@pytest.mark.parametrize(
    ("file", "group", "loss"),
    [
        ("quality_partials.json", "lr", "tail_auc_lost lr 16 x 256 against synchronous, 256"),
    ],
)
def test_files_of_former_benches_are_printed(
    file: str, group: str, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = BENCH / "results" / file
    text = path.read_text()
    bench.main(["--json", str(path), "--seeds", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(group) and "+" in line for line in lines)
    ratios = tables.ratios_of(
        ArmFile(path, "quality", tables.ratios_of, {}, bench.FORMER_NAMES).measured
    )
    former = json.loads(text)["ratios"]
    assert ratios[loss] == pytest.approx(former[loss], abs=1e-6)
    assert path.read_text() == text


def test_the_real_runner_runs_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK_SAMPLES", 6 * 512)
    path = tmp_path / "quality.json"
    words = [
        "--quick",
        "--suite",
        "stream adagrad",
        "--arms",
        "synchronous",
        "default",
    ]
    bench.main(["--json", str(path), *words])
    result = json.loads(path.read_text())
    wanted = {
        "auc_lost_at_default",
        "auc_lost_at_default high",
        "saved_at_default",
    }
    assert wanted <= set(result["ratios"])
    assert (
        0 < result["ratios"]["saved_at_default"] < 1
        and "saved_at_share_0.1" not in result["ratios"]
    )
    units = {(case["system"], case["unit"]) for case in result["cases"]}
    assert {
        ("synchronous", "ceiling"),
        ("default", "row messages saved"),
        ("default", "AUC by step"),
    } <= units
    assert "stream adagrad of 3,072" in capsys.readouterr().out


def lost(name: str, **seeds: float) -> list[Measured]:
    """AUC of `default` against `synchronous` with messages saved, by seed."""
    rows = []
    for seed, loss in seeds.items():
        case = f"{name} seed {seed[1:]}"
        rows += [
            Measured(case, "synchronous", "AUC", [0.8, 0.9]),
            Measured(case, "default", "AUC", [0.8 - loss, 0.9 - loss]),
            Measured(case, "default", "row messages saved", [0.7 + loss]),
        ]
    return rows


def test_the_worst_data_set_counts() -> None:
    measured = [
        *lost("ml-1m adagrad", s0=0.001, s1=0.003), *lost("stream adagrad", s0=0.0001),
        *lost("stream sgd", s0=0.02), *lost("ml-1m sgd", s0=0.05), *lost("dlrm", s0=0.5),
    ]  # fmt: skip
    ratios = tables.ratios_of(measured)
    assert ratios["auc_lost ml-1m adagrad default"] == pytest.approx(0.002)
    assert ratios["auc_lost_at_default"] == pytest.approx(0.002)
    half = ratios["auc_lost ml-1m adagrad default +-"]
    assert ratios["auc_lost_at_default high"] == pytest.approx(0.002 + half)
    assert ratios["saved_at_default"] == pytest.approx(0.7001)
    assert ratios["sgd_lost"] == pytest.approx(0.02)


def test_towers_lose_as_much_as_the_worst_model_and_stripes_as_the_best() -> None:
    measured = []
    for group, learned, striped in (
        ("dlrm", 0.001, 0.01), ("dcnv2", -0.002, 0.02), ("dlrm on ml-1m", 0.003, 0.0)
    ):  # fmt: skip
        case = f"{group} seed 0"
        measured += [
            Measured(case, "flat", "AUC", [0.8, 0.9]),
            Measured(case, "learned towers CR 2", "AUC", [0.8 - learned, 0.9 - learned]),
            Measured(case, "striped towers CR 2", "AUC", [0.8 - striped, 0.9 - striped]),
        ]
    ratios = tables.ratios_of(measured)
    assert ratios["loss_cr2"] == pytest.approx(0.001)
    assert ratios["striped_loss_cr2"] == pytest.approx(0.01)
    assert ratios["loss_cr2_ml1m"] == pytest.approx(0.003)
    assert "loss_cr4" not in ratios


def test_steps_to_score_are_of_the_mean_curve_of_common_seeds() -> None:
    def case(seed: int, arm: str, curve: list[float]) -> list[Measured]:
        name = f"fm seed {seed}"
        return [
            Measured(name, arm, "AUC", [curve[-1]] * 2), Measured(name, arm, "AUC by step", curve),
            Measured(name, arm, "scored steps", [10.0, 20.0, 30.0, 40.0]),
        ]  # fmt: skip

    measured = [
        *case(0, "synchronous", [0.5, 0.7, 0.8, 0.79]), *case(1, "synchronous", [0.5, 0.72, 0.80, 0.81]),
        *case(0, "default", [0.4, 0.6, 0.79, 0.80]), *case(1, "default", [0.4, 0.6, 0.79, 0.80]),
        *case(0, "late", [0.4, 0.5, 0.6, 0.7896]), *case(2, "late", [0.9, 0.9, 0.9, 0.9]),
    ]  # fmt: skip
    ratios = tables.ratios_of(measured)
    assert ratios["steps_to_score fm synchronous"] == 30
    assert ratios["steps_to_score fm default"] == 40
    assert "steps_to_score fm late" not in ratios
    assert ratios["steps_to_near_score fm late"] == 40


def test_differences_are_of_the_same_seed_and_group() -> None:
    measured = [
        Measured("fm seed 0", "synchronous", "AUC", [0.7, 0.8]),
        Measured("fm seed 0", "synchronous, 256", "AUC", [0.8, 0.8]),
        Measured("fm seed 0", "16 x 256", "AUC", [0.6, 0.6]),
        Measured("fm seed 0", "16 x 256", "AUC of the tail", [0.6, 0.6]),
        Measured("fm seed 1", "16 x 256", "AUC", [0.1, 0.1]),  # the others are not there yet
        Measured("fm pilot", "16 x 256", "AUC at 0.01", [0.1]),
        Measured("fm seed 0", "ceiling", "AUC", [0.9, 0.9]),
        Measured("deepfm seed 0", "synchronous", "AUC", [0.9, 0.9]),
        Measured("world", "1 rank", "AUC of fm", [0.9, 0.9]),
    ]
    groups = tables.groups_of(measured)
    assert list(groups) == ["fm", "deepfm"]
    (result,) = tables.differences_of(groups["fm"], "16 x 256", "synchronous", "AUC")
    assert result == pytest.approx([0.1, 0.2])
    ratios = {
        name: value for name, value in tables.ratios_of(measured).items() if name[-2:] != "+-"
    }
    assert ratios == {
        "auc_lost fm synchronous, 256": pytest.approx(-0.05),
        "auc_lost fm 16 x 256": pytest.approx(0.15),
        "auc_lost fm 16 x 256 against synchronous, 256": pytest.approx(0.2),
    }


def test_an_interval_covers_samples_and_seeds() -> None:
    """Interval contains the true difference, 0.01."""
    random, hits, alone = np.random.default_rng(0), 0, 0
    for _ in range(200):
        of_blocks = 0.02 * random.standard_normal(50)
        differences = [
            0.01 + of_blocks + 0.003 * random.standard_normal() + 0.005 * random.standard_normal(50)
            for _ in range(3)
        ]
        mean, half = tables.interval(differences)
        hits += abs(mean - 0.01) <= half
        one, narrow = tables.interval(differences[:1])
        alone += abs(one - 0.01) <= narrow
        assert half > 0 and narrow > 0
    assert hits >= 184  # 190 are expected, or more
    assert 100 < alone < 196  # one seed says nothing of seeds


@pytest.mark.parametrize("choices", bench.RATES.values(), ids=list(bench.RATES))
def test_the_pilot_stops_between_two_worse_rates(choices: tuple[float, ...]) -> None:
    for best in choices:
        rates: dict[float, float] = {}
        while (lr := choose_next_rate(choices, rates)) is not None:
            rates[lr] = -abs(np.log(lr / best))
        assert max(rates, key=lambda rate: rates[rate]) == best


def test_a_file_of_another_bench_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    row = Measured("fm seed 0", "synchronous", "AUC", [0.5])
    ArmFile(path, "train", lambda _: {}, {"torch": "1"}).add([row])
    with pytest.raises(BenchError, match="holds train"):
        ArmFile(path, "quality", tables.ratios_of, {}, bench.FORMER_NAMES)
    assert ArmFile(path, "train", lambda _: {}, {}).measured == [row]
    assert list(tmp_path.iterdir()) == [path]
    missing = tmp_path / "none.json"
    assert ArmFile(missing, "quality", tables.ratios_of, {}).measured == []


def test_a_pilot_goes_on_with_the_rates_of_the_file() -> None:
    file = ArmFile(None, "quality", lambda _: {}, {})
    tried: list[float] = []

    def run_pilot(lr: float) -> list[float]:
        tried.append(lr)
        return [0.0, -abs(np.log(lr / 0.02))]

    arguments = file, "fm pilot", "synchronous", (0.01, 0.02, 0.04, 0.08), run_pilot
    assert find_best_rate(*arguments, is_quick=True) == 0.04 and tried == [0.04]
    assert find_best_rate(*arguments) == 0.02 and tried == [0.04, 0.02, 0.01]
    assert find_best_rate(*arguments) == 0.02 and len(tried) == 3
    assert [m.unit for m in file.measured] == ["AUC at 0.04", "AUC at 0.02", "AUC at 0.01"]
