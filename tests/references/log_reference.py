"""Reference of `_native.RowLog` in numpy and a dict: slow, short, the definition that tests compare with.

One difference: a read is done when `read` returns, and needs no reader.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from colonnade import _native

HEADER_BYTES = 64
PAGE = 4096
Fault = tuple[str, int, int]  # kind, place, errno


@dataclass(slots=True)
class _Part:
    """A segment: its records' ids, which of them are live, and the bytes not yet known to be written."""

    number: int
    ids: list[int] = field(default_factory=list)
    live: list[bool] = field(default_factory=list)
    frozen: list[bool] | None = None
    content: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    num_bytes: int = HEADER_BYTES
    checksum: int = 0
    taken: int = 0  # bytes handed out in chunks
    written: int = 0
    is_sealed: bool = False
    has_keys: bool = True
    fd: int = -1
    num_records: int = 0


class Chunk:
    """Bytes to write at `offset` of a segment's file."""

    def __init__(self, segment: int, offset: int, content: bytes, is_last: bool) -> None:
        self.segment, self.offset, self.is_last = segment, offset, is_last
        self.data = memoryview(mmap.mmap(-1, len(content)))  # page-aligned
        self.data[:] = content


class LogRead:
    """A read that is done."""

    def __init__(self, exists: np.ndarray, fault: Fault | None) -> None:
        self._exists, self._fault = exists, fault

    def wait(self) -> tuple[np.ndarray, Fault | None]:
        return self._exists, self._fault


class RowLog:
    """See `_native.RowLog`. Every id is indexed in a dict, whatever `rows`, `num_owners` and `place` say."""

    def __init__(
        self,
        record_bytes: int,
        rows: int,
        num_owners: int,
        place: int,
        segment_bytes: int,
        chunk_bytes: int,
        num_streams: int,
        first_segment: int,
    ) -> None:
        self._record_bytes = record_bytes
        self._stride = 4 + -(-record_bytes // 4) * 4
        self._segment_bytes, self._chunk_bytes = segment_bytes, chunk_bytes
        self._next = first_segment
        self._parts: dict[int, _Part] = {}
        self._active: list[_Part | None] = [None] * num_streams
        self._place: dict[int, int] = {}
        self._frequency: dict[int, int] = {}
        self._is_frozen = False
        self._hot_frequency: float | None = None
        self._lock = threading.RLock()
        self._counts = dict.fromkeys(("rows_written", "rows_deleted", "rows_rewritten"), 0)

    # ---- rows

    def write(
        self, ids, records, access_frequencies=None, stream: int = 0, is_for_commit: bool = False
    ) -> None:
        ids, records = np.asarray(ids), np.asarray(records)
        with self._lock:
            self._counts["rows_written"] += len(ids)
            for i, row_id in enumerate(ids.tolist()):
                if access_frequencies is not None:
                    self._frequency[row_id] = int(access_frequencies[i])
                self._append(row_id, records[i], stream, is_for_commit)

    def delete(self, ids) -> int:
        with self._lock:
            gone = [i for i in np.asarray(ids).tolist() if i in self._place]
            count = 0
            for row_id in gone:
                place = self._place.pop(row_id, None)
                self._frequency.pop(row_id, None)
                if place is not None:
                    self._parts[place >> 32].live[place & 0xFFFFFFFF] = False
                    count += 1
            self._counts["rows_deleted"] += count
            return count

    def places(self, ids, out) -> None:
        with self._lock:
            np.asarray(out)[:] = [self._place.get(i, -1) for i in np.asarray(ids).tolist()]

    def frequencies(self, ids, out) -> None:
        with self._lock:
            np.asarray(out)[:] = [self._frequency.get(i, 0) for i in np.asarray(ids).tolist()]

    def touch(self, ids, frequencies) -> None:
        with self._lock:
            for row_id, frequency in zip(
                np.asarray(ids).tolist(), np.asarray(frequencies), strict=True
            ):
                if row_id in self._place:
                    self._frequency[row_id] = int(frequency)

    def read(self, reader, ids, records_out, demand: bool = True) -> LogRead:
        ids, records_out = np.asarray(ids), np.asarray(records_out)
        faults: list[Fault] = []
        with self._lock:
            result = np.zeros(len(ids), bool)
            for i, row_id in enumerate(ids.tolist()):
                place = self._place.get(row_id, -1)
                if place < 0:
                    continue
                result[i] = True
                frame, fault = self._frame(place)
                if fault is None and self._is_bad(row_id, frame, place):
                    fault = ("checksum", place, 0)
                if fault is None:
                    records_out[i] = frame[0, 4 : 4 + self._record_bytes]
                else:
                    faults.append(fault)
        return LogRead(result, min(faults, key=lambda fault: fault[1], default=None))

    # ---- bytes on their way to files

    def next_chunk(self) -> Chunk | None:
        with self._lock:
            for part in sorted(self._parts.values(), key=lambda part: part.number):
                rest = part.num_bytes - part.taken
                if rest >= self._chunk_bytes or (part.is_sealed and rest > 0):
                    size = min(rest, self._chunk_bytes)
                    content = bytes(part.content[part.taken : part.taken + size])
                    offset = part.taken
                    part.taken += size
                    is_last = part.is_sealed and part.taken == part.num_bytes
                    return Chunk(
                        part.number, offset, content.ljust(-(-size // PAGE) * PAGE, b"\0"), is_last
                    )
        return None

    def written(self, chunk: Chunk) -> None:
        with self._lock:
            part = self._parts.get(chunk.segment)
            if part is not None:
                part.written = chunk.offset + len(chunk.data)

    def attach(self, segment: int, fd: int) -> None:
        with self._lock:
            self._parts[segment].fd = fd

    def detach(self, segment: int) -> None:
        with self._lock:
            if segment in self._parts:
                self._parts[segment].fd = -1

    def seal(self) -> list[int]:
        with self._lock:
            numbers = [part.number for part in self._active if part is not None]
            for stream, part in enumerate(self._active):
                if part is not None:
                    part.is_sealed = True
                    self._active[stream] = None
            return sorted(numbers)

    # ---- what is known of segments

    def sealed(self, segment: int) -> tuple[int, int, int]:
        part = self._parts[segment]
        return part.num_records, part.num_bytes, part.checksum

    def keys(self, segment: int) -> Tensor:
        with self._lock:
            part = self._parts[segment]
            if not part.has_keys:
                raise ValueError(f"the keys of segment {segment} were forgotten")
            return torch.tensor(part.ids, dtype=torch.int64)

    def forget_keys(self, segment: int) -> None:
        self._parts[segment].has_keys = False

    def segments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with self._lock:
            parts = sorted(self._parts.values(), key=lambda part: part.number)
            columns = ([p.number for p in parts], [p.num_records for p in parts])
            live = [sum(p.live) for p in parts]
            sealed = torch.tensor([p.is_sealed for p in parts], dtype=torch.bool)
            return *(torch.tensor(c, dtype=torch.int64) for c in (*columns, live)), sealed  # type: ignore[return-value]

    def live(self, segment: int) -> Tensor:
        with self._lock:
            return _bits(self._parts[segment].live)

    def freeze(self) -> None:
        with self._lock:
            self._is_frozen = True
            for part in self._parts.values():
                part.frozen = list(part.live)

    def frozen_segments(self) -> Tensor:
        with self._lock:
            numbers = sorted(n for n, part in self._parts.items() if any(part.frozen or ()))
            return torch.tensor(numbers, dtype=torch.int64)

    def frozen_live(self, segment: int) -> Tensor:
        with self._lock:
            part = self._parts[segment]
            frozen = part.frozen or []
            return _bits([*frozen, *[False] * (part.num_records - len(frozen))])

    def thaw(self) -> None:
        with self._lock:
            self._is_frozen = False
            for part in self._parts.values():
                part.frozen = None

    def load(self, segment: int, ids, live, fd: int) -> None:
        with self._lock:
            ids = np.asarray(ids).tolist()
            bits = np.unpackbits(np.asarray(live), count=len(ids), bitorder="little").astype(bool)
            size = HEADER_BYTES + len(ids) * self._stride
            part = _Part(segment, ids, bits.tolist(), num_bytes=size, taken=size)
            part.written = -(-size // PAGE) * PAGE
            part.is_sealed, part.has_keys, part.fd, part.num_records = True, False, fd, len(ids)
            self._parts[segment] = part
            for record, (row_id, is_live) in enumerate(zip(ids, part.live, strict=True)):
                if is_live:
                    self._place[row_id] = segment << 32 | record
            self._next = max(self._next, segment + 1)

    def rewrite(
        self, segment: int, ids, frames, first_record: int, stream: int, hot_stream: int
    ) -> int:
        ids, frames = np.asarray(ids), np.asarray(frames)
        first = segment << 32 | first_record
        bad = _native.check_records(ids, frames, self._record_bytes, first)
        if bad >= 0:
            raise ValueError(first_record + bad)
        with self._lock:
            ids = ids.tolist()
            rows = [r for r, row_id in enumerate(ids) if self._place.get(row_id) == first + r]
            rows.sort(key=lambda r: -self._frequency.get(ids[r], 0))
            if rows:
                frequency = float(self._frequency.get(ids[rows[len(rows) // 8]], 0))
                before = self._hot_frequency
                self._hot_frequency = (
                    frequency if before is None else before + (frequency - before) / 10
                )
            for r in rows:
                is_hot = self._frequency.get(ids[r], 0) > int(self._hot_frequency or 0)
                payload = frames[r, 4 : 4 + self._record_bytes]
                self._append(ids[r], payload, hot_stream if is_hot else stream, False)
            self._counts["rows_rewritten"] += len(rows)
            return len(rows)

    def forget(self, segment: int) -> None:
        with self._lock:
            if any(self._parts[segment].live):
                raise ValueError(f"segment {segment} holds live rows")
            del self._parts[segment]

    @property
    def pending_bytes(self) -> int:
        with self._lock:
            return sum(self._full_bytes(part) - part.written for part in self._parts.values())

    @property
    def num_rows(self) -> int:
        return len(self._place)

    @property
    def index_bytes(self) -> int:
        return 200 * len(self._place)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    # ---- inside; the lock is held

    def _full_bytes(self, part: _Part) -> int:
        """Return the bytes of full chunks, with their padding."""
        if part.is_sealed:
            return -(-part.num_bytes // PAGE) * PAGE
        return part.num_bytes // self._chunk_bytes * self._chunk_bytes

    def _append(self, row_id: int, record: np.ndarray, stream: int, for_commit: bool) -> None:
        part = self._active[stream]
        if (
            part is not None
            and part.num_records
            and part.num_bytes + self._stride > self._segment_bytes
        ):
            part.is_sealed, part = True, None
        if part is None:
            part = self._active[stream] = self._parts[self._next] = _Part(self._next)
            self._next += 1
        place = part.number << 32 | part.num_records
        frame = np.empty((1, self._stride), np.uint8)
        one = np.array([row_id], np.int64)
        _native.frame_records(one, record[None].copy(), self._record_bytes, place, frame)
        old = self._place.get(row_id)
        if old is not None:
            of, r = self._parts[old >> 32], old & 0xFFFFFFFF
            of.live[r] = False
            if for_commit and of.frozen is not None and r < len(of.frozen):
                of.frozen[r] = False
        part.content += frame.tobytes()
        part.num_bytes += self._stride
        part.checksum = (part.checksum + int(frame[0, :4].view("<u4")[0])) % 2**64
        part.ids.append(row_id)
        part.live.append(True)
        part.num_records += 1
        if self._is_frozen:
            frozen = part.frozen if part.frozen is not None else []
            part.frozen = [*frozen, *[False] * (part.num_records - 1 - len(frozen)), for_commit]
        self._place[row_id] = place

    def _is_bad(self, row_id: int, frame: np.ndarray, place: int) -> bool:
        one = np.array([row_id], np.int64)
        return _native.check_records(one, frame, self._record_bytes, place) >= 0

    def _frame(self, place: int) -> tuple[np.ndarray, Fault | None]:
        """Read a frame (1, stride) from memory, or from the file once all of it is written."""
        part, record = self._parts[place >> 32], place & 0xFFFFFFFF
        first = HEADER_BYTES + record * self._stride
        last = first + self._stride
        frame = np.zeros((1, self._stride), np.uint8)
        if last > part.written:
            frame[0] = np.frombuffer(bytes(part.content[first:last]), np.uint8)
            return frame, None
        start, end = first // PAGE * PAGE, -(-last // PAGE) * PAGE
        buffer = mmap.mmap(-1, end - start)
        try:
            got = os.preadv(part.fd, [buffer], start)
        except OSError as error:
            return frame, ("system", place, error.errno or errno.EIO)
        if start + got < last:
            return frame, ("truncated", place, 0)
        frame[0] = np.frombuffer(buffer[first - start : last - start], np.uint8)
        return frame, None


def _bits(flags: list[bool]) -> Tensor:
    return torch.from_numpy(np.packbits(np.array(flags, bool), bitorder="little"))
