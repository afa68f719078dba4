"""Gradients of a step: recorded by backward, sent to the rows' owners, then applied or dropped.

An update is pending while its gradients are sent, as the next step computes. It is applied before the first read that
must see it.

    synchronous, bounded(1)   step t pushes, waits, applies; the next read sees it
    bounded(k), k >= 2        step t begins to push; step t+1 computes; then t is applied, and values that see updates
                              <= t and no other are read for step t+1+k; they are sent while step t+2 computes

Only the bound decides which updates a read sees. (PERSIA, Lian et al. 2021, hides pushes in the same way, and bounds
from above how many updates a read misses.) The number of pinned rows is the same in all cases: while an update is
pending, the delay line of fetched batches is one shorter.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from colonnade.comm.mesh import Mesh
from colonnade.exchange.exchange import Exchange
from colonnade.lookup.contract import LookupContext, Pushed, list_unique_owned_rows
from colonnade.lookup.outputs import all_finite
from colonnade.store.contract import Resident
from colonnade.store.policies import RowPolicy, RowRetention

MAX_BATCHES_BEFORE_FIRST_STEP = 100  # from which a loop seems to have forgotten its RowOptimizer


class StepGradients:
    """Batches since the last step, and the gradients that backward recorded for them. Training thread only."""

    def __init__(
        self,
        exchange: Exchange,
        mesh: Mesh,
        drop: Callable[[LookupContext], None],
        *,
        may_arrive_late: bool,
    ) -> None:
        """Begin without any batch. drop: drops a batch. may_arrive_late: `send_gradients` need not wait until gradients
        have arrived at the owners."""
        self.exchange = exchange
        self.mesh = mesh
        self.contexts: list[LookupContext] = []
        self.pushed: Pushed | None = None
        self._drop = drop
        self.may_arrive_late = may_arrive_late
        self._has_stepped = False

    def add_batch(self, context: LookupContext) -> None:
        """Add a batch to those since the last step. Warns of a loop that never makes a step."""
        self.contexts.append(context)
        if len(self.contexts) == MAX_BATCHES_BEFORE_FIRST_STEP and not self._has_stepped:
            warnings.warn(
                f"got {len(self.contexts)} batches and no step of a RowOptimizer, so that no row was trained, and "
                "the batches stay in memory: call rows = RowOptimizer(model.embeddings) once, and rows.step() after "
                "each backward; batches that are only scored belong under model.eval() or torch.no_grad()",
                stacklevel=2,
            )

    def are_finite(self) -> bool:
        """Return whether every gradient recorded on this rank is finite."""
        for context in self.contexts:
            for gradients in context.gradients.backwards:
                for part in gradients:
                    if not all_finite(part):
                        return False
        return True

    def has_recorded(self) -> list[float]:
        """Return, by batch, 1 if it had a backward on this rank, else 0."""
        return [float(bool(context.gradients.backwards)) for context in self.contexts]

    def send_gradients(self, step: int) -> Pushed:
        """Send the gradients that backward recorded since the last step to the rows' owners. Collective.

        They have arrived when it returns, unless `may_arrive_late`. Completes the gradients of
        `exchange.pushed_parameters`. Sends once per step; an update then applies them. step: updates made before.
        Raises RuntimeError if backward was called after the first call, or a gradient was changed in place.
        """
        num_backwards = 0
        for context in self.contexts:
            context.gradients.check_unchanged()
            num_backwards += len(context.gradients.backwards)
        if self.pushed is None:
            self.pushed = Pushed(self.exchange.begin_push(self.contexts, step), num_backwards)
            if not self.may_arrive_late:
                self.pushed.wait_for_gradients()
        elif self.pushed.num_backwards != num_backwards:
            raise RuntimeError(
                "backward was called after the gradients were clipped; clip between the last backward "
                "and step()"
            )
        return self.pushed

    def compute_squared_norm(self, step: int) -> float:
        """Return the sum of squares of all rows' summed gradients, over all ranks. Collective. step: as
        `send_gradients`."""
        pushed = self.send_gradients(step)
        square = 0.0
        if (gradients := pushed.wait_for_gradients()) is not None:
            pushed.gradients, square = self.exchange.compute_squared_norm(gradients)
        total = torch.tensor([square], dtype=torch.float64)
        return float(self.mesh.all_reduce("push", total, traffic_tag="control"))

    def take_pushed(self, step: int) -> tuple[Pushed, list[LookupContext]]:
        """Return the pushed gradients of `send_gradients` and their batches; the next step begins without any.
        Collective."""
        pushed = self.send_gradients(step)
        contexts = self.contexts
        self.contexts = []
        self.pushed = None
        self._has_stepped = True
        return pushed, contexts

    def discard_pushed(self) -> None:
        """Discard the gradients that `send_gradients` sent since the last step. Collective."""
        pushed = self.pushed
        self.pushed = None
        if pushed is not None:
            pushed.wait_for_gradients()

    def clear(self) -> None:
        """Forget recorded gradients; keep the batches. Collective."""
        self.discard_pushed()
        for context in self.contexts:
            context.gradients.clear()

    def drop_unused_batches(self, is_batch_used: Sequence[float]) -> None:
        """Drop the batches since the last step that no rank recorded a gradient for. Collective. is_batch_used: by
        batch, the number of ranks that recorded one."""
        if self.pushed is not None:
            self.discard_pushed()
        if all(is_batch_used):
            return
        contexts = self.contexts
        self.contexts = []
        for context, count in zip(contexts, is_batch_used, strict=True):
            if count:
                self.contexts.append(context)
            else:
                self._drop(context)

    def discard_batches(self) -> None:
        """Drop every batch since the last step without applying it. Collective."""
        self.drop_unused_batches([0.0] * len(self.contexts))


@dataclass(frozen=True, slots=True)
class Update:
    """Pushed gradients of a step, and how they are applied."""

    step: int
    """Number of updates before it."""
    pushed: Pushed
    contexts: Sequence[LookupContext]
    optimizers: Tensor  # (P,) int32
    settings: Tensor  # (P, 16) float64, a copy of the update's own


class Reader(Protocol):
    """Reader of rows that updates change (`pipeline.lookahead`)."""

    def make_postponed_reads(self) -> None:
        """Make the reads that were postponed until updates were applied. Collective."""
        ...

    def prepare_again(self) -> None:
        """Prepare the batches after the current one again. Collective."""
        ...


class Updates:
    """Pending updates of one collection, each applied once, in order. Training thread only; methods are collective
    while an update is pending."""

    def __init__(
        self,
        exchange: Exchange,
        store: Resident,
        policies: Mapping[int, RowPolicy],
        missed: Counter[int],
    ) -> None:
        """Begin without a pending update. missed: counts, by applied batch, the updates that its reads missed."""
        self.exchange = exchange
        self.store = store
        self.policies = policies
        self.missed = missed
        self.pending: deque[Update] = deque()  # oldest first
        self.reader: Callable[[], Reader | None] = lambda: None

    @property
    def num_pending(self) -> int:
        """Number of pending updates; 0 where a bound is less than `lookahead.LATE`."""
        return len(self.pending)

    def set_reader(self, reader: Reader) -> None:
        """Set the reader that catches up before updates are applied out of its turn."""
        self.reader = weakref.ref(reader)

    def apply_or_defer_update(self, update: Update) -> None:
        """Apply an update after all earlier ones: now if its gradients have arrived, else in `apply_oldest`. Its
        batches accept no further backward."""
        if update.pushed.finish is None:
            if self.pending:
                self.apply_pending()
            self._apply_update(update)
            return
        self.pending.append(update)
        for context in update.contexts:
            context.is_done = True

    def apply_oldest(self, count: int) -> None:
        """Apply the `count` oldest pending updates."""
        for _ in range(count):
            self._apply_update(self.pending.popleft())

    def apply_all(self) -> None:
        """Apply every pending update. Called by the reader alone: others call `apply_pending`."""
        self.apply_oldest(self.num_pending)

    def apply_pending(self) -> None:
        """Apply every pending update, after the reads that must not see the newest one. Called before anything but the
        reader reads or changes rows."""
        if self.pending:
            if (reader := self.reader()) is not None:
                reader.make_postponed_reads()
            self.apply_all()

    def _apply_update(self, update: Update) -> None:
        """Wait for an update's gradients, sum and apply them, release the rows."""
        contexts = update.contexts
        pushed = update.pushed
        gradients = pushed.gradients if pushed.finish is None else pushed.wait_for_gradients()
        if gradients is not None:
            for context in contexts:  # one whose values were restored was never fetched
                context.wait_for_rows()
            self.store.before_update(gradients.slots, gradients.offsets)
            self.exchange.apply_gradients(self.store, gradients, update.optimizers, update.settings)
        for t, policy in self.policies.items():
            self._apply_retention_policy(policy, t, contexts, update.step)
        for context in contexts:
            self.store.release(context.slots_to_release, context.owned.offsets, dirty=True)
            context.finish()
            self.missed.update(context.count_missed(update.step))

    def _apply_retention_policy(
        self, policy: RowPolicy, table_index: int, contexts: Sequence[LookupContext], step: int
    ) -> None:
        """Pass the rows of table t that were just updated on this rank to the policy, and delete those it forgets."""
        updated, where = list_unique_owned_rows(contexts, table_index)
        clocks = self.store.clocks(table_index, where)
        if isinstance(policy, RowRetention) and policy.reads_norms:
            norms = self.exchange.squared_norms(self.store.views()[table_index], where)
            forgotten_ids = policy.select_rows_to_delete(updated, clocks, step, norms)
        else:
            forgotten_ids = policy.select_rows_to_delete(updated, clocks, step)
        self.store.delete(table_index, forgotten_ids.unique())
