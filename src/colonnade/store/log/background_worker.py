"""Background worker thread shared by all open stores of a rank; stops when the last one closes.

It references a store only while it works on it. A store that is dropped without `close` is freed like any object, with
its locks, files and memory, and within `RETRY_SECONDS` the thread of the last store ends.
"""

from __future__ import annotations

import atexit
import threading
from typing import Generic, TypeVar
from weakref import ref

RETRY_SECONDS = 1.0

Source = TypeVar("Source")


class BackgroundWorker(Generic[Source]):
    """Thread that works for sources, such as a rank's logs. It runs while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sources: list[ref[Source]] = []
        self._condition = threading.Condition()
        self._busy: Source | None = None
        self._thread: threading.Thread | None = None

    def add_source(self, source: Source) -> None:
        with self._condition:
            self._sources.append(ref(source))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_thread, name=self._name, daemon=True
                )
                self._thread.start()
                # A thread in native code at the interpreter's exit would crash the process.
                atexit.register(self.stop)

    def remove_source(self, source: Source) -> None:
        """Stop work for a source. Returns when the thread does not use it any more."""
        with self._condition:
            if ref(source) not in self._sources:
                return
            self._sources.remove(ref(source))
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._busy is not source)
            thread = None if self._has_sources() else self._detach_thread()
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Stop the thread, whatever work is left. Returns when it has ended."""
        with self._condition:
            thread = self._detach_thread()
        if thread is not None:
            thread.join()

    # ---- with the lock

    def _detach_thread(self) -> threading.Thread | None:
        """Take the thread out and make it end."""
        thread = self._thread
        self._thread = None
        self._condition.notify_all()
        atexit.unregister(self.stop)
        return thread

    def _has_sources(self) -> bool:
        # Dropped sources are not reported: that may happen in any thread, even in one that has this lock, or that waits
        # for it with a lock of the store.
        self._sources = [source for source in self._sources if source() is not None]
        return bool(self._sources)

    def _has_more(self) -> bool:
        """Return whether the thread should continue without a pause."""
        raise NotImplementedError

    # ---- the thread

    def _run_thread(self) -> None:
        this_thread = threading.current_thread()
        while True:
            with self._condition:
                if self._thread is this_thread and not self._has_more():
                    self._condition.wait(RETRY_SECONDS)
                if self._thread is this_thread and not self._has_sources():
                    self._detach_thread()
                if self._thread is not this_thread:
                    return
            self._work_one_round()

    def _work_one_round(self) -> None:
        """Do one round: one unit of work for each source that needs it."""
        raise NotImplementedError

    def _must_stop(self) -> bool:
        """Return whether this thread should end."""
        return self._thread is not threading.current_thread()

    def _pause(self, seconds: float) -> None:
        """Sleep between two units of work, without a reference to a source."""
        with self._condition:
            self._condition.wait_for(self._must_stop, seconds)

    def _claim(self, source: ref[Source]) -> Source | None:
        """Reference a source for work; None if it was removed or dropped. Else call `_release` after the work."""
        with self._condition:
            self._busy = source() if source in self._sources else None
            return self._busy

    def _release(self) -> None:
        with self._condition:
            self._busy = None
            self._condition.notify_all()
