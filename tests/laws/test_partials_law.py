"""Owners that evaluate partials train what one rank trains that evaluates the operators: every operator, whole tables
and split ones, means and weights, beside values and other exchanges; in float64, and bit for bit from run to run."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from scenario import all_rows, features, global_batch, share_of, tables

from colonnade import (
    FM,
    BiInteraction,
    Concat,
    EmbeddingCollection,
    Feature,
    FieldsLinear,
    LowRankCross,
    Mesh,
    NormalizedLinear,
    PlanConfig,
    RowOptimizer,
    Sum,
    Table,
    World,
    build_plan,
)
from colonnade.exchange.operator_cut import (
    choose_remote_consumers,
    count_sent_floats,
    explain_not_remote,
)
from colonnade.lookup.layout import declare
from colonnade.topology.sharding import (
    Sharding,
    column_wise,
    replicated,
    row_wise,
    table_wise,
)

SIZES = [13, 0, 1, 24]
FIELDS = ("user.deep", "item", "seen", "tags")
TABLES = ("user", "item", "tag", "wide")


@dataclass(frozen=True)
class Case:
    consumers: dict
    kind: str
    """Shardings, the same for all tables."""
    wanted: tuple[str, ...]
    """Consumers that are evaluated at the owners; of those with weights, on several ranks."""
    exchanges: dict[str, str] = field(default_factory=lambda: dict.fromkeys(TABLES, "partials"))
    cut: tuple[str, ...] = ()
    """Tables whose rows are cut by columns."""
    hot: dict[str, list[int]] = field(default_factory=dict)
    copied: tuple[str, ...] = ()
    """Tables with a copy on every rank."""

    def shardings_in(self, num_ranks: int) -> dict[str, Sharding]:
        cut = {name: column_wise(range(num_ranks)) for name in self.cut}
        copied = {name: replicated(num_ranks) for name in self.copied}
        return self._uncut(num_ranks) | cut | copied

    def _uncut(self, num_ranks: int) -> dict[str, Sharding]:
        if self.kind == "table_wise":
            return {name: table_wise(t % num_ranks) for t, name in enumerate(TABLES)}
        if self.kind == "host_wise":  # the last two ranks
            return {name: Sharding("host_wise", tuple(range(num_ranks))[-2:]) for name in TABLES}
        return {}


WIDE = {"linear": (Sum(), ("user.wide",)), "past": (Sum(), ("history",))}
CASES = {
    "whole tables": Case(
        {"fm": (FM(), FIELDS), "pairs": (BiInteraction(), ("item", "tags", "user.deep")), **WIDE},
        "table_wise",
        ("fm", "pairs"),
    ),
    "split tables": Case(
        {"sums": (Sum(), ("seen", "tags", "item")), "fm": (FM(), ("user.deep", "item")), **WIDE},
        "row_wise",
        ("sums", "fm"),
    ),
    "split over some": Case(
        {"sums": (Sum(), FIELDS), **WIDE},
        "host_wise",
        ("sums",),
    ),
    "values are there": Case(
        {"fm": (FM(), FIELDS), "deep": (Concat(), FIELDS[::-1]), **WIDE}, "table_wise", ()
    ),
    "beside rows": Case(
        {"fm": (FM(), ("user.deep", "item", "seen")), "all": (FM(), FIELDS), **WIDE},
        "table_wise",
        (),
        {"user": "partials", "item": "partials", "wide": "partials"},
    ),
    "beside rows, apart": Case(
        {"fm": (FM(), ("user.deep", "item", "seen")), "tagged": (Sum(), ("tags",)), **WIDE},
        "table_wise",
        ("fm",),
        {"user": "partials", "item": "partials", "wide": "pooled"},
    ),
    "over hot rows": Case(
        {"fm": (FM(), FIELDS), **WIDE}, "table_wise", ("fm",), hot={"tag": [4, 0, 1]}
    ),
    "weights, whole tables": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 2), ("user.deep", "item", "history", "tags")),
            "normal": (NormalizedLinear((5, 3, 5), 1), ("seen", "history", "item")),
            "linear": (Sum(), ("user.wide",)),
        },
        "table_wise",
        ("first", "normal"),
    ),
    "weights, split tables": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 2), ("seen", "tags", "history", "item")),
            "again": (FieldsLinear((3, 1), 1), ("history", "user.wide")),
            "normal": (NormalizedLinear((5, 5), 1), ("user.deep", "item")),
            "sums": (Sum(), ("tags", "seen")),
        },
        "row_wise",
        ("first", "again", "normal", "sums"),
    ),
    "weights where values are": Case(
        {"first": (FieldsLinear((5, 5), 2), FIELDS[:2]), "deep": (Concat(), FIELDS), **WIDE},
        "table_wise",
        (),
    ),
    "weights beside rows": Case(
        {
            "first": (FieldsLinear((5, 3), 1), ("seen", "history")),
            "again": (FieldsLinear((5, 5), 1), ("item", "tags")),
        },
        "row_wise",
        ("first",),
        {"item": "partials", "wide": "partials", "user": "pooled"},
    ),
    "weights, cross layers, whole tables": Case(
        {
            "cross": (
                LowRankCross((5, 5, 3, 5, 5), 1, 2, 1),
                ("user.deep", "item", "history", "tags", "seen"),
            )
        },
        "table_wise",
        ("cross",),
    ),
    "weights, cross layers, split tables": Case(
        {
            "cross": (LowRankCross((5, 3, 5, 5), 2, 2, 1), ("seen", "history", "tags", "item")),
            "linear": (Sum(), ("user.wide",)),
        },
        "row_wise",
        ("cross",),
    ),
    "weights beside hot rows": Case(
        {
            "first": (FieldsLinear((5, 5, 3), 2), ("user.deep", "item", "history")),
            "sums": (Sum(), ("seen", "item")),
            "hot": (FieldsLinear((5, 5), 1), ("tags", "user.deep")),
            "all": (Sum(), ("tags",)),
        },
        "row_wise",
        ("first", "sums", "hot"),
        hot={"tag": [4, 0, 1]},
    ),
    "weights over hot rows": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 2), ("item", "tags", "history", "user.deep")),
            "cross": (
                LowRankCross((5, 5, 5, 3), 1, 2, 1),
                ("user.deep", "seen", "tags", "history"),
            ),
            "sums": (Sum(), ("seen", "tags", "item")),
        },
        "row_wise",
        ("first", "cross", "sums"),
        hot={"tag": [4, 0, 1], "wide": [0, 1, 2]},
    ),
    "weights over hot rows, values": Case(
        {
            "first": (FieldsLinear((5, 5, 5), 9), ("item", "tags", "user.deep")),
            "fm": (FM(), ("tags", "item", "user.deep")),
        },
        "table_wise",
        (),
        hot={"tag": [4, 0, 1]},
    ),
    "weights beside hot rows, apart": Case(
        {
            "first": (FieldsLinear((5, 5, 3), 1), ("user.deep", "item", "history")),
            "fm": (FM(), ("user.deep", "item", "seen")),
            "hot": (FieldsLinear((5,), 1), ("tags",)),
        },
        "table_wise",
        ("first", "fm"),
        hot={"tag": [4, 0, 1]},
    ),
    "weights beside columns": Case(
        {
            "first": (FieldsLinear((5, 5), 1), ("tags", "user.deep")),
            "again": (FieldsLinear((5, 3, 5), 1), ("tags", "history", "user.deep")),
            "cut": (FieldsLinear((5, 3), 1), ("item", "history")),
            "pairs": (BiInteraction(), ("seen", "item")),
        },
        "table_wise",
        ("first", "again", "cut"),
        cut=("item",),
    ),
    "weights, columns under another exchange": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 1), ("item", "tags", "history", "user.deep")),
            "sums": (Sum(), ("seen", "user.deep", "tags")),
            "deep": (Concat(), ("item",)),
        },
        "row_wise",
        ("first", "sums"),
        dict.fromkeys(("user", "tag", "wide"), "partials") | {"item": "pooled"},
        cut=("item",),
    ),
    "weights beside copies": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 2), ("item", "tags", "history", "user.deep")),
            "sums": (Sum(), ("seen", "tags", "user.deep")),
            "sent": (FieldsLinear((5,), 6), ("item",)),
            "copied": (FieldsLinear((5,), 1), ("tags",)),
        },
        "row_wise",
        ("first", "sums"),
        dict.fromkeys(("user", "item", "wide"), "partials") | {"tag": "rows"},
        copied=("tag",),
    ),
    "weights beside copies, columns and hot rows": Case(
        {
            "first": (FieldsLinear((5, 5, 3, 5), 1), ("item", "tags", "history", "user.deep")),
            "pairs": (BiInteraction(), ("tags", "item", "seen")),
        },
        "table_wise",
        ("first",),
        cut=("item",),
        copied=("tag",),
        hot={"wide": [0, 1, 2]},
    ),
}
WEIGHTED = [name for name in CASES if name.startswith("weights")]


RUNS = [(case, 0) for case in CASES.values()]
RUNS += [(CASES["split tables"], 2), (CASES["weights, split tables"], 1)]
RUNS += [(CASES["over hot rows"], 2)]


def our_features() -> list[Feature]:
    result = features()
    result[-1] = replace(result[-1], pooling="mean")  # `history`
    return result


def train(mesh, case: Case, *, exchanges=None, shardings=None, staleness: int = 0, hot=None):
    """Return this rank's outputs by step, all rows and weights at the end, and the consumers evaluated at the
    owners."""
    consumers = copy.deepcopy(case.consumers)
    collection = EmbeddingCollection(tables("float64"), our_features(), consumers=consumers, seed=3)
    collection.double()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in collection.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(
            staleness_steps=staleness,
            tables=by_table(
                exchange=exchanges or {}, sharding=shardings or {}, replicated_rows=hot or {}
            ),
        ),
    )
    collection.open(plan, mesh)
    rows, outputs = RowOptimizer(collection), []
    dense = None
    if weights := list(collection.parameters()):
        dense = (torch.optim.Adam if staleness else torch.optim.SGD)(weights, lr=0.01)
    batches = (share_of(global_batch(t, n), mesh.rank, mesh.num_ranks) for t, n in enumerate(SIZES))
    for step, batch in enumerate(collection.lookahead(batches)):
        result = collection(batch)
        outputs.append({name: output.detach().clone() for name, output in result.items()})
        first, last = (SIZES[step] * r // mesh.num_ranks for r in (mesh.rank, mesh.rank + 1))
        gradients = []
        for i, output in enumerate(result.values()):
            random = torch.Generator().manual_seed(10 * step + i)
            whole = torch.randn(SIZES[step], output.shape[1], generator=random, dtype=output.dtype)
            gradients.append(whole[first:last])
        for _ in range(1 + step % 2):  # two backwards
            torch.autograd.backward(list(result.values()), gradients, retain_graph=True)
        rows.step()
        if dense is not None:
            for weight in weights:  # after the rows' step, which has completed them
                weight.grad = mesh.all_reduce("dense", weight.grad)
            dense.step()
            dense.zero_grad()
    collection.eval()
    with torch.no_grad():
        batch = share_of(global_batch(9, 7), mesh.rank, mesh.num_ranks)
        outputs.append(dict(collection(batch)))
    remaining = {name: weight.detach() for name, weight in collection.named_parameters()}
    return outputs, all_rows(collection) | remaining, at_owners(collection)


def at_owners(collection) -> tuple[str, ...]:
    """Consumers that are evaluated there."""
    return collection.exchange.consumers


def step_too_late(mesh) -> None:
    """The dense optimizer steps before the rows': every rank is told."""
    consumers = {"first": (FieldsLinear((5, 5), 1), ("user.deep", "item"))}
    collection = EmbeddingCollection(tables("float64"), our_features(), consumers=consumers)
    exchanges = {"user": "partials", "item": "partials"}
    shardings = {name: table_wise(0) for name in exchanges}  # of other ranks none has the fields
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(tables=by_table(exchange=exchanges, sharding=shardings)),
    )
    collection.double().open(plan, mesh)
    rows, dense = RowOptimizer(collection), torch.optim.SGD(collection.parameters(), lr=0.1)
    result = collection(share_of(global_batch(0, 9), mesh.rank, mesh.num_ranks))
    result["first"].sum().backward()
    (weight,) = collection.parameters()
    weight.grad = torch.ones_like(weight)
    dense.step()
    with pytest.raises(
        RuntimeError, match="'first', which the rows' owners evaluate, were changed"
    ):
        rows.step()


def train_all(mesh):
    if mesh.num_ranks > 1:
        step_too_late(mesh)
    return [
        train(
            mesh, case, exchanges=case.exchanges, shardings=case.shardings_in(mesh.num_ranks),
            staleness=staleness, hot=case.hot,
        )
        for case, staleness in RUNS
    ]  # fmt: skip


def close(result, wanted, what: str) -> None:
    torch.testing.assert_close(
        result, wanted, rtol=1e-10, atol=1e-10, msg=lambda message: f"{what}: {message}"
    )


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_equals_the_operators_on_one_rank(num_ranks):
    everyone = [train_all(Mesh())] if num_ranks == 1 else run_ranks(num_ranks, train_all)
    for number, (case, staleness) in enumerate(RUNS):
        wanted, rows, _ = train(Mesh(), case, staleness=staleness)
        for step, outputs in enumerate(wanted):
            assert list(outputs) == list(everyone[0][number][0][step]), "order"
            for key, value in outputs.items():
                results = torch.cat([rank[number][0][step][key] for rank in everyone])
                close(results, value, f"run {number}, step {step}, {key}")
        for table, value in rows.items():
            for rank in everyone:
                close(rank[number][1][table], value, f"run {number}, {table}")
        if case == CASES["over hot rows"] and num_ranks > 1:
            assert {rank[number][2] for rank in everyone} == {case.wanted}
        if case in [CASES[name] for name in WEIGHTED] and num_ranks > 1:
            results = {rank[number][2] for rank in everyone}
            assert results == {() if staleness else case.wanted}, f"run {number}"


@pytest.mark.parametrize("name", [name for name in CASES if name not in WEIGHTED])
def test_what_travels_as_partials(name):
    case = CASES[name]
    collection = EmbeddingCollection(tables("float64"), our_features(), consumers=case.consumers)
    plan = build_plan(
        collection.tables,
        1,
        PlanConfig(tables=by_table(exchange=case.exchanges, sharding=case.shardings_in(1))),
    )
    collection.open(plan)
    assert at_owners(collection) == case.wanted


def test_the_cut_is_the_least_of_all():
    """Values of some fields are sent anyway, and a consumer shares others."""
    declared = [Table(name, 8, rows=99) for name in "abcd"]
    fields = [Feature(name, name) for name in "abcd"]
    shardings = [row_wise(4)] * 4

    def cut(consumers):
        declaration = declare(declared, fields, consumers)
        return choose_remote_consumers(declaration, shardings), declaration

    assert cut({"fm": (FM(), "abcd")})[0] == ("fm",)  # 9 < 32
    assert cut({"fm": (FM(), "a")})[0] == ()  # 9 > 8
    assert cut({"fm": (FM(), "abcd"), "deep": (Concat(), "abcd")})[0] == ()  # free
    assert cut({"fm": (FM(), "abcd"), "deep": (Concat(), "abc")})[0] == ()  # 9 > 8 of d
    assert cut({"fm": (FM(), "abcd"), "deep": (Concat(), "ab")})[0] == ("fm",)  # 9 < 16
    # Either alone saves nothing, for the other needs the values.
    consumers_ = {"fm": (FM(), "abcd"), "pairs": (BiInteraction(), "abcd")}
    result, declaration = cut(consumers_)
    assert result == ("fm", "pairs")  # 9 + 16 < 32
    assert count_sent_floats(declaration, shardings, ("fm",)) > count_sent_floats(
        declaration, shardings, ()
    )


def test_a_split_bag_of_an_operator_on_fields_is_refused():
    case = Case({"fm": (FM(), FIELDS)}, "row_wise", ("fm",))
    with pytest.raises(AssertionError, match=r"DataError: feature 'seen'.*table_wise"):
        run_ranks(2, _refused, case)


def stored_rows(mesh):
    """A batch that was read ahead, and what this rank holds of it."""
    case, consumers = CASES["whole tables"], {"fm": (FM(), FIELDS), **WIDE}
    collection = EmbeddingCollection(tables("float64"), our_features(), consumers=consumers, seed=3)
    own = by_table(exchange=case.exchanges, sharding=case.shardings_in(mesh.num_ranks))
    plan = build_plan(collection.tables, mesh.num_ranks, PlanConfig(staleness_steps=1, tables=own))
    collection.open(plan, mesh)
    batch = share_of(global_batch(3, 11), mesh.rank, mesh.num_ranks)
    ticket = collection.pipeline.prepare_batch(batch)
    collection.pipeline.fetch_rows(ticket)
    return collection, batch, ticket, collection.exchange.export_prefetched(ticket)


def hold_and_see(mesh):
    collection, _, ticket, result = stored_rows(mesh)
    values = collection.exchange.compute_outputs(ticket, collection.backward_handle)
    return result, {name: value.detach() for name, value in values.items()}


def test_what_was_read_ahead_is_read_in_another_world():
    everyone = run_ranks(2, hold_and_see)
    collection, batch, ticket, _ = stored_rows(Mesh())
    collection.pipeline.drop_batch(ticket)
    reads = [item for item, _ in everyone]
    doubled = [{name: 2 * value for name, value in item.items()} for item in reads]
    results = []
    for read in (reads, doubled):
        ticket = collection.pipeline.prepare_batch(batch, (0, read))
        assert collection.exchange.export_prefetched(ticket).keys() == {
            name for item in reads for name in item
        }
        collection.pipeline.gradients.contexts.append(ticket)
        values = collection.exchange.compute_outputs(ticket, collection.backward_handle)
        sum(value.sum() for value in values.values()).backward()
        square = collection.pipeline.gradients.compute_squared_norm(collection.step)
        results.append(({name: value.detach() for name, value in values.items()}, square))
        collection.discard_batches()
    for name, value in results[0][0].items():
        close(value, torch.cat([output[name] for _, output in everyone]), name)
    assert torch.equal(results[1][0]["linear"], 2 * results[0][0]["linear"])
    close(results[1][0]["fm"], 4 * results[0][0]["fm"], "fm")
    assert results[1][1] > results[0][1], "gradients of FM follow what was read, not the rows"


def _refused(mesh, case):
    train(mesh, case, exchanges=case.exchanges)


def test_what_owners_cannot_evaluate():
    declared = [Table(name, 8, rows=99) for name in "abcd"]
    fields = [Feature(name, name) for name in "abcd"]
    consumers = {"deep": (FieldsLinear((8, 8, 8), 4), "abc"), "beside": (Concat(), "d")}
    declaration = declare(declared, fields, consumers)
    whole = [table_wise(rank) for rank in range(4)]

    def result(**settings):
        names = choose_remote_consumers(declaration, [row_wise(4)] * 4, **settings)
        why = {name: explain_not_remote(declaration, name, **settings) for name in consumers}
        assert set(names) == {name for name, value in why.items() if value is None}
        return why

    assert result() == {
        "deep": None,
        "beside": "Concat has no result that is smaller than its fields' values",
    }
    assert choose_remote_consumers(declaration, whole) == ("deep",)
    assert "read ahead" in result(reads_ahead=2)["deep"]
    assert "one rank" in result(world=World())["deep"]
    assert "servers" in result(world=World(ranks_per_host=4, servers_per_host=1))["deep"]
