"""One training of an arm of `bench quality`, and the tower modules of `bench quality` and `bench towers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOWER_SETTINGS: dict[str, dict[str, Any]] = {
    "dlrm": {"tower_vectors": 0, "tower_summaries": 2},
    "dcnv2": {"tower_layers": 1, "cross_rank": 32},
}
"""Settings of each model's tower modules. DLRM's modules output vectors of all fields of a tower: with one vector for
each field, the model could do what a flat one of narrower rows can, whatever fields are in a tower."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings that every arm is trained with.

    seed: of first values, and of the order of samples where that is random. samples: of a stream. lr: of rows, where a
    pilot chose it. is_pilot: on other samples, fewer.
    """

    seed: int
    samples: int = 0
    lr: float = 0.0
    is_pilot: bool = False
    is_quick: bool = False
