"""What a rank that keeps copies says of the rows it names to their owners, and records on their way to it.

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
from colonnade.exchange.wire import RowLayout, row_layout

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
        return blocks_of(mine, self.counts)


def blocks_of(mine: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(N, T): how many of `mine` (W,) bool lie in each block of rows listed rank by rank, table by table."""
    before = np.concatenate([[0], np.cumsum(mine)])
    ends = counts.ravel().cumsum()
    return (before[ends] - before[ends - counts.ravel()]).reshape(counts.shape)


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


@dataclass(frozen=True, slots=True)
class Records:
    """Where the first bytes of records lie in a message: rank by rank, table by table."""

    layout: RowLayout
    widths: np.ndarray  # (T,) int64, bytes

    def blocks(self, message: Tensor, t: int) -> list[Tensor]:
        """By rank, (rows, bytes) uint8: views of the message."""
        firsts, counts, width = self.layout.block_elements, self.layout.counts, int(self.widths[t])
        return [
            message[first : first + n * width].view(n, width)
            for first, n in zip(firsts[:, t].tolist(), counts[:, t].tolist(), strict=True)
        ]

    def fill(self, message: Tensor, t: int, records: Tensor) -> None:
        """records (rows of table t, whole), listed rank by rank."""
        blocks, start = self.blocks(message, t), 0
        for block in blocks:
            block.copy_(records[start : start + len(block), : block.shape[1]])
            start += len(block)

    def of(self, message: Tensor, t: int) -> Tensor:
        """(rows, bytes): those of table t, listed rank by rank."""
        return torch.cat(self.blocks(message, t))


def records_layout(counts: np.ndarray, widths: np.ndarray) -> Records:
    """counts (N, T) rows, widths (T,) bytes of each."""
    return Records(row_layout(counts, widths), widths)


def tables_of(counts: np.ndarray) -> np.ndarray:
    """counts (N, T) of rows listed rank by rank, table by table: (rows,) int64, the table of each."""
    return np.repeat(_tables(*counts.shape), counts.ravel())


@lru_cache(maxsize=64)
def _tables(num_ranks: int, num_tables: int) -> np.ndarray:
    """Of each block, the same in every step; read only."""
    return np.tile(np.arange(num_tables), num_ranks)


def ranks_of(counts: np.ndarray) -> np.ndarray:
    """Likewise: (rows,) int64, the rank of each."""
    return np.repeat(np.arange(len(counts)), counts.sum(1))


def table_major(counts: np.ndarray) -> np.ndarray:
    """Likewise: (rows,) int64, their places, table by table, then rank by rank."""
    sizes = counts.ravel()
    firsts = (sizes.cumsum() - sizes).reshape(counts.shape)
    return ranges(firsts.T.ravel(), counts.T.ravel())


def by_table(counts: np.ndarray) -> list[np.ndarray]:
    """Likewise: by table, where its rows are, ascending."""
    return np.split(table_major(counts), counts.sum(0).cumsum()[:-1])


def ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """One after another, int64: so many numbers from each of firsts (n,) on."""
    ends = sizes.cumsum()
    return np.repeat(firsts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


@dataclass(frozen=True, slots=True)
class Serving:
    """The owner's side of a ticket."""

    named: Named
    ids: np.ndarray  # (P,) int64
    plan: _native.Plan  # of those that sums will come of, each row once
    requests: _native.Lookups  # of these
