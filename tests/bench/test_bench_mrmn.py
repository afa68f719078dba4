"""`bench mrmn`: ratios of known scores; all arms have one split; shuffled types are other types of the same rows."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import mrmn as bench
from harness import BenchError, Measured

from colonnade.data import open_interactions


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write ratings by users of one taste each, in place of MovieLens-1M, and the bench's files of them."""
    random = np.random.RandomState(0)
    users, films = (column.ravel() for column in np.meshgrid(np.arange(40), np.arange(90)))
    is_rated = random.rand(len(users)) < 0.7
    liked = np.where(users % 3 == films % 3, 5, random.randint(1, 6, len(users)))
    table = pa.table({"user_id": users, "movie_id": films, "rating": liked}).filter(
        pa.array(is_rated)
    )
    (tmp_path / "ml-1m").mkdir()
    pq.write_table(table, tmp_path / "ml-1m" / "ratings.parquet")
    monkeypatch.setattr(bench, "DATA", tmp_path)
    monkeypatch.setattr(bench, "BATCH_SIZE", 64)
    files = tmp_path / "files"
    files.mkdir()
    bench.write_files(files, 30)
    return files


def read_rows(path: Path) -> set[tuple[int, int]]:
    table = pq.read_table(path)
    return set(zip(table["user_id"].to_pylist(), table["movie_id"].to_pylist(), strict=True))


def test_all_arms_have_one_split_and_rank_the_same_films(folder):
    held_out = {part: read_rows(folder / f"{part}.parquet") for part in ("validation", "test")}
    rated = read_rows(folder / f"{bench.ALL}.parquet")
    assert len({user for user, _ in rated}) == 30
    assert held_out["test"] and not held_out["test"] & (held_out["validation"] | rated)
    for rows in (bench.FIVES, bench.ALL, bench.TYPED, bench.SHUFFLED):
        options = bench.build_options(folder, rows)
        splits = open_interactions(folder / f"{rows}.parquet", **options)
        masked = bench.exclude_rated(splits, pq.read_table(folder / f"{bench.ALL}.parquet"))
        split = splits.train.interactions
        tested = set()
        for batch in masked.test.batches(16):
            for s, group in enumerate(batch.group):
                user = int(split.user_keys[group])
                bag = {
                    part: {
                        (user, int(split.item_keys[i]))
                        for i in getattr(batch.key, part).values[
                            getattr(batch.key, part).samples == s
                        ]
                    }
                    for part in ("truth", "excluded")
                }
                tested |= bag["truth"]
                films = {pair for pair in rated if pair[0] == user}
                assert {pair for pair in films if pair[1] in split.item_keys} <= bag["excluded"]
                assert not bag["excluded"] & bag["truth"]
        assert tested == held_out["test"]


def test_shuffled_ratings_are_other_types_of_the_same_rows(folder):
    typed, shuffled = (
        pq.read_table(folder / f"{rows}.parquet") for rows in (bench.TYPED, bench.SHUFFLED)
    )
    assert typed.drop(["rating"]).equals(shuffled.drop(["rating"]))
    assert not typed["rating"].equals(shuffled["rating"])
    counts = [np.bincount(table["rating"].to_numpy()) for table in (typed, shuffled)]
    assert np.array_equal(*counts)


def test_an_arm_is_trained_and_its_types_measured(folder):
    arms = {arm.name: arm for arm in bench.ARMS}
    typed = bench.measure_arm(arms["mrmn"], folder, 1, 60)
    assert [m.unit for m in typed] == [bench.UNIT, *(f"strength of type {n}" for n in range(4))]
    (two_tower,) = bench.measure_arm(arms["two_tower, all ratings"], folder, 1, 20)
    assert 0 <= two_tower.values[0] < 1 and 0 <= typed[0].values[0] < 1


def test_ratios_take_the_best_peer_and_count_ordered_seeds():
    scores = {"mrmn": [0.3, 0.5], "mrmn, fives": [0.2], "cml, fives": [0.32], "ALS, all ratings": [0.25],
              "mrmn, shuffled types": [0.9]}  # fmt: skip
    measured = [Measured(bench.CASE, name, bench.UNIT, x) for name, x in scores.items()]
    for name, columns in (
        ("mrmn", [[4, 4], [3, 5], [2, 2], [1, 1]]),
        ("mrmn, shuffled types", [[1, 1]] * 4),
    ):
        measured += [
            Measured(bench.CASE, name, f"strength of type {number}", column)
            for number, column in enumerate(columns)
        ]
    assert bench.compute_ratios(measured) == pytest.approx(
        {
            "ndcg_vs_primary": 2.0,
            "ndcg_vs_best_peer": 1.25,
            "strength_ordered": 0.5,
            "strength_ordered_shuffled": 0.0,
        }
    )
    assert bench.compute_ratios([]) == {}
    names = [arm.name for arm in bench.ARMS]
    assert all(a != b for a, b in pairwise(sorted(names)))


def test_absent_data_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "DATA", tmp_path)
    with pytest.raises(BenchError, match=r"ratings\.parquet is absent"):
        bench.write_files(tmp_path, None)
