"""Gowalla check-ins (Liang et al. 2016; LightGCN's files): which places will a user visit?

A tenth of each user's items in `train.txt`, drawn with a fixed seed, validates and the rest trains. `valid.txt`, a
random part of each user's items, tests. Lines are not in order of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from colonnade.data.contract import Splits
from colonnade.data.graph import FAN_OUTS
from colonnade.data.interactions.files import read_item_lists
from colonnade.data.interactions.samples import SampleKind
from colonnade.data.lines import locate_data_file
from colonnade.data.sets import interactions

FOLDER = "gowalla"
SPLIT_SEED = 1

PRESET = {
    "data": {"options": {"max_history": 100, "max_pairs": 20}},
    "model": {"name": "two_tower", "dim": 64, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.05},
    "dense": {"lr": 1e-3},
    "train": {"batch_size": 2048, "epochs": 15, "patience": 3},
}
MODEL_PRESETS = {
    "graphsage": {**interactions.MODEL_PRESETS["graphsage"], "train.batch_size": 2048},
    "sasrec": {
        **interactions.MODEL_PRESETS["sasrec"],
        "model.temperature": 0.1,
        "train.batch_size": 256,
    },
}


def open_gowalla(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    samples: Literal[SampleKind, "neighbours"] = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 8,
    fan_outs: Sequence[int] = FAN_OUTS,
    schema: Any = None,
    node_digest: str | None = None,
) -> Splits:
    """Open the folder `path` with train.txt and valid.txt (a user, then its items, on each line).

    Default `$COLONNADE_DATA/gowalla`. The options are those of `interactions`. Raises DataError naming file and line.
    """
    file = locate_data_file(path, data_set_folder=FOLDER, file_name="train.txt")
    train, test = read_item_lists(file), read_item_lists(file.with_name("valid.txt"))
    return interactions.open_interactions(
        train,
        test=test,
        split_seed=SPLIT_SEED,
        seed=seed,
        samples=samples,
        max_history=max_history,
        max_pairs=max_pairs,
        negatives=negatives,
        fan_outs=fan_outs,
        schema=schema,
        node_digest=node_digest,
    )
