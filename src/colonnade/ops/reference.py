"""Definition of the native operations in plain PyTorch, one function each, which tests compare them with.

The functions on rows and gradients take tensors of any device and compute on rows in a device's memory. The optimizers
are in `optimizers`.

Results equal the native ones bit for bit: sums are made in the order written here, every operation rounds once, nothing
is fused. Words are int64 tensors with the bits of uint64.

Legend: B samples, E lookups, U unique rows, N rows, D dim.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

GOLDEN = 0x9E3779B97F4A7C15

Pooling = Literal["sum", "mean", "sequence", "sqrtn"]


def mix64(x: Tensor) -> Tensor:
    """Mix 64-bit words by the finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection, 0 -> 0."""
    x = (x ^ _shift(x, 30)) * _word(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _word(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def initial_values(
    ids: Tensor,
    dim: int,
    seed: int,
    uniform_scale: float,
    dtype: torch.dtype,
    *,
    first_column: int = 0,
) -> Tensor:
    """Return the first weights (N, D) of D columns of rows from `first_column` on, uniform in [-scale, scale).

    Column j of the row is word j + 1 of the splitmix64 stream that starts at mix64(mix64(id) ^ seed): its top 24 bits
    (float64: 53) as a number u in [-1, 1), exactly, times scale. 16-bit rows are float32 ones, rounded to nearest.
    """
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    bits = 53 if dtype == torch.float64 else 24
    start = mix64(mix64(ids) ^ _word(seed))
    words = mix64(
        start[:, None] + torch.arange(first_column + 1, first_column + dim + 1) * _word(GOLDEN)
    )
    u = _shift(words, 64 - bits).to(computed) * 2.0 ** (1 - bits) - 1
    return (u * torch.tensor(uniform_scale, dtype=computed)).to(dtype)


def split_masters(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into (high bfloat16, low int16): the bits are (high << 16) + low.

    So high is the master rounded to nearest, halfway away from zero, because low is at most 2^15 - 1.
    """
    bits = masters.view(torch.int32)
    return (bits + 0x8000 >> 16).short().view(torch.bfloat16), bits.short()


def join(highs: Tensor, lows: Tensor) -> Tensor:
    """Join the parts that `split` returned."""
    return ((highs.view(torch.int16).int() << 16) + lows).view(torch.float32)


def ordered_sum(terms: Tensor, segment_offsets: Tensor) -> Tensor:
    """Sum segments (S, D): terms[offsets[s]] + ... + terms[offsets[s + 1] - 1], one after the other; empty ones: zeros.

    Works on any device: torch gives each element of a sum a thread of its own, which adds the terms in order.
    """
    if not len(terms) or len(segment_offsets) == 1:
        return terms.new_zeros(len(segment_offsets) - 1, terms.shape[1])
    # Start at -0.0, which changes no first term, not even -0.0.
    sums = torch.segment_reduce(
        terms.contiguous(), "sum", offsets=segment_offsets.long(), axis=0, unsafe=True, initial=-0.0
    )
    return sums.masked_fill_((segment_offsets.diff() == 0)[:, None], 0.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of `dtype` are computed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pool(
    rows: Tensor,  # (E, D): the values that each lookup of one feature reads
    offsets: Tensor | None,  # (B + 1,): lookups of each sample; unused for a sequence
    pooling: Pooling,
    weights: Tensor | None = None,  # (E,) of the compute dtype
    dtype: torch.dtype | None = None,  # of the result; None: the compute dtype
) -> Tensor:
    """Pool rows into bags: (B, D), or (E, D) for a sequence.

    A bag is summed in lookup order, then divided by its length n (mean) or by sqrt(n) (sqrtn). Computed in the compute
    dtype, then rounded once, to nearest.
    """
    rows = rows.to(compute_dtype(rows.dtype))
    values = rows if weights is None else rows * weights[:, None]
    if pooling != "sequence":
        assert offsets is not None
        values = ordered_sum(values, offsets)
    if pooling in ("mean", "sqrtn"):
        assert offsets is not None
        lengths = offsets.diff().clamp(min=1).to(values.dtype)
        values = values / (lengths if pooling == "mean" else _sqrt(lengths))[:, None]
    return values if dtype is None else values.to(dtype)


def lookup_gradients(
    gradients: Tensor,  # (B, D) or (E, D): of the result of `pool`
    offsets: Tensor | None,  # (B + 1,); unused for a sequence
    pooling: Pooling,
    weights: Tensor | None = None,  # (E,) of the compute dtype
    *,
    num_lookups: int | None = None,  # E, if known: saves a synchronization with a device
) -> Tensor:
    """Return the gradients (E, D) of lookups, in the compute dtype: coefficient * gradient of the lookup's output.

    The coefficient is the lookup's weight (1 without weights) times 1 / n (mean) or 1 / sqrt(n) (sqrtn), n the length
    of its bag: root, reciprocal and product each rounded to the compute dtype.
    """
    terms = gradients.to(compute_dtype(gradients.dtype))
    if pooling == "sequence":
        return terms if weights is None else terms * weights[:, None]
    assert offsets is not None
    lengths = offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=num_lookups)
    coefficients = terms.new_ones(len(bags)) if weights is None else weights
    if pooling in ("mean", "sqrtn"):
        divisors = lengths.to(terms.dtype)
        shares = 1 / (divisors if pooling == "mean" else _sqrt(divisors))
        coefficients = coefficients * shares[bags]
    return terms[bags] * coefficients[:, None]


def sum_rows(
    terms: Tensor,  # (E, D)
    segment_offsets: Tensor,  # (U + 1,)
    entries: Tensor,  # (E,)
    is_read: Tensor | None = None,  # (E,) bool, by lookup: False adds nothing
) -> Tensor:
    """Sum the entries' terms of each unique row, (U, D), in entry order."""
    if is_read is not None:
        selected = is_read[entries.long()]
        before = functional.pad(selected.cumsum(0), (1, 0))
        segment_offsets = before[segment_offsets.long()]
        entries = entries[selected]
    return ordered_sum(terms[entries.long()], segment_offsets)


def squared_norm(values: Tensor) -> float:
    """Return the sum of squares in float64: blocks of 2^16 elements, added in order.

    Inside a block element i goes to lane i mod 32, then the lanes are added as a tree (lane i + lane i + half, and
    again).
    """
    flat = functional.pad(values.flatten().double(), (0, -values.numel() % 2**16))
    lanes = (flat * flat).view(-1, 32)
    ends = torch.arange(0, len(lanes) + 1, 2**16 // 32, device=values.device)
    sums = ordered_sum(lanes, ends)  # (blocks, 32)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return float(ordered_sum(sums, torch.tensor([0, len(sums)], device=values.device)))


def pack(weights: Tensor, state: Tensor, clocks: Tensor, lows: Tensor | None = None) -> Tensor:
    """Build records (N, record_bytes) uint8: weights (N, D) | state (N, S) of the compute dtype | low halves (N, D) if
    split | clock (N,) as 64 bits; little-endian."""
    parts = (weights, state, *([] if lows is None else [lows]), clocks.reshape(-1, 1))
    return torch.cat([_as(part, torch.uint8) for part in parts], dim=1)


def unpack(
    records: Tensor, dim: int, state_elements: int, dtype: torch.dtype, *, is_split: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Unpack records to weights (N, D), state (N, S), clocks (N,) int64 and, if split, low halves (N, D) int16."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    widths = [dim * dtype.itemsize, state_elements * computed.itemsize, 2 * dim * is_split, 8]
    parts = records.split(widths, dim=1)
    weights, state, lows, clocks = map(_as, parts, (dtype, computed, torch.int16, torch.int64))
    return weights, state, clocks[:, 0], lows if is_split else None


def _sqrt(values: Tensor) -> Tensor:
    """Return correctly rounded roots; torch's may be off by one bit on the CPU."""
    return (
        torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()
    )


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of each row (N, n) as elements of another type."""
    return (
        rows.flatten()
        .clone()  # a view of an empty tensor may start at an odd byte
        .view(dtype)
        .view(len(rows), rows.shape[1] * rows.element_size() // dtype.itemsize)
    )


def _word(value: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return value - 2**64 if value >= 2**63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift 64-bit words right, logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
