"""plan.cache.staleness=exact: rows lie with who alone uses them, and every bit is as if they did not."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scenario import assert_same_bits, open_backings, tables, train
from simulated import run_simulated
from slow_sight import forced_moves

from colonnade import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    World,
    build_plan,
    load_rows,
)
from colonnade.config import build_config, override
from colonnade.errors import ConfigError
from colonnade.exchange.lending import Lending
from colonnade.topology.sharding import table_wise
from colonnade.topology.traffic import Traffic
from colonnade.train.run import open_run

SIZES = [23, 5, 23, 1, 0, 9, 24, 2, 23, 11]


def lent(rows: int, window: int) -> dict[str, Lending]:
    return {table.name: Lending(rows, window) for table in tables()}


CASES = [
    (lent(1000, 4), 2),
    (lent(1000, 100), 0),
    (lent(7, 4), 3),
    (lent(1000, 1), 1),
    (lent(1000, 0), 2),
    (lent(0, 4), 2),
]
"""Rows and window, lookahead."""


def train_with_and_without(mesh, cases):
    plain = train(mesh, sizes=SIZES)
    return plain, [
        train(mesh, sizes=SIZES, caches=caches, lookahead=depth) for caches, depth in cases
    ]


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)],
)
def test_it_has_the_bits_of_rows(num_ranks):
    for plain, others in run_ranks(num_ranks, train_with_and_without, CASES):
        for other in others:
            assert_same_bits(plain, other)


def train_otherwise(mesh, folder):
    """In memory that holds few rows; where tables have one owner each."""
    one = {"item": table_wise(1), "user": table_wise(0)}
    return [
        (train(mesh, sizes=SIZES, **how), train(mesh, sizes=SIZES, caches=lent(30, 4), **how))
        for how in ({"dram_bytes": 12_000, "folder": folder / f"{mesh.rank}"}, {"shardings": one})
    ]


def test_rows_at_rest_and_other_owners_change_nothing(tmp_path):
    for pairs in run_ranks(2, train_otherwise, tmp_path):
        for plain, other in pairs:
            assert_same_bits(plain, other)


OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    RowWiseAdam(lr=0.1),
    AdamW(lr=0.1),
    FTRL(lr=0.1, l1=1e-3),
    LAMB(lr=0.1),
]
IDS = 200


class Liked:
    """Ranks that use rows of their own, and some of everybody's."""

    def __init__(self, mesh, dtype, caches=None, *, optimizers=OPTIMIZERS, depth=2) -> None:
        self.mesh = replace(mesh, traffic=Traffic())
        declared = [
            Table(f"t{i}", 4, rows=IDS if i % 2 else None, optimizer=each, dtype=dtype)
            for i, each in enumerate(optimizers)
        ]
        self.collection = EmbeddingCollection(
            declared, [Feature(t.name, t.name) for t in declared], seed=5
        )
        kept = {t.name: caches for t in declared} if caches else None
        plan = build_plan(declared, mesh.num_ranks, caches=kept, lookahead=depth)
        self.collection.open(plan, self.mesh)
        self.rows = RowOptimizer(self.collection)

    def ids(self, step, rank):
        """Of all tables."""
        random = np.random.default_rng([step, rank])
        own = random.integers(0, 30, 9) * self.mesh.num_ranks + rank
        return torch.from_numpy(np.concatenate([own, random.integers(0, IDS, 3)]) % IDS)

    def batches(self, steps, first=0):
        for step in range(first, first + steps):
            ids = self.ids(step, self.mesh.rank)
            yield Batch(
                len(ids),
                torch.zeros(len(ids), 0),
                {t.name: Ids(ids) for t in self.collection.tables},
            )

    def step(self, batch):
        """What was read."""
        found = self.collection(batch)
        sum((each * each + each).sum() for each in found.values()).backward()
        self.rows.step()
        return [found[t.name].detach().clone() for t in self.collection.tables]

    def train(self, steps, first=0):
        return [self.step(batch) for batch in self.collection.lookahead(self.batches(steps, first))]

    def held(self):
        with self.rows.settled():
            every = torch.arange(IDS)
            return [self.collection.rows(t.name, every) for t in self.collection.tables]

    @property
    def counts(self):
        return dict(vars(self.collection.lent.counts))


def same(ones, others) -> bool:
    return len(ones) == len(others) and all(
        torch.equal(one, other)
        for mine, theirs in zip(ones, others, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )


def train_liked(mesh):
    """bfloat16: rounded at random."""
    found = []
    for dtype in ("float32", "bfloat16"):
        plain, kept = Liked(mesh, dtype), Liked(mesh, dtype, Lending(IDS, 6))
        seen = plain.train(25), kept.train(25)
        found.append((same(*seen), same([plain.held()], [kept.held()]), kept.counts))
    return found


def test_every_optimizer_steps_the_same_wherever_the_row_lies():
    for found in run_ranks(2, train_liked):
        for reads, rows, counts in found:
            assert reads and rows
            assert counts["stayed"] > counts["returned"] > 0 and counts["borrowed"] > 0


def leave_and_come_back(mesh):
    """Lookaheads that are closed with batches in flight, one read and left, batches without one in between, a look at
    the rows whenever: what was read, and all rows."""
    found = []
    for caches in (None, Lending(IDS, 6)):
        here, seen = Liked(mesh, "float32", caches, optimizers=OPTIMIZERS[:3]), []
        for first, reads_on in ((0, False), (10, True), (20, False)):
            with here.collection.lookahead(here.batches(12, first)) as ahead:
                for _ in range(7):
                    seen.append(here.step(next(ahead)))
                seen.append(here.held())
                seen.append(here.step(next(ahead)))
                if reads_on:
                    next(ahead)
            if caches is not None and reads_on:
                held = here.held()
                assert same([held], [here.held()])
            (batch,) = here.batches(1, 500 + first)
            seen.append(here.step(batch))
        seen.append(here.held())
        found.append(seen)
    return same(*found)


def test_what_was_lent_comes_back_when_a_lookahead_is_left():
    assert all(run_ranks(2, leave_and_come_back))


def refused(mesh):
    here = Liked(mesh, "float32", Lending(IDS, 6), optimizers=OPTIMIZERS[:1])
    said = []
    with here.collection.lookahead(here.batches(6)) as ahead:
        next(ahead)
        with pytest.raises(RuntimeError) as error:
            next(ahead)
        said.append(str(error.value))
    with here.collection.lookahead(here.batches(6)) as ahead:
        here.step(next(ahead))
        (batch,) = here.batches(1, 77)
        here.step(batch)
        with pytest.raises(RuntimeError) as error:
            next(ahead)
        said.append(str(error.value))
    with here.collection.lookahead(here.batches(6)) as ahead:
        here.collection(next(ahead))["t0"].sum().backward()
        with pytest.raises(ConfigError, match="rows that are lent"):
            here.rows.clip_grad_norm_(1.0)
        here.collection.forget()
    with pytest.raises(ConfigError, match="may have copies of"):
        here.collection.delete("t0", torch.tensor([1]))
    here.train(3)  # nothing is left behind by what was refused
    return said


def test_what_breaks_the_order_is_said():
    for said in run_ranks(2, refused):
        for words in said:
            assert "every batch of a lookahead is trained on, in order" in words


def count_bytes(mesh):
    """Of 60 steps of SGD rows of 32: bytes of values and gradients without, with all in sight and with a batch, counts
    of these, and moves that nobody can save."""
    sgd = [SGD(lr=0.1)] * 2
    plain = Wide(mesh, "float32", optimizers=sgd)
    every = Wide(mesh, "float32", Lending(IDS, 60), optimizers=sgd)
    one = Wide(mesh, "float32", Lending(IDS, 1), optimizers=sgd)
    for each in (plain, every, one):
        each.train(60)
    batches = []
    for step in range(60):
        by_rank = [set(plain.ids(step, rank).tolist()) for rank in range(mesh.num_ranks)]
        used = set().union(*by_rank)
        batches.append({id: {rank for rank, ids in enumerate(by_rank) if id in ids} for id in used})
    sent = [
        sum(each.mesh.traffic.bytes_of(purpose) for purpose in ("fetch", "push"))
        for each in (plain, every, one)
    ]
    return sent, [every.counts, one.counts], len(sgd) * forced_moves(batches)


class Wide(Liked):
    """Of rows that dwarf their clocks."""

    def __init__(self, mesh, dtype, caches=None, *, optimizers) -> None:
        self.mesh = replace(mesh, traffic=Traffic())
        declared = [
            Table(f"t{i}", 32, rows=IDS, optimizer=each, dtype=dtype)
            for i, each in enumerate(optimizers)
        ]
        self.collection = EmbeddingCollection(declared, [Feature(t.name, t.name) for t in declared])
        kept = {t.name: caches for t in declared} if caches else None
        self.collection.open(build_plan(declared, mesh.num_ranks, caches=kept), self.mesh)
        self.rows = RowOptimizer(self.collection)


def test_no_row_moves_that_could_stay():
    """Room for all: rows that travel are those that synchronous semantics force to. With one batch in sight they wait
    where they are for their next use, for rows of SGD that few others use are worth to be lent."""
    found = run_ranks(3, count_bytes)
    forced = found[0][2]
    moved, at_end, uses = [0, 0], [0, 0], 0
    for i in range(2):
        counts = [each[i] for _, each, _ in found]
        asked, borrowed, stayed, copied, returned = (
            sum(each[name] for each in counts)
            for name in ("asked", "borrowed", "stayed", "copied", "returned")
        )
        uses = asked + borrowed + stayed + copied
        moved[i], at_end[i] = 2 * asked + 2 * borrowed + copied, borrowed - returned
    sent = [sum(each[0][i] for each in found) for i in range(3)]
    print(f"rows moved {moved}, at the end {at_end}; forced {forced} of {2 * uses}; bytes {sent}")
    assert moved == [forced, forced] and forced < 0.5 * 2 * uses
    assert at_end[0] == 0
    # A record of SGD's is its weights: owners count clocks. What was lent to the end comes back as for an evaluation;
    # ranks' own rows lie with them a little more often than others, and travel less.
    for i in range(2):
        share = (moved[i] - at_end[i]) / (2 * uses)
        assert sent[1 + i] == pytest.approx(sent[0] * share, rel=0.1)


def settle_often(mesh):
    """Bytes of settling after 20 steps, at once again, and after one more step."""
    here, sent = Wide(mesh, "float32", Lending(IDS, 60), optimizers=[SGD(lr=0.1)] * 2), []

    def settle():
        before = here.mesh.traffic.bytes_of("evaluate")
        with here.rows.settled():
            pass
        sent.append(here.mesh.traffic.bytes_of("evaluate") - before)

    with here.collection.lookahead(here.batches(30)) as ahead:
        for _ in range(20):
            here.step(next(ahead))
        settle()
        settle()
        here.step(next(ahead))
        settle()
    return sent, here.collection.tables[0].record_bytes


def test_owners_are_told_of_lent_rows_that_changed_and_no_others():
    for (first, again, last), record_bytes in run_simulated(World(ranks_per_host=2), settle_often):
        used = 2 * 12  # rows of one batch, in both tables
        assert again < record_bytes < last <= again + used * (record_bytes + 8) < first


CONFIG = {
    "data": {"name": "synthetic", "options": {"num_train": 900, "num_test": 60, "cardinalities": [50, 900]}},
    "model": {"dim": 4, "bottom": [8], "top": [8]},
    "train": {"batch_size": 60, "epochs": 1, "commit_steps": 7, "threads": 1},
    "plan": {"cache": {"size": "50%", "staleness": "exact", "window": 5}},
}  # fmt: skip


def run_on(mesh, folder, epochs, without=False):
    """Goes on to `epochs`: all rows, test scores, what stayed where it was used."""
    config = override(build_config(CONFIG), {"train.epochs": epochs})
    if without:
        config = override(config, {"plan.cache": None})
    run = open_run(config, mesh, folder)
    try:
        outcome = run.train()
        lending = run.trainer.collection.lent
        with run.trainer.rows.settled():
            every = [
                run.trainer.collection.rows("C1", torch.arange(50)),
                run.trainer.collection.rows("C2", torch.arange(900)),
            ]
        metrics = run.summary(outcome)["metrics"]
        return every, metrics["test_auc"], 0 if lending is None else lending.counts.stayed
    finally:
        run.close()


def test_commits_hold_all_rows_and_any_run_goes_on_from_them(tmp_path):
    run_ranks(2, run_on, tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    rows, score, stayed = run_ranks(2, run_on, tmp_path / "run", 2)[0]
    without, same_score, none = run_ranks(2, run_on, tmp_path / "other", 2, True)[0]
    assert stayed > 0 == none
    assert score == same_score
    for one, other in zip(rows, without, strict=True):
        assert torch.equal(one, other)


def small_memory(mesh, caches, folder, num_batches):
    """Two thousand slots; rows with who alone uses them are more. Returns how many those were, and some rows."""
    mine = [Table("t", 8, rows=20_000, optimizer=SGD(lr=0.1))]
    collection = EmbeddingCollection(mine, [Feature("t", "t")], seed=5)
    plan = build_plan(mine, mesh.num_ranks, caches=caches, lookahead=1, dram_bytes=2500 * 48)
    collection.open(plan, mesh, backings=open_backings(folder, mesh, mine, plan.shardings))
    rows = RowOptimizer(collection)

    def batches():
        for step in range(num_batches):
            ids = np.random.default_rng([step // 2, mesh.rank]).integers(0, 10_000, 400)
            yield Batch(400, torch.zeros(400, 0), {"t": Ids(torch.from_numpy(2 * ids + mesh.rank))})

    with collection.lookahead(batches()) as ahead:
        for batch in ahead:
            found = collection(batch)["t"]
            (found * found + found).sum().backward()
            rows.step()
    lent = 0 if collection.lent is None else collection.lent.counts.borrowed
    # Nothing is lent after a stream, so neither of these needs a moment that is settled.
    load_rows(collection, "t", torch.ones(3, 8), torch.arange(3))
    return lent, plan.tables[0].capacity_rows, collection.rows("t", torch.arange(0, 20_000, 7))


def test_a_stream_ends_where_memory_holds_fewer_rows_than_are_lent(tmp_path):
    world = World(ranks_per_host=2)
    plain = run_simulated(world, small_memory, None, tmp_path / "plain", 24)
    lent = run_simulated(world, small_memory, {"t": Lending(20_000, 16)}, tmp_path / "lent", 24)
    for (_, _, wanted), (borrowed, capacity, found) in zip(plain, lent, strict=True):
        assert borrowed > capacity and torch.equal(found, wanted)


def what_is_refused(mesh):
    mine = [Table("t", 4, rows=50)]

    def opened(**how):
        collection = EmbeddingCollection(mine, [Feature("t", "t")])
        plan = build_plan(mine, mesh.num_ranks, caches={"t": Lending(50, 2)})
        return collection.open(plan, mesh, **how)

    with pytest.raises(ConfigError, match="policy of your own beside rows that are lent"):
        opened(policies={"t": object()})
    collection = opened()
    rows = RowOptimizer(collection)
    load_rows(collection, "t", torch.ones(50, 4))
    batches = [
        Batch(2, torch.zeros(2, 0), {"t": Ids(torch.tensor([mesh.rank, 5]))}) for _ in range(6)
    ]
    with collection.lookahead(batches) as ahead:
        collection(next(ahead))["t"].sum().backward()
        with pytest.raises(ConfigError, match="scaled_step: got a plan with plan"):
            rows.scaled_step(torch.amp.GradScaler("cpu"))
        rows.step()
        with pytest.raises(ConfigError, match="load_rows: got rows some of which are lent"):
            load_rows(collection, "t", torch.ones(50, 4))


def test_what_cannot_be_told_to_holders_is_refused():
    run_simulated(World(ranks_per_host=2), what_is_refused)
