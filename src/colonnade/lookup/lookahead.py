"""Batches made ready ahead of training: the ids of coming batches travel, and their rows become resident,
while earlier batches compute.

    reader -> prepare (thread, `depth` batches ahead) -> fetch (training thread) -> delay line -> training

The delay line is the whole of bounded staleness: a batch is fetched when it enters and used when it
leaves, so many updates later. Where tables have several bounds, each fetches what is due by then, whenever the batch
has come so far.

Where an update is still under way when a batch is handed out, what would be read now, and sees that update, is read
later: at the next `next()`, once it has landed. The line is as much shorter meanwhile. Reads see what they always do.

How far ahead: as deep as told, or, with depth "auto", deeper while training waits for reads that were asked for as
early as the depth allows. Whatever the depth, a window whose rows do not fit memory becomes shallower.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from colonnade import _native
from colonnade.batch import Batch
from colonnade.data.processes import kill_readers

SHALLOW, DEEPEST = 2, 64
STALLED = 0.02  # of the time: worth looking further ahead
CROWDED = 0.5  # of a table's slots in a window: what is not in it should keep the rest
LOOKED_AT = 16  # batches between two decisions
LATE = 2  # steps: reads that are so early leave an update one to travel in, and their own values another
PATIENCE = 2.0  # seconds, with processes that read what nobody wants any more


def next_depth(depth: int, *, stalled: float, window: float) -> int:
    """How many batches "auto" looks ahead from here on: pure.

    stalled: the part of the time that training waited for reads of batches that had been prepared in time.
    window: the largest part of any table's slots that the batches in flight have pinned.
    """
    if stalled <= STALLED or 2 * window > CROWDED:
        return depth
    return min(2 * depth, max(depth, DEEPEST))


@dataclass(slots=True)
class Window:
    """What the lookahead and the store tell each other."""

    stall_seconds: Callable[[], float]  # that fetches waited for reads, since the store opened
    share: Callable[[], float]  # of the slots of the fullest table that are pinned
    starved: (
        threading.Event
    )  # training waits for the next batch: nothing will be released meanwhile
    crowded: threading.Event  # the next batch does not fit beside those in flight
    closing: threading.Event  # batches that are prepared from here on will be dropped


class Lookahead(Iterator[Batch]):
    """`next()` is the moment of reading: everything applied before it is visible to the batch that is fetched.

    An error while reading or preparing a batch is raised when that batch's turn comes.
    Where reads are late, one is open at a time: updates land, and evaluations settle, for a collection's newest.
    With `depth` 0 there is no thread: each batch is prepared when it is asked for. `depth` changes only where
    `is_alone`: every rank's thread must prepare as many batches as the others' before it stops.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        prepare: Callable[[Batch], Any],
        fetch: Callable[[Any, int], None],
        drop: Callable[[Any], None],
        window: Window,
        depth: int | Literal["auto"],
        bounds: Sequence[int],
        is_alone: bool = True,
        land: Callable[[int], int] = lambda count: 0,
        is_in_order: bool = False,
    ) -> None:
        """fetch(ticket, steps before its use). bounds: ascending, in steps; all that tables have, of which the last is
        when a batch enters the line. land(count): applies the oldest updates that are under way, and says how many are
        left; none is where a bound is less than `LATE`. is_in_order: `fetch` refuses a batch after one that nobody
        used."""
        self._prepared = PreparedBatches(iter(batches), prepare, drop, window, depth, is_alone)
        self._fetch = fetch
        self._window = window
        self._land = land
        self._is_in_order = is_in_order
        self._bounds = tuple(bounds)
        self._bound = bounds[-1]
        self._line: deque[Batch] = deque()  # fetched, oldest first
        self._handed: Batch | None = None
        self._owed = 0  # updates that were under way when a batch was handed out before the reads that see them

    @property
    def depth(self) -> int:
        """Batches that are prepared ahead, as it is now."""
        return self._prepared.depth

    @property
    def fetched(self) -> tuple[Batch, ...]:
        """Read but not yet used, oldest first: what a commit has to store under bounded staleness. Collective where
        reads were put off."""
        self.catch_up()
        return tuple(self._line)

    def __next__(self) -> Batch:
        unused = (
            self._handed if self._handed is not None and self._handed.ticket is not None else None
        )
        self._handed = None
        if unused is not None and not self._is_in_order:
            self._prepared.give_back(unused)
            unused = None
        try:
            self._read_due()
        finally:
            # Not before: whether the thread has prepared the next one already is another matter on each rank.
            if unused is not None:
                self._prepared.give_back(unused)
        if not self._line:
            raise StopIteration
        self._handed = self._line.popleft()
        return self._handed

    def _read_due(self) -> None:
        """Make the reads of this call, or put them off until an update has landed."""
        self.catch_up()
        if self._line and self._bound >= LATE:
            self._owed = self._land(0)
        if not self._owed:
            self._land(self._land(0))
            self._read()

    def catch_up(self) -> None:
        """Collective, training thread: what the newest `next()` put off, before anything that sees newer updates."""
        owed, self._owed = self._owed, 0
        if owed:
            self._land(owed)
            self._read(1)

    def _read(self, gone: int = 0) -> None:
        """All that is due. gone: batches that have left the line since it was."""
        while not self._prepared.is_exhausted and len(self._line) + gone <= self._bound:
            self._enter(gone)
        for steps in self._bounds[:-1]:
            if len(self._line) + gone > steps:
                self._fetch(self._line[steps - gone].ticket, steps)

    def _enter(self, gone: int) -> None:
        """The next batch is read, and waits in the line."""
        batch = self._prepared.take()
        if batch is None:
            return
        before = self._window.stall_seconds()
        try:
            self._fetch(batch.ticket, len(self._line) + gone)
        except BaseException:  # nobody else has it to give up
            self._prepared.give_back(batch)
            raise
        self._prepared.count_stall(self._window.stall_seconds() - before)
        self._line.append(batch)

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and give back what was prepared and not used. Safe to call twice. Reads that the newest
        `next()` put off until an update had landed are not made: such a lookahead has taken one batch fewer from its
        source than one without an update under way."""
        self._owed = 0
        self._prepared.stop()
        if self._handed is not None and self._handed.ticket is not None:
            self._prepared.give_back(self._handed)
        for batch in self._line:
            self._prepared.give_back(batch)
        self._line.clear()
        self._prepared.join()


class PreparedBatches:
    """Batches that a thread prepares while earlier ones compute, `depth` of them before they are taken.

    Not collective itself: `prepare` is. Training thread alone, but for the thread that it starts at the first `take`.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        prepare: Callable[[Batch], Any],
        drop: Callable[[Any], None],
        window: Window,
        depth: int | Literal["auto"],
        is_alone: bool,
    ) -> None:
        self._batches = batches
        self._prepare = prepare
        self._drop = drop
        self._window = window
        self.depth = SHALLOW if depth == "auto" else depth
        self._deepens = depth == "auto" and is_alone
        self._is_alone = is_alone
        self._surplus = 0  # permits to keep back: the window has become shallower
        self._has_warned = depth == "auto"  # its own choice: nothing to warn of
        self._taken, self._since, self._stalled = 0, time.perf_counter(), 0.0
        self._was_late = True
        self.is_exhausted = False
        """No batch comes any more: the last one was taken, one failed, or it was stopped."""
        self._ready: queue.Queue = queue.Queue()
        # First in, first out: every rank's thread prepares exactly the batches it has a permit for before
        # it sees the stop, so no rank waits in `prepare` for one that has already left.
        self._permits: queue.Queue[bool] = queue.Queue()
        self._thread: threading.Thread | None = None

    def take(self) -> Batch | None:
        """Wait for the next batch; None after the last one. Raises what reading or preparing it raised."""
        if self.depth == 0:
            batch = _next(self._batches)
            if batch is None:
                self.is_exhausted = True
            else:
                batch.ticket = self._prepare(batch)
            return batch
        if self._thread is None:
            self._start()
        self._adapt()
        try:
            item = self._ready.get_nowait()
            self._was_late = False
        except queue.Empty:
            self._was_late = True
            self._window.starved.set()  # from here on, waiting for training to release rows would be a deadlock
            item = self._ready.get()
            self._window.starved.clear()
        if self._surplus > 0:
            self._surplus -= 1
        else:
            self._permits.put(True)  # the thread may prepare one more
        self.is_exhausted = not isinstance(item, Batch)
        if isinstance(item, BaseException):
            raise item
        return item

    def count_stall(self, seconds: float) -> None:
        """Count the seconds that training waited for reads of the batch that was taken last, if it came in time."""
        if not self._was_late:
            self._stalled += seconds

    def give_back(self, batch: Batch) -> None:
        """Drop a batch that nobody will use."""
        self._drop(batch.ticket)
        batch.ticket = None

    def stop(self) -> None:
        """Let the thread end, once it has prepared what it has permits for."""
        self.is_exhausted = True
        self._permits.put(False)

    def join(self) -> None:
        """Wait for the thread, which has been told to stop, and give back what it made ready. After PATIENCE seconds
        processes that it waits for are killed: one that is stopped would never answer."""
        start = time.monotonic()
        self._window.closing.set()  # the thread may wait for room for a batch that has not enough
        while self._thread is not None and self._thread.is_alive():
            self._drain()
            self._thread.join(0.01)
            if time.monotonic() - start > PATIENCE:
                kill_readers(self._thread)
        self._window.closing.clear()
        self._drain()

    def _start(self) -> None:
        for _ in range(self.depth):
            self._permits.put(True)
        self._thread = threading.Thread(
            target=_run,
            args=(self._batches, self._prepare, self._permits, self._ready, self._window),
            name="lookahead",
            daemon=True,
        )
        # The thread does not hold this object: left behind without `stop`, it stops the thread.
        weakref.finalize(self, self._permits.put, False)
        self._thread.start()

    def _drain(self) -> None:
        """Give back what is ready."""
        while not self._ready.empty():
            item = self._ready.get()
            if isinstance(item, Batch):
                self.give_back(item)

    def _adapt(self) -> None:
        """More permits, or fewer."""
        if self._window.crowded.is_set():
            self._window.crowded.clear()
            self._shrink(max(1, self._ready.qsize()))
        self._taken += 1
        if not self._deepens or self._taken < max(LOOKED_AT, 2 * self.depth):
            return
        now = time.perf_counter()
        stalled = self._stalled / max(1e-9, now - self._since)
        depth = next_depth(self.depth, stalled=stalled, window=self._window.share())
        for _ in range(depth - self.depth):
            self._permits.put(True)
        self.depth = depth
        self._taken, self._since, self._stalled = 0, now, 0.0

    def _shrink(self, depth: int) -> None:
        """Batches in flight have pinned so much that the next one waits for their end: `depth` is what fits."""
        if depth >= self.depth:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"looking {self.depth} batches ahead needs more rows at once than the memory budget holds; about "
                f"{depth} fit. Training goes on, to the same result, perhaps slower: raise plan.memory.dram, or lower "
                "plan.lookahead or the batch size",
                RuntimeWarning,
                stacklevel=4,
            )
        if self._is_alone:
            self._surplus += self.depth - depth
            self.depth = depth
            self._deepens = False


def _run(
    batches: Iterator[Batch],
    prepare: Callable[[Batch], Any],
    permits: queue.Queue[bool],
    ready: queue.Queue,
    window: Window,
) -> None:
    """The thread: one batch per permit; None after the last one, or the error."""
    # Its work is hidden behind training's, which should get the processors.
    _native.limit_threads_here(max(1, _native.num_threads() // 4))
    try:
        while permits.get():
            batch = _next(batches)
            if batch is not None:
                batch.ticket = prepare(batch)
            # Training may be slow to wake and say so itself: the batch after this may wait for this one's rows.
            window.starved.clear()
            ready.put(batch)
            if batch is None:
                return
    except BaseException as error:
        ready.put(error)


def _next(batches: Iterator[Batch]) -> Batch | None:
    """A batch of its own: the caller may hand the same one twice."""
    batch = next(batches, None)
    return None if batch is None else copy.copy(batch)
