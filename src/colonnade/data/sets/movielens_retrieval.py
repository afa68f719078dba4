"""MovieLens-1M as implicit feedback: which films will a user rate 4 or more?

Each user's ratings of 4 and more are split at random with a fixed seed: a fifth (rounded down) tests, and a tenth of
the rest validates. The files have no times, so the task is not to predict the next film.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from colonnade.batch import Ids
from colonnade.data.contract import Column, Splits
from colonnade.data.counter import stream_key
from colonnade.data.interactions.samples import (
    SEQUENCE_SETTINGS,
    SPLIT_KEY,
    InteractionSplit,
    ItemOrder,
    SampleKind,
    group_items_by_user,
    hold_out,
    open_interaction_splits,
)
from colonnade.data.lines import locate_data_file
from colonnade.data.sets import movielens

TEST_FRACTION = 0.2
VALIDATION_FRACTION = 0.1


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
MODEL_PRESETS = {"sasrec": SEQUENCE_SETTINGS}


def open_movielens_retrieval(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    samples: SampleKind = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 8,
    order: ItemOrder = "shuffled",
) -> Splits:
    """Open the folder `path`, as in `movielens`. Users and items are numbered as users.dat and movies.dat list them.

    seed         orders the samples of an epoch; the split does not depend on it
    samples      "pairs" (user, item) for two towers; "sequences" of a user's items for a sequence model
    max_history  maximal items of a user's history in a sample
    max_pairs    maximal pairs of a user in an epoch, different ones each epoch if shuffled; default: all
    negatives    items drawn at random for each sequence
    order        order of a sequence: the file's, or a new one each epoch

    Raises DataError naming file, line or row, and column.
    """
    file = locate_data_file(path, data_set_folder=movielens.FOLDER, file_name="ratings.parquet")
    users = movielens.read_users(file.with_name("users.dat"))
    movies = movielens.read_movies(file.with_name("movies.dat"))
    user, movie, rating = movielens.read_ratings(file)
    user_row = movielens.map_ids_to_rows(file, "user_id", user, users.ids, "users.dat")
    movie_row = movielens.map_ids_to_rows(file, "movie_id", movie, movies.ids, "movies.dat")
    is_positive = rating >= movielens.POSITIVE_RATING
    bags = group_items_by_user(user_row[is_positive], movie_row[is_positive], len(users.ids))
    rest, test = hold_out(bags, TEST_FRACTION, stream_key(SPLIT_KEY, 0))
    train, validation = hold_out(rest, VALIDATION_FRACTION, stream_key(SPLIT_KEY, 1))

    columns = [Column("user", len(users.ids)), Column("item", len(movies.ids))]
    by_user = {"user": Ids(torch.arange(len(users.ids)))}
    by_item = {"item": Ids(torch.arange(len(movies.ids)))}
    for table, ids in ((users, by_user), (movies, by_item)):
        for name, values in table.fields.items():
            distinct, index = np.unique(values, return_inverse=True)
            columns.append(Column(name, len(distinct)))
            ids[name] = Ids(torch.from_numpy(index))
    columns.append(Column("genres", len(movies.genre_names), kind="bag"))
    by_item["genres"] = movies.genres
    interactions = InteractionSplit(train, validation, test, by_user, by_item, tuple(columns))
    return open_interaction_splits(
        interactions,
        samples=samples,
        seed=seed,
        max_history=max_history,
        max_pairs=max_pairs,
        negatives=negatives,
        order=order,
    )
