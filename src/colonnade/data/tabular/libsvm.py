"""Sparse text of libsvm, libfm and libffm as columns: `label index:value ...` or `label field:index:value ...`.

format   columns
libsvm   label; features: the indices of a line; values: one for each index
libffm   label; for each field n: field_n, the indices; values_n

Text after a # is a comment. If the schema does not read the values, all must be 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.contract import Splits
from colonnade.data.tabular.columns import check_required_columns
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import FIX, InvalidValue
from colonnade.data.tabular.fields import Dtype
from colonnade.data.tabular.files import build_data_error, read_first_rows
from colonnade.data.tabular.infer import VALUES, WEIGHTS
from colonnade.data.tabular.opening import open_table_files
from colonnade.data.tabular.source import ReaderOptions, with_reader_options
from colonnade.data.tabular.text_rows import BLOCK_BYTES, TextRows, index_rows

FIELD = re.compile(r"(field|values)_[0-9]+")


@with_reader_options
def open_libsvm(
    path: str | Path | Sequence[str | Path],
    **options: Any,
) -> Splits:
    """Open samples as `open_csv` does, with the columns above. Labels -1 and 1 become 0 and 1 where inferred.

    Raises DataError naming file, line and column.
    """
    return open_table_files(path, "libsvm", ReaderOptions(**options))


@dataclass(frozen=True, slots=True, eq=False)
class LibsvmFile:
    """File of libsvm or libffm text with an index of its blocks."""

    rows: TextRows
    fields: tuple[int, ...] | None  # libffm's fields in the first block; None: libsvm
    is_weighted: bool  # whether a value of the first block is not 1

    @property
    def path(self) -> Path:
        return self.rows.path

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.rows.lengths

    @property
    def _column_pairs(self) -> list[tuple[str, str]]:
        """Pairs of columns: indices and their values."""
        if self.fields is None:
            return [("features", "values")]
        return [(f"field_{n}", f"values_{n}") for n in self.fields]

    @property
    def names(self) -> list[str]:
        return ["label", *(name for pair in self._column_pairs for name in pair)]

    @property
    def header_types(self) -> dict[str, str]:
        types = {
            ids: f"{WEIGHTS}{values}" for ids, values in self._column_pairs if self.is_weighted
        }
        return types | {values: VALUES for _, values in self._column_pairs}

    def dtype_of(self, column: str) -> Dtype | None:
        return None if column == "label" else "integer"

    def embedded_schema(self) -> FileSchema | None:
        return None

    def read_head(self, num_rows: int) -> Mapping[str, pa.Array]:
        return read_first_rows(self, num_rows)

    def bind_schema(self, file_schema: FileSchema, split_column: str | None) -> LibsvmFile:
        # The first lines of this file may lack a field.
        names = set(self.names)
        if self.fields is not None:
            names |= {name for name in file_schema.columns if FIELD.fullmatch(name)}
        check_required_columns(self.path, sorted(names), file_schema, split_column)
        return self

    def describe_row(self, block: int, row: int) -> str:
        return f"line {int(self.rows.lines[block]) + row + 1}"

    @property
    def num_parts(self) -> int:
        """Number of parts of a pair: index:value, or field:index:value."""
        return 2 if self.fields is None else 3

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        lines = split_libsvm_lines(self.rows.read_block(block_index), self.num_parts)
        indices = lines.parse_pair_part(self.num_parts - 2, pa.int64(), "an integer as the index")
        values = lines.parse_pair_part(self.num_parts - 1, pa.float64(), "a number as the value")
        fields = None
        if self.fields is not None:
            fields = lines.parse_pair_part(0, pa.int64(), "an integer as the field").to_numpy()
        arrays: dict[str, pa.Array] = {"label": lines.labels}
        for name in column_names:
            if name == "label":
                continue
            kind, _, field = name.partition("_")
            mask = None if fields is None else fields == int(field)
            arrays[name] = lines.group_by_line(values if kind == "values" else indices, mask)
            weights = f"values_{field}" if field else "values"
            if kind != "values" and weights not in column_names:
                is_invalid = values.to_numpy() != 1
                is_invalid &= True if mask is None else mask
                if is_invalid.any():
                    raise lines.build_error(
                        int(is_invalid.argmax()),
                        "the value 1, because the schema reads no values",
                        f"Declare `weights: {weights}`",
                        name,
                    )
        return arrays


@dataclass(frozen=True, slots=True, eq=False)
class SplitLines:
    """Lines of a text (S), split into labels and pairs (E)."""

    labels: pa.Array  # (S,) texts
    counts: NDArray[np.int64]  # (S,) pairs of a line
    pairs: pa.Array  # (E,) texts such as 7:0.5
    parts: pa.Array  # (E,) lists of a pair's 2 or 3 parts

    def group_by_line(
        self, pair_values: pa.Array, is_used_pair: NDArray[np.bool_] | None
    ) -> pa.Array:
        """Group pair_values (E,) into one list per line (S,); `is_used_pair` (E,): pairs to use."""
        counts = self.counts
        if is_used_pair is not None:
            pair_values = pair_values.filter(pa.array(is_used_pair))
            counts = np.bincount(self._line_indices()[is_used_pair], minlength=len(counts))
        return pa.ListArray.from_arrays(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), pair_values
        )

    def parse_pair_part(
        self, part_index: int, number_type: pa.DataType, wanted_words: str
    ) -> pa.Array:
        """Parse one part of each pair as numbers (E,). Raises InvalidValue."""
        texts = (
            pc.list_element(self.parts, part_index)
            if len(self.parts)
            else pa.array([], pa.string())
        )
        try:
            return texts.cast(number_type)
        except pa.ArrowInvalid:
            for pair, text in enumerate(texts):
                try:
                    text.cast(number_type)
                except pa.ArrowInvalid:
                    raise self.build_error(pair, wanted_words) from None
            raise

    def build_error(
        self, pair: int, wanted: str, fix: str = FIX, column: str = "features"
    ) -> InvalidValue:
        """Build the error for a pair, by its index."""
        got = repr(self.pairs[pair].as_py())[:60]
        return InvalidValue(int(self._line_indices()[pair]), column, got, wanted, fix)

    def _line_indices(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.counts)), self.counts)


def split_libsvm_lines(block_text: bytes, parts_per_pair: int) -> SplitLines:
    """Split lines into labels and pairs. Raises InvalidValue for the first pair without `parts_per_pair` parts."""
    lines = pa.array(block_text.decode(errors="replace").removesuffix("\n").split("\n"))
    if b"#" in block_text:
        lines = pc.replace_substring_regex(lines, "#.*", "")
    lists = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(lines))
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    tokens = lists.flatten()
    is_pair = np.ones(len(tokens), np.bool_)
    is_pair[np.cumsum(lengths) - lengths] = False
    pairs = tokens.filter(pa.array(is_pair))
    parts = pc.split_pattern(pairs, ":")
    empty = pc.equal(pc.list_element(lists, 0), "").to_numpy(zero_copy_only=False)
    if empty.any():
        row = int(empty.argmax())
        raise InvalidValue(row, "label", "an empty line", "a label and pairs", "Remove the line")
    split = SplitLines(pc.list_element(lists, 0), lengths - 1, pairs, parts)
    is_invalid = pc.list_value_length(parts).to_numpy() != parts_per_pair
    if is_invalid.any():
        wanted = "index:value" if parts_per_pair == 2 else "field:index:value, as in the first line"
        raise split.build_error(int(is_invalid.argmax()), wanted)
    return split


def open_libsvm_file(path: Path) -> LibsvmFile:
    """Index the file; find the format and the fields in its first block. Raises DataError."""
    rows = index_rows(path, None, has_header=False, block_bytes=BLOCK_BYTES)
    first = rows.read_block(0).split(b"\n", 1)[0].split(b"#")[0].split()
    is_libffm = len(first) > 1 and first[1].count(b":") == 2
    file = LibsvmFile(rows, () if is_libffm else None, False)
    try:
        lines = split_libsvm_lines(rows.read_block(0), file.num_parts)
        fields = np.unique(lines.parse_pair_part(0, pa.int64(), "an integer").to_numpy()).tolist()
        values = lines.parse_pair_part(file.num_parts - 1, pa.float64(), "a number as the value")
    except InvalidValue as fault:
        raise build_data_error(file, 0, fault) from None
    is_weighted = bool((values.to_numpy() != 1).any())
    return LibsvmFile(rows, tuple(fields) if is_libffm else None, is_weighted)
