"""Exchange contract: values go from the ranks that own rows to the ranks that have samples, gradients the other way.

Calls per training step t (every rank, in this order; one issuing thread per method):

    send_ids      lookahead thread   ids of batch t are sent to their owners
    fetch         training thread    values are sent back (k steps before use under bounded staleness; a table's own k)
    values        training thread    inside forward
    begin_push    training thread    in RowOptimizer.step: applied once every rank agrees that all gradients are finite
                                     or, where reads are two or more steps ahead, after the next step, before reads that
                                     must see it
    drop          any                instead of a push: evaluated and cancelled batches

Legend: B samples, F features, T tables, E lookups of this rank, U unique rows of this rank,
O unique rows that this rank owns and some rank requested, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.lookup.hot import SplitBatch
from colonnade.lookup.layout import Lookups
from colonnade.lookup.row_layout import RowLayout
from colonnade.store.contract import RowView


@dataclass(frozen=True, slots=True)
class Exactness:
    """Exactness of an exchange's values. `bitwise`: equal to the reference bit for bit. `reassociated`: sums in another
    order. `lossy`: within `max_error`, relative to the largest value."""

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
    keep: Any = None  # objects that must live as long as the addresses are used


Caller = Literal["lookahead", "training", "evaluation"]
"""Code that looks a batch up: a lookahead ahead of its step, the training thread in its step, or an evaluation."""
ID_CHANNELS: Mapping[Caller, str] = {
    "lookahead": "route",
    # Not the channel of the lookahead's thread, whose order of calls must stay its own.
    "training": "control",
    "evaluation": "evaluate",
}
"""Channel that a batch's ids are sent on, by caller."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Facts of a batch that every exchange needs."""

    size: int  # B
    weight: float  # sum of sample weights over all ranks' batches
    caller: Caller = "lookahead"
    dense: Tensor | None = None  # (B, n), for operators that take such columns

    @property
    def channel(self) -> str:
        """Channel that its ids were sent on."""
        return ID_CHANNELS[self.caller]

    @property
    def is_evaluated(self) -> bool:
        """True if the batch is evaluated, not trained on."""
        return self.caller == "evaluation"


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of this rank that some rank's batch uses, each once, grouped by table."""

    ids: Tensor  # (O,) int64
    offsets: Tensor  # (T + 1,) int64
    next_use: Tensor | None = None  # (O,) uint8: the soonest `Batch.next_use` of a row's lookups


@dataclass(frozen=True, slots=True)
class ByPage:
    """Pinned rows in order of memory, table by table, and the requests for each. This order depends on which rows are
    resident, so use it only where results do not depend on the order."""

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
    """Lookup of one batch in one exchange of a plan."""

    batch: BatchInfo
    lookups: Lookups  # that this rank pools: of its samples or, where bags are sent, of all ranks'
    plan: _native.Plan  # of `lookups`
    owned: OwnedRows
    owner_plan: _native.Plan  # groups all ranks' requests for owned rows by row
    pinned: PinnedRows | None = None
    weight_versions: list[int] | None = None  # of operators' weights, when they were used

    @property
    def slots(self) -> Tensor:
        """Slots of the pinned rows, (O,) int32."""
        assert self.pinned is not None
        return self.pinned.slots

    def request_slots(self, source: RowSource) -> Tensor | None:
        """Return the slot of each request if it is known: if the source's rows are the pinned ones."""
        pinned = self.pinned
        return pinned.by_request if pinned is not None and source.rows is pinned.slots else None


@dataclass(slots=True)
class RecordedGradients:
    """Gradients that backward recorded for the outputs of one batch. References, not copies."""

    backwards: list[list[Tensor]] = field(default_factory=list)  # by backward, by output
    versions: list[list[int]] = field(default_factory=list)  # of these tensors when recorded
    factor: float = 1.0  # of their sums

    def record(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of one backward, by output."""
        self.backwards.append(list(gradients))
        self.versions.append([gradient._version for gradient in gradients])

    def check_unchanged(self) -> None:
        """Check that no recorded tensor was changed in place; else raise RuntimeError."""
        for gradients, versions in zip(self.backwards, self.versions, strict=True):
            if [gradient._version for gradient in gradients] != versions:
                raise RuntimeError(
                    "a gradient given to backward was changed in place before step(); rows keep no copy of "
                    "it: give backward a tensor of its own"
                )

    def sum(self, dtype: torch.dtype) -> list[Tensor] | None:
        """Return the sums over backwards by output, times `factor`, computed in `dtype` if there is something to
        compute; None without a backward."""
        if not self.backwards:
            return None
        if len(self.backwards) == 1 and self.factor == 1:
            return self.backwards[0]
        wide = [[part.to(dtype) for part in backward] for backward in self.backwards]
        return [sum(parts[1:], parts[0]) * self.factor for parts in zip(*wide, strict=True)]

    def clear(self) -> None:
        """Forget every backward."""
        self.backwards.clear()
        self.versions.clear()
        self.factor = 1.0


def _wait_for_nothing() -> None:
    pass


@dataclass(slots=True)
class LookupContext:
    """Context of one batch in flight, from sending its ids to the update of its rows."""

    batch: BatchInfo
    parts: Sequence[PartLookup]  # by exchange of the plan
    owned: OwnedRows  # of all parts
    split_batch: SplitBatch | None = None  # which lookups are of hot rows, where a table has some
    sequence_offsets: Mapping[str, Tensor] = field(default_factory=dict)  # by attended field
    pinned: PinnedRows | None = None
    wait_for_rows: Callable[[], None] = (
        _wait_for_nothing  # in their slots, before they are read or released
    )
    gradients: RecordedGradients = field(default_factory=RecordedGradients)
    updates_seen: dict[int, int] = field(default_factory=dict)
    """Number of updates applied when tables were fetched, by staleness bound; without values restored from a
    checkpoint."""
    steps_left: int = 0  # before its use, when it is fetched or restored
    is_done: bool = False  # its gradients were pushed, or it was dropped

    def count_missed(self, step: int) -> list[int]:
        """Return the number of updates before `step` that its reads did not see, one for each staleness bound."""
        return [step - num_seen for num_seen in self.updates_seen.values()]

    @property
    def slots_to_release(self) -> Tensor:
        """Pinned slots (O,), in order of memory if that is known."""
        assert self.pinned is not None
        pinned = self.parts[0].pinned if len(self.parts) == 1 else None
        return pinned.by_page.slots if pinned and pinned.by_page else self.pinned.slots

    def finish(self) -> None:
        """Refuse further backwards and forget the slots, after the batch was applied or dropped."""
        self.is_done = True
        self.pinned = None
        for part in self.parts:
            part.pinned = None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients that an owner applies: per owned row (O,), a segment of entries into `source`, to be summed in order;
    or, for rows on a device, `kernels.DeviceRowSums` without segments."""

    slots: Tensor  # (O,) int32
    offsets: Tensor  # (T + 1,) int64
    segment_offsets: Any  # (O + 1,) int32
    entries: Any  # int32
    source: Any  # _native.OutputGradients, _native.RowGradients or kernels.DeviceRowSums
    keep: Any = None
    by_page: ByPage | None = None  # the same rows and segments, for an update


def list_unique_owned_rows(
    contexts: Sequence[LookupContext], table_index: int
) -> tuple[Tensor, Tensor]:
    """Return (ids (n,) int64, slots (n,) int32) of the rows of one table that these batches use, each once."""
    ids = [torch.empty(0, dtype=torch.int64)]
    slots = [torch.empty(0, dtype=torch.int32)]
    for context in contexts:
        assert context.pinned is not None
        first, last = context.owned.offsets[table_index : table_index + 2].tolist()
        ids.append(context.owned.ids[first:last])
        slots.append(context.pinned.slots[first:last])
    all_ids = torch.cat(ids)
    all_slots = torch.cat(slots)
    if len(contexts) > 1:
        _, first_of = np.unique(all_ids.numpy(), return_index=True)
        all_ids = all_ids[first_of]
        all_slots = all_slots[first_of]
    return all_ids, all_slots


@dataclass(slots=True)
class Pushed:
    """Gradients that are being sent to their owners."""

    finish: Callable[[], RowGradients | None] | None
    """Result of `Exchange.begin_push`, which waits for them; None: they have arrived."""
    num_backwards: int
    gradients: RowGradients | None = None

    def wait_for_gradients(self) -> RowGradients | None:
        """Wait for the gradients, and return them. Collective."""
        if self.finish is not None:
            self.gradients = self.finish()
            self.finish = None
        return self.gradients


@dataclass(frozen=True, slots=True)
class TowerConsumers:
    """Consumers that only the ranks of one tower evaluate."""

    size: int
    """Number of ranks of a tower, which are neighbours."""
    tower_of: Mapping[str, int]
    """Index of the tower that evaluates a consumer, by its name."""


NO_TENSORS: Mapping[int, Tensor] = {}


class Kernels(Protocol):
    """Kernels of a step. Outputs and their gradients are stored where the rows are; messages are on the CPU."""

    def locate_rows(
        self,
        lookups: Lookups,
        row_views: Sequence[RowView],
        row_slots: Tensor,
        row_order: Tensor | None = None,
    ) -> Any:
        """Return the location of each lookup's row, for `pool`. row_slots: (E,) int32 slots. row_order: (E,) int32,
        all lookups in the order of their rows in memory, if it is known (`ByPage.entries`)."""
        ...

    def pool(
        self,
        lookups: Lookups,
        row_locations: Any,
        out_tensors: Mapping[int, Tensor] = NO_TENSORS,
    ) -> list[Tensor]:
        """Pool rows into one tensor per output: pooled fields side by side (B, width), or the rows of a sequence
        (E_f, dim). out_tensors: tensors to write fields into, by output, (B, width) on the CPU; columns of other
        parts are not changed."""
        ...

    def zero_outputs(self, lookups: Lookups) -> list[Tensor]:
        """Return zeros of the shapes of the outputs of `pool`."""
        ...

    def gather_message(
        self,
        row_source: RowSource,
        row_slots: Tensor,
        message_layout: RowLayout,
        requests: Any,
        message_out: Tensor | None = None,
    ) -> Tensor:
        """Gather whole rows into a message. row_slots: (P,) int32 slots of the rows of `requests`, rank by rank, table
        by table. message_out: a tensor on the CPU to write them to."""
        ...

    def gradients_from_outputs(self, lookup: PartLookup, gradients: list[Tensor]) -> RowGradients:
        """Return gradients of a lookup's pinned rows from gradients of its outputs, in a world of one. gradients:
        shaped as the result of `pool`; the result refers to them."""
        ...

    def sum_gradients_by_row(
        self, lookup: PartLookup, table_offsets: Tensor, gradients: list[Tensor]
    ) -> Any:
        """Sum gradients of a lookup's outputs by row of its plan, in the form that `cache.cached_rows.CachedRows` of
        the pooled rows takes. table_offsets: (T + 1,) of these rows by table."""
        ...

    def gradients_from_sums(
        self, slots: np.ndarray, counts: np.ndarray, sums: Any, is_selected: np.ndarray
    ) -> RowGradients:
        """Return sums of `sum_gradients_by_row` as gradients of the rows in `slots` (n,), table by table. counts: (T,)
        rows. is_selected: (T,) bool, tables to include. The result refers to the sums."""
        ...

    def merge_batches(
        self,
        part_lookups: Sequence[PartLookup],
        row_gradients: Sequence[RowGradients],
        row_slots: Tensor,
        lookup_plan: _native.Plan,
    ) -> RowGradients:
        """Merge gradients of several batches: sum each batch by row, and add the sums in the order of the
        batches. lookup_plan: of the owned rows of all batches, listed batch by batch; row_slots: by its unique
        rows."""
        ...

    def squared_norm(self, row_gradients: RowGradients) -> tuple[RowGradients, float]:
        """Return gradients that need not be summed again, and the sum of squares of all rows' sums."""
        ...

    def update(
        self, store: Any, row_gradients: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        """Apply gradients to pinned rows of `store`, and advance the rows' clocks: see `_native.update`."""
        ...

    def squared_norms(self, view: RowView, slots: Tensor) -> Tensor:
        """Return the sum of squares of each row's weights, (N,) float64 on the CPU. slots: (N,) int32."""
        ...
