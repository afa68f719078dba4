"""Towers train what one rank trains: bit for bit as flat `pooled` where values only take another way, in float64 where
parts of rows are added up inside a tower; with operators inside the towers too, whose weights' gradients are those of
one process. Towers are a part of a host, a host, or all ranks."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from plans import by_table
from ranks import run_ranks
from scenario import all_rows, features, global_batch, share_of, tables
from torch import nn

from colonnade import (
    FM,
    Concat,
    EmbeddingCollection,
    Interaction,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Sum,
    World,
    build_plan,
)
from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import choose_tower_evaluated_consumers, explain_not_in_towers
from colonnade.interaction import TowerModule
from colonnade.lookup.layout import declare
from colonnade.plan.plan import Codecs
from colonnade.topology.sharding import Sharding, column_wise, row_wise, table_wise
from colonnade.wire.codec import CODECS

SIZES = [13, 0, 1, 24]
HOSTS, LOCAL = 2, 2
NUM_RANKS = HOSTS * LOCAL
TABLES = ("user", "item", "tag", "wide")
FIELDS = ("user.deep", "item", "seen", "tags")


class Tower(Interaction):
    """A layer of all fields of a tower, side by side."""

    merge = "whole"
    needs_equal_dims = False

    def __init__(self, dims: int, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dims, out)

    def width(self, dim):
        return self.layer.out_features

    def needs_pooled_fields(self):
        return True

    def partial_of_fields(self, fields, numbers=None):
        return torch.tanh(self.layer(fields))

    def combine(self, stats, dense=None):
        return stats


LOOKED_UP = [*features()[:-1], replace(features()[-1], pooling="mean")]
VALUES = {"some": (Concat(), FIELDS), "others": (Concat(), FIELDS[::-1])}
MODULES = {
    "first": (Tower(10, 3), ("user.deep", "tags")),
    "second": (Tower(10, 2), ("seen", "item")),
    "past": (Sum(), ("history",)),
}
SUMS = {
    "fm": (FM(), ("user.deep", "tags")), "past": (Sum(), ("history",)),
    "rest": (Concat(), ("seen", "item")),
}  # fmt: skip
WIDE = {"first": (Tower(10, 6), ("user.deep", "tags"))}
ACROSS = {"first": (Tower(10, 3), ("user.deep", "item")), "rest": (Concat(), FIELDS)}


def whole(towers, num_ranks=NUM_RANKS):
    """Tables on one rank each, `user` and `tag` in the first tower, the others in the last."""
    size = num_ranks // towers
    last = num_ranks - size
    return {
        "user": table_wise(0), "tag": table_wise(size - 1), "item": table_wise(last),
        "wide": table_wise(num_ranks - 1),
    }  # fmt: skip


def split(towers, num_ranks=NUM_RANKS):
    """Tables dealt to the ranks of their tower."""
    size = num_ranks // towers
    first, last = (
        Sharding("host_wise", tuple(range(begin, begin + size))) for begin in (0, num_ranks - size)
    )
    return {"user": first, "tag": first, "item": last, "wide": last}


def cut(towers, num_ranks=NUM_RANKS):
    """Cut tables by columns: over the ranks of a tower, and `item` over four ranks."""
    size = num_ranks // towers
    return {
        "user": column_wise(range(size)), "item": column_wise(range(min(num_ranks, 4))),
        "tag": table_wise(0), "wide": column_wise(range(num_ranks - min(size, 2), num_ranks)),
    }  # fmt: skip


def over_hosts(towers, num_ranks=NUM_RANKS):
    """Shard tables outside of towers: on all ranks, or on ranks of two towers."""
    return {
        "user": row_wise(num_ranks), "item": Sharding("host_wise", (1, 2)), "tag": table_wise(3),
        "wide": table_wise(0),
    }  # fmt: skip


def partly(towers, num_ranks=NUM_RANKS):
    """Shard a few tables in the first tower, the others on all ranks and so in no tower."""
    return split(towers, num_ranks) | {"item": row_wise(num_ranks), "wide": row_wise(num_ranks)}


PLACES = {"whole": whole, "split": split, "cut": cut, "over hosts": over_hosts, "partly": partly}


def train(mesh, consumers, exchange="pooled", places=None, towers=None, staleness=0, codecs=None):
    """Return outputs by step, all rows and weights at the end, consumers evaluated in a tower, bytes and messages."""
    consumers = copy.deepcopy(consumers)
    declared = tables("float64", "single weights")
    collection = EmbeddingCollection(declared, LOOKED_UP, consumers=consumers, seed=3).double()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in collection.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    exchanges = dict.fromkeys(TABLES, exchange)
    if exchange == "mixed":
        exchanges |= {"user": "towers", "tag": "towers", "item": "rows", "wide": "pooled"}
    if exchange == "beside bags":
        exchanges = dict.fromkeys(TABLES, "towers") | {"user": "tower_rows", "tag": "tower_rows"}
    shardings = (
        {} if places is None or mesh.num_ranks == 1 else PLACES[places](towers, mesh.num_ranks)
    )
    plan = build_plan(
        declared,
        mesh.num_ranks,
        PlanConfig(
            staleness_steps=staleness,
            towers=None if mesh.num_ranks == 1 else towers,
            codec=asdict(codecs or Codecs()),
            tables=by_table(exchange=exchanges, sharding=shardings),
        ),
    )
    collection.open(plan, mesh)
    rows, outputs = RowOptimizer(collection), []
    weights = list(collection.parameters())
    dense = torch.optim.SGD(weights, lr=0.01) if weights else None
    mesh.traffic.sent_bytes.clear()
    mesh.traffic.messages.clear()
    batches = (share_of(global_batch(t, n), mesh.rank, mesh.num_ranks) for t, n in enumerate(SIZES))
    for step, batch in enumerate(collection.lookahead(batches)):
        result = collection(batch)
        outputs.append({name: output.detach().clone() for name, output in result.items()})
        first, last = (SIZES[step] * r // mesh.num_ranks for r in (mesh.rank, mesh.rank + 1))
        gradients = []
        for i, output in enumerate(result.values()):
            random = torch.Generator().manual_seed(10 * step + i)
            every = torch.randn(SIZES[step], output.shape[1], generator=random, dtype=output.dtype)
            gradients.append(every[first:last])
        for _ in range(1 + step % 2):  # two backwards
            torch.autograd.backward(list(result.values()), gradients, retain_graph=True)
        rows.step()
        if dense is not None:
            for weight in weights:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = mesh.all_reduce("dense", gradient)
            dense.step()
            dense.zero_grad()
    sent = dict(mesh.traffic.sent_bytes), dict(mesh.traffic.messages)
    collection.eval()
    with torch.no_grad():
        outputs.append(dict(collection(share_of(global_batch(9, 7), mesh.rank, mesh.num_ranks))))
    remaining = {name: weight.detach() for name, weight in collection.named_parameters()}
    inside = collection.exchange.consumers
    return outputs, all_rows(collection) | remaining, inside, sent, collection.exchange.exactness


TRIED = {
    "values": [
        ("whole", 1),
        ("whole", 2),
        ("whole", 4),
        ("cut", 2),
        ("cut", 4),
        ("split", 2),
        ("over hosts", 2),
    ],
    "modules": [("whole", 2), ("whole", 4), ("split", 1), ("split", 2)],
}
"""Places, and towers: all ranks, a host each, a rank each."""
RUNS = {
    (kind, places, towers): (consumers, {"places": places, "towers": towers})
    for kind, consumers in (("values", VALUES), ("modules", MODULES))
    for places, towers in TRIED[kind]
}
OTHERS = {
    "mixed": (MODULES, {"exchange": "mixed", "places": "split", "towers": 2}),
    "late": (MODULES, {"places": "split", "towers": 2, "staleness": 2}),
    "late beside": (MODULES, {"places": "partly", "towers": 2, "staleness": 2}),
    "across": (ACROSS, {"places": "split", "towers": 2}),
    "sums": (SUMS, {"places": "split", "towers": 2}),
}  # fmt: skip
ROWS = {
    (kind, places, towers): (consumers, {"exchange": "tower_rows", "places": places, "towers": towers})
    for kind, consumers, tried in (
        ("rows", VALUES, [("whole", 1), ("whole", 2), ("whole", 4), ("cut", 2), ("split", 2)]),
        ("rows' modules", MODULES, [("whole", 2), ("whole", 4), ("split", 1), ("split", 2)]),
        ("rows' sums", SUMS, [("split", 2)]),
    )
    for places, towers in tried
}  # fmt: skip
"""Cases in which rows are gathered in towers."""
OTHERS |= ROWS | {
    "rows beside bags": (MODULES, {"exchange": "beside bags", "places": "split", "towers": 2}),
    "rows late": (MODULES, {"exchange": "tower_rows", "places": "split", "towers": 2, "staleness": 2}),
}  # fmt: skip
BITWISE = [name for name in RUNS if name[0] == "values" and name[1] in ("whole", "cut")]


GROUPS = {
    "values whole": [name for name in RUNS if name[:2] == ("values", "whole")],
    "values in parts": [name for name in RUNS if name[0] == "values" and name[1] != "whole"],
    "modules": [name for name in RUNS if name[0] == "modules"],
    "rows": [name for name in ROWS if name[0] == "rows"],
    "modules of rows": [name for name in ROWS if name[0] != "rows"],
    "others": [name for name in OTHERS if name not in ROWS],
}
"""The runs in parts, each of which is one test's work."""


def run_group(mesh, group):
    results = {}
    for name in GROUPS[group]:
        consumers, settings = (RUNS | OTHERS)[name]
        results[name] = train(mesh, consumers, **({"exchange": "towers"} | settings))
        if name in BITWISE:
            results[("flat", *name)] = train(mesh, consumers, "pooled", **settings)
    if group == "others":
        coded = Codecs("bf16", "bf16")
        results["coded"] = train(mesh, VALUES, "towers", "whole", 2, codecs=coded)
    return results


@pytest.fixture(scope="module")
def results_of():
    """Return a function that runs a group once, and returns every rank's results by name."""

    @cache
    def run(group):
        return run_ranks(NUM_RANKS, run_group, group, ranks_per_host=LOCAL)

    return run


@pytest.fixture(scope="module")
def everyone(results_of):
    """Results of all groups, by rank."""
    parts = [results_of(group) for group in GROUPS]
    return [
        {name: value for part in parts for name, value in part[rank].items()}
        for rank in range(NUM_RANKS)
    ]


def close(result, wanted, what):
    torch.testing.assert_close(
        result, wanted, rtol=1e-10, atol=1e-10, msg=lambda message: f"{what}: {message}"
    )


def test_every_run_is_in_a_group():
    assert sorted(map(str, RUNS | OTHERS)) == sorted(
        str(n) for group in GROUPS.values() for n in group
    )


@pytest.mark.parametrize("group", GROUPS)
def test_ranks_train_what_one_does(results_of, group):
    alone, everyone = {}, results_of(group)
    for name in GROUPS[group]:
        consumers, settings = (RUNS | OTHERS)[name]
        late = settings.get("staleness", 0)
        if (key := (id(consumers), late)) not in alone:
            alone[key] = train(Mesh(), consumers, staleness=late)
        outputs, remaining, *_ = alone[key]
        for step, output in enumerate(outputs):
            for item, value in output.items():
                result = torch.cat([rank[name][0][step][item] for rank in everyone])
                close(result, value, f"{name}, step {step}, {item}")
        for rank in everyone:
            for item, value in remaining.items():
                close(rank[name][1][item], value, f"{name}, {item}")


def test_bits_are_those_of_flat_pooled_where_nothing_is_added(everyone):
    for name in BITWISE:
        for rank in everyone:
            output, remaining, *_ = rank[name]
            flat_seen, flat_left, *_ = rank[("flat", *name)]
            for step, outputs in enumerate(flat_seen):
                for key, value in outputs.items():
                    assert torch.equal(output[step][key], value), (name, step, key)
            for key, value in flat_left.items():
                assert torch.equal(remaining[key], value), (name, key)


def test_who_is_evaluated_inside(everyone):
    for rank in everyone:
        for name in RUNS:
            inside = rank[name][2]
            wanted = ("first", "second") if name[0] == "modules" else ()
            assert inside == wanted, name
        assert rank["mixed"][2] == ("first",)
        assert rank["late"][2] == ("first", "second") and rank["across"][2] == ()
        assert rank["late beside"][2] == ("first",)
        assert rank["sums"][2] == ("fm",)
        for name in ROWS:
            wanted = {"rows": (), "rows' sums": ("fm",)}.get(name[0], ("first", "second"))
            assert rank[name][2] == wanted, name
        assert set(rank["rows beside bags"][2]) == {"first", "second"}


def test_as_much_leaves_a_tower_whatever_came_together_in_it(everyone):
    for rank in everyone:
        for channel in ("fetch", "push"):
            rows, bags = (
                rank[name][3][0][channel, "remote"]
                for name in (("rows", "whole", 2), ("values", "whole", 2))
            )
            assert rows == bags > 0


def refused(mesh):
    """Return the error for rows in two towers."""
    with pytest.raises(ConfigError) as error:
        train(mesh, VALUES, "tower_rows", "over hosts", 2)
    return str(error.value)


def test_rows_of_two_towers_are_refused():
    for text in run_ranks(NUM_RANKS, refused, ranks_per_host=LOCAL):
        assert (
            "table 'user': got exchange tower_rows and rows on ranks [0, 1, 2, 3], wanted" in text
        )
        assert "such as ranks [0, 1]" in text


def test_codecs_round_between_towers_alone(everyone):
    for rank in everyone:
        coded, exact = rank["coded"], rank["values", "whole", 2]
        assert coded[4].kind == "lossy" and coded[4].max_error == CODECS["bf16"].random_error
        for name, value in exact[0][
            0
        ].items():  # later steps read rows that rounded gradients trained
            off = (coded[0][0][name] - value).abs()
            assert (off <= 2**-8 * value.abs()).all() and off.any(), name
        for channel in ("fetch", "push"):
            sent, whole = coded[3][0], exact[3][0]
            assert sent[channel, "local"] == whole[channel, "local"] > 0
            assert sent[channel, "remote"] * 4 == whole[channel, "remote"]


class Wrong(Tower):
    """Forgets a sample."""

    def partial_of_fields(self, fields, numbers=None):
        return super().partial_of_fields(fields, numbers)[1:]


class Picky(Tower):
    """Cannot be asked about no samples, as nothing that has a view of so many rows can."""

    def partial_of_fields(self, fields, numbers=None):
        return super().partial_of_fields(fields.view(len(fields), -1), numbers)


class Deaf(Tower):
    """Module whose output has no gradient."""

    def partial_of_fields(self, fields, numbers=None):
        return super().partial_of_fields(fields, numbers).detach()


def first_of(tower, mesh):
    """A collection whose `first` is evaluated by one rank: that of a tower which has two of three tables."""
    looked_up = features()[:-1]
    collection = EmbeddingCollection(
        tables("float64")[:3], looked_up, consumers={"first": (tower, ("user.deep", "tags"))}
    ).double()
    plan = build_plan(
        collection.tables,
        2,
        PlanConfig(
            exchange="towers",
            towers=2,
            tables={
                "user": {"sharding": table_wise(0)},
                "tag": {"sharding": table_wise(0)},
                "item": {"sharding": table_wise(1)},
            },
        ),
    )
    collection.open(plan, mesh)
    return collection


def say(mesh):
    """Return the errors for modules that change the samples, or their fields; then a batch of nobody's samples, and of
    one, and one of a module without a gradient."""
    errors = []
    in_place = [
        TowerModule(nn.Sequential(first, nn.Linear(10, 3)).double(), [5, 5], 3, side_by_side=True)
        for first in (nn.ReLU(inplace=True), nn.Dropout(inplace=True))
    ]
    for wrong in (Wrong(10, 3), *in_place):
        collection = first_of(wrong, mesh)
        with pytest.raises(ConfigError) as error:
            collection(share_of(global_batch(0, 9), mesh.rank, mesh.num_ranks))
        errors.append(str(error.value))
        mesh.barrier()
    deaf = first_of(Deaf(10, 3), mesh)
    sum(
        parameter.sum()
        for parameter in deaf(share_of(global_batch(0, 9), mesh.rank, mesh.num_ranks)).values()
    ).backward()
    RowOptimizer(deaf).step()
    assert not any(parameter.grad.any() for parameter in deaf.interactions["first"].parameters())
    collection = first_of(Picky(10, 3), mesh)
    rows, shapes = RowOptimizer(collection), []
    assert collection.exchange.consumers == ("first",)
    for number, size in enumerate((0, 1, 9)):
        result = collection(share_of(global_batch(number, size), mesh.rank, mesh.num_ranks))
        torch.autograd.backward(
            list(result.values()), [torch.ones_like(v) for v in result.values()]
        )
        rows.step()
        shapes.append(tuple(result["first"].shape))
    assert collection.interactions["first"].training
    return errors, shapes


def test_every_rank_refuses_a_module_that_changes_the_samples_and_asks_none_about_no_samples():
    results = run_ranks(2, say)
    for output, _ in results:
        assert (
            "consumer 'first': its operator gave (2, 3) for 3 samples, wanted (3, 3)" in output[0]
        )
        assert all("Sequential: got its fields changed in place" in text for text in output[1:])
        assert len(output) == 3
    assert [
        sum(n for n, _ in subset) for subset in zip(*(shapes for _, shapes in results), strict=True)
    ] == [0, 1, 9]


@pytest.mark.parametrize(
    ("consumers", "world", "settings", "message"),
    [
        (WIDE, World(num_hosts=2), {"num_towers": 2, "reads_ahead": 1}, "6 floats, more than half of the 10"),
        (WIDE, World(num_hosts=2), {"num_towers": 2}, None),
        (MODULES, World(num_hosts=2), {"num_towers": 2, "reads_ahead": 1}, None),
        (MODULES, World(), {"num_towers": 1}, "on one rank"),
        (MODULES, World(ranks_per_host=4, servers_per_host=2), {"num_towers": 2}, "on servers"),
        (ACROSS, World(ranks_per_host=4), {"num_towers": 2}, "user.deep is in tower 0, item in tower 1"),
        (
            {"first": (Concat(), FIELDS[:2])},
            World(ranks_per_host=4),
            {"num_towers": 1},
            "Concat has no result that is smaller",
        ),
        (MODULES, World(ranks_per_host=4), {"num_towers": 2}, None),
    ],
)  # fmt: skip
def test_why_not_inside(consumers, world, settings, message):
    declaration = declare(tables("float64"), LOOKED_UP, consumers)
    shardings = [split(2)[name] if world.num_ranks == 4 else table_wise(0) for name in TABLES]
    reason = explain_not_in_towers(declaration, "first", shardings, world, **settings)
    assert reason is None if message is None else message in reason


def test_rows_of_no_single_tower_are_said():
    declaration, world = declare(tables("float64"), LOOKED_UP, MODULES), World(ranks_per_host=4)
    shardings = [row_wise(4)] * 4
    reason = explain_not_in_towers(declaration, "first", shardings, world, num_towers=2)
    assert reason == "rows of user.deep are not all in one tower"


def test_nothing_is_evaluated_inside_where_that_saves_nothing():
    world, places = World(ranks_per_host=4), [split(2)[name] for name in TABLES]
    wide = {"first": (Tower(10, 10), ("user.deep", "tags"))}
    pair = {**MODULES, "again": (Concat(), ("tags", "seen"))}
    for consumers, wanted in ((MODULES, ("first", "second")), (wide, ()), (pair, ("first", "second"))):  # fmt: skip
        declaration = declare(tables("float64"), LOOKED_UP, consumers)
        assert choose_tower_evaluated_consumers(declaration, places, world, num_towers=2) == wanted
