"""Suite for every exchange and every mix of them: a declaration, batches, and gradients that follow from
(step, rank), on this exchange and on its slow twin.

A choice says by table what travels; tables it does not name have `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from plans import by_table
from references.exchange_reference import ReferenceRows
from scenario import all_rows, features, global_batch, probe_ids, share_of, tables
from torch import Tensor

from colonnade import Concat, EmbeddingCollection, PlanConfig, RowOptimizer, build_plan
from colonnade.lookup.layout import declare
from colonnade.topology.sharding import Sharding, column_wise, replicated, table_wise

SEED = 3
FIELDS = ["user.deep", "item", "seen", "tags"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Tolerances of reassociated sums after a few steps: relative, and absolute for numbers below 1."""


@dataclass(frozen=True)
class Choice:
    exchanges: dict[str, str] = field(default_factory=dict)
    shardings: dict[str, str] = field(default_factory=dict)
    """Shardings by table: "table_wise" (on the rank of its number, modulo the world), "host_wise" (the first two ranks)
    or "replicated", "column_wise" (a slice on each rank); others are row_wise."""
    has_sequence: bool = True
    """True if `history` is looked up: a sequence, in table "wide"; else its bags are averaged."""
    otherwise: str | None = None
    """Further settings of tables, a key of `scenario.OTHERWISE`."""

    @property
    def features(self):
        result = features()
        if not self.has_sequence:
            result[-1] = replace(result[-1], pooling="mean")
        return result

    def shardings_in(self, num_ranks: int) -> dict[str, Sharding]:
        def sharding(t: int, kind: str) -> Sharding:
            if kind == "table_wise":
                return table_wise(t % num_ranks)
            if kind == "replicated":
                return replicated(num_ranks)
            if kind == "column_wise":
                return column_wise(range(num_ranks))
            return Sharding("host_wise", tuple(range(min(2, num_ranks))))

        return {name: sharding(ALL.index(name), kind) for name, kind in self.shardings.items()}


ALL = ("user", "item", "tag", "wide")
CHOICES = {
    "rows": Choice(),
    "pooled": Choice(dict.fromkeys(ALL, "pooled"), has_sequence=False),
    # Consumers of values alone have no partials.
    "partials": Choice(dict.fromkeys(ALL, "partials"), has_sequence=False),
    # All ranks are one tower; beside sequences, which have rows.
    "towers": Choice(
        dict.fromkeys(ALL, "towers"),
        {"user": "table_wise", "item": "host_wise", "wide": "column_wise"},
        has_sequence=False,
        otherwise="single weights",
    ),
    "tower rows": Choice(
        dict.fromkeys(ALL, "tower_rows"),
        {"user": "table_wise", "item": "host_wise", "wide": "column_wise"},
        has_sequence=False,
        otherwise="single weights",
    ),
    "towers beside rows": Choice(
        dict.fromkeys(("user", "tag"), "towers"), {"user": "host_wise", "tag": "table_wise"}
    ),
    # An output with fields of both; parts by rows.
    "mixed": Choice(dict.fromkeys(("item", "tag"), "pooled")),
    # Parts pooled, and the fields of one output in turns.
    "turns": Choice(dict.fromkeys(("user", "tag", "wide"), "pooled"), has_sequence=False),
    "rows by table": Choice({}, {"user": "table_wise", "item": "host_wise", "tag": "table_wise"}),
    "pooled by table": Choice(
        dict.fromkeys(ALL, "pooled"), dict.fromkeys(ALL, "table_wise"), has_sequence=False
    ),
    # In a world of three, one rank has rows of "wide" alone, which is not pooled.
    "mixed by table": Choice(
        dict.fromkeys(("user", "item", "tag"), "pooled"),
        {"user": "table_wise", "item": "host_wise", "tag": "host_wise"},
    ),
    # Three exchanges; a consumer takes of all of them.
    "all three": Choice({"item": "pooled"}, {"tag": "replicated"}),
    # Of two consumers' fields the same one is replicated: sums have the order that they have under one exchange.
    "rows beside replicated": Choice({}, {"tag": "replicated"}),
    # Parts, and the fields of every output, cut by columns; a sequence too.
    "columns": Choice({}, dict.fromkeys(ALL, "column_wise"), otherwise="single weights"),
    "columns of all": Choice(
        {"user": "pooled", "item": "pooled"},
        {"user": "column_wise", "item": "table_wise", "tag": "replicated", "wide": "column_wise"},
        otherwise="single weights",
    ),
}


def consumers():
    """Values as they are; two take the same fields in another order, one field nobody takes."""
    return {"some": (Concat(), FIELDS), "others": (Concat(), FIELDS[::-1])}


def gradient_like(output: Tensor, step: int, rank: int, i: int) -> Tensor:
    random = torch.Generator().manual_seed(step * 100 + rank * 10 + i)
    return torch.randn(output.shape, generator=random, dtype=output.dtype)


def open_collection(mesh, choice: Choice, dtype: str, **settings) -> EmbeddingCollection:
    collection = EmbeddingCollection(
        tables(dtype, choice.otherwise), choice.features, consumers=consumers(), seed=SEED
    )
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        PlanConfig(
            **settings,
            tables=by_table(
                exchange=choice.exchanges, sharding=choice.shardings_in(mesh.num_ranks)
            ),
        ),
    )
    return collection.open(plan, mesh)


def run_exchange(mesh, choice: Choice, sizes, dtype: str, staleness: int):
    """Return this rank's outputs by step, and all rows at the end."""
    collection = open_collection(mesh, choice, dtype, staleness_steps=staleness)
    rows = RowOptimizer(collection)
    outputs_by_step = []
    batches = (share_of(global_batch(t, n), mesh.rank, mesh.num_ranks) for t, n in enumerate(sizes))
    for step, batch in enumerate(collection.lookahead(batches)):
        outputs = list(collection(batch).values())
        outputs_by_step.append([output.detach() for output in outputs])
        torch.autograd.backward(
            outputs,
            [gradient_like(output, step, mesh.rank, i) for i, output in enumerate(outputs)],
        )
        rows.step()
    return outputs_by_step, all_rows(collection), collection.exchange.exactness


@lru_cache
def expected(
    has_sequence: bool,
    otherwise: str | None,
    sizes: tuple[int, ...],
    dtype: str,
    staleness: int,
    num_ranks: int,
):
    """The twin's: outputs by step and rank, and all rows at the end. It knows no exchange and no sharding."""
    features = Choice(has_sequence=has_sequence).features
    declaration = declare(tables(dtype, otherwise), features, consumers())
    twin, pending, outputs_by_step = ReferenceRows(declaration, seed=SEED), [], []
    for step, size in enumerate(sizes):
        shares = [share_of(global_batch(step, size), r, num_ranks) for r in range(num_ranks)]
        # bounded(k): the read for step t sees the updates of steps <= t - 1 - k.
        while len(pending) > staleness:
            twin.apply(*pending.pop(0))
        outputs_by_step.append([twin.outputs(share) for share in shares])
        gradients = [
            [gradient_like(output, step, rank, i) for i, output in enumerate(outputs)]
            for rank, outputs in enumerate(outputs_by_step[-1])
        ]
        pending.append((shares, gradients))
    for late in pending:
        twin.apply(*late)
    rows = {
        table.name: torch.stack([twin.row(table, i) for i in probe_ids()[table.name].tolist()])
        for table in declaration.tables
    }
    return outputs_by_step, rows


def check(choice: Choice, sizes, dtype: str, staleness: int, results) -> None:
    """results by rank, of `run_exchange`: the twin's, at the exactness that the exchange declares."""
    num_ranks, exactness = len(results), results[0][2]
    output, rows = expected(
        choice.has_sequence, choice.otherwise, tuple(sizes), dtype, staleness, num_ranks
    )
    for step, by_rank in enumerate(output):
        for rank, outputs in enumerate(by_rank):
            for wanted, result in zip(outputs, results[rank][0][step], strict=True):
                same(exactness, wanted, result, f"{dtype}, k={staleness}, step {step}, rank {rank}")
    for name, wanted in rows.items():
        for _, result, _ in results:
            same(exactness, wanted, result[name], f"rows of {name}")


def same(exactness, wanted: Tensor, result: Tensor, what: str) -> None:
    if exactness.kind == "bitwise":
        assert torch.equal(wanted, result), what
        return
    bound = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(
        result, wanted, rtol=bound, atol=bound, msg=lambda message: f"{what}: {message}"
    )
