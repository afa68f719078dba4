"""Rows that travel ahead are the bits of rows that do not: whatever a program does between two steps, with any tables,
memory and codecs, and with as many bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from exchanges import CHOICES, Choice, consumers, gradient_like
from ranks import run_ranks
from scenario import all_rows, global_batch, open_backings, probe_ids, share_of, tables

from colonnade import EmbeddingCollection, RowOptimizer, build_plan
from colonnade.exchange.codec import Codecs
from colonnade.train.transfer import load_rows

SIZES = [23, 23, 1, 0, 24, 40, 2, 23]


@dataclass(frozen=True)
class Case:
    choice: Choice = CHOICES["rows"]
    dtype: str = "float32"
    stays: str | None = None
    plan: dict = field(default_factory=dict)
    between: str = ""
    """What happens between steps: see `run`."""
    apply_every: int = 1  # batches to an update


CASES = {
    "plain": Case(),
    "float64": Case(dtype="float64", plan={"lookahead": 1}),
    "far": Case(plan={"lookahead": 5}),
    "tiers": Case(plan={"dram_bytes": 30_000, "lookahead": 3}),
    "crowded": Case(plan={"dram_bytes": 16_000, "lookahead": 4}),
    "mixed": Case(CHOICES["mixed"]),
    "all three": Case(CHOICES["all three"]),
    "by table": Case(CHOICES["rows by table"]),
    "bf16": Case(plan={"codecs": Codecs("bf16", "exact")}),
    "int8": Case(plan={"codecs": Codecs("int8", "bf16")}),
    "stays": Case(stays="counted and frequent"),
    "leaves": Case(stays="by chance and recent", plan={"dram_bytes": 30_000}),
    "accumulated": Case(apply_every=3),
    "skipped": Case(between="skipped"),
    "evaluated": Case(between="evaluated", plan={"dram_bytes": 30_000}),
    "deleted": Case(between="deleted"),
    "loaded": Case(between="loaded"),
    "beside": Case(between="beside"),
    "unused": Case(between="unused"),
    "closed": Case(between="closed", plan={"lookahead": 3}),
    "stale": Case(plan={"staleness_steps": 1}),
}
QUICK = (
    "plain",
    "tiers",
    "all three",
    "int8",
    "stays",
    "accumulated",
    "deleted",
    "beside",
    "closed",
)
SPOILT = ("deleted", "loaded", "beside", "unused", "closed")
"""What was sent ahead is sent again."""


def run(mesh, case: Case, folder, rows_ahead: bool):
    """What was read step by step, rows at the end, bytes sent, rows that left ahead."""
    collection = EmbeddingCollection(
        tables(case.dtype, case.stays), case.choice.features, consumers=consumers(), seed=3
    )
    shardings, exchanges = case.choice.shardings_in(mesh.num_ranks), case.choice.exchanges
    plan = build_plan(
        collection.tables, mesh.num_ranks, exchanges=exchanges, shardings=shardings,
        rows_ahead=rows_ahead, **case.plan,
    )  # fmt: skip
    backings = (
        open_backings(folder, mesh, collection.tables, plan.shardings) if plan.needs_backing else []
    )
    collection.open(plan, mesh, backings=backings)
    rows, seen, ahead = RowOptimizer(collection), [], 0

    def share(step, size):
        return share_of(global_batch(step, size), mesh.rank, mesh.num_ranks)

    def train(batch, step):
        outputs = list(collection(batch).values())
        seen.append([output.detach().clone() for output in outputs])
        gradients = [gradient_like(output, step, mesh.rank, i) for i, output in enumerate(outputs)]
        torch.autograd.backward(outputs, gradients)

    def stream(first):
        return collection.lookahead(share(t, SIZES[t]) for t in range(first, len(SIZES)))

    sent = dict(mesh.traffic.sent_bytes)
    batches, step = stream(0), 0
    while (batch := next(batches, None)) is not None:
        if case.between == "unused" and step == 2:
            step += 1
            continue
        train(batch, step)
        if case.between == "skipped" and step in (1, 4):
            collection.forget()
        elif (step + 1) % case.apply_every == 0:
            rows.step()
        if case.between == "evaluated":
            collection.eval()
            seen.append(list(collection(share(900 + step, 31)).values()))
            collection.train()
        if case.between == "deleted" and step in (0, 4):
            collection.delete("user", torch.arange(53))
            collection.delete("item", probe_ids()["item"])
        if case.between == "loaded" and step in (0, 4):
            load_rows(collection, "user", torch.full((53, DIM_OF_USER), 1.5))
        if case.between == "beside" and step in (1, 4):
            train(share(step + 50, 30), step)
            if step == 4:
                rows.step()
        step += 1
        if case.between == "closed" and step in (3, 5):
            ahead += collection.ahead.num_rows if collection.ahead else 0
            batches.close()
            batches = stream(step)
    if collection.live:
        rows.step()
    batches.close()
    ahead += collection.ahead.num_rows if collection.ahead else 0
    sent = {key: size - sent.get(key, 0) for key, size in mesh.traffic.sent_bytes.items()}
    found = all_rows(collection)
    for backing in backings:
        backing.close()
    return (
        seen,
        found,
        sum(size for (purpose, _), size in sent.items() if purpose == "fetch"),
        ahead,
    )


DIM_OF_USER = 6


def run_cases(mesh, names, folder):
    """By case: whether reads and rows are the same bits, and (bytes, rows ahead) of both."""
    found = {}
    for name in names:
        one, other = (
            run(mesh, CASES[name], folder / name / str(wanted), wanted) for wanted in (False, True)
        )
        same = len(one[0]) == len(other[0]) and all(
            torch.equal(a, b)
            for x, y in zip(one[0], other[0], strict=True)
            for a, b in zip(x, y, strict=True)
        )
        same = same and all(torch.equal(one[1][t], other[1][t]) for t in one[1])
        found[name] = same, one[2:], other[2:]
    return found


def check(num_ranks, names, folder):
    for found in run_ranks(num_ranks, run_cases, list(names), folder):
        for name, (same, (bytes_near, ahead_near), (bytes_far, ahead_far)) in found.items():
            assert same, name
            assert ahead_near == 0
            assert (ahead_far > 0) == (name != "stale"), (name, ahead_far)
            if CASES[name].between not in SPOILT:
                assert bytes_far == bytes_near, name


def test_the_same_bits(tmp_path):
    check(2, QUICK, tmp_path)


@pytest.mark.slow
def test_the_same_bits_in_every_case(tmp_path):
    check(3, CASES, tmp_path)
