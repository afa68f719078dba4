"""Criteo display-ads text files: label, 13 integers, 26 categories of 8 hex digits; tabs; empty = missing.

A file may have any size: it is indexed once, then read by runs of lines, in time order.

Dense values become log(1 + max(x, 0)); a missing one becomes 0; blanks around a number are ignored.
A category becomes the 32-bit number of its hex digits; a missing one becomes `MISSING_ID`, which 8 digits cannot
represent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Block, BlockSource, Column, Schema, Splits
from colonnade.data.counter import mix_words
from colonnade.data.lines import (
    LineFile,
    build_field_error,
    format_excerpt,
    locate_data_file,
    open_line_file,
)
from colonnade.data.tensors import TensorColumns, TensorSource
from colonnade.errors import ConfigError, DataError

FOLDER = "criteo10k"
FILE = "train.txt"
DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NAMES = ("label", *DENSE, *CATEGORIES)
COUNT = " *-?[0-9]{1,18} *"
"""Pattern of a number in the file."""
MISSING_ID = 1 << 32
RUN_LINES = 1 << 13
"""Number of lines parsed at a time, for any batch size: fewer cost many calls, more do not fit in the cache."""

Columns = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]
"""Label (B, 1), dense (B, 13) and ids (26, B)."""

_TYPES = {name: pa.int64() for name in NAMES[:14]} | {name: pa.binary() for name in CATEGORIES}


def _build_hex_table() -> NDArray[np.uint16]:
    """Map two ASCII digits, read as a little-endian uint16, to the byte they represent; 256 = not hex. (65536,)."""
    table = np.full(1 << 16, 256, dtype=np.uint16)
    for value in range(256):
        high, low = tuple(f"{value:02x}")
        for pair in {a + b for a in (high, high.upper()) for b in (low, low.upper())}:
            table[int.from_bytes(pair.encode(), "little")] = value
    return table


_HEX_PAIRS = _build_hex_table()


def open_criteo(
    path: str | Path | None = None,
    *,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    hash_rows: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Splits:
    """Open a Criteo file: the first lines train, then `validation_fraction` validates and `test_fraction` tests.

    path       the file, or the folder with train.txt; default `$COLONNADE_DATA/criteo10k`
    hash_rows  None: open tables. N: a category's id is mix64(id) % N, for vocabulary tables of N rows
    shuffle    False: streamed in time order. True: loaded into memory, a new order each epoch from `seed`

    Both fractions are of all lines. Raises DataError naming file, line and column: here for the file and its first and
    last line, for other lines when they are read.
    """
    for name, fraction in (("test", test_fraction), ("validation", validation_fraction)):
        if not 0 <= fraction < 1:
            raise ConfigError(f"got {name}_fraction={fraction}, wanted 0 <= {name}_fraction < 1")
    if test_fraction + validation_fraction >= 1:
        raise ConfigError(
            f"got test_fraction={test_fraction} and validation_fraction={validation_fraction}, wanted less than 1 "
            "together: nothing is left to train on"
        )
    if hash_rows is not None and hash_rows < 1:
        raise ConfigError(
            f"got hash_rows={hash_rows}, wanted at least 1; leave it out for open tables"
        )
    file = open_line_file(locate_data_file(path, data_set_folder=FOLDER, file_name=FILE))
    check_line(file.read_lines(0, 1), file.path, 1)
    last = file.read_lines(file.num_lines - 1, file.num_lines)
    check_line(last, file.path, file.num_lines)
    if not file.ends_in_newline and last.endswith(b"\t"):
        raise build_field_error(
            file.path,
            file.num_lines,
            CATEGORIES[-1],
            got="the end of the file with neither a value nor a newline",
            wanted="a whole line",
            fix="The file looks cut off: fetch it again, or end it with a newline if it is whole",
        )
    split = file.num_lines - round(file.num_lines * test_fraction)
    fit = split - round(file.num_lines * validation_fraction)
    train = CriteoSource(file, 0, fit, hash_rows=hash_rows)
    validation = CriteoSource(file, fit, split, hash_rows=hash_rows)
    test = CriteoSource(file, split, file.num_lines, hash_rows=hash_rows)
    return Splits(
        train=_load_in_memory(train, shuffle_key=seed) if shuffle else train,
        validation=validation if validation.num_samples else None,
        test=test if test.num_samples else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CriteoSource(BlockSource):
    """Source over lines start .. stop-1 of a file, counted from 0, in file order in every epoch."""

    file: LineFile
    start: int
    stop: int
    hash_rows: int | None = None
    has_label: bool = True  # False: lines begin with I1, and batches have no label

    @property
    def schema(self) -> Schema:
        columns = tuple(Column(name, self.hash_rows) for name in CATEGORIES)
        return Schema(dense=DENSE, categorical=columns)

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        return chain.from_iterable(map(self._read_run, _group_adjacent(blocks)))

    def read(self, first_sample: int, end_sample: int) -> Batch:
        """Read samples begin .. end-1 of this source."""
        return self._build_batch(*self._parse_samples(first_sample, end_sample))

    def _read_run(self, adjacent_blocks: list[Block]) -> Iterator[Batch]:
        """Yield one batch per block; the blocks are adjacent and are parsed in one call."""
        first = adjacent_blocks[0][0]
        run = None
        # Faulty lines are read again block by block, so that the batches before them are still yielded.
        with suppress(DataError):
            run = self._parse_samples(first, adjacent_blocks[-1][1])
        for begin, end in adjacent_blocks:
            if run is None:
                yield self.read(begin, end)
            else:
                part = slice(begin - first, end - first)
                yield self._build_batch(run[0][part], run[1][part], run[2][:, part])

    def _parse_samples(self, begin: int, end: int) -> Columns:
        starts = range(begin, end, RUN_LINES) or [begin]
        runs = [self._parse_run(start, min(start + RUN_LINES, end)) for start in starts]
        if len(runs) == 1:
            return runs[0]
        label, dense, ids = zip(*runs, strict=True)
        return np.concatenate(label), np.concatenate(dense), np.concatenate(ids, axis=1)

    def _parse_run(self, begin: int, end: int) -> Columns:
        first = self.start + begin
        lines = self.file.read_lines(first, self.start + end)
        label, dense, ids = parse_lines(
            lines if self.has_label else add_zero_labels(lines),
            end - begin,
            path=self.file.path,
            first_line=first + 1,
        )
        if self.hash_rows is not None:
            ids = (mix_words(ids.astype(np.uint64)) % np.uint64(self.hash_rows)).astype(np.int64)
        return label, dense, ids

    def _build_batch(
        self, label: NDArray[np.float32], dense: NDArray[np.float32], ids: NDArray[np.int64]
    ) -> Batch:
        return Batch(
            size=len(dense),
            dense=torch.from_numpy(dense),
            ids={name: Ids(torch.from_numpy(ids[i])) for i, name in enumerate(CATEGORIES)},
            label=torch.from_numpy(label) if self.has_label else None,
        )


def add_zero_labels(lines: bytes) -> bytes:
    """Put a label 0 in front of each of some lines, which have none."""
    body = b"0\t" + lines.removesuffix(b"\n").replace(b"\n", b"\n0\t")
    return body + b"\n" * lines.endswith(b"\n")


def _group_adjacent(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Group adjacent blocks into runs of at most RUN_LINES lines."""
    run: list[Block] = []
    for block in blocks:
        if run and (block[0] != run[-1][1] or block[1] - run[0][0] > RUN_LINES):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _load_in_memory(source: CriteoSource, *, shuffle_key: int) -> TensorSource:
    batch = source.read(0, source.num_samples)
    columns = TensorColumns(dense=batch.dense, ids=batch.ids, label=batch.label)
    return TensorSource(source.schema, columns, shuffle_key=shuffle_key)


def parse_lines(lines: bytes, num_lines: int, *, path: Path, first_line: int) -> Columns:
    """Parse `num_lines` complete lines into label (B, 1), dense (B, 13), ids (26, B).

    `path` and `first_line` (from 1) are for messages. Raises DataError for the first faulty field.
    """
    if num_lines == 0:
        empty = np.zeros((0, 1), np.float32), np.zeros((0, 13), np.float32)
        return *empty, np.zeros((len(CATEGORIES), 0), np.int64)
    table, ids = parse_columns(lines, num_lines, path=path, first_line=first_line)
    counts = np.stack([pc.fill_null(table.column(i), 0).to_numpy() for i in range(1, 14)], axis=1)
    return (
        table.column(0).to_numpy().astype(np.float32).reshape(-1, 1),
        np.log1p(np.maximum(counts, 0)).astype(np.float32),
        ids,
    )


def parse_columns(
    lines: bytes, num_lines: int, *, path: Path, first_line: int
) -> tuple[pa.Table, NDArray[np.int64]]:
    """Parse `num_lines` (1 or more) complete lines into a table and ids (26, B).

    The table has label (0 or 1) and I1 .. I13 as int64 with nulls, and the categories as unparsed text. Raises
    DataError for the first faulty field.
    """
    if b"x" in lines or b"X" in lines:  # Arrow would parse 0x10 as a number
        _raise_fault(lines, path, first_line, "an x, which no field may hold")
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(lines),
            read_options=pyarrow.csv.ReadOptions(
                column_names=NAMES, use_threads=False, block_size=len(lines) + 1
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter="\t", quote_char=False, ignore_empty_lines=False
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=_TYPES, null_values=[""], check_utf8=False
            ),
        )
    except pa.ArrowInvalid as error:
        _raise_fault(lines, path, first_line, str(error))
    if table.num_rows != num_lines:
        _raise_fault(lines, path, first_line, f"{table.num_rows} rows in {num_lines} lines")
    label = table.column(0)
    if label.null_count or not np.isin(label.to_numpy(), (0, 1)).all():
        _raise_fault(lines, path, first_line, "a label that is neither 0 nor 1")
    ids = np.empty((len(CATEGORIES), num_lines), dtype=np.int64)
    for i in range(len(CATEGORIES)):
        if not parse_hex_ids(table.column(14 + i), ids_out=ids[i]):
            _raise_fault(lines, path, first_line, f"column {CATEGORIES[i]} is not hexadecimal")
    return table, ids


def parse_hex_ids(hex_column: pa.ChunkedArray, ids_out: NDArray[np.int64]) -> bool:
    """Parse 8-digit fields into `ids_out` (B,), empty ones as MISSING_ID. Return False if there is any other field."""
    array = hex_column.combine_chunks()
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[array.offset :][: len(array) + 1]
    lengths = np.diff(offsets)
    has_value = lengths == 8
    if not (has_value | (lengths == 0)).all():
        return False
    ids_out[:] = MISSING_ID
    if not has_value.any():
        return True
    pairs = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]].view("<u2")
    codes = _HEX_PAIRS[pairs]
    if codes.max() > 255:
        return False
    ids_out[has_value] = codes.astype(np.uint8).view(">u4")
    return True


def _raise_fault(lines: bytes, path: Path, first_line: int, reason: str) -> NoReturn:
    """Raise DataError for the first faulty field of lines that Arrow's reader refused for `reason`."""
    for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), first_line):
        check_line(line, path, number)
    raise DataError(f"{path}, from line {first_line} on: cannot be read ({reason})")


def check_line(line_bytes: bytes, path: Path, line_number: int) -> None:
    """Raise DataError for the first faulty field of a line. Slow check with the same rules as `parse_lines`."""
    fields = line_bytes.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if len(fields) != len(NAMES):
        raise build_field_error(
            path,
            line_number,
            None,
            got=f"{len(fields)} columns in {format_excerpt(line_bytes)}",
            wanted=f"{len(NAMES)} separated by tabs (label, I1..I13, C1..C26)",
            fix="Is this a Criteo training file, and whole? Test files without labels are not read",
        )
    for name, field in zip(NAMES, fields, strict=True):
        if name == "label":
            pattern = rb" *(-?0+|0*1) *"
            wanted = "0 or 1"
        elif name in DENSE:
            pattern = rb"|" + COUNT.encode()
            wanted = "an integer or nothing"
        else:
            pattern = rb"([0-9a-fA-F]{8})?"
            wanted = "8 hexadecimal digits or nothing"
        if not re.fullmatch(pattern, field):
            raise build_field_error(
                path,
                line_number,
                name,
                got=format_excerpt(field),
                wanted=wanted,
                fix="Repair or remove the line",
            )
