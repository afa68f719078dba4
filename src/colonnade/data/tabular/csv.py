"""CSV and its kin as they are: one file, many, folders, patterns; any delimiter, quoted fields; streamed by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from colonnade.data.contract import Splits
from colonnade.data.tabular.arrow import is_number, one_array
from colonnade.data.tabular.columns import check_names, refuse_repeated, settle
from colonnade.data.tabular.csv_table import CsvTable, build_dialect, open_text
from colonnade.data.tabular.declaration import Declaration, load_declaration
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    Dtype,
    Group,
    Key,
    Label,
    Number,
    Weight,
)
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.files import Files, bind_files, find_days, find_files
from colonnade.data.tabular.infer import infer, label_of
from colonnade.data.tabular.source import Splitting
from colonnade.errors import ConfigError, DataError

ENDINGS = (".csv", ".tsv", ".tab")
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
    how = Splitting(
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        split_by=split_by,
        days=days,
        shuffle_window=shuffle_window,
        seed=seed,
        threads=threads,
    )
    dialect = build_dialect(delimiter, quote, names, null_values)
    days_of_files = find_days(path, ENDINGS)
    tables = [open_text(file, dialect) for day in days_of_files for file in day]
    if schema is None:
        declaration = infer_csv(tables, label)
    elif label is not None:
        raise ConfigError(
            f"got both schema and label={label!r}; the schema says which field is the label"
        )
    else:
        declaration = load_declaration(schema)
    declaration = settle(declaration, {})
    bind = partial(_bind, declaration=declaration)
    files = bind(tables, split_by=split_by)
    others = [
        None
        if each is None
        else bind([open_text(file, dialect) for file in find_files(each, ENDINGS)], split_by=None)
        for each in (validation, test)
    ]
    return how.split(files, days_of_files, *others)


def _bind(tables: Sequence[CsvTable], declaration: Declaration, split_by: str | None) -> Files:
    """Raises DataError for the first file whose columns are not what the declaration reads."""
    types = text_types(declaration)
    if split_by is not None:
        types.setdefault(split_by, pa.string())
    bound = []
    for table in tables:
        check_names(table.path, table.names, declaration, split_by)
        bound.append(CsvTable(table.rows, table.names, table.dialect, types))
    if not any(len(table.lengths) for table in tables):
        raise DataError(f"{tables[0].path}: got no row after the header, wanted at least one")
    return bind_files(declaration, bound, split_by)


def text_types(declaration: Declaration) -> dict[str, pa.DataType]:
    """What each column is parsed as; where fields want different things of it, as what serves all."""
    wanted: dict[str, set[Dtype | str]] = {}
    for field in declaration.fields:
        for column in field.columns:
            kinds = wanted.setdefault(column, set())
            if isinstance(field, Number | Bucket | Weight):
                kinds.add("number")
            elif isinstance(field, Label):
                kinds.add("text")  # numbers, or true and false
            elif isinstance(field, Bag | SequenceField):
                kinds.add("text")  # of which the elements are parsed
            elif isinstance(field, Category | Group | Key):
                kinds.add(field.dtype or "text")
    types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64()}
    return {
        column: next(types[kind] for kind in types if kind in kinds)
        for column, kinds in wanted.items()
    }


def infer_csv(tables: Sequence[CsvTable], label: str | None) -> Declaration:
    """From the first block that is there."""
    first = next((table for table in tables if len(table.lengths)), None)
    if first is None:
        raise DataError(
            f"{tables[0].path}: got no row after the header, wanted at least one to infer a schema from"
        )
    refuse_repeated(first.path, first.names)
    table = first.parse(first.rows.read(0), 0, None, {})
    columns = {name: one_array(table.column(name)) for name in first.names}
    numbers = [n for n, a in columns.items() if is_number(a.type)]
    spelled = first.parse(first.rows.read(0), 0, numbers, dict.fromkeys(numbers, pa.string()))
    for name in numbers:  # 007 is not 7, and no float is an integer of 20 digits
        texts = one_array(spelled.column(name))
        kinds = "0[0-9]+|-?[0-9]{19,}" if pa.types.is_floating(columns[name].type) else "0[0-9]+"
        if pc.any(pc.match_substring_regex(texts, rf"^\s*({kinds})\s*$")).as_py():
            columns[name] = texts
    # pyarrow sees true and false; a field that is no label reads them as text.
    labels = [label_of(columns, label)]
    columns = {
        name: array.cast(pa.string())
        if pa.types.is_boolean(array.type) and name not in labels
        else array
        for name, array in columns.items()
    }
    return infer(first.path, columns, label)
