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


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capacity")
    file = folder / "capacity.json"
    capacity.main(["--quick", "--folder", str(folder), "--json", str(file)])
    assert list(folder.iterdir()) == [file], "row files are removed"
    return json.loads(file.read_text())


def test_each_size_has_all_figures(result):
    values = {(case["case"], case["unit"]): case["values"] for case in result["cases"]}
    assert values.keys() == {
        (size, unit) for size in ("6.25 T", "100 T") for unit in capacity.UNITS.values()
    }
    for size in ("6.25 T", "100 T"):
        assert len(values[size, "samples/s"]) == 2 and len(values[size, "seconds to resume"]) == 1
        assert 516 < values[size, "bytes/row in files"][0] < 1.1 * 528  # 512 of weights, 4 of state
    assert result["machine"]["rows"] == 200_000 and result["ratios"]["speed_100T_of_6T"] > 0


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
