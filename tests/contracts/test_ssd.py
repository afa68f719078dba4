"""`SsdBacking`: the suite of every backing, the bytes of store/format.md, space, identity and the lock."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from backing import BackingContract, Twin, check_content, make_records
from hypothesis import given
from hypothesis import strategies as st

from colonnade import _native
from colonnade.errors import CheckpointError, StoreLocked
from colonnade.store.compaction import FAN_IN, SegmentUse, choose_victims
from colonnade.store.disk import Disk
from colonnade.store.ssd import open_ssd


class UnsyncedDisk(Disk):
    """Nothing here crashes (tests/faults does): do not wait for the platter."""

    def perform(self, change, action):
        return None if change.verb in ("sync", "sync_dir") else action()


READER = _native.SegmentReader(2)
SEGMENT_BYTES = 4096


def open_store(directory: Path, *, record_bytes=16, step=None, **changes):
    arguments = dict(
        table_name="item",
        identity="run-7/rank-0",
        disk=UnsyncedDisk(),
        reader=READER,
        segment_bytes=SEGMENT_BYTES,
    )
    return open_ssd(directory, record_bytes=record_bytes, step=step, **(arguments | changes))


class TestSsd(BackingContract):
    def open(self, directory, *, record_bytes, step, read_only=False):
        return open_store(directory, record_bytes=record_bytes, step=step, read_only=read_only)


# ---- the bytes, written down a second time from format.md


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def durable(content: bytes) -> bytes:
    return content + b"\ncrc32c %08x\n" % crc32c(content)


def segment(
    number: int, record_bytes: int, rows: list[tuple[int, bytes | None]]
) -> tuple[bytes, int]:
    """A segment's bytes and its checksum; a row of None is a tombstone."""
    owner = hashlib.sha256(b"item\0run-7/rank-0").digest()
    head = struct.pack("<8sIIQ32sI", b"CLNDROWS", 1, number, record_bytes, owner, 0)
    data = head + struct.pack("<I", crc32c(head))
    checksum = crc32c(head)
    for r, (row_id, payload) in enumerate(rows):
        start = struct.pack("<qI", row_id, 1 if payload is None else 0)
        body = (payload or b"").ljust(-(-record_bytes // 8) * 8, b"\0")
        crc = crc32c(struct.pack("<Q", number << 32 | r) + start + body)
        data += start + struct.pack("<I", crc) + body
        checksum += crc
    return data, checksum % 2**64


def test_crc32c_known_answer():
    assert (
        crc32c(b"123456789") == 0xE3069283 == _native.crc32c(np.frombuffer(b"123456789", np.uint8))
    )


def test_the_store_writes_the_bytes_of_the_format(tmp_path):
    store = open_store(tmp_path, record_bytes=11)
    ids = [5, -1, 2**63 - 1, 6, 7]  # enough that the first segment stays more than half alive
    records = make_records(ids, 11, 3)
    store.write(torch.tensor(ids), records)
    store.delete(torch.tensor([-1]))
    store.commit(40)
    store.write(torch.tensor([5]), make_records([5], 11, 4))
    store.commit(41)
    store.close()

    payloads = [bytes(r) for r in records.numpy()]
    rows = [*zip(ids, payloads, strict=True), (-1, None)]
    first, first_sum = segment(1, 11, rows)
    second, second_sum = segment(2, 11, [(5, bytes(make_records([5], 11, 4).numpy()))])
    assert (tmp_path / "segment-00000001.rows").read_bytes() == first
    assert (tmp_path / "segment-00000002.rows").read_bytes() == second
    data = (tmp_path / "manifest-41.json").read_bytes()
    content, _, trailer = data[:-1].rpartition(b"\n")
    assert data == durable(content) and trailer.startswith(b"crc32c ")
    fields = json.loads(content)
    assert fields == {
        "format": "colonnade store manifest",
        "version": 1,
        "step": 41,
        "table": "item",
        "identity": "run-7/rank-0",
        "record_bytes": 11,
        "num_rows": 4,
        "segments": [
            {
                "file": "segment-00000001.rows",
                "bytes": len(first),
                "checksum": f"{first_sum:016x}",
                "records": 6,
                "live_rows": 3,
            },
            {
                "file": "segment-00000002.rows",
                "bytes": len(second),
                "checksum": f"{second_sum:016x}",
                "records": 1,
                "live_rows": 1,
            },
        ],
    }
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {"LOCK", "manifest-40.json", "manifest-41.json"}
    assert names == wanted | {"segment-00000001.rows", "segment-00000002.rows"}


def test_the_store_reads_the_bytes_of_the_format(tmp_path):
    one, two = bytes(range(9)), bytes(range(100, 109))
    parts = {
        3: segment(3, 9, [(7, one), (8, one), (9, one)]),
        12: segment(12, 9, [(8, None), (9, two), (9, None), (9, two), (10, None)]),
    }
    entries = []
    for number, (data, checksum) in parts.items():
        name = f"segment-{number:08d}.rows"
        (tmp_path / name).write_bytes(data)
        entries.append({"file": name, "bytes": len(data), "checksum": f"{checksum:016x}"})
    fields = {
        "format": "colonnade store manifest",
        "version": 1,
        "step": 5,
        "table": "item",
        "identity": "run-7/rank-0",
        "record_bytes": 9,
        "num_rows": 2,
        "segments": entries,
    }
    (tmp_path / "manifest-5.json").write_bytes(durable(json.dumps(fields).encode()))
    with open_store(tmp_path, record_bytes=9, step=5) as store:
        check_content(store, {7: one, 9: two}, 9, more_ids=[8, 10])


# ---- space


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.rows"))


def test_an_unchanged_store_commits_without_writing_rows(tmp_path):
    twin = Twin(TestSsd(), tmp_path, 16)
    for salt in range(1, 4):
        twin.write(range(300), salt=salt)
        twin.commit()
    before = {path: path.stat().st_mtime_ns for path in segments_of(tmp_path)}
    for _ in range(20):
        twin.commit()
    twin.reopen(twin.step)
    twin.commit()
    assert {path: path.stat().st_mtime_ns for path in segments_of(tmp_path)} == before


def test_an_unchanged_store_leaves_a_backlog_alone(tmp_path):
    """Ten segments fall below half at once, more than one small commit may rewrite."""
    twin = Twin(TestSsd(), tmp_path, 16)
    rows = SEGMENT_BYTES // 32
    starts = range(0, 10 * rows, rows)
    for start in starts:
        twin.write(range(start, start + rows), salt=1)
        twin.commit()
    twin.write([start + i for start in starts for i in range(rows // 2 - 1)], salt=2)
    twin.commit()
    twin.write([start + i for start in starts for i in range(rows - 2, rows)], salt=3)
    twin.commit()
    twin.prune([twin.step])
    before = segments_of(tmp_path)
    twin.commit()
    twin.prune([twin.step])
    assert segments_of(tmp_path) == before
    first = {tmp_path / f"segment-{n:08d}.rows" for n in range(1, 11)}
    assert len(first & set(before)) > 5
    for salt in range(10):
        twin.write([0], salt=salt)
        twin.commit()
        twin.prune([twin.step])
    assert bytes_of(tmp_path) < 2 * 32 * len(twin.rows)
    assert not first & set(segments_of(tmp_path))
    twin.check()


def test_overwriting_takes_bounded_space(tmp_path):
    twin = Twin(TestSsd(), tmp_path, 16)
    live = 1000 * 32
    rng = np.random.default_rng(0)
    for salt in range(1, 60):
        ids = range(1000) if salt == 1 else rng.choice(1000, 200, replace=False).tolist()
        twin.write(ids, salt=salt)
        twin.commit()
        twin.prune([twin.step])
        # Half-dead segments, a commit's worth of new rows, and files of 64 + 500 bytes or so.
        assert bytes_of(tmp_path) < 2 * live + 3 * 200 * 32 + 20_000, salt
    twin.reopen(twin.step)
    twin.check()


def test_small_commits_leave_few_files(tmp_path):
    twin = Twin(TestSsd(), tmp_path, 16)
    for step in range(400):
        twin.write([step], salt=step)  # nothing ever dies
        twin.commit()
        twin.prune([twin.step])
    full_records = SEGMENT_BYTES // 32
    most = 400 * FAN_IN // full_records + 3 * FAN_IN
    assert len(segments_of(tmp_path)) <= most < 100
    twin.reopen(twin.step)
    twin.check()


def test_rows_that_come_and_go_leave_no_tombstones_for_ever(tmp_path):
    """Cold rows in the oldest segment, and a stream of ids that are written once and deleted."""
    twin = Twin(TestSsd(), tmp_path, 16)
    twin.write(range(100), salt=1)
    twin.commit()
    for step in range(150):
        fresh = list(range(1000 + 50 * step, 1050 + 50 * step))
        twin.write(fresh, salt=2)
        twin.delete(range(1000 + 50 * (step - 1), 1050 + 50 * (step - 1)))
        twin.commit()
        twin.prune([twin.step])
        assert bytes_of(tmp_path) < 40_000, step  # 150 live rows are 4,800
    twin.reopen(twin.step)
    twin.check(more_ids=range(1000, 1400))


uses = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 100), st.integers(0, 500), st.booleans()),
    max_size=40,
).map(
    lambda parts: [
        SegmentUse(number, live + tombstones + dead, live, tombstones, suspect)
        for number, (live, tombstones, dead, suspect) in enumerate(parts, start=1)
        if live + tombstones + dead
    ]
)


@given(uses=uses, budget=st.integers(0, 2000))
def test_victims(uses, budget):
    victims = choose_victims(uses, budget_records=budget, full_records=512)
    assert victims == sorted(set(victims)) and set(victims) <= {use.number for use in uses}
    assert {use.number for use in uses if use.is_suspect} <= set(victims)
    chosen = [use for use in uses if use.number in victims and not use.is_suspect]
    rewritten = [use.live + (use.tombstones if use is not uses[0] else 0) for use in chosen]
    assert sum(rewritten) <= budget or len([n for n in rewritten if n]) == 1
    # Progress: while something is worth doing, something is done.
    sparse = [use for use in uses[1:] if 2 * (use.live + use.tombstones) < use.records]
    assert victims or not sparse


def test_nothing_is_rewritten_that_is_large_and_full_of_rows():
    uses = [SegmentUse(n, 1000, 900, 0) for n in range(1, 100)]
    assert choose_victims(uses, budget_records=10**9, full_records=1000) == []


# ---- whose store it is


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(record_bytes=24), "record_bytes 16, wanted 24"),
        (dict(table_name="user"), "table 'item', wanted 'user'"),
        (dict(identity="run-8/rank-0"), "identity 'run-7/rank-0', wanted 'run-8/rank-0'"),
        (dict(step=2), "step 2 was not committed here; committed steps: 1"),
    ],
)
def test_another_store_is_refused(tmp_path, changes, words):
    twin = Twin(TestSsd(), tmp_path, 16)
    twin.write([1], salt=1)
    twin.commit()
    twin.store.close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for read_only in (True, False):
        with pytest.raises(CheckpointError, match=words):
            open_store(tmp_path, **(dict(step=1, read_only=read_only) | changes))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_is_not_there(tmp_path):
    for read_only in (True, False):
        with pytest.raises(CheckpointError, match="step 3"):
            open_store(tmp_path / "absent", step=3, read_only=read_only)
    assert not (tmp_path / "absent").exists()
    with open_store(tmp_path / "absent", read_only=True) as store:
        check_content(store, {}, 16)
    assert not (tmp_path / "absent").exists()


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segment-00000009.rows").write_text("of an opening that died")
    (tmp_path / "manifest-9.json.tmp").write_text("of a commit that died")
    twin = Twin(TestSsd(), tmp_path, 16)
    assert {path.name for path in tmp_path.iterdir()} == {"LOCK", "notes.txt"}
    twin.store.close()


def test_one_writer(tmp_path):
    twin = Twin(TestSsd(), tmp_path, 16)
    twin.write([1], salt=1)
    twin.commit()
    with pytest.raises(StoreLocked, match="open for writing by another run"):
        open_store(tmp_path, step=1)
    with open_store(tmp_path, step=1, read_only=True) as store:
        check_content(store, twin.rows, 16)
    twin.check()  # the refused one has changed nothing
    twin.reopen(1)
    twin.check()


def test_the_lock_does_not_outlive_a_failed_opening(tmp_path):
    with pytest.raises(CheckpointError):
        open_store(tmp_path, step=1)
    open_store(tmp_path).close()
