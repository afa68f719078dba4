"""`bench towers-movielens` must train what the command line trains, and go on with its file."""

import json
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
from movielens_files import write_movielens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import towers_movielens as bench
from towers_quality import System

from colonnade import Mesh
from colonnade.data import open_source


def test_every_field_of_the_data_stands_in_one_tower(tmp_path: Path) -> None:
    write_movielens(tmp_path)
    names = [value.name for value in open_source("movielens", tmp_path).train.schema.categorical]
    for number, towers in bench.NATURAL.items():
        assert len(towers) == number and sorted(chain(*towers)) == sorted(names)


def test_systems_of_a_seed_differ_by_their_towers_alone() -> None:
    flat = bench.config_of(System("dlrm"), None, seed=3, epochs=2)
    towers = bench.config_of(System("dlrm", 4, 2, "striped"), 4, seed=3, epochs=2)
    assert flat.train.seed == flat.data.options["seed"] == 3 and flat.train.epochs == 2
    assert (towers.model.towers, towers.model.tower_dim) == (4, flat.model.dim // 2)
    same = {"towers": None, "tower_dim": None}
    assert towers.model_copy(update={"model": towers.model.model_copy(update=same)}) == flat


def test_what_is_scored_is_the_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_movielens(tmp_path / "ml-1m")
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))
    run = bench.open_run(bench.config_of(System("dlrm"), None, seed=0, epochs=3), Mesh(), None)
    real, requests = bench.block_aucs, []
    monkeypatch.setattr(
        bench, "block_aucs", lambda *item: requests.append(real(*item)) or requests[-1]
    )
    result = bench.trained(run)
    assert len(requests) == 3 and result in requests
    assert fmean(result) == pytest.approx(run.trainer.best.metrics["test_auc"], abs=1e-5)


def test_a_run_goes_on_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_movielens(tmp_path / "ml-1m")
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))
    file = tmp_path / "towers.json"
    options = ["--json", str(file), "--epochs", "1", "--towers", "2"]
    bench.main([*options, "--seeds", "1"])
    before = json.loads(file.read_text())
    names = ["flat", *(f"2 {kind} towers CR 2" for kind in bench.KINDS)]
    assert [item["system"] for item in before["cases"]] == names
    assert sorted(chain(*before["learned"]["2"]["0"])) == sorted(chain(*bench.NATURAL[2]))
    requests = []
    real = bench.open_run
    monkeypatch.setattr(bench, "open_run", lambda *item: requests.append(1) or real(*item))
    bench.main([*options, "--seeds", "2"])
    after = json.loads(file.read_text())
    assert len(requests) == 4 and len(after["cases"]) == 8
    assert all(case in after["cases"] for case in before["cases"])
    with pytest.raises(SystemExit):
        bench.main([*options, "--epochs", "2"])
