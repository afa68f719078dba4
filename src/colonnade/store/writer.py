"""The writer: one thread per rank that takes full chunks from all logs to their files, within a write budget.

Whatever a disk refuses stays in memory and is tried again: when somebody waits, and once a second.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Protocol
from weakref import ref

from colonnade.errors import StorageError
from colonnade.store.background_worker import Attendant

DEFAULT_PENDING_BYTES = 64 << 20
BEHIND = 0.5
"""Of the limit on what waits in memory, for rows that can wait."""


class WriteSource(Protocol):
    """What the writer empties: `LogFiles`."""

    def write_next(self) -> int:
        """Bytes written; 0: nothing was to do. Called by the writer's thread alone. Raises StorageError: try again."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `write_next` would do something now; costs little."""
        ...

    def sealed_unfinished(self) -> set[int]: ...

    @property
    def pending_bytes(self) -> int: ...


class WriteBudget:
    """A token bucket: on average at most `bytes_per_second`, and one second's worth at once. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._tokens = bytes_per_second or 0.0

    def delay(self, num_bytes: int, seconds: float) -> float:
        """Seconds to wait after `num_bytes` were written, `seconds` after the call before."""
        if self.bytes_per_second is None:
            return 0.0
        earned = self._tokens + seconds * self.bytes_per_second
        self._tokens = min(earned, self.bytes_per_second) - num_bytes
        return max(0.0, -self._tokens / self.bytes_per_second)


class LogWriter(Attendant[WriteSource]):
    """See above. What it has not written of a log that leaves, is dropped or is let go by `stop` is given up: who waits
    for it hears a StorageError.

    pending_bytes: what may wait in memory, of all logs together, before `wait_for_room` waits.
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
        self._is_due = False  # somebody wants the thread to look, or it has not done all
        self._has_failed = False

    @property
    def bytes_per_second(self) -> float | None:
        """The budget."""
        return self._budget.bytes_per_second

    @property
    def pending_bytes(self) -> int:
        """In full chunks that are not written yet."""
        with self._condition:
            there = [source() for source in self._sources]
        return sum(source.pending_bytes for source in there if source is not None)

    def wake(self) -> None:
        """There may be full chunks."""
        with self._condition:
            self._is_due = True
            self._condition.notify_all()

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Until unwritten bytes are within the limit; False after `timeout` seconds.

        Raises the StorageError that keeps the writer from writing: nothing is lost, call again.
        """
        pending = self.pending_bytes
        if pending == 0:
            return True  # asked for every batch, for hardly any of which a chunk has filled up
        self.wake()
        if pending <= self.pending_limit:
            return True
        start = time.perf_counter()
        try:
            return self._wait(lambda: self.pending_bytes <= self.pending_limit, timeout)
        finally:
            self.stall_seconds += time.perf_counter() - start

    def wait_behind(self) -> None:
        """For rows that can wait, of a commit or of garbage collection: until unwritten bytes leave room for those that
        must leave for the next batch. Raises as `wait_for_room`, which it is while the disk refuses to write:
        collecting may free it."""
        self.wake()
        limit = BEHIND * self.pending_limit
        if self.pending_bytes > limit:
            try:
                self._wait(lambda: self.pending_bytes <= limit, None)
            except StorageError:
                self.wait_for_room()

    def flush(self, source: WriteSource) -> None:
        """Until every segment of `source` that is sealed now is whole on the disk. Raises StorageError: call again."""
        wanted = source.sealed_unfinished()
        # Not: until all are complete. One may be collected, and forgotten, before this thread looks again.
        self._wait(lambda: not wanted & source.sealed_unfinished(), None)

    def _wait(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            self._error = None  # perhaps its cause is gone
            self._is_due = True
            self._condition.notify_all()
            # A source never holds a lock of its own while it waits for this one.
            while not is_done():
                if self._error is not None:
                    error, self._error = self._error, None
                    raise _copy(error)
                if not self._thread:
                    raise StorageError("the writer was closed while rows waited to be written")
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    return False
                self._condition.wait(1.0 if rest is None else min(rest, 1.0))
        return True

    # ---- the thread

    def _has_more(self) -> bool:
        return self._is_due and not self._has_failed

    def _work(self) -> None:
        with self._condition:
            self._is_due = self._has_failed = False
            sources = list(self._sources)
        is_busy = has_failed = False
        for source in sources:
            num_bytes, is_well = (0, True) if self._is_over() else self._write_from(source)
            is_busy, has_failed = is_busy or num_bytes > 0, has_failed or not is_well
            before, self._written_at = self._written_at, time.monotonic()
            if delay := self._budget.delay(num_bytes, self._written_at - before):
                self._rest(delay)
        with self._condition:
            self._is_due, self._has_failed = self._is_due or is_busy, has_failed

    def _write_from(self, of: ref[WriteSource]) -> tuple[int, bool]:
        """One chunk, or nothing; False where it failed."""
        source, num_bytes, error = of(), 0, None
        if source is None or not source.has_work or self._begin(of) is None:
            return 0, True
        try:
            num_bytes = source.write_next()
        except BaseException as caught:  # of a thread: for whoever waits
            error = caught
            traceback.clear_frames(error.__traceback__)  # they hold the source
        del source
        with self._condition:
            self.bytes_written += num_bytes
            if error is not None or num_bytes:
                self._error = error
        self._end()
        return num_bytes, error is None


def _copy(error: BaseException) -> BaseException:
    """The same error for another thread, whose traceback it may grow."""
    if isinstance(error, StorageError):
        copy = type(error)(*error.args)
        copy.__cause__ = error
        return copy
    return error
