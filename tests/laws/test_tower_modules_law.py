"""Models with tower modules: four ranks train, through the trainer, what one rank trains, whatever travels."""

from __future__ import annotations

import pytest
import torch
from plans import by_table
from ranks import run_ranks

from colonnade import Adam, Feature, Ids, Mesh, PlanConfig, Table, Uniform, build_plan, fit
from colonnade.data import Splits, open_tensors
from colonnade.models.dcn import DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.row_state import dense_state_dict
from colonnade.topology.sharding import column_wise, table_wise
from colonnade.topology.towers import Partition, list_tower_ranks

ROWS, DIM, NAMES = 30, 6, "abcde"
TOWERS = Partition((("d", "a"), ("b", "e", "c")))
MODELS = {
    "dlrm": (DLRM, {"bottom": [5], "tower_vectors": 1, "tower_summaries": 1}),
    "dcnv2": (DCNv2, {"cross_layers": 2}),
}
RUNS = (
    ("dlrm", "rows"),
    ("dlrm", "pooled"),
    ("dlrm", "towers"),
    ("dcnv2", "pooled"),
    ("dcnv2", "towers"),
    ("dcnv2", "towers beside columns"),
)


def source():
    """190 samples; bags in the last feature."""
    random = torch.Generator().manual_seed(4)
    ids = {name: Ids(torch.randint(0, ROWS, (190,), generator=random)) for name in NAMES}
    lengths = torch.randint(0, 4, (190,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids["e"] = Ids(torch.randint(0, ROWS, (int(offsets[-1]),), generator=random), offsets)
    dense = torch.rand(190, 2, generator=random)
    label = (torch.rand(190, generator=random) < 0.4).float()
    return open_tensors(ids, dense=dense, label=label, cardinalities=dict.fromkeys(NAMES, ROWS))


def trained(mesh, name, plan_text):
    """Rows and dense weights. Tables lie in their tower where there are several ranks."""
    make, settings = MODELS[name]
    exchange, *columns = plan_text.split(" beside ")
    tables = [
        Table(
            field, DIM, rows=ROWS, optimizer=Adam(lr=0.01, eps=1e-3), initializer=Uniform(scale=0.5), dtype="float64"
        )
        for field in NAMES
    ]  # fmt: skip
    features = [Feature(field, field, pooling="mean" if field == "e" else "sum") for field in NAMES]
    torch.manual_seed(3)
    model = make(
        tables, features, num_dense=2, top=[3], towers=TOWERS, tower_dim=3, **settings
    ).double()
    shardings = {}
    if mesh.num_ranks > 1:
        for members, ranks in zip(TOWERS.towers, list_tower_ranks(mesh.world, 2), strict=True):
            shardings |= {m: table_wise(ranks[i % len(ranks)]) for i, m in enumerate(members)}
        if columns:  # of a table of the second tower
            shardings["c"] = column_wise(list_tower_ranks(mesh.world, 2)[1])
    plan = build_plan(
        tables, mesh.num_ranks, PlanConfig(exchange=exchange, tables=by_table(sharding=shardings))
    )
    model.embeddings.open(plan, mesh)
    data = Splits(train=source(), test=source())
    result = fit(model, data, mesh=mesh, batch_size=48, dense_lr=0.05)
    rows = {field: model.embeddings.rows(field, torch.arange(ROWS)) for field in NAMES}
    dense = dense_state_dict(model)
    assert sum("interactions.tower" in name for name in dense) == 8
    if exchange == "towers" and mesh.num_ranks > 1:
        inside = ("tower0",) if columns else ("tower0", "tower1")
        assert model.embeddings.exchange.consumers == inside
    return rows, dense, result.metrics


def train_all(mesh):
    return [trained(mesh, *run) for run in RUNS]


@pytest.mark.parametrize("num_ranks", [4])
def test_ranks_train_what_one_rank_trains(num_ranks):
    wanted = train_all(Mesh())
    for results in run_ranks(num_ranks, train_all, ranks_per_host=2):
        for run, ours, one in zip(RUNS, results, wanted, strict=True):
            close = {"rtol": 1e-10, "atol": 1e-12, "msg": lambda message, n=run: f"{n}: {message}"}
            torch.testing.assert_close(ours[0], one[0], **close)
            torch.testing.assert_close(ours[1], one[1], **close)
            assert ours[2] == pytest.approx(one[2], rel=1e-10)
