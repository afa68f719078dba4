"""Rows as they travel, in plain PyTorch: the definition of `_native.encode_rows` and `_native.decode_rows`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.ops.optimizers import draw_rounding_bits, round_stochastically
from colonnade.wire.codec import Codec, RoundingKey

MOST = (2 - 2**-7) * 2.0**127
"""The largest number of 8 binary digits, which every codec has."""


def encode_rows(codec: Codec, rows: Tensor, dims: Sequence[int], key: RoundingKey | None) -> Tensor:
    """rows (n, sum of dims) -> (n, row_bytes) uint8. Not for "exact"."""
    coded, column = [], 0
    for dim in dims:
        part = rows[:, column : column + dim].float().contiguous()
        largest = part.abs().amax(1) if dim else part.new_zeros(len(part))
        is_finite = largest.isfinite()
        part = torch.where(is_finite[:, None], part.clamp(-MOST, MOST), part)
        largest = torch.where(is_finite, largest.clamp(max=MOST), largest)
        if codec.name == "bf16":
            coded.append(_bytes(_halves(part, torch.bfloat16, key, column)))
        elif codec.name == "fp16":
            exponents = torch.where(largest.isfinite(), torch.frexp(largest).exponent - 14, 0)
            exponents = exponents.clamp(min=-126)
            scaled = torch.ldexp(part, -exponents[:, None])
            coded.append(_bytes(exponents.short()[:, None]))
            coded.append(_bytes(_halves(scaled, torch.float16, key, column)))
        else:
            scales = largest / 127
            steps = part / scales[:, None]
            if key is None:
                steps = steps.round()
            else:
                random = draw_rounding_bits(
                    key.ids, _steps(key), key.seed, dim, first_column=column
                )
                steps = (steps + random.float() * 2**-16).floor()
            is_odd = ~scales.isfinite()[:, None]  # one step of inf or NaN
            steps = torch.where(scales[:, None] > 0, steps, 0.0).clamp(-127, 127)
            steps = torch.where(is_odd, 1.0, steps)
            coded += [_bytes(scales[:, None]), _bytes(steps.to(torch.int8))]
        column += dim
    return torch.cat(coded, 1)


def decode_rows(codec: Codec, data: Tensor, dims: Sequence[int]) -> Tensor:
    """Decode rows (n, row_bytes) uint8 -> (n, sum of dims) float32. Not for "exact"."""
    results, begin = [], 0
    for dim in dims:
        head = data[:, begin : begin + codec.part_bytes]
        begin += codec.part_bytes
        body = data[:, begin : begin + dim * codec.item_bytes]
        begin += dim * codec.item_bytes
        if codec.name == "bf16":
            results.append(_as(body, torch.bfloat16, dim).float())
        elif codec.name == "fp16":
            exponents = _as(head, torch.int16, 1).int()
            results.append(torch.ldexp(_as(body, torch.float16, dim).float(), exponents))
        else:
            results.append(_as(body, torch.int8, dim).float() * _as(head, torch.float32, 1))
    return torch.cat(results, 1)


def _halves(part: Tensor, dtype: torch.dtype, key: RoundingKey | None, column: int) -> Tensor:
    if key is None:
        return part.to(dtype)
    return round_stochastically(part, key.ids, _steps(key), key.seed, dtype, first_column=column)


def _steps(key: RoundingKey) -> Tensor:
    return torch.full_like(key.ids, key.step)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _as(data: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """View bytes that may begin anywhere as (n, dim)."""
    return data.contiguous().flatten().clone().view(dtype).view(len(data), dim)
