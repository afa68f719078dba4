"""Sparse text of libsvm, libfm and libffm as columns: `label index:value ...` or `label field:index:value ...`.

format   columns
libsvm   label; features: the indices of a line; values: one for each index
libffm   label; for each field n: field_n, the indices; values_n

With a query after each label (`2 qid:7 1:0.5`), there is also the column qid, the group of a sample.

Text after a # is a comment. If the schema does not read the values, all must be 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import FIX, InvalidValue, refuse_values
from colonnade.data.tabular.files import TableFile, build_data_error
from colonnade.data.tabular.infer import VALUES, WEIGHTS
from colonnade.data.tabular.opening import build_opener
from colonnade.data.tabular.text_rows import BLOCK_BYTES, TextRows, index_rows

FIELD = re.compile(r"(field|values)_([0-9]+)")
QUERY = r"^(\s*\S+\s+)qid:([0-9]{1,18})(\s|$)"
"""Pattern of the start of a line with a query."""


@dataclass(frozen=True, slots=True, eq=False)
class LibsvmFile(TableFile):
    """File of libsvm or libffm text with an index of its blocks."""

    rows: TextRows
    fields: tuple[int, ...] | None  # libffm's fields in the first block; None: libsvm
    is_weighted: bool  # whether a value of the first block is not 1
    has_query: bool  # whether each line has a query after its label: qid:NUMBER

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
        heads = ["label", "qid"] if self.has_query else ["label"]
        return [*heads, *(name for pair in self._column_pairs for name in pair)]

    @property
    def header_types(self) -> dict[str, str]:
        types = {
            ids: f"{WEIGHTS}{values}" for ids, values in self._column_pairs if self.is_weighted
        }
        types |= {values: VALUES for _, values in self._column_pairs}
        return types | ({"qid": "group"} if self.has_query else {})

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        types = {"qid": pa.int64()} if self.has_query else {}
        for ids, values in self._column_pairs:
            types |= {ids: pa.list_(pa.int64()), values: pa.list_(pa.float64())}
        return types

    def bind_schema(self, file_schema: FileSchema) -> LibsvmFile:
        # The first lines of this file may lack a field.
        fields = {int(m.group(2)) for name in file_schema.columns if (m := FIELD.fullmatch(name))}
        return (
            self
            if self.fields is None
            else replace(self, fields=tuple(sorted(fields.union(self.fields))))
        )

    def describe_row(self, block: int, row: int) -> str:
        return f"line {int(self.rows.lines[block]) + row + 1}"

    @property
    def num_parts(self) -> int:
        """Number of parts of a pair: index:value, or field:index:value."""
        return 2 if self.fields is None else 3

    def split_block(self, block_index: int) -> SplitLines:
        """Read a block and split its lines. Raises InvalidValue."""
        return split_libsvm_lines(
            self.rows.read_block(block_index), self.num_parts, has_query=self.has_query
        )

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        lines = self.split_block(block_index)
        indices = lines.parse_pair_part(self.num_parts - 2, pa.int64(), "an integer as the index")
        values = lines.parse_pair_part(self.num_parts - 1, pa.float64(), "a number as the value")
        fields = None
        if self.fields is not None:
            fields = lines.parse_pair_part(0, pa.int64(), "an integer as the field").to_numpy()
        arrays: dict[str, pa.Array] = {"label": lines.labels}
        if lines.queries is not None:
            arrays["qid"] = lines.queries
        for name in column_names:
            if name in arrays:
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
    queries: pa.Array | None  # (S,) int64
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


def split_libsvm_lines(block_text: bytes, parts_per_pair: int, *, has_query: bool) -> SplitLines:
    """Split lines into labels, queries and pairs. Raises InvalidValue for the first line without a query, if lines have
    one, and the first pair without `parts_per_pair` parts."""
    lines = pa.array(block_text.decode(errors="replace").removesuffix("\n").split("\n"))
    if b"#" in block_text:
        lines = pc.replace_substring_regex(lines, "#.*", "")
    queries = None
    if has_query:
        is_query = pc.match_substring_regex(lines, QUERY)
        refuse_values(
            ~is_query.to_numpy(zero_copy_only=False),
            "qid",
            lambda row: repr(lines[row].as_py())[:60],
            "qid:NUMBER after the label, as in the first line",
        )
        queries = pc.replace_substring_regex(lines, f"{QUERY}.*", r"\2").cast(pa.int64())
        lines = pc.replace_substring_regex(lines, QUERY, r"\1")
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
    split = SplitLines(pc.list_element(lists, 0), queries, lengths - 1, pairs, parts)
    is_invalid = pc.list_value_length(parts).to_numpy() != parts_per_pair
    if is_invalid.any():
        wanted = "index:value" if parts_per_pair == 2 else "field:index:value, as in the first line"
        raise split.build_error(int(is_invalid.argmax()), wanted)
    return split


def open_libsvm_file(path: Path) -> LibsvmFile:
    """Index the file; find the format and the fields in its first block. Raises DataError."""
    rows = index_rows(path, None, has_header=False, block_bytes=BLOCK_BYTES)
    first = rows.read_block(0).split(b"\n", 1)[0].split(b"#")[0].split()
    has_query = len(first) > 1 and first[1].startswith(b"qid:")
    is_libffm = any(pair.count(b":") == 2 for pair in first[1 + has_query :][:1])
    file = LibsvmFile(rows, () if is_libffm else None, False, has_query)
    try:
        lines = file.split_block(0)
        fields = np.unique(lines.parse_pair_part(0, pa.int64(), "an integer").to_numpy()).tolist()
        values = lines.parse_pair_part(file.num_parts - 1, pa.float64(), "a number as the value")
    except InvalidValue as fault:
        raise build_data_error(file, 0, fault) from None
    is_weighted = bool((values.to_numpy() != 1).any())
    return replace(file, fields=tuple(fields) if is_libffm else None, is_weighted=is_weighted)


open_libsvm = build_opener(
    "libsvm",
    open_libsvm_file,
    """Open samples as `open_csv` does, with the columns above. Labels -1 and 1 become 0 and 1 where inferred.

    Raises DataError naming file, line and column.
    """,
)
