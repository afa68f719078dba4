"""Messages between a rank that caches rows and the owners of these rows.

A message of `cached`, one from each rank to each:
    4 bytes       little-endian: bytes of what follows, before the request
    bits          three per row, in the order of the request: renew the copy, send the whole row, a sum will follow
    2 bytes each  for copies to renew: batches since they were read, at most MAX_AGE
    a request     `packing.pack_id_requests`: all rows

Legend: N ranks, T tables, W rows that a rank requests or will send sums of, P such rows of other ranks at their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import WorldError


def pack_row_bits(row_flags: np.ndarray, rank_row_counts: np.ndarray) -> tuple[Tensor, list[int]]:
    """Pack marks (R,) bool of rank_row_counts (N,) rows of each rank into bits, each rank's in bytes of its own.

    Returns the bytes (B,) uint8 and how many belong to each rank.
    """
    ends = rank_row_counts.cumsum().tolist()
    parts = [np.packbits(row_flags[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]


def packed_bit_sizes(counts: np.ndarray) -> list[int]:
    """Return the bytes of each rank in the result of `pack_row_bits` for counts (N,)."""
    return [-(-count // 8) for count in counts.tolist()]


def unpack_row_bits(packed_bits: Tensor, rank_row_counts: np.ndarray) -> np.ndarray:
    """Unpack the result of `pack_row_bits`: marks (R,) bool of rank_row_counts (N,) rows of each rank."""
    firsts = [0, *np.cumsum(packed_bit_sizes(rank_row_counts)).tolist()]
    marks = packed_bits.numpy()
    sizes = rank_row_counts.tolist()
    bits = [np.unpackbits(marks[a:], count=n) for a, n in zip(firsts, sizes, strict=False)]
    return np.concatenate(bits).view(bool)


HEAD_BYTES = 4
MAX_AGE = 2**16 - 1


@dataclass(frozen=True, slots=True)
class RowRequests:
    """Rows listed in messages, rank by rank and table by table, with their flags."""

    counts: np.ndarray  # (N, T) int64
    renewed: np.ndarray  # (W,) bool: send the row only if it changed since it was copied
    wanted: np.ndarray  # (W,) bool: send the whole row
    written: np.ndarray  # (W,) bool: a sum of gradients will follow
    ages: np.ndarray  # (W,) int64, of renewed rows: batches since they were copied

    def count_rows(self, mask: np.ndarray) -> np.ndarray:
        """Count the rows of `mask` (W,) bool by rank and table, (N, T)."""
        before = np.concatenate([[0], np.cumsum(mask)])
        ends = self.counts.ravel().cumsum()
        counts: np.ndarray = before[ends] - before[ends - self.counts.ravel()]
        return counts.reshape(self.counts.shape)


def prepend_row_flags(
    row_requests: RowRequests, rank_requests: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Prepend flags and ages to the requests, by rank, uint8. Return the whole messages."""
    borders = np.concatenate([[0], row_requests.counts.sum(1).cumsum()]).tolist()
    messages = []
    for rank, request in enumerate(rank_requests):
        mask = slice(borders[rank], borders[rank + 1])
        renewed = row_requests.renewed[mask]
        bits = np.packbits(
            np.stack([renewed, row_requests.wanted[mask], row_requests.written[mask]], 1).ravel()
        )
        ages = np.minimum(row_requests.ages[mask][renewed], MAX_AGE).astype("<u2").view(np.uint8)
        head = np.array([len(bits) + len(ages)], "<u4").view(np.uint8)
        messages.append(np.concatenate([head, bits, ages, request]))
    return messages


def split_row_flags(messages: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split messages into flags with ages, and requests, both by rank. Raises WorldError that names the rank that sent
    another kind of message."""
    headers = []
    requests = []
    for rank, message in enumerate(messages):
        size = int(message[:HEAD_BYTES].view("<u4")[0]) if len(message) >= HEAD_BYTES else -1
        if not 0 <= size <= len(message) - HEAD_BYTES:
            raise _bad_message_error(rank, len(message))
        headers.append(message[HEAD_BYTES : HEAD_BYTES + size])
        requests.append(message[HEAD_BYTES + size :])
    return headers, requests


def parse_row_flags(flag_headers: Sequence[np.ndarray], rank_row_counts: np.ndarray) -> RowRequests:
    """Parse the flags and ages of `rank_row_counts` (N, T) rows. Raises WorldError."""
    flags = []
    ages = []
    for rank, (header, rows) in enumerate(
        zip(flag_headers, rank_row_counts.sum(1).tolist(), strict=True)
    ):
        size = -(-3 * rows // 8)
        bits = np.unpackbits(header[:size], count=min(3 * rows, 8 * len(header))).astype(bool)
        if len(bits) != 3 * rows or 2 * bits[::3].sum() != len(header) - size:
            raise _bad_message_error(rank, len(header))
        flags.append(bits.reshape(rows, 3))
        age = np.zeros(rows, np.int64)
        age[flags[-1][:, 0]] = header[size:].copy().view("<u2")
        ages.append(age)
    renewed, wanted, written = np.concatenate(flags).T
    return RowRequests(rank_row_counts, renewed, wanted, written, np.concatenate(ages))


def _bad_message_error(rank: int, size: int) -> WorldError:
    return WorldError(
        f"rank {rank} sent {size} bytes that are not a message of a rank with a cache; all ranks must run one version "
        "of Colonnade on one model and plan"
    )


def row_tables(counts: np.ndarray) -> np.ndarray:
    """Return the table index of each of counts (N, T) rows listed rank by rank, table by table, (rows,) int64."""
    return np.repeat(_tables(*counts.shape), counts.ravel())


@lru_cache(maxsize=64)
def _tables(num_ranks: int, num_tables: int) -> np.ndarray:
    """Return the table index of each block. Cached, because it is the same in every step; read only."""
    return np.tile(np.arange(num_tables), num_ranks)


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Requests for one batch on the owner's side."""

    row_requests: RowRequests
    ids: np.ndarray  # (P,) int64
    plan: _native.Plan  # of rows that will receive sums, each row once
    requests: _native.Lookups  # of the same rows
