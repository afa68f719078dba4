"""Lookahead: batches prepared ahead of training (`prepared_batches.py`) and, under bounded staleness, fetched early.

    reader -> prepare (thread, `depth` batches ahead) -> fetch (training thread) -> delay line -> training

The delay line is the whole of bounded staleness: a batch is fetched when it enters and used when it
leaves, so many updates later. Where tables have several bounds, each fetches what is due by then, whenever the batch
has come so far.

Where an update is still under way when a batch is handed out, what would be read now, and sees that update, is read
later: at the next `next()`, once it has landed. The line is as much shorter meanwhile. Reads see what they always do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from colonnade.batch import Batch
from colonnade.lookup.contract import LookupContext
from colonnade.pipeline.prepared_batches import Held, PreparedBatch, PreparedBatches, Window

LATE = 2  # steps: reads that are so early leave an update one to travel in, and their own values another


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
        prepare: Callable[[Batch, Held | None], LookupContext],
        fetch: Callable[[LookupContext, int], None],
        drop: Callable[[LookupContext], None],
        window: Window,
        depth: int | Literal["auto"],
        bounds: Sequence[int],
        held: Sequence[Held] = (),
        is_alone: bool = True,
        land: Callable[[int], int] = lambda count: 0,
        is_in_order: bool = False,
    ) -> None:
        """fetch(context, steps before its use). bounds: ascending, in steps; all that tables have, of which the last is
        when a batch enters the line. land(count): applies the oldest updates that are under way, and says how many are
        left; none is where a bound is less than `LATE`. is_in_order: `fetch` refuses a batch after one that nobody
        used. held: what commits hold of the first batches."""
        self._prepared = PreparedBatches(
            iter(batches), prepare, drop, window, depth, held, is_alone
        )
        self._fetch = fetch
        self._window = window
        self._land = land
        self._is_in_order = is_in_order
        self._bounds = tuple(bounds)
        self._bound = bounds[-1]
        self._line: deque[PreparedBatch] = deque()  # fetched, oldest first
        self._current: PreparedBatch | None = None
        self._postponed = 0  # updates that were under way when a batch was handed out before the reads that see them

    @property
    def depth(self) -> int:
        """Batches that are prepared ahead, as it is now."""
        return self._prepared.depth

    @property
    def fetched(self) -> tuple[PreparedBatch, ...]:
        """Read but not yet used, oldest first: what a commit has to store under bounded staleness. Collective where
        reads were put off."""
        self.catch_up()
        return tuple(self._line)

    def __next__(self) -> PreparedBatch:
        unused = (
            self._current
            if self._current is not None and self._current.context is not None
            else None
        )
        self._current = None
        if unused is not None and not self._is_in_order:
            self._prepared.give_back(unused)
            unused = None
        try:
            self._read_or_postpone()
        finally:
            # Not before: whether the thread has prepared the next one already is another matter on each rank.
            if unused is not None:
                self._prepared.give_back(unused)
        if not self._line:
            raise StopIteration
        self._current = self._line.popleft()
        return self._current

    def _read_or_postpone(self) -> None:
        """Make the reads of this call, or put them off until an update has landed."""
        if self._bound >= LATE:
            self.catch_up()
            if self._line:
                self._postponed = self._land(0)
            if self._postponed:
                return
            self._land(self._land(0))
        self._read()

    def catch_up(self) -> None:
        """Collective, training thread: what the newest `next()` put off, before anything that sees newer updates."""
        postponed, self._postponed = self._postponed, 0
        if postponed:
            self._land(postponed)
            self._read(1)

    def _read(self, gone: int = 0) -> None:
        """All that is due. gone: batches that have left the line since it was."""
        while not self._prepared.is_exhausted and len(self._line) + gone <= self._bound:
            self._fetch_next(gone)
        for steps in self._bounds[:-1]:
            if len(self._line) + gone > steps:
                self._fetch(self._line[steps - gone].unused, steps)

    def _fetch_next(self, gone: int) -> None:
        """The next batch is read, and waits in the line."""
        batch = self._prepared.take()
        if batch is None:
            return
        measures = self._prepared.deepens
        before = self._window.stall_seconds() if measures else 0.0
        try:
            self._fetch(batch.unused, len(self._line) + gone)
        except BaseException:  # nobody else has it to give up
            self._prepared.give_back(batch)
            raise
        if measures:
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
        self._postponed = 0
        self._prepared.stop()
        if self._current is not None and self._current.context is not None:
            self._prepared.give_back(self._current)
        for batch in self._line:
            self._prepared.give_back(batch)
        self._line.clear()
        self._prepared.join()
