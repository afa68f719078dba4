"""A bound of its own for each table: the read for step t sees exactly the updates of steps <= t-1-k, for the table's
k."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch
from own_model import Net, assert_same, splits
from plans import by_table
from ranks import run_ranks
from scenario import assert_close, assert_same_bits, train

import colonnade
from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.config.plan import PlanConfig
from colonnade.errors import ConfigError
from colonnade.plan.plan import Plan
from colonnade.report.pages import render_run_page
from colonnade.report.reading import read_run_folder, sum_metrics_lines
from colonnade.staleness import list_steps_ahead

STEPS = 12
NAMES = ("hot", "warm", "cold")
FEATURES = [*[Feature(name, name) for name in NAMES], Feature("past", "hot", pooling="sequence")]


def counters(**settings) -> EmbeddingCollection:
    """Tables of one row each, that grows by one in each step."""
    zero = Uniform(scale=0.0)
    tables = [Table(n, 1, rows=1, optimizer=SGD(lr=1.0), initializer=zero) for n in NAMES]
    return EmbeddingCollection(tables, FEATURES)


def batches(num: int):
    zero = Ids(torch.zeros(1, dtype=torch.int64))
    for _ in range(num):
        yield Batch(1, torch.zeros(1, 0), {feature.name: zero for feature in FEATURES})


def seen_by_table(mesh: Mesh, bounds: dict[str, int], exchange=None, **plan) -> dict:
    """Return by table how many updates the read of each step saw."""
    collection = counters()
    collection.open(
        build_plan(
            collection.tables,
            mesh.num_ranks,
            PlanConfig(**plan, tables=by_table(staleness_steps=bounds, exchange=exchange)),
        ),
        mesh,
    )
    rows = RowOptimizer(collection)
    outputs: dict[str, list[int]] = {name: [] for name in NAMES}
    coming = collection.lookahead(batches(STEPS))
    for batch in coming:
        result = collection(batch)
        for name in NAMES:
            outputs[name].append(round(result[name].item()))
        assert result["past"].item() == result["hot"].item(), "one table, one moment"
        (-sum(result[name].sum() for name in NAMES) / mesh.num_ranks).backward()
        rows.step()
    zero = torch.zeros(1, dtype=torch.int64)
    last = {name: round(collection.rows(name, zero).item()) for name in NAMES}
    return {"seen": outputs, "last": last, "missed": collection.pipeline.missed}


def promised(k: int) -> list[int]:
    return [max(0, step - k) for step in range(STEPS)]


BOUNDS = {"hot": 0, "warm": 1, "cold": 4}


def check(result: dict, bounds: dict[str, int]) -> None:
    assert result["seen"] == {name: promised(k) for name, k in bounds.items()}
    assert result["last"] == dict.fromkeys(NAMES, STEPS), "every update, once"
    wanted = Counter()
    for k in set(bounds.values()):
        wanted.update(min(step, k) for step in range(STEPS))
    assert result["missed"] == wanted


@pytest.mark.parametrize("lookahead", [0, 1, 3, 9])
def test_each_table_is_as_late_as_it_is_told(lookahead):
    check(seen_by_table(Mesh(), BOUNDS, lookahead=lookahead), BOUNDS)
    late = seen_by_table(Mesh(), {"hot": 0}, staleness_steps=STEPS + 3, lookahead=lookahead)
    check(late, {"hot": 0, "warm": STEPS + 3, "cold": STEPS + 3})


def of_ranks(mesh: Mesh) -> list[dict]:
    others = ({}, dict.fromkeys(("warm", "cold"), "pooled"), {"warm": "partials"})
    exact = [seen_by_table(mesh, BOUNDS, exchange=other) for other in others]
    mixed = dict.fromkeys(("user", "tag"), "pooled")
    trained = [train(mesh, **LATE, exchanges=other, lookahead=3) for other in (None, mixed)]
    return [*exact, *trained]


LATE = {"staleness": 2, "late": {"item": 0, "tag": 1}}
"""Exchanges of the scenario's tables; the features of "item" go into one consumer with those of others."""


def test_a_budget_of_memory_changes_no_bit(tmp_path):
    whole = train(Mesh(), **LATE)
    assert_same_bits(whole, train(Mesh(), **LATE, dram_bytes=60_000, folder=tmp_path, lookahead=1))
    same = train(Mesh(), staleness=2)
    assert not torch.equal(whole.rows["item"], same.rows["item"])


def test_each_table_is_as_late_as_it_is_told_on_ranks():
    """Tables are sent as rows, as partials and as sums."""
    one = train(Mesh(), **LATE)
    for results in run_ranks(2, of_ranks):
        *exact, by_rows, mixed = results
        assert_close(by_rows, one, rtol=1e-10)
        assert_close(mixed, one, rtol=1e-10)
        for item in exact:
            check(item, BOUNDS)


def test_a_table_that_nobody_reads_has_no_say():
    assert list_steps_ahead([0, 4, 9], [True, False, False]) == [0, 0, 0]
    assert list_steps_ahead([1, 4, 0], [True, True, False]) == [1, 4, 4]


def test_bounds_that_cannot_be_kept():
    tables = counters().tables
    with pytest.raises(ConfigError, match="'none'"):
        build_plan(tables, 1, PlanConfig(tables={"none": {"staleness_steps": 1}}))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        PlanConfig(tables={"hot": {"staleness_steps": -1}})
    with pytest.raises(ValueError, match="'unbounded', wanted a number of steps"):
        PlanConfig(staleness_steps="unbounded")
    plan = build_plan(
        tables, 1, PlanConfig(staleness_steps=2, tables={"hot": {"staleness_steps": 0}})
    )
    assert Plan.from_json(plan.to_json()) == plan and plan.max_staleness_steps == 2
    assert (
        build_plan(
            tables,
            1,
            PlanConfig(staleness_steps=2, tables=by_table(staleness_steps=dict.fromkeys(NAMES, 0))),
        ).max_staleness_steps
        == 0
    )


def fitted(run, bounds: tuple, stop: int, **plan) -> Net:
    """bounds: of all tables, and of films."""
    late, films = bounds
    tables = {} if films is None else {"film": {"staleness_steps": films}}
    model = Net()
    colonnade.fit(
        model, splits(), run=run, epochs=1, batch_size=30, quiet=True, threads=1, lookahead=3,
        staleness_steps=late, tables=tables, max_steps=stop, **plan,
    )  # fmt: skip
    return model


def test_a_run_that_is_cut_goes_on_to_the_same_bits(tmp_path):
    for name, stops in (("whole", [12]), ("cut", [5, 6, 12])):
        models = [fitted(tmp_path / name, (3, 0), stop) for stop in stops]
        if name == "whole":
            (whole,) = models
    assert_same(whole, models[-1])
    run = read_run_folder(tmp_path / "whole")
    # Each step reads films at once, and users 3 steps early but for the first ones.
    assert sum_metrics_lines(run, "missed") == {"0": 12 + 1, "1": 1, "2": 1, "3": 12 - 3}
    assert "Staleness of row reads" in render_run_page(run)


CHANGES = {
    "a table becomes synchronous": ((3, None), (3, 0)),
    "a table becomes late": ((3, 0), (3, None)),
    "less late": ((4, 1), (2, 0)),
    "later": ((1, 0), (4, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_bounds_go_on_to_the_same_bits(change, tmp_path):
    """However often a run under the new bounds is cut, what it reads is the same."""
    then, now = CHANGES[change]
    fitted(tmp_path / "first", then, 6)
    models = []
    for name, stops in (("straight", [12]), ("cut", [7, 12])):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        models.append([fitted(tmp_path / name, now, stop) for stop in stops][-1])
    assert_same(*models)
