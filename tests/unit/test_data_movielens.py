"""The MovieLens reader: values by hand, the protocol of the split, and files at fault."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from movielens_files import MOVIES, USERS, write_movielens

from colonnade.batch import Batch
from colonnade.data import Column, Source, Splits, open_source
from colonnade.data.sets.movielens import open_movielens
from colonnade.errors import DataError

RATINGS = ([7, 1, 4, 7, 2], [3, 1, 5, 5, 1], [4, 3, 5, 1, 4])


def all_samples(source: Source) -> Batch:
    (batch,) = source.batches(source.num_samples)
    return batch


def test_values_by_hand(tmp_path):
    """Five ratings: RandomState(0) orders them 2 0 1 3 4; four train, the last tests."""
    assert np.random.RandomState(0).permutation(5).tolist() == [2, 0, 1, 3, 4]
    parts = open_movielens(write_movielens(tmp_path, ratings=RATINGS))
    assert (parts.train.num_samples, parts.validation.num_samples) == (4, 0)
    test = all_samples(parts.test)
    assert parts.test.schema.dense == ()
    assert parts.test.schema.categorical == (
        Column("user", 8),
        Column("movie", 6),
        Column("sex", 2),
        Column("age", 3),
        Column("occupation", 4),
        Column("zip3", 4),
        Column("year", 3),
        Column("genres", 5, kind="bag"),
    )
    # Rating 4: user 2 (M, 56, occupation 16, zip 700) gave film 1 (1995) a 4.
    results = {name: ids.values.tolist() for name, ids in test.ids.items()}
    # ages 1 25 56; occupations 7 10 15 16; zips 024 480 551 700; years 1968 1995 1998;
    # genres Animation Children's Comedy Drama Sci-Fi
    assert results == {
        "user": [2],
        "movie": [1],
        "sex": [1],
        "age": [2],
        "occupation": [3],
        "zip3": [3],
        "year": [1],
        "genres": [0, 1, 2],
    }
    assert test.label.tolist() == [[1.0]] and test.group.tolist() == [2]

    train = all_samples(parts.train)
    by_pair = {
        (int(u), int(m)): i
        for i, (u, m) in enumerate(
            zip(train.ids["user"].values, train.ids["movie"].values, strict=True)
        )
    }
    assert {pair: float(train.label[i]) for pair, i in by_pair.items()} == {
        (7, 3): 1.0,
        (1, 1): 0.0,
        (4, 5): 1.0,
        (7, 5): 0.0,
    }
    genres = train.ids["genres"]
    at = by_pair[7, 5]
    assert genres.values[genres.offsets[at] : genres.offsets[at + 1]].tolist() == [4, 3]


def pairs(parts: Splits) -> list[tuple[int, int]]:
    batches = [all_samples(s) for s in (parts.train, parts.validation, parts.test)]
    return [
        (int(u), int(m))
        for b in batches
        for u, m in zip(b.ids["user"].values, b.ids["movie"].values, strict=True)
    ]


def test_the_split_has_every_rating_once_and_ignores_the_seed(tmp_path):
    write_movielens(tmp_path)
    a, b = open_movielens(tmp_path, seed=0), open_movielens(tmp_path, seed=1)
    assert [s.num_samples for s in (a.train, a.validation, a.test)] == [152, 8, 40]
    table = pq.read_table(tmp_path / "ratings.parquet")
    inputs = list(zip(table["user_id"].to_pylist(), table["movie_id"].to_pylist(), strict=True))
    assert sorted(pairs(a)) == sorted(inputs)
    order = np.random.RandomState(0).permutation(200)
    assert pairs(a)[152:] == [inputs[i] for i in order[152:]]
    assert pairs(b)[152:] == pairs(a)[152:]
    assert pairs(b)[:152] != pairs(a)[:152]
    assert sorted(pairs(b)[:152]) == sorted(pairs(a)[:152])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"users": ["1::F::1::10"]}, r"users.dat, line 1: got 4 fields .*wanted 5"),
        ({"users": [USERS[0], "2::M::old::1::2"]}, r"users.dat, line 2, column age: got 'old'"),
        ({"users": [*USERS, USERS[1]]}, r"users.dat, line 5, column user: got .2., again, wanted"),
        ({"users": ["x::F::1::10::48067"]}, r"users.dat, line 1, column user: got 'x'"),
        ({"users": ["\u00b2::F::1::10::48067"]}, r"users.dat, line 1, column user: got "),
        ({"users": []}, r"users.dat: got an empty file"),
        ({"users": USERS[:3]}, r"ratings.parquet, row 0, column user_id: got 7, .*users.dat"),
        ({"movies": ["1::Heat (1995)"]}, r"movies.dat, line 1: got 2 fields"),
        (
            {"movies": [*MOVIES, "9::No year::Drama"]},
            r"movies.dat, line 4, column title: got 'No year'",
        ),
        ({"movies": MOVIES[:2]}, r"ratings.parquet, row 2, column movie_id: got 5, .*movies.dat"),
        ({"ratings": ([1, 1], [1, 1], [5, 6])}, r"ratings.parquet, row 1: got rating 6"),
        ({"ratings": ([], [], [])}, r"ratings.parquet, row 0: got no rating"),
    ],
)
def test_a_fault_is_named(tmp_path, files, message):
    write_movielens(tmp_path, **{"ratings": RATINGS, **files})
    with pytest.raises(DataError, match=message):
        open_movielens(tmp_path)


def test_files_that_are_absent_or_of_another_kind_are_named(tmp_path):
    write_movielens(tmp_path)
    (tmp_path / "users.dat").write_bytes(b"\x1f\x8b and more")
    with pytest.raises(DataError, match=r"users.dat: got a gzip file"):
        open_movielens(tmp_path)
    (tmp_path / "users.dat").unlink()
    with pytest.raises(DataError, match=r"users.dat: no such file"):
        open_movielens(tmp_path)
    write_movielens(tmp_path)
    path = tmp_path / "ratings.parquet"
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"", b"user_id,movie_id,rating\n1,1,5\n"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"ratings.parquet: cannot be read as Parquet"):
            open_movielens(tmp_path)
    pq.write_table(pa.table({"user_id": [1], "movie_id": [1]}), path)
    with pytest.raises(DataError, match=r"ratings.parquet: .*rating"):
        open_movielens(tmp_path)
    pq.write_table(pa.table({"user_id": [1], "movie_id": [1], "rating": ["5"]}), path)
    with pytest.raises(DataError, match=r"column rating: got string"):
        open_movielens(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=re.escape(f"looked at {path}")):
        open_movielens(tmp_path)


def test_ml_1m(shared_data):
    if not (shared_data / "ml-1m").is_dir():
        pytest.skip(f"no ml-1m in {shared_data}")
    parts = open_source("movielens", shared_data)
    sizes = [s.num_samples for s in (parts.train, parts.validation, parts.test)]
    assert sizes == [760_159, 40_008, 200_042] and sum(sizes) == 1_000_209
    batches = [all_samples(s) for s in (parts.train, parts.validation, parts.test)]
    label = torch.cat([batch.label for batch in batches])
    assert float(label.mean()) == pytest.approx(0.575, abs=0.0005)
    users = torch.cat([batch.ids["user"].values for batch in batches])
    movies = torch.cat([batch.ids["movie"].values for batch in batches])
    assert len(users.unique()) == 6040 and len(movies.unique()) == 3706
    by_name = {column.name: column.cardinality for column in parts.train.schema.categorical}
    assert by_name["sex"] == 2 and by_name["age"] == 7 and by_name["occupation"] == 21
    assert by_name["genres"] == 18
