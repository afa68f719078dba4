"""Hints of when an id is looked up next: against a loop that looks, and on their way to the store."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from own_model import Net, splits
from ranks import console_of, run_ranks
from scenario import open_backings

import colonnade
from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.cache.next_use import NEVER, add_next_use_codes, encode_distance
from colonnade.config.run import RunConfig, build_config, override_settings
from colonnade.data import Splits, open_source
from colonnade.data.batches import open_batches
from colonnade.data.contract import START, Column, Position, Schema
from colonnade.data.processes import pack_batches, unpack_batches
from colonnade.errors import ConfigError, DataError
from colonnade.run.run import open_run

SCHEMA = Schema(
    (), (Column("a", table="item"), Column("bag", kind="bag", table="item"), Column("b"))
)


class Listed:
    """20 batches; ids of `item` in two columns."""

    schema, num_samples = SCHEMA, None

    def batches(self, batch_size, *, rank=0, num_ranks=1, start=START):
        for step in range(start.step, 20):
            random = torch.Generator().manual_seed(step)
            offsets = torch.tensor([0, 1, 1, 4, 7])
            ids = {
                "a": Ids(torch.randint(-4, 30, (4,), generator=random)),
                "bag": Ids(torch.randint(-4, 30, (7,), generator=random), offsets),
                "b": Ids(torch.randint(0, 9, (4,), generator=random)),
            }
            yield Batch(4, torch.zeros(4, 0), ids)


def distance_of(code: int) -> int:
    return int(np.ceil(2 ** ((code - 1) / 8) - 1e-9))


def test_codes_are_never_too_near_and_at_most_a_tenth_too_far():
    distances = np.array([*range(1, 3000), 2**20, 2**31 - 1, 2**31, 2**40])
    codes = encode_distance(distances)
    assert codes.min() >= 1 and codes.max() == 254
    for distance, code in zip(distances.tolist(), codes.tolist(), strict=True):
        if code < 254:
            assert distance <= distance_of(code) <= 1.091 * distance + 1
    assert (np.diff(codes.astype(int)) >= 0).all()


@pytest.mark.parametrize("epochs", [1, 2])
def test_every_batch_says_when_its_ids_come_again(epochs):
    source = add_next_use_codes(Listed(), epochs=epochs)
    coming = [batch for _ in range(2) for batch in Listed().batches(4)]
    uses = [
        {
            ("item", i)
            for name in ("a", "bag")
            for i in batch.ids[name].values.tolist()
        } | {("b", i) for i in batch.ids["b"].values.tolist()}
        for batch in coming
    ]  # fmt: skip
    num_said = 0
    for step, batch in enumerate(source.batches(4)):
        facts = {}
        for name, table in (("a", "item"), ("bag", "item"), ("b", "b")):
            codes = batch.next_use[name].tolist()
            assert len(codes) == len(batch.ids[name].values)
            for i, code in zip(batch.ids[name].values.tolist(), codes, strict=True):
                if code:
                    assert (table, i) not in facts  # once in a batch
                    facts[table, i] = code
        assert facts.keys() == uses[step]
        for row, code in facts.items():
            until = 20 if epochs == 1 else 40
            later = [s for s in range(step + 1, until) if row in uses[s]]
            wanted = encode_distance(np.array([later[0] - step]))[0] if later else NEVER
            assert code == wanted
            num_said += code != NEVER
    assert num_said > 100


def test_hints_from_the_middle_of_an_epoch_and_of_the_next():
    source = add_next_use_codes(Listed(), epochs=2)
    whole = list(source.batches(4))
    for step, batch in enumerate(source.batches(4, start=Position(0, 13)), 13):
        for name in ("a", "bag", "b"):
            assert torch.equal(batch.next_use[name], whole[step].next_use[name])
    last = list(source.batches(4, start=Position(1)))
    assert NEVER in last[-1].next_use["a"] and NEVER not in whole[-1].next_use["a"]
    with pytest.raises(ConfigError, match="epochs=0"):
        add_next_use_codes(Listed(), epochs=0)


def test_hints_cross_processes():
    batch = next(add_next_use_codes(Listed()).batches(4))
    (again,) = unpack_batches(pack_batches([batch], shared=True))
    assert all(torch.equal(again.next_use[name], codes) for name, codes in batch.next_use.items())
    assert (
        unpack_batches(pack_batches([next(Listed().batches(4))], shared=False))[0].next_use is None
    )


def opened(folder, slots):
    tables = [Table("item", 4), Table("b", 4)]
    features = [Feature("a", "item"), Feature("bag", "item", pooling="sum"), Feature("b", "b")]
    model = EmbeddingCollection(tables, features)
    plan = build_plan(
        tables,
        1,
        PlanConfig(memory={"dram": 2 * slots * (tables[0].record_bytes + 20)}, lookahead=3),
    )
    return model.open(plan, Mesh(), backings=open_backings(folder, Mesh(), tables))


def train(model, batches):
    rows = RowOptimizer(model)
    for batch in model.lookahead(batches):
        sum(out.sum() for out in model(batch).values()).backward()
        rows.step()
    return model.rows("item", torch.arange(-4, 30))


CONFIG = build_config(
    {
        "data": {
            "name": "synthetic",
            "options": {"num_train": 1000, "num_test": 100, "cardinalities": [50, 900, 7, 3000]},
        },
        "model": {"dim": 4, "bottom": [8], "top": [8]},
        "plan": {"memory": {"dram": 24_000}},
        "train": {"batch_size": 50, "epochs": 2, "threads": 1},
    }
)


def run_on(mesh, folder, changes):
    """Return hits, this rank's rows by table and id, and their weights."""
    run = open_run(override_settings(CONFIG, changes), mesh, folder, console=console_of(mesh))
    run.train()
    collection = run.trainer.collection
    rows = {
        (table.name, i): weights.tolist()
        for table in collection.tables
        for part in collection.scan(table.name)
        for i, weights in zip(part.ids.tolist(), part.weights, strict=True)
    }
    hits, sent = collection.store.sources.resident, dict(mesh.traffic.sent_bytes)
    run.close()
    return hits, rows, sent


def test_the_setting_raises_hits_and_changes_no_bit(tmp_path):
    hinted = {"data.next_use_hints": True}
    hits, rows, _ = run_on(Mesh(), tmp_path / "plain", {})
    more, same, _ = run_on(Mesh(), tmp_path / "hinted", hinted)
    assert same == rows and more > hits
    # Cut short in an epoch, and gone on with, the setting changed on the way.
    run_on(Mesh(), tmp_path / "cut", hinted | {"train.max_steps": 7})
    run_on(Mesh(), tmp_path / "cut", {"train.max_steps": 25})
    assert run_on(Mesh(), tmp_path / "cut", hinted)[1] == rows


def test_hints_travel_to_the_owners(tmp_path):
    """Two ranks: what one of them looks up next the other one's rows hear of."""
    changes = {"plan.memory.dram": 14_000}
    plain = run_ranks(2, run_on, tmp_path / "plain", changes)
    hinted = run_ranks(2, run_on, tmp_path / "hinted", {**changes, "data.next_use_hints": True})
    for one, other in zip(plain, hinted, strict=True):
        assert one[1] == other[1] and other[0] > one[0]
        key = ("route", "local")
        assert 1.0 < other[2][key] / one[2][key] < 2  # a byte at most, beside one or two of an id


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_parts_are_told_as_the_whole_batch_is(num_ranks):
    data = open_source("synthetic", num_train=700, num_test=9, cardinalities=[50, 9]).train
    names = [column.name for column in data.schema.categorical]
    whole = add_next_use_codes(data).batches(64)
    parts = [
        add_next_use_codes(data).batches(64, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    for batch, *actual in zip(whole, *parts, strict=True):
        for name in names:
            ids, codes = batch.ids[name].values, batch.next_use[name]
            expected = torch.cat([part.next_use[name] for part in actual])
            assert torch.equal(ids, torch.cat([part.ids[name].values for part in actual]))
            assert torch.equal(expected, codes)


def test_data_whose_order_nobody_knows_is_refused():
    own = open_batches(lambda epoch: list(Listed().batches(4)), SCHEMA)
    with pytest.raises(
        ConfigError,
        match=r"a data set of your own that yields batches.*Leave data\.next_use_hints out",
    ):
        add_next_use_codes(own)
    config = override_settings(RunConfig(), {"data.next_use_hints": True})
    with pytest.raises(ConfigError, match="a data set of your own that yields batches"):
        colonnade.fit(
            Net(), Splits(train=open_batches([], splits(9).train.schema)), config=config, quiet=True
        )


def test_hints_change_nothing_but_who_leaves(tmp_path):
    plain, hinted = opened(tmp_path / "plain", 25), opened(tmp_path / "hinted", 25)
    wanted = train(plain, Listed().batches(4))
    assert torch.equal(train(hinted, add_next_use_codes(Listed()).batches(4)), wanted)
    assert hinted.store.sources.evicted_dirty > 0
    assert hinted.store.sources.resident > plain.store.sources.resident


@pytest.mark.parametrize("codes", [torch.zeros(3, dtype=torch.uint8), torch.zeros(4)])
def test_hints_of_another_shape_or_type_are_refused(tmp_path, codes):
    model = opened(tmp_path, 25)
    batch = next(Listed().batches(4))
    batch.next_use = {"a": codes}
    with pytest.raises(DataError, match=r"feature 'a': next_use: got .* wanted uint8 \(4,\)"):
        train(model, [batch])
