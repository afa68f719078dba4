"""CSV and its kin as they are: one file, many, folders, patterns; any delimiter, quoted fields; streamed by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from colonnade.data.contract import Splits
from colonnade.data.tabular.csv_table import build_dialect, open_text
from colonnade.data.tabular.opening import Format, open_tables
from colonnade.data.tabular.source import Splitting

ENDINGS = (".csv", ".tsv", ".tab", ".inter")
"""Of the files that are read of a folder; a file that is named may be called anything."""


def open_csv(
    path: str | Path | Sequence[str | Path],
    *,
    schema: Any = None,
    label: str | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    validation_fraction: float = 0.0,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    days: bool = False,
    shuffle_window: int = 0,
    seed: int = 0,
    threads: int = 1,
    delimiter: str | None = None,
    quote: str | None = '"',
    names: Sequence[str] | None = None,
    null_values: Sequence[str] = (),
) -> Splits:
    """Samples under a declared schema, or one inferred from the first block of the first file.

    As `open_parquet`, where the other options are described; a block is what ends within 4 MiB of text, and

    delimiter    one character; default: tab for .tsv and .tab, else a comma
    quote        around fields that hold delimiters or newlines; None: no such fields
    names        of the columns, where the files have no header
    null_values  texts that are missing values, beside the empty one: ["NA", "NULL"]

    A column is text or integers, as its field's dtype says; default text. Every file is read once at opening, to
    index it. Raises DataError naming file, line (from 1, the header included) and column.
    """
    splitting = Splitting(
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        split_by=split_by,
        days=days,
        shuffle_window=shuffle_window,
        seed=seed,
        threads=threads,
    )
    return open_tables(
        path,
        csv_format(delimiter=delimiter, quote=quote, names=names, null_values=null_values),
        schema=schema,
        label=label,
        validation=validation,
        test=test,
        splitting=splitting,
    )


def csv_format(
    *,
    delimiter: str | None = None,
    quote: str | None = '"',
    names: Sequence[str] | None = None,
    null_values: Sequence[str] = (),
) -> Format:
    """Raise ConfigError for options that cannot work."""
    dialect = build_dialect(delimiter, quote, names, null_values)
    return Format(ENDINGS, partial(open_text, dialect=dialect))
