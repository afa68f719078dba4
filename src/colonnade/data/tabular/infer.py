"""A schema for files whose user declares nothing: a first guess, to be printed, read and corrected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from colonnade.data.tabular.arrow import dtype_in, is_integer, is_list, is_number, is_text
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.encode_numbers import read_numbers
from colonnade.data.tabular.fields import Bag, Category, Field, Label, Number, nearest
from colonnade.errors import ConfigError

LABELS = ("label", "click", "clicked", "target", "y")
ID_WORDS = ("id", "key", "code", "hash", "uuid")
LOG_ABOVE = 20.0
"""Numbers that are never negative and go beyond this are seen through log1p."""


def infer(path: Path, columns: Mapping[str, pa.Array], label: str | None) -> Declaration:
    """From some rows of a file, by column:

    floats               a number, through log1p where it is large and never negative, else (x - mean) / std
    text                 an open category; where many values hold a |, a bag
    integers, booleans   an open category; but a number where more than half of 1,000 or more rows are distinct
                         and the name does not say id, key, code or hash
    lists of these       an open bag
    anything else        left out (dates, structs, lists of floats, bytes)

    Raises ConfigError where no column is the label, or its values are not 0 and 1.
    """
    if label is None:
        label = label_of(columns, None)
        if label is None:
            raise ConfigError(
                f"{path}: got no column named {', '.join(LABELS)}, wanted to know the label. Say which column it is "
                f"with label (--set data.options.label=NAME); the columns are {', '.join(list(columns)[:20])}"
            )
    elif label not in columns:
        raise ConfigError(
            f"{path}: got no column {label!r}, which label names; {nearest(label, list(columns))}"
        )
    fields: list[Field] = [_label(path, label, columns[label])]
    for name, array in columns.items():
        if name != label:
            field = _field(name, array)
            if field is not None:
                fields.append(field)
    return Declaration(tuple(fields))


def label_of(columns: Mapping[str, pa.Array], label: str | None) -> str | None:
    """The column that is the label: the one named, or the first of LABELS that is there."""
    by_name = {name.lower(): name for name in reversed(list(columns))}
    return label or next((by_name[name] for name in LABELS if name in by_name), None)


def _label(path: Path, name: str, array: pa.Array) -> Label:
    if not is_number(array.type):
        raise ConfigError(
            f"{path}, column {name}: got {array.type} as the label, wanted 0 and 1. Name another column, or declare a "
            f"schema with `{name}: {{type: label, positive: 'yes'}}`, which says which value is 1"
        )
    plain = Label(_word(name), column=name)
    x = read_numbers(plain, array)
    if not np.isin(x[~np.isnan(x)], (0, 1)).all():
        raise ConfigError(
            f"{path}, column {name}: got labels from {np.nanmin(x):g} to {np.nanmax(x):g}, wanted 0 and 1. Declare a "
            f"schema with `{name}: {{type: label, at_least: {np.nanmedian(x):g}}}`, which says from where on it is 1"
        )
    unknown = bool(np.isnan(x).any())
    return Label(plain.name, column=name, missing="unknown" if unknown else "error")


def _field(name: str, array: pa.Array) -> Field | None:
    kind, word = array.type, _word(name)
    if is_list(kind):
        dtype = dtype_in(kind)
        return None if dtype is None else Bag(word, column=name, dtype=dtype)
    if is_text(kind):
        try:
            text = array.cast(pa.string())
        except pa.ArrowInvalid:  # bytes that are no text
            return None
        barred = pc.sum(pc.match_substring(text, "|")).as_py() or 0
        if barred > 0.1 * max(len(text) - text.null_count, 1):
            return Bag(word, column=name, dtype="text")
        return Category(word, column=name, dtype="text")
    words = word.lower().replace("-", "_").split("_")
    is_id = any(each in ID_WORDS for each in words) or word.lower().endswith("id")
    if is_id and pa.types.is_floating(kind):  # integers beside missing ones, as pandas writes them
        x = array.to_numpy(zero_copy_only=False)
        x = x[~np.isnan(x)]
        if (x == np.round(x)).all() and (np.abs(x) < 2.0**53).all():
            return Category(word, column=name, dtype="integer")
    if is_integer(kind):
        num_distinct = pc.count_distinct(array).as_py()
        if is_id or len(array) < 1000 or num_distinct <= len(array) / 2:
            return Category(word, column=name, dtype="integer")
    elif not is_number(kind):
        return None
    return _number(word, name, array)


def _number(word: str, name: str, array: pa.Array) -> Number:
    x = read_numbers(Number(word, column=name), array)
    x = x[np.isfinite(x)]
    if len(x) and x.min() >= 0 and x.max() > LOG_ABOVE:
        return Number(word, column=name, missing=0.0, transform="log1p")
    mean, std = (float(x.mean()), float(x.std())) if len(x) else (0.0, 0.0)
    # Four digits say it all, and are what a person wants to read.
    std = float(f"{std:.4g}")
    return Number(
        word, column=name, missing=0.0, mean=float(f"{mean:.4g}"), std=std if std > 0 else 1.0
    )


def _word(name: str) -> str:
    return name.replace(".", "_") or "unnamed"
