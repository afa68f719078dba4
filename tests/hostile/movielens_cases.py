"""MovieLens folders at fault."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from case import Case, train
from movielens_files import MOVIES, USERS


def _parquet(columns: dict) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def _ratings(**changes) -> bytes:
    columns = {
        "user_id": np.array([1, 2, 4, 7] * 5, np.int32),
        "movie_id": np.array([1, 3, 5, 1] * 5, np.int32),
        "rating": np.array([1, 5, 3, 4] * 5, np.int8),
    }
    columns |= changes
    return _parquet({name: values for name, values in columns.items() if values is not None})


def _folder(users=USERS, movies=MOVIES, ratings: bytes | None = None) -> dict[str, bytes]:
    return {
        "ml/users.dat": "".join(f"{line}\n" for line in users).encode("latin-1"),
        "ml/movies.dat": "".join(f"{line}\n" for line in movies).encode("latin-1"),
        "ml/ratings.parquet": _ratings() if ratings is None else ratings,
    }


def cases() -> list[Case]:
    command = train("movielens", "ml")
    listed = []
    for name, user, word in (
        ("few fields", "2::M::56", "line 2"),
        ("many fields", "2::M::56::16::70072::x", "line 2"),
        ("user 0", "0::M::56::16::70072", "column user"),
        ("user text", "two::M::56::16::70072", "column user"),
        ("user negative", "-2::M::56::16::70072", "column user"),
        ("user twice", "1::M::56::16::70072", "column user"),
        ("user too large", "99999999999::M::56::16::70072", "column user"),
        ("age text", "2::M::old::16::70072", "column age"),
        ("age empty", "2::M::::16::70072", "column age"),
        ("occupation text", "2::M::56::clerk::70072", "column occupation"),
        ("empty line", "", "line 2"),
        ("tabs", "2\tM\t56\t16\t70072", "line 2"),
        ("single colons", "2:M:56:16:70072", "line 2"),
    ):
        files = _folder(users=[USERS[0], user, *USERS[2:]])
        listed.append(
            Case(f"movielens users {name}", command, ("users.dat", "line 2", word), files)
        )
    for name, movie, word in (
        ("few fields", "3::Heat (1995)", "line 2"),
        ("no year", "3::Heat::Drama", "column title"),
        ("year of three digits", "3::Heat (199)::Drama", "column title"),
        ("movie text", "x::Heat (1995)::Drama", "column movie"),
        ("movie twice", "1::Heat (1995)::Drama", "column movie"),
        ("movie 0", "0::Heat (1995)::Drama", "column movie"),
        ("empty line", "", "line 2"),
    ):
        files = _folder(movies=[MOVIES[0], movie, *MOVIES[2:]])
        listed.append(
            Case(f"movielens movies {name}", command, ("movies.dat", "line 2", word), files)
        )
    odd = np.array([1, 5, 3, 4] * 5)
    for name, ratings, words in (
        ("unknown user", _ratings(user_id=np.array([9] * 20, np.int32)), ("row 0", "9")),
        ("unknown movie", _ratings(movie_id=np.array([1] * 19 + [77], np.int32)), ("row 19", "77")),
        ("rating 6", _ratings(rating=np.array([5] * 7 + [6] * 13, np.int8)), ("row 7", "6")),
        ("rating 0", _ratings(rating=np.array([0] * 20, np.int8)), ("row 0", "0")),
        ("no rating column", _ratings(rating=None), ("rating",)),
        ("no user column", _ratings(user_id=None), ("user_id",)),
        ("float ratings", _ratings(rating=odd + 0.5), ("rating", "double")),
        ("text users", _ratings(user_id=odd.astype(str)), ("user_id", "string")),
        ("null ratings", _ratings(rating=pa.array([None] * 20, pa.int8())), ("rating", "nulls")),
        (
            "no rows",
            _parquet({n: pa.array([], pa.int32()) for n in ("user_id", "movie_id", "rating")}),
            ("no rating",),
        ),
        ("text", b"user_id,movie_id,rating\n1,1,5\n", ("cannot be read as Parquet",)),
        ("empty", b"", ("cannot be read as Parquet",)),
        ("cut", _ratings()[:-30], ("cannot be read as Parquet",)),
        ("cut in the middle", _ratings()[:200], ("cannot be read as Parquet",)),
        ("magic only", b"PAR1PAR1", ("cannot be read as Parquet",)),
        (
            "footer flipped",
            _ratings()[:-8] + b"\xff\xff\xff\x7fPAR1",
            ("cannot be read as Parquet",),
        ),
    ):
        listed.append(
            Case(
                f"movielens ratings {name}",
                command,
                ("ratings.parquet", *words),
                _folder(ratings=ratings),
            )
        )
    for missing in ("users.dat", "movies.dat", "ratings.parquet"):
        files = {name: data for name, data in _folder().items() if not name.endswith(missing)}
        listed.append(Case(f"movielens without {missing}", command, (missing,), files))
    for empty in ("users.dat", "movies.dat"):
        files = _folder() | {f"ml/{empty}": b""}
        listed.append(Case(f"movielens empty {empty}", command, (empty, "empty"), files))
    listed.append(Case("movielens nowhere", train("movielens", "nowhere"), ("nowhere",)))
    return listed
