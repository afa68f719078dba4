"""*What* travels: how values get from owners to the samples that need them, and gradients back.

Who calls when, per training step t (every rank, in this order; one issuing thread per method):

    route    lookahead thread   ids of batch t travel to their owners
    fetch    training thread    values travel back (k steps before use under bounded staleness; k is a table's own)
    values   training thread    inside forward
    push     training thread    around RowOptimizer.step: applied once every rank agreed that all is finite, or, where
                                reads are early by two steps or more, after the next step, before reads that see it
    drop     any                instead of push: evaluation, cancelled batches

Legend: B samples, F features, T tables, E lookups of this rank, U unique rows of this rank,
O unique rows this rank owns and some rank asked for, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, device, nn

from colonnade.interaction import Interaction
from colonnade.store.contract import RowView

BY_TOWERS: tuple[Literal["towers", "tower_rows"], ...] = ("towers", "tower_rows")
"""Exchanges of which values of samples cross between towers alone."""
EVALUATING = ("substitute", *BY_TOWERS)
"""Exchanges that may evaluate consumers before values travel."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """`bitwise`: equals the reference bit for bit. `reassociated`: sums in another order.
    `lossy`: within `max_error`, relative to the largest value."""

    kind: Literal["bitwise", "reassociated", "lossy"]
    max_error: float = 0.0


BITWISE = Exactness("bitwise")
REASSOCIATED = Exactness("reassociated")


@dataclass(frozen=True, slots=True)
class Consumer:
    """An operator and the features it takes, in order. All of them pooled."""

    interaction: Interaction
    features: tuple[str, ...]


def queries_of(consumer: Consumer) -> tuple[str, ...]:
    """Fields whose values go to where rows of its sequences lie."""
    sequences = consumer.interaction.sequences
    return consumer.features[:-sequences] if sequences else ()


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where an owner finds the rows a ticket asks it for."""

    views: Sequence[RowView]  # by table
    rows: Tensor  # (O,) int32: row number in its table's view, in the order of `Ticket.owned_ids`
    in_place: bool  # the rows stay where they are and unchanged until `values`
    keep: Any = None  # whatever must stay alive with the addresses


@dataclass(frozen=True, slots=True)
class Asked:
    """One batch's lookups on this rank, checked: nothing has travelled yet."""

    size: int  # B
    messages: Sequence[Any]  # by rank, uint8 arrays: what it is asked for (world of one: [])
    lookups: Any  # the exchange's own


@dataclass(frozen=True, slots=True)
class ByPage:
    """A ticket's rows in the order in which they lie in memory, table by table, and what asked for each. Which order
    that is depends on who is resident: only what comes out the same in any order may follow it."""

    slots: Tensor  # (O,) int32
    segment_offsets: Tensor  # (O + 1,) int32
    entries: Tensor  # int32


@dataclass(slots=True)
class Ticket:
    """What `route` learned, needed by everything after it. Of several exchanges: `parts`, one for each; gradients are
    recorded, and rows of all of them acquired and released, here. Parts are lent gradients by `push`."""

    step: int
    batch_size: int
    lookups: Any  # exchange.layout.Lookups
    plan: Any  # _native.Plan of them
    owned_ids: Tensor  # (O,) int64, grouped by table
    owned_offsets: Tensor  # (T + 1,) int64
    owner_plan: Any  # _native.Plan: groups what all ranks asked this one for, by row
    weight: float  # sum of sample weights over all ranks' batches
    next_use: Tensor | None = (
        None  # (O,) uint8: `Batch.next_use` by row owned here, the soonest of its lookups
    )
    wire: Any = None  # the exchange's own layout of its buffers
    slots: Tensor | None = None  # (O,) int32 once acquired by the owner's store
    job: Any = None  # of that acquire: what to wait for before its rows are read or released
    placed: Tensor | None = None  # int32, `slots` by what was asked for, once `place` was called
    by_page: ByPage | None = None  # the same, and `owner_plan` as far as an update needs it
    reads: Any = None  # fetched values, exchange's own form
    dense: Tensor | None = None  # (B, n) of its batch, for operators that take such columns
    seen: int | None = (
        None  # updates applied when it was fetched; None: not yet, or a commit held it
    )
    steps_left: int = 0  # before its use, when `fetch` or `restore` is called
    bound: int = 0  # of one of several: steps that its rows are read ahead
    purpose: str = "route"  # the group it was routed on; "evaluate": nothing is trained of it
    is_done: bool = False  # its gradients were pushed, or it was dropped
    gradients: list[list[Tensor]] = field(default_factory=list)  # one list per backward
    versions: list[list[int]] = field(
        default_factory=list
    )  # of these tensors when they were recorded

    parts: Sequence[Ticket] = ()
    dealt: Any = None  # exchange.hot.Dealt, of a collection with hot rows
    offsets: Any = None  # of sequences that are attended to where samples are: exchange.slices

    @property
    def pinned(self) -> Tensor:
        """`slots`, of a ticket whose rows are acquired."""
        assert self.slots is not None
        return self.slots

    def recorded(self) -> Iterator[tuple[Sequence[Tensor], Sequence[int]]]:
        """Of each backward so far: gradients, and their versions when they were recorded."""
        return zip(self.gradients, self.versions, strict=True)

    @property
    def num_backwards(self) -> int:
        return len(self.gradients)

    def record(self, gradients: Sequence[Tensor]) -> None:
        """What a backward gave, by output. Kept as it is, not copied."""
        self.gradients.append(list(gradients))
        self.versions.append([gradient._version for gradient in gradients])

    def unread(self) -> list[Ticket]:
        """Itself, or parts of it, that neither `fetch` nor `restore` has given values."""
        return [each for each in self.parts or (self,) if each.reads is None]

    def missed(self, step: int) -> list[int]:
        """How many updates before `step` its reads did not see; one number for tables of one bound. Without what a
        commit held."""
        read = {(each.bound, each.seen) for each in self.parts or (self,)}
        return [step - seen for _, seen in read if seen is not None]

    def forget(self) -> None:
        """As if no backward had come."""
        for ticket in (self, *self.parts):
            ticket.gradients.clear()
            ticket.versions.clear()

    def close(self) -> None:
        """No backward may reach it any more."""
        for ticket in (self, *self.parts):
            ticket.is_done = True

    def finish(self) -> None:
        """Applied or dropped."""
        self.close()
        for ticket in (self, *self.parts):
            ticket.slots = None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """What an owner applies: per owned row (O,), a segment of entries into `source`, to be summed in order; or, of
    rows on a device, sums (device_kernels.Sums) without segments."""

    slots: Tensor  # (O,) int32
    offsets: Tensor  # (T + 1,) int64
    segment_offsets: Any  # (O + 1,) int32
    entries: Any  # int32
    source: Any  # _native.OutputGradients, _native.RowGradients or device_kernels.Sums
    keep: Any = None
    by_page: ByPage | None = None  # the same rows and segments, for an update


def touched(tickets: Sequence[Ticket], t: int) -> tuple[Tensor, Tensor]:
    """(ids (n,) int64, slots (n,) int32): rows of table t that these batches use, each once."""
    ids, slots = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int32)]
    for ticket in tickets:
        first, last = ticket.owned_offsets[t : t + 2].tolist()
        ids.append(ticket.owned_ids[first:last])
        slots.append(ticket.pinned[first:last])
    found, where = torch.cat(ids), torch.cat(slots)
    if len(tickets) > 1:
        _, first_of = np.unique(found.numpy(), return_index=True)
        found, where = found[first_of], where[first_of]
    return found, where


@dataclass(slots=True)
class Pushed:
    """Gradients on their way to their owners, and how many backwards they are of."""

    finish: Callable[[], RowGradients | None] | None
    """Of `Exchange.begin_push`; None: they have arrived."""
    recorded: int
    gradients: RowGradients | None = None

    def arrive(self) -> RowGradients | None:
        """Collective: once they have."""
        if self.finish is not None:
            self.gradients, self.finish = self.finish(), None
        return self.gradients


@dataclass(frozen=True, slots=True)
class Inside:
    """Consumers that the ranks of one tower alone evaluate."""

    size: int
    """Ranks of a tower, neighbours."""
    tower_of: Mapping[str, int]
    """By name."""


class Exchange(Protocol):
    """One rank's end. Every method but `place`, `values`, `hold` and `squared_norms` is collective in a world of
    several."""

    @property
    def exactness(self) -> Exactness: ...

    def route(self, batch: Any, step: int, *, purpose: str = "route") -> Ticket: ...

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        """Optional, any thread, once `slots` of these views are there: what of `fetch` and the update can be done
        ahead."""
        ...

    def fetch(self, ticket: Ticket, source: RowSource) -> None: ...

    def values(self, ticket: Ticket, handle: Tensor, device: device = ...) -> dict[str, Tensor]:
        """Collective where what a tower gathered early leaves it when it is used (`towers`, rows read ahead).

        By consumer: (B, P) combined; by feature without a consumer: (B, D) pooled or (E_f, D) sequence. They are
        made where the values are and moved to `device`, where consumers are evaluated.

        Differentiable: backward records (lookups, gradient) on the ticket. `handle` requires a gradient, so that
        torch runs that backward.
        """
        ...

    @property
    def pushed_parameters(self) -> Sequence[nn.Parameter]:
        """Dense parameters whose gradients `push` completes: the same on every rank. What it adds to `.grad` of each
        is of the global batch, on the rank that has the rows, so the sum over ranks is to be taken after it."""
        ...

    @property
    def inside(self) -> Inside | None:
        """Which consumers the ranks of one tower alone evaluate, so that gradients of their weights need be summed over
        these only; None: none."""
        ...

    def begin_push(self, tickets: Sequence[Ticket], step: int) -> Callable[[], RowGradients | None]:
        """Gradients recorded on the tickets -> sums at the owners, as one application: as far as nobody else is waited
        for, where that can be. What it returns does the rest; that, too, is collective, and may come after the next
        push has begun. None: nothing to do. step: updates made before, which codecs draw their random bits from."""
        ...

    def squared_norm(self, pushed: RowGradients) -> tuple[RowGradients, float]:
        """The sum of squares of all rows' summed gradients, and gradients that need not be summed again."""
        ...

    def update(
        self, store: Any, pushed: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        """Apply them to pinned rows of this rank's store: see `_native.update`."""
        ...

    def drop(self, ticket: Ticket) -> None: ...

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What a fetched ticket has read, for a commit: `restore` takes it in any world."""
        ...

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """Instead of `fetch`: what all ranks of some world held for this step's global batch."""
        ...

    def squared_norms(self, rows: RowView, slots: Tensor) -> Tensor:
        """(len(slots),) of rows that lie there: sums of squares of their weights."""
        ...
