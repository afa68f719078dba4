"""Files with columns of names (entities, relations, nodes): reading, numbering, and random parts without unseen names.

Legend: n rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.counter import random_permutation
from colonnade.data.interactions.columns import number_values
from colonnade.data.interactions.files import match_columns, open_named_file
from colonnade.data.tabular.arrow_types import is_text_type, replace_null_type
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import read_required_values
from colonnade.data.tabular.fields import Category, Key
from colonnade.data.tabular.files import TableFile, find_files
from colonnade.data.tabular.formats import FORMATS
from colonnade.data.tabular.narrow import find_narrowest_type
from colonnade.data.tabular.opening import bind_files_to_schema
from colonnade.errors import ConfigError, DataError

Name = str | int
ENDINGS = (*FORMATS["csv"].endings, ".txt", *FORMATS["parquet"].endings)
"""Endings of files with columns of names."""
PARTS = {
    "train": ("train",),
    "validation": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
"""Parts, with the names of their files in a folder, before the endings."""
UNQUOTED = "\t |"
"""Delimiters of text in which names may have quotes; a field between commas or semicolons may be in quotes."""


def find_part_files(path: Any, validation: Any = None, test: Any = None) -> dict[str, Any]:
    """Find the file of each part in a folder; anything without a file `train` is all of the training part.

    validation, test: other files of these parts. Raises DataError for several files of a part.
    """
    files: dict[str, Any] = {}
    is_folder = isinstance(path, str | Path) and Path(path).expanduser().is_dir()
    for part, stems in PARTS.items() if is_folder else ():
        candidates = sorted(file for file in Path(path).expanduser().iterdir() if file.is_file())
        matches = [file for file in candidates if file.name.split(".")[0].lower() in stems]
        if len(matches) > 1:
            raise DataError(
                f"{path}: got {', '.join(file.name for file in matches)}, wanted one file for {part}. Name the files "
                "with --path, data.options.validation and data.options.test"
            )
        if matches:
            files[part] = matches[0]
    if files and "train" not in files:
        raise DataError(
            f"{path}: got {', '.join(files)} and no file train, wanted one. Give the file of the training part with "
            "--path"
        )
    separate = {"validation": validation, "test": test}
    return (files or {"train": path}) | {part: f for part, f in separate.items() if f is not None}


def read_name_columns(
    path: str | Path,
    roles: Mapping[str, Sequence[str]],
    column_names: Sequence[str] | None = None,
    delimiter: str | None = None,
) -> tuple[list[pa.ChunkedArray], tuple[str, ...], list[str]]:
    """Read the columns of files, texts without the blanks around them or integers.

    roles: meaning of each column, with its usual names in headers (lower case). column_names: the meanings of all
    columns in the order of the file, where others than the roles are not read; or else the header's names of the roles.
    Returns the columns (n,), their names in the first file, and lines that describe what was read. Raises DataError for
    a missing or unsuitable value, naming file and line; ConfigError.
    """
    is_list = isinstance(column_names, list | tuple)
    if column_names is not None and not (is_list and all(isinstance(c, str) for c in column_names)):
        raise ConfigError(
            f"got columns={column_names!r}, wanted a list of names such as [{', '.join(roles)}]"
        )
    blocks: list[list[pa.Array]] = []
    first_files: dict[tuple[str, ...], str] = {}
    for file_path in find_files(path, ENDINGS):
        file, names = _open_name_file(file_path, roles, column_names, delimiter)
        fields = [Category(role, column=name) for role, name in zip(roles, names, strict=True)]
        bound = bind_files_to_schema([file], FileSchema(tuple(fields)))
        for block in range(len(bound.lengths)):
            blocks.append(
                bound.read_columns(
                    block,
                    tuple(names),
                    lambda columns, _: [_read_names(c, a) for c, a in columns.items()],
                )
            )
        first_files.setdefault(tuple(names), file_path.name)
    notes = [
        f"{file}: " + ", ".join(f"{r} from {name}" for r, name in zip(roles, names, strict=True))
        for names, file in first_files.items()
    ]
    columns = [pa.chunked_array(column) for column in zip(*blocks, strict=True)]
    return columns, next(iter(first_files)), notes


def _open_name_file(
    path: Path,
    roles: Mapping[str, Sequence[str]],
    column_names: Sequence[str] | None,
    delimiter: str | None,
) -> tuple[TableFile, list[str]]:
    """Open a file. Returns it with the names of the roles' columns: `column 1`, ... in text without a header."""

    def name_columns(cells: Sequence[str]) -> list[str] | None:
        _, is_header = _match_roles(path, cells, roles, column_names)
        return None if is_header else [f"column {i + 1}" for i in range(len(cells))]

    file = open_named_file(path, delimiter, None, name_columns, UNQUOTED)
    positions, _ = _match_roles(path, file.names, roles, column_names)
    return file, [file.names[position] for position in positions]


def _match_roles(
    path: Path,
    cells: Sequence[str],
    roles: Mapping[str, Sequence[str]],
    column_names: Sequence[str] | None,
) -> tuple[list[int], bool]:
    """Return the position of each role's column, and whether the first cells of a text file are a header."""
    matches = list(match_columns(cells, roles, {}).values())
    is_header = len(matches) == len(roles)
    order = list(roles) if column_names is None else column_names
    if column_names is None and is_header:
        order = matches
    elif set(roles) <= set(order):
        if len(cells) != len(order):
            raise DataError(
                f"{path}: got {len(cells)} columns ({', '.join(cells)[:80]}), wanted {len(order)}: {', '.join(order)}. "
                "Name all columns of the file in their order: --set "
                f"data.options.columns=[{','.join([*roles, 'other'])}]; or its delimiter: "
                '--set data.options.delimiter=";"'
            )
        return [order.index(role) for role in roles], is_header
    elif len(order) != len(roles) or not set(order) <= set(cells):
        raise ConfigError(
            f"{path}: got columns={list(order)}, wanted {', '.join(roles)} in the order of the file, or the "
            f"names of these {len(roles)} in its header ({', '.join(cells)[:80]}); set data.options.columns"
        )
    return [list(cells).index(name) for name in order], True


def _read_names(column_name: str, array: pa.Array) -> pa.Array:
    """Read a block's names. Raises InvalidValue for a missing one."""
    array = replace_null_type(array)
    if is_text_type(array.type):
        array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    array = read_required_values(Key("name", column=column_name), array)
    return array if is_text_type(array.type) else array.cast(pa.int64())


def number_names(
    columns: Sequence[pa.ChunkedArray],
) -> tuple[list[Name], list[NDArray[np.int64]]]:
    """Number the names in columns (n,): integers if all are, else texts by their bytes. Returns names and numbers."""
    is_integer = all(
        pa.types.is_integer(column.type) or find_narrowest_type(column) == pa.int64()
        for column in columns
    )
    arrow_type = pa.int64() if is_integer else pa.string()
    columns = [column.cast(arrow_type) for column in columns]
    keys, numbers = number_values(columns)
    return keys.tolist(), [array.astype(np.int64) for array in numbers]


def assign_rows(
    names: Sequence[Name], trained: NDArray[np.int64], recorded: str | None, path: str | Path
) -> tuple[list[Name], NDArray[np.int64]]:
    """Assign rows of a table to the names with training samples, in their order, or as a run recorded them in JSON.

    trained: numbers in `names` that training has. Returns the names of the rows, and the row of each of `names`; -1 for
    none. Raises DataError if training has a name that the run has not.
    """
    row_names = json.loads(recorded) if recorded else [names[i] for i in np.unique(trained)]
    rows = {str(name): row for row, name in enumerate(row_names)}
    table = np.array([rows.get(str(name), -1) for name in names], np.int64)
    if (table[trained] < 0).any():
        name = names[int(trained[table[trained] < 0][0])]
        raise DataError(
            f"{path}: got the name {name!r}, which the data of the run did not have: it was changed. Restore it, or "
            "train on it in another folder (--run)"
        )
    return row_names, table


def draw_parts(
    groups: Sequence[Sequence[NDArray[np.int64]]], fractions: Sequence[float], random_key: int
) -> tuple[NDArray[np.int64], int]:
    """Draw the part (n,) of each row at random: 0 trains, 1, 2, ... have these fractions of the rows.

    groups: columns of numbers, those of one vocabulary together. A row stays in training if one of its names would
    have no training row otherwise. Returns the parts, and the number of rows that so stayed. Raises ConfigError.
    """
    if not (all(fraction >= 0 for fraction in fractions) and sum(fractions) < 1):
        raise ConfigError(
            f"got fractions {', '.join(map(str, fractions))} of the rows for validation and test, wanted 0 or more "
            "each and less than 1 together"
        )
    num_rows = len(groups[0][0])
    position = np.empty(num_rows, np.int64)
    position[random_permutation(num_rows, random_key)] = np.arange(num_rows)
    bounds = np.cumsum([int(fraction * num_rows + 1e-9) for fraction in fractions])
    parts = (np.searchsorted(bounds, position, side="right") + 1) % (len(fractions) + 1)
    is_last = np.zeros(num_rows, np.bool_)
    for columns in groups:
        # Held-out rows come first, so a name without a training row has its last row among them.
        last = np.zeros(max((int(c.max(initial=0)) for c in columns), default=0) + 1, np.int64)
        for column in columns:
            np.maximum.at(last, column, position)
        for column in columns:
            is_last |= last[column] == position
    num_moved = int((is_last & (parts > 0)).sum())
    parts[is_last] = 0
    return parts, num_moved
