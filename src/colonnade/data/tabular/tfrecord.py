"""TFRecord files of tf.train.Example as columns: one per feature, a list if a record has several values.

A list of numbers with as many values as a list of ids in all these records has the weights of the ids.

A record has its length (u64), a checksum of the length, its bytes and their checksum, all little-endian; the checksums
are masked CRC-32C. The columns and their types are those of the records in the first block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from colonnade.data.lines import GZIP_MAGIC, read_range
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.encode import InvalidValue
from colonnade.data.tabular.fields import Bag
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.files import TableFile, build_data_error
from colonnade.data.tabular.infer import VALUES, WEIGHTS
from colonnade.data.tabular.opening import build_opener
from colonnade.data.tabular.text_rows import BLOCK_BYTES
from colonnade.errors import DataError

DESCRIPTION = """
name: "colonnade/example.proto" package: "colonnade" syntax: "proto3"
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".colonnade.Features" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
          type_name: ".colonnade.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".colonnade.Feature" } } }
message_type { name: "Feature" oneof_decl { name: "form" }
  field { name: "bytes" number: 1 oneof_index: 0 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".colonnade.Bytes" }
  field { name: "floats" number: 2 oneof_index: 0 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".colonnade.Floats" }
  field { name: "integers" number: 3 oneof_index: 0 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".colonnade.Integers" } }
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
"""
"""Messages of a record, as TensorFlow's example.proto and feature.proto declare them."""


@cache
def _build_example_class() -> Any:
    file = text_format.Parse(DESCRIPTION, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("colonnade.Example"))


def parse_example(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Parse a tf.train.Example: form ("bytes", "floats", "integers") and values by feature. Raises ValueError."""
    try:
        features = _build_example_class().FromString(data).features.feature
    except DecodeError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    forms = {name: feature.WhichOneof("form") for name, feature in features.items()}
    return {
        name: (form, list(getattr(features[name], form).value)) if form else ("", [])
        for name, form in forms.items()
    }


HEADER_BYTES = 12
FOOTER_BYTES = 4
"""Number of bytes before and after the content of a record."""
MAX_RECORD_BYTES = 1 << 30
"""Maximal length of a record; a larger one is treated as damage."""
TYPES = {"bytes": pa.binary(), "floats": pa.float32(), "integers": pa.int64()}


@dataclass(frozen=True, slots=True, eq=False)
class TFRecordFile(TableFile):
    """TFRecord file with an index of its blocks."""

    path: Path
    offsets: NDArray[
        np.int64
    ]  # (blocks + 1,) bytes before each block; the last one: the file's size
    lengths: NDArray[np.int64]  # (blocks,) records
    forms: dict[str, str]  # by feature: "bytes", "floats" or "integers"
    lists: frozenset[str]  # features with several values in a record
    weights: dict[
        str, str
    ]  # by list of ids: the list of numbers of equal length in all first records

    @property
    def names(self) -> list[str]:
        return list(self.forms)

    @property
    def header_types(self) -> dict[str, str]:
        types = {ids: f"{WEIGHTS}{values}" for ids, values in self.weights.items()}
        return types | dict.fromkeys(self.weights.values(), VALUES)

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        return {name: self._arrow_type(name) for name in self.names}

    def bind_schema(self, file_schema: FileSchema) -> TFRecordFile:
        # In the first records a list of numbers may always have one value.
        lists = {
            column
            for field in file_schema.fields
            if isinstance(field, Bag | SequenceField)
            for column in field.columns
            if self.forms.get(column) != "bytes"
        }
        return replace(self, lists=self.lists | lists)

    def _arrow_type(self, name: str) -> pa.DataType:
        kind = TYPES[self.forms[name]]
        return pa.list_(kind) if name in self.lists else kind

    def describe_row(self, block: int, row: int) -> str:
        return f"record {int(self.lengths[:block].sum()) + row}"

    def read_block(self, block_index: int, column_names: Sequence[str]) -> Mapping[str, pa.Array]:
        rows: dict[str, list[Any]] = {name: [] for name in column_names}
        for row, record in enumerate(self.read_records(block_index)):
            features = parse_example_record(record, row)
            for name in column_names:
                form, values = features.get(name, ("", []))
                if values and form != self.forms[name]:
                    raise InvalidValue(
                        row, name, form, f"{self.forms[name]}, as in the first records"
                    )
                if name in self.lists:
                    rows[name].append(values)
                elif len(values) > 1:
                    raise InvalidValue(
                        row, name, f"{len(values)} values", "one, as in the first records"
                    )
                else:
                    rows[name].append(values[0] if values else None)
        return {
            name: _build_arrow_array(rows[name], self._arrow_type(name)) for name in column_names
        }

    def read_records(self, block_index: int) -> Iterator[bytes]:
        """Yield the records of a block. Raises DataError, InvalidValue."""
        begin, end = self.offsets[block_index : block_index + 2].tolist()
        data = read_range(self.path, begin, end, int(self.offsets[-1]))
        at = 0
        row = 0
        while at < end - begin:
            size = parse_record_header(
                self.path, data[at : at + HEADER_BYTES], int(self.lengths[:block_index].sum()) + row
            )
            record = data[at + HEADER_BYTES : at + HEADER_BYTES + size]
            foot = data[at + HEADER_BYTES + size : at + HEADER_BYTES + size + FOOTER_BYTES]
            if len(foot) < FOOTER_BYTES or masked_crc(record) != struct.unpack("<I", foot)[0]:
                raise InvalidValue(
                    row,
                    "-",
                    "bytes that do not fit their checksum",
                    "a whole record",
                    "Write or fetch the file again",
                )
            yield record
            at += HEADER_BYTES + size + FOOTER_BYTES
            row += 1


def _build_arrow_array(value_lists: list[Any], arrow_type: pa.DataType) -> pa.Array:
    array = pa.array(value_lists, arrow_type)
    is_list = pa.types.is_list(arrow_type)
    if (arrow_type.value_type if is_list else arrow_type) != pa.binary():
        return array
    try:
        return array.cast(pa.list_(pa.string()) if is_list else pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        return array


def parse_example_record(record: bytes, row: int) -> dict[str, tuple[str, list[Any]]]:
    """Parse a record as `parse_example` does. Raises InvalidValue naming the row."""
    try:
        return parse_example(record)
    except ValueError as error:
        raise InvalidValue(
            row,
            "-",
            f"no tf.train.Example ({error})",
            "one in every record",
            "Write the file again, or convert it to Parquet",
        ) from None


def masked_crc(data: bytes) -> int:
    """Compute CRC-32C, rotated and shifted as TFRecord stores it."""
    from colonnade import _native

    crc = _native.crc32c(np.frombuffer(data, np.uint8))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_record_header(path: Path, header_bytes: bytes, record_index: int) -> int:
    """Return the length of the record with index `record_index`. Raises DataError."""
    size, crc = struct.unpack("<QI", header_bytes) if len(header_bytes) == HEADER_BYTES else (0, -1)
    if masked_crc(header_bytes[:8]) != crc or size > MAX_RECORD_BYTES:
        raise DataError(
            f"{path}, record {record_index}: got a length that does not fit its checksum, wanted a TFRecord file. "
            "Write or fetch the file again; unpack it first if it is compressed"
        )
    return size


def open_tfrecord_file(path: Path) -> TFRecordFile:
    """Index the file, and read the features of its first block. Raises DataError."""
    offsets = [0]
    ends = [0]
    at = 0
    count = 0
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(2) == GZIP_MAGIC:
                raise DataError(
                    f"{path}: got a gzip file (it starts with 1f 8b), wanted plain records. Unpack it first"
                )
            while at < num_bytes:
                file.seek(at)
                at += (
                    HEADER_BYTES
                    + parse_record_header(path, file.read(HEADER_BYTES), count)
                    + FOOTER_BYTES
                )
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
    indexed_file = TFRecordFile(path, np.array(offsets), np.diff(ends), {}, frozenset(), {})
    forms: dict[str, str] = {}
    lists: set[str] = set()
    counts: dict[str, dict[int, int]] = {}
    try:
        for row, record in enumerate(indexed_file.read_records(0)) if count else ():
            for name, (form, values) in parse_example_record(record, row).items():
                if values:
                    forms.setdefault(name, form)
                    counts.setdefault(name, {})[row] = len(values)
                if len(values) > 1:
                    lists.add(name)
    except InvalidValue as fault:
        raise build_data_error(indexed_file, 0, fault) from None
    return replace(
        indexed_file,
        forms=dict(sorted(forms.items())),
        lists=frozenset(lists),
        weights=_pair_weights(forms, {name: counts[name] for name in sorted(lists)}),
    )


def _pair_weights(
    forms: Mapping[str, str], counts: Mapping[str, Mapping[int, int]]
) -> dict[str, str]:
    """Pair each list of numbers with the one list of ids that has as many values in all first records.

    counts: by list, the number of values of each record that has some. Lists that have several such partners, or share
    one, are no pair.
    """
    ids = [name for name in counts if forms[name] != "floats"]
    pairs: dict[str, list[str]] = {}
    for values in counts.keys() - set(ids):
        partners = [name for name in ids if counts[name] == counts[values]]
        if len(partners) == 1:
            pairs.setdefault(partners[0], []).append(values)
    return {name: values[0] for name, values in pairs.items() if len(values) == 1}


open_tfrecord = build_opener(
    "tfrecord",
    open_tfrecord_file,
    """Open samples as `open_parquet` does; a block has the records that end within 4 MiB.

    Every file is scanned once at opening, to index it. Raises DataError naming file, record (from 0) and column.
    """,
)
