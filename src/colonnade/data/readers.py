"""Processes that read for this one: who waits for them, and their end from outside of that thread.

A stopped one answers nobody and dies of no polite word: a thread that waits for it, and the end of this process, would
wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize


class Readers:
    """Of one epoch, from their start until `end`."""

    def __init__(self, workers: Sequence[BaseProcess]) -> None:
        self.workers = workers
        self._waits: int | None = None
        # At the latest when this process ends, before multiprocessing waits for its children.
        self._end = Finalize(None, self.kill, exitpriority=0)
        _living.append(self)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """By this thread."""
        self._waits = threading.get_ident()
        try:
            yield
        finally:
            self._waits = None

    def are_waited_for(self, thread: threading.Thread) -> bool:
        return self._waits == thread.ident

    def kill(self) -> None:
        """Who waits for them learns that they are lost."""
        for worker in self.workers:
            worker.kill()

    def end(self) -> None:
        """Kills them, too."""
        self._end()
        _living.remove(self)


_living: list[Readers] = []


def kill_readers(thread: threading.Thread) -> None:
    """Those that this thread waits for. For who has nothing to expect of it any more."""
    for each in tuple(_living):
        if each.are_waited_for(thread):
            each.kill()
