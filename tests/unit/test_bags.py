"""Bags on the wire: what is dealt, packed, unpacked and joined is the batch that was there, rank by rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colonnade.batch import Batch, Ids
from colonnade.exchange import bags
from colonnade.exchange.layout import collect, consumption, declare
from colonnade.table import Feature, Table

LONGEST = [1, 2, 3, 15, 16, 300, 70_000]


def batch_of(random, size, lengths, weighted, dtype):
    ids = {}
    for name, each in lengths.items():
        offsets = None if each is None else torch.from_numpy(np.concatenate([[0], np.cumsum(each)]))
        n = size if each is None else int(np.sum(each))
        values = torch.from_numpy(random.integers(0, 50, n))
        weights = torch.rand(n, dtype=dtype) if name in weighted else None
        ids[name] = Ids(values, offsets, weights)
    return Batch(size, torch.zeros(size, 0), ids)


def looked_up(batch):
    declaration = declare([Table("t", 2)], [Feature(name, "t") for name in batch.ids], {})
    return collect(batch, declaration, consumption(declaration))


def travel(parts, dtype):
    for each in parts:
        yield bags.unpack(bags.pack(each, dtype), len(each.lengths), dtype, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_every_lookup_reaches_its_owner_and_no_other(seed, num_ranks):
    random, dtype = np.random.default_rng(seed), torch.float64 if seed % 2 else torch.float32
    sizes = [int(random.integers(0, 40)) for _ in range(num_ranks)]
    sizes[-1] = 0 if seed == 3 else sizes[-1]
    names = ["one", "few", "many", "same"]
    received = [[] for _ in range(num_ranks)]  # by owner, of every rank
    wanted = [[] for _ in range(num_ranks)]  # by owner: (column, rank, sample, id, weight, code)
    for rank, size in enumerate(sizes):
        lengths = {
            "one": None,
            "few": random.integers(0, 3, size),
            "many": random.integers(0, 40, size),
            "same": np.full(size, 4),
        }
        weighted = {name for name in names if random.random() < 0.3}
        batch = batch_of(random, size, lengths, weighted, dtype)
        lookups = looked_up(batch)
        owners = random.integers(0, num_ranks, len(lookups.ids))
        codes = random.integers(1, 256, len(owners)).astype(np.uint8) if rank % 2 else None
        columns = [np.arange(4)] * num_ranks
        for owner, part in enumerate(
            travel(bags.deal(lookups, owners, columns, dtype, codes), dtype)
        ):
            received[owner].append(part)
        at = 0
        for c, name in enumerate(names):
            each = lengths[name] if lengths[name] is not None else np.ones(size, int)
            sample = np.repeat(np.arange(size), each)
            ids = batch.ids[name]
            for e in range(len(ids.values)):
                weight = 1.0 if ids.weights is None else float(ids.weights[e])
                code = 0 if codes is None else int(codes[at])
                seen = (c, rank, int(sample[e]), int(ids.values[e]), weight, code)
                wanted[owners[at]].append(seen)
                at += 1
    rank_of = np.repeat(np.arange(num_ranks), sizes)
    first = np.cumsum(sizes) - sizes
    for parts, mine in zip(received, wanted, strict=True):
        joined = bags.join(parts, dtype)
        assert joined.lengths.shape == (4, sum(sizes))
        found, at = [], 0
        for c in range(4):
            for sample, length in enumerate(joined.lengths[c]):
                for _ in range(length):
                    rank = int(rank_of[sample])
                    weight = 1.0 if joined.weights is None else float(joined.weights[at])
                    code = 0 if joined.codes is None else int(joined.codes[at])
                    place = (c, rank, int(sample - first[rank]))
                    found.append((*place, int(joined.ids[at]), weight, code))
                    at += 1
        assert found == sorted(mine, key=lambda each: each[:3]) and at == len(joined.ids)


@pytest.mark.parametrize("longest", LONGEST)
def test_lengths_take_as_few_bits_as_they_need(longest):
    lengths = np.array([[0, longest], [longest, longest]])
    ids = np.arange(lengths.sum())
    given = bags.Bags(ids, lengths, np.zeros(2, bool), None, None)
    told = bags.words(given)
    bits = next(bits for bits in bags.BITS[1:] if longest < 2**bits)
    assert (told[bags.NUM_WORDS :] & 255).tolist() == [bits, 0]
    (found,) = travel([given], torch.float32)
    assert np.array_equal(found.lengths, lengths) and np.array_equal(found.ids, ids)


def test_ranks_get_only_their_columns():
    """A column of a table that lies on one rank costs the others not even a word."""
    batch = batch_of(np.random.default_rng(0), 3, {"a": None, "b": None}, set(), torch.float32)
    lookups = looked_up(batch)
    first, second = bags.deal(
        lookups, np.array([0, 0, 0, 1, 1, 1]), [np.array([0]), np.array([1])], torch.float32, None
    )
    assert first.lengths.tolist() == second.lengths.tolist() == [[1, 1, 1]]
    assert first.ids.tolist() == batch.ids["a"].values.tolist()
    assert second.ids.tolist() == batch.ids["b"].values.tolist()
    assert len(bags.words(first)) == bags.NUM_WORDS + 1
    assert (
        len(bags.pack(first, torch.float32)) == 8 * (bags.NUM_WORDS + 1) + 24
    )  # no byte for lengths
