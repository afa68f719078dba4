"""`partials` is chosen where the formulas of Distributed Equivalent Substitution say that it wins, and nowhere else;
a plan says of each consumer why."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from test_choice import load_of

from colonnade import LowRankCross, World
from colonnade.errors import ConfigError
from colonnade.plan.cost.consumers import ConsumerLoad, FieldLoad, ModelLoad
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Memory, Problem
from colonnade.plan.search.search import Search
from colonnade.topology.sharding import Sharding, row_wise, table_wise


def consumer(name, fields, width, needs_bags=True):
    size = 4.0 * (width or 0)
    whole_bags = frozenset(fields if needs_bags else ())
    return ConsumerLoad(name, tuple(fields), width, size, size, whole_bags)


@dataclass(frozen=True)
class Case:
    """F tables of D floats and, where the model has them, one more each for a linear part; h ids a sample."""

    num_ranks: int
    tables: int
    hot: int
    dim: int
    widths: tuple[int | None, ...]
    """Widths of the partials of consumers that take all vectors; None: one that wants values."""
    wanted: str
    has_linear: bool = True
    unique: float = 0.35
    """Share of a rank's ids that are different."""
    samples: int = 512

    @property
    def world(self) -> World:
        """So slow a link that bytes decide."""
        return World(
            num_hosts=self.num_ranks,
            ranks_per_host=1,
            remote_bytes_per_second=1e7,
        )

    @property
    def width(self) -> int:
        return self.dim + self.has_linear

    def loads(self):
        count = self.samples * self.hot
        results = []
        for t in range(self.tables):
            load = load_of(
                f"t{t}",
                10 * count,
                self.world,
                samples=self.samples,
                hot=self.hot,
                width=self.width,
            )
            own = self.unique * count
            every = own * self.num_ranks
            results.append(
                replace(
                    load,
                    unique_rank=own,
                    unique_host=own,
                    unique_world=every,
                    vocabulary=10 * count,
                )
            )
        return results

    def model(self) -> ModelLoad:
        fields, bags = [], self.hot > 1
        for t in range(self.tables):
            fields.append(FieldLoad(f"f{t}", t, t, self.dim, 4.0 * self.dim, 4.0 * self.dim, 0.0, bags))  # fmt: skip
        if self.has_linear:
            fields += [FieldLoad(f"w{t}", t, t, 1, 4.0, 4.0, 0.0, bags) for t in range(self.tables)]
        every = range(self.tables)
        consumers = [
            consumer(f"c{i}", every, width, needs_bags=width != self.dim)
            for i, width in enumerate(self.widths)
        ]
        if self.has_linear:
            linear = range(self.tables, 2 * self.tables)
            consumers.append(consumer("linear", linear, 1, needs_bags=False))
        return ModelLoad(tuple(fields), tuple(consumers))

    def volumes(self) -> dict[str, float]:
        """Floats of a sample that a rank sends, forward or back: the break-even formulas (research, des_dct 1.6)."""
        n, values, partial = self.num_ranks, self.tables * self.width, 0.0
        residuals = float(values)
        deep = self.tables * self.dim
        if None not in self.widths and n * sum(self.widths) < deep:
            partial, residuals = partial + sum(self.widths), residuals - deep
        if self.has_linear and n < self.tables:
            partial, residuals = partial + 1, residuals - self.tables
        others = (n - 1) / n
        return {
            "rows": others * self.unique * self.hot * values,
            "pooled": others * values,
            "partials": (n - 1) * partial + others * residuals if partial else float("inf"),
        }


def low_rank(tables: int, dim: int, rank: int) -> int:
    """Build three cross layers with one output."""
    return LowRankCross([dim] * tables, rank, 3, 1).width(dim)


CASES = {
    "LR + FM, few ranks": Case(4, 39, 1, 16, (17,), "partials"),
    "LR + FM, many ids": Case(8, 40, 5, 8, (9,), "partials", unique=0.3),
    "LR + FM, too many ranks, one id": Case(48, 39, 1, 16, (17,), "rows"),
    "LR + FM, too many ranks, many ids": Case(48, 39, 10, 16, (17,), "pooled"),
    "FM against rows that are often the same": Case(8, 39, 1, 16, (17,), "rows", unique=0.01),
    "LR": Case(8, 26, 1, 1, (1,), "partials", has_linear=False, unique=0.95),
    "LR, more ranks than fields": Case(32, 26, 4, 1, (1,), "pooled", has_linear=False),
    "NFM, few ranks": Case(4, 26, 4, 16, (32,), "partials"),
    "NFM, its vectors lose": Case(16, 26, 4, 16, (32,), "pooled", has_linear=False),
    "cross network": Case(16, 30, 2, 8, (4,), "partials", unique=0.9),
    "first layer, narrow": Case(4, 39, 4, 32, (256,), "partials", has_linear=False),
    "first layer, wide": Case(4, 39, 4, 16, (400,), "pooled", has_linear=False),
    "FM beside a deep network": Case(4, 39, 4, 16, (17, None), "pooled", has_linear=False),
    "DeepFM: its linear part alone": Case(4, 40, 4, 4, (5, None), "partials"),
    "cross layers of low rank, and a first layer": Case(
        3, 39, 4, 32, (low_rank(39, 32, 8), 128), "partials", has_linear=False
    ),
    "cross layers of a rank too high": Case(
        3, 39, 4, 32, (low_rank(39, 32, 16), 128), "pooled", has_linear=False
    ),
    "two operators together": Case(4, 39, 4, 16, (17, 32), "partials"),
}
TYPICAL = {
    "LR + FM, few ranks",
    "FM against rows that are often the same",
    "NFM, its vectors lose",
    "DeepFM: its linear part alone",
    "cross layers of low rank, and a first layer",
}
"""Each exchange wins once, with one id and with bags, of all of a model and of a part; the others are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in CASES],
)
def test_chosen_as_the_formulas_say(name):
    case = CASES[name]
    volumes = case.volumes()
    assert min(volumes, key=volumes.get) == case.wanted  # by the formulas
    model, loads = case.model(), case.loads()
    choice = choose(Problem(loads, case.world, model=model))
    taken = [exchange for exchange in choice.exchanges.values()]
    assert set(taken) == {case.wanted}, choice.exchanges
    kinds = {item.chosen.sharding.kind for item in choice.tables}
    is_whole = case.hot > 1 and case.wanted == "partials" and case.widths != (case.dim,)
    assert not is_whole or kinds == {"table_wise"}  # a bag on one rank
    sent = sum(choice.sent[p, "remote"] for p in ("fetch", "push"))
    assert sent == pytest.approx(2 * 4 * case.samples * volumes[case.wanted], rel=0.12)
    # No other exchange of all tables would make a shorter step.
    for exchange in {"rows", "pooled", "partials"} - {case.wanted}:
        forced = {load.name: Constraint(None, exchange) for load in loads}
        other = choose(Problem(loads, case.world, forced=forced, model=model))
        assert choice.seconds.step <= other.seconds.step * 1.001, exchange
    assert any(item.is_partial for item in choice.consumers) == (case.wanted == "partials")


def test_bags_too_many_for_one_rank_are_dealt_by_rows():
    """Sums need no whole bags: a linear model whose one table no rank has room for."""
    case = replace(CASES["LR"], tables=1, dim=16, hot=40)
    field = FieldLoad("f", 0, 0, 16, 64.0, 64.0, 0.0, True)
    model = ModelLoad((field,), (consumer("sum", [0], 16, False),))
    (load,) = case.loads()
    load = replace(load, width=16, value_bytes=64, gradient_bytes=64, bag_bytes=64)
    memory = Memory(int(load.total_bytes / 4), 1e-3)
    (table,) = choose(Problem([load], case.world, memory=memory, model=model)).tables
    assert table.chosen.option == ("pooled", "row_wise")  # a partial of one field saves nothing


def small(num_ranks=2):
    """Three tables of one world, one of them with bags: all choices can be tried."""
    case = Case(num_ranks, 3, 1, 8, (9,), "partials", unique=0.9, samples=100)
    loads, model = case.loads(), case.model()
    loads[2] = replace(load_of("t2", 400, case.world, samples=100, hot=3, width=9))
    fields = [replace(field, has_bags=field.table == 2, added_bytes=0.0) for field in model.fields]
    return case.world, loads, replace(model, fields=tuple(fields))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_search_finds_what_trying_all_finds(num_ranks):
    world, loads, model = small(num_ranks)
    choice = choose(Problem(loads, world, model=model))
    search = Search(Problem(loads, world, model=model, towers=1))
    places: list[Sharding] = [row_wise(num_ranks), *map(table_wise, range(num_ranks))]
    best, evaluated = float("inf"), False
    for exchanges in itertools.product(("rows", "pooled", "partials"), repeat=3):
        for shardings in itertools.product(places, repeat=3):
            state = search.empty_state()
            for t in range(3):
                search.add_table_costs(state, t, exchanges[t], shardings[t])
            if state.partials is not None and state.partials.split_bag is not None:
                assert "partials" in exchanges
                continue
            if search.predict_step_seconds(state).step < best:
                best = search.predict_step_seconds(state).step
                evaluated = state.partials is not None and len(state.partials.consumers) > 0
    assert choice.seconds.step <= 1.05 * best
    assert (
        evaluated == any(consumer.is_partial for consumer in choice.consumers) == (num_ranks == 2)
    )


def test_a_split_bag_is_refused_with_what_to_do():
    world, loads, model = small()
    model = replace(model, consumers=model.consumers[:1])
    forced = {load.name: Constraint("row_wise", "partials") for load in loads}
    wide = replace(model, consumers=(replace(model.consumers[0], width=2),))
    with pytest.raises(ConfigError, match=r"'f2' has bags.*plan.tables.t2.sharding=table_wise"):
        choose(Problem(loads, world, forced=forced, model=wide))


@pytest.mark.slow
def test_who_takes_a_table_that_is_cut_falls_back_alone():
    """Others keep their partials; the plan says which table it was."""
    case = CASES["LR + FM, few ranks"]
    groups = {"a": range(19), "b": range(19, 39), "linear": range(39, 78)}
    consumers = tuple(
        consumer(name, subset, 1 if name == "linear" else 17) for name, subset in groups.items()
    )
    model = replace(case.model(), consumers=consumers)
    forced = {f"t{t}": Constraint(None, "partials") for t in range(1, 39)}
    forced["t0"] = Constraint("column_wise", "pooled")
    loads = [replace(load, may_be_cut=True) for load in case.loads()]
    a, b, linear = choose(Problem(loads, case.world, model=model, forced=forced)).consumers
    assert b.is_partial and b.why == "fewer floats"
    for value in (a, linear):
        assert not value.is_partial and value.why == "rows of table t0 are cut by columns"


@pytest.mark.slow
def test_reasons_in_words():
    case = CASES["DeepFM: its linear part alone"]
    fm, top, linear = choose(Problem(case.loads(), case.world, model=case.model())).consumers
    assert fm.why == "values are sent anyway for c1" and not fm.is_partial
    assert (
        top.why == "its operator has no partial that can be summed" and top.partial_floats is None
    )
    assert linear.is_partial and (linear.partial_floats, linear.value_floats) == (4, 40)
    case = CASES["LR + FM, too many ranks, many ids"]
    fm, linear = choose(Problem(case.loads(), case.world, model=case.model())).consumers
    assert fm.why.startswith("its tables are under pooled") and not linear.is_partial
    forced = {f"t{t}": Constraint("table_wise", "partials") for t in range(39)}
    fm, linear = choose(
        Problem(case.loads(), case.world, model=case.model(), forced=forced)
    ).consumers
    assert fm.why == "costs more: 663 floats, not 624" and fm.partial_floats == 39 * 17
