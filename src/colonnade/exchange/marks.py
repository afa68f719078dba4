"""Marks of a message's rows, one bit for each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pack_marks(marks: np.ndarray, counts: np.ndarray) -> tuple[Tensor, list[int]]:
    """Pack marks (R,) bool of counts (N,) rows of each rank into bits, each rank's in bytes of its own.

    Returns the bytes (B,) uint8 and how many belong to each rank.
    """
    ends = counts.cumsum().tolist()
    parts = [np.packbits(marks[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]


def mark_bytes(counts: np.ndarray) -> list[int]:
    """Return the number of bytes of each rank that `pack_marks` makes of counts (N,)."""
    return (-(-counts // 8)).tolist()


def unpack_marks(data: Tensor, counts: np.ndarray) -> np.ndarray:
    """Unpack what `pack_marks` made: marks (R,) bool of counts (N,) rows of each rank."""
    firsts = [0, *np.cumsum(mark_bytes(counts)).tolist()]
    marks, sizes = data.numpy(), counts.tolist()
    bits = [np.unpackbits(marks[a:], count=n) for a, n in zip(firsts, sizes, strict=False)]
    return np.concatenate(bits).view(bool)
