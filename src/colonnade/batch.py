"""What flows: one mini-batch of samples, on the CPU, as the reader hands it over.

Legend: B samples, n dense columns, E lookups of one feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of one feature for a whole batch.

    One-hot: `offsets` is None and `values` is (B,). Otherwise sample i owns
    `values[offsets[i]:offsets[i + 1]]`; `offsets` starts at 0, never decreases and ends at E.
    """

    values: Tensor  # (E,) int64
    offsets: Tensor | None = None  # (B + 1,) int64
    weights: Tensor | None = None  # (E,) float: multiplies each looked-up row before pooling


@dataclass(slots=True)
class Batch:
    """`sample_weight` (B,) scales each sample's loss; `key` is what metrics join on and never enters the model."""

    size: int  # B
    dense: Tensor  # (B, n) float32; n may be 0
    ids: Mapping[str, Ids]  # by feature name
    label: Tensor | None = None  # (B, tasks) float32
    sample_weight: Tensor | None = None  # (B,) float32
    group: Tensor | None = None  # (B,) int64: for per-group metrics
    key: Any = None
    position: Any = None  # data.contract.Position of this batch in its source
    state: Any = None  # of its source behind this batch, where the source has one: Position.state
    # By feature name, (E,) uint8 by lookup: how many batches from now the id is next looked up. 0: unknown; 255: never
    # again; else code c: 2^((c - 1) / 8) batches at most. `data.next_use` makes them; choosing who leaves memory uses
    # them, in a world of one rank.
    next_use: Mapping[str, Tensor] | None = None
    ends_epoch: bool = False  # the last one of its epoch
    ticket: Any = field(
        default=None, repr=False
    )  # exchange.contract.Ticket once its ids have travelled
    foreseen: Any = field(
        default=None, repr=False
    )  # exchange.foreseeing.Seen until then, where a cache is told of coming batches
    held: Any = None  # (steps until its use, reads that a resumed run must use instead of fetching)
    world_weight: float = (
        0.0  # sum of sample weights over all ranks' batches of this step, once known
    )
