"""A small MovieLens folder in the format of the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS = ["1::F::1::10::48067", "2::M::56::16::70072", "4::M::25::15::55117", "7::M::25::7::02460"]
MOVIES = [
    "1::Toy Story (1995)::Animation|Children's|Comedy",
    "3::Mis\u00e9rables, Les (1998)::Drama",
    "5::2001: A Space Odyssey (1968)::Sci-Fi|Drama",
]


def write_movielens(folder: Path, *, users=USERS, movies=MOVIES, ratings=None) -> Path:
    """`folder`, with users.dat, movies.dat and ratings.parquet; `ratings` = (user, movie, rating) lists."""
    folder.mkdir(parents=True, exist_ok=True)
    if ratings is None:
        rng = np.random.default_rng(0)
        ratings = (
            rng.choice([1, 2, 4, 7], 200),
            rng.choice([1, 3, 5], 200),
            rng.integers(1, 6, 200),
        )
    (folder / "users.dat").write_text("".join(f"{line}\n" for line in users), "latin-1")
    (folder / "movies.dat").write_text("".join(f"{line}\n" for line in movies), "latin-1")
    user, movie, rating = (np.asarray(column) for column in ratings)
    table = pa.table(
        {
            "user_id": user.astype(np.int32),
            "movie_id": movie.astype(np.int32),
            "rating": rating.astype(np.int8),
        }
    )
    pq.write_table(table, folder / "ratings.parquet")
    return folder
