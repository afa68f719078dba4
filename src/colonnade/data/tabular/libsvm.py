"""Sparse text of libsvm, libfm and libffm as columns: `label index:value ...` or `label field:index:value ...`.

kind     columns
libsvm   label; features: the indices of a line; values: one for each
libffm   label; of each field n: field_n, the indices; values_n

What follows a # is a comment. A schema that does not read the values demands that all are 1.
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
from colonnade.data.tabular.columns import check_names
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.encode import FIX, Fault
from colonnade.data.tabular.fields import Dtype
from colonnade.data.tabular.files import locate_fault, read_blocks
from colonnade.data.tabular.infer import VALUES, WEIGHTS
from colonnade.data.tabular.opening import Format, open_tables
from colonnade.data.tabular.source import Splitting
from colonnade.data.tabular.text_rows import BLOCK_BYTES, TextRows, open_rows

ENDINGS = (".libsvm", ".svm", ".libfm", ".libffm", ".ffm")
FIELD = re.compile(r"(field|values)_[0-9]+")


def open_libsvm(
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
) -> Splits:
    """Open samples as `open_csv` does, with the columns above. Labels -1 and 1 become 0 and 1 where inferred.

    Raises DataError naming file, line and column.
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
        libsvm_format(),
        schema=schema,
        label=label,
        validation=validation,
        test=test,
        splitting=splitting,
    )


def libsvm_format() -> Format:
    return Format(ENDINGS, open_file)


@dataclass(frozen=True, slots=True, eq=False)
class LibsvmTable:
    """One file, by its index."""

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
    def _pairs(self) -> list[tuple[str, str]]:
        """Columns of indices, each with that of its values."""
        if self.fields is None:
            return [("features", "values")]
        return [(f"field_{n}", f"values_{n}") for n in self.fields]

    @property
    def names(self) -> list[str]:
        return ["label", *(name for pair in self._pairs for name in pair)]

    @property
    def header_types(self) -> dict[str, str]:
        types = {ids: f"{WEIGHTS}{values}" for ids, values in self._pairs if self.is_weighted}
        return types | {values: VALUES for _, values in self._pairs}

    def dtype_of(self, column: str) -> Dtype | None:
        return None if column == "label" else "integer"

    def declared(self) -> Declaration | None:
        return None

    def head(self, num_rows: int) -> Mapping[str, pa.Array]:
        return read_blocks(self, num_rows)

    def bind(self, declaration: Declaration, split_by: str | None) -> LibsvmTable:
        # A field may be absent from this file's first lines.
        names = set(self.names)
        if self.fields is not None:
            names |= {name for name in declaration.columns if FIELD.fullmatch(name)}
        check_names(self.path, sorted(names), declaration, split_by)
        return self

    def place(self, block: int, row: int) -> str:
        return f"line {int(self.rows.lines[block]) + row + 1}"

    @property
    def num_parts(self) -> int:
        return 2 if self.fields is None else 3

    def read(self, block: int, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        tokens = split_text(self.rows.read(block), self.num_parts)
        indices = tokens.numbers(self.num_parts - 2, pa.int64(), "an integer as the index")
        values = tokens.numbers(self.num_parts - 1, pa.float64(), "a number as the value")
        fields = None
        if self.fields is not None:
            fields = tokens.numbers(0, pa.int64(), "an integer as the field").to_numpy()
        read: dict[str, pa.Array] = {"label": tokens.labels}
        for name in columns:
            if name == "label":
                continue
            kind, _, field = name.partition("_")
            mask = None if fields is None else fields == int(field)
            read[name] = tokens.lists(values if kind == "values" else indices, mask)
            weights = f"values_{field}" if field else "values"
            if kind != "values" and weights not in columns:
                wrong = values.to_numpy() != 1
                wrong &= True if mask is None else mask
                if wrong.any():
                    raise tokens.fault(
                        int(wrong.argmax()), "the value 1, because the schema reads no values",
                        f"Declare `weights: {weights}`", name,
                    )  # fmt: skip
        return read


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The S lines of a text, cut into labels and E pairs."""

    labels: pa.Array  # (S,) texts
    counts: NDArray[np.int64]  # (S,) pairs of a line
    pairs: pa.Array  # (E,) texts such as 7:0.5
    parts: pa.Array  # (E,) lists of a pair's 2 or 3 parts

    def lists(self, values: pa.Array, mask: NDArray[np.bool_] | None) -> pa.Array:
        """Return (S,) lists of the values of each line; `mask` (E,): of those."""
        counts = self.counts
        if mask is not None:
            values = values.filter(pa.array(mask))
            counts = np.bincount(self._lines()[mask], minlength=len(counts))
        return pa.ListArray.from_arrays(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), values
        )

    def numbers(self, part: int, kind: pa.DataType, wanted: str) -> pa.Array:
        """Return (E,) one part of each pair as numbers. Raises Fault."""
        texts = pc.list_element(self.parts, part) if len(self.parts) else pa.array([], pa.string())
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            for at, text in enumerate(texts):
                try:
                    text.cast(kind)
                except pa.ArrowInvalid:
                    raise self.fault(at, wanted) from None
            raise

    def fault(self, at: int, wanted: str, fix: str = FIX, column: str = "features") -> Fault:
        got = repr(self.pairs[at].as_py())[:60]
        return Fault(int(self._lines()[at]), column, got, wanted, fix)

    def _lines(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.counts)), self.counts)


def split_text(text: bytes, num_parts: int) -> Tokens:
    """Cut lines into tokens. Raises Fault for the first pair that has not `num_parts` parts."""
    lines = pa.array(text.decode(errors="replace").removesuffix("\n").split("\n"))
    if b"#" in text:
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
        raise Fault(row, "label", "an empty line", "a label and pairs", "Remove the line")
    read = Tokens(pc.list_element(lists, 0), lengths - 1, pairs, parts)
    wrong = pc.list_value_length(parts).to_numpy() != num_parts
    if wrong.any():
        wanted = "index:value" if num_parts == 2 else "field:index:value, as in the first line"
        raise read.fault(int(wrong.argmax()), wanted)
    return read


def open_file(path: Path) -> LibsvmTable:
    """Index the file and look at its first block. Raises DataError."""
    rows = open_rows(path, None, has_header=False, block_bytes=BLOCK_BYTES)
    first = rows.read(0).split(b"\n", 1)[0].split(b"#")[0].split()
    is_libffm = len(first) > 1 and first[1].count(b":") == 2
    table = LibsvmTable(rows, () if is_libffm else None, False)
    try:
        tokens = split_text(rows.read(0), table.num_parts)
        fields = np.unique(tokens.numbers(0, pa.int64(), "an integer").to_numpy()).tolist()
        values = tokens.numbers(table.num_parts - 1, pa.float64(), "a number as the value")
    except Fault as fault:
        raise locate_fault(table, 0, fault) from None
    is_weighted = bool((values.to_numpy() != 1).any())
    return LibsvmTable(rows, tuple(fields) if is_libffm else None, is_weighted)
