"""Lookahead: batches prepared ahead of training (`prepared_batches.py`) and, under bounded staleness, fetched early.

    reader -> prepare (thread, `depth` batches ahead) -> fetch (training thread) -> delay line -> training

The delay line is all that bounded staleness needs: a batch is fetched when it enters the line and used when it leaves
it, a fixed number of updates later. Where tables have several bounds, a batch's rows of each table are fetched when the
batch is that many updates before its use.

If an update is still pending when a batch is returned, reads that must see that update are postponed to the next
`next()`, when it is applied. The line is one shorter meanwhile. Reads see the same updates either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from colonnade.batch import Batch
from colonnade.lookup.contract import LookupContext
from colonnade.pipeline.gradients import Updates
from colonnade.pipeline.prepared_batches import (
    PipelineSignals,
    PrefetchedBatch,
    PreparedBatch,
    PreparedBatches,
)

LATE = 2  # steps: reads this early leave one step to send an update in, and another to send their own values in


@dataclass(frozen=True, slots=True)
class BatchStages:
    """Functions that bring a batch from its ids to its use."""

    prepare: Callable[[Batch, PrefetchedBatch | None], LookupContext]
    fetch: Callable[[LookupContext, int], None]
    """Function of a batch's context and the number of steps before its use."""
    drop: Callable[[LookupContext], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadSettings:
    """Number of batches ahead, and the order in which they are used."""

    depth: int | Literal["auto"]
    staleness_bounds: Sequence[int] = (0,)
    """Bounds of the tables, in steps, ascending. A batch is first fetched as many steps before its use as the last one
    says."""
    is_alone: bool = True
    """True if no other rank prepares batches of this lookahead's step."""
    is_in_order: bool = False
    """True if `BatchStages.fetch` refuses a batch after one that was not used."""


class Lookahead(Iterator[Batch]):
    """Iterator that prepares and fetches batches ahead of training. `next()` is the moment of reading: everything
    applied before it is visible to the batch that is fetched.

    An error while reading or preparing a batch is raised by the `next()` that would return that batch.
    Where several ranks train, or bounds are `LATE` or more, only one lookahead of a collection is open at a time: two
    threads would send ids in no common order, and updates are applied for the newest. With `depth` 0 there is no
    thread: each batch is prepared by `next()`. `depth` changes only where `is_alone`, because every rank's thread must
    prepare the same number of batches before it stops.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        stages: BatchStages,
        settings: LookaheadSettings,
        signals: PipelineSignals,
        updates: Updates,
        prefetched: Sequence[PrefetchedBatch] = (),
    ) -> None:
        """Prepare nothing yet: the thread starts at the first `next()`. prefetched: values of the first batches, from a
        checkpoint."""
        self._prepared = PreparedBatches(
            iter(batches),
            stages.prepare,
            stages.drop,
            signals,
            settings.depth,
            prefetched,
            settings.is_alone,
        )
        self._fetch = stages.fetch
        self._signals = signals
        self._updates = updates
        self._is_in_order = settings.is_in_order
        self._staleness_bounds = tuple(settings.staleness_bounds)
        self._max_staleness = self._staleness_bounds[-1]
        self._line: deque[PreparedBatch] = deque()  # fetched, oldest first
        self._current: PreparedBatch | None = None
        self._postponed = (
            0  # updates that were pending when a batch was returned before the reads that see them
        )

    @property
    def depth(self) -> int:
        """Number of batches that are prepared ahead now."""
        return self._prepared.depth

    @property
    def fetched(self) -> tuple[PreparedBatch, ...]:
        """Fetched and unused batches, oldest first: a checkpoint stores them under bounded staleness. Collective where
        reads were postponed."""
        self.make_postponed_reads()
        return tuple(self._line)

    def __next__(self) -> PreparedBatch:
        unused = (
            self._current
            if self._current is not None and self._current.context is not None
            else None
        )
        self._current = None
        if unused is not None and not self._is_in_order:
            self._prepared.drop_batch(unused)
            unused = None
        try:
            self._fetch_or_postpone()
        finally:
            # Not before: whether the thread has already prepared the next one differs between ranks.
            if unused is not None:
                self._prepared.drop_batch(unused)
        if not self._line:
            raise StopIteration
        self._current = self._line.popleft()
        return self._current

    def _fetch_or_postpone(self) -> None:
        """Make the reads of this call, or postpone them until an update is applied."""
        if self._max_staleness >= LATE:
            self.make_postponed_reads()
            if self._line:
                self._postponed = self._updates.num_pending
            if self._postponed:
                return
            self._updates.apply_all()
        self._fetch_due_batches()

    def make_postponed_reads(self) -> None:
        """Make the reads that the newest `next()` postponed, before any that see newer updates. Collective, training
        thread."""
        postponed = self._postponed
        self._postponed = 0
        if postponed:
            self._updates.apply_oldest(postponed)
            self._fetch_due_batches(1)

    def _fetch_due_batches(self, num_left_batches: int = 0) -> None:
        """Fetch every batch and table whose bound is reached. num_left_batches: batches that have left the line since
        the reads were postponed."""
        while (
            not self._prepared.is_exhausted
            and len(self._line) + num_left_batches <= self._max_staleness
        ):
            self._fetch_next_batch(num_left_batches)
        for steps in self._staleness_bounds[:-1]:
            if len(self._line) + num_left_batches > steps:
                self._fetch(self._line[steps - num_left_batches].unused, steps)

    def _fetch_next_batch(self, num_left_batches: int) -> None:
        """Fetch the next prepared batch, and add it to the line."""
        batch = self._prepared.take_next_batch()
        if batch is None:
            return
        measures = self._prepared.deepens
        before = self._signals.stall_seconds() if measures else 0.0
        try:
            self._fetch(batch.unused, len(self._line) + num_left_batches)
        except BaseException:  # no other code can drop it
            self._prepared.drop_batch(batch)
            raise
        if measures:
            self._prepared.count_stall(self._signals.stall_seconds() - before)
        self._line.append(batch)

    def prepare_again(self) -> None:
        """Prepare the batches after the current one again, because decisions about them change. Collective."""
        self._prepared.prepare_again()

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop batches that were prepared and not used. Safe to call twice. Reads that the
        newest `next()` postponed are not made: such a lookahead has taken one batch fewer from its source than one
        without a pending update."""
        self._postponed = 0
        self._prepared.stop()
        if self._current is not None and self._current.context is not None:
            self._prepared.drop_batch(self._current)
        for batch in self._line:
            self._prepared.drop_batch(batch)
        self._line.clear()
        self._prepared.join_thread()
