"""Messages between a rank that has copies of rows and the owners of these rows.

A message of `cached`, one from each rank to each:
    4 bytes       little-endian: bytes of what follows, before the request
    bits          three for each row named, as the request lists them: a copy to renew, wanted whole, a sum to come
    2 bytes each  of copies to renew: batches since they were read, FAR for so many or more
    a request     `packing.pack_requests`: all rows named

Legend: N ranks, T tables, W rows that a rank names, P rows named to it.
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


HEAD_BYTES = 4
FAR = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Named:
    """Rows that are named in messages, rank by rank and table by table, and what is said of each."""

    counts: np.ndarray  # (N, T) int64
    renewed: np.ndarray  # (W,) bool
    wanted: np.ndarray  # (W,) bool
    written: np.ndarray  # (W,) bool
    ages: np.ndarray  # (W,) int64; of those renewed

    def counted(self, mine: np.ndarray) -> np.ndarray:
        """(N, T): rows of `mine` (W,) bool."""
        before = np.concatenate([[0], np.cumsum(mine)])
        ends = self.counts.ravel().cumsum()
        return (before[ends] - before[ends - self.counts.ravel()]).reshape(self.counts.shape)


def with_notes(named: Named, requests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """requests: by rank, uint8. The whole messages."""
    borders = np.concatenate([[0], named.counts.sum(1).cumsum()]).tolist()
    messages = []
    for rank, request in enumerate(requests):
        mine = slice(borders[rank], borders[rank + 1])
        renewed = named.renewed[mine]
        bits = np.packbits(np.stack([renewed, named.wanted[mine], named.written[mine]], 1).ravel())
        ages = np.minimum(named.ages[mine][renewed], FAR).astype("<u2").view(np.uint8)
        head = np.array([len(bits) + len(ages)], "<u4").view(np.uint8)
        messages.append(np.concatenate([head, bits, ages, request]))
    return messages


def without_notes(messages: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By rank: (notes, requests). Raises WorldError naming the rank whose message is none."""
    notes, requests = [], []
    for rank, message in enumerate(messages):
        size = int(message[:HEAD_BYTES].view("<u4")[0]) if len(message) >= HEAD_BYTES else -1
        if not 0 <= size <= len(message) - HEAD_BYTES:
            raise _no_message(rank, len(message))
        notes.append(message[HEAD_BYTES : HEAD_BYTES + size])
        requests.append(message[HEAD_BYTES + size :])
    return notes, requests


def read_notes(notes: Sequence[np.ndarray], counts: np.ndarray) -> Named:
    """Of `counts` (N, T) rows. Raises WorldError."""
    said, ages = [], []
    for rank, (note, rows) in enumerate(zip(notes, counts.sum(1).tolist(), strict=True)):
        size = -(-3 * rows // 8)
        bits = np.unpackbits(note[:size], count=min(3 * rows, 8 * len(note))).astype(bool)
        if len(bits) != 3 * rows or 2 * bits[::3].sum() != len(note) - size:
            raise _no_message(rank, len(note))
        said.append(bits.reshape(rows, 3))
        age = np.zeros(rows, np.int64)
        age[said[-1][:, 0]] = note[size:].copy().view("<u2")
        ages.append(age)
    renewed, wanted, written = np.concatenate(said).T
    return Named(counts, renewed, wanted, written, np.concatenate(ages))


def _no_message(rank: int, size: int) -> WorldError:
    return WorldError(
        f"rank {rank} sent {size} bytes that are not what a rank with a cache sends; all ranks must run one version of "
        "Colonnade on one model and plan"
    )


def tables_of(counts: np.ndarray) -> np.ndarray:
    """counts (N, T) of rows listed rank by rank, table by table: (rows,) int64, the table of each."""
    return np.repeat(_tables(*counts.shape), counts.ravel())


@lru_cache(maxsize=64)
def _tables(num_ranks: int, num_tables: int) -> np.ndarray:
    """Of each block, the same in every step; read only."""
    return np.tile(np.arange(num_tables), num_ranks)


@dataclass(frozen=True, slots=True)
class Serving:
    """Owner's side of a batch."""

    named: Named
    ids: np.ndarray  # (P,) int64
    plan: _native.Plan  # of those that sums will come of, each row once
    requests: _native.Lookups  # of these
