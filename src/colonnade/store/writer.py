"""The writer: one thread per rank that takes full chunks from all logs to their files, within a write budget.

Whatever a disk refuses stays in memory and is tried again: when somebody waits, and once a second.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

from colonnade.errors import StorageError

DEFAULT_PENDING_BYTES = 64 << 20
BEHIND = 0.5
"""Of the limit on what waits in memory, for rows that can wait."""
RETRY_SECONDS = 1.0


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


class LogWriter:
    """Shared by a rank's logs. Its thread runs while there are any.

    pending_bytes: what may wait in memory, of all logs together, before `wait_for_room` waits.
    """

    def __init__(
        self,
        *,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        bytes_per_second: float | None = None,
    ) -> None:
        self.pending_limit = pending_bytes
        self.bytes_written = 0
        self.stall_seconds = 0.0  # that callers of `wait_for_room` waited
        self._budget = WriteBudget(bytes_per_second)
        self._sources: list[WriteSource] = []
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._is_due = False  # somebody wants the thread to look
        self._busy: WriteSource | None = None
        self._thread: threading.Thread | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """The budget."""
        return self._budget.bytes_per_second

    @property
    def pending_bytes(self) -> int:
        """In full chunks that are not written yet."""
        with self._condition:
            sources = list(self._sources)
        return sum(source.pending_bytes for source in sources)

    def add(self, source: WriteSource) -> None:
        with self._condition:
            self._sources.append(source)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                self._thread.start()
                # A thread in native code when the interpreter goes would take the process down.
                atexit.register(self.stop)

    def remove(self, source: WriteSource) -> None:
        """Returns when the thread has let go of it. What it has not written is given up."""
        with self._condition:
            if source not in self._sources:
                return
            self._sources.remove(source)
            self._is_due = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._busy is not source)
            thread = None if self._sources else self._let_go()
        if thread is not None:
            thread.join()

    def _let_go(self) -> threading.Thread | None:
        """Tell the thread to end; the lock is held."""
        thread, self._thread = self._thread, None
        self._condition.notify_all()
        atexit.unregister(self.stop)
        return thread

    def stop(self) -> None:
        """Returns when nothing is written any more: who waits for it hears a StorageError, and what was not written is
        given up."""
        with self._condition:
            thread = self._let_go()
        if thread is not None:
            thread.join()

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

    def _run(self) -> None:
        me = threading.current_thread()
        before = time.monotonic()
        has_failed = False
        while True:
            with self._condition:
                if not self._is_due or has_failed:
                    self._condition.wait(RETRY_SECONDS)
                if self._thread is not me:
                    return
                self._is_due = has_failed = False
                sources = list(self._sources)
            is_busy = True
            while is_busy and not has_failed and self._thread is me:
                is_busy = False
                for source in sources:
                    if not source.has_work:
                        continue
                    num_bytes, is_well = self._write_from(source)
                    is_busy, has_failed = is_busy or num_bytes > 0, has_failed or not is_well
                    now = time.monotonic()
                    delay, before = self._budget.delay(num_bytes, now - before), now
                    if delay:
                        with self._condition:
                            self._condition.wait_for(lambda: self._thread is not me, delay)

    def _write_from(self, source: WriteSource) -> tuple[int, bool]:
        """One chunk, or nothing; False where it failed."""
        with self._condition:
            if source not in self._sources:
                return 0, True
            self._busy = source
        num_bytes, error = 0, None
        try:
            num_bytes = source.write_next()
        except BaseException as caught:  # of a thread: for whoever waits
            error = caught
        with self._condition:
            self._busy = None
            self.bytes_written += num_bytes
            if error is not None or num_bytes:
                self._error = error
            self._condition.notify_all()
        return num_bytes, error is None


def _copy(error: BaseException) -> BaseException:
    """The same error for another thread, whose traceback it may grow."""
    if isinstance(error, StorageError):
        copy = type(error)(*error.args)
        copy.__cause__ = error
        return copy
    return error
