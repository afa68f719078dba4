"""*What* travels: how values get from owners to the samples that need them, and gradients back.

Who calls when, per training step t (every rank, in this order; one issuing thread per method):

    route    lookahead thread   ids of batch t travel to their owners
    fetch    training thread    row values leave the owners (k steps before use under bounded staleness)
    values   training thread    inside forward
    push     training thread    inside RowOptimizer.step, after every rank agreed that all is finite
    drop     any                instead of push: evaluation, cancelled batches

Legend: B samples, F features, T tables, E lookups of this rank, U unique rows of this rank,
O unique rows this rank owns and some rank asked for, N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, device

from colonnade import _native
from colonnade.interaction import Interaction
from colonnade.store.contract import RowView
from colonnade.topology.world import World


@dataclass(frozen=True, slots=True)
class Exactness:
    """`bitwise`: equals the reference bit for bit. `reassociated`: sums in another order.
    `lossy`: within `max_error`, relative to the largest value."""

    kind: Literal["bitwise", "reassociated", "lossy"]
    max_error: float = 0.0


BITWISE = Exactness("bitwise")


@dataclass(frozen=True, slots=True)
class Consumer:
    """An operator and the features it takes, in order. All of them pooled."""

    interaction: Interaction
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where an owner finds the rows a ticket asks it for."""

    views: Sequence[RowView]  # by table
    rows: Tensor  # (O,) int32: row number in its table's view, in the order of `Ticket.owned_ids`
    in_place: bool  # the rows stay where they are and unchanged until `values`
    keep: Any = None  # whatever must stay alive with the addresses


@dataclass(slots=True)
class Ticket:
    """What `route` learned, needed by everything after it."""

    step: int
    batch_size: int
    lookups: _native.Lookups
    plan: _native.Plan
    feature_offsets: Tensor  # (F + 1,) int64: lookups by feature
    owned_ids: Tensor  # (O,) int64, grouped by table
    owned_offsets: Tensor  # (T + 1,) int64
    owner_plan: (
        _native.Plan
    )  # groups what all ranks asked this one for, by row; world of one: `plan`
    weight: float  # sum of sample weights over all ranks' batches
    rows_out: list[int]  # by rank: unique rows it asked of me (world of one: [])
    rows_in: list[int]  # by rank: unique rows I asked of it
    wire: Any = None  # the exchange's own layout of its buffers
    slots: Tensor | None = None  # (O,) int32 once acquired by the owner's store
    placed: Tensor | None = None  # int32, `slots` by what was asked for, once `place` was called
    reads: Any = None  # fetched values, exchange's own form
    is_done: bool = False  # applied or dropped: its rows are not pinned any more
    gradients: list[list[Tensor]] = field(default_factory=list)  # one list per backward
    versions: list[list[int]] = field(
        default_factory=list
    )  # of these tensors when they were recorded

    @property
    def pinned(self) -> Tensor:
        """`slots`, of a ticket whose rows are acquired."""
        assert self.slots is not None
        return self.slots


@dataclass(frozen=True, slots=True)
class RowGradients:
    """What an owner applies: per owned row (O,), a segment of entries into `source`, to be summed in order."""

    slots: Tensor  # (O,) int32
    offsets: Tensor  # (T + 1,) int64
    segment_offsets: Any  # (O + 1,) int32
    entries: Any  # int32
    source: _native.OutputGradients | _native.RowGradients
    keep: Any = None


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch asks for, by table, as a mean over measured batches; what `cost` predicts from."""

    unique_rows: Mapping[str, float]  # per rank and batch
    unique_rows_remote: Mapping[str, float]  # of those, owned by other ranks
    row_bytes: Mapping[str, int]  # weights only


@dataclass(frozen=True, slots=True)
class Cost:
    """Per rank and step. Payload only; interfaces add protocol overhead."""

    payload_bytes: Mapping[str, float]  # by purpose: route, fetch, push
    messages: int
    seconds: float


class Exchange(Protocol):
    exactness: Exactness

    def route(self, batch: Any, step: int, *, purpose: str = "route") -> Ticket: ...

    def place(self, ticket: Ticket) -> None:
        """Optional, any thread, once `slots` are there: what of `fetch` can be done ahead."""
        ...

    def fetch(self, ticket: Ticket, source: RowSource) -> None: ...

    def values(self, ticket: Ticket, handle: Tensor, device: device = ...) -> dict[str, Tensor]:
        """By consumer: (B, P) combined; by feature without a consumer: (B, D) pooled or (E_f, D) sequence. They are
        made on the CPU and moved to `device`, where consumers are evaluated.

        Differentiable: backward records (lookups, gradient) on the ticket. `handle` requires a gradient, so that
        torch runs that backward.
        """
        ...

    def push(self, tickets: Sequence[Ticket]) -> RowGradients | None:
        """Gradients recorded on the tickets -> sums at the owners, as one application. None: nothing to do."""
        ...

    def summed(self, pushed: RowGradients) -> tuple[RowGradients, Tensor]:
        """The same gradients with each row's entries added up, and the buffer that holds exactly those sums."""
        ...

    def drop(self, ticket: Ticket) -> None: ...

    def cost(self, load: Load, world: World) -> Cost:
        """Pure."""
        ...
