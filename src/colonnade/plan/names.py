"""Choices that settings and plans name: memories, codecs, and what settings fix of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it imports torch, which settings do without
    from colonnade.topology.sharding import Kind

Tier = Literal["dram", "mapped"]
"""Memory of a table's rows: main memory, or mapped files on byte-addressable memory."""
CacheTier = Literal["dram", "hbm"]
"""Memory of row caches: main memory, or that of each rank's device."""
CodecName = Literal["exact", "bf16", "fp16", "int8"]
"""Encoding of rows or gradients in messages."""


@dataclass(frozen=True, slots=True)
class Thresholding:
    """Thresholded sums of the dense network's gradients (wire/thresholded.py)."""

    keep: float
    """Share of the elements that a message has, after the warm-up."""
    keep_steps: int
    """Steps of the warm-up, in which the share falls from 25 % to `keep`."""
    adam_weight_decay: float | None = None
    """Messages have the directions of Adam with this weight decay; None: gradients."""

    def __str__(self) -> str:
        return (
            f"thresholded ({100 * self.keep:g} % of the elements from step {self.keep_steps:,} on)"
        )


DenseCodec = CodecName | Thresholding
"""Encoding of the dense network's gradients in messages."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on one table from the configuration; None: the planner chooses."""

    kind: Kind | None = None
    exchange: Any = None
    """Name of the exchange."""
    ranks: tuple[int, ...] | None = None
