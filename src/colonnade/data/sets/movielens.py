"""MovieLens-1M (Harper and Konstan 2015): does a user rate a film 4 or more?

Samples have seven one-hot columns (user, movie, sex, age, occupation, zip3, year) and the film's genres. Ratings are
put in the order `numpy.random.RandomState(0).permutation(n)`. Of the first 80 %, the last 5 % validate and the others
train; the last 20 % test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Column, Schema, Splits
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
    user_row = map_ids_to_rows(ratings, "user_id", user, users.ids, "users.dat")
    movie_row = map_ids_to_rows(ratings, "movie_id", movie, movies.ids, "movies.dat")

    columns = [Column("user", int(users.ids.max()) + 1), Column("movie", int(movies.ids.max()) + 1)]
    ids = {"user": Ids(user), "movie": Ids(movie)}
    for table, rows in ((users, user_row), (movies, movie_row)):
        for name, values in table.fields.items():
            distinct, index = np.unique(values, return_inverse=True)
            columns.append(Column(name, len(distinct)))
            ids[name] = Ids(torch.from_numpy(index).index_select(0, rows))
    columns.append(Column("genres", len(movies.genre_names), kind="bag"))
    ids["genres"] = gather_ids(movies.genres, movie_row)

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


@dataclass(frozen=True, slots=True, eq=False)
class _Users:
    ids: Tensor  # (U,) int64, ascending
    fields: dict[str, NDArray]  # (U,) each


@dataclass(frozen=True, slots=True, eq=False)
class _Movies:
    ids: Tensor  # (M,) int64, ascending
    fields: dict[str, NDArray]
    genres: Ids  # (M,) bags
    genre_names: list[str]


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


def read_users(path: Path) -> _Users:
    names = ("user", "sex", "age", "occupation", "zip")
    rows = _read_dat_rows(path, names)
    numbers = {
        name: np.array(
            [
                _parse_integer(path, int(row[0]), name, row[at].encode("latin-1"), min_value=0)
                for row in rows
            ]
        )
        for name, at in (("age", 3), ("occupation", 4))
    }
    fields = {
        "sex": np.array([row[2] for row in rows]),
        **numbers,
        "zip3": np.array([row[5][:3] for row in rows]),
    }
    return _Users(torch.tensor([int(row[1]) for row in rows]), fields)


def read_movies(path: Path) -> _Movies:
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
    bags = [row[3].split("|") for row in rows]
    genre_names = sorted({genre for bag in bags for genre in bag})
    number_of = {genre: i for i, genre in enumerate(genre_names)}
    genres = Ids(
        torch.tensor([number_of[genre] for bag in bags for genre in bag]),
        torch.tensor([0, *np.cumsum([len(bag) for bag in bags])]),
    )
    ids = torch.tensor([int(row[1]) for row in rows])
    return _Movies(ids, {"year": np.array(years)}, genres, genre_names)


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


def map_ids_to_rows(
    file_path: Path, column_name: str, ids: Tensor, known_ids: Tensor, file_name: str
) -> Tensor:
    """Return the row (n,) of each of `ids` (n,) in `known_ids` (K,), ascending. Raises DataError for unknown ids."""
    rows = torch.searchsorted(known_ids, ids).clamp_(max=len(known_ids) - 1)
    is_unknown = known_ids[rows] != ids
    if is_unknown.any():
        at = int(is_unknown.to(torch.uint8).argmax())
        raise DataError(
            f"{file_path}, row {at}, column {column_name}: got {int(ids[at])}, wanted one that {file_name} "
            "in its folder "
            "describes. Use files of the same release"
        )
    return rows
