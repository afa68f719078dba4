"""Attention over a sequence is the softmax that its definition says, wherever it is evaluated: of rows that travel, or
where they lie, on one rank or several, whole tables and split ones; outputs, rows and evaluation in float64. And its
bytes are as foretold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from safetensors.torch import save_file
from scenario import share_of
from test_partials_law import at_owners, close

from colonnade import (
    FM,
    SGD,
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    TargetAttention,
    Uniform,
    World,
    build_plan,
)
from colonnade.comm.process_groups import assign_server_ranks
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError
from colonnade.files.checksums import compute_checksums
from colonnade.lookup.layout import declare
from colonnade.plan.cost.consumers import build_model_load
from colonnade.plan.measure.profile import RunBatches, build_table_loads, profile_batches
from colonnade.plan.plan import EXACT, Codecs
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Problem
from colonnade.store.mapped import open_mapped
from colonnade.topology.sharding import (
    Sharding,
    build_hot_rows,
    column_wise,
    replicated,
    row_wise,
    table_wise,
)

LR, SIZES = 0.3, [13, 0, 1, 24]
TABLES = [
    Table(name, dim, rows=rows, dtype="float64", optimizer=SGD(lr=LR), initializer=Uniform(scale=1))
    for name, dim, rows in (("item", 6, 30), ("user", 6, 11), ("place", 4, 9))
]
NAMES = tuple(table.name for table in TABLES)
FEATURES = [
    Feature("item", "item"),
    Feature("history", "item", pooling="sequence"),  # weighted, some empty
    Feature("seen", "item", pooling="mean"),
    Feature("user", "user"),
    Feature("home", "place"),
    Feature("visits", "place", pooling="sequence"),
]
CONSUMERS = {
    "likes": (TargetAttention(2), ("item", "history")),
    "again": (TargetAttention(3), ("seen", "history")),
    "who": (TargetAttention(), ("user", "history")),
    "where": (TargetAttention(4), ("home", "visits")),
    "fm": (FM(), ("item", "user")),
    "deep": (Concat(), ("home",)),
}
ATTENDING = ("likes", "again", "who", "where")


@dataclass(frozen=True)
class Case:
    exchanges: dict[str, str]
    kind: str = "row_wise"
    """Shardings, the same for all tables."""
    at_owners: tuple[str, ...] = ()
    consumers: tuple[str, ...] = tuple(CONSUMERS)

    def shardings_in(self, num_ranks: int) -> dict[str, Sharding]:
        if self.kind == "table_wise":
            return {name: table_wise(t % num_ranks) for t, name in enumerate(NAMES)}
        if self.kind == "host_wise":  # the last two ranks
            return {name: Sharding("host_wise", tuple(range(num_ranks))[-2:]) for name in NAMES}
        hot = {"place": replace(row_wise(num_ranks), hot=build_hot_rows(range(0, 9, 2), num_ranks))}
        if self.kind == "cut":
            cut = {"item": column_wise(range(min(2, num_ranks)))} if num_ranks > 1 else {}
            return {**cut, **hot}
        if self.kind == "hot":
            return hot
        return {}


ALL = dict.fromkeys(NAMES, "partials")
CASES = {
    "rows": Case({}),
    "rows and pooled": Case({"user": "pooled"}, "table_wise"),
    "cut and hot": Case({}, "cut"),
    "split": Case(ALL, at_owners=ATTENDING),
    "whole": Case(ALL, "table_wise", ATTENDING),
    "on some": Case(ALL, "host_wise", ATTENDING),
    "beside hot": Case({"item": "partials", "user": "partials"}, "hot", ("likes", "again", "who")),
    "one alone": Case({"item": "partials"}, at_owners=("likes",), consumers=("likes", "where")),
    "a query of its own": Case(
        {"item": "partials", "user": "partials"}, "table_wise", ("who",), ("who", "where")
    ),
}


def global_batch(step: int, size: int) -> Batch:
    draws = torch.Generator().manual_seed(step)

    def bag(rows: int, max_length: int, is_weighted: bool = False) -> Ids:
        lengths = torch.randint(0, max_length + 1, (size,), generator=draws)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        weights = torch.rand(count, generator=draws) + 0.5 if is_weighted else None
        return Ids(torch.randint(0, rows, (count,), generator=draws), offsets, weights)

    def one(rows: int) -> Ids:
        return Ids(torch.randint(0, rows, (size,), generator=draws))

    ids = {"item": one(30), "history": bag(30, 6, True), "seen": bag(30, 3), "user": one(11)}
    ids |= {"home": one(9), "visits": bag(9, 3)}
    return Batch(size, torch.zeros(size, 0), ids, label=torch.zeros(size))


def gradient_of(step: int, name: str, size: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + len(name))
    return torch.randn(size, width, generator=random, dtype=torch.float64)


def collection_of(case: Case) -> EmbeddingCollection:
    features = [*FEATURES]
    consumers = {name: CONSUMERS[name] for name in case.consumers}
    taken = {field for _, fields in consumers.values() for field in fields}
    features = [feature for feature in FEATURES if feature.name in taken]
    return EmbeddingCollection(TABLES, features, consumers=consumers, seed=3)


def train(mesh, case: Case):
    """Return this rank's outputs by step, all rows at the end, and the consumers evaluated at the owners."""
    collection = collection_of(case)
    plan = build_plan(
        TABLES,
        mesh.world,
        PlanConfig(
            tables=by_table(exchange=case.exchanges, sharding=case.shardings_in(mesh.num_ranks))
        ),
    )
    collection.open(plan, mesh)
    rows, outputs, trainers = RowOptimizer(collection), [], mesh.trainers

    def own(batch):
        return (
            share_of(batch, 0, 99)
            if mesh.is_server
            else share_of(batch, trainers.rank, trainers.num_ranks)
        )

    batches = (own(global_batch(t, n)) for t, n in enumerate(SIZES))
    for step, batch in enumerate(collection.lookahead(batches)):
        actual = collection(batch)
        assert tuple(actual) == case.consumers
        outputs.append({name: result.detach().clone() for name, result in actual.items()})
        first, last = (
            SIZES[step] * r // trainers.num_ranks for r in (trainers.rank, trainers.rank + 1)
        )
        if mesh.is_server:
            last = first
        gradients = [
            gradient_of(step, name, SIZES[step], result.shape[1])[first:last]
            for name, result in actual.items()
        ]
        for _ in range(1 + step % 2):  # two backwards
            torch.autograd.backward(list(actual.values()), gradients, retain_graph=True)
        rows.step()
    collection.eval()
    with torch.no_grad():
        outputs.append(dict(collection(own(global_batch(9, 7)))))
    stored = {t.name: collection.rows(t.name, torch.arange(t.rows)) for t in TABLES}
    return outputs, stored, at_owners(collection)


def plain(case: Case):
    """The same in PyTorch, a sample after the other."""
    start = collection_of(case)
    start.open(build_plan(TABLES))
    weights = {t.name: start.rows(t.name, torch.arange(t.rows)) for t in TABLES}
    tables = {feature.name: feature for feature in FEATURES}
    outputs = []

    def rows_of(leaves, batch, field, sample):
        ids = batch.ids[field]
        first, last = (sample, sample + 1) if ids.offsets is None else ids.offsets[sample:][:2]
        rows = leaves[tables[field].table][ids.values[first:last]]
        if ids.weights is not None:
            rows = rows * ids.weights[first:last, None].double()
        return rows

    def pooled(leaves, batch, field, sample):
        rows = rows_of(leaves, batch, field, sample)
        return rows.sum(0) / max(1, len(rows) if tables[field].pooling == "mean" else 1)

    def output(leaves, batch, name, sample):
        interaction, fields = CONSUMERS[name]
        values = [
            pooled(leaves, batch, field, sample) for field in fields if "s" != field[-1:] or True
        ]
        if name == "deep":
            return torch.cat(values)
        if name == "fm":
            return (values[0] * values[1]).sum()[None]
        rows, heads = rows_of(leaves, batch, fields[1], sample), interaction.heads
        results = []
        for query, keys in zip(values[0].chunk(heads), rows.chunk(heads, 1), strict=True):
            scores = torch.softmax(keys @ query / math.sqrt(len(query)), 0)
            results.append(scores @ keys)
        return torch.cat(results)

    for step, size in enumerate([*SIZES, 7]):
        batch = global_batch(9 if step == len(SIZES) else step, size)
        leaves = {name: feature.clone().requires_grad_(True) for name, feature in weights.items()}
        results = {
            name: torch.stack([output(leaves, batch, name, i) for i in range(size)])
            if size else torch.zeros(0, 1)
            for name in case.consumers
        }  # fmt: skip
        outputs.append({name: feature.detach() for name, feature in results.items()})
        if size and step < len(SIZES):
            loss = sum(
                (feature * gradient_of(step, name, *feature.shape)).sum()
                for name, feature in results.items()
            )
            (loss * (1 + step % 2)).backward()
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    weights[name] = (leaf - LR * leaf.grad).detach()
    return outputs, weights


def train_all(mesh):
    return [train(mesh, case) for case in CASES.values()]


def with_servers_of_rows(mesh):
    """Two trainers with one server, one with two."""
    results = []
    for count in (1, 2):
        local = assign_server_ranks(mesh, count)
        results.append((local.is_server, train(local, CASES["split"])))
    return results


def test_servers_that_attend_train_what_the_definition_says():
    everyone = run_ranks(3, with_servers_of_rows)
    wanted, rows = plain(CASES["split"])
    for number in (0, 1):
        trainers = [rank[number][1] for rank in everyone if not rank[number][0]]
        assert len(trainers) == 2 - number
        for step, outputs in enumerate(wanted):
            for key, value in outputs.items():
                result = torch.cat([output[step][key] for output, _, _ in trainers])
                if len(value):
                    close(result, value, f"{2 - number} trainers, step {step}, {key}")
        for _, (_, stored, evaluated) in (rank[number] for rank in everyone):
            assert set(ATTENDING) <= set(evaluated)
            for table, value in rows.items():
                close(stored[table], value, f"{2 - number} trainers, {table}")


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_equals_the_definition(num_ranks):
    if num_ranks == 1:
        everyone = [train_all(Mesh())]
    else:
        everyone = run_ranks(num_ranks, train_all, ranks_per_host=2 if num_ranks == 4 else None)
    for number, (name, case) in enumerate(CASES.items()):
        output, rows = plain(case)
        for step, outputs in enumerate(output):
            for key, value in outputs.items():
                result = torch.cat([rank[number][0][step][key] for rank in everyone])
                assert len(result) == len(value)
                if len(value):
                    close(result, value, f"{name}, step {step}, {key}")
        for rank in everyone:
            for table, value in rows.items():
                close(rank[number][1][table], value, f"{name}, {table}")
            evaluated = rank[number][2]
            assert set(ATTENDING) & set(evaluated) == set(case.at_owners), name


WIDE = [
    Table(name, 8, rows=rows, optimizer=SGD(lr=LR)) for name, rows in (("item", 900), ("user", 300))
]
ATTEND = {
    "likes": (TargetAttention(2), ("item", "history")),
    "who": (TargetAttention(), ("user", "history")),
    "fm": (FM(), ("item", "user")),
}
SENT = {
    "split": ("row_wise", EXACT),
    "whole": ("table_wise", EXACT),
    "coded": ("row_wise", Codecs("bf16", "fp16")),
}
SIZE, STEPS = 300, 4


def many(step: int, size: int) -> Batch:
    draws = torch.Generator().manual_seed(step)

    def draw(rows: int, count: int) -> torch.Tensor:
        return (torch.rand(count, generator=draws) ** 3 * rows).long()

    lengths = torch.randint(0, 9, (size,), generator=draws)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    history = Ids(draw(900, int(offsets[-1])), offsets)
    ids = {"item": Ids(draw(900, size)), "user": Ids(draw(300, size)), "history": history}
    return Batch(size, torch.zeros(size, 0), ids)


def wide_collection() -> EmbeddingCollection:
    features = [feature for feature in FEATURES if feature.name in ("item", "user", "history")]
    return EmbeddingCollection(WIDE, features, consumers=ATTEND)


def forced(kind: str, num_ranks: int) -> dict[str, Constraint]:
    ranks = {"item": (0,), "user": (num_ranks - 1,)}
    return {
        name: Constraint(kind, "partials", ranks[name] if kind == "table_wise" else None)
        for name in ranks
    }


def counted(mesh):
    """Return this rank's bytes of all steps by (channel, link), for each case."""
    results, n = {}, mesh.num_ranks
    for case, (kind, codecs) in SENT.items():
        alone, collection = replace(mesh, traffic=Traffic()), wide_collection()
        whole = {
            name: table_wise(*(constraint.ranks or (0,)))
            for name, constraint in forced(kind, n).items()
        }
        plan = build_plan(
            WIDE,
            n,
            PlanConfig(
                codec=asdict(codecs),
                tables=by_table(
                    exchange=dict.fromkeys(("item", "user"), "partials"),
                    sharding=whole if kind == "table_wise" else {},
                ),
            ),
        )
        collection.open(plan, alone)
        rows = RowOptimizer(collection)
        own_batches = (many(1000 + n * t + mesh.rank, SIZE) for t in range(STEPS))
        for batch in collection.lookahead(own_batches):
            sum(value.sum() for value in collection(batch).values()).backward()
            rows.step()
        results[case] = dict(alone.traffic.sent_bytes)
    return results


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_bytes_are_foretold(hosts, ranks_per_host):
    num_ranks = hosts * ranks_per_host
    everyone = run_ranks(num_ranks, counted, ranks_per_host=ranks_per_host)
    world = World(num_hosts=hosts, ranks_per_host=ranks_per_host)
    declaration = wide_collection().declaration
    sampled = profile_batches(
        WIDE, declaration.features, [many(t, SIZE * num_ranks) for t in range(20)]
    )
    for case, (kind, codecs) in SENT.items():
        loads = build_table_loads(
            WIDE,
            declaration.features,
            sampled,
            world,
            RunBatches(batch_size=SIZE * num_ranks, last_batch=100),
            codecs=codecs,
        )
        model = build_model_load(declaration, loads, codecs=codecs)
        choice = choose(Problem(loads, world, forced=forced(kind, num_ranks), model=model))
        assert [consumer.is_partial for consumer in choice.consumers][:2] == [True, True]
        for key, foretold in choice.sent.items():
            mean = sum(consumer[case].get(key, 0) for consumer in everyone) / (num_ranks * STEPS)
            assert foretold == pytest.approx(mean, rel=0.02), (case, key)


def test_a_sequence_of_which_something_else_is_taken_cannot_stay():
    """Chosen neither, nor where it is asked for: its query's table travels otherwise."""
    declaration, world = wide_collection().declaration, World(ranks_per_host=2)
    sampled = profile_batches(WIDE, declaration.features, [many(0, 500)])
    loads = build_table_loads(
        WIDE, declaration.features, sampled, world, RunBatches(batch_size=500)
    )
    model = build_model_load(declaration, loads, world=world)
    constraints = dict.fromkeys(("item", "user"), Constraint(exchange="partials"))
    assert set(
        choose(Problem(loads, world, forced=constraints, model=model)).exchanges.values()
    ) == {"partials"}
    one = {"item": constraints["item"], "user": Constraint(exchange="rows")}
    with pytest.raises(ConfigError, match=r"'item': got exchange partials for 'history'"):
        choose(Problem(loads, world, forced=one, model=model))
    stale = build_model_load(declaration, loads, world=world, reads_ahead=1)
    with pytest.raises(ConfigError, match="a feature reads it as a sequence"):
        choose(Problem(loads, world, forced=constraints, model=stale))


def test_shards_merge_in_any_way():
    torch.manual_seed(0)
    attention, size, count = TargetAttention(2), 5, 31
    query = torch.randn(size, 6, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(count, 6, dtype=torch.float64, requires_grad=True)
    segments = torch.randint(0, size - 1, (count,)).sort().values  # the last has none
    shard = torch.randint(0, 3, (count,))
    offsets = torch.searchsorted(segments, torch.arange(size + 1))

    def partial(mask):
        return attention.partial(rows[mask], segments[mask], size, None, query)

    wanted = attention(query, rows, offsets)
    assert not bool(wanted[-1].any())
    stats = torch.stack([partial(shard == index) for index in range(4)])
    nested = attention.merge_partials(
        torch.stack([attention.merge_partials(stats[:2]), attention.merge_partials(stats[2:])])
    )
    for merged in (attention.merge_partials(stats), nested):
        result = attention.combine(merged)
        close(result, wanted, "merged")
        for one, other in zip(
            torch.autograd.grad(result.square().sum(), (query, rows), retain_graph=True),
            torch.autograd.grad(wanted.square().sum(), (query, rows), retain_graph=True),
            strict=True,
        ):
            close(one, other, "gradient")
    assert torch.autograd.gradcheck(lambda q, k: attention(q, k, offsets), (query, rows))


def test_exported_rows_serve_it(tmp_path):
    collection, served, files = wide_collection(), wide_collection(), []
    collection.open(build_plan(WIDE))
    for table in WIDE:
        ids = torch.arange(table.rows)
        path = tmp_path / f"{table.name}.safetensors"
        save_file({"ids": ids, "weights": collection.rows(table.name, ids)}, path)
        files.append((path.name, compute_checksums(path)))
    served.open_exported(open_mapped(WIDE, tmp_path, files, seed=1))
    with torch.no_grad():
        result, wanted = served.eval()(many(1, 9)), collection.eval()(many(1, 9))
    assert list(result) == list(wanted) == list(ATTEND)
    assert all(torch.equal(result[name], wanted[name]) for name in ATTEND)


def test_scores_may_be_large():
    """Exponentials of neither overflow."""
    attention = TargetAttention()
    query = torch.full((2, 4), 300.0, requires_grad=True)
    rows = torch.tensor([[300.0] * 4, [-300.0] * 4, [-300.0] * 4], requires_grad=True)
    result = attention(query, rows, torch.tensor([0, 2, 3]))
    assert torch.equal(result, rows[[0, 2]])
    result.sum().backward()
    assert bool(torch.isfinite(query.grad).all()) and bool(torch.isfinite(rows.grad).all())


def test_what_it_refuses():
    def declared(interaction, fields):
        return declare(TABLES, FEATURES, {"here": (interaction, fields)})

    with pytest.raises(ConfigError, match="'item' as a sequence, but it is pooled"):
        declared(TargetAttention(), ("seen", "item"))
    with pytest.raises(ConfigError, match="'history', which is a sequence"):
        declared(TargetAttention(), ("history", "history"))
    with pytest.raises(ConfigError, match=r"of one dim; got dims \[4, 6\]"):
        declared(TargetAttention(), ("home", "history"))
    with pytest.raises(ConfigError, match="4 heads, which do not divide dim 6"):
        declared(TargetAttention(4), ("item", "history"))
    case = CASES["one alone"]
    plan = build_plan(
        TABLES, 1, PlanConfig(staleness_steps=1, tables=by_table(exchange=case.exchanges))
    )
    why = r"'history'.*consumer 'likes' takes, but .*rows are read ahead; give this table exchange rows"
    with pytest.raises(ConfigError, match=why):
        collection_of(case).open(plan)
    for exchange in ("pooled", "towers"):
        plan = build_plan(TABLES, 1, PlanConfig(tables={"item": {"exchange": exchange}}))
        with pytest.raises(
            ConfigError, match=r"'history'.* or tower_rows for a sequence.*exchange rows"
        ):
            collection_of(case).open(plan)
    other = replace(case, consumers=("who",))  # the query's table travels otherwise
    with pytest.raises(ConfigError, match=r"'history'.*exchange=rows"):
        collection_of(other).open(
            build_plan(TABLES, 1, PlanConfig(tables=by_table(exchange=case.exchanges)))
        )


APART = {
    "cut": ({"sharding": column_wise([0, 1]), "exchange": "pooled"}, "is cut by columns"),
    "copied": ({"sharding": replicated(2)}, "is replicated"),
    "hot": ({"sharding": row_wise(2), "exchange": "partials", "replicated_rows": [1]}, "has hot rows"),
    "rows": ({"sharding": row_wise(2), "exchange": "rows"}, "is under rows"),
}  # fmt: skip


def refused(mesh):
    """Messages of plans whose query is of a table that owners do not have whole under `partials`."""
    messages = {}
    whole = {"sharding": row_wise(2), "exchange": "partials"}
    for name, (settings, _) in APART.items():
        collection = EmbeddingCollection(
            [Table(table, 8, rows=9, optimizer=SGD(lr=0.1)) for table in ("item", "past")],
            [Feature("item", "item"), Feature("past", "past", pooling="sequence")],
            consumers={"likes": (TargetAttention(2), ("item", "past"))},
        )
        own = {"item": settings, "past": whole}
        plan = build_plan(collection.tables, mesh.num_ranks, PlanConfig(tables=own))
        with pytest.raises(ConfigError) as error:
            collection.open(plan, mesh)
        messages[name] = str(error.value)
    return messages


def test_attention_that_owners_cannot_evaluate_is_refused_with_the_table():
    for messages in run_ranks(2, refused):
        for name, (_, reason) in APART.items():
            assert "consumer 'likes' (TargetAttention)" in messages[name]
            assert f"table 'item' of its field 'item' {reason}" in messages[name]
            assert "set plan.tables.past.exchange=rows" in messages[name]
