"""Processes that read for this one: who waits for them, and their end from outside of that thread.

A stopped one answers nobody and dies of no polite word: a thread that waits for it, and the end of this process, would
wait for ever. Who watches them names it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from colonnade.topology.presence import process_state

LOOK_SECONDS = 1.0
SAID_SECONDS = 5.0
"""Of waiting, before those that are stopped are named."""


class Readers:
    """Of one epoch, from their start until `end`."""

    def __init__(self, workers: Sequence[BaseProcess]) -> None:
        self.workers = workers
        self._waits: int | None = None
        self._since = 0.0  # it does
        # At the latest when this process ends, before multiprocessing waits for its children.
        self._end = Finalize(None, self.kill, exitpriority=0)
        _living.append(self)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """By this thread."""
        self._since, self._waits = time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._waits = None

    def are_waited_for(self, thread: threading.Thread) -> bool:
        return self._waits == thread.ident

    def watch(self, is_over: threading.Event) -> None:
        """Until then: where they are waited for long, and some are stopped, say so, once."""
        said = 0.0
        while not is_over.wait(LOOK_SECONDS):
            since, waited = self._since, time.monotonic() - self._since
            if self._waits is None or since == said or waited < SAID_SECONDS:
                continue
            pids = [str(w.pid) for w in self.workers if process_state(w.pid or 0) == "stopped"]
            if pids:
                said = since
                print(
                    f"waiting for {waited:.0f} s for a reader process that is stopped (SIGSTOP): pid "
                    f"{', '.join(pids)}; kill -CONT {' '.join(pids)} lets it go on",
                    file=sys.stderr,
                    flush=True,
                )

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
