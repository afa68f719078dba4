"""Gowalla check-ins (Liang et al. 2016; LightGCN's files): which places will a user visit?

A tenth of each user's items in `train.txt`, drawn with a fixed seed, validates and the rest trains. `valid.txt`, a
random part of each user's items, tests. Lines are not in order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from colonnade.batch import Ids
from colonnade.data.contract import Column, Splits
from colonnade.data.counter import stream_key
from colonnade.data.graph import FAN_OUTS, open_graph
from colonnade.data.interactions.columns import ITEM, USER
from colonnade.data.interactions.files import read_item_lists
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
from colonnade.errors import DataError

FOLDER = "gowalla"
VALIDATION_FRACTION = 0.1
LIMIT = 10**8
"""Bound of user and item numbers, which start at 0 without large gaps; a larger number is a damaged line."""


PRESET = {
    "data": {"options": {"max_history": 100, "max_pairs": 20}},
    "model": {"name": "two_tower", "dim": 64, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.05},
    "dense": {"lr": 1e-3},
    "train": {"batch_size": 2048, "epochs": 15, "patience": 3},
}
MODEL_PRESETS = {
    "graphsage": {
        "data.options": {"samples": "neighbours"},
        "model.dim": 64,
        "model.temperature": 0.1,
        "embedding.lr": 0.005,
        "embedding.init_scale": 0.1,
        "dense.lr": 2e-3,
        "train.batch_size": 2048,
        "train.epochs": 10,
    },
    "sasrec": {**SEQUENCE_SETTINGS, "model.temperature": 0.1, "train.batch_size": 256},
}


def open_gowalla(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    samples: Literal[SampleKind, "neighbours"] = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 8,
    order: ItemOrder = "shuffled",
    fan_outs: Sequence[int] = FAN_OUTS,
) -> Splits:
    """Open the folder `path` with train.txt and valid.txt (a user, then its items, on each line).

    Default `$COLONNADE_DATA/gowalla`. The options are those of `movielens_retrieval`. `samples` may also be
    "neighbours": pairs in the graph of users and places, in a new order each epoch, with `fan_outs` and `max_pairs` as
    in `graph.open_graph`. Raises DataError naming file and line.
    """
    train_file = locate_data_file(path, data_set_folder=FOLDER, file_name="train.txt")
    pairs = [read_pairs(train_file), read_pairs(train_file.with_name("valid.txt"))]
    num_users = max(int(users.max()) for users, _ in pairs) + 1
    num_items = max(int(items.max()) for _, items in pairs) + 1
    rest, test = (group_items_by_user(users, items, num_users) for users, items in pairs)
    train, validation = hold_out(rest, VALIDATION_FRACTION, stream_key(SPLIT_KEY, 1))
    interactions = InteractionSplit(
        train,
        validation,
        test,
        {"user": Ids(torch.arange(num_users))},
        {"item": Ids(torch.arange(num_items))},
        (Column("user", num_users), Column("item", num_items)),
    )
    if samples == "neighbours":
        return open_graph(
            interactions, first_item=num_users, seed=seed, fan_outs=fan_outs, max_pairs=max_pairs
        )
    return open_interaction_splits(
        interactions,
        samples=samples,
        seed=seed,
        max_history=max_history,
        max_pairs=max_pairs,
        negatives=negatives,
        order=order,
    )


def read_pairs(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read users (n,) and items (n,) of `user item item ...` lines, in order. Raises DataError for large numbers."""
    table = read_item_lists(path)
    pairs = [torch.from_numpy(table.column(name).to_numpy()) for name in (USER, ITEM)]
    largest = max(int(numbers.max()) for numbers in pairs)
    if largest >= LIMIT:
        raise DataError(
            f"{path}: got the number {largest}, wanted numbers from 0 to {LIMIT - 1}. Repair its line"
        )
    return pairs[0], pairs[1]
