"""Exchange contract: how values get from the ranks that own rows to the samples that need them, and gradients back.

Who calls when, per training step t (every rank, in this order; one issuing thread per method):

    send_ids      lookahead thread   ids of batch t are sent to their owners
    fetch         training thread    values are sent back (k steps before use under bounded staleness; a table's own k)
    values        training thread    inside forward
    begin_push    training thread    around RowOptimizer.step: applied once every rank agreed that all is finite, or,
                                     where reads are early by two steps or more, after the next step, before reads that
                                     see it
    drop          any                instead of a push: evaluation, cancelled batches

Legend: B samples, F features, T tables, E lookups of this rank, U unique rows of this rank,
O unique rows this rank owns and some rank asked for, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.lookup.hot import Dealt
from colonnade.lookup.layout import Declaration, Lookups, Output
from colonnade.store.contract import RowView


@dataclass(frozen=True, slots=True)
class Exactness:
    """`bitwise`: equals the reference bit for bit. `reassociated`: sums in another order.
    `lossy`: within `max_error`, relative to the largest value."""

    kind: Literal["bitwise", "reassociated", "lossy"]
    max_error: float = 0.0


BITWISE = Exactness("bitwise")
REASSOCIATED = Exactness("reassociated")


@dataclass(frozen=True, slots=True)
class RowSource:
    """Memory that a fetch reads owned rows from."""

    views: Sequence[RowView]  # by table
    rows: Tensor  # (O,) int32: row number in its table's view, in the order of `OwnedRows.ids`
    in_place: bool  # the rows stay where they are and unchanged until `values`
    keep: Any = None  # whatever must stay alive with the addresses


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Facts of a batch that every exchange needs."""

    size: int  # B
    weight: float  # sum of sample weights over all ranks' batches
    purpose: str = "route"  # group that its ids were sent on
    dense: Tensor | None = None  # (B, n), for operators that take such columns

    @property
    def is_evaluated(self) -> bool:
        """Whether nothing is trained on it."""
        return self.purpose == "evaluate"


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One batch's checked lookups on this rank, before anything is sent."""

    messages: Sequence[np.ndarray]  # by rank, uint8: what it is asked for (world of one: [])
    lookups: Lookups
    plan: _native.Plan | None  # of `lookups`, where this rank needs one
    codes: Any = None  # `Batch.next_use` by lookup or unique row
    transfer: Any = None  # cache.transfer.CacheTransfer of a cached table


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of this rank that some rank's batch uses, each once, grouped by table."""

    ids: Tensor  # (O,) int64
    offsets: Tensor  # (T + 1,) int64
    next_use: Tensor | None = None  # (O,) uint8: the soonest `Batch.next_use` of a row's lookups


@dataclass(frozen=True, slots=True)
class ByPage:
    """Pinned rows in the order in which they lie in memory, table by table, and the requests for each. That order
    depends on which rows are resident: only what comes out the same in any order may follow it."""

    slots: Tensor  # (O,) int32
    segment_offsets: Tensor  # (O + 1,) int32
    entries: Tensor  # int32


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """Slots of the owned rows in this rank's store, pinned until the batch is applied or dropped."""

    slots: Tensor  # (O,) int32
    by_request: Tensor | None = None  # int32: `slots` by request, once resolved
    by_page: ByPage | None = None  # for the update


@dataclass(slots=True)
class PartLookup:
    """One batch in one exchange of a plan."""

    batch: BatchInfo
    lookups: Lookups  # that this rank pools: its samples', or where bags are sent, all ranks'
    plan: _native.Plan  # of `lookups`
    owned: OwnedRows
    owner_plan: _native.Plan  # groups all ranks' requests for owned rows by row
    pinned: PinnedRows | None = None
    weight_versions: list[int] | None = None  # of operators' weights, when they were used

    @property
    def slots(self) -> Tensor:
        """(O,) int32 of the pinned rows."""
        assert self.pinned is not None
        return self.pinned.slots

    def slots_of(self, source: RowSource) -> Tensor | None:
        """Return the slot of each request where that is known: the source's rows are the pinned ones."""
        pinned = self.pinned
        return pinned.by_request if pinned is not None and source.rows is pinned.slots else None


@dataclass(slots=True)
class RecordedGradients:
    """Gradients that backward gave for the outputs of one batch. Kept as they are, not copied."""

    backwards: list[list[Tensor]] = field(default_factory=list)  # by backward, by output
    versions: list[list[int]] = field(default_factory=list)  # of these tensors when recorded

    def record(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of one backward, by output."""
        self.backwards.append(list(gradients))
        self.versions.append([gradient._version for gradient in gradients])

    def check(self) -> None:
        """Raise RuntimeError where a recorded tensor was changed in place."""
        for gradients, versions in zip(self.backwards, self.versions, strict=True):
            if [gradient._version for gradient in gradients] != versions:
                raise RuntimeError(
                    "a gradient given to backward was changed in place before step(); rows keep no copy of "
                    "it: give backward a tensor of its own"
                )

    def sum(self, dtype: torch.dtype) -> list[Tensor] | None:
        """Return the sums over backwards, by output; several are added in `dtype`. None: there was no backward."""
        if len(self.backwards) < 2:
            return self.backwards[0] if self.backwards else None
        wide = [[part.to(dtype) for part in backward] for backward in self.backwards]
        return [sum(parts[1:], parts[0]) for parts in zip(*wide, strict=True)]

    def clear(self) -> None:
        """Forget every backward."""
        self.backwards.clear()
        self.versions.clear()


def _wait_for_nothing() -> None:
    pass


@dataclass(slots=True)
class LookupContext:
    """One batch in flight, from its ids' way to the owners to the update of its rows."""

    batch: BatchInfo
    parts: Sequence[PartLookup]  # by exchange of the plan
    owned: OwnedRows  # by all of them
    hot: Dealt | None = None  # which lookups are of hot rows, where a table has some
    sequence_offsets: Mapping[str, Tensor] = field(default_factory=dict)  # by attended field
    pinned: PinnedRows | None = None
    wait_for_rows: Callable[[], None] = (
        _wait_for_nothing  # in their slots, before they are read or released
    )
    gradients: RecordedGradients = field(default_factory=RecordedGradients)
    updates_seen: dict[int, int] = field(default_factory=dict)
    """By staleness bound: updates applied when its tables were fetched; nothing of what a commit held."""
    steps_left: int = 0  # before its use, when it is fetched or restored
    is_done: bool = False  # its gradients were pushed, or it was dropped

    def missed(self, step: int) -> list[int]:
        """Return by staleness bound how many updates before `step` its reads did not see."""
        return [step - num_seen for num_seen in self.updates_seen.values()]

    @property
    def slots_to_release(self) -> Tensor:
        """Pinned slots (O,), in the order of memory where that is known."""
        assert self.pinned is not None
        pinned = self.parts[0].pinned if len(self.parts) == 1 else None
        return pinned.by_page.slots if pinned and pinned.by_page else self.pinned.slots

    def finish(self) -> None:
        """Let no backward reach it, and forget its slots: it was applied or dropped."""
        self.is_done = True
        self.pinned = None
        for part in self.parts:
            part.pinned = None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """What an owner applies: per owned row (O,), a segment of entries into `source`, to be summed in order; or, of
    rows on a device, sums (device_kernels.Sums) without segments."""

    slots: Tensor  # (O,) int32
    offsets: Tensor  # (T + 1,) int64
    segment_offsets: Any  # (O + 1,) int32
    entries: Any  # int32
    source: Any  # _native.OutputGradients, _native.RowGradients or kernels.Sums
    keep: Any = None
    by_page: ByPage | None = None  # the same rows and segments, for an update


def unique_owned(contexts: Sequence[LookupContext], t: int) -> tuple[Tensor, Tensor]:
    """Return (ids (n,) int64, slots (n,) int32) of the rows of table t that these batches use, each once."""
    ids, slots = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int32)]
    for context in contexts:
        assert context.pinned is not None
        first, last = context.owned.offsets[t : t + 2].tolist()
        ids.append(context.owned.ids[first:last])
        slots.append(context.pinned.slots[first:last])
    all_ids, all_slots = torch.cat(ids), torch.cat(slots)
    if len(contexts) > 1:
        _, first_of = np.unique(all_ids.numpy(), return_index=True)
        all_ids, all_slots = all_ids[first_of], all_slots[first_of]
    return all_ids, all_slots


@dataclass(slots=True)
class Pushed:
    """Gradients on their way to their owners."""

    finish: Callable[[], RowGradients | None] | None
    """Of `Exchange.begin_push`; None: they have arrived."""
    num_backwards: int
    gradients: RowGradients | None = None

    def arrive(self) -> RowGradients | None:
        """Collective: wait for them."""
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


Lookup = TypeVar("Lookup", bound=PartLookup)


class ExchangePart(Protocol[Lookup]):
    """One exchange of a plan, on one rank, for the tables that it is chosen for. Methods are collective in a world of
    several unless they say otherwise; `Exchange` calls them on every rank in one order."""

    declaration: Declaration
    """The features of these tables."""
    outputs: tuple[Output, ...]
    exactness: Exactness
    owner: Any  # exchange.row_owner.RowOwner
    operators: Any  # exchange.operators.Operators, where some consumers are evaluated on the way; else None
    counts_norm: bool
    """Whether this rank's sums count towards the gradient norm: once where all ranks have the same."""

    @property
    def cancel(self) -> Callable[[LookupRequest], None] | None:
        """Local: undo what the newest request decided; it will not be used, served or not. None: nothing to undo."""

    @property
    def after_update(self) -> Callable[[Tensor, Tensor], None] | None:
        """Local: called with optimizers and settings (`_native.update`) once owned rows were updated. None: nothing."""

    def build_requests(self, batch: Batch, purpose: str) -> LookupRequest:
        """Local: check a batch; everything that can be wrong with it is noticed here. Raises IdRangeError, DataError,
        NonFiniteError."""
        ...

    def serve_requests(
        self, request: LookupRequest, received: Sequence[np.ndarray], batch: BatchInfo
    ) -> Lookup:
        """Local, but collective inside a tower where rows are requested once a tower. received: by rank, what its
        `build_requests` made for this one (world of one: []). Raises WorldError for any other message."""
        ...

    def resolve_slots(self, lookup: Lookup, views: Sequence[RowView]) -> None:
        """Local, any thread: prepare what `fetch` and the update can use, once `lookup.pinned` is set."""
        ...

    def fetch(self, lookup: Lookup, source: RowSource) -> None:
        """Begin to send values to the samples' ranks. Rows are read before it returns."""
        ...

    def pooled(self, lookup: Lookup, into: Mapping[int, Tensor] = ...) -> list[Tensor]:
        """Return one tensor per output, of what was fetched. into: by output that other exchanges have fields of, too,
        the tensor to write this one's fields into. Collective where a tower's values leave it when they are used."""
        ...

    def begin_push(
        self, lookup: Lookup, gradients: list[Tensor] | None, step: int, number: int
    ) -> Callable[[], RowGradients]:
        """Begin to send gradients (by output; None: zeros) to the rows' owners; what it returns ends that, collective,
        too, and may be called after the next push has begun. step: updates made before, number: of the batch in its
        step, which codecs draw their random bits from."""
        ...

    def drop(self, lookup: Lookup) -> None:
        """Give a batch up: wait for what is on its way, forget it."""
        ...

    def prefetched(self, lookup: Lookup) -> dict[str, Tensor]:
        """Return what was fetched, for a commit: `restore` takes it in any world."""
        ...

    def restore(self, lookup: Lookup, held: Sequence[Mapping[str, Tensor]]) -> None:
        """Take instead of a `fetch` what all ranks of some world held for this step's global batch. Raises
        CheckpointError."""
        ...

    def has_values(self, lookup: Lookup) -> bool:
        """Local: whether it was fetched or restored."""
        ...
