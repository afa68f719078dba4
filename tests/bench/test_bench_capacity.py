"""`bench capacity`: all sizes train as many rows of their own ids; ratios mean what they say; small disks are refused.

And `colonnade bench` knows how long each bench takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import capacity  # noqa: E402
from harness import BenchError, Measured  # noqa: E402
from workers.capacity import Training  # noqa: E402

from colonnade.cli.bench import read_minutes  # noqa: E402
from colonnade.errors import ConfigError  # noqa: E402


def check_figures(cases, sizes, rounds):
    values = {(case["case"], case["unit"]): case["values"] for case in cases}
    assert values.keys() == {(size, unit) for size in sizes for unit in capacity.UNITS.values()}
    for size in sizes:
        assert len(values[size, "samples/s"]) == rounds
        assert len(values[size, "seconds to save"]) == len(values[size, "seconds to resume"]) == 1
        assert 516 < values[size, "bytes/row in files"][0] < 1.1 * 528  # 512 of weights, 4 of state


def test_a_size_has_all_figures(tmp_path):
    measured = capacity.measure(tmp_path, ["100 T"], 60_000, rounds=1, restarts=1, steps=1)
    check_figures([vars(row) for row in measured], ["100 T"], rounds=1)


@pytest.mark.slow
def test_a_quick_run_writes_a_report_and_removes_its_rows(tmp_path):
    file = tmp_path / "capacity.json"
    capacity.main(["--quick", "--folder", str(tmp_path), "--json", str(file)])
    result = json.loads(file.read_text())
    check_figures(result["cases"], ["6.25 T", "100 T"], rounds=2)
    assert result["machine"]["rows"] == 200_000 and result["ratios"]["speed_100T_of_6T"] > 0
    assert list(tmp_path.iterdir()) == [file]


def test_ids_are_of_the_whole_space_and_none_is_double(tmp_path):
    training = Training(tmp_path / "rows", capacity.SIZES["100 T"], 20_000)
    assert len(training.ids.unique()) == 20_000 and training.step == 5
    assert training.ids.max() > 0.99 * capacity.SIZES["100 T"] == 0.99 * 781_250_000_000
    assert len(training.embeddings.store.backings[0]) == 20_000, "every row exists"
    assert training.embeddings.store.resident_bytes() < 0.4 * 20_000 * 528


def test_ratios_are_of_rounds():
    rates = {"6.25 T": [100.0, 50.0, 10.0], "25 T": [40.0] * 3, "100 T": [90.0, 50.0, 11.0]}
    measured = [Measured(size, "colonnade", "samples/s", v) for size, v in rates.items()]
    measured.append(Measured("100 T", "colonnade", "seconds to save", [1.0]))
    assert capacity.compute_ratios(measured) == {
        "speed_100T_of_6T": 1.0, "speed_100T_of_6T_least": 0.9, "speed_100T_of_6T_largest": 1.1,
        "flat_within": pytest.approx(0.2),
    }  # fmt: skip


def test_nodes_are_compared_by_turns():
    rates = {"6.25 T": [100.0], "100 T": [100.0]}
    measured = [Measured(size, "colonnade", "samples/s", v) for size, v in rates.items()]
    for system, values in (("one tiered", [10.0, 30.0]), ("four in DRAM", [40.0, 60.0])):
        measured.append(Measured("nodes", system, "samples/s", values))
    ratios = capacity.compute_ratios(measured)
    assert ratios["one_tiered_of_four_dram"] == 0.375 and ratios["nodes_at_rate_of_four"] == 3
    assert ratios["flat_within"] == 0.0, "nodes are no size"


@pytest.mark.slow
def test_one_node_with_files_and_four_without_train(tmp_path):
    if reason := capacity.why_no_hosts():
        pytest.skip(reason)
    one, four = capacity.measure_nodes(tmp_path, 1, 60_000, 4)
    assert (one.system, four.system) == ("one tiered", "four in DRAM")
    assert len(one.values) == len(four.values) == 1 and min(one.values + four.values) > 0


def test_rows_beyond_the_disk_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(BenchError, match=r"need 786,000 GB of files, .* fewer --rows"):
        capacity.main(["--rows", str(10**11), "--folder", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_a_bench_says_how_long_it_takes(path):
    if path.stem == "harness":
        return
    whole, quick = read_minutes(path)
    assert 0 < quick <= whole
    lines = path.read_text().splitlines()
    assert re.match(r"Minutes: ", lines[2]), "below the first line of its docstring"


def test_a_bench_without_its_minutes_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text('"""Measure something."""\n')
    with pytest.raises(ConfigError, match=r"other\.py: got no line"):
        read_minutes(path)
