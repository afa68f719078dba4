"""Updates under way: gradients that travel while the next step computes, applied before the read that sees them.

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

from torch import Tensor

from colonnade.exchange.exchange import Exchange
from colonnade.lookup.contract import LookupContext, Pushed, unique_owned
from colonnade.store.dram import DramStore
from colonnade.store.hbm import HbmStore
from colonnade.store.policies import RowPolicy, RowRetention


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
        gradients, contexts = update.pushed.arrive(), update.contexts
        if gradients is not None:
            for context in contexts:  # one whose values were restored was never fetched
                context.wait_for_rows()
            self.store.before_update(gradients.slots, gradients.offsets)
            self.exchange.update(self.store, gradients, update.optimizers, update.settings)
        for t, policy in self.policies.items():
            self._ask(policy, t, contexts, update.step)
        for context in contexts:
            self.store.release(context.slots_to_release, context.owned.offsets, dirty=True)
            context.finish()
            self.missed.update(context.missed(update.step))

    def _ask(self, policy: RowPolicy, t: int, contexts: Sequence[LookupContext], step: int) -> None:
        """The policy hears of the rows of table t that were just updated here, and names those to forget."""
        updated, where = unique_owned(contexts, t)
        clocks = self.store.clocks(t, where)
        if isinstance(policy, RowRetention) and policy.reads_norms:
            norms = self.exchange.squared_norms(self.store.views()[t], where)
            left = policy.forget(updated, clocks, step, norms)
        else:
            left = policy.forget(updated, clocks, step)
        self.store.delete(t, left.unique())
