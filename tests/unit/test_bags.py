"""Bags on the wire: the native core against its slow twin, what all ranks look up as it was, damaged messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from references import bags_reference as twin
from references.packing_reference import IdSpace

from colonnade import _native
from colonnade.batch import Batch, Ids
from colonnade.errors import WorldError
from colonnade.hops.message_bytes import LENGTH_BITS
from colonnade.lookup.layout import LookupColumns, build_lookup_columns, collect_lookups, declare
from colonnade.table import Feature, Table
from colonnade.topology.sharding import row_wise, table_wise
from colonnade.wire.owner_map import build_owner_map
from colonnade.wire.packing import pack_bag_lookups, unpack_bag_lookups

TABLES = [
    Table("user", 2, rows=53), Table("open", 2), Table("item", 2, rows=2**40), Table("own", 2, rows=9),
]  # fmt: skip
NAMES = ["user", "open", "user again", "item", "own"]
TABLE_OF = [0, 1, 0, 2, 3]
LENGTHS = {"one": 1, "few": 3, "many": 40, "none": 0}
FEATURES = [Feature(name, name.split()[0], pooling="sum") for name in NAMES]
DECLARATIONS = {
    torch.float32: declare(TABLES, FEATURES, {}),
    torch.float64: declare([replace(table, dtype="float64") for table in TABLES], FEATURES, {}),
}
ROWS = torch.tensor([table.rows or 0 for table in TABLES])


def batch_of(random, size, kinds, weighted, dtype, spread):
    ids = {}
    for name, kind, t in zip(NAMES, kinds, TABLE_OF, strict=True):
        longest = LENGTHS[kind]
        item = np.full(size, longest) if kind in ("one", "none") else random.integers(0, longest + 1, size)  # fmt: skip
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(item)]))
        highest = min(spread, TABLES[t].rows or 2**62)
        values = torch.from_numpy(random.integers(0, highest, int(item.sum())))
        weights = torch.rand(len(values), dtype=dtype) if name in weighted else None
        ids[name] = Ids(values, None if kind == "one" and weights is None else offsets, weights)
    return Batch(size, torch.zeros(size, 0), ids)


def build_request(batch, owner_map, codes, dtype=torch.float32):
    """Return messages by rank, and lookups."""
    declaration = DECLARATIONS[dtype]
    lookups = collect_lookups(batch, declaration, build_lookup_columns(declaration))
    return pack_bag_lookups(lookups, ROWS, owner_map, codes), lookups


def owners_of(batch, owner_map):
    """Return the owner rank of each lookup, by column."""
    result = []
    for name, t in zip(NAMES, TABLE_OF, strict=True):
        place = torch.as_tensor(
            _native.owner_of(batch.ids[name].values, int(ROWS[t]), int(owner_map.num_owners[t]))
        )
        result.append(
            [int(np.flatnonzero(owner_map.owner_indices[:, t] == p)[0]) for p in place.tolist()]
        )
    return result


def columns_at(rank, batch, owner_map, codes):
    """Return the twin's columns of a rank's share of a batch."""
    owners, result, before = owners_of(batch, owner_map), [], 0
    for c, (name, t) in enumerate(zip(NAMES, TABLE_OF, strict=True)):
        ids = batch.ids[name]
        ends = np.arange(batch.size + 1) if ids.offsets is None else ids.offsets.numpy()
        own = [e for e in range(len(ids.values)) if owners[c][e] == rank]
        if owner_map.owner_indices[rank, t] >= 0:
            bag_of = np.searchsorted(ends, own, side="right") - 1
            of_bag: list[list[int]] = [[] for _ in range(batch.size)]
            for e, bag in zip(own, bag_of, strict=True):
                of_bag[bag].append(int(ids.values[e]))
            weights = None if ids.weights is None else [ids.weights[e].numpy().tobytes() for e in own]  # fmt: skip
            known = None if codes is None else [int(codes[before + e]) for e in own]
            result.append(twin.Column(t, of_bag, weights, known))
        before += len(ids.values)
    return result


def owned_by(rank, owner_map):
    own = [c for c, t in enumerate(TABLE_OF) if owner_map.owner_indices[rank, t] >= 0]
    tables = torch.tensor([TABLE_OF[c] for c in own], dtype=torch.int32)
    return LookupColumns(tuple(own), (), tables, torch.zeros(len(own), dtype=torch.uint8))


def spaces_of(rank, owner_map):
    return {
        t: IdSpace(
            int(ROWS[t]), int(owner_map.num_owners[t]), int(owner_map.owner_indices[rank, t])
        )
        for t in range(len(TABLES))
        if owner_map.owner_indices[rank, t] >= 0
    }


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.data())
def test_messages_equal_their_twins_and_arrive(data):
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 5]))
    owner_map = build_owner_map([*[row_wise(num_ranks)] * 3, table_wise(num_ranks - 1)], num_ranks)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    batches, codes, sent = [], [], []
    for _ in range(num_ranks):
        size = data.draw(st.sampled_from([0, 1, 5, 40]))
        kinds = data.draw(st.lists(st.sampled_from(list(LENGTHS)), min_size=5, max_size=5))
        weighted = data.draw(st.sets(st.sampled_from(NAMES)))
        spread = data.draw(st.sampled_from([4, 600, 2**62]))
        batches.append(batch_of(random, size, kinds, weighted, dtype, spread))
        count = sum(len(id_.values) for id_ in batches[-1].ids.values())
        known = data.draw(st.booleans())
        codes.append(random.integers(0, 256, count).astype(np.uint8) if known else None)
        sent.append(build_request(batches[-1], owner_map, codes[-1], dtype)[0])
    for rank in range(num_ranks):
        spaces, owned = spaces_of(rank, owner_map), owned_by(rank, owner_map)
        shares = [
            columns_at(rank, batch, owner_map, known)
            for batch, known in zip(batches, codes, strict=True)
        ]
        for share, batch, message in zip(shares, batches, sent, strict=True):
            wanted = twin.pack_bags(share, batch.size, spaces)
            assert message[rank].tobytes() == wanted
            restored = twin.unpack_bags(wanted, owned.tables.tolist(), spaces, dtype.itemsize)
            empty = [column.codes == [] for column in share]
            assert all(
                (b.bags, b.weights) == (c.bags, c.weights)
                and (b.codes == c.codes or (e and not b.codes))
                for b, c, e in zip(restored, share, empty, strict=True)
            )
        messages = [message[rank] for message in sent]
        check_joined(
            unpack_bag_lookups(messages, owned, ROWS, owner_map, rank, dtype),
            shares,
            batches,
            dtype,
        )


def check_joined(result, shares, batches, dtype):
    lookups = result.lookups
    assert result.sizes == [batch.size for batch in batches]
    assert lookups.batch_size == sum(result.sizes)
    factor = "f" if dtype == torch.float32 else "d"
    for c in range(len(shares[0])):
        own = [share[c] for share in shares]
        first, last = lookups.feature_offsets[c : c + 2].tolist()
        assert lookups.ids[first:last].tolist() == [i for column in own for i in column.ids]
        lengths = [len(bag) for column in own for bag in column.bags]
        if lookups.bags[c] is None:
            assert set(lengths) <= {1}
        else:
            assert lookups.bags[c].diff().tolist() == lengths and lookups.bags[c][0] == 0
        if lookups.weights[c] is not None:
            wanted = [
                value
                for column in own
                for value in (
                    [1.0] * len(column.ids)
                    if column.weights is None
                    else np.frombuffer(b"".join(column.weights), factor).tolist()
                )
            ]
            assert lookups.weights[c].tolist() == wanted
        else:
            assert not any(column.weights for column in own)
        if result.codes is not None:
            reported = [x for column in own for x in (column.codes or [0] * len(column.ids))]
            assert result.codes[first:last].tolist() == reported
        else:
            assert not any(column.codes for column in own)


def many(random, distinct, owner_map, size=64):
    """One rank's messages for bags of 30 of so many different ids."""
    batch = batch_of(random, size, ["many"] * 5, {"item"}, torch.float32, distinct)
    return build_request(batch, owner_map, None)


def test_ids_that_come_again_are_told_once():
    owner_map = build_owner_map([row_wise(2)] * 4, 2)
    random = np.random.default_rng(0)
    for distinct, limit in ((30, 1.0), (2**40, 8.1)):
        messages, lookups = many(random, distinct, owner_map)
        weights = 4 * len(lookups.weights[3])
        bytes_each = (sum(map(len, messages)) - weights) / len(lookups.ids)
        assert bytes_each < limit


@pytest.mark.parametrize(
    ("rows", "spread", "size", "longest"),
    [
        (
            27,
            27,
            512,
            40,
        ),  # all rows: a row is its own number, and the count of lookups decides by a byte
        (50_000, 3_000, 300, 30),  # dense enough to be marked
        (50_000, 50_000, 300, 1),
        (2**40, 2_000, 300, 30),  # hashed: rows that one radix sort tells apart
        (2**62 - 1, 2**62 - 1, 300, 3),  # and such as need comparisons
        (None, 2_000, 300, 30),
        (None, 2**62, 300, 3),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_shorter_form_is_told_however_it_is_found(rows, spread, size, longest, num_ranks):
    table = Table("user", 2, rows=rows)
    declaration = declare([table], [Feature("user", "user", pooling="sum")], {})
    random = np.random.default_rng(size)
    lengths = random.integers(0, longest + 1, size)
    values = torch.from_numpy(random.integers(0, spread, int(lengths.sum())))
    if rows is None:
        values *= -0x61C8864680B583EB  # anywhere
    ids = Ids(values, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])))
    lookups = collect_lookups(
        Batch(size, torch.zeros(size, 0), {"user": ids}),
        declaration,
        build_lookup_columns(declaration),
    )
    owner_map, table_rows = (
        build_owner_map([row_wise(num_ranks)], num_ranks),
        torch.tensor([rows or 0]),
    )
    messages = pack_bag_lookups(lookups, table_rows, owner_map, None)
    owners = np.asarray(_native.owner_of(values, rows or 0, num_ranks))
    bounds = np.cumsum(lengths)[:-1]
    for rank, message in enumerate(messages):
        of_bags = [
            word[whose == rank].tolist()
            for word, whose in zip(np.split(values.numpy(), bounds), np.split(owners, bounds), strict=True)
        ]  # fmt: skip
        space = IdSpace(rows or 0, num_ranks, rank)
        assert message.tobytes() == twin.pack_bags([twin.Column(0, of_bags)], size, {0: space})


def test_an_id_outside_is_refused_in_the_words_of_a_plan():
    declaration = declare(TABLES[:1], [Feature("user", "user", pooling="sum")], {})
    owner_map = build_owner_map([row_wise(2)], 2)
    for wrong in (53, -1, 2**63 - 1, -(2**63)):
        ids = Ids(torch.tensor([5, 52, wrong, 0]), torch.tensor([0, 3, 4]))
        lookups = collect_lookups(
            Batch(2, torch.zeros(2, 0), {"user": ids}),
            declaration,
            build_lookup_columns(declaration),
        )
        lines = []
        for ask in (
            lambda lookups=lookups: pack_bag_lookups(lookups, ROWS[:1], owner_map, None),
            lambda lookups=lookups: _native.make_plan(
                lookups.native, ROWS[:1], owner_map.num_owners
            ),
        ):
            with pytest.raises(IndexError) as refused:
                ask()
            lines.append(str(refused.value))
        assert lines == [f"table 0 feature 0 position 2 id {wrong} rows 53"] * 2


def test_a_column_of_a_table_elsewhere_takes_no_byte():
    owner_map = build_owner_map([table_wise(0), table_wise(0), table_wise(0), table_wise(1)], 2)
    batch = batch_of(np.random.default_rng(0), 3, ["one"] * 5, set(), torch.float32, 9)
    messages, _ = build_request(batch, owner_map, None)
    # samples, no codes; a column: equal lengths of 1; ids as listed: kind, count, width of a block, 3 rows of 9
    assert len(messages[1]) == 2 + 2 + 3 + 2


@pytest.mark.parametrize("longest", [1, 2, 3, 15, 16, 300, 70_000])
def test_lengths_take_as_few_bits_as_they_need(longest):
    bits = next(bits for bits in LENGTH_BITS if longest < 2**bits)
    declaration = declare(TABLES[:1], [Feature("user", "user", pooling="sum")], {})
    ids = Ids(torch.zeros(longest, dtype=torch.int64), torch.tensor([0, 0, longest]))
    lookups = collect_lookups(
        Batch(2, torch.zeros(2, 0), {"user": ids}), declaration, build_lookup_columns(declaration)
    )
    owner_map = build_owner_map([row_wise(1)], 1)
    (message,) = pack_bag_lookups(lookups, ROWS[:1], owner_map, None)
    assert message[2] == bits


def test_damaged_messages_are_refused_or_ask_for_rows_that_are_there():
    owner_map, random = build_owner_map([row_wise(2)] * 4, 2), np.random.default_rng(1)
    whole = [m for distinct in (30, 2**40) for m in many(random, distinct, owner_map, 20)[0][1:]]
    owned, refused = owned_by(1, owner_map), 0
    for i in range(600):
        bad = whole[i % 2].copy()
        if random.integers(2):
            bad = bad[: random.integers(len(bad))].copy()
        for _ in range(random.integers(1, 4)):
            if len(bad):
                bad[random.integers(len(bad))] = int(random.integers(256))
        try:
            result = unpack_bag_lookups([whole[0], bad], owned, ROWS, owner_map, 1, torch.float32)
        except WorldError as error:
            assert f"rank 1 sent {len(bad)} bytes that are no lookups" in str(error)
            refused += 1
            continue
        bounds = result.lookups.feature_offsets.tolist()
        for c, t in enumerate(owned.tables.tolist()):
            ids = result.lookups.ids[bounds[c] : bounds[c + 1]]
            assert set(np.asarray(_native.owner_of(ids, int(ROWS[t]), 2)).tolist()) <= {1}
    assert refused > 300


def test_what_is_no_message_is_refused():
    owner_map = build_owner_map([row_wise(1)] * 4, 1)
    (message,), _ = many(np.random.default_rng(2), 30, owner_map, 4)
    owned = owned_by(0, owner_map)
    for bad, words in (
        (message[:0], "rank 0 sent 0 bytes that are no lookups"),
        (np.append(message, message[:3]), "3 bytes after its end"),
        (np.append(message[:1], np.append([9], message[2:])).astype(np.uint8), "a flag of 9"),
        (np.append([255] * 4, np.append([1], message[1:])).astype(np.uint8), "samples"),
        (message[:-3], "wanted 28|more bytes"),
    ):
        with pytest.raises(WorldError, match=words):
            unpack_bag_lookups([bad], owned, ROWS, owner_map, 0, torch.float32)
