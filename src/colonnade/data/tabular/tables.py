"""Tabular files of either kind: which one a path holds, its inferred schema, and options that outlive the day."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.tabular import csv, parquet
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.files import find_files
from colonnade.data.tabular.source import TableSource
from colonnade.errors import ConfigError


def kind_of(path: str | Path) -> str:
    """ "parquet" or "csv", the names of SOURCES, by the first file's name. Raises ConfigError, DataError."""
    file = find_files(path, (*parquet.ENDINGS, *csv.ENDINGS))[0]
    name = file.name.lower()
    if name.endswith(parquet.ENDINGS):
        return "parquet"
    if name.endswith((*csv.ENDINGS, ".txt")):
        return "csv"
    raise ConfigError(
        f"{file}: got a name that ends in neither {', '.join(parquet.ENDINGS)} nor {', '.join(csv.ENDINGS)}; "
        "say which it is with --data parquet or --data csv"
    )


def infer_schema(path: str | Path, label: str | None = None, **options: Any) -> Declaration:
    """A first guess, settled (`infer.py` has the rules). `options`: open_csv's delimiter, quote, names, null_values."""
    opener = parquet.open_parquet if kind_of(path) == "parquet" else csv.open_csv
    return declaration_of(opener(path, label=label, **options))


def declaration_of(splits: Splits) -> Declaration:
    """Under which files were opened, every dtype said. Raises ConfigError for a source that has none."""
    if not isinstance(splits.train, TableSource):
        raise ConfigError("this data set declares no schema; csv and parquet do")
    return splits.train.declaration


def lasting_options(options: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """`options` that open the same data in the same way from any folder, later: what a run folder has to record.

    The schema becomes plain values, whatever it was (a file, nothing); paths become absolute. Options of sources
    without a declared schema are left as they are.
    """
    kept = dict(options)
    if isinstance(splits.train, TableSource):
        kept.pop("label", None)
        kept["schema"] = splits.train.declaration.to_dict()
        for name in ("validation", "test"):
            if kept.get(name) is not None:
                kept[name] = os.path.realpath(Path(kept[name]).expanduser())
    return kept
