"""What owners say of rows that are lent, as it travels: one message from each owner to each rank.

    4 bytes x T   ids of each table that follow
    ids           8 bytes each: rows that the rank has and does not use in this batch, and is to give back
    bits          one for each of these: a copy stays
    bits          two for each row that the rank asked for: its user has it, something stays
    bits          one for each of these of which either is said: what stays, or is there, is a copy

Bits of one kind fill bytes of their own. Legend: T tables, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from colonnade.errors import WorldError
from colonnade.exchange.clean import mark_bytes, pack_marks, unpack_marks
from colonnade.exchange.lending import Back, Said

COUNT_BYTES, ID_BYTES = 4, 8
BITS = 2


def said_messages(said: Said, recalled: Back) -> list[np.ndarray]:
    """By rank, uint8. said: of rows that the rank asked for; recalled: of those that it has and does not use."""
    asked, special = said.counts.sum(1), said.counted(~said.plain).sum(1)
    rows = recalled.counts.sum(1)
    parts = [
        np.split(bits.numpy(), np.cumsum(sizes)[:-1])
        for bits, sizes in (
            pack_marks(recalled.copied, rows),
            pack_marks(np.stack([said.has, said.keeps], 1).ravel(), BITS * asked),
            pack_marks(said.copied[~said.plain], special),
        )
    ]
    ids = np.split(recalled.ids.numpy(), rows.cumsum()[:-1])
    return [
        np.concatenate([counts.astype("<i4").view(np.uint8), named.view(np.uint8), *bits])
        for counts, named, *bits in zip(recalled.counts, ids, *parts, strict=True)
    ]


def read_said(messages: Sequence[np.ndarray], counts: np.ndarray) -> tuple[Said, Back]:
    """By rank that they are from; counts (N, T): rows that this one asked of each. Raises WorldError naming a rank
    whose message is none."""
    heads, ids, recopied, marks, copied = [], [], [], [], []
    for rank, (message, asked) in enumerate(zip(messages, counts.sum(1).tolist(), strict=True)):
        head = COUNT_BYTES * counts.shape[1]
        by_table = message[:head].view("<i4").astype(np.int64) if len(message) >= head else None
        if by_table is None or (by_table < 0).any():
            raise _no_message(rank, len(message))
        rows = int(by_table.sum())
        ends = head + np.cumsum([ID_BYTES * rows, *mark_bytes(np.array([rows, BITS * asked]))])
        if ends[-1] > len(message):
            raise _no_message(rank, len(message))
        named, stays, said, rest = np.split(message[head:], ends - head)
        marks.append(_unpacked(said, BITS * asked).reshape(-1, BITS))
        special = marks[-1].any(1)
        if len(rest) != mark_bytes(np.array([special.sum()]))[0]:
            raise _no_message(rank, len(message))
        copied.append(np.zeros(asked, bool))
        copied[-1][special] = _unpacked(rest, int(special.sum()))
        heads.append(by_table)
        ids.append(named.copy().view(np.int64))
        recopied.append(_unpacked(stays, rows))
    has, keeps = np.concatenate(marks).T
    return (
        Said(counts, has, keeps, np.concatenate(copied)),
        Back(np.stack(heads), torch.from_numpy(np.concatenate(ids)), np.concatenate(recopied)),
    )


def _unpacked(data: np.ndarray, count: int) -> np.ndarray:
    return unpack_marks(torch.from_numpy(data.copy()), np.array([count]))


def _no_message(rank: int, size: int) -> WorldError:
    return WorldError(
        f"rank {rank} sent {size} bytes that are not what an owner says of rows that are lent; all ranks must run one "
        "version of Colonnade on one model and plan, and have as many batches"
    )
