"""Runs with operators inside towers go on to the same bits in the same world, and to the same weights where a tower has
other ranks, or one process has all: weights, and what the optimizer keeps of them, are those of a run that never
stopped."""

from __future__ import annotations

import json

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from test_tower_modules_law import DIM, MODELS, NAMES, ROWS, TOWERS, source
from torch import nn

from colonnade import (
    Adam,
    EmbeddingCollection,
    Feature,
    Mesh,
    PlanConfig,
    Table,
    Uniform,
    build_plan,
    fit,
)
from colonnade.data import Splits
from colonnade.errors import CheckpointError
from colonnade.interaction import FieldsLinear, TowerModule
from colonnade.row_state import dense_state_dict
from colonnade.topology.sharding import row_wise, table_wise

CLIP = 0.3


def declared():
    tables = [
        Table(
            name, DIM, rows=ROWS, optimizer=Adam(lr=0.01, eps=1e-3), initializer=Uniform(scale=0.5), dtype="float64"
        )
        for name in NAMES
    ]  # fmt: skip
    return tables, [Feature(n, n, pooling="mean" if n == "e" else "sum") for n in NAMES]


def goes_on(mesh, folder, steps, drops=0.0, late=0, exchange="towers"):
    """Train to a number of steps and return rows and dense weights. Clipped by norm, which is of all towers together.
    drops: part of what a tower's module gives; late: steps of staleness."""
    make, settings = MODELS["dlrm"]
    if late:  # less leaves a tower, or its values would come early
        settings = settings | {"tower_summaries": 0}
    torch.manual_seed(3)
    model = make(*declared(), num_dense=2, top=[3], towers=TOWERS, tower_dim=3, **settings).double()
    if drops:
        for name in ("tower0", "tower1"):
            operator = model.embeddings.interactions[name]
            operator.module = nn.Sequential(operator.module, nn.Dropout(drops))
    plan = {}
    if mesh.num_ranks > 1:
        file = folder.with_name("towers.json")
        file.write_text(json.dumps({"towers": [list(tower) for tower in TOWERS.towers]}))
        plan = {"exchange": exchange, "sharding": "table_wise", "towers": str(file)}
    fit(
        model, Splits(train=source()), run=folder, mesh=mesh, batch_size=48, epochs=3, max_steps=steps,
        dense_lr=0.05, dense_clip_norm=CLIP, dense_weight_decay=0.01, staleness_steps=late, **plan,
    )  # fmt: skip
    if mesh.num_ranks > 1:
        assert model.embeddings.exchange.consumers == ("tower0", "tower1")
    return weights_of(model)


def weights_of(model):
    """Rows, and dense weights."""
    rows = {name: model.embeddings.rows(name, torch.arange(ROWS)) for name in NAMES}
    return rows, dense_state_dict(model)


class Beside(nn.Module):
    """A module of one tower's fields, another of the other's, and a linear map of a field whose owners evaluate it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)

        def module():
            return TowerModule(nn.Linear(2 * DIM, 3), [DIM, DIM], 3, side_by_side=True)

        consumers = {
            "one": (module(), ["a", "d"]),
            "two": (module(), ["b", "e"]),
            "first": (FieldsLinear([DIM], 2), ["c"]),
        }
        self.embeddings = EmbeddingCollection(*declared(), consumers=consumers)
        self.top = nn.Linear(10, 1)

    def forward(self, batch):
        output = self.embeddings(batch)
        parts = [output[name] for name in ("one", "two", "first")]
        return self.top(torch.cat([*parts, batch.dense.double()], 1))


def beside(mesh):
    model = Beside().double()
    if mesh.num_ranks > 1:
        exchanges = dict.fromkeys("adbe", "towers") | {"c": "partials"}
        shardings = {name: table_wise(rank) for rank, name in enumerate("adbe")}
        plan = build_plan(
            declared()[0],
            mesh.num_ranks,
            PlanConfig(
                towers=2,
                tables=by_table(
                    exchange=exchanges, sharding=shardings | {"c": row_wise(mesh.num_ranks)}
                ),
            ),
        )
        model.embeddings.open(plan, mesh)
        assert sorted(model.embeddings.exchange.consumers) == ["first", "one", "two"]
    fit(
        model,
        Splits(train=source()),
        mesh=mesh,
        batch_size=48,
        max_steps=4,
        dense_lr=0.05,
    )
    return weights_of(model)


def straight_and_in_parts(mesh, place, late):
    straight = goes_on(mesh, place / "straight", 6, late=late)
    goes_on(mesh, place / "parts", 3, late=late)
    return straight, goes_on(mesh, place / "parts", 6, late=late)


def with_dropout(mesh, place):
    goes_on(mesh, place / "dropped", 2, 0.3)
    dropped = goes_on(mesh, place / "dropped", 4, 0.3), goes_on(mesh, place / "straight", 4, 0.3)
    return *dropped, goes_on(mesh, place / "not dropped", 4), beside(mesh)


def of_rows(mesh, place, late):
    settings = {"late": late, "exchange": "tower_rows"}
    goes_on(mesh, place / "rows", 3, **settings)
    return goes_on(mesh, place / "rows", 6, **settings), goes_on(
        mesh, place / "straight", 6, **settings
    )


def further(mesh, folder, late):
    """Continue with one rank in each tower."""
    return goes_on(mesh, folder, 7, late=late)


def same(result, wanted, **close):
    torch.testing.assert_close(result[0], wanted[0], **close)
    torch.testing.assert_close(result[1], wanted[1], **close)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_towers_go_on_in_other_worlds(late, tmp_path):
    """Values that towers have gathered are part of a checkpoint."""
    one = [goes_on(Mesh(), tmp_path / "one", steps, late=late) for steps in (6, 7)]
    (tmp_path / "ranks").mkdir()
    for straight, in_parts in run_ranks(
        4, straight_and_in_parts, tmp_path / "ranks", late, ranks_per_host=2
    ):
        same(in_parts, straight, rtol=0, atol=0)
        same(straight, one[0], rtol=1e-10, atol=1e-12)
    folder = tmp_path / "ranks" / "parts"
    for results in run_ranks(2, further, folder, late):
        same(results, one[1], rtol=1e-10, atol=1e-12)
    if late:  # means, of which no sums are known
        with pytest.raises(CheckpointError, match="had read ahead"):
            goes_on(Mesh(), folder, 8, late=late)
    else:
        last = goes_on(Mesh(), tmp_path / "one", 8)
        same(goes_on(Mesh(), folder, 8), last, rtol=1e-10, atol=1e-12)


def test_what_is_dropped_is_drawn_from_the_state_of_a_rank(tmp_path):
    """And towers beside other operators train what one rank does."""
    pair = beside(Mesh())
    for dropped, straight, whole, other in run_ranks(4, with_dropout, tmp_path, ranks_per_host=2):
        same(dropped, straight, rtol=0, atol=0)
        assert not torch.equal(dropped[0]["a"], whole[0]["a"])
        same(other, pair, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rows_that_come_together_in_towers_go_on(late, tmp_path):
    one = goes_on(Mesh(), tmp_path / "one", 6, late=late)
    (tmp_path / "ranks").mkdir()
    for in_parts, straight in run_ranks(4, of_rows, tmp_path / "ranks", late, ranks_per_host=2):
        same(in_parts, straight, rtol=0, atol=0)
        same(in_parts, one, rtol=1e-10, atol=1e-12)
