"""What a row looks like while it travels: as it is, in 16 bits an element, or in 8 and a scale.

Values (owner to requester) are rounded to nearest. Gradients (requester to owner) are rounded at random, to one of two
neighbours, the nearer the likelier, so that what an owner adds up is right on the mean. Random bits are the streams of
`ops.optimizers.round_at_random`: they depend on nothing but (seed, table, requester, id, step, column), so the same
world trains the same bits, whoever owns the rows.

A codec applies to every row that an exchange moves, those of the rank itself too: what a rank reads must not depend on
who owns it. In a world of one nothing travels, and nothing is encoded.

Error feedback (adding to the next message what rounding took from the last) is for sums that come again at the same
place, as dense gradients do (wire/coded_sums.py), which are rounded to nearest. Of rows no residual is kept: it would
take a row's memory on every rank that ever asked for the row, and be added long after, when the row is asked for again;
rounding at random needs none.

A part of a row (its own optimizer, its own magnitude) is encoded for itself:
    exact   the elements
    bf16    2 bytes each. Largest numbers: those of float32
    fp16    an exponent e (int16), then 2 bytes each: element * 2^-e, e such that the largest lies in [2^13, 2^14):
            nothing overflows, and what is lost by underflow is below 2^-37 of the largest
    int8    a scale (float32), the largest / 127, then a byte each: element / scale
Finite elements stay finite: instead of what would be rounded to inf, the largest number that all codecs have is sent,
255 * 2^120, less by 2^-8 at most. NaN and inf survive, in fp16 and int8 perhaps together with their part: a part with
any is not finite when decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from colonnade import _native

CodecName = Literal["exact", "bf16", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class Codec:
    """Pure description. Errors are relative to the largest element of a part: at most, to nearest and at random."""

    name: CodecName
    nearest_error: float
    random_error: float
    item_bytes: int  # exact: 0, as the elements have
    part_bytes: int  # before the elements of a part

    def row_bytes(self, dims: Sequence[int], dtype: torch.dtype) -> int:
        """dims: of its parts; dtype: of its elements."""
        item = self.item_bytes or dtype.itemsize
        return sum(dims) * item + len(dims) * self.part_bytes


# A thousandth more than half a step and a step: scales and quotients are rounded, too.
CODECS: dict[str, Codec] = {
    "exact": Codec("exact", 0.0, 0.0, 0, 0),
    "bf16": Codec("bf16", 2**-8, 2**-7, 2, 0),
    "fp16": Codec("fp16", 2**-11, 2**-10, 2, 2),
    "int8": Codec("int8", 0.5005 / 127, 1.001 / 127, 1, 4),
}


@dataclass(frozen=True, slots=True)
class Codecs:
    """One for each direction of rows, and one of the dense network's gradients; names of CODECS."""

    values: CodecName = "exact"
    gradients: CodecName = "exact"
    dense: CodecName = "exact"

    @property
    def is_exact(self) -> bool:
        """Of rows: what exchanges go by."""
        return self.values == self.gradients == "exact"


EXACT = Codecs()


@dataclass(frozen=True, slots=True)
class RoundingKey:
    """What the random bits of a block of rows depend on."""

    ids: Tensor  # (n,) int64
    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one shape, one after the other."""

    rows: int
    dims: tuple[int, ...]  # of the parts of a row, side by side

    def bytes_of(self, codec: Codec, dtype: torch.dtype) -> int:
        return self.rows * codec.row_bytes(self.dims, dtype)


def encode(
    codec: Codec,
    elements: Tensor,
    blocks: Sequence[RowBlock],
    rounding_keys: Sequence[RoundingKey] | None = None,
) -> Tensor:
    """elements: those of all blocks, flat -> uint8. draws: by block; None: to nearest."""
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


def decode(codec: Codec, data: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
    """What `encode` gave -> `out`, flat, rounded to its dtype."""
    if codec.name == "exact":
        out.view(torch.uint8).copy_(data)
        return
    parts = data.split([block.bytes_of(codec, out.dtype) for block in blocks])
    places = out.split([block.rows * sum(block.dims) for block in blocks])
    for block, part, place in zip(blocks, parts, places, strict=True):
        if block.rows:
            found = decode_rows(codec, part.view(block.rows, -1), block.dims)
            place.view(block.rows, -1).copy_(found)


def encode_rows(
    codec: Codec, rows: Tensor, dims: Sequence[int], rounding_key: RoundingKey | None
) -> Tensor:
    """rows (n, sum of dims) -> (n, row_bytes) uint8. Not for "exact"."""
    out = torch.empty(len(rows), codec.row_bytes(dims, rows.dtype), dtype=torch.uint8)
    ids, seed, step = (
        (None, 0, 0)
        if rounding_key is None
        else (rounding_key.ids, rounding_key.seed, rounding_key.step)
    )
    values, widths = rows.float().contiguous(), torch.tensor(dims, dtype=torch.int32)
    _native.encode_rows(codec.name, values, widths, ids, seed, step, out)
    return out


def decode_rows(codec: Codec, data: Tensor, dims: Sequence[int]) -> Tensor:
    """(n, row_bytes) uint8 -> (n, sum of dims) float32. Not for "exact"."""
    values = torch.empty(len(data), sum(dims))
    widths = torch.tensor(dims, dtype=torch.int32)
    _native.decode_rows(codec.name, data.contiguous(), widths, values)
    return values
