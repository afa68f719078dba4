"""row_clock(s): what a rank reads from its copies misses at most s batches of each other rank; and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scenario import assert_same_bits, tables, train

from colonnade import (
    SGD,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    RowOptimizer,
    Table,
    Uniform,
    build_plan,
)
from colonnade.consistency.row_clock import row_clock
from colonnade.exchange.cached import TableCache

SIZES = [23, 23, 1, 0, 24, 2, 23, 23]


def caches(rows: int, staleness: int, policy: str = "lru") -> dict[str, TableCache]:
    return {table.name: TableCache(rows, row_clock(staleness), policy) for table in tables()}


def train_with_and_without(mesh):
    plain = train(mesh, sizes=SIZES)
    some = caches(7, 0)
    return plain, [
        train(mesh, sizes=SIZES, caches=caches(1000, 0)),
        train(mesh, sizes=SIZES, caches=caches(7, 0, "lfu"), lookahead=3),
        train(mesh, sizes=SIZES, caches=caches(0, 0), lookahead=0),
        train(mesh, sizes=SIZES, caches={name: some[name] for name in ("item", "wide")}),
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_without_staleness_it_is_the_bits_of_rows(num_ranks):
    for plain, others in run_ranks(num_ranks, train_with_and_without):
        for other in others:
            assert_same_bits(plain, other)


class Ones:
    """Rows that begin at 0, and every batch that uses one adds exactly 1 to it: rows count batches."""

    IDS = 40

    def __init__(
        self, mesh, staleness, rows, *, read=None, write=None, policy="lru", seed=0, depth=2
    ):
        scale = Uniform(scale=0.0)
        declared = [
            Table("few", 2, rows=self.IDS, optimizer=SGD(lr=1.0), initializer=scale, dtype="float64"),
            Table("any", 1, optimizer=SGD(lr=1.0), initializer=scale, dtype="float64"),
        ]  # fmt: skip
        self.mesh = mesh
        looked_up = [
            Feature("a", "few", pooling="sequence"),
            Feature("b", "any", pooling="sequence"),
        ]
        self.collection = EmbeddingCollection(declared, looked_up, seed=1)
        kept = TableCache(rows, row_clock(staleness, read, write), policy)
        plan = build_plan(
            declared, mesh.num_ranks, lookahead=depth, caches={"few": kept, "any": kept}
        )
        self.collection.open(plan, mesh)
        self.rows = RowOptimizer(self.collection)
        self.used = np.zeros((mesh.num_ranks, self.IDS))
        self.random = [np.random.default_rng([seed, rank]) for rank in range(mesh.num_ranks)]

    def batches(self, steps):
        """This rank's, and every rank's ids: {feature: unique ids} by step and rank."""
        said = []
        for _ in range(steps):
            drawn = [
                np.minimum(
                    random.pareto(0.7, random.integers(0, 12)).astype(np.int64), self.IDS - 1
                )
                for random in self.random
            ]
            said.append([np.unique(ids) for ids in drawn])
        mine = []
        for step in said:
            ids = torch.from_numpy(step[self.mesh.rank])
            bag = Ids(ids, torch.tensor([0, len(ids)]))
            other = Ids(-ids * 7, torch.tensor([0, len(ids)]))
            mine.append(Batch(1, torch.zeros(1, 0), {"a": bag, "b": other}))
        return mine, said

    def run(self, steps):
        """Asserts of every read: nothing of one's own is missed, of each other rank s batches at most, nothing twice.
        Returns batches by id that were ever trained on, and the most that a read missed of all others."""
        mine, said = self.batches(steps)
        used = self.used
        bound = self.collection.plan.tables[0].cache.clock.staleness
        worst = 0
        for batch, ids_of in zip(self.collection.lookahead(mine), said, strict=True):
            found = self.collection(batch)
            ids = ids_of[self.mesh.rank]
            for name in ("a", "b"):
                seen = -found[name].detach().numpy()[:, 0]
                own, every = used[self.mesh.rank, ids], used[:, ids].sum(0)
                least = own + np.maximum(0, np.delete(used, self.mesh.rank, 0)[:, ids] - bound).sum(
                    0
                )
                assert (seen <= every).all(), "I2: more than was"
                assert (seen >= own).all(), "I3: a rank's own batches"
                assert (seen >= least).all(), "I4: at most s of each other rank"
                worst = max(worst, float((every - seen).max(initial=0)))
            sum(output.sum() for output in found.values()).backward()
            self.rows.step()
            for rank, theirs in enumerate(ids_of):
                used[rank, theirs] += 1
        return used.sum(0), worst

    def held(self):
        """Collective: by id, what the owners' rows have counted."""
        ids = torch.arange(self.IDS)
        return [
            -self.collection.rows("few", ids)[:, 0].numpy(),
            -self.collection.rows("any", -ids * 7)[:, 0].numpy(),
        ]


BOUNDS = [(0, None), (1, None), (3, 0), (3, 3), (10, 4), (1000, None)]


def count_batches(mesh, cases):
    """By case, the most that a read missed."""
    missed = []
    for staleness, read, rows, policy, depth in cases:
        world = Ones(mesh, staleness, rows, read=read, policy=policy, depth=depth, seed=staleness)
        total, worst = world.run(60)
        with world.rows.settled():
            for held in world.held():
                assert np.array_equal(held, total), "I1: every batch once"
            world.collection.eval()
            every = torch.arange(world.IDS)
            bag = torch.tensor([0, len(every)])
            batch = Batch(1, torch.zeros(1, 0), {"a": Ids(every, bag), "b": Ids(-every * 7, bag)})
            for seen in world.collection(batch).values():
                assert np.array_equal(-seen.detach()[:, 0].numpy(), total), "evaluation sees all"
            world.collection.train()
        after = world.held()
        more, _ = world.run(20)  # goes on as if nobody had looked
        for held, before in zip(world.held(), after, strict=True):
            assert (held <= more).all()
            assert (held >= before).all()
        with world.rows.settled():
            assert all(np.array_equal(held, more) for held in world.held())
        missed.append(worst)
    return missed


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_reads_miss_no_more_than_the_bounds_and_nothing_is_lost(num_ranks):
    cases = [
        (staleness, read, rows, policy, depth)
        for (staleness, read), rows, policy, depth in zip(
            BOUNDS, (3, 0, 12, 60, 12, 60), ("lru", "lfu") * 3, (2, 0, 3, 1, 5, 2), strict=True
        )
    ]
    for missed in run_ranks(num_ranks, count_batches, cases):
        assert missed[0] == 0  # I5
        assert missed[-1] > 5  # the bounds are used
