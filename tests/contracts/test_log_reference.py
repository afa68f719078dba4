"""`_native.RowLog` is what `references/log_reference.py` says, over random calls of both; files are byte strings."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from backing import make_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import log_reference

from colonnade import _native

RECORD_BYTES = 24
SEGMENT_BYTES, CHUNK_BYTES = 9000, 4096
ids_of_a_call = st.lists(st.integers(0, 60), max_size=120)
calls = st.one_of(
    st.tuples(st.just("write"), ids_of_a_call, st.integers(1, 9), st.integers(0, 1)),
    st.tuples(st.just("write"), ids_of_a_call, st.integers(1, 9), st.integers(0, 1)),
    st.tuples(st.just("write_heats"), ids_of_a_call, st.integers(1, 9)),
    st.tuples(st.just("delete"), ids_of_a_call),
    st.tuples(st.just("touch"), ids_of_a_call),
    st.tuples(st.just("put_chunks"), st.integers(1, 5)),
    st.tuples(st.just("seal")),
    st.tuples(st.just("freeze")),
    st.tuples(st.just("thaw")),
    st.tuples(st.just("rewrite"), st.integers(0, 20)),
)


class Log:
    """A log and the files that its chunks went to."""

    def __init__(self, kind, rows: int) -> None:
        self.log = kind(RECORD_BYTES, rows, 1, 0, SEGMENT_BYTES, CHUNK_BYTES, 2, 1)
        self.reader = _native.PageReader("auto", 4)
        self.files: dict[int, int] = {}
        self.is_frozen = False

    def write(self, ids, salt, stream) -> None:
        records = make_records(ids, RECORD_BYTES, salt)
        self.log.write(np.array(ids, np.int64), records, None, stream, False)

    def write_heats(self, ids, salt) -> None:
        frequencies = np.array([(i * salt) % 256 for i in ids], np.uint8)
        records = make_records(ids, RECORD_BYTES, salt)
        self.log.write(np.array(ids, np.int64), records, frequencies, 0, False)

    def delete(self, ids) -> int:
        return self.log.delete(np.array(ids, np.int64))

    def touch(self, ids) -> None:
        self.log.touch(np.array(ids, np.int64), np.array([i % 256 for i in ids], np.uint8))

    def put_chunks(self, count) -> list:
        """The next chunks go to their files."""
        put = []
        for _ in range(count):
            chunk = self.log.next_chunk()
            if chunk is None:
                break
            if chunk.segment not in self.files:
                fd, path = tempfile.mkstemp()
                os.unlink(path)
                self.files[chunk.segment] = fd
                self.log.attach(chunk.segment, fd)
            assert os.pwrite(self.files[chunk.segment], chunk.data, chunk.offset) == len(chunk.data)
            self.log.written(chunk)
            put.append((chunk.segment, chunk.offset, bytes(chunk.data)))
        return put

    def seal(self) -> list[int]:
        return self.log.seal()

    def freeze(self) -> None:
        if not self.is_frozen:
            self.log.freeze()
        self.is_frozen = True

    def thaw(self) -> None:
        self.log.thaw()
        self.is_frozen = False

    def rewrite(self, which) -> tuple | None:
        """Collect the `which`-th of the segments that are whole on the disk."""
        self.put_chunks(1000)
        numbers, _, _, sealed = (np.asarray(column) for column in self.log.segments())
        ready = numbers[sealed.astype(bool)].tolist()
        if not ready or self.is_frozen:
            return None
        number = ready[which % len(ready)]
        records, num_bytes, checksum = self.log.sealed(number)
        keys = np.asarray(self.log.keys(number))
        data = os.pread(self.files[number], num_bytes, 0)
        frames = np.frombuffer(data, np.uint8)[64:].reshape(records, -1)
        bad = frames.copy()
        bad[records - 1, -1] ^= 1
        with pytest.raises(ValueError, match=str(records - 1)):
            self.log.rewrite(number, keys, bad, 0, 1, 0)
        moved = self.log.rewrite(number, keys, frames, 0, 1, 0)
        self.log.detach(number)
        self.log.forget(number)
        os.close(self.files.pop(number))
        return number, num_bytes, checksum, keys.tolist(), moved

    def content(self) -> dict:
        """All that can be seen."""
        ids = np.arange(70, dtype=np.int64)
        out = np.zeros((70, RECORD_BYTES), np.uint8)
        places, frequencies = np.empty(70, np.int64), np.empty(70, np.uint8)
        self.log.places(ids, places)
        self.log.frequencies(ids, frequencies)
        result, fault = self.log.read(self.reader, ids, out, True).wait()
        columns = [np.asarray(column).astype(int).tolist() for column in self.log.segments()]
        facts = {
            "places": places.tolist(),
            "frequencies": frequencies.tolist(),
            "found": np.asarray(result).astype(bool).tolist(),
            "fault": fault,
            "rows": out.tolist(),
            "segments": columns,
            "live": [np.asarray(self.log.live(n)).tolist() for n in columns[0]],
            "num_rows": self.log.num_rows,
            "pending": self.log.pending_bytes,
        }
        if self.is_frozen:
            frozen = np.asarray(self.log.frozen_segments()).tolist()
            facts["frozen"] = [(n, np.asarray(self.log.frozen_live(n)).tolist()) for n in frozen]
        counts = self.log.counts()
        facts["counts"] = [counts[k] for k in ("rows_written", "rows_deleted", "rows_rewritten")]
        return facts

    def close(self) -> None:
        for number, fd in self.files.items():
            self.log.detach(number)
            os.close(fd)


@pytest.mark.parametrize("rows", [0, 70], ids=["open", "vocabulary"])
@given(calls=st.lists(calls, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_native_log_is_the_reference(rows, calls):
    logs = [Log(kind, rows) for kind in (_native.RowLog, log_reference.RowLog)]
    for name, *arguments in calls:
        native, reference = (getattr(log, name)(*arguments) for log in logs)
        assert native == reference, name
        native, reference = (log.content() for log in logs)
        assert native == reference, name
    for log in logs:
        log.close()
