"""One batch in an exchange of bags, and the hops that its values go over.

Legend: B samples of this rank, G of all ranks, W columns of what arrives, W_o of what this rank pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from colonnade.exchange.attention import Attended
from colonnade.exchange.operators import Partials
from colonnade.exchange.rows import RowsLookup
from colonnade.lookup.contract import PartLookup
from colonnade.lookup.fields import Columns
from colonnade.lookup.layout import Lookups
from colonnade.wire.transport import InnerTransport, LastTransport, PendingTransfer


@dataclass(slots=True)
class Evaluation:
    """What a rank keeps of a batch between sending values and their gradients."""

    pooled: Tensor | None = None  # (G, W_o), where owners evaluate operators
    partials: list[Partials] = field(default_factory=list)  # by turn
    versions: list[int] | None = None  # of the operators' weights then
    gathered: list[Tensor] | None = None  # by turn: what waits inside a tower for its use
    sequence_rows: list[Tensor] = field(default_factory=list)  # of attended sequences, (E, D)
    attended: dict[str, Attended] = field(default_factory=dict)  # by consumer
    row_gradients: dict[int, Tensor] = field(default_factory=dict)  # by field of such a sequence


@dataclass(slots=True)
class BagReads:
    """What the samples' rank reads: a transfer on its way, or all columns."""

    pending: PendingTransfer | None = None
    total: Tensor | None = None  # (B, W)


@dataclass(slots=True)
class BagsLookup(PartLookup):
    """One batch whose bags are pooled by owners. `lookups` are all ranks' of rows here; in a tower, all peers'."""

    sizes: list[int] = field(default_factory=list)  # samples by rank
    requested: Lookups | None = None  # of this rank's own samples
    reads: BagReads | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    inner: RowsLookup | None = None  # of rows that are requested once a tower


@dataclass(frozen=True, slots=True)
class InnerHop:
    """Hop that ends inside a tower."""

    transport: InnerTransport


@dataclass(frozen=True, slots=True)
class LastHop:
    """Hop that ends at the samples' ranks."""

    transport: LastTransport
    columns: Columns  # at its senders
    sent: Columns  # what they send: columns, or partials of some
