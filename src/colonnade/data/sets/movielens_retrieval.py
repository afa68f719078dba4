"""MovieLens-1M as implicit feedback: which films will a user rate 4 or more?

Each user's ratings of 4 and more are split at random with a fixed seed: a fifth (rounded down) tests, and a tenth of
the rest validates. The files have no times, so the task is not to predict the next film.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.interactions.samples import SampleKind
from colonnade.data.lines import locate_data_file
from colonnade.data.sets import interactions, movielens

PRESET = {
    "data": {"options": {"max_history": 200, "max_pairs": 20}},
    "model": {
        "name": "two_tower",
        "dim": 64,
        "query_columns": ["history", "sex", "age", "occupation"],
        "item_columns": ["item", "year", "genres"],
        "temperature": 0.15,
    },
    "embedding": {"optimizer": "adam", "lr": 0.003, "init_scale": 0.05},
    "dense": {"lr": 1e-3},
    "train": {"batch_size": 1024, "epochs": 20, "patience": 3},
}
MODEL_PRESETS = {"sasrec": {**interactions.MODEL_PRESETS["sasrec"], "model.temperature": 0.2}}


def open_movielens_retrieval(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    samples: SampleKind = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 8,
    schema: Any = None,
) -> Splits:
    """Open the folder `path`, as in `movielens`; the options are those of `interactions`.

    Raises DataError naming file, line or row, and column.
    """
    file = locate_data_file(path, data_set_folder=movielens.FOLDER, file_name="ratings.parquet")
    return interactions.open_interactions(
        file,
        at_least=movielens.POSITIVE_RATING,
        users=movielens.read_users(file.with_name("users.dat")),
        items=movielens.read_movies(file.with_name("movies.dat")),
        split="per_user",
        seed=seed,
        samples=samples,
        max_history=max_history,
        max_pairs=max_pairs,
        negatives=negatives,
        schema=schema,
    )
