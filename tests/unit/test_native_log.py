"""RowLog and PageReader against a dict, with real files."""

import os
import tempfile
import threading

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import LIMITS

from colonnade import _native

PAGE = 4096


def has_ring():
    try:
        return bool(_native.PageReader("ring", 1))
    except RuntimeError:
        return False


KINDS = ["threads", "ring"] if has_ring() else ["threads"]


def longs(values):
    return torch.tensor(list(values), dtype=torch.int64)


def records_of(ids, version, record_bytes):
    """Return records (N, record_bytes) of rows `id` in version `version`."""
    rng = [np.random.default_rng([i % 2**64, version]) for i in ids]
    rows = [r.integers(0, 256, record_bytes, dtype=np.uint8) for r in rng]
    return (
        torch.from_numpy(np.stack(rows))
        if rows
        else torch.empty(0, record_bytes, dtype=torch.uint8)
    )


class Files:
    """The writer: takes chunks of a log to files, which the log reads directly where it can."""

    def __init__(self, log, stride):
        self.log, self.stride = log, stride
        self.directory = tempfile.TemporaryDirectory()
        self.fds, self.direct_fds, self.ends = {}, {}, {}

    def write(self, limit=10**9):
        while limit > 0 and (chunk := self.log.next_chunk()) is not None:
            limit -= 1
            if chunk.segment not in self.fds:
                path = os.path.join(self.directory.name, str(chunk.segment))
                self.fds[chunk.segment] = os.open(path, os.O_RDWR | os.O_CREAT)
                try:
                    self.direct_fds[chunk.segment] = os.open(
                        path, os.O_RDONLY | getattr(os, "O_DIRECT", 0)
                    )
                except OSError:  # a file system without
                    self.direct_fds[chunk.segment] = os.open(path, os.O_RDONLY)
                self.log.attach(chunk.segment, self.direct_fds[chunk.segment])
            data = chunk.data
            assert len(data) % PAGE == 0 and chunk.offset % PAGE == 0
            assert np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0
            if chunk.offset == 0:
                assert bytes(data[:64]) == bytes(64)
            assert chunk.offset == self.ends.get(chunk.segment, 0), (
                "chunks come in the order of the file"
            )
            self.ends[chunk.segment] = chunk.offset + len(data)
            assert os.pwrite(self.fds[chunk.segment], data, chunk.offset) == len(data)
            if chunk.is_last:
                _, num_bytes, _ = self.log.sealed(chunk.segment)
                assert 0 <= self.ends[chunk.segment] - num_bytes < PAGE
                os.truncate(self.fds[chunk.segment], num_bytes)
            self.log.written(chunk)

    def frames(self, segment, first, n):
        data = os.pread(self.fds[segment], n * self.stride, 64 + first * self.stride)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(n, self.stride)

    def close(self):
        for fd in [*self.fds.values(), *self.direct_fds.values()]:
            os.close(fd)
        self.directory.cleanup()


def stride_of(record_bytes):
    return 4 + -(-record_bytes // 4) * 4


def make_log(
    record_bytes=20, rows=0, segment_bytes=20_000, chunk_bytes=PAGE, num_streams=2, first_segment=1
):
    log = _native.RowLog(
        record_bytes, rows, 1, 0, segment_bytes, chunk_bytes, num_streams, first_segment
    )
    return log, Files(log, stride_of(record_bytes))


def read(log, reader, ids, record_bytes, demand=True):
    out = torch.full((len(ids), record_bytes), 0xA5, dtype=torch.uint8)
    result, fault = log.read(reader, longs(ids), out, demand).wait()
    assert fault is None
    return result, out


def check_content(log, reader, model, ids, record_bytes):
    """model: id -> (version, frequency)"""
    ids = list(ids)
    result, out = read(log, reader, ids, record_bytes)
    assert result.tolist() == [i in model for i in ids]
    for i, row in zip(ids, out, strict=True):
        wanted = (
            records_of([i], model[i][0], record_bytes)[0]
            if i in model
            else torch.full_like(row, 0xA5)
        )
        assert torch.equal(row, wanted), i
    frequencies = torch.empty(len(ids), dtype=torch.uint8)
    log.frequencies(longs(ids), frequencies)
    assert frequencies.tolist() == [model[i][1] if i in model else 0 for i in ids]
    places = torch.empty(len(ids), dtype=torch.int64)
    log.places(longs(ids), places)
    assert [p >= 0 for p in places.tolist()] == [i in model for i in ids]
    assert log.num_rows == len(model)
    number, num_records, num_live, _ = log.segments()
    assert int(num_live.sum()) == len(model)
    for segment, n, live in zip(
        number.tolist(), num_records.tolist(), num_live.tolist(), strict=True
    ):
        bits = np.unpackbits(log.live(segment).numpy(), bitorder="little")
        assert bits.sum() == live and not bits[n:].any()


def content_of(log, files, segments, bits_of):
    """id -> payload of the frames that bitmaps say are live."""
    content = {}
    for segment in segments:
        n, num_bytes, checksum = log.sealed(segment)
        frames = files.frames(segment, 0, n)
        assert num_bytes == 64 + n * files.stride
        keys = log.keys(segment)
        assert _native.check_records(keys, frames, files.stride - 4, segment << 32) == -1
        crcs = frames[:, :4].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        assert int(crcs.sum()) == checksum
        bits = np.unpackbits(bits_of(segment).numpy(), bitorder="little")[:n]
        for record in np.flatnonzero(bits).tolist():
            assert int(keys[record]) not in content
            content[int(keys[record])] = bytes(frames[record, 4:].numpy())
    return content


IDS = st.one_of(st.integers(0, 40), st.sampled_from(LIMITS), st.integers(-(2**63), 2**63 - 1))
KINDS_OF_STEP = [
    "write",
    "write",
    "write",
    "save",
    "delete",
    "touch",
    "drain",
    "drain one",
    "seal",
    "collect",
    "freeze",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS_OF_STEP), st.lists(IDS, max_size=60), st.integers(0, 1)),
    max_size=40,
)


@settings(max_examples=examples(25, 80), deadline=None)
@given(STEPS, st.sampled_from([1, 20, 97, 1024, 4000]), st.sampled_from(KINDS), st.booleans())
def test_log_is_a_dict(steps, record_bytes, kind, is_open):
    rows = 0 if is_open else 41
    log, files = make_log(record_bytes, rows)
    reader = _native.PageReader(kind, 8)
    model, visited, frozen = {}, set(), None
    try:
        for version, (step, ids, stream) in enumerate(steps):
            ids = [i for i in ids if is_open or 0 <= i < rows]
            visited.update(ids)
            if step == "write":
                frequencies = (
                    torch.tensor([(i + version) % 256 for i in ids], dtype=torch.uint8)
                    if version % 2
                    else None
                )
                log.write(longs(ids), records_of(ids, version, record_bytes), frequencies, stream)
                for i in ids:
                    frequency = (
                        (i + version) % 256 if version % 2 else model[i][1] if i in model else 0
                    )
                    model[i] = (version, frequency)
            elif step == "save" and frozen is not None:
                # Of the rows as they were when the content was frozen, and of rows that were in memory only.
                saved = [
                    i
                    for i in ids
                    if (frozen.get(i) == model[i][0] if i in model else i not in frozen)
                ]
                log.write(
                    longs(saved),
                    records_of(saved, version, record_bytes),
                    None,
                    stream,
                    for_commit=True,
                )
                for i in saved:
                    model[i] = (version, model[i][1] if i in model else 0)
                    frozen[i] = version
            elif step == "delete":
                assert log.delete(longs(ids)) == sum(model.pop(i, None) is not None for i in ids)
            elif step == "touch":
                log.touch(longs(ids), torch.tensor([i % 256 for i in ids], dtype=torch.uint8))
                model.update({i: (model[i][0], i % 256) for i in ids if i in model})
            elif step == "drain":
                files.write()
            elif step == "drain one":
                files.write(1)
            elif step == "seal":
                log.seal()
            elif step == "collect":
                collect(log, files, frozen is not None)
            elif frozen is None:
                log.freeze()
                frozen = {i: version for i, (version, _) in model.items()}
            else:
                check_commit(log, files, frozen, record_bytes)
                log.thaw()
                frozen = None
            check_content(log, reader, model, ids, record_bytes)
        files.write()
        check_content(log, reader, model, visited, record_bytes)
        if frozen is not None:
            check_commit(log, files, frozen, record_bytes)
    finally:
        files.close()


def collect(log, files, is_frozen=False):
    """Garbage-collect the oldest segment that is sealed and written."""
    files.write()
    number, num_records, num_live, sealed = (column.tolist() for column in log.segments())
    for segment, n, live, is_sealed in zip(number, num_records, num_live, sealed, strict=True):
        if is_sealed:
            frames = files.frames(segment, 0, n)
            half = n // 2
            keys = log.keys(segment)
            moved = log.rewrite(segment, keys[:half], frames[:half], 0, 1, 0) + log.rewrite(
                segment, keys[half:], frames[half:], half, 1, 1
            )
            assert moved == live
            if is_frozen and segment in log.frozen_segments():
                with pytest.raises(ValueError, match="live rows"):
                    log.forget(segment)
            else:
                log.forget(segment)
            return


def check_commit(log, files, frozen, record_bytes):
    """The frozen content, id -> version, is what files and bitmaps say, and opens."""
    log.seal()
    files.write()
    segments = log.frozen_segments()
    content = content_of(log, files, segments, log.frozen_live)
    assert {i: payload[:record_bytes] for i, payload in content.items()} == {
        i: bytes(records_of([i], version, record_bytes)[0].numpy()) for i, version in frozen.items()
    }
    reopened = _native.RowLog(record_bytes, 0, 1, 0, 20_000, PAGE, 1, 1)
    for segment in segments:
        reopened.load(segment, log.keys(segment), log.frozen_live(segment), files.fds[segment])
    assert reopened.num_rows == len(frozen)
    result, out = read(reopened, _native.PageReader("auto", 4), list(frozen), record_bytes)
    assert bool(result.all()) and [bytes(row.numpy()) for row in out] == [
        content[i][:record_bytes] for i in frozen
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_told_and_the_lowest_place_wins(kind):
    log, files = make_log(100, segment_bytes=40_000)
    reader = _native.PageReader(kind, 16)
    ids = list(range(1000))
    log.write(longs(ids), records_of(ids, 0, 100), None, 0)
    log.seal()
    files.write()
    stride = stride_of(100)
    for segment, record in ((2, 5), (1, 77), (1, 9)):
        at = 64 + record * stride + 50
        byte = os.pread(files.fds[segment], 1, at)[0]
        os.pwrite(files.fds[segment], bytes([byte ^ 1]), at)
    out = torch.zeros(1000, 100, dtype=torch.uint8)
    fault = log.read(reader, longs(ids), out, True).wait()[1]
    assert fault == ("checksum", 1 << 32 | 9, 0)
    good = (out == records_of(ids, 0, 100)).all(dim=1)
    assert int((~good).sum()) == 3, "the others arrived all the same"
    os.truncate(files.fds[1], 64 + 8 * stride)
    fault = log.read(reader, longs(ids), out, False).wait()[1]
    assert fault == ("truncated", 1 << 32 | 8, 0)
    log.detach(1)
    with pytest.raises(ValueError, match="segment 1: attach"):
        log.read(reader, longs([0]), out[:1], True)
    log.attach(1, 10_000)
    assert log.read(reader, longs([0]), out[:1], True).wait()[1] == ("system", 1 << 32, 9)
    files.close()


def test_collection_sorts_by_frequency_and_passes_over_rows_that_moved():
    log, files = make_log(8, segment_bytes=10**6)
    ids = list(range(300))
    frequencies = torch.tensor([i * 7 % 256 for i in ids], dtype=torch.uint8)
    log.write(longs(ids), records_of(ids, 0, 8), frequencies, 0)
    log.seal()
    files.write()
    log.write(longs([5, 6]), records_of([5, 6], 1, 8), None, 0)
    assert log.delete(longs([7])) == 1
    frames = files.frames(1, 0, 300)
    frames[299, 10] ^= 1
    with pytest.raises(ValueError, match="record 299"):
        log.rewrite(1, longs(ids), frames, 0, 1, 1)
    with pytest.raises(ValueError, match="297 live"):
        log.forget(1)
    assert log.rewrite(1, longs(ids), files.frames(1, 0, 300), 0, 1, 1) == 297
    log.seal()
    moved = log.keys(3).tolist()
    assert moved == sorted(
        (i for i in ids if i not in (5, 6, 7)), key=lambda i: -int(frequencies[i])
    )
    log.forget(1)
    files.close()


def test_collection_moves_the_frozen_content_too():
    log, files = make_log(12)
    ids = list(range(100))
    log.write(longs(ids), records_of(ids, 0, 12), None, 0)
    log.seal()
    log.freeze()
    log.write(
        longs([1, 2]), records_of([1, 2], 1, 12), None, 0
    )  # newer than the commit, which keeps the old ones
    collect(log, files, is_frozen=True)
    assert log.frozen_segments() == [1, 3]
    bits = np.unpackbits(log.frozen_live(1).numpy(), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [1, 2]
    log.write(longs([5, 6, 200]), records_of([5, 6, 200], 2, 12), None, 0, for_commit=True)
    check_commit(log, files, dict.fromkeys(ids, 0) | dict.fromkeys([5, 6, 200], 2), 12)
    log.thaw()
    log.forget(1)
    files.close()


def test_reads_race_with_writes_and_collection():
    log, files = make_log(60, segment_bytes=60_000)
    reader = _native.PageReader("auto", 16)
    ids = list(range(1500))
    log.write(longs(ids), records_of(ids, 0, 60), None, 0)
    stop, errors = threading.Event(), []

    def look():
        try:
            rng = np.random.default_rng(threading.get_ident())
            while not stop.is_set():
                requested = rng.integers(0, 1500, 200).tolist()
                out = torch.empty(200, 60, dtype=torch.uint8)
                result, fault = log.read(
                    reader, longs(requested), out, bool(rng.integers(2))
                ).wait()
                assert fault is None and bool(result.all())
                for i, row in zip(requested[:20], out, strict=False):
                    assert any(torch.equal(row, records_of([i], v, 60)[0]) for v in range(8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 8):
        part = ids[version::3]
        log.write(longs(part), records_of(part, version, 60), None, 0)
        files.write()
        if version % 2:
            log.seal()
            collect(log, files)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    files.close()


def test_what_callers_may_get_wrong():
    for change, message in [
        ({"record_bytes": 0}, "record_bytes"),
        ({"rows": -1}, "rows"),
        ({"chunk_bytes": 1000}, "chunk_bytes"),
        ({"record_bytes": 5000}, "chunk_bytes"),
        ({"num_streams": 0}, "num_streams"),
        ({"first_segment": 2**30}, "first_segment"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_log(**change)
    for kind, depth in (("rings", 4), ("auto", 0), ("threads", 1025)):
        with pytest.raises(ValueError, match="kind" if depth == 4 else "depth"):
            _native.PageReader(kind, depth)
    log, files = make_log(8, rows=10)
    with pytest.raises(IndexError, match="position 1 id 10 rows 10"):
        log.write(longs([1, 10]), records_of([1, 10], 0, 8), None, 0)
    with pytest.raises(ValueError, match="stream"):
        log.write(longs([1]), records_of([1], 0, 8), None, 2)
    assert log.num_rows == 0 and log.seal() == []
    log.write(longs([1]), records_of([1], 0, 8), None, 0)
    with pytest.raises(ValueError, match="still takes rows"):
        log.sealed(1)
    assert log.seal() == [1]
    chunk = log.next_chunk()
    with pytest.raises(ValueError, match="attached first"):
        log.written(chunk)
    with pytest.raises(ValueError, match="not written yet"):
        log.forget(1)
    with pytest.raises(ValueError, match="which this log has already"):
        log.load(1, longs([2]), torch.tensor([1], dtype=torch.uint8), -1)
    with pytest.raises(ValueError, match="record 1: got a second live record of id 1"):
        log.load(9, longs([2, 1]), torch.tensor([3], dtype=torch.uint8), -1)
    assert log.num_rows == 1
    log.load(9, longs([2, 1]), torch.tensor([1], dtype=torch.uint8), -1)
    assert log.num_rows == 2
    with pytest.raises(ValueError, match="key list"):
        log.keys(9)
    log.write(longs([3]), records_of([3], 0, 8), None, 0)
    assert log.seal() == [10]
    files.close()


def test_nothing_asked_is_nothing_done():
    log, files = make_log(8)
    reader = _native.PageReader("auto", 1)
    empty = longs([])
    log.write(empty, torch.empty(0, 8, dtype=torch.uint8), None, 0)
    assert log.delete(empty) == 0 and log.next_chunk() is None and log.pending_bytes == 0
    result, fault = log.read(reader, empty, torch.empty(0, 8, dtype=torch.uint8), True).wait()
    assert len(result) == 0 and fault is None
    files.close()
