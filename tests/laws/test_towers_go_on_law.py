"""Runs with operators inside towers go on to the same bits in the same world, and to the same weights where a tower has
other ranks, or one process has all: weights, and what the optimizer keeps of them, are those of a run that never
stopped."""

from __future__ import annotations

import json

import torch
from ranks import run_ranks
from test_tower_modules_law import DIM, MODELS, NAMES, ROWS, TOWERS, source

from colonnade import Adam, Feature, Mesh, Table, Uniform, fit
from colonnade.data import Splits

CLIP = 0.3


def goes_on(mesh, folder, steps):
    """To so many steps in all: rows and dense weights. Clipped by norm, which is of all towers together."""
    make, settings = MODELS["dlrm"]
    tables = [
        Table(
            each, DIM, rows=ROWS, optimizer=Adam(lr=0.01, eps=1e-3), initializer=Uniform(scale=0.5), dtype="float64"
        )
        for each in NAMES
    ]  # fmt: skip
    features = [Feature(each, each, pooling="mean" if each == "e" else "sum") for each in NAMES]
    torch.manual_seed(3)
    model = make(
        tables, features, num_dense=2, top=[3], towers=TOWERS, tower_dim=3, **settings
    ).double()
    plan = {}
    if mesh.num_ranks > 1:
        file = folder.with_name("towers.json")
        file.write_text(json.dumps({"towers": [list(each) for each in TOWERS.towers]}))
        plan = {"exchange": "towers", "sharding": "table_wise", "towers": str(file)}
    fit(
        model, Splits(train=source()), run=folder, mesh=mesh, batch_size=48, epochs=3, max_steps=steps,
        dense_lr=0.05, dense_clip_norm=CLIP, dense_weight_decay=0.01, quiet=True, **plan,
    )  # fmt: skip
    if mesh.num_ranks > 1:
        assert model.embeddings.exchange.consumers == ("tower0", "tower1")
    rows = {each: model.embeddings.rows(each, torch.arange(ROWS)) for each in NAMES}
    return rows, {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}


def straight_and_in_parts(mesh, place):
    straight = goes_on(mesh, place / "straight", 6)
    goes_on(mesh, place / "parts", 3)
    return straight, goes_on(mesh, place / "parts", 6)


def same(found, wanted, **close):
    torch.testing.assert_close(found[0], wanted[0], **close)
    torch.testing.assert_close(found[1], wanted[1], **close)


def test_towers_go_on_in_other_worlds(tmp_path):
    one = [goes_on(Mesh(), tmp_path / "one", steps) for steps in (6, 7, 8)]
    (tmp_path / "ranks").mkdir()
    four = run_ranks(4, straight_and_in_parts, tmp_path / "ranks", ranks_per_host=2)
    for straight, in_parts in four:
        same(in_parts, four[0][0], rtol=0, atol=0)
        same(straight, one[0], rtol=1e-10, atol=1e-12)
    folder = tmp_path / "ranks" / "parts"
    for found in run_ranks(2, goes_on, folder, 7):  # a rank in each tower
        same(found, one[1], rtol=1e-10, atol=1e-12)
    same(goes_on(Mesh(), folder, 8), one[2], rtol=1e-10, atol=1e-12)
