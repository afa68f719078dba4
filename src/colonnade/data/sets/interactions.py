"""Interactions of your own: users, items and perhaps times, in files or Arrow tables, as splits for retrieval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colonnade.data.contract import Splits, check_choices
from colonnade.data.interactions.columns import Interactions
from colonnade.data.interactions.files import FileOptions, read_interactions
from colonnade.data.interactions.negatives import replace_negatives
from colonnade.data.interactions.samples import (
    SampleKind,
    open_interaction_splits,
)
from colonnade.data.interactions.splits import (
    TEST,
    VALIDATION,
    Parts,
    SplitKind,
    SplitOptions,
    assign_parts,
    build_split,
    sees_future,
)
from colonnade.data.names import PARTS, find_part_files
from colonnade.data.tabular.declaration import load_file_schema
from colonnade.data.tabular.times import describe_parts, parse_time
from colonnade.errors import ConfigError

PRESET = {
    "data": {"options": {"max_history": 100, "max_pairs": 50}},
    "model": {"name": "two_tower", "dim": 64, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.003, "init_scale": 0.05},
    "dense": {"lr": 1e-3},
    "train": {"batch_size": 1024, "epochs": 20, "patience": 3},
}
MODEL_PRESETS = {
    "sasrec": {
        "data.options": {"samples": "sequences", "max_history": 50, "negatives": 16},
        "model.dim": 64, "model.blocks": 1, "model.max_length": 50, "model.positions": False, "model.dropout": 0.1,
        "model.temperature": 0.07, "embedding.lr": 0.005, "train.batch_size": 64, "train.epochs": 30,
        "train.patience": 3,
    }
}  # fmt: skip


def open_interactions(
    path: Any,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    rating: str | None = None,
    event: str | None = None,
    at_least: float | None = None,
    events: Sequence[str] | None = None,
    delimiter: str | None = None,
    names: Sequence[str] | None = None,
    users: Any = None,
    items: Any = None,
    core: int = 0,
    validation: Any = None,
    test: Any = None,
    split: SplitKind | None = None,
    test_fraction: float | None = None,
    validation_fraction: float | None = None,
    test_after: str | float | None = None,
    validation_after: str | float | None = None,
    split_seed: int = 0,
    seed: int = 0,
    samples: SampleKind = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 16,
    order: Literal["time", "file", "none"] | None = None,
    ranked_negatives: int | str | Path | None = None,
    schema: Any = None,
) -> Splits:
    """Open interactions of users with items: a file, a folder, or an object with `__arrow_c_stream__`.

    user, item, time, rating, event    names of columns; default: by header types and usual names
    at_least, events                   lowest rating, and values of `event`, that count; default: any
    users, items                       files with a row for each: features by which models know them
    core                               least number of interactions of a user, and of an item
    validation, test                   files of these parts; default: those of a folder that has train and test
    split                              as in `interactions.splits`; default: files, leave_one_out (ordered) or per_user
    test_fraction, test_after, ...     shares (0.2, 0.1 of the rest), or cutoffs of split=time: ISO times or numbers
    split_seed                         seed of drawn parts; `seed` orders the samples of an epoch
    samples                            "pairs" (user, item), or "sequences" of a user's items
    max_history, max_pairs             most items of a history, and pairs of a user in an epoch (default: all)
    negatives                          items drawn for each sequence: those of a batch are distinct, at most all
    order                              order of a user's items; default: time if there is such a column, else none
    ranked_negatives                   number of drawn items among which held-out items are ranked, or a file of those
                                       for the test part; default: all items

    Raises DataError naming file and row, ConfigError.
    """
    parts = _number_parts(find_part_files(path, validation, test))
    columns = {"user": user, "item": item, "time": time, "rating": rating, "event": event}
    data, record_schema, note = read_interactions(
        parts,
        FileOptions(columns, delimiter, names),
        users=users,
        items=items,
        at_least=at_least,
        events=events,
        core=core,
        has_times=order in (None, "time"),
        schema=None if schema is None else load_file_schema(schema),
    )
    is_ordered = _has_order(data, order)
    kind = _choose_split(split, len(parts), is_ordered)
    shares = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    cutoffs = {"test_after": test_after, "validation_after": validation_after}
    divided = assign_parts(data, _build_split_options(kind, data, shares, cutoffs, split_seed))
    splits = open_interaction_splits(
        build_split(data, divided, is_ordered=is_ordered),
        samples=samples,
        seed=seed,
        max_history=max_history,
        max_pairs=max_pairs,
        negatives=negatives,
    )
    splits = _replace_negatives(splits, ranked_negatives)
    notes = (note, *_describe_split(data, divided, kind, splits.test))
    return replace(splits, notes=notes, options={"schema": record_schema.to_dict()})


def _number_parts(files: Mapping[str, Any]) -> dict[int, Any]:
    """Return the files by the number of their part (`splits.TRAIN` ...)."""
    return {list(PARTS).index(part): file for part, file in files.items()}


def _replace_negatives(splits: Splits, negatives: int | str | Path | None) -> Splits:
    """Rank held-out items among negatives; a file has those of the test part only."""
    if negatives is None:
        return splits
    test = replace_negatives(splits.test, negatives)
    if isinstance(negatives, str | Path):
        return replace(splits, test=test)
    return replace(splits, test=test, validation=replace_negatives(splits.validation, negatives))


def _has_order(interactions: Interactions, order: str | None) -> bool:
    """Return whether a user's items have an order. Raises ConfigError for one by times that are not there, and for one
    that does not exist."""
    check_choices(open_interactions, {"order": order})
    if order == "time" and interactions.time_n is None:
        raise ConfigError("order=time: got no column of times; name it with data.options.time")
    return order == "file" or interactions.time_n is not None


def _choose_split(split: SplitKind | None, num_parts: int, is_ordered: bool) -> SplitKind:
    """Return the requested split, else the default one. Raises ConfigError for one that does not exist."""
    check_choices(open_interactions, {"split": split})
    if split is not None:
        return split
    if num_parts > 1:
        return "files"
    return "leave_one_out" if is_ordered else "per_user"


def _build_split_options(
    split: SplitKind,
    interactions: Interactions,
    shares: Mapping[str, float | None],
    cutoffs: Mapping[str, str | float | None],
    seed: int,
) -> SplitOptions:
    """Return the options of a split; None: the default. Raises ConfigError for shares or cutoffs that it has not."""
    chosen: dict[str, Any] = {name: share for name, share in shares.items() if share is not None}
    if chosen and split == "leave_one_out":
        name, share = next(iter(chosen.items()))
        raise ConfigError(
            f"got {name}={share} for split=leave_one_out, wanted none: it holds out the last items of each user. "
            "Leave it out, or set data.options.split=time, per_user, rows or users"
        )
    for name, cutoff in cutoffs.items():
        chosen[name] = _parse_cutoff(cutoff, split, interactions)
    return SplitOptions(split, **chosen, seed=seed)


def _describe_split(
    interactions: Interactions, parts: Parts, split: SplitKind, test: Any
) -> list[str]:
    """Describe the parts and the ranking, and warn in a line if training sees what is later than the test."""
    sizes = np.bincount(parts, minlength=TEST + 1)
    times = interactions.time_n
    first_keys = [
        -np.inf
        if split != "time" or times is None
        else float(times.min(where=parts == part, initial=times.max()))
        for part in (VALIDATION, TEST)
    ]
    lines = [
        describe_parts(
            split,
            "interactions",
            sizes[: TEST + 1].tolist(),
            first_keys,
            has_times=times is not None and times.dtype == np.int64,
        ),
        f"test: {test.ranking}",
    ]
    if sees_future(interactions, parts):
        lines.append(
            f"split {split} trains on interactions that are later than some of the test, so scores are higher than "
            "those of a model in use; data.options.split=time avoids it"
        )
    return lines


def _parse_cutoff(
    cutoff: str | float | None, split: SplitKind, interactions: Interactions
) -> float | None:
    """Return a cutoff in microseconds since 1970 if the interactions have times, else a number. Raises ConfigError."""
    if cutoff is None:
        return None
    if split != "time" or interactions.time_n is None:
        raise ConfigError(
            f"got {cutoff!r} as a cutoff for split={split}, wanted split=time and a column of times; set "
            "data.options.split=time, or leave the cutoff out"
        )
    has_times = interactions.time_n.dtype == np.int64
    try:
        if isinstance(cutoff, str) != has_times:
            raise ValueError(cutoff)
        return parse_time(cutoff) if isinstance(cutoff, str) else cutoff
    except ValueError:
        wanted = "a time such as '2024-05-31T12:00:00'" if has_times else "a number"
        raise ConfigError(
            f"got {cutoff!r} as a cutoff, wanted {wanted}, because the column of times has such values"
        ) from None
