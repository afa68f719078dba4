"""Thresholded messages in plain PyTorch: the definition of `_native.encode_thresholded` and `decode_thresholded`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST = (2 - 2**-7) * 2.0**127
"""The largest number of bfloat16."""


def encode_block(
    wanted: Tensor, threshold: float, num_slots: int, step: int
) -> tuple[Tensor, Tensor, int]:
    """Encode one block (n,) of finite float32: return its slots (num_slots,) int32, what it leaves out (n,), and the
    number of elements that pass."""
    passing = torch.nonzero((wanted.abs() >= threshold) & (wanted != 0)).flatten()
    sent = passing
    if len(passing) > num_slots:
        sent = passing.roll(-(step * num_slots % len(passing)))[:num_slots]
    values = wanted[sent].clamp(-MOST, MOST).bfloat16()
    slots = torch.zeros(num_slots, dtype=torch.int64)
    slots[: len(sent)] = (sent << 16) + (values.view(torch.int16).long() & 0xFFFF)
    unsent = wanted.clone()
    unsent[sent] -= values.float()
    slots = torch.where(slots >= 2**31, slots - 2**32, slots)
    return slots.int(), unsent, len(passing)


def encode(
    values: Tensor,
    residual: Tensor,
    scale: float,
    sizes: Sequence[int],
    slots: Sequence[int],
    thresholds: Sequence[float],
    step: int,
) -> tuple[Tensor, Tensor, list[int]]:
    """Encode values + residual * scale (n,): return the message, the new residual (n,), and what passes by block."""
    wanted = values + residual * scale
    if not bool((wanted / scale).isfinite().all() and wanted.isfinite().all()):
        message = torch.zeros(sum(slots), dtype=torch.int32)
        message[0] = 0x7FC0
        return message, residual.clone(), []
    blocks = [
        encode_block(block, *settings, step)
        for block, *settings in zip(wanted.split(list(sizes)), thresholds, slots, strict=True)
    ]
    messages, unsent, passed = zip(*blocks, strict=True)
    return torch.cat(messages), torch.cat(unsent) / scale, list(passed)


def decode(message: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Decode a message to values (n,)."""
    blocks = []
    for part, size in zip(message.split(list(slots)), sizes, strict=True):
        block = torch.zeros(size)
        offsets = (part.long() & 0xFFFFFFFF) >> 16
        block.index_add_(0, offsets, (part << 16).view(torch.float32))
        blocks.append(block)
    return torch.cat(blocks)
