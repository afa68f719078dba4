"""Lookups as they travel to the ranks that pool them: each goes to the rank that owns its row, and every rank hears how
many of a sample's lookups it got.

A message is words (int64: samples, whether next uses follow, then one word for each column) and a body of bytes: ids;
weights of weighted columns; lengths of bags, as few bits each as the column's longest needs, none where all are equal;
next uses.

Legend: B samples, C columns of lookups, E lookups, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from colonnade.errors import WorldError
from colonnade.exchange.layout import Lookups

NUM_WORDS = 2
"""Before those of the columns."""
BITS = (0, 1, 2, 4, 8, 16, 32)
"""What the length of a bag may take; 0: all are equal."""


@dataclass(frozen=True, slots=True)
class Bags:
    """Lookups of some columns: column by column, sample by sample, in the order of the batch."""

    ids: np.ndarray  # (E,) int64
    lengths: np.ndarray  # (C, B) int64: lookups of each sample
    is_weighted: np.ndarray  # (C,) bool
    weights: (
        np.ndarray | None
    )  # (E,) of the compute dtype, 1 in columns without; None: no column has any
    codes: np.ndarray | None  # (E,) uint8, `Batch.next_use`

    @property
    def counts(self) -> np.ndarray:
        """(C,) int64: lookups of each column."""
        return self.lengths.sum(1)


def deal(
    lookups: Lookups,
    owners: np.ndarray,
    columns: Sequence[np.ndarray],
    dtype: torch.dtype,
    codes: np.ndarray | None,
) -> list[Bags]:
    """What each rank gets. owners (E,): the rank of each lookup; columns: by rank, ascending or not, those it has rows
    of (its bags list them in that order, if it is that of `lookups`); dtype: of weights; codes (E,)."""
    size, num_ranks = lookups.batch_size, len(columns)
    starts = lookups.feature_offsets.numpy()
    column = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    ramp = np.arange(size)
    samples = [
        ramp if bags is None else np.repeat(ramp, np.diff(bags.numpy())) for bags in lookups.bags
    ]
    sample = np.concatenate([*samples, np.zeros(0, np.int64)])
    is_weighted = np.array([each is not None for each in lookups.weights], dtype=bool)
    weights = None
    if is_weighted.any():
        weights = np.concatenate(
            [
                np.ones(n, _numpy(dtype)) if each is None else each.to(dtype).numpy()
                for each, n in zip(lookups.weights, np.diff(starts), strict=True)
            ]
        )
    order = np.argsort(owners.astype(np.int16), kind="stable")  # of int16: a radix sort
    ends = np.cumsum(np.bincount(owners, minlength=num_ranks))
    ids, found = lookups.ids.numpy(), []
    for mine, begin, end in zip(columns, [0, *ends[:-1]], ends, strict=True):
        some = order[begin:end]
        place = np.zeros(len(starts) - 1, np.int64)
        place[mine] = np.arange(len(mine))
        lengths = np.bincount(place[column[some]] * size + sample[some], minlength=len(mine) * size)
        found.append(
            Bags(
                ids[some],
                lengths.reshape(len(mine), size),
                is_weighted[mine],
                weights[some] if weights is not None and is_weighted[mine].any() else None,
                None if codes is None else codes[some],
            )
        )
    return found


def words(bags: Bags) -> np.ndarray:
    """(NUM_WORDS + C,) int64: what says how long the body is, and how to read it. Of a column: lookups << 16 |
    weighted << 8 | bits of a length."""
    size = bags.lengths.shape[1]
    bits = np.zeros(len(bags.lengths), np.int64)
    if size:
        longest, shortest = bags.lengths.max(1), bags.lengths.min(1)
        bits = np.searchsorted(2.0 ** np.array(BITS), longest + 1)  # the first that holds it
        bits = np.where(longest == shortest, 0, np.array(BITS)[bits])
    told = bags.counts << 16 | bags.is_weighted.astype(np.int64) << 8 | bits
    return np.concatenate([[size, bags.codes is not None], told]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Body:
    """How the body of a message lies."""

    size: int
    counts: np.ndarray  # (C,)
    is_weighted: np.ndarray  # (C,) bool
    bits: np.ndarray  # (C,)
    has_codes: bool

    @property
    def num_lookups(self) -> int:
        return int(self.counts.sum())

    @property
    def num_weights(self) -> int:
        return int(self.counts[self.is_weighted].sum())

    def length_bytes(self, bits: int) -> int:
        """Of all lengths that take so many bits."""
        return -(-int((self.bits == bits).sum()) * self.size * bits // 8)

    def num_bytes(self, itemsize: int) -> int:
        lengths = sum(self.length_bytes(bits) for bits in BITS)
        whole = self.num_lookups * (8 + self.has_codes) + self.num_weights * itemsize + lengths
        return -(-whole // 8) * 8  # so that the next rank's ids are aligned


def _body(told: np.ndarray) -> _Body:
    columns = told[NUM_WORDS:]
    return _Body(
        int(told[0]), columns >> 16, (columns >> 8 & 1).astype(bool), columns & 255, bool(told[1])
    )


def pack(bags: Bags, dtype: torch.dtype) -> np.ndarray:
    """A message, uint8; dtype: of weights."""
    told = words(bags)
    body = _body(told)
    parts = [bags.ids]
    if body.num_weights:
        assert bags.weights is not None
        parts.append(bags.weights[np.repeat(body.is_weighted, body.counts)])
    for bits in BITS[:0:-1]:
        parts.append(_packed(bags.lengths[body.bits == bits], bits))
    if bags.codes is not None:
        parts.append(bags.codes)
    out = np.zeros(body.num_bytes(dtype.itemsize), np.uint8)
    begin = 0
    for part in parts:
        out[begin : begin + part.nbytes] = part.view(np.uint8)
        begin += part.nbytes
    return np.concatenate([told.view(np.uint8), out])


def unpack(message: np.ndarray, num_columns: int, dtype: torch.dtype, rank: int) -> Bags:
    """What `pack` was given. message: begins at a multiple of 8 bytes. Raises WorldError naming `rank`, its sender, for
    one of another length than its words say."""
    num_words = NUM_WORDS + num_columns
    told = message[: 8 * num_words].view(np.int64) if len(message) >= 8 * num_words else None
    if told is None or (told < 0).any() or (told[:NUM_WORDS] > 1 << 40).any():
        raise WorldError(_no_message(rank, message))
    body, data, begin = _body(told), message[8 * num_words :], 0
    if body.num_bytes(dtype.itemsize) != len(data) or not np.isin(body.bits, BITS).all():
        raise WorldError(_no_message(rank, message))

    def read(num_bytes: int, kind: Any) -> np.ndarray:
        nonlocal begin
        begin += num_bytes
        return data[begin - num_bytes : begin].view(kind)

    ids = read(body.num_lookups * 8, np.int64)
    weights = None
    if body.num_weights:
        weights = np.ones(body.num_lookups, _numpy(dtype))
        given = read(body.num_weights * dtype.itemsize, _numpy(dtype))
        weights[np.repeat(body.is_weighted, body.counts)] = given
    lengths = np.empty((len(body.counts), body.size), np.int64)
    for bits in BITS[:0:-1]:
        those = body.bits == bits
        packed = read(body.length_bytes(bits), np.uint8)
        shape = (int(those.sum()), body.size)
        lengths[those] = _unpacked(packed, shape[0] * shape[1], bits).reshape(shape)
    equal = body.bits == 0
    lengths[equal] = (body.counts[equal] // max(1, body.size))[:, None]
    codes = read(body.num_lookups, np.uint8) if body.has_codes else None
    return Bags(ids, lengths, body.is_weighted, weights, codes)


def _no_message(rank: int, message: np.ndarray) -> str:
    return (
        f"rank {rank} sent {len(message)} bytes that are no lookups to pool; all ranks must run one version of "
        "Colonnade on one model"
    )


def join(parts: Sequence[Bags], dtype: torch.dtype) -> Bags:
    """One batch of all ranks' samples, in rank order. Where some have weights or codes, the others' are 1 and 0
    (unknown)."""
    if len(parts) == 1:
        return parts[0]
    counts = np.stack([part.counts for part in parts])  # (N, C)
    before = np.cumsum(counts.ravel()).reshape(counts.shape) - counts
    lengths, starts = counts.T.ravel(), before.T.ravel()  # column by column, rank by rank
    order = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    weights = codes = None
    if any(part.weights is not None for part in parts):
        weights = np.concatenate(
            [
                np.ones(len(part.ids), _numpy(dtype)) if part.weights is None else part.weights
                for part in parts
            ]
        )[order]
    if any(part.codes is not None for part in parts):
        codes = np.concatenate(
            [
                np.zeros(len(part.ids), np.uint8) if part.codes is None else part.codes
                for part in parts
            ]
        )[order]
    return Bags(
        np.concatenate([part.ids for part in parts])[order],
        np.concatenate([part.lengths for part in parts], axis=1),
        np.any([part.is_weighted for part in parts], axis=0),
        weights,
        codes,
    )


def _packed(lengths: np.ndarray, bits: int) -> np.ndarray:
    if bits >= 8:
        return np.ascontiguousarray(lengths.astype(f"uint{bits}")).ravel()
    each = lengths.ravel()[:, None] >> np.arange(bits) & 1
    return np.packbits(each.astype(np.uint8).ravel(), bitorder="little")


def _unpacked(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    if bits >= 8:
        return packed.view(f"uint{bits}")
    each = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(-1, bits)
    return each @ (1 << np.arange(bits))


def _numpy(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
