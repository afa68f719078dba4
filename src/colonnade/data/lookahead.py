"""Batches made ready ahead of training: the ids of coming batches travel, and their rows become resident,
while earlier batches compute.

    reader -> prepare (thread, `depth` batches ahead) -> fetch (training thread) -> delay line -> training

The delay line is the whole of bounded staleness: a batch is fetched when it enters and used when it
leaves, `reads_ahead` updates later.
"""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from colonnade import _native
from colonnade.batch import Batch


class Lookahead(Iterator[Batch]):
    """`next()` is the moment of reading: everything applied before it is visible to the batch that is fetched.

    An error while reading or preparing a batch is raised when that batch's turn comes. With `depth` 0
    there is no thread: each batch is prepared when it is asked for.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        prepare: Callable[[Batch], Any],
        fetch: Callable[[Any], None],
        drop: Callable[[Any], None],
        starved: threading.Event,
        depth: int,
        reads_ahead: int,
    ) -> None:
        self._batches = iter(batches)
        self._prepare = prepare
        self._fetch = fetch
        self._drop = drop
        self._starved = starved
        self._depth = depth
        self._reads_ahead = reads_ahead
        self._ready: queue.Queue = queue.Queue()
        # First in, first out: every rank's thread prepares exactly the batches it has a permit for before
        # it sees the stop, so no rank waits in `prepare` for one that has already left.
        self._permits: queue.Queue[bool] = queue.Queue()
        self._line: deque[Batch] = deque()  # fetched, oldest first
        self._handed: Batch | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def fetched(self) -> tuple[Batch, ...]:
        """Read but not yet used, oldest first: what a commit has to store under bounded staleness."""
        return tuple(self._line)

    def __next__(self) -> Batch:
        if self._handed is not None and self._handed.ticket is not None:
            self._give_back(self._handed)  # nobody used it
        self._handed = None
        while not self._ended and len(self._line) <= self._reads_ahead:
            batch = self._take()
            if batch is None:
                self._ended = True
            else:
                if batch.ticket.reads is None:
                    self._fetch(batch.ticket)
                self._line.append(batch)
        if not self._line:
            raise StopIteration
        self._handed = self._line.popleft()
        return self._handed

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and give back what was prepared and not used. Safe to call twice."""
        self._ended = True
        self._permits.put(False)
        if self._handed is not None and self._handed.ticket is not None:
            self._give_back(self._handed)
        for batch in self._line:
            self._give_back(batch)
        self._line.clear()
        while self._thread is not None and self._thread.is_alive():
            self._drain()
            self._thread.join(0.01)
        self._drain()

    def _take(self) -> Batch | None:
        if self._depth == 0:
            batch = _next(self._batches)
            if batch is not None:
                batch.ticket = self._prepare(batch)
            return batch
        if self._thread is None:
            for _ in range(self._depth):
                self._permits.put(True)
            self._thread = threading.Thread(
                target=_run,
                args=(self._batches, self._prepare, self._permits, self._ready),
                name="lookahead",
                daemon=True,
            )
            # The thread does not hold this object: left behind without `close`, it stops the thread.
            weakref.finalize(self, self._permits.put, False)
            self._thread.start()
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            self._starved.set()  # from here on, waiting for training to release rows would be a deadlock
            item = self._ready.get()
            self._starved.clear()
        self._permits.put(True)
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        return item

    def _drain(self) -> None:
        while not self._ready.empty():
            item = self._ready.get()
            if isinstance(item, Batch):
                self._give_back(item)

    def _give_back(self, batch: Batch) -> None:
        self._drop(batch.ticket)
        batch.ticket = None


def _run(
    batches: Iterator[Batch],
    prepare: Callable[[Batch], Any],
    permits: queue.Queue[bool],
    ready: queue.Queue,
) -> None:
    """The thread: one batch per permit; None after the last one, or the error."""
    # Its work is hidden behind training's. Two teams of OpenMP workers would spin against each other.
    _native.limit_threads_here(max(1, _native.num_threads() // 4))
    try:
        while permits.get():
            batch = _next(batches)
            if batch is not None:
                batch.ticket = prepare(batch)
            ready.put(batch)
            if batch is None:
                return
    except BaseException as error:
        ready.put(error)


def _next(batches: Iterator[Batch]) -> Batch | None:
    """A batch of its own: the caller may hand the same one twice."""
    batch = next(batches, None)
    return None if batch is None else copy.copy(batch)
