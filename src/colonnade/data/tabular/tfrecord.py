"""TFRecord files of tf.train.Example as columns: one for each feature, a list where a record has several values.

Example  { Features features = 1; }
Features { map<string, Feature> feature = 1; }     an entry is { string key = 1; Feature value = 2; }
Feature  { BytesList = 1 | FloatList = 2 | Int64List = 3; }     each { repeated value = 1; }, numbers packed or not

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
from colonnade.data.tabular.encode import Fault
from colonnade.data.tabular.fields import Bag, Dtype
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.files import locate_fault, read_blocks
from colonnade.data.tabular.opening import Format, open_tables
from colonnade.data.tabular.source import Splitting
from colonnade.data.tabular.text_rows import BLOCK_BYTES
from colonnade.errors import DataError

FORMS = {1: "bytes", 2: "floats", 3: "integers"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def parse_example(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Return form ("bytes", "floats", "integers") and values by feature. Raises ValueError."""
    features: dict[str, tuple[str, list[Any]]] = {}
    for entry in _messages(data, 1):
        for pair in _messages(entry, 1):
            keys = list(_messages(pair, 1))
            name = keys[-1].decode() if keys else ""
            form, values = "", []
            for feature in _messages(pair, 2):
                for number, wire, value in _fields(feature):
                    if number in FORMS and wire == BYTES:
                        form, values = FORMS[number], _values(FORMS[number], value)
            features[name] = form, values
    return features


def _values(form: str, data: bytes) -> list[Any]:
    values: list[Any] = []
    for number, wire, value in _fields(data):
        if number != 1:
            continue
        if form == "bytes" and wire == BYTES:
            values.append(value)
        elif form == "floats" and wire in (BYTES, FIXED32):
            if len(value) % 4:
                raise ValueError("floats of no whole length")
            values += struct.unpack(f"<{len(value) // 4}f", value)
        elif form == "integers" and wire == VARINT:
            values.append(_signed(value))
        elif form == "integers" and wire == BYTES:
            at = 0
            while at < len(value):
                integer, at = _varint(value, at)
                values.append(_signed(integer))
        else:
            raise ValueError(f"wire type {wire} in a list of {form}")
    return values


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the messages and texts of one field."""
    for number, wire, value in _fields(data):
        if number == wanted:
            if wire != BYTES:
                raise ValueError(f"wire type {wire} in field {number}")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) of every field: an integer for a varint, else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value: Any
            value, at = _varint(data, at)
        else:
            if wire == BYTES:
                size, at = _varint(data, at)
            elif wire in (FIXED64, FIXED32):
                size = 8 if wire == FIXED64 else 4
            else:
                raise ValueError(f"wire type {wire}")
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("a field that goes beyond the end")
        yield number, wire, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of up to 64 bits, and where it ends."""
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("an integer that goes beyond the end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
    raise ValueError("an integer of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


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
