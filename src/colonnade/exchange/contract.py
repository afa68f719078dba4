"""Contract of one exchange of a plan, on one rank, and lookups whose rows are fetched.

`lookup/contract.py` has the order of the calls, and their values.

Legend: T tables, U unique rows of this rank, B samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.exchange.operators import Operators
from colonnade.exchange.row_owner import RowOwner
from colonnade.lookup.contract import (
    BatchInfo,
    Caller,
    Exactness,
    Kernels,
    PartLookup,
    RowGradients,
    RowSource,
)
from colonnade.lookup.layout import EmbeddingDeclaration, Lookups, Output
from colonnade.lookup.row_layout import RowLayout
from colonnade.store.contract import RowView


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Request of one batch on this rank, checked, before anything is sent."""

    messages: Sequence[np.ndarray]  # by rank, uint8: the request to it (world of one: [])
    lookups: Lookups
    plan: _native.Plan | None  # of `lookups`, where this rank needs one
    codes: Tensor | None = None  # (U,) uint8: `Batch.next_use` by unique row of the plan


Lookup = TypeVar("Lookup", bound=PartLookup)


class ExchangePart(ABC, Generic[Lookup]):
    """Part of a plan's exchange, on one rank, for the tables that use it. Methods are collective in a world of several
    unless they are called local; `Exchange` calls them on every rank in one order."""

    declaration: EmbeddingDeclaration
    """Declaration of these tables and their features."""
    outputs: tuple[Output, ...]
    exactness: Exactness
    owner: RowOwner
    operators: Operators | None = None
    """Operators of the consumers that are evaluated before values reach the samples' ranks."""
    counts_norm: bool = True
    """True if this rank's sums count towards the gradient norm; where all ranks have the same sums, on one rank
    only."""

    @abstractmethod
    def build_requests(self, batch: Batch, caller: Caller) -> LookupRequest:
        """Check a batch, and build its requests. Local. Every error of a batch is raised by this method: IdRangeError,
        DataError, NonFiniteError."""

    @abstractmethod
    def serve_requests(
        self, request: LookupRequest, received_requests: Sequence[np.ndarray], batch: BatchInfo
    ) -> Lookup:
        """Serve all ranks' requests: plan the owned rows that they need. Local, but collective inside a tower where
        rows are requested once a tower. received_requests: by rank, the message of its `build_requests` to this one
        (world of one: []). Raises WorldError for any other message."""

    @abstractmethod
    def resolve_slots(self, lookup: Lookup, row_views: Sequence[RowView]) -> None:
        """Find the slots that `fetch` and the update use, once `lookup.pinned` is set. Local, any thread."""

    @abstractmethod
    def fetch(self, lookup: Lookup, row_source: RowSource) -> None:
        """Begin to send values to the samples' ranks. Rows are read before it returns."""

    @abstractmethod
    def pooled(self, lookup: Lookup, out_tensors: Mapping[int, Tensor] = ...) -> list[Tensor]:
        """Return one tensor per output from the fetched values. out_tensors: tensors to write this part's fields
        into, by output that other parts have fields of, too. Collective where a tower sends its values when they are
        used."""

    @abstractmethod
    def begin_push(
        self, lookup: Lookup, output_gradients: list[Tensor] | None, step: int, batch_index: int
    ) -> Callable[[], RowGradients]:
        """Begin to send gradients (by output; None: zeros) to the rows' owners. Call the result, which is collective
        too, to wait for the gradients of owned rows, even after the next push has begun. step: updates made before;
        batch_index: index of the batch in its step; both seed the codecs' random bits."""

    @abstractmethod
    def drop(self, lookup: Lookup) -> None:
        """Drop a batch: wait for its pending transfers, and forget them."""

    def prefetched(self, lookup: Lookup) -> dict[str, Tensor]:
        """Return the fetched values for a checkpoint; `restore` accepts them in any world. By default there are none:
        such a part is never read ahead."""
        return {}

    def restore(
        self, lookup: Lookup, rank_prefetched_values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Restore, instead of a `fetch`, the values that all ranks of some world had prefetched for this step's global
        batch. Raises CheckpointError."""

    @abstractmethod
    def has_values(self, lookup: Lookup) -> bool:
        """Return whether the batch was fetched or restored. Local."""

    def cancel(self, request: LookupRequest) -> None:
        """Undo the decisions of the newest request, which will not be used; by default there are none. Local."""

    def after_update(self, optimizer_kinds: Tensor, settings_by_part: Tensor) -> None:
        """Do what follows the update of owned rows; by default nothing. Local. Arguments as of `_native.update`."""


@dataclass(frozen=True, slots=True)
class RowMessages:
    """Layouts of a batch's messages of rows."""

    wanted: RowLayout  # this rank's unique rows, by owner
    served: RowLayout  # rows requested from this rank, by requester
    wanted_index: Tensor  # (U,) int32 element of each unique row
    served_index: Tensor  # (P,) int32 element of each row requested from this rank
    requests: (
        _native.Lookups
    )  # all ranks' requests to this one: a one-hot feature per (rank, table)


@dataclass(slots=True)
class FetchedRows:
    """Addresses that `pooled` reads the row of each lookup from."""

    kernels: Kernels
    locations: Any  # the kernels' own
    keep: Any  # objects that must live as long
    arrival: Callable[[], None] | None = None  # to wait for first
    index: Tensor | None = None
    """Element of `keep` that each unique row begins with, (U,) int32, where rows were copied."""

    def wait(self) -> None:
        """Wait until the rows have arrived."""
        if self.arrival is not None:
            self.arrival()
            self.arrival = None


@dataclass(slots=True)
class FetchedRowsLookup(PartLookup):
    """Lookup of one batch that this rank pools from fetched rows."""

    reads: FetchedRows | None = None


@dataclass(slots=True)
class RowsLookup(FetchedRowsLookup):
    """Lookup of one batch whose rows are sent to the ranks that look them up."""

    messages: RowMessages | None = None  # None in a world of one, until something is copied
