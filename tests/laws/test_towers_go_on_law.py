"""Runs with operators inside towers go on to the same bits in the same world, and to the same weights where a tower has
other ranks, or one process has all: weights, and what the optimizer keeps of them, are those of a run that never
stopped."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import run_ranks
from test_tower_modules_law import DIM, MODELS, NAMES, ROWS, TOWERS, source
from torch import nn

from colonnade import Adam, EmbeddingCollection, Feature, Mesh, Table, Uniform, build_plan, fit
from colonnade.data import Splits
from colonnade.errors import CheckpointError
from colonnade.interaction import FieldsLinear, TowerModule
from colonnade.row_state import dense_state_dict
from colonnade.topology.sharding import row_wise, table_wise

CLIP = 0.3


def declared():
    tables = [
        Table(
            each, DIM, rows=ROWS, optimizer=Adam(lr=0.01, eps=1e-3), initializer=Uniform(scale=0.5), dtype="float64"
        )
        for each in NAMES
    ]  # fmt: skip
    return tables, [Feature(n, n, pooling="mean" if n == "e" else "sum") for n in NAMES]


def goes_on(mesh, folder, steps, drops=0.0, late=0, exchange="towers"):
    """To so many steps in all: rows and dense weights. Clipped by norm, which is of all towers together. drops: part of
    what a tower's module gives; late: steps of staleness."""
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
        file.write_text(json.dumps({"towers": [list(each) for each in TOWERS.towers]}))
        plan = {"exchange": exchange, "sharding": "table_wise", "towers": str(file)}
    fit(
        model, Splits(train=source()), run=folder, mesh=mesh, batch_size=48, epochs=3, max_steps=steps,
        dense_lr=0.05, dense_clip_norm=CLIP, dense_weight_decay=0.01, quiet=True, staleness_steps=late, **plan,
    )  # fmt: skip
    if mesh.num_ranks > 1:
        assert model.embeddings.exchange.consumers == ("tower0", "tower1")
    return weights_of(model)


def weights_of(model):
    """Rows, and dense weights."""
    rows = {each: model.embeddings.rows(each, torch.arange(ROWS)) for each in NAMES}
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
        seen = self.embeddings(batch)
        parts = [seen[name] for name in ("one", "two", "first")]
        return self.top(torch.cat([*parts, batch.dense.double()], 1))


def beside(mesh):
    model = Beside().double()
    if mesh.num_ranks > 1:
        exchanges = dict.fromkeys("adbe", "towers") | {"c": "substitute"}
        shardings = {name: table_wise(rank) for rank, name in enumerate("adbe")}
        plan = build_plan(
            declared()[0], mesh.num_ranks, exchanges=exchanges, towers=2,
            shardings=shardings | {"c": row_wise(mesh.num_ranks)},
        )  # fmt: skip
        model.embeddings.open(plan, mesh)
        names = [name for end in model.embeddings.exchange.ends for name in end.consumers]
        assert sorted(names) == ["first", "one", "two"]
    fit(
        model,
        Splits(train=source()),
        mesh=mesh,
        batch_size=48,
        max_steps=4,
        dense_lr=0.05,
        quiet=True,
    )
    return weights_of(model)


def straight_and_in_parts(mesh, place):
    straight = goes_on(mesh, place / "straight", 6)
    goes_on(mesh, place / "parts", 3)
    in_parts = goes_on(mesh, place / "parts", 6)
    dropped = [goes_on(mesh, place / "dropped", steps, 0.3) for steps in (2, 4)]
    dropped.append(goes_on(mesh, place / "dropped straight", 4, 0.3))
    late = [goes_on(mesh, place / "late", steps, late=2) for steps in (3, 6)]
    late.append(goes_on(mesh, place / "late straight", 6, late=2))
    of_rows = []
    for late_by in (0, 2):
        said = {"late": late_by, "exchange": "tower_rows"}
        goes_on(mesh, place / f"rows {late_by}", 3, **said)
        of_rows.append(goes_on(mesh, place / f"rows {late_by}", 6, **said))
        of_rows.append(goes_on(mesh, place / f"rows straight {late_by}", 6, **said))
    return straight, in_parts, dropped, late, of_rows, beside(mesh)


def further(mesh, folder):
    """With a rank in each tower."""
    return goes_on(mesh, folder, 7), goes_on(mesh, folder.with_name("late"), 7, late=2)


def same(found, wanted, **close):
    torch.testing.assert_close(found[0], wanted[0], **close)
    torch.testing.assert_close(found[1], wanted[1], **close)


def test_towers_go_on_in_other_worlds(tmp_path):
    one = [goes_on(Mesh(), tmp_path / "one", steps) for steps in (6, 7, 8)]
    both = beside(Mesh())
    (tmp_path / "ranks").mkdir()
    late_one = [goes_on(Mesh(), tmp_path / "late", steps, late=2) for steps in (6, 7)]
    for straight, in_parts, dropped, late, of_rows, theirs in run_ranks(
        4, straight_and_in_parts, tmp_path / "ranks", ranks_per_host=2
    ):
        same(in_parts, straight, rtol=0, atol=0)
        same(straight, one[0], rtol=1e-10, atol=1e-12)
        same(of_rows[0], of_rows[1], rtol=0, atol=0)
        same(of_rows[0], one[0], rtol=1e-10, atol=1e-12)
        same(of_rows[2], of_rows[3], rtol=0, atol=0)
        same(of_rows[2], late_one[0], rtol=1e-10, atol=1e-12)
        same(
            dropped[1], dropped[2], rtol=0, atol=0
        )  # what is dropped is drawn from a rank's own state
        assert not torch.equal(dropped[2][0]["a"], straight[0]["a"])
        same(late[1], late[2], rtol=0, atol=0)  # what towers had gathered is part of a commit
        same(late[2], late_one[0], rtol=1e-10, atol=1e-12)
        same(theirs, both, rtol=1e-10, atol=1e-12)
    folder = tmp_path / "ranks" / "parts"
    for found, late in run_ranks(2, further, folder):
        same(found, one[1], rtol=1e-10, atol=1e-12)
        same(late, late_one[1], rtol=1e-10, atol=1e-12)
    with pytest.raises(
        CheckpointError, match="had read ahead"
    ):  # means, of which no sums are known
        goes_on(Mesh(), folder.with_name("late"), 8, late=2)
    same(goes_on(Mesh(), folder, 8), one[2], rtol=1e-10, atol=1e-12)
