"""Loaded rows train as new rows with these weights do, from the first step of their optimizer, wherever they are.
They are stored from the moment they are loaded."""

from __future__ import annotations

import pytest
import torch
from own_model import Net, rows_of, source
from plans import cache_settings
from ranks import run_ranks

import colonnade
from colonnade import (
    LAMB,
    Adagrad,
    Adam,
    AdamW,
    Batch,
    CountMinAdmission,
    EmbeddingCollection,
    Feature,
    Ids,
    MaxRowsEviction,
    Mesh,
    PlanConfig,
    RowClock,
    RowOptimizer,
    RowWiseAdam,
    Table,
    build_plan,
    load_rows,
    trained_ids,
)
from colonnade.staleness import TableCache

OPTIMIZERS = {
    "adam": Adam(lr=0.1),
    "adamw": AdamW(lr=0.1, weight_decay=0.1),
    "lamb": LAMB(lr=0.1),
    "rowwise_adam": RowWiseAdam(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
}
ROWS, DIM, STEPS = 48, 4, 6
ALL = torch.arange(ROWS)


def collect(optimizer="adam", dtype="float32", seed=5, **declared):
    declared = {"rows": ROWS, **declared}
    table = Table("t", DIM, optimizer=OPTIMIZERS[optimizer], dtype=dtype, **declared)
    return EmbeddingCollection([table], [Feature("a", "t")], seed=seed)


def train(collection, first=0, end=STEPS, mesh=None):
    """Train steps first .. end - 1. Each looks up a quarter of the rows, divided among the ranks."""
    rows = RowOptimizer(collection)
    for step in range(first, end):
        random = torch.Generator().manual_seed(step)
        ids = torch.randperm(ROWS, generator=random)[: ROWS // 4]
        gradients = torch.randn(len(ids), DIM, generator=random)
        own = slice(None) if mesh is None else slice(mesh.rank, None, mesh.num_ranks)
        batch = Batch(len(ids[own]), torch.zeros(len(ids[own]), 0), {"a": Ids(ids[own].clone())})
        (collection(batch)["a"] * gradients[own]).sum().backward()
        rows.step()


def load_initial_rows(collection):
    """Load the values that the rows have anyway."""
    load_rows(collection, "t", collection.rows("t", ALL).clone())


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    return request.param


@pytest.fixture
def wanted(optimizer):
    """Rows that were never loaded, after all steps."""
    collection = collect(optimizer).open()
    train(collection)
    return collection.rows("t", ALL).clone()


def test_steps_equal_those_of_torch():
    """The twin has a parameter for each row, which is stepped when the row is used."""
    makers = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    }
    for name, make in makers.items():
        weights = torch.randn(ROWS, DIM, dtype=torch.float64)
        collection = collect(name, dtype="float64").open()
        load_rows(collection, "t", weights)
        train(collection)
        rows = [torch.nn.Parameter(row.clone()) for row in weights]
        optimizers = [make([row]) for row in rows]
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            ids = torch.randperm(ROWS, generator=random)[: ROWS // 4]
            for i, gradient in zip(
                ids, torch.randn(len(ids), DIM, generator=random).double(), strict=True
            ):
                rows[i].grad = gradient
                optimizers[i].step()
        torch.testing.assert_close(collection.rows("t", ALL), torch.stack(rows).detach())


@pytest.mark.parametrize("where", ["memory", "files", "hbm"])
def test_loaded_rows_equal_new_ones(optimizer, wanted, where, tmp_path):
    collection = collect(optimizer)
    third = ROWS // 3 * (collection.tables[0].record_bytes + 24)
    memory = {"memory": {}, "files": {"dram": third}, "hbm": {"hbm": third, "dram": third}}
    plan = build_plan(collection.tables, 1, PlanConfig(memory=memory[where], lookahead=0))
    assert plan.needs_backing == (where != "memory")
    collection = collection._open_in(tmp_path, plan, Mesh(), None)
    load_initial_rows(collection)
    train(collection)
    assert torch.equal(collection.rows("t", ALL), wanted)


def test_loaded_rows_are_saved_at_once(optimizer, wanted, tmp_path):
    """A checkpoint between loading and the first step, and after some steps, changes no bit."""
    collection = collect(optimizer).open()
    load_initial_rows(collection)
    for step in (0, 2, STEPS):
        collection.save(tmp_path, step)
        collection = collect(optimizer)
        assert collection.load(tmp_path) == step
        assert trained_ids(collection, "t").tolist() == ALL.tolist()
        train(collection, step, {0: 2, 2: STEPS, STEPS: STEPS}[step])
    assert torch.equal(collection.rows("t", ALL), wanted)
    state = collection.state_dict()
    other = collect(optimizer).open()
    other.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_eviction_and_admission_retain_loaded_rows(optimizer, wanted):
    """A loaded row is admitted already: not even its first updates ask for admission."""
    admission = CountMinAdmission(updates=100, expected_ids=1000)
    declared = {"rows": None, "admission": admission, "eviction": MaxRowsEviction(rows=ROWS)}
    collection = collect(optimizer, **declared).open()
    load_initial_rows(collection)
    assert trained_ids(collection, "t").tolist() == ALL.tolist()
    train(collection)
    assert torch.equal(collection.rows("t", ALL), wanted)


def train_on_ranks(mesh, name, settings, folder):
    """Load, save, load in another plan, train."""
    collection = collect(name, dtype="float64")
    plan = build_plan(collection.tables, mesh.world, PlanConfig())
    collection.open(plan, mesh)
    load_initial_rows(collection)
    collection.save(folder, 0)
    collection = collect(name, dtype="float64")
    plan = build_plan(collection.tables, mesh.world, PlanConfig(**settings))
    collection.load(folder, plan=plan, mesh=mesh)
    train(collection, mesh=mesh)
    return collection.rows("t", ALL)


CACHE = TableCache(ROWS, RowClock(0, 0), "lfu")
PLANS = {
    "rows": {},
    "pooled": {"exchange": "pooled"},
    "columns": {"sharding": "column_wise", "exchange": "rows"},
    "replicated": {"sharding": "replicated"},
    "cached": {"cache": cache_settings({"t": CACHE})},
}


@pytest.mark.parametrize("plan", PLANS)
def test_loaded_rows_on_ranks(plan, tmp_path):
    name = "adam" if plan == "columns" else "rowwise_adam"
    collection = collect(name, dtype="float64").open()
    train(collection)
    wanted = collection.rows("t", ALL)
    for result in run_ranks(2, train_on_ranks, name, PLANS[plan], tmp_path):
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_a_warm_start_with_another_optimizer_is_a_load(name, tmp_path):
    """Rows of a run with Adagrad train on as loaded rows do, and are exported before they do."""
    settings = {"batch_size": 50, "quiet": True, "threads": 1, "epochs": 1}
    first = Net()
    colonnade.fit(first, source(300, 1), run=tmp_path / "first", **settings)
    warm = {"run": tmp_path / "second", "warm_start": str(tmp_path / "first"), "max_steps": 1}
    second = Net(optimizer=OPTIMIZERS[name])
    colonnade.fit(second, source(300, 2), **warm, **settings)
    loaded = Net(optimizer=OPTIMIZERS[name])
    loaded.bias.load_state_dict(first.bias.state_dict())
    loaded.collection.open()
    for table in ("user", "film"):
        ids = trained_ids(first.collection, table)
        load_rows(loaded.collection, table, first.collection.rows(table, ids).clone(), ids)
    colonnade.fit(loaded, source(300, 2), max_steps=1, **settings)
    expected = rows_of(loaded)
    assert all(rows.equal(expected[table]) for table, rows in rows_of(second).items())
    colonnade.export_run(tmp_path / "second", tmp_path / "export")
    exported = Net(optimizer=OPTIMIZERS[name], seed=3)
    exported.collection.open()
    colonnade.load_export(exported, exported.collection, tmp_path / "export")
    for table in ("user", "film"):
        ids = trained_ids(second.collection, table)
        assert trained_ids(exported.collection, table).equal(ids)
        assert set(trained_ids(first.collection, table).tolist()) <= set(ids.tolist())
        rows = second.collection.rows(table, ids)
        assert exported.collection.rows(table, ids).equal(rows)
