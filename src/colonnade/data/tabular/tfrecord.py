"""TFRecord files of tf.train.Example as columns: one for each feature, a list where a record has several values.

A record is its length (u64), a checksum of that, its bytes and their checksum; all little-endian, the checksums
CRC-32C, masked. The columns and their types are those of the records in the first block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.contract import Splits
from colonnade.data.lines import GZIP_MAGIC
from colonnade.data.tabular.columns import check_names, check_types
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.encode_numbers import Fault
from colonnade.data.tabular.example import parse_example
from colonnade.data.tabular.fields import Bag, Dtype
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.files import locate_fault, read_blocks
from colonnade.data.tabular.opening import Format, open_tables
from colonnade.data.tabular.source import Splitting
from colonnade.data.tabular.text_rows import BLOCK_BYTES
from colonnade.errors import DataError

ENDINGS = (".tfrecord", ".tfrecords")
HEAD, FOOT = 12, 4
"""Bytes before and behind a record's own."""
MOST_BYTES = 1 << 30
"""A longer record is taken for damage."""
TYPES = {"bytes": pa.binary(), "floats": pa.float32(), "integers": pa.int64()}


def open_tfrecord(
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
    """Open samples as `open_parquet` does; a block is what ends within 4 MiB.

    Every file is walked once at opening, to index it. Raises DataError naming file, record (from 0) and column.
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
        tfrecord_format(),
        schema=schema,
        label=label,
        validation=validation,
        test=test,
        splitting=splitting,
    )


def tfrecord_format() -> Format:
    return Format(ENDINGS, open_file)


@dataclass(frozen=True, slots=True, eq=False)
class TFRecordTable:
    """One file, by its index."""

    path: Path
    offsets: NDArray[
        np.int64
    ]  # (blocks + 1,) bytes before each block; the last one: the file's size
    lengths: NDArray[np.int64]  # (blocks,) records
    forms: dict[str, str]  # by feature: "bytes", "floats" or "integers"
    lists: frozenset[str]  # features with several values in a record

    @property
    def names(self) -> list[str]:
        return list(self.forms)

    @property
    def header_types(self) -> dict[str, str]:
        return {}

    def dtype_of(self, column: str) -> Dtype | None:
        dtypes: dict[str, Dtype] = {"bytes": "text", "integers": "integer"}
        return dtypes.get(self.forms.get(column, ""))

    def declared(self) -> Declaration | None:
        return None

    def head(self, num_rows: int) -> Mapping[str, pa.Array]:
        return read_blocks(self, num_rows)

    def bind(self, declaration: Declaration, split_by: str | None) -> TFRecordTable:
        check_names(self.path, self.names, declaration, split_by)
        # A list of numbers may have one value in each of the first records.
        lists = {
            column
            for field in declaration.fields
            if isinstance(field, Bag | SequenceField)
            for column in field.columns
            if self.forms[column] != "bytes"
        }
        bound = replace(self, lists=self.lists | lists)
        check_types(self.path, {name: bound._type(name) for name in self.names}, declaration)
        return bound

    def _type(self, name: str) -> pa.DataType:
        kind = TYPES[self.forms[name]]
        return pa.list_(kind) if name in self.lists else kind

    def place(self, block: int, row: int) -> str:
        return f"record {int(self.lengths[:block].sum()) + row}"

    def read(self, block: int, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        values: dict[str, list[Any]] = {name: [] for name in columns}
        for row, record in enumerate(self.records(block)):
            features = parse_record(record, row)
            for name in columns:
                form, read = features.get(name, ("", []))
                if read and form != self.forms[name]:
                    raise Fault(row, name, form, f"{self.forms[name]}, as in the first records")
                if name in self.lists:
                    values[name].append(read)
                elif len(read) > 1:
                    raise Fault(row, name, f"{len(read)} values", "one, as in the first records")
                else:
                    values[name].append(read[0] if read else None)
        return {name: _array(each, self._type(name)) for name, each in values.items()}

    def records(self, block: int) -> Iterator[bytes]:
        """Yield the records of a block. Raises DataError, Fault."""
        begin, end = int(self.offsets[block]), int(self.offsets[block + 1])
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None
        at, row = 0, 0
        while at < end - begin:
            size = check_head(
                self.path, data[at : at + HEAD], int(self.lengths[:block].sum()) + row
            )
            record = data[at + HEAD : at + HEAD + size]
            foot = data[at + HEAD + size : at + HEAD + size + FOOT]
            if len(foot) < FOOT or masked_crc(record) != struct.unpack("<I", foot)[0]:
                raise Fault(row, "-", "bytes that do not fit their checksum", "a whole record",
                            "Write or fetch the file again")  # fmt: skip
            yield record
            at += HEAD + size + FOOT
            row += 1


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, kind)
    is_list = pa.types.is_list(kind)
    if (kind.value_type if is_list else kind) != pa.binary():
        return array
    try:
        return array.cast(pa.list_(pa.string()) if is_list else pa.string())
    except pa.ArrowInvalid:  # no text
        return array


def parse_record(record: bytes, row: int) -> dict[str, tuple[str, list[Any]]]:
    try:
        return parse_example(record)
    except ValueError as error:
        raise Fault(row, "-", f"no tf.train.Example ({error})", "one in every record",
                    "Write the file again, or convert it to Parquet") from None  # fmt: skip


def masked_crc(data: bytes) -> int:
    """Return CRC-32C, rotated and shifted as TFRecord stores it."""
    from colonnade import _native

    crc = _native.crc32c(np.frombuffer(data, np.uint8))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def check_head(path: Path, head: bytes, number: int) -> int:
    """Return the length of a record. Raises DataError."""
    size, crc = struct.unpack("<QI", head) if len(head) == HEAD else (0, -1)
    if masked_crc(head[:8]) != crc or size > MOST_BYTES:
        raise DataError(
            f"{path}, record {number}: got a length that does not fit its checksum, wanted a TFRecord file. "
            "Write or fetch the file again; unpack it first if it is compressed"
        )
    return size


def open_file(path: Path) -> TFRecordTable:
    """Index the file, and read the features of its first block. Raises DataError."""
    offsets, ends, at, count = [0], [0], 0, 0
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(2) == GZIP_MAGIC:
                raise DataError(
                    f"{path}: got a gzip file (it starts with 1f 8b), wanted plain records. Unpack it first"
                )
            while at < num_bytes:
                file.seek(at)
                at += HEAD + check_head(path, file.read(HEAD), count) + FOOT
                count += 1
                if at > num_bytes:
                    raise DataError(
                        f"{path}, record {count - 1}: got {at - num_bytes} bytes less than its length says, wanted a "
                        "whole record. Was the file fully written?"
                    )
                if at - offsets[-1] >= BLOCK_BYTES or at == num_bytes:
                    offsets.append(at)
                    ends.append(count)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    table = TFRecordTable(path, np.array(offsets), np.diff(ends), {}, frozenset())
    forms: dict[str, str] = {}
    lists: set[str] = set()
    try:
        for row, record in enumerate(table.records(0)) if count else ():
            for name, (form, values) in parse_record(record, row).items():
                if values:
                    forms.setdefault(name, form)
                if len(values) > 1:
                    lists.add(name)
    except Fault as fault:
        raise locate_fault(table, 0, fault) from None
    return replace(table, forms=dict(sorted(forms.items())), lists=frozenset(lists))
