"""Hot rows lie on every rank, and training is what it would be without: values, updates, clocks, whoever reads them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, probe_ids, train

from colonnade import (
    SGD,
    AgeEviction,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    Plan,
    PlanConfig,
    RandomAdmission,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError, DataError, IdRangeError
from colonnade.publish.transfer import load_rows, trained_ids
from colonnade.store.budget import slot_bytes
from colonnade.topology.sharding import (
    build_hot_rows,
    column_wise,
    host_wise,
    read_sharding,
    replicated,
    row_wise,
    table_wise,
)

SIZES = [23, 1, 0, 24]
IDS = probe_ids()
HOT = {"user": range(7), "item": IDS["item"][:30], "tag": [4, 1, 0], "wide": IDS["wide"][:9].flip(0)}  # fmt: skip
SOME = {"item": IDS["item"][[1, 0, 5, 399]], "wide": [0]}
POOLED = dict.fromkeys(("user", "item", "tag"), "pooled")  # "wide" is read as a sequence
MIXED = {"user": "pooled", "item": "rows", "tag": "pooled"}
CASE = {"sizes": SIZES}


def train_hot(mesh, folder):
    n = mesh.num_ranks
    dealt = {"user": table_wise(n - 1), "item": table_wise(0), "tag": host_wise(mesh.world, 0)}
    return [
        train(mesh, **CASE, hot=HOT),
        train(mesh, **CASE, hot=HOT),
        train(mesh, **CASE, hot=HOT, dram_bytes=30_000, folder=folder / "tiers", lookahead=3,
              evaluate_every=2),
        train(mesh, **CASE, hot=HOT, hbm_bytes=20_000, folder=folder / "device"),
    ], [
        train(mesh, **CASE),
        train(mesh, **CASE, hot=SOME),
        train(mesh, **CASE, hot=HOT, shardings=dealt),
        train(mesh, **CASE, hot=HOT, exchanges=POOLED),
        train(mesh, **CASE, hot=HOT, exchanges=MIXED, shardings=dealt),
        train(mesh, **CASE, hot={"wide": HOT["wide"]}, exchanges=POOLED, dram_bytes=30_000,
              folder=folder / "pooled"),
    ], [
        train(mesh, **CASE, staleness=2),
        train(mesh, **CASE, staleness=2, hot=HOT),
        train(mesh, **CASE, staleness=2, hot=HOT, exchanges=POOLED),
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_hot_rows_train_what_rows_do(num_ranks, tmp_path):
    """Bags, means, weighted ones, sequences and parts, of vocabulary and of open tables."""
    wanted = train(Mesh(), **CASE)
    assert_same_bits(wanted, train(Mesh(), **CASE, hot=HOT))
    for bits, close, stale in run_ranks(num_ranks, train_hot, tmp_path):
        for number, result in enumerate(bits):
            print("bits", number)
            assert_same_bits(bits[0], result)
        for number, result in enumerate([bits[0], *close]):
            print("close", number)
            assert_close(wanted, result, rtol=1e-10)
        for result in stale[1:]:
            assert_close(stale[0], result, rtol=1e-10)


TABLES = [
    Table("item", 3, rows=50, optimizer=SGD(lr=0.1)),
    Table("user", 2, optimizer=SGD(lr=0.1), initializer=Uniform(scale=0.5)),
]
FEATURES = [Feature("item", "item"), Feature("user", "user", pooling="mean")]
LISTED = {"item": [3, 1, 3, 49], "user": torch.tensor([-5, 2**63 - 1])}


def collection_of(mesh, **settings):
    collection = EmbeddingCollection(TABLES, FEATURES, seed=2)
    return collection.open(build_plan(TABLES, mesh.num_ranks, PlanConfig(**settings)), mesh)


def batch_of(items, users, offsets, weights=None):
    users = Ids(torch.tensor(users, dtype=torch.int64), torch.tensor(offsets), weights)
    return Batch(len(items), torch.zeros(len(items), 0), {"item": Ids(torch.tensor(items)), "user": users})  # fmt: skip


def said_of(error, action):
    with pytest.raises(error) as result:
        action()
    return str(result.value)


def in_and_out(mesh):
    """Rows that are loaded, looked up, deleted and listed; what is sent for them; bad batches."""
    alone = replace(mesh, traffic=Traffic())
    hot = collection_of(alone, tables=by_table(replicated_rows=LISTED))
    cold = collection_of(mesh)
    ids = torch.tensor([0, 1, 2, 3, 49])
    assert torch.equal(hot.rows("item", ids), cold.rows("item", ids))  # first values
    for collection_ in (hot, cold):
        load_rows(collection_, "item", torch.arange(150.0).view(50, 3))
        load_rows(collection_, "user", torch.ones(3, 2), torch.tensor([-5, 7, 2**63 - 1]))
    assert torch.equal(hot.rows("item", ids), torch.arange(150.0).view(50, 3)[ids])
    first = trained_ids(hot, "item"), trained_ids(hot, "user")
    listed = torch.cat([rows.ids for rows in hot.scan("item")])
    for collection_ in (hot, cold):
        collection_.delete("item", torch.tensor([0, 3, 10]))
    assert torch.equal(hot.rows("item", ids), cold.rows("item", ids))
    remaining_ids = trained_ids(hot, "item")

    def sent():
        return alone.traffic.sent_bytes.get(("fetch", "local"), 0) + alone.traffic.sent_bytes.get(
            ("evaluate", "local"), 0
        )

    batch = batch_of([3, 49, 1], [-5, 2**63 - 1, 8, -5], [0, 2, 2, 4])
    output = [collection_(copy(batch)) for collection_ in (hot, cold)]
    for name in ("item", "user"):
        torch.testing.assert_close(output[0][name], output[1][name])
    for collection_ in (hot, cold):
        collection_.discard_batches()
        collection_.eval()
    before = sent()
    with torch.no_grad():
        all_hot = batch_of([3, 49, 1], [-5, 2**63 - 1, -5], [0, 2, 2, 3])
        result, wanted = hot(copy(all_hot)), cold(copy(all_hot))
    assert torch.equal(result["item"], wanted["item"])
    words = sent() - before
    bad = [
        said_of(IdRangeError, lambda: hot(batch_of([3, 50, 1], [], [0, 0, 0, 0]))),
        said_of(DataError, lambda: hot(batch_of([3, 4], [7, 8], [0, 1, 1]))),
        said_of(DataError, lambda: hot(Batch(1, torch.zeros(1, 0), {"item": Ids(torch.tensor([1]))}))),
    ]  # fmt: skip
    return first, remaining_ids, listed, words, bad


def zipf_bytes(mesh, num_hot):
    """Bytes that this rank sends by channel, of three steps whose ids follow Zipf's law."""
    alone = replace(mesh, traffic=Traffic())
    table = Table("item", 64, rows=20_000, optimizer=SGD(lr=0.1))
    collection = EmbeddingCollection([table], [Feature("item", "item")])
    collection.open(
        build_plan(
            [table],
            mesh.num_ranks,
            PlanConfig(tables={"item": {"replicated_rows": range(num_hot)}}),
        ),
        alone,
    )
    rows, chance = RowOptimizer(collection), 1 / torch.arange(1.0, 20_001) ** 1.05
    for step in range(3):
        random = torch.Generator().manual_seed(10 * step + mesh.rank)
        ids = torch.multinomial(chance, 1024, replacement=True, generator=random)
        collection(Batch(1024, torch.zeros(1024, 0), {"item": Ids(ids)}))["item"].sum().backward()
        rows.step()
    sent = alone.traffic.sent_bytes
    return {channel: sent[channel, "local"] for channel in ("fetch", "push")}


def three_steps(mesh, **settings):
    """Norms of all gradients and rows, after a lookahead's batches."""
    collection = collection_of(mesh, **settings)
    rows, norms = RowOptimizer(collection), []

    def batches():
        for step in range(4):
            random = torch.Generator().manual_seed(10 * step + mesh.rank)
            items = torch.randint(0, 50, (20,), generator=random)
            users = [-5, 2**63 - 1, 7, step, -5] * 8
            yield batch_of(items.tolist(), users, list(range(0, 41, 2)), torch.arange(40) / 8)

    for batch in collection.lookahead(batches()):
        result = collection(batch)
        (result["item"].square().sum() + result["user"].sin().sum()).backward()
        norms.append(float(rows.clip_grad_norm_(1.0)))
        rows.step()
    ids = {"item": torch.arange(50), "user": torch.tensor([-5, 2**63 - 1, 7, 0, 1, 2, 3])}
    return torch.tensor(norms), *[collection.rows(name, id_) for name, id_ in ids.items()]


def hot_and_bytes(mesh):
    hot = by_table(replicated_rows=LISTED)
    return in_and_out(mesh), [zipf_bytes(mesh, num_hot) for num_hot in (0, 1000)], [
        three_steps(mesh), three_steps(mesh, tables=hot),
        three_steps(mesh, tables=hot, exchange="pooled"),
        three_steps(mesh, tables=hot, codec={"values": "bf16", "gradients": "fp16"}),
    ]  # fmt: skip


def test_rows_go_in_and_come_out():
    """Clipped, pooled and coded as without; and values of hot rows do not travel: on two ranks, about as many
    bytes of gradients do instead."""
    ranks = run_ranks(2, hot_and_bytes)
    for _, _, (wanted, *others) in ranks:
        for result, error in zip(others, (1e-5, 1e-5, 2e-2), strict=True):
            for actual, expected in zip(result, wanted, strict=True):
                torch.testing.assert_close(actual, expected, rtol=error, atol=error)
    for _, (without, hot), _ in ranks:
        print(without, hot)
        assert hot["fetch"] < 0.55 * without["fetch"]
        assert sum(hot.values()) < 1.02 * sum(without.values())
    for rank, (first, remaining, listed, words, bad) in enumerate(first_ for first_, _, _ in ranks):
        assert torch.equal(first[0], torch.arange(50)) and len(first[1]) == 3
        assert torch.equal(remaining, torch.tensor([i for i in range(50) if i not in (0, 3, 10)]))
        assert {1, 3, 49} <= set(listed.tolist())  # on every rank
        owned = set(listed.tolist()) - {1, 3, 49}
        assert owned == set(range(50)) - {1, 3, 49} - set(not_of(rank, first[0]))
        assert words < 100  # no value
        assert "feature 'item', lookup 1 of the batch: got id 50, wanted 0 .. 49 of" in bad[0]
        assert "feature 'user': got offsets" in bad[1]
        assert "the batch has no feature 'user'" in bad[2]


def not_of(rank, ids):
    """Return the vocabulary ids that the other rank owns."""
    return ids[~row_wise(2).shard_of(rank).owns(ids, 50)].tolist()


def test_a_plan_says_what_is_hot():
    plan = build_plan(
        TABLES, 2, PlanConfig(memory={"dram": 10_000}, tables=by_table(replicated_rows=LISTED))
    )
    assert Plan.from_json(plan.to_json()) == plan
    item, user = (table.sharding for table in plan.tables)
    assert (item.hot.ids, user.hot.ids) == ((1, 3, 49), (-5, 2**63 - 1))
    assert str(item) == "row_wise, ranks 0 .. 1, 3 hot rows on each of 2 ranks"
    assert read_sharding(user.to_dict()) == user
    assert build_plan(TABLES, 1, PlanConfig(tables=by_table(replicated_rows=LISTED))) == build_plan(
        TABLES, 1
    )
    assert "9223372036854775807" not in repr(plan)
    # Copies are always in memory, out of what each rank may use.
    without = build_plan(TABLES, 2, PlanConfig(memory={"dram": 10_000}))
    taken = 3 * slot_bytes(TABLES[0]) + 2 * slot_bytes(TABLES[1])
    less = build_plan(TABLES, 2, PlanConfig(memory={"dram": 10_000 - taken}))
    rows = [table.tables[1].capacity_rows for table in (plan, less, without)]
    assert rows[0] == rows[1] < rows[2]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"replicated_rows": {"other": [1]}}, "plan.tables: got 'other', wanted a table of this model: item, user"),
        ({"replicated_rows": {"item": [3, 50]}}, "got hot rows 3 .. 50, wanted ids in 0 .. 49"),
        ({"replicated_rows": {"user": [2**63]}}, "wanted 64-bit ids"),
        ({"replicated_rows": {"item": [1]}, "sharding": {"item": replicated(2)}}, "with sharding=replicated, wanted"),
        ({"replicated_rows": {"item": [1]}, "sharding": {"item": column_wise([0, 1])}},
         "with sharding=column_wise, wanted"),
        ({"replicated_rows": {"item": [1]}, "servers": 1}, "got hot rows and servers"),
        ({"replicated_rows": {"item": range(50)}, "memory": {"dram": 1500}},
         "plan.memory.dram: got 1,500 bytes, wanted more than"),
        ({"sharding": {"item": replace(row_wise(2), hot=build_hot_rows([1], 3))}}, "hot rows on 3 of 2 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_hot(settings, wanted):
    plan = {name: settings[name] for name in ("servers", "memory") if name in settings}
    tables = {name: settings[name] for name in settings.keys() - plan.keys()}
    with pytest.raises(ValueError, match=wanted):
        build_plan(TABLES, 2, PlanConfig(**plan, tables=by_table(**tables)))


@pytest.mark.parametrize(
    "stays", [{"admission": RandomAdmission(probability=0.5)}, {"eviction": AgeEviction(steps=2)}]
)
def test_tables_that_forget_have_no_hot_rows(stays):
    tables = [Table("t", 3, **stays)]
    text = said_of(
        ConfigError,
        lambda: build_plan(tables, 2, PlanConfig(tables={"t": {"replicated_rows": [1]}})),
    )
    assert "got hot rows of a table with admission or eviction" in text
    assert build_plan(tables, 1, PlanConfig(tables={"t": {"replicated_rows": [1]}})) == build_plan(
        tables, 1
    )
