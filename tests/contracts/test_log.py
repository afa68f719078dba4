"""`LogBacking`: the suite of every backing, the bytes of store/format.md, space, stripes, identity and locks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from backing import BackingContract, Twin, check_content, make_records
from hypothesis import given
from hypothesis import strategies as st
from log_bytes import crc32c, durable, key_list, live_content, segment
from logs import open_test_log

from colonnade import _native
from colonnade.errors import CheckpointError, StoreLocked
from colonnade.files.disk import Disk
from colonnade.store.log.compaction import (
    FAN_IN,
    SMALL_SHARE,
    Collector,
    SegmentUse,
    choose_victim_segments,
)
from colonnade.store.log.stripes import Stripe, least_full
from colonnade.store.log.writer import LogWriter


class UnsyncedDisk(Disk):
    """Nothing here crashes (tests/faults does): do not wait for the platter."""

    def perform(self, change, action):
        return None if change.verb in ("sync", "sync_dir") else action()


SEGMENT_BYTES = 4096


def open_store(directory: Path, *, record_bytes=16, step=None, **changes):
    arguments = dict(
        table_name="item",
        identity="run-7/rank-0",
        disk=UnsyncedDisk(),
        segment_bytes=SEGMENT_BYTES,
        chunk_bytes=4096,
        writer=LogWriter(pending_bytes=1 << 20),
    )
    return open_test_log(directory, record_bytes=record_bytes, step=step, **(arguments | changes))


class TestLog(BackingContract):
    def open(self, directory, *, record_bytes, step, read_only=False):
        return open_store(directory, record_bytes=record_bytes, step=step, read_only=read_only)


class TestStripedLog(BackingContract):
    def open(self, directory, *, record_bytes, step, read_only=False):
        stripes = (
            () if read_only else stripes_beside(directory)
        )  # a reader finds them by the manifest
        return open_store(
            directory, record_bytes=record_bytes, step=step, read_only=read_only, stripes=stripes
        )


def stripes_beside(directory: Path) -> tuple[Stripe, ...]:
    return tuple(
        Stripe(directory.with_name(f"{directory.name}-stripe-{n}"), capacity_bytes=n * 1000)
        for n in (1, 2)
    )


# ---- the bytes


def test_crc32c_known_answer():
    assert (
        crc32c(b"123456789") == 0xE3069283 == _native.crc32c(np.frombuffer(b"123456789", np.uint8))
    )


class NoCollector(Collector):
    """Nothing is rewritten beside what a test does."""

    def add_source(self, source):
        pass

    def wake(self, source):
        pass


def test_the_store_writes_the_bytes_of_the_format(tmp_path):
    store = open_store(tmp_path, record_bytes=11, collector=NoCollector())
    ids = [5, -1, 2**63 - 1, 6, 7]
    records = make_records(ids, 11, 3)
    store.write(torch.tensor(ids), records)
    store.delete(torch.tensor([-1]))
    store.commit(40)
    store.write(torch.tensor([5]), make_records([5], 11, 4))
    store.commit(41)
    store.close()

    payloads = [bytes(r) for r in records.numpy()]
    births = []
    for n in (1, 2):
        births.append(
            int.from_bytes((tmp_path / f"segment-0000000{n}.rows").read_bytes()[56:60], "little")
        )
    assert births[0] != births[1]
    rows = {
        1: list(zip(ids, payloads, strict=True)),
        2: [(5, bytes(make_records([5], 11, 4).numpy()))],
    }
    flags = {1: [False, False, True, True, True], 2: [True]}
    entries = []
    for number, birth in zip((1, 2), births, strict=True):
        data, header, checksum = segment(number, 11, rows[number], birth)
        assert (tmp_path / f"segment-0000000{number}.rows").read_bytes() == data
        keys = key_list(number, [i for i, _ in rows[number]], checksum)
        assert (tmp_path / f"segment-0000000{number}.keys").read_bytes() == keys
        entries.append(
            {
                "file": f"segment-0000000{number}.rows",
                "stripe": 0,
                "bytes": len(data),
                "keys": len(keys),
                "header": f"{header:08x}",
                "checksum": f"{checksum:016x}",
                "records": len(rows[number]),
                "live_rows": sum(flags[number]),
            }
        )
    live = live_content(41, [(1, flags[1]), (2, flags[2])])
    assert (tmp_path / "live-41.bits").read_bytes() == durable(live)
    data = (tmp_path / "manifest-41.json").read_bytes()
    content, _, trailer = data[:-1].rpartition(b"\n")
    assert data == durable(content) and trailer.startswith(b"crc32c ")
    fields = json.loads(content)
    assert fields.pop("lifetime_bytes") >= sum(entry["bytes"] for entry in entries)
    assert fields == {
        "format": "colonnade store manifest",
        "version": 2,
        "step": 41,
        "table": "item",
        "identity": "run-7/rank-0",
        "record_bytes": 11,
        "num_rows": 4,
        "live": {"file": "live-41.bits", "bytes": len(live), "crc": f"{crc32c(live):08x}"},
        "store": "",
        "stripes": {},
        "segments": entries,
    }
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {"LOCK", "manifest-40.json", "manifest-41.json", "live-40.bits", "live-41.bits"}
    assert names == wanted | {
        f"segment-0000000{n}.{end}" for n in (1, 2) for end in ("rows", "keys")
    }


def test_the_store_reads_the_bytes_of_the_format(tmp_path):
    one, two = bytes(range(9)), bytes(range(100, 109))
    parts = {
        3: ([(7, one), (8, one), (9, one)], [True, False, False]),
        12: ([(8, two), (9, one), (9, two)], [False, False, True]),
        13: ([(-4, two)], [True]),
    }
    entries = []
    for number, (rows, flags) in parts.items():
        data, header, checksum = segment(number, 9, rows)
        name = f"segment-{number:08d}.rows"
        (tmp_path / name).write_bytes(data)
        keys = key_list(number, [i for i, _ in rows], checksum)
        (tmp_path / f"segment-{number:08d}.keys").write_bytes(keys)
        entries.append(
            {
                "file": name,
                "stripe": 0,
                "bytes": len(data),
                "keys": len(keys),
                "header": f"{header:08x}",
                "checksum": f"{checksum:016x}",
                "records": len(rows),
                "live_rows": sum(flags),
            }
        )
    live = live_content(5, [(number, flags) for number, (_, flags) in parts.items()])
    (tmp_path / "live-5.bits").write_bytes(durable(live))
    fields = {
        "format": "colonnade store manifest",
        "version": 2,
        "step": 5,
        "table": "item",
        "identity": "run-7/rank-0",
        "record_bytes": 9,
        "num_rows": 3,
        "lifetime_bytes": 1000,
        "live": {"file": "live-5.bits", "bytes": len(live), "crc": f"{crc32c(live):08x}"},
        "store": "",
        "stripes": {},
        "segments": entries,
    }
    (tmp_path / "manifest-5.json").write_bytes(durable(json.dumps(fields).encode()))
    with open_store(tmp_path, record_bytes=9, step=5) as store:
        check_content(store, {7: one, 9: two, -4: two}, 9, more_ids=[8, 10])
        store.verify_records()
        assert store.count_rows_and_bytes()["lifetime_bytes"] == 1000


def test_stores_of_version_1_are_refused(tmp_path):
    fields = {"format": "colonnade store manifest", "version": 1, "step": 5, "table": "item"}
    (tmp_path / "manifest-5.json").write_bytes(durable(json.dumps(fields).encode()))
    for read_only in (True, False):
        with pytest.raises(CheckpointError, match=r"version 1, this Colonnade reads .* version 2"):
            open_store(tmp_path, step=5, read_only=read_only)


# ---- space


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments_of(directory))


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.rows"))


def test_an_unchanged_store_commits_without_writing_rows(tmp_path):
    twin = Twin(TestLog(), tmp_path, 16)
    for salt in range(1, 4):
        twin.write(range(300), salt=salt)
        twin.commit()
        twin.collect()
    twin.commit()  # what collection moved
    before = {path: path.stat().st_mtime_ns for path in segments_of(tmp_path)}
    for _ in range(20):
        twin.commit()
    twin.reopen(twin.step)
    twin.commit()
    assert {path: path.stat().st_mtime_ns for path in segments_of(tmp_path)} == before


def test_overwriting_takes_bounded_space(tmp_path):
    twin = Twin(TestLog(), tmp_path, 16)
    live = 1000 * 32
    rng = np.random.default_rng(0)
    for salt in range(1, 60):
        ids = range(1000) if salt == 1 else rng.choice(1000, 200, replace=False).tolist()
        twin.write(ids, salt=salt)
        twin.collect()
        twin.commit()
        twin.prune([twin.step])
        # Two thirds are live; beside them a commit's worth of new rows and two segments under way.
        assert bytes_of(tmp_path) < 1.5 * live + 200 * 32 + 4 * SEGMENT_BYTES, salt
    twin.reopen(twin.step)
    twin.check()


def test_small_commits_leave_few_files(tmp_path):
    twin = Twin(TestLog(), tmp_path, 16)
    for step in range(200):
        twin.write([step], salt=step)  # nothing ever dies
        twin.commit()
        twin.collect()
        twin.prune([twin.step])
    full_records = SEGMENT_BYTES // 32
    limit = 200 * FAN_IN // full_records + 4 * FAN_IN
    assert len(segments_of(tmp_path)) <= limit < 100
    written = twin.store.count_rows_and_bytes()["rows_rewritten"]
    assert written < 4 * 200  # each row moves up a class of eight at a time
    twin.reopen(twin.step)
    twin.check()


def test_rows_that_come_and_go_leave_nothing(tmp_path):
    """Cold rows in the oldest segment, and a stream of ids that are written once and deleted."""
    twin = Twin(TestLog(), tmp_path, 16)
    twin.write(range(100), salt=1)
    twin.commit()
    for step in range(100):
        fresh = list(range(1000 + 50 * step, 1050 + 50 * step))
        twin.write(fresh, salt=2)
        twin.delete(range(1000 + 50 * (step - 1), 1050 + 50 * (step - 1)))
        twin.collect()
        twin.commit()
        twin.prune([twin.step])
        assert bytes_of(tmp_path) < 30_000, step  # 150 live rows are 4,800
    twin.reopen(twin.step)
    twin.check(more_ids=range(1000, 1400))


uses = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=40).map(
    lambda parts: [
        SegmentUse(number, live + dead, live)
        for number, (live, dead) in enumerate(parts, start=1)
        if live + dead
    ]
)


@given(uses=uses)
def test_victims(uses):
    numbers = {use.number for use in uses}
    victims = choose_victim_segments(uses, ready=numbers, full_records=512)
    by_number = {use.number: use for use in uses}
    dead = [use.number for use in uses if not use.num_live]
    live, records = sum(u.num_live for u in uses), sum(u.num_records for u in uses)
    if dead:
        assert victims == dead
    elif records > 1.5 * live:
        assert len(victims) == 1
        assert by_number[victims[0]].num_live < by_number[victims[0]].num_records
    elif victims:  # many small ones
        assert len(victims) >= FAN_IN
        assert all(by_number[n].num_records <= 512 // SMALL_SHARE for n in victims)


@given(uses=uses)
def test_choosing_victims_comes_to_an_end(uses):
    """Rewritten segments are full: nothing is left to gain after a while."""
    parts = {use.number: use for use in uses}
    newest = 50
    for _ in range(500):
        victims = choose_victim_segments(list(parts.values()), ready=parts.keys(), full_records=512)
        if not victims:
            break
        for number in victims:
            live = parts.pop(number).num_live
            last = parts.pop(newest, None)
            if last is not None and last.num_records + live <= 512:
                live += last.num_live
            elif last is not None:
                parts[newest] = last
                newest += 1
            if live:
                parts[newest] = SegmentUse(newest, live, live)
        newest += 1
    else:
        pytest.fail("victims for ever")
    live = sum(p.num_live for p in parts.values())
    assert sum(p.num_records for p in parts.values()) <= 1.5 * live


def test_old_cold_segments_go_before_young_ones_of_the_same_use():
    uses = [SegmentUse(1, 100, 60), SegmentUse(90, 100, 60), SegmentUse(91, 100, 55)]
    assert choose_victim_segments(uses, ready={1, 90, 91}, full_records=100) == [1]
    assert choose_victim_segments(uses, ready={90, 91}, full_records=100) == [90]


def test_segments_that_still_fill_count_as_space_and_are_left_alone():
    uses = [SegmentUse(1, 100, 60), SegmentUse(2, 100, 85)]
    assert choose_victim_segments(uses, ready={1}, full_records=100) == []  # 145 of 200 are live
    uses = [SegmentUse(1, 100, 60), SegmentUse(2, 100, 73)]
    assert choose_victim_segments(uses, ready={1}, full_records=100) == [1]
    assert choose_victim_segments(uses, ready=(), full_records=100) == []


def test_nothing_is_rewritten_that_is_large_and_full_of_rows():
    uses = [SegmentUse(n, 1000, 900) for n in range(1, 100)]
    assert choose_victim_segments(uses, ready=range(1, 100), full_records=1000) == []


# ---- stripes


def test_stripes_fill_in_proportion_to_their_capacities():
    bytes_by_stripe = {1: 0, 2: 0, 3: 0}
    for _ in range(700):
        bytes_by_stripe[least_full({1: 100, 2: 200, 3: 400}, bytes_by_stripe)] += 1
    assert bytes_by_stripe == {1: 100, 2: 200, 3: 400}


def test_segments_lie_in_the_stripes_and_the_manifest_says_where(tmp_path):
    home = tmp_path / "store"
    twin = Twin(TestStripedLog(), home, 16)
    for salt in range(1, 4):
        twin.write(range(3000 * salt, 3000 * salt + 3000), salt=salt)
        twin.commit()
    assert not segments_of(home)
    sizes = [bytes_of(stripe.directory) for stripe in stripes_beside(home)]
    assert 1.5 < sizes[1] / sizes[0] < 2.5
    twin.store.close()
    # Given none, what lies in the stripes is found, and new segments go home.
    with open_store(home, step=3) as store:
        check_content(store, twin.rows, 16)
        store.write(torch.tensor([1]), make_records([1], 16, 9))
        store.commit(4)
        store.prune([4])
    assert segments_of(home)
    # In another order, and one more.
    more = (*reversed(stripes_beside(home)), Stripe(tmp_path / "third", 10**9))
    rows = twin.rows | {1: bytes(make_records([1], 16, 9).numpy())}
    with open_store(home, step=4, stripes=more) as store:
        check_content(store, rows, 16)
        store.write(torch.arange(9000, 9500), make_records(range(9000, 9500), 16, 2))
        store.commit(5)
        assert segments_of(tmp_path / "third")


def test_a_stripe_belongs_to_one_store(tmp_path):
    stripes = stripes_beside(tmp_path / "store")
    twin = Twin(TestStripedLog(), tmp_path / "store", 16)
    twin.write(range(500), salt=1)
    twin.commit()
    with pytest.raises(StoreLocked):
        open_store(tmp_path / "other", stripes=stripes)
    with pytest.raises(StoreLocked):
        open_store(tmp_path / "store", step=1)
    twin.store.close()
    with pytest.raises(CheckpointError, match="rows of another store"):
        open_store(tmp_path / "other", stripes=stripes)
    twin.reopen(1)
    twin.check()
    twin.store.close()
    # A stripe that is gone is named; nothing is discarded.
    gone = stripes[1].directory
    gone.rename(gone.with_name("elsewhere"))
    for read_only in (True, False):
        with pytest.raises(CheckpointError, match="stripe 2 was not given"):
            open_store(tmp_path / "store", step=1, read_only=read_only)
    # Mounted elsewhere it is known by its mark.
    moved = (stripes[0], Stripe(gone.with_name("elsewhere"), 1))
    with open_store(tmp_path / "store", step=1, stripes=moved) as store:
        check_content(store, twin.rows, 16)


def test_copies_of_a_striped_store_may_lie_at_home(tmp_path):
    """Copies from a mirror are in the run folder."""
    home = tmp_path / "store"
    twin = Twin(TestStripedLog(), home, 16)
    twin.write(range(500), salt=1)
    twin.commit()
    twin.store.close()
    for stripe in stripes_beside(home):
        for path in stripe.directory.glob("segment-*"):
            path.rename(home / path.name)
        for path in stripe.directory.iterdir():
            path.unlink()
        stripe.directory.rmdir()
    with open_store(home, step=1) as store:
        check_content(store, twin.rows, 16)
        store.write(torch.arange(500), make_records(range(500), 16, 2))
        store.collect_garbage()
        store.commit(2)
        store.prune([2])
        assert store.count_rows_and_bytes()["bytes_held"] == sum(
            path.stat().st_size for path in home.glob("segment-*")
        )


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
    twin = Twin(TestLog(), tmp_path, 16)
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
    (tmp_path / "segment-00000009.keys").write_text("of it, too")
    (tmp_path / "live-9.bits").write_text("of a commit that died")
    (tmp_path / "manifest-9.json.tmp").write_text("of a commit that died")
    twin = Twin(TestLog(), tmp_path, 16)
    assert {path.name for path in tmp_path.iterdir()} == {"LOCK", "notes.txt"}
    twin.store.close()


def test_one_writer(tmp_path):
    twin = Twin(TestLog(), tmp_path, 16)
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


# ---- write amplification


@pytest.mark.parametrize(
    "exponent", [0.9, *(pytest.param(item, marks=pytest.mark.slow) for item in (0.0, 1.2))]
)
def test_write_amplification_of_files_half_as_large_again(tmp_path, exponent):
    """Rows written again and again by a Zipf law: what reaches the disk, over what was written."""
    num_rows, batch, record_bytes = 40_000, 2000, 48
    rng = np.random.default_rng(1)
    weights = np.arange(1, num_rows + 1) ** -exponent
    ids_by_rank = rng.permutation(num_rows)
    bounds = np.cumsum(weights / weights.sum())
    records = torch.zeros(num_rows, record_bytes, dtype=torch.uint8)
    with open_store(
        tmp_path, record_bytes=record_bytes, segment_bytes=1 << 16, chunk_bytes=1 << 14
    ) as store:
        store.write(torch.from_numpy(rng.permutation(num_rows)), records)
        before = None
        for step in range(150):
            drawn = ids_by_rank[np.searchsorted(bounds, rng.random(batch))]
            ids = torch.from_numpy(np.unique(drawn))
            store.write(torch.from_numpy(rng.permutation(ids.numpy())), records[: len(ids)])
            store.collect_garbage()
            text = store.count_rows_and_bytes()
            if step == 75:  # the first pass over the space is free of charge
                before = text
        _, num_records, _, _ = (np.asarray(column) for column in store.log.segments())
        utilisation = len(store) / int(num_records.sum())
        written = text["rows_written"] - before["rows_written"]
        moved = text["rows_rewritten"] - before["rows_rewritten"]
        amplification = 1 + moved / written
        at_rest = store.files.shape.stride + 2  # a checksum, and an id of 2 bytes in a key list
        on_disk = (text["bytes_written"] - before["bytes_written"]) / (at_rest * written)
        print(f"{exponent=} {amplification=:.3f} {on_disk=:.3f} {utilisation=:.3f}")
        assert utilisation > 0.65
        # Files of 1,200 records have heads, and the rest of a page at their ends.
        assert amplification <= 1.9 and on_disk <= 1.02 * amplification
        assert store.read(torch.arange(num_rows), records).wait().all()
