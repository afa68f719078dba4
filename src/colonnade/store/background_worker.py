"""A thread that works for stores while there are any: those that came, and have neither left nor been dropped.

It holds no store but the one that it works on. A store that nobody closes and nobody holds any more is collected as
any object is, with its locks, files and memory, and within `RETRY_SECONDS` the thread of the last one ends.
"""

from __future__ import annotations

import atexit
import threading
from typing import Generic, TypeVar
from weakref import ref

RETRY_SECONDS = 1.0

Source = TypeVar("Source")


class Attendant(Generic[Source]):
    """Shared by a rank's logs. Its thread runs while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sources: list[ref[Source]] = []
        self._condition = threading.Condition()
        self._busy: Source | None = None
        self._thread: threading.Thread | None = None

    def add(self, source: Source) -> None:
        with self._condition:
            self._sources.append(ref(source))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                # A thread in native code when the interpreter goes would take the process down.
                atexit.register(self.stop)

    def remove(self, source: Source) -> None:
        """Returns when the thread has let go of it, and does no more for it."""
        with self._condition:
            if ref(source) not in self._sources:
                return
            self._sources.remove(ref(source))
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._busy is not source)
            thread = None if self._has_sources() else self._let_go()
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Returns when the thread works no more, whatever is left to do."""
        with self._condition:
            thread = self._let_go()
        if thread is not None:
            thread.join()

    # ---- the lock is held

    def _let_go(self) -> threading.Thread | None:
        """Tell the thread to end."""
        thread, self._thread = self._thread, None
        self._condition.notify_all()
        atexit.unregister(self.stop)
        return thread

    def _has_sources(self) -> bool:
        # Nothing tells the thread when one is dropped: that may happen anywhere, also in who holds this lock or waits
        # for it with a lock of the store.
        self._sources = [source for source in self._sources if source() is not None]
        return bool(self._sources)

    def _has_more(self) -> bool:
        """Whether the thread should go on at once."""
        raise NotImplementedError

    # ---- the thread

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._condition:
                if self._thread is me and not self._has_more():
                    self._condition.wait(RETRY_SECONDS)
                if self._thread is me and not self._has_sources():
                    self._let_go()
                if self._thread is not me:
                    return
            self._work()

    def _work(self) -> None:
        """One turn: something for each source that needs it."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """The thread should end."""
        return self._thread is not threading.current_thread()

    def _rest(self, seconds: float) -> None:
        """Not in the middle of work: nothing is held meanwhile."""
        with self._condition:
            self._condition.wait_for(self._is_over, seconds)

    def _begin(self, source: ref[Source]) -> Source | None:
        """None: it has left, or is gone. Else `_end` when its work is done."""
        with self._condition:
            self._busy = source() if source in self._sources else None
            return self._busy

    def _end(self) -> None:
        with self._condition:
            self._busy = None
            self._condition.notify_all()
