"""Interactions of your own: users, items and perhaps times, in files or Arrow tables, as splits for retrieval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colonnade.data.contract import Splits, check_choices
from colonnade.data.graph import FAN_OUTS, open_graph
from colonnade.data.interactions.columns import Interactions
from colonnade.data.interactions.files import FileOptions, read_interactions
from colonnade.data.interactions.negatives import replace_negatives
from colonnade.data.interactions.samples import (
    SampleKind,
    open_interaction_splits,
)
from colonnade.data.interactions.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    InteractionSplit,
    Parts,
    SplitKind,
    SplitOptions,
    assign_parts,
    build_split,
    hold_out_primary_type,
    sees_future,
)
from colonnade.data.interactions.types import name_types, read_types
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
    },
    "mrmn": {
        "data.options": {"max_history": 0, "max_pairs": None}, "model.dim": 64, "embedding.init_scale": 0.1,
        "train.batch_size": 256, "train.epochs": 20, "train.patience": 3,
    },
    "graphsage": {
        "data.options": {"samples": "neighbours"}, "model.dim": 64, "model.temperature": 0.1, "embedding.lr": 0.005,
        "embedding.init_scale": 0.1, "dense.lr": 2e-3, "train.batch_size": 1024, "train.epochs": 10,
    },
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
    types: Sequence[Any] | None = None,
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
    samples: Literal[SampleKind, "neighbours"] = "pairs",
    max_history: int = 100,
    max_pairs: int | None = None,
    negatives: int = 16,
    fan_outs: Sequence[int] = FAN_OUTS,
    order: Literal["time", "file", "none"] | None = None,
    ranked_negatives: int | str | Path | None = None,
    schema: Any = None,
    node_digest: str | None = None,
) -> Splits:
    """Open interactions of users with items: a file, a folder, or an object with `__arrow_c_stream__`.

    user, item, time, rating, event    names of columns; default: by header types and usual names
    at_least, events, core             lowest rating, events, and interactions of a user or an item that count
    types                              events as types of feedback, strongest first, a list for several: [5, 4, [3, 2]]
    validation, test, users, items     files of these parts; and of users and items, a row for each: their features
    split, split_seed                  as in `interactions.splits`; default: files, leave_one_out (ordered) or per_user
    test_fraction, test_after, ...     shares (0.2, 0.1 of the rest), or cutoffs of split=time: ISO times or numbers
    samples                            "pairs" (user, item), "sequences" of a user's items, or pairs with "neighbours"
    max_history, max_pairs             most items of a history, and pairs of a user in an epoch (default: all)
    negatives, fan_outs                items drawn for each sequence (distinct in a batch); neighbours of a node, by hop
    order                              order of a user's items; default: time if there is such a column, else none
    ranked_negatives                   drawn items that held-out ones are ranked among, or a file; default: all items

    Raises DataError naming file and row, ConfigError.
    """
    check_choices(open_interactions, {"order": order, "split": split, "samples": samples})
    files = find_part_files(path, validation, test)
    columns = {"user": user, "item": item, "time": time, "rating": rating, "event": event}
    data, file_schema, note = read_interactions(
        {list(PARTS).index(part): file for part, file in files.items()},
        FileOptions(columns, delimiter, names),
        users=users,
        items=items,
        at_least=at_least,
        events=events,
        types=_check_types(types, events, samples),
        core=core,
        has_times=order in (None, "time"),
        schema=None if schema is None else load_file_schema(schema),
    )
    is_ordered = _has_order(data, order)
    kind = split or ("files" if len(files) > 1 else "leave_one_out" if is_ordered else "per_user")
    shares = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    cutoffs = {"test_after": test_after, "validation_after": validation_after}
    options = _build_split_options(kind, data, shares, cutoffs, split_seed)
    data, divided, lines = _divide(data, options, name_types(types))
    interactions = build_split(data, divided, is_ordered=is_ordered)
    sampling = {"seed": seed, "max_pairs": max_pairs}
    graph = {"fan_outs": fan_outs, "node_digest": node_digest, **sampling}
    bags = {"max_history": max_history, "negatives": negatives, **sampling}
    splits = _open_samples(interactions, samples, graph if samples == "neighbours" else bags)
    splits = _replace_negatives(splits, ranked_negatives)
    notes = (note, *lines, *_describe_split(data, divided, kind, splits.test))
    return replace(splits, notes=notes, options=dict(splits.options, schema=file_schema.to_dict()))


def _check_types(
    types: Sequence[Any] | None, events: Sequence[str] | None, samples: str
) -> list[list[str]]:
    """Return the events of each type. Raises ConfigError for types with events, or with samples other than pairs."""
    if types is not None and (events is not None or samples != "pairs"):
        raise ConfigError(
            f"got types with {'events' if events else f'samples={samples}'}, wanted types alone, and samples of pairs: "
            "leave data.options.events out, and data.options.samples"
        )
    return read_types(types)


def _open_samples(
    interactions: InteractionSplit, samples: Any, options: Mapping[str, Any]
) -> Splits:
    """Open samples of a kind with its options."""
    if samples == "neighbours":
        return open_graph(interactions, first_item=len(interactions.train.counts), **options)
    return open_interaction_splits(interactions, samples=samples, **options)


def _replace_negatives(splits: Splits, negatives: int | str | Path | None) -> Splits:
    """Rank held-out items among negatives; a file has those of the test part only."""
    if negatives is None:
        return splits
    test = replace_negatives(splits.test, negatives)
    if isinstance(negatives, str | Path):
        return replace(splits, test=test)
    return replace(splits, test=test, validation=replace_negatives(splits.validation, negatives))


def _has_order(interactions: Interactions, order: str | None) -> bool:
    """Return whether a user's items have an order. Raises ConfigError for one by times that are not there."""
    if order == "time" and interactions.time_n is None:
        raise ConfigError("order=time: got no column of times; name it with data.options.time")
    return order == "file" or interactions.time_n is not None


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


def _divide(
    interactions: Interactions, options: SplitOptions, type_names: Sequence[str]
) -> tuple[Interactions, Parts, list[str]]:
    """Assign each interaction to a part (n,). With types some are left out, and a line says how many train. Raises
    ConfigError for shares of each user's that are nothing, and for a type without training interactions."""
    lines = []
    if type_names:
        before = interactions
        interactions, parts = hold_out_primary_type(before, options)
        lines = [_describe_types(before, interactions, parts, type_names)]
    else:
        parts = assign_parts(interactions, options)
    for name, part in (("test", TEST), ("validation", VALIDATION)):
        share = getattr(options, f"{name}_fraction")
        if options.kind == "per_user" and share > 0 and not (parts == part).any():
            types = interactions.type_n
            users = interactions.user_n if types is None else interactions.user_n[types == 0]
            largest = int(np.bincount(users).max())
            raise ConfigError(
                f"split=per_user: got no interaction for {name}, wanted one at least: no user has more than "
                f"{largest:,}, and the share {share:g} of each user's is rounded down. Set a larger "
                f"data.options.{name}_fraction, 0 for no such part, or data.options.split=rows"
            )
    return interactions, parts, lines


def _describe_types(
    before: Interactions, interactions: Interactions, parts: Parts, type_names: Sequence[str]
) -> str:
    """Describe how many interactions of each type train, and what is left out. Raises ConfigError for a type of which
    none does."""
    types, users = interactions.type_n, interactions.user_n
    assert types is not None
    sizes = np.bincount(types[parts == TRAIN], minlength=len(type_names))
    if not sizes.all():
        name = type_names[int(np.argmin(sizes))]
        raise ConfigError(
            f"types: got no training interaction of {name}, wanted one of each type; leave it out of "
            "data.options.types, or hold out less"
        )
    listed = ", ".join(f"{name} {size:,}" for name, size in zip(type_names, sizes, strict=True))
    num_others = len(np.unique(users)) - len(np.unique(users[types == 0]))
    absent = f"; {num_others:,} users have no {type_names[0]}, and are not tested" * (
        num_others > 0
    )
    return (
        f"types, strongest first: {listed} train; {type_names[0]} is held out, and "
        f"{before.size - interactions.size:,} of other types with it{absent}"
    )


def _describe_split(
    interactions: Interactions, parts: Parts, split: SplitKind, test: Any
) -> list[str]:
    """Describe the parts and the ranking, and warn in a line if training sees what is later than the test."""
    sizes = np.bincount(parts, minlength=TEST + 1)
    validated, tested = (
        len(np.unique(interactions.user_n[parts == part])) for part in (VALIDATION, TEST)
    )
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
        )
        + f"; of {len(interactions.users.keys):,} users {validated:,} validate, {tested:,} test",
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
