"""libsvm and TFRecord files at fault, headers with types, times."""

from __future__ import annotations

import gzip
import struct

from case import Case, train
from table_cases import FAST

from colonnade.data.tabular.tfrecord import masked_crc


def _record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def _message(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def _example(**values: int) -> bytes:
    entries = b"".join(
        _message(1, _message(1, name.encode()) + _message(2, _message(3, _message(1, bytes([value])))))
        for name, value in values.items()
    )  # fmt: skip
    return _message(1, entries)


def _case(name: str, data: str, file: str, content: bytes, *words: str) -> Case:
    return Case(name, train(data, file, *FAST), (file, *words), {file: content}, ("run",))


def cases() -> list[Case]:
    good = b"1 1:0.5 2:1\n" * 7
    listed = [
        _case(f"libsvm {name}", "libsvm", "a.svm", good + line + b"\n" + good, "line 8", "features")
        for name, line in {
            "no colon": b"1 2",
            "no index": b"1 :1",
            "no value": b"1 1:",
            "three parts": b"1 1:2:3",
            "an index beyond 64 bits": b"1 99999999999999999999:1",
            "a fraction as index": b"1 1.5:1",
            "a query": b"1 qid:1 1:1",
            "no UTF-8": b"1 \xff:1",
        }.items()
    ]
    listed += [
        _case("libsvm no label", "libsvm", "a.svm", good + b"\n", "line 8", "label"),
        _case("libsvm labels of 5", "libsvm", "a.svm", good + b"5 1:1\n", "label", "at_least"),
        _case("libsvm empty", "libsvm", "a.svm", b"", "empty"),
        _case("libsvm gzip", "libsvm", "a.svm", gzip.compress(good), "gzip"),
    ]
    record = _record(_example(label=1, user=7))
    records = record * 5
    listed += [
        _case(f"tfrecord {name}", "tfrecord", "a.tfrecord", content, *words)
        for name, (content, words) in {
            "empty": (b"", ("row",)),
            "text": (b"label,user\n1,2\n" * 9, ("record 0", "length")),
            "gzip": (gzip.compress(records), ("gzip",)),
            "cut": (records[:-1], ("record 4",)),
            "a flipped length": (records[: len(record)] + b"\1" + records, ("record 1", "length")),
            "a flipped byte": (record[:20] + b"\0" + record[21:] + records, ("record 0", "checksum")),
            "no example": (records + _record(b"\xff"), ("record 5", "Example")),
            "no such column": (_record(_example(user=1)) * 5, ("label",)),
        }.items()
    ]  # fmt: skip
    rows = b"1,3,2024-03-01\n" * 5
    listed += [
        _case("csv an unknown type in the header", "csv", "a.csv", b"y:label,x:numbr,t:time\n" + rows,
              "line 1", "numbr"),
        _case("csv a typed column of words", "csv", "a.csv", b"y:label,x:number\n1,3\n0,x\n", "column x"),
        _case("csv a time that is none", "csv", "a.csv", b"y:label,x:number,t:time\n" + rows + b"1,3,soon\n",
              "line 7", "column t", "soon"),
        _case("csv two empty header cells and one row number", "csv", "a.csv", b",y,\n" + rows + b"1,2\n",
              "line 7"),
    ]  # fmt: skip
    return listed
