"""Operators over ids train what plain PyTorch trains that multiplies every pair of ids: under every exchange, with rows
split by hash, by table, by columns and mixed, empty bags, repeated ids, weights and ids at the ends of 64 bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from plans import by_table, cache_settings
from ranks import run_ranks
from references.pairs_reference import multiply_pairs, scale_lookups
from scenario import assert_same_bits, global_batch, probe_ids, share_of, train

from colonnade import (
    FM,
    SGD,
    BiInteraction,
    EmbeddingCollection,
    Feature,
    FieldsLinear,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Sum,
    Table,
    Uniform,
    build_plan,
)
from colonnade.errors import ConfigError, DataError
from colonnade.lookup.layout import declare
from colonnade.staleness import RowClock, TableCache
from colonnade.topology.sharding import Sharding, column_wise, replicated, row_wise, table_wise

DIM, LR = 5, 0.1
SIZES = [13, 0, 1, 24]
TABLES = ("user", "item", "tag", "wide")
FEATURES = [
    Feature("user", "user"),
    Feature("item", "item"),
    Feature("seen", "item", pooling="mean"),
    Feature("tags", "tag", pooling="sqrtn"),  # weighted
    Feature("history", "wide"),
]
FIELDS = ("user.deep", "item", "seen", "tags", "history")


def tables() -> list[Table]:
    scale = Uniform(scale=0.5)
    settings = {"optimizer": SGD(lr=LR), "initializer": scale, "dtype": "float64"}
    return [
        Table("user", {"deep": DIM, "wide": 1}, rows=53, **settings),
        Table("item", DIM, **settings),
        Table("tag", DIM, rows=11, **settings),
        Table("wide", DIM, **settings),
    ]


@dataclass(frozen=True)
class Case:
    exchange: str = "rows"
    kind: str = "row_wise"
    others: dict[str, str] = field(default_factory=dict)
    """Exchanges of tables that have another."""
    mixed: dict[str, str] = field(default_factory=dict)
    """Shardings of tables that have another."""
    hot: dict[str, list[int]] = field(default_factory=dict)
    is_cached: bool = False
    is_deep: bool = False
    """True if another operator takes the pooled values of some fields, so that these are sent."""
    remote: tuple[str, ...] = ()
    """Consumers that the owners evaluate in a world of three."""

    def consumers(self):
        torch.manual_seed(7)
        consumers = {
            "fm": (FM("ids"), FIELDS),
            "pairs": (BiInteraction("ids", single=(0, 1)), FIELDS[:4]),
            "linear": (Sum(), ("user.wide",)),
        }
        if self.is_deep:
            consumers["deep"] = (FieldsLinear((DIM, DIM), 3).double(), ("tags", "seen"))
        return consumers

    def plan(self, num_ranks: int) -> PlanConfig:
        kinds = {
            "row_wise": lambda t: row_wise(num_ranks),
            "table_wise": lambda t: table_wise(t % num_ranks),
            "column_wise": lambda t: column_wise(range(num_ranks)),
            "replicated": lambda t: replicated(num_ranks),
            "two": lambda t: Sharding("host_wise", tuple(range(min(2, num_ranks)))),
        }
        shardings = {
            name: kinds[self.mixed.get(name, self.kind)](t) for t, name in enumerate(TABLES)
        }
        cache = TableCache(9, RowClock(0, 0))
        return PlanConfig(
            cache=cache_settings({"item": cache, "wide": cache} if self.is_cached else {}),
            tables=by_table(
                exchange=dict.fromkeys(TABLES, self.exchange) | self.others,
                sharding=shardings,
                replicated_rows=self.hot,
            ),
        )


BOTH = ("fm", "pairs")
CASES = {
    "rows": Case(),
    "rows, deep": Case(is_deep=True),
    "pooled": Case("pooled"),
    "partials by hash": Case("partials", remote=BOTH),
    "partials by hash, deep": Case("partials", is_deep=True, remote=(*BOTH, "deep")),
    "partials by table": Case("partials", "table_wise", remote=("fm",)),
    "partials, mixed": Case("partials", mixed={"user": "table_wise", "tag": "two"}, remote=BOTH),
    "partials beside rows": Case("partials", others={"wide": "rows"}),
    "partials beside columns": Case("partials", mixed={"wide": "column_wise"}, remote=BOTH),
    "partials beside hot rows": Case(
        "partials", hot={"tag": [4, 0, 1], "wide": [0, 2]}, remote=BOTH
    ),
    "columns": Case("pooled", "column_wise", mixed={"user": "row_wise"}),
    "replicated": Case("rows", "replicated"),
    "towers": Case("towers", "table_wise"),
    "tower rows": Case("tower_rows", "table_wise"),
    "cached": Case(is_cached=True),
}


def train_case(mesh, case: Case):
    """Return this rank's outputs by step, all rows at the start and at the end, and who was evaluated at the owners."""
    collection = EmbeddingCollection(tables(), FEATURES, consumers=case.consumers(), seed=3)
    collection.open(build_plan(collection.tables, mesh.num_ranks, case.plan(mesh.num_ranks)), mesh)
    before, rows, outputs = read_rows(collection), RowOptimizer(collection), []
    for step, size in enumerate(SIZES):
        result = collection(share_of(global_batch(step, size), mesh.rank, mesh.num_ranks))
        outputs.append({name: value.detach().clone() for name, value in result.items()})
        first, last = (size * r // mesh.num_ranks for r in (mesh.rank, mesh.rank + 1))
        gradients = [g[first:last] for g in draw_gradients(step, size, result)]
        torch.autograd.backward(list(result.values()), gradients)
        rows.step()
    collection.eval()
    with torch.no_grad():
        result = collection(share_of(global_batch(9, 7), mesh.rank, mesh.num_ranks))
    outputs.append(dict(result))
    return outputs, before, read_rows(collection), collection.exchange.consumers


def read_rows(collection):
    return {name: collection.rows(name, probe_ids()[name]) for name in TABLES}


def draw_gradients(step, size, outputs):
    """Return gradients (B, P) of the global batch's outputs."""
    random = torch.Generator().manual_seed(step)
    return [
        torch.randn(size, value.shape[1], generator=random, dtype=value.dtype)
        for value in outputs.values()
    ]


def train_plain(case: Case, before):
    """Return the same of plain PyTorch: outputs of the global batches, and all rows at the end."""
    rows = {name: value.clone().requires_grad_() for name, value in before.items()}
    places = {name: {int(id_): n for n, id_ in enumerate(ids)} for name, ids in probe_ids().items()}

    def forward(batch):
        vectors = {}
        for feature in FEATURES:
            ids = batch.ids[feature.name].values
            index = torch.tensor([places[feature.table][int(i)] for i in ids], dtype=torch.int64)
            vectors[feature.name] = rows[feature.table][index]
        wide = vectors["user"][:, DIM:]
        vectors["user"] = vectors["user"][:, :DIM]
        results = {
            "fm": multiply_pairs(vectors, batch.ids, FEATURES, batch.size).sum(1, keepdim=True),
            "pairs": multiply_pairs(vectors, batch.ids, FEATURES[:4], batch.size),
            "linear": wide,
        }
        if case.is_deep:
            fields = [
                torch.stack([bag.sum(0) for bag in bags]) if bags else torch.zeros(0, DIM).double()
                for f in (FEATURES[3], FEATURES[2])
                for bags in [
                    scale_lookups(vectors[f.name], batch.ids[f.name], f.pooling, batch.size)
                ]
            ]
            results["deep"] = torch.cat(fields, 1) @ case.consumers()["deep"][0].weight.T
        return results

    outputs = []
    for step, size in enumerate(SIZES):
        results = forward(global_batch(step, size))
        outputs.append({name: value.detach() for name, value in results.items()})
        if size:
            gradients = draw_gradients(step, size, results)
            torch.autograd.backward(list(results.values()), gradients)
            with torch.no_grad():
                for value in rows.values():
                    value -= LR * value.grad
                    value.grad = None
    outputs.append({name: value.detach() for name, value in forward(global_batch(9, 7)).items()})
    return outputs, {name: value.detach() for name, value in rows.items()}


def train_all(mesh):
    return {name: train_case(mesh, case) for name, case in CASES.items()}


def assert_equal_plain(name, case, ranks, plain):
    outputs, rows = plain
    for step, wanted in enumerate(outputs):
        for key, value in wanted.items():
            result = torch.cat([rank[0][step][key] for rank in ranks])
            close(result, value, f"{name}, step {step}, {key}")
    for table, value in rows.items():
        for rank in ranks:
            close(rank[2][table], value, f"{name}, {table}")
    if (
        len(ranks) == 3 and case.exchange == "partials"
    ):  # whether a partial is smaller depends on the number of owners
        assert {rank[3] for rank in ranks} == {case.remote}, name


def close(result, wanted, what):
    torch.testing.assert_close(
        result, wanted, rtol=1e-10, atol=1e-12, msg=lambda message: f"{what}: {message}"
    )


@pytest.fixture(scope="module")
def plain():
    """Train in plain PyTorch, with the other operator and without."""
    (_, before, *_) = train_case(Mesh(), Case())
    return {is_deep: train_plain(Case(is_deep=is_deep), before) for is_deep in (False, True)}


@pytest.mark.parametrize(
    "num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_equals_plain_pairs(num_ranks, plain):
    everyone = [train_all(Mesh())] if num_ranks == 1 else run_ranks(num_ranks, train_all)
    for name, case in CASES.items():
        assert_equal_plain(name, case, [rank[name] for rank in everyone], plain[case.is_deep])


def train_twice(mesh):
    return [train_case(mesh, CASES[name])[:3] for name in ("partials by hash", "partials, mixed")]


def test_same_ranks_train_the_same_bits():
    first, second = (run_ranks(2, train_twice) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


SEEN = [23, 1, 0, 37, 23]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_memory_trains_the_same_bits(dtype, tmp_path):
    settings = {"sizes": SEEN, "dtype": dtype, "over": "ids"}
    wanted = train(Mesh(), **settings)
    tight = train(Mesh(), **settings, dram_bytes=30_000, lookahead=3, folder=tmp_path / "dram")
    assert_same_bits(wanted, tight)
    on_device = train(Mesh(), **settings, hbm_bytes=40_000, folder=tmp_path / "hbm")
    assert_same_bits(wanted, on_device)


def test_stale_rows_train_the_same_bits_in_any_memory(tmp_path):
    settings = {"sizes": SEEN, "over": "ids", "staleness": 2}
    wanted = train(Mesh(), **settings)
    assert_same_bits(wanted, train(Mesh(), **settings, dram_bytes=100_000, folder=tmp_path))


@pytest.mark.parametrize("exchange", ["pooled", "partials", "towers"])
def test_bags_of_rows_read_ahead_are_refused(exchange):
    collection = EmbeddingCollection(tables(), FEATURES, consumers={"fm": (FM("ids"), FIELDS)})
    own = by_table(exchange=dict.fromkeys(TABLES, exchange))
    plan = build_plan(collection.tables, 1, PlanConfig(staleness_steps=1, tables=own))
    with pytest.raises(ConfigError, match=r"consumer 'fm' over ids.*exchange=rows.*over='fields'"):
        collection.open(plan)


def test_wrong_operators_are_refused():
    with pytest.raises(ConfigError, match=r"got over='bags', wanted 'fields' or 'ids'"):
        FM("bags")
    consumers = {"fm": (FM("ids"), ("a", "b"))}
    features = [Feature("a", "a"), Feature("b", "b", pooling="sequence")]
    with pytest.raises(ConfigError, match=r"takes feature 'b', which is a sequence; pool it"):
        declare([Table("a", 4), Table("b", 4)], features, consumers)
    stacked = [Table("a", 4), Table("b", 4, rows=9, hashes=2)]
    features = [Feature("a", "a"), Feature("b", "b")]
    with pytest.raises(ConfigError, match=r"feature 'b' of hash-stacked table 'b'.*over='fields'"):
        declare(stacked, features, consumers)
    assert declare(stacked, features, {"fm": (FM("ids", single=(1,)), ("a", "b"))})
    features = [Feature("a", "a"), Feature("b", "b"), Feature("a^2", "a")]
    with pytest.raises(ConfigError, match=r"squares of 'a', which are named like feature 'a\^2'"):
        declare([Table("a", 4), Table("b", 4)], features, consumers)


def give_a_bag_as_single(mesh):
    """`history` has bags, and its rows are on several ranks."""
    consumers = {"fm": (FM("ids", single=(4,)), FIELDS)}
    collection = EmbeddingCollection(tables(), FEATURES, consumers=consumers)
    own = by_table(exchange=dict.fromkeys(TABLES, "partials"))
    collection.open(build_plan(collection.tables, mesh.num_ranks, PlanConfig(tables=own)), mesh)
    with pytest.raises(DataError, match=r"'history': got a sample with .*over='ids'"):
        collection(share_of(global_batch(0, 13), mesh.rank, mesh.num_ranks))


def test_bags_of_single_fields_are_refused_where_they_are_split():
    run_ranks(2, give_a_bag_as_single)


@pytest.mark.parametrize("operator", [FM, BiInteraction])
def test_inputs_are_fields_and_their_squares(operator):
    """However its inputs are dealt to shards, partials add up to the operator on single ids."""
    interaction = operator("ids", single=(1,))
    assert interaction.list_inputs(["a", "b", "c"]) == ("a", "a^2", "b", "c", "c^2")
    ids = torch.randn(3, 4, 5, 6, dtype=torch.float64)  # of fields a and c: (B, ids, D)
    alone = torch.randn(4, 6, dtype=torch.float64)
    a, c = ids[0], ids[2]
    inputs = torch.stack([a.sum(1), a.square().sum(1), alone, c.sum(1), c.square().sum(1)], 1)
    values = torch.cat([a, alone[:, None], c], 1)
    samples = torch.arange(4).repeat_interleave(values.shape[1])
    wanted = interaction.combine(interaction.partial(values.flatten(0, 1), samples, 4))
    close(interaction(inputs), wanted, "whole")
    shards = [[0, 3], [], [1, 2, 4]]
    merged = sum(interaction.partial_of_fields(inputs[:, shard], shard) for shard in shards)
    close(interaction.combine(merged), wanted, "shards")
