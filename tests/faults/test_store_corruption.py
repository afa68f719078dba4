"""A byte that differs from what was written is named, and never read as a row.

Headers, key lists, bitmaps and manifests are checked when a store is opened, rows whenever they are read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from disks import RECORD_BYTES, content, make_records, open_store

from colonnade import _native
from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.files import durable
from colonnade.files.disk import Disk
from colonnade.store.log.key_list import encode_key_list, open_key_list, read_key_list
from colonnade.store.log.manifest import manifest_file_name, read_manifest_fields
from colonnade.store.log.segment import HEADER, SegmentShape

STRIDE = SegmentShape(RECORD_BYTES, b"").stride
IDS = list(range(12))


def make_store(directory: Path, salt: int = 1) -> dict[int, bytes]:
    """Two segments and commits 1 and 2."""
    rows = {}
    with open_store(directory, None) as store:
        for step, ids in ((1, IDS[:8]), (2, IDS[6:])):
            records = make_records(ids, salt + step)
            store.write(torch.tensor(ids), records)
            store.delete(torch.tensor(ids[-1:]))
            store.commit(step)
            rows |= dict(zip(ids, map(bytes, records.numpy()), strict=True))
            del rows[ids[-1]]
        assert content(store) == rows
    assert len(list(directory.glob("segment-*.rows"))) == 2
    return rows


def refused(directory: Path, path: Path, *words: str) -> None:
    for read_only in (True, False):
        before = sorted(directory.iterdir())
        with pytest.raises((CorruptionError, CheckpointError)) as caught:
            open_store(directory, 2, read_only=read_only)
        for word in (path.name, *words):
            assert word in str(caught.value), caught.value
        assert sorted(directory.iterdir()) == before


def found_when_read(
    directory: Path, path: Path, records: list[int], rows: dict[int, bytes]
) -> None:
    """Scans and `verify` name the first bad record; reads name one of them or give rows as they were written."""
    first = f"{path.name}: record {records[0]}: "
    names = tuple(f"{path}: record {record}: " for record in records)
    with open_store(directory, 2, read_only=True) as store:
        for read in (store.verify_records, lambda: list(store.scan())):
            with pytest.raises(CorruptionError, match=first):
                read()
        for i, wanted in rows.items():
            out = torch.zeros(1, RECORD_BYTES, dtype=torch.uint8)
            try:
                assert store.read(torch.tensor([i]), out).wait().all()
                assert bytes(out[0].numpy()) == wanted
            except CorruptionError as error:
                assert str(error).startswith(names)
                assert not out.any()


def flip(path: Path, offset: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


@pytest.mark.parametrize("name", ["segment-00000001.rows", "segment-00000002.rows"])
def test_a_flipped_bit_in_a_segment(tmp_path, name):
    rows = make_store(tmp_path)
    path = tmp_path / name
    size = path.stat().st_size
    rng = np.random.default_rng(0)
    for offset in range(size):
        bits = 1 << int(rng.integers(8)) if offset % 2 else 0xFF
        flip(path, offset, bits)
        if offset < HEADER.size:
            refused(tmp_path, path)
        else:
            found_when_read(tmp_path, path, [(offset - HEADER.size) // STRIDE], rows)
        flip(path, offset, bits)
    with open_store(tmp_path, 2) as store:
        assert content(store) == rows


@pytest.mark.parametrize("name", [manifest_file_name(2), "live-2.bits", "segment-00000001.keys"])
def test_a_flipped_bit_in_what_opening_reads(tmp_path, name):
    make_store(tmp_path)
    path = tmp_path / name
    for offset in range(path.stat().st_size):
        bits = 1 << offset % 8
        flip(path, offset, bits)
        refused(tmp_path, path)
        flip(path, offset, bits)
    open_store(tmp_path, 2).close()


def test_a_bit_that_flips_under_an_open_store(tmp_path):
    """Every byte of a record: `wait` names it, others still read."""
    rows = make_store(tmp_path)
    with open_store(tmp_path, 2) as store:
        path, record = tmp_path / "segment-00000001.rows", 3
        assert store.read(torch.tensor([1]), torch.zeros(1, RECORD_BYTES, dtype=torch.uint8)).wait()
        for offset in range(HEADER.size + record * STRIDE, HEADER.size + (record + 1) * STRIDE):
            flip(path, offset, 0x10)
            out = torch.zeros(len(IDS), RECORD_BYTES, dtype=torch.uint8)
            with pytest.raises(CorruptionError, match=f"{path.name}: record {record}: "):
                store.read(torch.tensor(IDS), out).wait()
            assert not out[record].any()  # not one wrong byte
            others = torch.tensor([i for i in rows if i != record])
            out = torch.zeros(len(others), RECORD_BYTES, dtype=torch.uint8)
            assert store.read(others, out).wait().all()
            assert [bytes(r) for r in out.numpy()] == [rows[i] for i in others.tolist()]
            with pytest.raises(CorruptionError, match=f"{path.name}: record {record}: "):
                list(store.scan())
            flip(path, offset, 0x10)
        assert content(store) == rows


def test_rotten_rows_are_not_carried_into_a_new_segment(tmp_path):
    make_store(tmp_path)
    with open_store(tmp_path, 2) as store:
        flip(tmp_path / "segment-00000001.rows", HEADER.size + 16, 1)  # the payload of id 0
        others = IDS[1:8]
        store.write(torch.tensor(others), make_records(others, 9))  # now collection wants the rest
        for call in (store.collect_garbage, lambda: store.commit(3)):
            with pytest.raises(
                CorruptionError, match=r"segment-00000001\.rows: record 0: .*--at STEP"
            ):
                call()
        assert store.commits() == [1, 2]
        out = torch.zeros(len(others), RECORD_BYTES, dtype=torch.uint8)
        assert store.read(torch.tensor(others), out).wait().all()
        assert torch.equal(out, make_records(others, 9))


def test_a_torn_tail(tmp_path):
    make_store(tmp_path)
    path = tmp_path / "segment-00000002.rows"
    data = path.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        refused(tmp_path, path)
    for tail in (b"\0", bytes(STRIDE), data[-STRIDE:]):
        path.write_bytes(data + tail)
        refused(tmp_path, path, "its manifest says")
    path.write_bytes(data)
    for name in (manifest_file_name(2), "live-2.bits", "segment-00000002.keys"):
        path = tmp_path / name
        data = path.read_bytes()
        for length in range(len(data)):
            path.write_bytes(data[:length])
            refused(tmp_path, path)
        path.write_bytes(data + b"\0")
        refused(tmp_path, path)
        path.write_bytes(data)


def test_a_file_that_shrinks_under_an_open_store(tmp_path):
    make_store(tmp_path)
    with open_store(tmp_path, 2) as store:
        path = tmp_path / "segment-00000001.rows"
        with path.open("r+b") as file:
            file.truncate(HEADER.size + 2 * STRIDE + 5)
        out = torch.zeros(3, RECORD_BYTES, dtype=torch.uint8)
        with pytest.raises(
            CorruptionError, match=f"{path.name}: record 2: the file ends inside it"
        ):
            store.read(torch.tensor([2, 1, 5]), out).wait()


@pytest.mark.parametrize(
    "name", ["segment-00000001.rows", "segment-00000001.keys", "live-2.bits", "manifest-2.json"]
)
def test_a_missing_file(tmp_path, name):
    make_store(tmp_path)
    path = tmp_path / name
    path.unlink()
    if name.startswith("manifest"):
        with pytest.raises(CheckpointError, match="step 2 was not committed here"):
            open_store(tmp_path, 2)
    else:
        refused(tmp_path, path, "missing")


def test_whole_segments_in_the_wrong_place(tmp_path):
    make_store(tmp_path)
    first, second = (tmp_path / f"segment-0000000{n}.rows" for n in (1, 2))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    refused(tmp_path, first, "another file")
    first.write_bytes(data[0])
    # The same segment of a run that saw other rows: every record is whole, but it is not this commit.
    make_store(tmp_path / "other", salt=5)
    shutil.copy(tmp_path / "other" / second.name, second)
    refused(tmp_path, second, "rows of another commit")
    second.write_bytes(data[1])
    for name in ("live-2.bits", "segment-00000002.keys"):
        whole = (tmp_path / name).read_bytes()
        other = shutil.copy(tmp_path / name.replace("2", "1"), tmp_path / name)
        refused(tmp_path, other)
        other.write_bytes(whole)
    open_store(tmp_path, 2).close()


def test_whole_records_in_the_wrong_place(tmp_path):
    rows = make_store(tmp_path)
    path = tmp_path / "segment-00000001.rows"
    data = bytearray(path.read_bytes())
    a, b = (slice(HEADER.size + r * STRIDE, HEADER.size + (r + 1) * STRIDE) for r in (1, 2))
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)
    found_when_read(tmp_path, path, [1, 2], rows)


def test_versions_to_come(tmp_path):
    make_store(tmp_path)
    path = tmp_path / "segment-00000001.rows"
    data = path.read_bytes()
    head = data[:8] + (3).to_bytes(4, "little") + data[12:60]
    crc = _native.crc32c(np.frombuffer(head, np.uint8))
    path.write_bytes(head + crc.to_bytes(4, "little") + data[64:])
    with pytest.raises(CheckpointError, match=r"version 3, this Colonnade reads .* version 2"):
        open_store(tmp_path, 2)
    path.write_bytes(data)
    path = tmp_path / manifest_file_name(2)
    content = durable.read_verified(path).replace(b'"version": 2', b'"version": 3')
    durable.write_durably(Disk(), path, content)
    with pytest.raises(CheckpointError, match=r"version 3, this Colonnade reads .* version 2"):
        open_store(tmp_path, 2)


def test_key_lists_that_contradict_each_other(tmp_path):
    """Files are whole, but an id is live in two segments."""
    make_store(tmp_path)
    checksum = int(read_manifest_fields(tmp_path, 2)["segments"][1]["checksum"], 16)
    path = tmp_path / "segment-00000002.keys"
    ids = read_key_list(open_key_list(path), 2, 6, checksum).ids()
    ids[2] = 1
    path.write_bytes(encode_key_list(2, ids, checksum))
    refused(tmp_path, path, "does not fit the other segments")


def test_an_older_manifest_that_is_altered_is_left_out_and_nothing_is_removed(tmp_path):
    rows = make_store(tmp_path)
    with open_store(tmp_path, 1, read_only=True) as store:
        older = content(store)
    flip(tmp_path / manifest_file_name(1), 30, 1)
    before = {path.name for path in tmp_path.iterdir()}
    with open_store(tmp_path, 2) as store:
        assert store.commits() == [2] and manifest_file_name(1) in store.lost_commits()[1]
        assert content(store) == rows
        store.write(torch.tensor([5]), torch.ones(1, RECORD_BYTES, dtype=torch.uint8)).wait()
        store.commit(3)
        store.prune([1, 2, 3])
        assert {path.name for path in tmp_path.iterdir()} >= before
    flip(tmp_path / manifest_file_name(1), 30, 1)  # restored from a copy
    for step, wanted in ((1, older), (2, rows)):
        with open_store(tmp_path, step, read_only=True) as store:
            assert content(store) == wanted
    flip(tmp_path / manifest_file_name(1), 30, 1)
    with open_store(tmp_path, 3) as store:
        store.prune([3])
        assert store.lost_commits() == {} and not (tmp_path / manifest_file_name(1)).exists()
    open_store(tmp_path, 3).close()
    listed = {part["file"] for part in read_manifest_fields(tmp_path, 3)["segments"]}
    assert {path.name for path in tmp_path.glob("segment-*.rows")} == listed


def test_a_durable_file(tmp_path):
    path = tmp_path / "file"
    for content_ in (b"", b"x", bytes(range(256)) * 50):
        durable.write_durably(Disk(), path, content_)
        assert durable.read_verified(path) == content_
        size = path.stat().st_size
        for offset in {0, size // 3, size - 18, size - 17, *range(size - 16, size)} & set(
            range(size)
        ):
            flip(path, offset, 0x20)
            with pytest.raises(CorruptionError, match="torn or altered"):
                durable.read_verified(path)
            flip(path, offset, 0x20)
    path.unlink()
    with pytest.raises(StorageError, match="could not read: No such file"):
        durable.read_verified(path)
