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
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import WorldError
from colonnade.exchange.cached_wire import ranks_of
from colonnade.exchange.loans import NONE, Loans
from colonnade.exchange.marks import packed_by_rank
from colonnade.exchange.packing import Requests, unpack_requests
from colonnade.exchange.said import Back, Said, listed_back

NUMBERS = 2**32
"""Are below."""


def pack_numbers(numbers: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """By rank, uint8: of counts (N,) rows in any order, the numbers that they have."""
    has = numbers != NONE
    ranks, named = np.repeat(np.arange(len(counts)), counts)[has], numbers[has]
    order, sizes = np.argsort(ranks * NUMBERS + named), np.bincount(ranks, minlength=len(counts))
    lasts, firsts = (torch.from_numpy(each) for each in (sizes.cumsum(), sizes.cumsum() - sizes))
    one, none = torch.ones_like(lasts), torch.zeros_like(lasts)
    ids = torch.from_numpy(named[order])
    packed, ends = _native.pack_ids(ids, firsts, lasts, NUMBERS * one, one, none, True)
    borders, lists = [0, *np.asarray(ends).tolist()], np.asarray(packed)
    return [lists[a:b] for a, b in pairwise(borders)]


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
    counts, shape = np.array([len(ids) for _, ids in named]), plain.counts.shape
    plain_blocks = np.repeat(np.arange(plain.counts.size), plain.counts.ravel())
    firsts = np.repeat(shape[1] * np.arange(len(named)), counts)
    blocks = firsts + np.concatenate([tables for tables, _ in named])
    # NumPy sorts 16 bits by counting.
    kind = np.uint16 if plain.counts.size < 2**16 else np.int64
    order = np.argsort(np.concatenate([plain_blocks, blocks]).astype(kind), kind="stable")
    ids = np.concatenate([plain.ids.numpy(), *(each for _, each in named)])[order]
    by_block = plain.counts + np.bincount(blocks, minlength=plain.counts.size).reshape(shape)
    codes = plain.codes
    if codes is not None:  # of rows that lie elsewhere nobody asks when they are used next
        unknown = torch.zeros(int(counts.sum()), dtype=torch.uint8)
        codes = torch.cat([codes, unknown])[torch.from_numpy(order)]
    return Requests(torch.from_numpy(ids), by_block, codes)


def listed_order(counts: np.ndarray, order: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """order (U,) of rows as plans list them in each rank's and table's, counts (N, T) of them; numbers (U,) of these:
    as `read_requests` lists them."""
    blocks = np.repeat(np.arange(counts.size) * (NUMBERS + 1), counts.ravel())
    return order[np.argsort(blocks + (numbers - NONE), kind="stable")]


def said_messages(said: Said, recalled: Back, numbers: np.ndarray) -> list[np.ndarray]:
    """By rank, uint8. said: of rows that the rank asked for; recalled: of those that it has and does not use, whose
    numbers these are."""
    rows, is_told = recalled.counts.sum(1), ~said.read
    order = np.lexsort((numbers, ranks_of(recalled.counts)))
    parts = (
        packed_by_rank(recalled.copied[order], rows),
        packed_by_rank(said.keeps[is_told], said.counted(is_told).sum(1)),
        packed_by_rank(said.copied[said.keeps], said.counted(said.keeps).sum(1)),
    )
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
    size = -(-count // 8)
    if size > len(data):
        raise ValueError("got too few bytes")
    return np.unpackbits(data[:size], count=count).view(bool), data[size:]


def _no_message(rank: int, size: int, does: str) -> WorldError:
    return WorldError(
        f"rank {rank} sent {size} bytes that are not what a rank {does} rows that are lent; all ranks must run one "
        "version of Colonnade on one model and plan, and have as many batches"
    )
