"""Rows in and out of plain PyTorch and of exported files."""

from __future__ import annotations

import json

import pytest
import torch
from logs import commit_rows, open_test_log
from own_model import FILMS, USERS, Net, assert_same, rows_of, source, splits
from ranks import run_ranks
from torch import nn

import colonnade
from colonnade import (
    FTRL,
    SGD,
    Adam,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    Table,
    load_rows,
    to_embedding,
    trained_ids,
)
from colonnade.config.plan import PlanConfig
from colonnade.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    DataError,
    IdRangeError,
    StorageError,
)
from colonnade.plan.build import build_plan

FAST = {"batch_size": 50, "quiet": True, "threads": 1}


def opened(*tables, mesh=None, **where):
    collection = EmbeddingCollection(
        tables, [Feature(table.name, table.name) for table in tables], seed=1
    )
    return collection.open(mesh=mesh, **where)


def test_an_embedding_goes_in_and_comes_out():
    collection = opened(Table("item", 4, rows=9), Table("word", 3))
    wanted = nn.Embedding(9, 4)
    load_rows(collection, "item", wanted)
    assert torch.equal(to_embedding(collection, "item").weight, wanted.weight)
    bag, ids = nn.EmbeddingBag(3, 3), torch.tensor([2**62, -5, 77])
    load_rows(collection, "word", bag, ids)
    assert trained_ids(collection, "word").tolist() == [-5, 77, 2**62]
    assert torch.equal(to_embedding(collection, "word", ids).weight, bag.weight)
    looked_up = collection(
        Batch(2, torch.zeros(2, 0), {"item": Ids(torch.tensor([8, 0])), "word": Ids(ids[:2])})
    )
    assert torch.equal(looked_up["item"], wanted.weight[[8, 0]])
    assert torch.equal(looked_up["word"], bag.weight[:2])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("master", [False, True])
def test_every_dtype(dtype, master):
    if master and dtype != "bfloat16":
        pytest.skip("only bfloat16 has a master")
    table = Table("item", {"deep": 3, "wide": 1}, dtype=dtype, master=master, optimizer=SGD(lr=0.5))
    collection = opened(table)
    weights = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    load_rows(collection, "item", weights, torch.arange(50) * 3)
    result = to_embedding(collection, "item", torch.arange(50) * 3).weight.detach()
    assert result.dtype == getattr(torch, dtype)
    if master:  # the stored half is the nearest, half up; and nothing of a float32 is lost
        torch.testing.assert_close(result.float(), weights, rtol=2**-8, atol=0)
        train(collection, [0, 3], lr=0.0)
        high = collection.rows("item", torch.tensor([0, 3])).view(torch.int16).int() << 16
        records = next(collection.store.scan(0))[1]
        low = records[:2, 8:16].contiguous().view(torch.int16).int()
        assert torch.equal((high + low).view(torch.float32), weights[:2])
    else:
        assert torch.equal(result, weights.to(result.dtype))


def train(collection, ids, lr=None):
    rows = RowOptimizer(collection)
    for group in rows.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    batch = Batch(len(ids), torch.zeros(len(ids), 0), {"item": Ids(torch.tensor(ids))})
    sum(part.sum() for part in collection(batch).values()).backward()
    rows.step()


def test_loaded_rows_train_on_from_fresh_state():
    """Momentum starts at nothing; Adam's moments too, and so does its count of steps."""
    weights, step = torch.randn(6, 4), torch.tensor([2])
    for optimizer in (SGD(lr=0.1, momentum=0.9), Adam(lr=0.1, betas=(0.9, 0.99))):
        collection = opened(Table("item", 4, rows=6, optimizer=optimizer))
        load_rows(collection, "item", weights)
        train(collection, [2])
        torch.testing.assert_close(collection.rows("item", step)[0], weights[2] - 0.1)


def test_a_single_row_is_listed():
    collection = opened(Table("item", 3, optimizer=SGD(lr=0.1)))
    load_rows(collection, "item", torch.ones(1, 3), torch.tensor([7]))
    (rows,) = collection.scan("item")
    assert (rows.ids.tolist(), rows.clocks.tolist()) == ([7], [1])


def test_ftrl_keeps_the_weights_it_is_given():
    """FTRL computes weights from its state: a zero gradient must leave them, or they were lost."""
    settings = {"lr": 0.3, "l1": 0.2, "l2": 0.1, "beta": 0.7, "initial_accumulator": 0.4}
    collection = opened(Table("item", 4, rows=6, optimizer=FTRL(**settings)))
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    weights[1, 2] = 0.0
    load_rows(collection, "item", weights)
    batch = Batch(2, torch.zeros(2, 0), {"item": Ids(torch.tensor([1, 4]))})
    (collection(batch)["item"].sum() * 0).backward()
    RowOptimizer(collection).step()
    torch.testing.assert_close(collection.rows("item", torch.arange(6)), weights)


def test_more_rows_than_memory_holds(tmp_path):
    table = Table("item", 4, optimizer=Adam(lr=0.1))
    backing = open_test_log(
        tmp_path, table_name="item", record_bytes=table.record_bytes, identity="x", step=None
    )
    plan = build_plan([table], 1, PlanConfig(memory={"dram": 100 * (table.record_bytes + 16)}))
    collection = EmbeddingCollection([table], [Feature("item", "item")])
    collection.open(plan, backings=[backing])
    weights, ids = torch.randn(5000, 4), torch.randperm(9000)[:5000] - 4000
    load_rows(collection, "item", weights, ids)
    assert torch.equal(to_embedding(collection, "item", ids).weight, weights)
    assert torch.equal(trained_ids(collection, "item"), ids.sort().values)
    commit_rows(collection.store, 1)
    assert len(backing) == 5000
    backing.close()


def round_trip(mesh):
    collection = opened(Table("item", 4, rows=101), Table("word", 3), mesh=mesh)
    weights = torch.randn(101, 4, generator=torch.Generator().manual_seed(0))
    load_rows(collection, "item", weights)
    words = torch.arange(50) * 7919
    load_rows(collection, "word", weights[:50, :3].contiguous(), words)
    result = to_embedding(collection, "item").weight.detach()
    return torch.equal(result, weights) and torch.equal(trained_ids(collection, "word"), words)


def test_on_several_ranks():
    assert run_ranks(2, round_trip) == [True, True]


def test_bad_weights_change_nothing():
    collection = opened(Table("item", 4, rows=6))
    before = collection.rows("item", torch.arange(6))
    weights, twice = torch.randn(2, 4), torch.tensor([3, 3])
    for error, words, gradient in (
        (ConfigError, r"wanted \(N, 4\)", (torch.randn(2, 5),)),
        (ConfigError, r"wanted \(2,\) int64", (weights, torch.tensor([1]))),
        (IdRangeError, r"ids 1 \.\. 6, wanted 0 \.\. 5", (weights, torch.tensor([1, 6]))),
        (DataError, "id 3 more than once", (weights, twice)),
        (DataError, "NaN or inf in row 1", (torch.tensor([[1.0] * 4, [torch.nan] * 4]),)),
    ):
        with pytest.raises(error, match=words):
            load_rows(collection, "item", *gradient)
    with pytest.raises(ConfigError, match="unknown table"):
        load_rows(collection, "itme", weights)
    with pytest.raises(ConfigError, match="is open: say which ids"):
        to_embedding(opened(Table("item", 4)), "item")
    assert torch.equal(collection.rows("item", torch.arange(6)), before)


def test_an_export_is_read_back(tmp_path):
    model = Net()
    colonnade.fit(model, splits(), run=tmp_path / "run", epochs=1, **FAST)
    colonnade.export_run(tmp_path / "run", tmp_path / "out")
    output = json.loads((tmp_path / "out" / "model.json").read_text())
    assert output["schema"]["labels"] == ["label"] and output["schema"]["dense"] == [
        "dense0",
        "dense1",
    ]
    other = Net(seed=9)
    other.collection.seed = 0
    colonnade.load_export(other, other.collection, tmp_path / "out")
    assert_same(model, other)
    colonnade.fit(other, source(100), **FAST)  # and trains on
    assert rows_of(other)["user"].shape == (USERS, 4) and FILMS
    with pytest.raises(StorageError, match=r"model\.json: could not read"):
        colonnade.load_export(other, other.collection, tmp_path)
    with pytest.raises(CheckpointError, match="has nothing for table 'more'"):
        bigger = Net(extra=("more",))
        colonnade.load_export(bigger, bigger.collection, tmp_path / "out")
    before = model.bias.weight.clone()
    short = tmp_path / "out" / output["tables"][0]["file"]
    short.write_bytes(short.read_bytes()[:-4])
    with pytest.raises(CorruptionError, match=f"{short.name}: got"):
        colonnade.load_export(model, model.collection, tmp_path / "out")
    assert torch.equal(model.bias.weight, before)
