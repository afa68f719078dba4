"""MovieLens-1M (Harper and Konstan 2015): does a user rate a film 4 or more?

Samples have seven one-hot columns (user, movie, sex, age, occupation, zip3, year) and the film's genres. Ratings are
put in the order `numpy.random.RandomState(0).permutation(n)`. Of the first 80 %, the last 5 % validate and the others
train; the last 20 % test.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    for name, column, table in (("user", user, users), ("movie", movie, movies)):
        columns.append(Column(name, int(table[name][-1].as_py()) + 1))
        ids[name] = Ids(column)
    for name, column, table in (("user", user, users), ("movie", movie, movies)):
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


def _read_dat_rows(path: Path, names: tuple[str, ...]) -> list[list[str]]:
    """Read `a::b::c` lines, latin-1, sorted by their first field, a positive integer that must not repeat.

    Each row begins with its line number.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. The folder must hold users.dat and movies.dat too")
    rows: dict[int, list[str]] = {}
    for number, line in enumerate(read_all_lines(path), 1):
        fields = line.rstrip(b"\r").split(b"::")
        if len(fields) != len(names):
            raise build_field_error(
                path,
                number,
                None,
                got=f"{len(fields)} fields in {format_excerpt(line)}",
                wanted=f"{len(names)} separated by '::' ({', '.join(names)})",
                fix="Is the file the one of ml-1m, and whole?",
            )
        key = _parse_integer(path, number, names[0], fields[0], min_value=1)
        if key in rows:
            raise build_field_error(
                path,
                number,
                names[0],
                got=f"{key}, which an earlier line has",
                wanted="each one once",
                fix="Remove one of the two lines",
            )
        rows[key] = [str(number), *(field.decode("latin-1") for field in fields)]
    return [rows[key] for key in sorted(rows)]


def _parse_integer(
    path: Path, line_number: int, column_name: str, field: bytes, *, min_value: int
) -> int:
    if not re.fullmatch(rb"[0-9]{1,9}", field) or int(field) < min_value:
        raise build_field_error(
            path,
            line_number,
            column_name,
            got=format_excerpt(field),
            wanted=f"an integer of at least {min_value}",
            fix="Repair the line",
        )
    return int(field)


def read_users(path: Path) -> pa.Table:
    """Read the columns user, sex, age, occupation and zip3, in the order of the users."""
    rows = _read_dat_rows(path, ("user", "sex", "age", "occupation", "zip"))
    columns: dict[str, list[Any]] = {
        "user": [int(row[1]) for row in rows],
        "sex": [row[2] for row in rows],
    }
    for name, at in (("age", 3), ("occupation", 4)):
        columns[name] = [
            _parse_integer(path, int(row[0]), name, row[at].encode("latin-1"), min_value=0)
            for row in rows
        ]
    return pa.table({**columns, "zip3": [row[5][:3] for row in rows]})


def read_movies(path: Path) -> pa.Table:
    """Read the columns movie, year and genres (lists), in the order of the movies."""
    rows = _read_dat_rows(path, ("movie", "title", "genres"))
    years = []
    for number, _, title, _ in rows:
        match = re.search(r"\(([0-9]{4})\)\s*$", title)
        if match is None:
            raise build_field_error(
                path,
                int(number),
                "title",
                got=format_excerpt(title.encode("latin-1")),
                wanted="a title that ends in its year, as in 'Heat (1995)'",
                fix="Repair the line",
            )
        years.append(int(match[1]))
    movies = [int(row[1]) for row in rows]
    return pa.table({"movie": movies, "year": years, "genres": [row[3].split("|") for row in rows]})


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
    columns = []
    for name in RATING_COLUMNS:
        column = table.column(name)
        if not pa.types.is_integer(column.type) or column.null_count:
            raise DataError(
                f"{path}, column {name}: got {column.type} with {column.null_count} nulls, wanted "
                "integers without nulls. Write the column as int32"
            )
        columns.append(torch.from_numpy(column.to_numpy().astype(np.int64)))
    user, movie, rating = columns
    bad = (rating < 1) | (rating > 5)
    if len(rating) == 0 or bad.any():
        at = int(bad.to(torch.uint8).argmax()) if len(rating) else 0
        got = f"rating {int(rating[at])}" if len(rating) else "no rating"
        raise DataError(f"{path}, row {at}: got {got}, wanted 1 .. 5. Fetch the file again")
    return user, movie, rating


def find_rows(path: Path, name: str, ids: Tensor, table: pa.Table) -> Tensor:
    """Return the row (n,) of each of `ids` (n,) in a table of users or movies. Raises DataError for unknown ids."""
    rows = to_positions(table[name].to_numpy(), ids.numpy())
    if (rows < 0).any():
        at = int((rows < 0).to(torch.uint8).argmax())
        raise DataError(
            f"{path}, row {at}, column {name}_id: got {int(ids[at])}, wanted one that {name}s.dat in its folder "
            "describes. Use files of the same release"
        )
    return rows
