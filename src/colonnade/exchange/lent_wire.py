"""What ranks and owners say of rows that are lent, as it travels: one message from each to each, either way.

A request: a list of numbers (`loans`) of rows that the rank has, ascending, as `_native.pack_ids` has local rows; then
the others, as `packing` has them. What an owner says:

    numbers       a list likewise: rows that the rank has and does not use in this batch, and is to give back
    bits          one for each of these: a copy stays
    bits          one for each row that the rank asked for, but for copies that it has: something stays
    bits          one for each where it does: it is a copy

Bits of one kind fill bytes of their own. Who has what is known to both. Legend: T tables, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import WorldError
from colonnade.exchange.cached_wire import tables_of
from colonnade.exchange.clean import mark_bytes, pack_marks, unpack_marks
from colonnade.exchange.loans import NONE, Loans
from colonnade.exchange.packing import Requests, unpack_requests
from colonnade.exchange.said import Back, Said, listed_back

NUMBERS = 2**32
"""Are below."""


def pack_numbers(numbers: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """By rank, uint8: of counts (N,) rows in any order, the numbers that they have."""
    has = numbers != NONE
    ranks = np.repeat(np.arange(len(counts)), counts)[has]
    order, sizes = np.lexsort((numbers[has], ranks)), np.bincount(ranks, minlength=len(counts))
    lasts, firsts = (torch.from_numpy(each) for each in (sizes.cumsum(), sizes.cumsum() - sizes))
    one, none = torch.ones_like(lasts), torch.zeros_like(lasts)
    ids = torch.from_numpy(numbers[has][order])
    packed, ends = _native.pack_ids(ids, firsts, lasts, NUMBERS * one, one, none, True)
    return np.split(np.asarray(packed), np.asarray(ends)[:-1])


def unpack_numbers(message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, ascending; the rest of the message). Raises ValueError."""
    one = torch.ones(1, dtype=torch.int64)
    found, _, used = _native.unpack_ids(message, NUMBERS * one, one, 0 * one, True)
    return np.asarray(found), message[used:]


def read_requests(
    messages: Sequence[np.ndarray], lent: Loans, rows: Tensor, num_owners: Tensor, places: Tensor
) -> Requests:
    """messages: by rank; the others as in `unpack_requests`. In each rank's and table's rows, those that lie there come
    last, by number. Raises WorldError naming a rank whose message is none."""
    named, rest = [], []
    for rank, message in enumerate(messages):
        try:
            numbers, others = unpack_numbers(message)
            named.append(lent.rows(rank, numbers))
        except ValueError:
            raise _no_message(rank, len(message), "asks for") from None
        rest.append(others)
    plain = unpack_requests(rest, rows, num_owners, places)
    counts = np.array([len(ids) for _, ids in named])
    tables = np.concatenate([tables_of(plain.counts), *(each for each, _ in named)])
    ranks = np.arange(len(named))
    of = np.concatenate([np.repeat(ranks, plain.counts.sum(1)), np.repeat(ranks, counts)])
    order = np.lexsort((tables, of))
    ids = np.concatenate([plain.ids.numpy(), *(each for _, each in named)])[order]
    shape = plain.counts.shape
    by_block = np.bincount(of * shape[1] + tables, minlength=shape[0] * shape[1]).reshape(shape)
    codes = plain.codes
    if codes is not None:  # of rows that lie elsewhere nobody asks when they are used next
        unknown = torch.zeros(int(counts.sum()), dtype=torch.uint8)
        codes = torch.cat([codes, unknown])[torch.from_numpy(order)]
    return Requests(torch.from_numpy(ids), by_block, codes)


def listed_order(counts: np.ndarray, order: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """order (U,) of rows as plans list them in each rank's and table's, counts (N, T) of them; numbers (U,) of these:
    as `read_requests` lists them."""
    blocks = np.repeat(np.arange(counts.size), counts.ravel())
    return order[np.lexsort((numbers, blocks))]


def said_messages(said: Said, recalled: Back, numbers: np.ndarray) -> list[np.ndarray]:
    """By rank, uint8. said: of rows that the rank asked for; recalled: of those that it has and does not use, whose
    numbers these are."""
    rows, is_told = recalled.counts.sum(1), ~said.read
    order = np.lexsort((numbers, np.repeat(np.arange(len(rows)), rows)))
    parts = [
        np.split(bits.numpy(), np.cumsum(sizes)[:-1])
        for bits, sizes in (
            pack_marks(recalled.copied[order], rows),
            pack_marks(said.keeps[is_told], said.counted(is_told).sum(1)),
            pack_marks(said.copied[said.keeps], said.counted(said.keeps).sum(1)),
        )
    ]
    named = pack_numbers(numbers, rows)
    return [np.concatenate(each) for each in zip(named, *parts, strict=True)]


def read_said(
    messages: Sequence[np.ndarray], counts: np.ndarray, numbers: np.ndarray, had: Loans
) -> tuple[Said, Back]:
    """By rank that they are from; of rows that this one asked of each, counts (N, T), the numbers (U,) of what it has.
    Raises WorldError naming a rank whose message is none."""
    has, is_copy = numbers != NONE, had.copied(counts, numbers)
    keeps, copied = np.zeros((2, len(numbers)), bool)
    backs = []
    ends = [0, *counts.sum(1).cumsum().tolist()]
    for rank, message in enumerate(messages):
        told = np.flatnonzero(~is_copy[ends[rank] : ends[rank + 1]]) + ends[rank]
        try:
            named, bits = unpack_numbers(message)
            tables, ids = had.rows(rank, named)
            stays, bits = _unpacked(bits, len(ids))
            keeps[told], bits = _unpacked(bits, len(told))
            kept = told[keeps[told]]
            copied[kept], bits = _unpacked(bits, len(kept))
        except ValueError:
            raise _no_message(rank, len(message), "says of") from None
        if len(bits):
            raise _no_message(rank, len(message), "says of")
        backs.append((np.full(len(ids), rank), tables, ids, stays))
    holders, of, rows, stay = (np.concatenate(each) for each in zip(*backs, strict=True))
    shape = (len(messages), counts.shape[1])
    return Said(counts, has, keeps, copied | is_copy), listed_back(holders, of, rows, stay, shape)


def _unpacked(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(Bits, the rest). Raises ValueError."""
    [size] = mark_bytes(np.array([count]))
    if size > len(data):
        raise ValueError("got too few bytes")
    return unpack_marks(torch.from_numpy(data[:size].copy()), np.array([count])), data[size:]


def _no_message(rank: int, size: int, does: str) -> WorldError:
    return WorldError(
        f"rank {rank} sent {size} bytes that are not what a rank {does} rows that are lent; all ranks must run one "
        "version of Colonnade on one model and plan, and have as many batches"
    )
