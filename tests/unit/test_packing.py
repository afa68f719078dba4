"""Ids as they travel: the native core against its slow twin, requests whole and damaged, and what they will take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from references import packing_reference as twin

from colonnade import _native
from colonnade.errors import WorldError
from colonnade.hops import message_bytes
from colonnade.wire import packing

WORDS = st.integers(-(2**63), 2**63 - 1)


def natively(ids, space, is_ascending):
    def one(number):
        return torch.tensor([number])

    packed, ends = _native.pack_ids(
        torch.tensor(ids, dtype=torch.int64), one(0), one(len(ids)), one(space.rows), one(space.num_owners),
        one(space.place), is_ascending,
    )  # fmt: skip
    assert np.asarray(ends).tolist() == [len(packed)]
    result, counts, used = _native.unpack_ids(
        packed, one(space.rows), one(space.num_owners), one(space.place), is_ascending
    )
    assert np.asarray(result).tolist() == list(ids) and np.asarray(counts).tolist() == [len(ids)]
    assert used == len(packed)
    return np.asarray(packed).tobytes()


@settings(max_examples=examples(40, 150), deadline=None)
@given(st.data())
def test_lists_equal_their_twin(data):
    num_owners = data.draw(st.sampled_from([1, 2, 3, 5, 64]))
    space = twin.IdSpace(
        data.draw(st.sampled_from([0, 0, 1, 7, 1000, 2**63 - 1])),
        num_owners,
        data.draw(st.integers(0, num_owners - 1)),
    )
    subset = WORDS | st.integers(-50, 50) if not space.rows else st.integers(0, space.rows - 1)
    drawn = data.draw(st.lists(subset, max_size=300))
    ids = torch.tensor(drawn, dtype=torch.int64)
    owners = torch.as_tensor(_native.owner_of(ids, space.rows, num_owners))
    listed = ids[owners == space.place].tolist()
    packed = twin.pack_list(listed, space, False)
    assert natively(listed, space, False) == packed
    assert twin.unpack_list(packed, space, False) == (listed, len(packed))
    mixed = dict(zip(listed, twin._mixed(listed), strict=True)) if listed else {}
    unique = sorted(set(listed), key=lambda i: i // num_owners if space.rows else mixed[i])
    packed = twin.pack_list(unique, space, True)
    assert natively(unique, space, True) == packed
    assert twin.unpack_list(packed, space, True) == (unique, len(packed))


@settings(max_examples=examples(30, 100), deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 3), max_size=400))
def test_numbers_equal_their_twin(values):
    packed = _native.pack_numbers(torch.tensor(values, dtype=torch.int64))
    assert np.asarray(packed).tobytes() == twin.pack_numbers(values)
    result, used = _native.unpack_numbers(packed, len(values))
    assert np.asarray(result).tolist() == values and used == len(packed)


ROWS, RANKS = torch.tensor([5000, 0, 3]), 3
OWNERS = torch.full((3,), RANKS)


def request(seed, num_ids=200, with_codes=True):
    """One rank's messages: (bytes, sizes, ids by rank and table, codes alike)."""
    random = np.random.default_rng(seed)
    drawn = [np.unique(random.integers(0, r or 10**12, num_ids)) for r in ROWS.tolist()]
    sizes = np.cumsum([0, *map(len, drawn)])
    tables = torch.arange(3, dtype=torch.int32)
    lookups = _native.Lookups(
        torch.from_numpy(np.concatenate(drawn)), torch.from_numpy(sizes), tables,
        torch.full((3,), 2, dtype=torch.uint8), 0, None, None,
    )  # fmt: skip
    plan = _native.make_plan(lookups, ROWS, OWNERS)
    blocks = np.asarray(plan.block_offsets)
    unique = torch.as_tensor(plan.unique_ids).clone()
    firsts, lasts = (b.reshape(3, RANKS).T for b in (blocks[:-1], blocks[1:]))
    codes = torch.from_numpy(random.integers(0, 256, len(unique)).astype(np.uint8))
    messages = packing.pack_id_requests(
        unique, firsts, lasts, ROWS, OWNERS, np.tile(np.arange(RANKS)[:, None], 3),
        next_use_codes=codes if with_codes else None,
    )  # fmt: skip
    rows_asked = [[unique[f:n] for f, n in zip(*b, strict=True)] for b in zip(firsts, lasts, strict=True)]  # fmt: skip
    known = [[codes[f:n] for f, n in zip(*b, strict=True)] for b in zip(firsts, lasts, strict=True)]  # fmt: skip
    return messages, rows_asked, known


@pytest.mark.parametrize("num_ids", [0, 1, 2, 97, 400])
def test_requests_arrive_as_they_were_sent(num_ids):
    everyones = [request(seed, num_ids, with_codes=seed != 1) for seed in range(RANKS)]
    for owner in range(RANKS):
        messages = [sent[0][owner] for sent in everyones]
        result = packing.unpack_id_requests(messages, ROWS, OWNERS, torch.full((3,), owner))
        wanted = [table for sent in everyones for table in sent[1][owner]]
        assert torch.equal(result.ids, torch.cat(wanted))
        assert result.counts.ravel().tolist() == list(map(len, wanted))
        reported = [
            t if s != 1 else t * 0 for s, sent in enumerate(everyones) for t in sent[2][owner]
        ]
        assert torch.equal(result.codes, torch.cat(reported))


def test_nobody_knows_when():
    messages = [request(seed, with_codes=False)[0][0] for seed in range(2)]
    result = packing.unpack_id_requests(messages, ROWS, OWNERS, torch.zeros(3).long())
    assert result.codes is None


def unpacked(message, places=None):
    places = torch.zeros(3, dtype=torch.int64) if places is None else places
    return packing.unpack_id_requests([message], ROWS, OWNERS, places)


def test_damaged_requests_are_refused_or_ask_for_rows_that_are_there():
    message = request(0)[0][0]
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(400):
        bad = message.copy()
        if random.integers(2):
            bad = bad[: random.integers(len(bad))].copy()
        for _ in range(random.integers(1, 4)):
            if len(bad):
                bad[random.integers(len(bad))] = int(random.integers(256))
        try:
            result = unpacked(bad)
        except WorldError as error:
            assert "rank 0 sent" in str(error)
            refused += 1
            continue
        for part, rows in zip(result.ids.split(result.counts[0].tolist()), ROWS.tolist(), strict=True):  # fmt: skip
            owners = torch.as_tensor(
                _native.owner_of(part, rows, RANKS)
            )  # raises where it is outside
            assert bool((owners == 0).all())
    assert refused > 200


def test_what_is_no_request_is_refused():
    message = request(0)[0][0]
    for bad, words in (
        (message[:0], r"got \[\] at its beginning"),
        (np.append(message, message[:2]), "got 2 bytes after its end"),
        (np.append([2], message[1:]).astype(np.uint8), r"got \[2\] at its beginning"),
        (message[:-3], "more bytes, wanted"),
    ):
        with pytest.raises(WorldError, match=words):
            unpacked(bad)
    with pytest.raises(WorldError, match="no rows here"):
        unpacked(message, torch.tensor([0, -1, 0]))


def measured_id_bytes(ids, rows, num_owners):
    """Bytes that each of these different ids takes in requests to all owners."""
    offsets, table = torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int32)
    requested = _native.Lookups(ids, offsets, table, torch.tensor([2], dtype=torch.uint8), 0, None, None)  # fmt: skip
    plan = _native.make_plan(requested, torch.tensor([rows]), torch.tensor([num_owners]))
    blocks, owners = torch.as_tensor(plan.block_offsets), torch.full((num_owners,), num_owners)
    packed, _ = _native.pack_ids(
        plan.unique_ids, blocks[:-1].contiguous(), blocks[1:].contiguous(), torch.full_like(owners, rows), owners,
        torch.arange(num_owners), True,
    )  # fmt: skip
    if num_owners == 1:
        assert len(packed) == packing.measure_packed_bytes(ids, rows)[0]
    return len(packed) / plan.num_unique


def popular(random, rows, draws, exponent, spread):
    """Ids of one batch by Zipf's law, the popular ones spread over the table by a hash, or its first."""
    weights = np.arange(1, rows + 1) ** -exponent
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(draws))
    places = np.random.default_rng(7).permutation(rows) if spread else np.arange(rows)
    return torch.from_numpy(places[ranks.clip(max=rows - 1)])


@pytest.mark.parametrize("num_owners", [2, 4])
def test_expected_bytes(num_owners):
    """Estimate for a Criteo-like batch: within 2 % where popular ids are spread over a table, roughly otherwise."""
    random, total = np.random.default_rng(0), np.zeros(3)
    for rows in (3, 100, 5000, 100_000, 1_000_000):
        for spread in (True, False):
            foretold = counted = unique = 0.0
            for _ in range(12):
                ids = popular(random, rows, 2048, 1.1, spread).unique()
                counted += measured_id_bytes(ids, rows, num_owners) * len(ids)
                foretold += num_owners * message_bytes.expected_id_list_bytes(
                    len(ids) / num_owners, rows, num_owners
                )
                unique += len(ids)
            if not spread:  # how dense ids lie changes from block to block: measure such
                assert abs(foretold - counted) <= 0.4 * counted, rows
            else:
                total += foretold, counted, unique
                # A tiny table is not dealt evenly: a byte a list more.
                assert abs(foretold - counted) <= 0.03 * counted + 12 * num_owners
    assert abs(total[0] - total[1]) <= 0.02 * total[1]
    print(f"{num_owners} owners: {total[1] / total[2]:.2f} bytes an id, 8 before")


def test_expected_bytes_of_hashed_ids():
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, 3000))
    for num_owners in (1, 3):
        counted = measured_id_bytes(ids, 0, num_owners)
        foretold = message_bytes.expected_id_list_bytes(3000 / num_owners, 0, num_owners)
        assert foretold * num_owners / 3000 == pytest.approx(counted, rel=0.02)
    assert message_bytes.expected_id_list_bytes(0.0, 100, 4) == 1.0
    assert message_bytes.expected_id_list_bytes(100.0, 100, 1) == pytest.approx(2.0, rel=0.01)
