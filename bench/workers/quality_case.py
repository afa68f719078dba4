"""One training of an arm of `bench quality`."""

from __future__ import annotations

from dataclasses import dataclass


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
