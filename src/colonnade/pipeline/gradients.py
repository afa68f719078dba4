"""Gradients of a step: recorded by backward, sent to the rows' owners, then taken back or applied; and updates under
way, whose gradients travel while the next step computes, applied before the read that sees them.

    synchronous, bounded(1)   step t pushes, waits, applies; the next read sees it
    bounded(k), k >= 2        step t begins to push; step t+1 computes; then t is applied, and what sees updates <= t
                              and no other is read, for step t+1+k: these values travel while step t+2 computes

Which updates a read sees is the bound's alone (PERSIA, Lian et al. 2021, hides pushes likewise, and bounds what reads
miss from above). As many rows are pinned either way: the line of batches that were read is one shorter while an update
is under way.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from colonnade.comm.mesh import Mesh
from colonnade.exchange.exchange import Exchange
from colonnade.lookup.contract import LookupContext, Pushed, unique_owned
from colonnade.lookup.outputs import all_finite
from colonnade.store.dram import DramStore
from colonnade.store.hbm import HbmStore
from colonnade.store.policies import RowPolicy, RowRetention


class StepGradients:
    """Batches since the last step, and what backward gave for them. Training thread."""

    def __init__(
        self,
        exchange: Exchange,
        mesh: Mesh,
        drop: Callable[[LookupContext], None],
        *,
        may_arrive_late: bool,
    ) -> None:
        """drop: gives a batch up. may_arrive_late: `collect` need not wait for gradients to arrive at owners."""
        self.exchange, self.mesh = exchange, mesh
        self.contexts: list[LookupContext] = []
        self.pushed: Pushed | None = None
        self._drop = drop
        self._may_arrive_late = may_arrive_late

    def are_finite(self) -> bool:
        """Return whether every gradient recorded on this rank is finite."""
        for context in self.contexts:
            for gradients in context.gradients.backwards:
                for part in gradients:
                    if not all_finite(part):
                        return False
        return True

    def has_recorded(self) -> list[float]:
        """Return by batch 1 where it has had a backward on this rank, else 0."""
        return [float(bool(context.gradients.backwards)) for context in self.contexts]

    def collect(self, step: int) -> Pushed:
        """Collective: send what backward recorded since the last step to the rows' owners. It has arrived there, unless
        it may arrive late. Completes the gradients of `exchange.pushed_parameters`.

        Once per step: an update then applies it. step: updates made before. Raises RuntimeError if a backward came in
        between, or a gradient was changed in place.
        """
        num_backwards = 0
        for context in self.contexts:
            context.gradients.check()
            num_backwards += len(context.gradients.backwards)
        if self.pushed is None:
            self.pushed = Pushed(self.exchange.begin_push(self.contexts, step), num_backwards)
            if not self._may_arrive_late:
                self.pushed.arrive()
        elif self.pushed.num_backwards != num_backwards:
            raise RuntimeError(
                "backward was called after the gradients were clipped; clip between the last backward "
                "and step()"
            )
        return self.pushed

    def squared_norm(self, step: int) -> float:
        """Collective: return the sum of squares of all rows' summed gradients, over all ranks. step: as `collect`."""
        pushed, square = self.collect(step), 0.0
        if (gradients := pushed.arrive()) is not None:
            pushed.gradients, square = self.exchange.squared_norm(gradients)
        total = torch.tensor([square], dtype=torch.float64)
        return float(self.mesh.all_reduce("push", total, counts_as="control"))

    def hand_over(self, step: int) -> tuple[Pushed, list[LookupContext]]:
        """Collective: return what `collect` does, and the batches it is of; the next step begins without any."""
        pushed, contexts = self.collect(step), self.contexts
        self.contexts, self.pushed = [], None
        return pushed, contexts

    def take_back(self) -> None:
        """Collective: do not apply what `collect` sent since the last step."""
        pushed, self.pushed = self.pushed, None
        if pushed is not None:
            pushed.arrive()

    def clear(self) -> None:
        """Collective: forget recorded gradients; the batches stay."""
        self.take_back()
        for context in self.contexts:
            context.gradients.clear()

    def drop_unused(self, is_used: Sequence[float]) -> None:
        """Collective: drop the batches since the last step that no rank had a gradient for. is_used: by batch, how many
        ranks had."""
        if self.pushed is not None:
            self.take_back()
        if all(is_used):
            return
        contexts, self.contexts = self.contexts, []
        for context, count in zip(contexts, is_used, strict=True):
            if count:
                self.contexts.append(context)
            else:
                self._drop(context)

    def forget(self) -> None:
        """Collective: drop every batch since the last step without applying it."""
        self.drop_unused([0.0] * len(self.contexts))


@dataclass(frozen=True, slots=True)
class Update:
    """What a step pushed, and how it is applied."""

    step: int
    """Updates before it."""
    pushed: Pushed
    contexts: Sequence[LookupContext]
    optimizers: Tensor  # (P,) int32
    settings: Tensor  # (P, 16) float64, its own


class Reader(Protocol):
    """Who reads what landed updates changed (`data.lookahead`)."""

    def catch_up(self) -> None:
        """Collective: reads are made that were put off until updates had landed."""
        ...


class Updates:
    """Those of one collection, each applied once, in order. Training thread alone; collective where some are under
    way."""

    def __init__(
        self,
        exchange: Exchange,
        store: DramStore | HbmStore,
        policies: Mapping[int, RowPolicy],
        missed: Counter[int],
    ) -> None:
        """missed: counts updates that reads missed, once each batch was applied."""
        self.exchange, self.store, self.policies, self.missed = exchange, store, policies, missed
        self.underway: deque[Update] = deque()  # oldest first
        self._reader: Callable[[], Reader | None] = lambda: None

    def __len__(self) -> int:
        """Of those under way."""
        return len(self.underway)

    def read_by(self, reader: Reader) -> None:
        """From here on."""
        self._reader = weakref.ref(reader)

    def make(self, update: Update) -> None:
        """Apply it after all others: now, where its gradients have arrived, else in `land`. No backward may reach its
        batches any more."""
        if update.pushed.finish is None:
            if self.underway:
                self.settle()
            self._apply(update)
            return
        self.underway.append(update)
        for context in update.contexts:
            context.is_done = True

    def land(self, count: int) -> int:
        """Apply the oldest that are under way. Returns how many are left."""
        for _ in range(count):
            self._apply(self.underway.popleft())
        return len(self.underway)

    def settle(self) -> None:
        """None is under way any more, and reads were made that must not see the newest: for whoever looks at rows
        beside the reader."""
        if self.underway:
            if (reader := self._reader()) is not None:
                reader.catch_up()
            self.land(len(self.underway))

    def _apply(self, update: Update) -> None:
        """Wait for its gradients, sum and update, release the rows."""
        contexts, pushed = update.contexts, update.pushed
        gradients = pushed.gradients if pushed.finish is None else pushed.arrive()
        if gradients is not None:
            for context in contexts:  # one whose values were restored was never fetched
                context.wait_for_rows()
            self.store.before_update(gradients.slots, gradients.offsets)
            self.exchange.update(self.store, gradients, update.optimizers, update.settings)
        for t, policy in self.policies.items():
            self._apply_policy(policy, t, contexts, update.step)
        for context in contexts:
            self.store.release(context.slots_to_release, context.owned.offsets, dirty=True)
            context.finish()
            self.missed.update(context.missed(update.step))

    def _apply_policy(
        self, policy: RowPolicy, t: int, contexts: Sequence[LookupContext], step: int
    ) -> None:
        """The policy hears of the rows of table t that were just updated here, and names those to forget."""
        updated, where = unique_owned(contexts, t)
        clocks = self.store.clocks(t, where)
        if isinstance(policy, RowRetention) and policy.reads_norms:
            norms = self.exchange.squared_norms(self.store.views()[t], where)
            forgotten_ids = policy.forget(updated, clocks, step, norms)
        else:
            forgotten_ids = policy.forget(updated, clocks, step)
        self.store.delete(t, forgotten_ids.unique())
