"""Outputs come in the order of the declaration; a row's first value depends only on (seed, table, id)."""

from __future__ import annotations

import torch
from logs import commit_rows
from ranks import run_ranks
from scenario import Net, global_batch, open_backings, probe_ids, share_of, train

from colonnade import Mesh, PlanConfig, _native, build_plan


def keys_and_births(mesh, dram_bytes, folder):
    collection = Net().embeddings
    plan = build_plan(collection.tables, mesh.num_ranks, PlanConfig(memory={"dram": dram_bytes}))
    backings = open_backings(folder, mesh, collection.tables) if dram_bytes else []
    collection.open(plan, mesh, backings=backings)
    result = collection(share_of(global_batch(0, 8), mesh.rank, mesh.num_ranks))
    collection.discard_batches()
    births = {t.name: collection.rows(t.name, probe_ids()[t.name]) for t in collection.tables}
    for backing in backings:
        backing.close()
    return list(result), births


def test_order_and_births_in_any_world(tmp_path):
    wanted = keys_and_births(Mesh(), None, tmp_path)
    assert wanted[0] == ["fm", "deep", "user.wide", "history"]
    others = [keys_and_births(Mesh(), 40_000, tmp_path / "tiered")]
    others += run_ranks(2, keys_and_births, None, tmp_path)
    for keys, births in others:
        assert keys == wanted[0]
        for name, rows in births.items():
            assert torch.equal(rows, wanted[1][name])


def test_values_stand_in_the_declared_order():
    """`deep` lists its fields backwards: its columns are the fields' own values, in that order."""
    collection = Net().embeddings
    batch = global_batch(0, 6)
    collection.eval()
    with torch.no_grad():
        deep = collection(batch)["deep"]
    users = collection.rows("user", batch.ids["user"].values)
    items = collection.rows("item", batch.ids["item"].values)
    assert torch.equal(deep[:, -5:], users[:, :5])  # the part named deep
    assert torch.equal(deep[:, -10:-5], items)


def test_seed_and_table_change_births_and_nothing_else_does():
    ids = torch.arange(20)
    one, same, other = (Net(seed=s).embeddings.open() for s in (3, 3, 4))
    assert torch.equal(one.rows("user", ids), same.rows("user", ids.flip(0)).flip(0))
    assert not torch.equal(one.rows("user", ids), other.rows("user", ids))
    assert not torch.equal(one.rows("user", ids)[:, :3], one.rows("wide", ids)[:, :3])


def test_rows_never_trained_cost_no_storage(tmp_path):
    collection = Net().embeddings
    backings = open_backings(tmp_path, Mesh(), collection.tables)
    collection.open(build_plan(collection.tables), Mesh(), backings=backings)
    collection(global_batch(0, 50))
    collection.discard_batches()  # looked up, never trained
    commit_rows(collection.store, 1)
    assert [len(backing) for backing in backings] == [0, 0, 0, 0]
    for backing in backings:
        backing.close()


def test_births_do_not_depend_on_what_was_trained_first():
    births = Net().embeddings.open()
    trained = train(Mesh(), steps=1)
    touched = set(global_batch(0, 23).ids["user"].values.tolist())
    for user in set(range(53)) - touched:
        assert torch.equal(births.rows("user", torch.tensor([user]))[0], trained.rows["user"][user])


def test_owners_partition_every_table():
    for rows in (0, 53):
        ids = probe_ids()["user" if rows else "item"]
        for num_ranks in (1, 2, 3, 7):
            owner = torch.as_tensor(_native.owner_of(ids, rows, num_ranks))
            assert int(owner.min()) >= 0 and int(owner.max()) < num_ranks
            assert len(owner.unique()) == num_ranks
