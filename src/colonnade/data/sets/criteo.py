"""Criteo display-ads files: CSV with tabs and without a header; a label, 13 integers, 26 categories, in order of time.

Integers become log(1 + max(x, 0)), and 0 where they are missing. Categories are open, with a row for missing ones.
"""

from __future__ import annotations

from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.lines import locate_data_file
from colonnade.data.tabular.csv import open_csv

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NAMES = ("label", *DENSE, *CATEGORIES)
NUMBER = {"type": "number", "missing": 0.0, "transform": "log1p", "mean": 0.0, "std": 1.0}
CSV_OPTIONS: dict[str, Any] = {
    "delimiter": "\t",
    "quote": None,
    "names": list(NAMES),
    "schema": {
        "fields": {
            "label": {"type": "label"},
            **{name: NUMBER for name in DENSE},
            **{name: {"type": "category"} for name in CATEGORIES},
        }
    },
    "test_fraction": 0.2,
    "shuffle_window": 0,
}
"""Options of `open_csv` that differ from its defaults, or from those of a run."""


def locate_file(path: str | Path | None) -> Path:
    """Return the file that `path` names: itself, train.txt in the folder `path`, or by default in criteo10k.

    Raises DataError."""
    return locate_data_file(path, data_set_folder="criteo10k", file_name="train.txt")


def open_criteo(path: str | Path | None = None, **options: Any) -> Splits:
    """Open a Criteo file by `open_csv` with `CSV_OPTIONS`: the last fifth of the lines tests.

    path     the file, or the folder with train.txt; default `$COLONNADE_DATA/criteo10k`
    options  other options of `open_csv`, and other values of these
    """
    return open_csv(locate_file(path), **{**CSV_OPTIONS, **options})


_path, *_options = signature(partial(open_csv, **CSV_OPTIONS)).parameters.values()
open_criteo.__signature__ = Signature([_path.replace(default=None), *_options])  # type: ignore[attr-defined]
