"""Writer of logs: one thread per rank that appends full chunks of all logs to their files, within a write budget.

Chunks that a disk refuses stay in memory. They are tried again when a caller waits, and once a second.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import ref

from colonnade import _native
from colonnade.errors import StorageError
from colonnade.files.disk import Disk
from colonnade.store.log.background_worker import BackgroundWorker
from colonnade.store.log.compaction import Collector

DEFAULT_PENDING_BYTES = 64 << 20
LOW_PRIORITY_SHARE = 0.5
"""Share of the limit on unwritten bytes that rows of commits and garbage collection may fill."""


READ_DEPTH = 32
"""Reads in flight. An SSD is near its best rate from about six on; a deeper queue merges more reads."""


class WriteSource(Protocol):
    """Source of chunks for the writer: `LogFiles`."""

    def write_next_chunk(self) -> int:
        """Write one chunk; returns its bytes, 0: nothing to do. Writer thread only. Raises StorageError: try again."""
        ...

    @property
    def has_work(self) -> bool:
        """True if `write_next_chunk` would do something now; cheap."""
        ...

    def list_sealed_unfinished(self) -> set[int]: ...

    @property
    def pending_bytes(self) -> int: ...


class WriteBudget:
    """Token bucket: on average at most `bytes_per_second`, and one second's worth at once. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._tokens = bytes_per_second or 0.0

    def compute_delay(self, written_bytes: int, elapsed_seconds: float) -> float:
        """Return the seconds to wait after `written_bytes` were written, `elapsed_seconds` after the previous call."""
        if self.bytes_per_second is None:
            return 0.0
        earned = self._tokens + elapsed_seconds * self.bytes_per_second
        self._tokens = min(earned, self.bytes_per_second) - written_bytes
        return max(0.0, -self._tokens / self.bytes_per_second)


class LogWriter(BackgroundWorker[WriteSource]):
    """Writer thread of a rank's logs (see the module).

    Unwritten chunks of a log that is removed, dropped or stopped are given up: threads that wait for them get a
    StorageError. pending_bytes: limit on unwritten bytes of all logs together, above which `wait_for_room` waits.
    """

    def __init__(
        self,
        *,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        bytes_per_second: float | None = None,
    ) -> None:
        super().__init__("log writer")
        self.pending_limit = pending_bytes
        self.bytes_written = 0
        self.stall_seconds = 0.0  # that callers of `wait_for_room` waited
        self._budget = WriteBudget(bytes_per_second)
        self._written_at = time.monotonic()
        self._error: BaseException | None = None
        self._has_work = False  # a caller woke the thread, or the last round did not finish
        self._has_failed = False

    @property
    def bytes_per_second(self) -> float | None:
        """Write budget; None: no limit."""
        return self._budget.bytes_per_second

    @property
    def pending_bytes(self) -> int:
        """Bytes of full chunks that are not written yet."""
        with self._condition:
            sources = [source() for source in self._sources]
        return sum(source.pending_bytes for source in sources if source is not None)

    def wake(self) -> None:
        """Wake the thread: there may be full chunks."""
        with self._condition:
            self._has_work = True
            self._condition.notify_all()

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Wait until unwritten bytes are within the limit; False after `timeout` seconds.

        Raises the StorageError that stops the writer: nothing is lost, call again.
        """
        pending = self.pending_bytes
        if pending == 0:
            return True  # the usual case: called for every batch, and few batches fill a chunk
        self.wake()
        if pending <= self.pending_limit:
            return True
        start = time.perf_counter()
        try:
            return self._wait_until(lambda: self.pending_bytes <= self.pending_limit, timeout)
        finally:
            self.stall_seconds += time.perf_counter() - start

    def wait_for_spare_room(self) -> None:
        """Wait, for rows of a commit or garbage collection, until evicted rows of the next batch have room, too.

        Raises as `wait_for_room`. Its limit holds while the disk refuses writes: garbage collection may free space.
        """
        self.wake()
        limit = LOW_PRIORITY_SHARE * self.pending_limit
        if self.pending_bytes > limit:
            try:
                self._wait_until(lambda: self.pending_bytes <= limit, None)
            except StorageError:
                self.wait_for_room()

    def flush(self, source: WriteSource) -> None:
        """Wait until the sealed segments of `source` are complete on the disk. Raises StorageError: call again."""
        wanted = source.list_sealed_unfinished()
        # Do not wait for `is_complete`: a segment may be collected and forgotten before this thread looks again.
        self._wait_until(lambda: not wanted & source.list_sealed_unfinished(), None)

    def _wait_until(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            self._error = None  # its cause may be gone
            self._has_work = True
            self._condition.notify_all()
            # No source has a lock of its own while it waits for this one.
            while not is_done():
                if self._error is not None:
                    error = self._error
                    self._error = None
                    raise _copy_error_for_thread(error)
                if not self._thread:
                    raise StorageError("the writer was closed while rows waited to be written")
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._condition.wait(1.0 if remaining is None else min(remaining, 1.0))
        return True

    # ---- the thread

    def _has_more(self) -> bool:
        return self._has_work and not self._has_failed

    def _work_one_round(self) -> None:
        with self._condition:
            self._has_work = self._has_failed = False
            sources = list(self._sources)
        is_busy = has_failed = False
        for source in sources:
            num_bytes, has_succeeded = (
                (0, True) if self._must_stop() else self._write_source_chunk(source)
            )
            is_busy = is_busy or num_bytes > 0
            has_failed = has_failed or not has_succeeded
            before = self._written_at
            self._written_at = time.monotonic()
            if delay := self._budget.compute_delay(num_bytes, self._written_at - before):
                self._pause(delay)
        with self._condition:
            self._has_work = self._has_work or is_busy
            self._has_failed = has_failed

    def _write_source_chunk(self, reference: ref[WriteSource]) -> tuple[int, bool]:
        """Write one chunk of a source, if it has any. Returns its bytes, and False if that failed."""
        source = reference()
        num_bytes = 0
        error = None
        if source is None or not source.has_work or self._claim(reference) is None:
            return 0, True
        try:
            num_bytes = source.write_next_chunk()
        except BaseException as caught:  # raised in the threads that wait
            error = caught
            traceback.clear_frames(error.__traceback__)  # they reference the source
        del source
        with self._condition:
            self.bytes_written += num_bytes
            if error is not None or num_bytes:
                self._error = error
        self._release()
        return num_bytes, error is None


def _copy_error_for_thread(error: BaseException) -> BaseException:
    """Copy an error for another thread, which extends its traceback."""
    if isinstance(error, StorageError):
        copy = type(error)(*error.args)
        copy.__cause__ = error
        return copy
    return error


@dataclass(frozen=True, slots=True)
class LogWorkers:
    """Disk, reader and threads, which the logs of a rank share. A log that is only read starts no thread."""

    disk: Disk = field(default_factory=Disk)
    reader: _native.PageReader = field(
        default_factory=lambda: _native.PageReader("auto", READ_DEPTH)
    )
    writer: LogWriter = field(default_factory=LogWriter)
    collector: Collector = field(default_factory=Collector)
