"""Plans are pure values; a budget is shared fairly and never exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade import Plan, Table, build_plan
from colonnade.errors import ConfigError
from colonnade.plan.plan import explain
from colonnade.store.budget import capacity_rows, slot_bytes

TABLES = st.lists(
    st.builds(
        lambda name, dim, rows: Table(str(name), dim, rows=rows),
        st.uuids(), st.integers(1, 70), st.one_of(st.none(), st.integers(1, 10**9)),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@given(TABLES, st.integers(1, 10**9), st.integers(1, 9))
def test_budget_is_shared_and_kept(tables, budget, num_ranks):
    rows = capacity_rows(tables, budget, num_ranks)
    assert all(n >= 1 for n in rows)
    # At least one row each; beyond that the budget holds.
    spent = sum(n * slot_bytes(t) for n, t in zip(rows, tables, strict=True) if n > 1)
    assert spent <= budget
    for n, table in zip(rows, tables, strict=True):
        if table.rows:
            assert n <= -(-table.rows // num_ranks)


@given(
    TABLES, st.one_of(st.none(), st.integers(1, 10**12)), st.integers(1, 1000), st.integers(0, 9)
)
def test_plans_round_trip(tables, budget, num_ranks, staleness):
    plan = build_plan(tables, num_ranks, dram_bytes=budget, staleness_steps=staleness)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(explain(plan, tables)) == len(tables)
    if budget is None:
        assert not plan.needs_backing


def test_small_tables_stay_whole():
    tables = [Table("small", 16, rows=10), Table("big", 16, rows=10**6)]
    plan = build_plan(tables, dram_bytes=10**6)
    assert plan.tables[0].fits and not plan.tables[1].fits


@pytest.mark.parametrize(
    "settings",
    [{"exchange": "rowz"}, {"dram_bytes": 0}, {"lookahead": -1}, {"staleness_steps": -1}],
)
def test_impossible_plans_are_refused(settings):
    with pytest.raises(ConfigError):
        build_plan([Table("t", 4)], **settings)
