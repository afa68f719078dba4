"""Batches prepared ahead by a thread: their ids are sent and their rows pinned while earlier ones compute.

The depth is a fixed number of batches or, with depth "auto", grows while training waits for reads that were requested
as early as the depth allows. At any depth, a window whose rows do not fit memory becomes shallower.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Literal

from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch, register_batch_class
from colonnade.data.processes import kill_readers
from colonnade.lookup.contract import LookupContext

SHALLOW = 2
DEEPEST = 64
STALLED = 0.02  # share of the time waited for reads, above which the window grows
CROWDED = 0.5  # part of a table's slots that a window may pin; the rest is for rows outside it
LOOKED_AT = 16  # batches between two decisions about the depth
PATIENCE = 2.0  # seconds to wait for reader processes whose batches are no longer needed

PrefetchedBatch = tuple[int, Sequence[Mapping[str, Tensor]]]
"""Steps until a batch's use, and the values that all ranks had fetched for it: from a checkpoint with bounded
staleness."""


@dataclass(slots=True)
class PreparedBatch(Batch):
    """Batch of a lookahead, to be used once: its ids were sent, its rows are pinned."""

    context: LookupContext | None = field(default=None, repr=False)

    @property
    def unused(self) -> LookupContext:
        """Context of a batch that was not used yet."""
        assert self.context is not None
        return self.context

    def take_context(self) -> LookupContext | None:
        """Return the context for the batch's only use; None if it was used already."""
        context = self.context
        self.context = None
        return context

    def _move_tensors(self, move_tensor: Callable[[Tensor], Tensor]) -> Batch:
        moved = Batch._move_tensors(self, move_tensor)
        if moved is not self:
            self.context = None  # the copy has it now
        return moved


register_batch_class(PreparedBatch)
VALUES = attrgetter(*(batch_field.name for batch_field in fields(Batch)))


def choose_next_depth(depth: int, *, stalled_fraction: float, pinned_fraction: float) -> int:
    """Return how many batches "auto" looks ahead next. Pure.

    stalled_fraction: the part of the time that training waited for reads of batches that had been prepared in time.
    pinned_fraction: the largest part of any table's slots that the batches in flight have pinned.
    """
    if stalled_fraction <= STALLED or 2 * pinned_fraction > CROWDED:
        return depth
    return min(2 * depth, max(depth, DEEPEST))


@dataclass(slots=True)
class PipelineSignals:
    """Signals between the lookahead's thread, training and the store."""

    stall_seconds: Callable[
        [], float
    ]  # seconds that fetches waited for reads since the store was opened
    share: Callable[[], float]  # part of the fullest table's slots that is pinned
    starved: (
        threading.Event
    )  # training waits for the next batch: nothing will be released meanwhile
    crowded: threading.Event  # the next batch does not fit beside those in flight
    closing: threading.Event  # batches that are prepared from now on will be dropped


ReadyBatches = queue.Queue[PreparedBatch | BaseException | None]
"""Prepared batches in order; None after the last one, or the error that ended them."""


class PreparedBatches:
    """Batches that a thread prepares while earlier ones compute, `depth` of them before they are taken.

    Not collective itself: `prepare` is. Training thread alone, but for the thread that it starts at the first
    `take_next_batch`."""

    def __init__(
        self,
        batches: Iterator[Batch],
        prepare: Callable[[Batch, PrefetchedBatch | None], LookupContext],
        drop: Callable[[LookupContext], None],
        window: PipelineSignals,
        depth: int | Literal["auto"],
        prefetched: Sequence[PrefetchedBatch],
        is_alone: bool,
    ) -> None:
        self._batches = batches
        self._prepare = partial(
            _prepare_next_batch,
            prepare_batch=prepare,
            prefetched_batches=chain(prefetched, repeat(None)),
        )
        self._drop = drop
        self._signals = window
        self.depth = SHALLOW if depth == "auto" else depth
        self.deepens = depth == "auto" and is_alone
        """True if the depth grows while training waits for reads, which `count_stall` counts."""
        self._is_alone = is_alone
        self._surplus = 0  # permits to withhold, because the window has become shallower
        self._has_warned = depth == "auto"  # "auto" changes the depth anyway, so no warning
        self._taken = 0
        self._since = time.perf_counter()
        self._stalled = 0.0
        self._was_late = True
        self.is_exhausted = False
        """Whether no batch follows: the last one was taken, one failed, or the thread was stopped."""
        self._ready: ReadyBatches = queue.Queue()
        # First in, first out: every rank's thread prepares exactly the batches it has a permit for before
        # it sees the stop, so no rank waits in `prepare` for one that has already stopped.
        self._permits: queue.Queue[bool] = queue.Queue()
        self._thread: threading.Thread | None = None

    def take_next_batch(self) -> PreparedBatch | None:
        """Wait for the next batch; None after the last one. Raises what reading or preparing it raised."""
        if self.depth == 0:
            batch = self._prepare(self._batches)
            self.is_exhausted = batch is None
            return batch
        if self._thread is None:
            self._start_thread()
        self._adapt_depth()
        try:
            item = self._ready.get_nowait()
            self._was_late = False
        except queue.Empty:
            self._was_late = True
            self._signals.starved.set()  # from here on, waiting for training to release rows would be a deadlock
            item = self._ready.get()
            self._signals.starved.clear()
        if self._surplus > 0:
            self._surplus -= 1
        else:
            self._permits.put(True)  # the thread may prepare one more
        self.is_exhausted = not isinstance(item, PreparedBatch)
        if isinstance(item, BaseException):
            raise item
        return item

    def count_stall(self, seconds: float) -> None:
        """Count the seconds that training waited for reads of the batch taken last, if that was prepared in time."""
        if not self._was_late:
            self._stalled += seconds

    def drop_batch(self, batch: PreparedBatch) -> None:
        """Drop a batch that will not be used."""
        if (context := batch.take_context()) is not None:
            self._drop(context)

    def prepare_again(self) -> None:
        """Undo the preparation of all batches that were not taken; they are prepared again, in the same order, from the
        next `take_next_batch` on. Collective: every rank has prepared as many."""
        if self._thread is None or self.is_exhausted:
            return
        self._permits.put(False)
        self._batches = _chain_items(self._join_thread(), self._batches)
        self._ready = queue.Queue()
        self._permits = queue.Queue()
        self._thread = None

    def stop(self) -> None:
        """Let the thread end, once it has prepared what it has permits for."""
        self.is_exhausted = True
        self._permits.put(False)

    def join_thread(self) -> None:
        """Wait for the thread, after `stop`, and drop the batches that it prepared. After PATIENCE seconds the reader
        processes that it waits for are killed: a suspended process would never answer."""
        self._join_thread(PATIENCE)

    def _join_thread(
        self, patience: float = math.inf
    ) -> list[PreparedBatch | BaseException | None]:
        """Wait for the thread, which has got its last permit. Return what it had ready, with batches dropped."""
        start = time.monotonic()
        items = []
        self._signals.closing.set()  # the thread may be waiting for room for a batch
        while self._thread is not None and self._thread.is_alive():
            items += self._drop_ready()
            self._thread.join(0.01)
            if time.monotonic() - start > patience:
                kill_readers(self._thread)
        self._signals.closing.clear()
        return items + self._drop_ready()

    def _start_thread(self) -> None:
        for _ in range(self.depth):
            self._permits.put(True)
        self._thread = threading.Thread(
            target=_prepare_batches,
            args=(
                partial(self._prepare, self._batches),
                self._permits,
                self._ready,
                self._signals,
            ),
            name="lookahead",
            daemon=True,
        )
        # The thread has no reference to this object: collected without `stop`, it stops the thread.
        weakref.finalize(self, self._permits.put, False)
        self._thread.start()

    def _drop_ready(self) -> list[PreparedBatch | BaseException | None]:
        """Take what is ready, and drop the batches."""
        items = []
        while not self._ready.empty():
            items.append(item := self._ready.get())
            if isinstance(item, PreparedBatch):
                self.drop_batch(item)
        return items

    def _adapt_depth(self) -> None:
        """Adapt the depth: add permits while training stalls, withhold some while memory is short."""
        if self._signals.crowded.is_set():
            self._signals.crowded.clear()
            self._reduce_depth(max(1, self._ready.qsize()))
        self._taken += 1
        if not self.deepens or self._taken < max(LOOKED_AT, 2 * self.depth):
            return
        now = time.perf_counter()
        stalled = self._stalled / max(1e-9, now - self._since)
        depth = choose_next_depth(
            self.depth, stalled_fraction=stalled, pinned_fraction=self._signals.share()
        )
        for _ in range(depth - self.depth):
            self._permits.put(True)
        self.depth = depth
        self._taken = 0
        self._since = now
        self._stalled = 0.0

    def _reduce_depth(self, depth: int) -> None:
        """Lower the depth to `depth`, which fits: the next batch waits for pinned rows of those in flight."""
        if depth >= self.depth:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"looking {self.depth} batches ahead needs more rows at once than the memory budget holds; about "
                f"{depth} fit. Training continues, to the same result, perhaps slower: raise "
                f"plan.memory.dram, or lower "
                "plan.lookahead or the batch size",
                RuntimeWarning,
                stacklevel=4,
            )
        if self._is_alone:
            self._surplus += self.depth - depth
            self.depth = depth
            self.deepens = False


def _prepare_batches(
    prepare_next: Callable[[], PreparedBatch | None],
    permits: queue.Queue[bool],
    ready_queue: ReadyBatches,
    pipeline_signals: PipelineSignals,
) -> None:
    """Prepare one batch per permit and put it in `ready_queue`; None after the last one, or the error. Thread's
    target."""
    # Its work is hidden behind training's, which should get the processors.
    _native.limit_threads_here(max(1, _native.num_threads() // 4))
    try:
        while permits.get():
            batch = prepare_next()
            # Cleared here too, because training may be slow to wake: the next batch may wait for this one's rows.
            pipeline_signals.starved.clear()
            ready_queue.put(batch)
            if batch is None:
                return
    except BaseException as error:
        ready_queue.put(error)


def _prepare_next_batch(
    batches: Iterator[Batch],
    prepare_batch: Callable[[Batch, PrefetchedBatch | None], LookupContext],
    prefetched_batches: Iterator[PrefetchedBatch | None],
) -> PreparedBatch | None:
    """Prepare a copy of the next batch, because a source may yield the same one twice. None after the last one."""
    batch = next(batches, None)
    if batch is None:
        return None
    own = as_prepared(batch)
    own.context = prepare_batch(own, next(prefetched_batches))
    return own


def _chain_items(
    items: Sequence[PreparedBatch | BaseException | None], batches: Iterator[Batch]
) -> Iterator[Batch]:
    """Yield the batches of `items` and raise the error among them, before the other `batches`."""
    for item in items:
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            yield item
    yield from batches


def as_prepared(batch: Batch) -> PreparedBatch:
    """Return a copy of the batch that can have a context."""
    return PreparedBatch(*VALUES(batch))
