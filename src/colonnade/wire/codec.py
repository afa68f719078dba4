"""Codecs of rows in messages: exact, 16 bits per element, or 8 bits per element and a scale.

Values (owner to requester) are rounded to nearest. Gradients (requester to owner) are rounded stochastically, to one of
two neighbours, the nearer one with the higher probability, so an owner's sums are unbiased. Random bits are the streams
of `ops.optimizers.round_stochastically`. They depend only on (seed, table, requester, id, step, column), so the same
world trains the same bits, whichever rank owns the rows.

A codec applies to every row of an exchange, including the rank's own rows: the values that a rank reads must not depend
on their owner. In a world of one nothing is sent, and nothing is encoded.

Error feedback (adding the rounding error of one message to the next) is for sums that recur at the same index, as dense
gradients do (wire/dense_sums.py), which are rounded to nearest. Rows have no residuals: a residual would take a row's
memory on every rank that ever requested the row, and would be added much later, at the next request. Stochastic
rounding needs none.

Each part of a row is encoded separately, because it has an optimizer and a magnitude of its own:
    exact   the elements
    bf16    2 bytes each, with the range of float32
    fp16    an exponent e (int16), then 2 bytes each: element * 2^-e, e such that the largest is in [2^13, 2^14):
            nothing overflows, and errors by underflow are below 2^-37 of the largest
    int8    a scale (float32), the largest / 127, then a byte each: element / scale
Finite elements stay finite: an element that would be rounded to inf is sent as the largest number of all codecs, 255 *
2^120, which is smaller by 2^-8 at most. A part with NaN or inf is not finite when decoded; in fp16 and int8 all its
elements may be affected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade import _native
from colonnade.plan.names import CodecName


@dataclass(frozen=True, slots=True)
class Codec:
    """Description of a codec. Errors are upper bounds relative to the largest element of a part, for rounding to
    nearest and stochastic rounding."""

    name: CodecName
    nearest_error: float
    random_error: float
    item_bytes: int  # of an element; 0 for exact: as the dtype has
    part_bytes: int  # of the header of a part

    def row_bytes(self, dims: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of bytes of an encoded row. dims: of its parts; dtype: of its elements."""
        item = self.item_bytes or dtype.itemsize
        return sum(dims) * item + len(dims) * self.part_bytes


# 0.1 % more than half a step and a step, because scales and quotients are rounded, too.
CODECS: dict[str, Codec] = {
    "exact": Codec("exact", 0.0, 0.0, 0, 0),
    "bf16": Codec("bf16", 2**-8, 2**-7, 2, 0),
    "fp16": Codec("fp16", 2**-11, 2**-10, 2, 2),
    "int8": Codec("int8", 0.5005 / 127, 1.001 / 127, 1, 4),
}


@dataclass(frozen=True, slots=True)
class RoundingKey:
    """Key of the random bits that a block of rows is rounded with."""

    ids: Tensor  # (n,) int64
    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Block of consecutive rows of one shape."""

    rows: int
    dims: tuple[int, ...]  # of the parts of a row, side by side

    def encoded_bytes(self, codec: Codec, dtype: torch.dtype) -> int:
        return self.rows * codec.row_bytes(self.dims, dtype)


def encode_elements(
    codec: Codec,
    elements: Tensor,
    blocks: Sequence[RowBlock],
    rounding_keys: Sequence[RoundingKey] | None = None,
) -> Tensor:
    """Encode the elements of all blocks, flat, to uint8. rounding_keys: by block; None: round to nearest."""
    if codec.name == "exact":
        return elements.view(torch.uint8)
    parts = elements.split([block.rows * sum(block.dims) for block in blocks])
    coded = []
    for i, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        if block.rows:
            rows = part.view(block.rows, -1)
            coded.append(
                encode_rows(
                    codec, rows, block.dims, rounding_keys[i] if rounding_keys else None
                ).view(-1)
            )
    return torch.cat(coded) if coded else torch.empty(0, dtype=torch.uint8)


def decode_elements(codec: Codec, data: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
    """Decode the result of `encode` into `out`, flat, rounded to its dtype."""
    if codec.name == "exact":
        out.view(torch.uint8).copy_(data)
        return
    parts = data.split([block.encoded_bytes(codec, out.dtype) for block in blocks])
    targets = out.split([block.rows * sum(block.dims) for block in blocks])
    for block, part, target in zip(blocks, parts, targets, strict=True):
        if block.rows:
            decoded = decode_rows(codec, part.view(block.rows, -1), block.dims)
            target.view(block.rows, -1).copy_(decoded)


def encode_rows(
    codec: Codec, rows: Tensor, dims: Sequence[int], rounding_key: RoundingKey | None
) -> Tensor:
    """Encode rows (n, sum of dims) to (n, row_bytes) uint8. Not for "exact"."""
    out = torch.empty(len(rows), codec.row_bytes(dims, rows.dtype), dtype=torch.uint8)
    ids, seed, step = (
        (None, 0, 0)
        if rounding_key is None
        else (rounding_key.ids, rounding_key.seed, rounding_key.step)
    )
    values = rows.float().contiguous()
    widths = torch.tensor(dims, dtype=torch.int32)
    _native.encode_rows(codec.name, values, widths, ids, seed, step, out)
    return out


def decode_rows(codec: Codec, data: Tensor, dims: Sequence[int]) -> Tensor:
    """Decode (n, row_bytes) uint8 to rows (n, sum of dims) float32. Not for "exact"."""
    values = torch.empty(len(data), sum(dims))
    widths = torch.tensor(dims, dtype=torch.int32)
    _native.decode_rows(codec.name, data.contiguous(), widths, values)
    return values
