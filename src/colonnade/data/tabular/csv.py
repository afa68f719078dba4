"""CSV and other delimited text, streamed by blocks: files, folders and patterns; any delimiter, quoted fields."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from colonnade.data.lines import build_field_error, format_excerpt
from colonnade.data.tabular.arrow_types import combine_chunks
from colonnade.data.tabular.declaration import FileSchema
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
    reads_times,
)
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.files import TableFile
from colonnade.data.tabular.infer import TYPES, UNNAMED
from colonnade.data.tabular.narrow import can_parse_texts
from colonnade.data.tabular.opening import build_opener
from colonnade.data.tabular.text_rows import (
    BLOCK_BYTES,
    TextRows,
    find_row_ends,
    guess_delimiter,
    index_rows,
)
from colonnade.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Dialect:
    """Syntax of delimited text: delimiter, quote, column names and texts that are missing values."""

    delimiter: str
    quote: str | None
    names: tuple[str, ...] | None
    null_values: tuple[str, ...]


def build_csv_dialect(
    path: Path,
    delimiter: str | None,
    quote: str | None,
    names: Sequence[str] | None,
    null_values: Sequence[str],
) -> Dialect:
    """Check the options and return them as a dialect. delimiter None: by the first line. Raises ConfigError."""
    for option, value in (("delimiter", delimiter), ("quote", quote)):
        is_valid = (
            isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n"
        )
        if value is not None and not is_valid:
            raise ConfigError(f"got {option}={value!r}, wanted one ASCII character")
    for option, texts in (("names", names), ("null_values", null_values)):
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        if texts is not None and not (is_list and all(isinstance(text, str) for text in texts)):
            raise ConfigError(f"got {option}={texts!r}, wanted a list of texts")
    delimiter = guess_delimiter(path, names) if delimiter is None else delimiter
    if delimiter == quote:
        raise ConfigError(f"{path}: got delimiter and quote both {quote!r}, wanted two characters")
    return Dialect(delimiter, quote, None if names is None else tuple(names), tuple(null_values))


@dataclass(frozen=True, slots=True, eq=False)
class CsvFile(TableFile):
    """CSV file with an index of its blocks. `types`: type as which a column is parsed, text by default."""

    rows: TextRows
    names: list[str]
    dialect: Dialect
    types: dict[str, pa.DataType]

    header_types: dict[str, str]
    text_columns: set[str] = dataclasses.field(default_factory=set)
    """Columns of numbers in which a block has other spellings: NA, 31.0 in a column of integers (pandas), true.

    They are parsed as text, which `encode_block` reads.
    """

    @property
    def path(self) -> Path:
        return self.rows.path

    @property
    def delimiter(self) -> str:
        return self.dialect.delimiter

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.rows.lengths

    def bind_schema(self, file_schema: FileSchema) -> CsvFile:
        return replace(self, types=choose_parse_types(file_schema))

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        types = {name: self.types.get(name, pa.string()) for name in column_names}
        types |= dict.fromkeys(self.text_columns.intersection(types), pa.string())
        text = self.rows.read_block(block_index)
        try:
            table = self.parse_block(text, block_index, column_names, types)
        except DataError:
            texts = dict.fromkeys(types, pa.string())
            if texts == types:
                raise
            table = self.parse_block(text, block_index, column_names, texts)
            self.text_columns.update(
                n for n, kind in types.items() if not can_parse_texts(table.column(n), kind)
            )
        return {name: combine_chunks(table.column(name)) for name in column_names}

    def parse_block(
        self,
        block_text: bytes,
        block_index: int,
        column_names: Sequence[str] | None,
        column_types: dict[str, pa.DataType],
    ) -> pa.Table:
        """Parse the text of a block. `column_names` None: all; pyarrow chooses types not in `column_types`. Raises
        DataError."""
        dialect = self.dialect
        reason = "its rows do not match its lines; is each quote closed?"
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(block_text),
                read_options=pyarrow.csv.ReadOptions(
                    column_names=self.names, use_threads=False, block_size=len(block_text) + 1
                ),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=dialect.delimiter,
                    quote_char=dialect.quote or False,
                    newlines_in_values=dialect.quote is not None,
                    ignore_empty_lines=False,
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=column_types,
                    include_columns=None if column_names is None else list(column_names),
                    null_values=["", *dialect.null_values],
                    strings_can_be_null=True,
                ),
            )
            # pyarrow reads an empty line as a row of missing values. With a single column it is a valid row.
            is_ragged = self.rows.has_empty[block_index] and len(self.names) > 1
            if table.num_rows == self.lengths[block_index] and not is_ragged:
                return table
        except (pa.ArrowException, ValueError) as error:
            reason = str(error).splitlines()[0]
        self._raise_parse_error(block_text, block_index, reason)

    def describe_row(self, block: int, row: int) -> str:
        text = self.rows.read_block(block)
        ends = find_row_ends(text, self._quote_code)
        begin = int(ends[row - 1]) + 1 if row else 0
        before = int(self.rows.lines[block]) + text.count(b"\n", 0, begin)
        return f"line {before + 1}"

    def _raise_parse_error(
        self, block_text: bytes, block_index: int, parser_error: str
    ) -> NoReturn:
        """Raise DataError for the first faulty row of a block that pyarrow refused for `parser_error`."""
        line = int(self.rows.lines[block_index]) + 1
        begin = 0
        ends = find_row_ends(block_text, self._quote_code).tolist()
        for end in [*ends, len(block_text)]:
            row = block_text[begin:end]
            if begin < len(block_text):
                self.check_row(row, line)
            line += row.count(b"\n") + 1
            begin = end + 1
        first = int(self.rows.lines[block_index]) + 1
        raise DataError(f"{self.path}, from line {first} on: cannot be read ({parser_error})")

    def check_row(self, row_text: bytes, line_number: int) -> None:
        """Raise DataError for a faulty row. Slow check with the same rules as `parse_block` has for texts."""
        row_text = row_text.removesuffix(b"\r")
        if not row_text and len(self.names) > 1:
            raise build_field_error(
                self.path, line_number, None, got="an empty line", wanted="a row", fix="Remove it"
            )
        if b"\r" in row_text and self.dialect.quote is None:
            raise build_field_error(
                self.path,
                line_number,
                None,
                got=f"a carriage return inside {format_excerpt(row_text)}",
                wanted="none but at the end",
                fix="Remove it",
            )
        fields = self.split_row(row_text, line_number)
        if len(fields) != len(self.names):
            raise build_field_error(
                self.path,
                line_number,
                None,
                got=f"{len(fields)} columns in {format_excerpt(row_text)}",
                wanted=f"{len(self.names)} as the header has them"
                if self.dialect.names is None
                else f"{len(self.names)} as names has them",
                fix=f"Repair or remove the row; fields that hold the delimiter {self.delimiter!r} need quotes",
            )

    def split_row(self, row_text: bytes, line_number: int) -> list[str]:
        """Split a row, or the header, into its cells. Raises DataError for other text than UTF-8 and open quotes."""
        try:
            return self._split_row_cells(row_text.decode())
        except UnicodeDecodeError as error:
            position = row_text.count(self.delimiter.encode(), 0, error.start)
            raise build_field_error(
                self.path,
                line_number,
                self.names[position] if position < len(self.names) else None,
                got=f"the bytes {row_text[error.start : error.start + 4].hex(' ')}",
                wanted="UTF-8",
                fix="Convert the file, for instance with iconv -f latin1 -t utf-8",
            ) from None
        except csv.Error as error:
            raise build_field_error(
                self.path,
                line_number,
                None,
                got=f"{format_excerpt(row_text)} ({error})",
                wanted="quotes around whole fields",
                fix="Repair the row, or say that the file has no quotes: quote: none",
            ) from None

    @property
    def _quote_code(self) -> int | None:
        return None if self.dialect.quote is None else ord(self.dialect.quote)

    def _split_row_cells(self, row_text: str) -> list[str]:
        if self.dialect.quote is None:
            return row_text.split(self.delimiter)
        lines = row_text.splitlines(keepends=True) if "\n" in row_text else [row_text]
        reader = csv.reader(lines, delimiter=self.delimiter, quotechar=self.dialect.quote)
        records = [record for record in reader if record] or [[""]]
        if len(records) > 1:
            raise csv.Error("a quote inside a field that does not begin with one")
        return records[0]


def open_csv_file(
    path: Path,
    *,
    delimiter: str | None = None,
    quote: str | None = '"',
    names: Sequence[str] | None = None,
    null_values: Sequence[str] = (),
) -> CsvFile:
    """Index the file and read its header. Raises DataError, and ConfigError for arguments that cannot work."""
    dialect = build_csv_dialect(path, delimiter, quote, names, null_values)
    rows = index_rows(
        path, dialect.quote, has_header=dialect.names is None, block_bytes=BLOCK_BYTES
    )
    cells: Sequence[str] | None = dialect.names
    if cells is None:
        cells = CsvFile(rows, [], dialect, {}, {}).split_row(rows.header.rstrip(b"\r\n"), 1)
    if cells == [""]:
        raise build_field_error(
            path,
            1,
            None,
            got="an empty line",
            wanted="a header with the names of the columns",
            fix="Add one, or give names",
        )
    columns, header_types = parse_csv_header(path, cells)
    return CsvFile(rows, columns, dialect, {}, header_types)


def parse_csv_header(path: Path, header_cells: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the columns, and the types by name that the header gives.

    An empty cell becomes column_0, column_1, ... by its position. If all cells are `name:type`, the columns are typed.
    Raises DataError for an unknown type.
    """
    names = [cell or f"column_{i}" for i, cell in enumerate(header_cells)]
    types = {name: UNNAMED for name, cell in zip(names, header_cells, strict=True) if not cell}
    pairs = [cell.rpartition(":") for cell in header_cells]
    if (
        types
        or not all(name for name, _, _ in pairs)
        or not any(kind in TYPES for *_, kind in pairs)
    ):
        return names, types
    for name, _, kind in pairs:
        if kind not in TYPES:
            raise build_field_error(
                path,
                1,
                name,
                got=f"the type {format_excerpt(kind.encode())} in the header",
                wanted=f"one of {', '.join(TYPES)}",
                fix="Repair it, or give no column a type",
            )
        types[name] = TYPES[kind]
    return [name for name, _, _ in pairs], types


def choose_parse_types(file_schema: FileSchema) -> dict[str, pa.DataType]:
    """Choose the type as which each column is parsed; if fields need different types, one from which all can read."""
    wanted: dict[str, set[Dtype | str]] = {}
    for field in file_schema.fields:
        for column in field.columns:
            kinds = wanted.setdefault(column, set())
            if reads_times(field):
                kinds.add("text")
            elif isinstance(field, Number | Bucket | Weight):
                kinds.add("number")
            elif isinstance(field, Label):
                kinds.add("text")  # numbers, or true and false
            elif isinstance(field, Bag | SequenceField):
                kinds.add("text")  # split and parsed later
            elif isinstance(field, Category | Group | Key):
                kinds.add(field.dtype or "text")
    types = {
        "text": pa.string(),
        "boolean": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
    }
    return {
        column: next(types[kind] for kind in types if kind in kinds)
        for column, kinds in wanted.items()
    }


open_csv = build_opener(
    "csv",
    open_csv_file,
    """Open delimited text under a declared schema, or one inferred from the first block of the first file.

    `open_parquet` describes the other options. A block has the rows that end within 4 MiB of text.

    delimiter    one character; default: what the first line has: a tab, else the most frequent of , ; | else a blank
    quote        character around fields that contain delimiters or newlines; None: no quoted fields
    names        names of the columns, if the files have no header
    null_values  texts that are missing values, in addition to the empty one: ["NA", "NULL"]

    A column is text or integers, by its field's dtype; default text. Every file is read once at opening, to
    index it. Raises DataError naming file, line (from 1, the header included) and column.
    """,
)
