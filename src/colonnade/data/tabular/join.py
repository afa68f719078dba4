"""Tables with one row per key, such as users or items, whose columns are joined to samples when these are read.

Legend: S samples of a block, K keys of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow_files import open_arrow_object
from colonnade.data.tabular.arrow_types import combine_chunks, is_number_type, is_text_type
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import InvalidValue
from colonnade.data.tabular.fields import NULL_VALUES, suggest_name
from colonnade.data.tabular.files import TableFile, build_data_error, find_files, read_tables
from colonnade.data.tabular.formats import FORMATS, find_format, list_endings
from colonnade.data.tabular.hashing import hash_texts
from colonnade.data.tabular.narrow import narrow_column
from colonnade.errors import DataError

NO_KEY = hash_texts(pa.array([""]))[0]
"""Hash of a missing key, which no table has."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyedTable:
    """Table in memory with one row per key. `index_table` builds it."""

    source: str
    key: str
    """Name of the column of keys, which is not in `columns`."""
    keys: pa.Array  # (K,)
    columns: Mapping[str, pa.Array]  # (K,)
    header_types: Mapping[str, str]
    column_types: Mapping[str, pa.DataType]
    hashes: NDArray[np.int64]  # (K,) of the keys, ascending
    rows: NDArray[np.int64]  # (K,): the row of each of `hashes`

    def find_rows(self, keys: pa.Array) -> NDArray[np.int64]:
        """Return the row of each of `keys` (S,); -1 for missing and unknown ones. Raises InvalidValue."""
        hashes = hash_texts(format_keys(self.key, keys))
        positions = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        return np.where(self.hashes[positions] == hashes, self.rows[positions], -1)

    def gather(self, keys: pa.Array, column_names: Sequence[str]) -> dict[str, pa.Array]:
        """Return the values of columns for each of `keys` (S,); missing ones where the table does not have the key."""
        rows = self.find_rows(keys)
        indices = pa.array(rows, mask=rows < 0)
        return {name: self.columns[name].take(indices) for name in column_names}

    def write_file(self, path: Path) -> None:
        """Write the table as an Arrow file."""
        table = pa.table({self.key: self.keys, **self.columns})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def join_records(
        self, records: Sequence[Mapping[str, Any]], column_names: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """Return records with the columns that they lack, if they have the key. The values are those of `gather`."""
        keys = [record.get(self.key) for record in records]
        texts = [None if key is None else str(key) for key in keys]
        joined = self.gather(pa.array(texts, pa.string()), column_names)
        columns = {name: values.to_pylist() for name, values in joined.items()}
        return [
            {**{name: columns[name][row] for name in columns}, **record}
            if self.key in record
            else record
            for row, record in enumerate(records)
        ]


def format_keys(column: str, keys: pa.Array) -> pa.Array:
    """Return keys (S,) as texts, in which an integer equals its digits, also "31.0" as pandas writes it; a missing key
    is an empty text. Raises InvalidValue for values of another type."""
    if pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    is_key = is_text_type(keys.type) or is_number_type(keys.type) or pa.types.is_null(keys.type)
    if not is_key:
        wanted = "texts or integers, by which rows are joined"
        raise InvalidValue(0, column, str(keys.type), wanted, "Join by another column")
    if not is_text_type(keys.type):
        keys = narrow_column(keys)
    try:
        texts = keys.cast(pa.string())
    except pa.ArrowInvalid:
        raise InvalidValue(0, column, "bytes that are no UTF-8 text", "texts or integers") from None
    if not pa.types.is_integer(keys.type):
        texts = pc.replace_substring_regex(texts, r"^\s*(-?[0-9]+)(\.0*)?\s*$", r"\1")
        missing = pc.is_in(texts, pa.array(NULL_VALUES))
        texts = pc.if_else(missing, "", texts)
    return pc.fill_null(texts, "")


def index_table(
    source: str,
    key: str,
    table: pa.Table,
    header_types: Mapping[str, str],
    column_types: Mapping[str, pa.DataType],
) -> KeyedTable:
    """Index a table by the column `key`. Raises DataError for a key that is missing or repeated."""
    keys = combine_chunks(table.column(key))
    try:
        hashes = hash_texts(format_keys(key, keys))
    except InvalidValue as fault:
        raise DataError(f"{source}, column {key}: got {fault.got}, wanted {fault.wanted}") from None
    rows = np.argsort(hashes, kind="stable")
    hashes = hashes[rows]
    if not len(rows):
        raise DataError(f"{source}: got no row, wanted one for each {key}. Was it fully written?")
    repeated = np.flatnonzero(hashes[1:] == hashes[:-1])
    if (hashes == NO_KEY).any():
        row = int(rows[hashes == NO_KEY][0])
        raise DataError(
            f"{source}, column {key}, row {row + 1}: got nothing, wanted a key. Leave out the row, or name another "
            "column"
        )
    if len(repeated):
        value = keys[int(rows[repeated[0]])].as_py()
        raise DataError(
            f"{source}: got {value!r} twice in the column {key}, wanted one row for each. Remove one"
        )
    columns = {
        name: combine_chunks(table.column(name)) for name in table.column_names if name != key
    }
    return KeyedTable(source, key, keys, columns, header_types, column_types, hashes, rows)


def read_keyed_table(source: Any, key: str) -> KeyedTable:
    """Read a table to join by `key`: files of any format, or an Arrow table. Raises DataError, ConfigError."""
    files: list[TableFile]
    if isinstance(source, str | Path):
        paths = find_files(source, list_endings())
        files = [(find_format(p.suffix) or FORMATS["csv"]).open_file(p) for p in paths]
    else:
        files = list(open_arrow_object(source))
    for file in files:
        if key not in file.names:
            raise DataError(
                f"{file.path}: got no column {key!r}, by which it is joined; {suggest_name(key, list(file.names))}"
            )
    first = files[0]
    blocks = [block for file in files for block in read_tables(file, first.names)]
    table = pa.concat_tables(blocks or [pa.table({key: []})], promote_options="permissive")
    name = str(first.path if len(files) == 1 else source)
    return index_table(name, key, table, first.header_types, first.column_types)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedFile(TableFile):
    """File with the columns of a table that it lacks, joined by a column that both have."""

    file: TableFile
    table: KeyedTable
    """Table with the columns that are joined alone."""
    own: Sequence[str]
    """Columns that the table has, too."""

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def names(self) -> list[str]:
        return [*self.file.names, *self.table.columns]

    @property
    def header_types(self) -> dict[str, str]:
        return {**self.table.header_types, **self.file.header_types}

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.file.lengths

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        return {**self.table.column_types, **self.file.column_types}

    def bind_schema(self, file_schema: FileSchema) -> JoinedFile:
        return replace(self, file=self.file.bind_schema(file_schema))

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        joined = [name for name in column_names if name in self.table.columns]
        own = [name for name in column_names if name not in self.table.columns]
        if joined and self.table.key not in own:
            own.append(self.table.key)
        columns = self.file.read_block(block_index, own)
        return (
            {**columns, **self.table.gather(columns[self.table.key], joined)} if joined else columns
        )

    def describe_row(self, block: int, row: int) -> str:
        return self.file.describe_row(block, row)

    def describe_matches(self) -> str:
        """Describe what is joined, and how many of the first samples have no row in the table."""
        first = next(read_tables(self.file, [self.table.key]), pa.table({self.table.key: []}))
        try:
            rows = self.table.find_rows(combine_chunks(first.column(0)))
        except InvalidValue as fault:
            raise build_data_error(self.file, 0, fault) from None
        return (
            f"joined by {self.table.key}: {', '.join(self.table.columns)} of {self.table.source} "
            f"({len(self.table.rows):,} rows); {int((rows < 0).sum()):,} of the first {len(rows):,} samples have no row"
            + "".join(f"; {name} is that of {self.path}" for name in self.own)
        )


def join_tables(file: TableFile, tables: Sequence[KeyedTable]) -> TableFile:
    """Join tables to a file, one after another; its own columns stay. Raises DataError if it lacks a key that it needs,
    and for a column that two tables have."""
    own = {*file.names}
    for table in tables:
        columns = {name: values for name, values in table.columns.items() if name not in own}
        if not columns:
            continue
        if table.key not in file.names:
            raise DataError(
                f"{file.path}: got no column {table.key!r}, by which {table.source} is joined; "
                f"{suggest_name(table.key, list(file.names))}"
            )
        if common := columns.keys() & {*file.names}:
            raise DataError(
                f"{table.source}: got a column {min(common)!r}, which another joined table has too, wanted each name "
                "once. Rename or remove one of them"
            )
        file = JoinedFile(file, replace(table, columns=columns), sorted(table.columns.keys() & own))
    return file


def describe_reading(file: TableFile) -> Iterator[str]:
    """Yield a line about a delimiter other than a comma, and one for each table that is joined to a file, in order."""
    if isinstance(file, JoinedFile):
        yield from describe_reading(file.file)
        yield file.describe_matches()
    elif file.delimiter not in ("", ","):
        yield f"{file.path.name}: the delimiter is {file.delimiter!r} (another: --delimiter)"
