"""Batches of one collection in flight: ids sent, rows pinned, values fetched, gradients applied.

prepare (lookahead's thread) -> fetch -> values -> backward -> push -> update (all training thread)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import BudgetExceeded, ConfigError
from colonnade.exchange.cached_state import drop_copies
from colonnade.lookup.contract import Caller, LookupContext, PinnedRows, RowSource
from colonnade.pipeline.gradients import StepGradients, Update, Updates
from colonnade.pipeline.lookahead import LATE, BatchStages, Lookahead, LookaheadSettings
from colonnade.pipeline.open_rows import OpenRows
from colonnade.pipeline.prepared_batches import PipelineSignals
from colonnade.store.contract import RowView


@dataclass(slots=True)
class StepCounter:
    """Number of updates of a collection, pending ones included."""

    value: int = 0


class Pipeline:
    """Pipeline of an open collection's batches in flight. Methods are collective; `prepare` is called by any one
    thread, all others by the training thread."""

    def __init__(self, rows: OpenRows, steps: StepCounter) -> None:
        self.rows = rows
        self.steps = steps
        self.exchange = rows.exchange
        self.store = rows.store
        self.views = rows.views
        self.reads_ahead = rows.reads_ahead
        # Batches, by updates that reads missed: a read for each bound of tables; without values from a checkpoint.
        self.missed: Counter[int] = Counter()
        self.updates = Updates(self.exchange, self.store, rows.policies, self.missed)
        waits = bool(rows.cached or rows.policies or self.exchange.pushed_parameters)
        may_be_late = rows.staleness_bounds[0] >= LATE and rows.mesh.num_ranks > 1
        # Agreed between ranks, because a rank has policies only for tables whose rows it has, and all ranks must make
        # their calls in one order.
        may_arrive_late = may_be_late and bool(rows.mesh.min_over_ranks(int(not waits)))
        self.gradients = StepGradients(
            self.exchange, rows.mesh, self.drop_batch, may_arrive_late=may_arrive_late
        )
        self._signals = PipelineSignals(
            stall_seconds=lambda: self.store.sources.stall_seconds,
            share=self.store.pinned_share,
            starved=threading.Event(),
            crowded=threading.Event(),
            closing=threading.Event(),
        )

    def lookahead(
        self,
        batches: Iterable[Batch],
        prefetched: Sequence[tuple[int, Sequence[Mapping[str, Tensor]]]],
    ) -> Lookahead:
        """Implement `EmbeddingCollection.lookahead`. prefetched: for each of the first batches, steps until its use and
        the values that all ranks had fetched for it."""
        self.updates.apply_pending()
        rows = self.rows
        if rows.mesh.peer_monitor is not None:
            batches = rows.mesh.peer_monitor.watch_batches(batches)
        lookahead = Lookahead(
            batches if rows.cached is None else rows.cached.preview_batches(batches, self.views),
            BatchStages(self.prepare_batch, self.fetch_rows, self.drop_batch),
            LookaheadSettings(
                depth=rows.plan.lookahead,
                staleness_bounds=rows.staleness_bounds,
                is_alone=rows.mesh.num_ranks == 1,
                is_in_order=rows.cached is not None,
            ),
            self._signals,
            self.updates,
            prefetched,
        )
        self.updates.set_reader(lookahead)
        return lookahead

    def prepare_batch(
        self,
        batch: Batch,
        prefetched: tuple[int, Sequence[Mapping[str, Tensor]]] | None = None,
        *,
        caller: Caller = "lookahead",
    ) -> LookupContext:
        """Send a batch's ids; owners make its rows resident and pin them. prefetched: as in `lookahead`.

        While a lookahead closes, rows that have no room are skipped, and the context can only be dropped. Raises
        BudgetExceeded where memory has no room for the rows, IdRangeError and DataError for a batch that cannot be
        looked up."""
        context = self._send_ids(batch, caller)
        try:
            if self._pin_batch_rows(context) and prefetched is not None:
                context.steps_left, fetched = prefetched
                self.exchange.restore_prefetched(context, fetched)
        except BaseException:  # no other code can drop it
            self.drop_batch(context)
            raise
        return context

    def _pin_batch_rows(self, context: LookupContext) -> bool:
        """Pin a batch's rows; return False where a closing lookahead has no room for them."""
        owned = context.owned
        while True:
            releases = self.store.releases
            try:
                acquired: tuple[Tensor, Any] = self.store.acquire(
                    owned.ids, owned.offsets, owned.next_use
                )
                slots, job = acquired
                context.pinned = PinnedRows(slots)
                context.wait_for_rows = partial(self.store.wait, job)
                self.exchange.resolve_slots(context, self.store.views())
                return True
            except BudgetExceeded:
                # Rows of batches in flight may leave soon; not if training itself waits for this one.
                waiting = self._signals.starved.is_set()
                is_main = threading.current_thread() is threading.main_thread()
                if not (waiting or is_main):
                    self._signals.crowded.set()
                if self._signals.closing.is_set() and not waiting:
                    return False  # not an error: other ranks' threads wait for this one's ids
                was_released = self.store.wait_for_release(releases, 0.05)
                if is_main or (waiting and not was_released and self._signals.starved.is_set()):
                    raise

    def prepare_and_fetch(self, batch: Batch) -> LookupContext:
        """Prepare and fetch a batch that no lookahead prepared. Raises ConfigError where rows are read ahead."""
        if self.reads_ahead:
            raise ConfigError(
                "bounded staleness reads ahead: iterate over collection.lookahead(batches)"
            )
        context = self.prepare_batch(batch, caller="training")
        try:
            self.fetch_rows(context)
        except BaseException:  # no other code can drop it
            self.drop_batch(context)
            raise
        return context

    def fetch_rows(self, context: LookupContext, steps_left: int = 0) -> None:
        """Read, as they are now, rows of the parts to fetch `steps_left` steps before use:
        `Exchange.find_parts_to_fetch`."""
        context.steps_left = steps_left
        if not (part_numbers := self.exchange.find_parts_to_fetch(context)):
            return
        assert context.pinned is not None
        context.wait_for_rows()
        in_place = not self.reads_ahead
        source = RowSource(self.store.views(), context.pinned.slots, in_place)
        num_applied = self.steps.value - self.updates.num_pending
        self.exchange.fetch(context, part_numbers, source, num_applied)

    def fetch_for_evaluation(self, batch: Batch) -> LookupContext:
        """Fetch a batch for evaluation: it sees every update and changes nothing; any number of training batches may be
        in flight."""
        self.updates.apply_pending()
        context = self._send_ids(batch, "evaluation")
        values = self.store.read(context.owned.ids, context.owned.offsets)
        views = [
            RowView(rows.data_ptr(), table.width * table.itemsize, table.width, table.dtype)
            for rows, table in zip(values, self.store.tables, strict=True)
        ]
        numbers = [torch.arange(len(rows), dtype=torch.int32) for rows in values]
        source = RowSource(views, torch.cat(numbers), True, values)
        self.exchange.fetch(
            context, self.exchange.find_parts_to_fetch(context), source, self.steps.value
        )
        return context

    def _send_ids(self, batch: Batch, caller: Caller) -> LookupContext:
        """Send a batch's ids to the owners of the sharded tables."""
        views = self.views
        rows = batch
        split_batch = None
        if views.is_hashed:
            rows = views.prepare_ids(batch)
        if views.hot_ids:
            split_batch = views.split_hot(rows)
            rows = split_batch.batch
        context = self.exchange.send_ids(rows, caller)
        context.split_batch = split_batch
        if views.local_attention:
            context.sequence_offsets = views.sequence_offsets(batch)
        batch.world_weight = context.batch.weight
        return context

    def compute_outputs(
        self, context: LookupContext, handle: Tensor, device: torch.device
    ) -> dict[str, Tensor]:
        """Return the declared outputs of a batch that was fetched: see `Exchange.values`."""
        values = self.exchange.compute_outputs(context, handle, device)
        if self.views.has_declared_outputs:
            return values
        return self.views.merge_outputs(
            values,
            context.sequence_offsets,
            context.split_batch,
            context.batch.dense,
            self.exchange.consumers,
        )

    def send_gradients(self) -> None:
        """Send the gradients that backward recorded since the last step, before all ranks agree to apply them, so that
        sums of dense gradients overlap: see `StepGradients.send_gradients`.

        Not to servers if they may arrive late: what ranks agree on would wait behind them, on the same connections.
        `push_gradients` then sends them."""
        if not (self.rows.mesh.world.has_servers and self.gradients.may_arrive_late):
            self.gradients.send_gradients(self.steps.value)

    def push_gradients(self, optimizers: Tensor, settings: Tensor) -> None:
        """Send recorded gradients to the rows' owners, apply them once, release the rows.

        Where rows are read `LATE` or more steps ahead, the push only begins (`gradients.py`), unless gradients were
        waited for (clipping), or a policy or a cache needs each update at once. optimizers (P,) int32, settings
        (P, 16) float64 by declared part: see `_native.update`."""
        step = self.steps.value
        pushed, contexts = self.gradients.take_pushed(step)
        if self.views.is_cut:
            optimizers, settings = map(self.views.expand_by_part, (optimizers, settings))
        self.updates.apply_or_defer_update(
            Update(step, pushed, contexts, optimizers, settings.clone())
        )
        self.steps.value += 1
        self.rows.mesh.publish_step(self.steps.value)

    def discard_batches(self) -> None:
        """Drop every batch since the last step without applying it. Collective. A cache decides about the batches in
        flight again, as if the dropped ones had never been read."""
        self.gradients.discard_batches()
        if self.rows.cached is not None and (reader := self.updates.reader()) is not None:
            reader.prepare_again()

    def drop_copies(self) -> None:
        """Apply every update, and drop all cached rows, because rows will change otherwise. Collective, between
        steps. Raises as `cached_state.drop_copies`."""
        self.updates.apply_pending()
        cached = self.rows.cached
        if cached is not None and cached.number:
            if (reader := self.updates.reader()) is not None:
                reader.prepare_again()
            drop_copies(cached)

    def drop_batch(self, context: LookupContext) -> None:
        """Drop a prepared batch: unpin its rows and apply nothing."""
        self.exchange.drop(context)
        pinned = context.pinned
        context.finish()
        if pinned is not None:
            try:
                context.wait_for_rows()  # reads into their slots may still be running
            finally:
                self.store.release(pinned.slots, context.owned.offsets, dirty=False)
