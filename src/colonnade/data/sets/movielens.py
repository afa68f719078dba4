"""MovieLens-1M (Harper and Konstan 2015): does a user rate a film 4 or more?

Samples have seven one-hot columns (user, movie, sex, age, occupation, zip3, year) and the film's genres. Ratings are
put in the order `numpy.random.RandomState(0).permutation(n)`. Of the first 80 %, the last 5 % validate and the others
train; the last 20 % test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Column, Schema, Splits
from colonnade.data.interactions.columns import to_positions
from colonnade.data.lines import build_field_error, format_excerpt, locate_data_file, read_all_lines
from colonnade.data.tensors import TensorColumns, TensorSource, gather_ids
from colonnade.errors import DataError

FOLDER = "ml-1m"
SPLIT_SEED = 0
TRAIN_FRACTION = 0.8
VALIDATION_FRACTION = 0.05
POSITIVE_RATING = 4
RATING_COLUMNS = ("user_id", "movie_id", "rating")
KEY = (r"(?=[0-9]{1,9}$)0*[1-9][0-9]*", "an integer of at least 1, once in the file")
COUNT = (r"[0-9]{1,9}", "an integer of at least 0")
TEXT = (r"(?s).*", "a text")
TITLE = (r"(?s).*\([0-9]{4}\)\s*", "a title that ends in its year, as in 'Heat (1995)'")
USER_COLUMNS = {"user": KEY, "sex": TEXT, "age": COUNT, "occupation": COUNT, "zip": TEXT}
MOVIE_COLUMNS = {"movie": KEY, "title": TITLE, "genres": TEXT}
"""Columns of users.dat and movies.dat: pattern of a field, and words for it."""


PRESET = {
    "model": {"name": "dlrm", "dim": 16, "top": [128, 64], "keep_fields": True},
    "embedding": {"lr": 0.1, "initial_accumulator": 1e-6, "init_scale": 0.01},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 4096, "epochs": 5, "patience": 2},
}


def open_movielens(path: str | Path | None = None, *, seed: int = 0) -> Splits:
    """Open the folder `path` with ratings.parquet, users.dat and movies.dat; default `$COLONNADE_DATA/ml-1m`.

    `seed` orders the training samples of each epoch; the split does not depend on it. User and movie
    ids are those of the files; the other columns number their distinct values in ascending order.
    Raises DataError naming file, line or row, and column.
    """
    ratings = locate_data_file(path, data_set_folder=FOLDER, file_name="ratings.parquet")
    users = read_users(ratings.with_name("users.dat"))
    movies = read_movies(ratings.with_name("movies.dat"))
    user, movie, rating = read_ratings(ratings)
    columns: list[Column] = []
    ids: dict[str, Ids] = {}
    tables = {"user": (user, users), "movie": (movie, movies)}
    for name, (column, table) in tables.items():
        columns.append(Column(name, int(table[name][-1].as_py()) + 1))
        ids[name] = Ids(column)
    for name, (column, table) in tables.items():
        rows = find_rows(ratings, name, column, table)
        for feature in table.column_names[1:]:
            values, offsets = table[feature].combine_chunks(), None
            if pa.types.is_list(values.type):
                values, offsets = (
                    values.values,
                    torch.from_numpy(values.offsets.to_numpy().astype(np.int64)),
                )
            distinct, index = np.unique(values.to_numpy(zero_copy_only=False), return_inverse=True)
            columns.append(Column(feature, len(distinct), "one" if offsets is None else "bag"))
            ids[feature] = gather_ids(Ids(torch.from_numpy(index), offsets), rows)

    schema = Schema(dense=(), categorical=tuple(columns))
    label = (rating >= POSITIVE_RATING).to(torch.float32).reshape(-1, 1)
    samples = TensorColumns(dense=torch.empty(len(rating), 0), ids=ids, label=label, group=user)
    order = torch.from_numpy(np.random.RandomState(SPLIT_SEED).permutation(len(rating)))
    num_train = int(TRAIN_FRACTION * len(rating))
    num_fit = num_train - int(VALIDATION_FRACTION * num_train)
    return Splits(
        train=TensorSource(schema, samples, rows=order[:num_fit], shuffle_key=seed),
        validation=TensorSource(schema, samples, rows=order[num_fit:num_train]),
        test=TensorSource(schema, samples, rows=order[num_train:]),
    )


def _read_dat_rows(path: Path, columns: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """Read `a::b::c` lines, latin-1, sorted by their first field, an integer that must not repeat.

    columns: pattern of each field and words for it, by name. Raises DataError naming line and column.
    """
    rows: dict[int, list[str]] = {}
    for number, line in enumerate(read_all_lines(path), 1):
        fields = line.rstrip(b"\r").decode("latin-1").split("::")
        if len(fields) != len(columns):
            raise build_field_error(
                path,
                number,
                None,
                got=f"{len(fields)} fields in {format_excerpt(line)}",
                wanted=f"{len(columns)} separated by '::' ({', '.join(columns)})",
                fix="Is the file the one of ml-1m, and whole?",
            )
        for field, (name, (pattern, wanted)) in zip(fields, columns.items(), strict=True):
            is_valid = re.fullmatch(pattern, field) is not None
            is_repeated = is_valid and (pattern, wanted) == KEY and int(field) in rows
            if is_repeated or not is_valid:
                got = format_excerpt(field.encode("latin-1")) + ", again" * is_repeated
                raise build_field_error(
                    path, number, name, got=got, wanted=wanted, fix="Repair the line"
                )
        rows[int(fields[0])] = fields
    return [rows[key] for key in sorted(rows)]


def read_users(path: Path) -> pa.Table:
    """Read the columns user, sex, age, occupation and zip3, in the order of the users."""
    user, sex, age, occupation, zip_code = zip(*_read_dat_rows(path, USER_COLUMNS), strict=True)
    numbers = {"user": user, "age": age, "occupation": occupation}
    columns = {name: [int(text) for text in texts] for name, texts in numbers.items()}
    texts = {"sex": sex, "zip3": [code[:3] for code in zip_code]}
    return pa.table({**columns, **texts}).select(["user", "sex", "age", "occupation", "zip3"])


def read_movies(path: Path) -> pa.Table:
    """Read the columns movie, year and genres (lists), in the order of the movies."""
    movie, title, genres = zip(*_read_dat_rows(path, MOVIE_COLUMNS), strict=True)
    return pa.table(
        {
            "movie": [int(text) for text in movie],
            "year": [int(text.rstrip()[-5:-1]) for text in title],
            "genres": [text.split("|") for text in genres],
        }
    )


def read_ratings(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Read user, movie, rating: (n,) int64 each, in file order."""
    try:
        table = pq.read_table(path, columns=list(RATING_COLUMNS), use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read as Parquet with the columns {', '.join(RATING_COLUMNS)} "
            f"({reason}). Fetch the file again"
        ) from error
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_integer(column.type) or column.null_count:
            raise DataError(
                f"{path}, column {name}: got {column.type} with {column.null_count} nulls, wanted "
                "integers without nulls. Write the column as int32"
            )
    user, movie, rating = (
        torch.from_numpy(table.column(name).to_numpy().astype(np.int64)) for name in RATING_COLUMNS
    )
    bad = ((rating < 1) | (rating > 5)).nonzero()[:, 0].tolist()
    if bad or not len(rating):
        got = f"row {bad[0]}: got rating {int(rating[bad[0]])}" if bad else "row 0: got no rating"
        raise DataError(f"{path}, {got}, wanted 1 .. 5. Fetch the file again")
    return user, movie, rating


def find_rows(path: Path, name: str, ids: Tensor, table: pa.Table) -> Tensor:
    """Return the row (n,) of each of `ids` (n,) in a table of users or movies. Raises DataError for unknown ids."""
    rows = to_positions(table[name].to_numpy(), ids.numpy())
    unknown = (rows < 0).nonzero()[:, 0].tolist()
    if unknown:
        raise DataError(
            f"{path}, row {unknown[0]}, column {name}_id: got {int(ids[unknown[0]])}, wanted one that {name}s.dat in "
            "its folder describes. Use files of the same release"
        )
    return rows
