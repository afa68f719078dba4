"""row_clock(s): what a rank reads from its copies misses at most s batches of each other rank; and nothing is lost."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from plans import cache_settings
from ranks import console_of, run_ranks
from scenario import assert_same_bits, tables, train
from simulated import run_simulated
from slow_directory import HIT, SlowDirectory

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
    Mesh,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    Uniform,
    World,
    build_plan,
    load_rows,
)
from colonnade.cache.cached_rows import DeviceCachedRows
from colonnade.comm.process_groups import assign_server_ranks
from colonnade.config.run import build_config, override_settings
from colonnade.errors import ConfigError
from colonnade.exchange import exchange
from colonnade.exchange.cached_state import apply_planned_bounds
from colonnade.run import run as runs
from colonnade.run.run import open_run
from colonnade.staleness import RowClock, TableCache, row_clock
from colonnade.topology.sharding import build_hot_rows, column_wise, row_wise

SIZES = [23, 23, 1, 0, 24, 2, 23, 23]


def caches(rows: int, staleness: int, policy: str = "lru") -> dict[str, TableCache]:
    retained = TableCache(rows, row_clock(staleness), policy, 3 if policy == "lookahead" else 0)
    return {table.name: retained for table in tables()}


def train_with_and_without(mesh):
    plain = train(mesh, sizes=SIZES)
    subset = caches(7, 0)
    return plain, [
        train(mesh, sizes=SIZES, caches=caches(1000, 0)),
        train(mesh, sizes=SIZES, caches=caches(7, 0, "lfu"), lookahead=3),
        train(mesh, sizes=SIZES, caches=caches(0, 0), lookahead=0),
        train(mesh, sizes=SIZES, caches=caches(7, 0, "lookahead"), lookahead=1),
        train(mesh, sizes=SIZES, caches={name: subset[name] for name in ("item", "wide")}),
    ]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_without_staleness_it_is_the_bits_of_rows(num_ranks):
    for plain, others in run_ranks(num_ranks, train_with_and_without):
        for other in others:
            assert_same_bits(plain, other)


class Ones:
    """Rows that begin at 0, and every batch that uses one adds exactly 1 to it: rows count batches."""

    IDS = 40

    def __init__(
        self,
        mesh,
        staleness,
        rows,
        *,
        read=None,
        write=None,
        share=1.0,
        step=None,
        policy="lru",
        seed=0,
        depth=2,
        tier="dram",
        servers=0,
    ):
        mesh = assign_server_ranks(mesh, servers)
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
        window = 4 if policy == "lookahead" else 0
        cache = TableCache(rows, row_clock(staleness, read, write, share, step), policy, window)
        plan = build_plan(
            declared,
            mesh.world,
            PlanConfig(
                lookahead=depth,
                cache=cache_settings({"few": cache, "any": cache}, tier),
            ),
        )
        self.collection.open(plan, mesh)
        self.rows = RowOptimizer(self.collection)
        self.used = np.zeros((mesh.num_ranks, self.IDS))
        self.before = []  # `used`, by batch
        self.reads = {}  # by table and row: the batch that read the copy, the write bound of then
        self.cache = cache
        clock = cache.clock
        self.slow = [
            SlowDirectory(rows, clock.read_bound, clock.write_bound, policy, share, step)
            for _ in declared
        ]
        self.ages = Counter()  # of reads, by the bits of their age
        self.random = [np.random.default_rng([seed, rank]) for rank in range(mesh.num_ranks)]

    def batches(self, steps):
        """Return this rank's batches, and every rank's unique ids by step."""
        drawn_ids = []
        for _ in range(steps):
            drawn = [
                np.minimum(
                    random.pareto(0.7, random.integers(0, 12)).astype(np.int64), self.IDS - 1
                )
                for random in self.random
            ]
            for server in self.mesh.world.servers if self.mesh.world.has_servers else ():
                drawn[server] = np.zeros(0, np.int64)
            drawn_ids.append([np.unique(ids) for ids in drawn])
        own_batches = []
        for step in drawn_ids:
            ids = torch.from_numpy(step[self.mesh.rank])
            bag = Ids(ids, torch.tensor([0, len(ids)]))
            other = Ids(-ids * 7, torch.tensor([0, len(ids)]))
            own_batches.append(Batch(1, torch.zeros(1, 0), {"a": bag, "b": other}))
        return own_batches, drawn_ids

    def change(self, random):
        """Other bounds of one table or both, as of a run that goes on. random: the same on every rank."""
        cached = self.collection.cached
        for t, slow in enumerate(self.slow):
            staleness = int(random.choice([1, 4, 40]))
            read = int(random.integers(0, staleness + 1))
            share = self.cache.clock.write_share
            clock = RowClock(read, staleness - read, share, self.cache.clock.step_bound)
            if random.integers(4):
                cached.caches[t] = replace(self.cache, clock=clock)
                slow.change(self.cache.rows, clock.read_bound, clock.write_bound)
        apply_planned_bounds(cached)

    def reset_rows(self):
        """Load rows of one table, and delete those of the other: some of them have been used 0 times from here on."""
        count = 9
        load_rows(self.collection, "few", torch.zeros(count, 2, dtype=torch.float64))
        self.collection.delete("any", -7 * torch.arange(count))
        self.used[:, :count] = 0
        for slow in self.slow:
            slow.rows = {}

    def run(self, steps, changes=None, skipped=(), resets=()):
        """Asserts of every read: nothing of one's own is missed, of each other rank s batches at most, nothing twice.
        changes: says after which steps bounds become others, and which. skipped: steps whose gradients are sent, and
        dropped like those of a batch that is not finite. resets: steps after which rows are loaded and deleted, with
        batches in flight. Returns batches by id that were ever
        trained on, and the most that a read missed of all others."""
        own_batches, drawn_ids = self.batches(steps)
        used = self.used
        worst = 0
        for step, (batch, ids_of) in enumerate(
            zip(self.stream(own_batches, changes), drawn_ids, strict=True)
        ):
            before = deepcopy(self.slow), Counter(self.ages)
            result = self.collection(batch)
            ids = ids_of[self.mesh.rank]
            self.before.append(used.copy())
            for name, slow, sign in zip("ab", self.slow, (1, -7), strict=True):
                observed = -result[name].detach().numpy()[:, 0]
                by_row = slow.decide_batch(sorted((ids * sign).tolist())).by_row
                ages = [by_row[id][2] * (by_row[id][1] == HIT) for id in (ids * sign).tolist()]
                self.ages.update(age.bit_length() for age in ages)
                for id, own_use, sees in zip(
                    ids.tolist(), used[self.mesh.rank, ids], observed, strict=True
                ):
                    if by_row[id * sign][1] != HIT:
                        self.reads[name, id] = len(self.before) - 1, slow.write_bound
                    number, waited = self.reads[name, id]
                    then = np.delete(self.before[number], self.mesh.rank, 0)[:, id]
                    known = np.maximum(0, then - waited).sum()
                    assert sees >= own_use + known, "what others had sent when the owner was asked"
                bound = slow.read_bound + slow.write_bound
                own, every = used[self.mesh.rank, ids], used[:, ids].sum(0)
                least = own + np.maximum(0, np.delete(used, self.mesh.rank, 0)[:, ids] - bound).sum(
                    0
                )
                assert (observed <= every).all(), "I2: more than was"
                assert (observed >= own).all(), "I3: a rank's own batches"
                assert (observed >= least).all(), "I4: at most s of each other rank"
                worst = max(worst, float((every - observed).max(initial=0)))
            sum(output.sum() for output in result.values()).backward()
            if step in skipped:
                self.rows.clip_grad_norm_(1.0)
                self.rows.zero_grad()
                self.collection.discard_batches()
                self.slow, self.ages = before
                continue
            self.rows.step()
            for rank, peer_ids in enumerate(ids_of):
                used[rank, peer_ids] += 1
            if step in resets:
                self.reset_rows()
        for t, sign in enumerate((1, -7)):
            cached_rows = self.collection.cached.cached_rows
            ids = cached_rows.ids[t] // sign
            waiting = cached_rows.num_pending[t]
            rows = np.flatnonzero(waiting)
            limit = self.cache.clock.write_share * used[self.mesh.rank, ids[rows]]
            assert (waiting[rows] <= limit).all(), "no sum waits for more than its share of uses"
        counted = self.collection.cached.ages
        assert {kind: rows for kind, rows in enumerate(counted) if rows} == dict(self.ages)
        return used.sum(0), worst

    def stream(self, batches, changes=None):
        """Through lookaheads that are closed early: with batches prepared, and the last time with one read, too."""
        first, limit = 0, len(batches)
        ends = [limit // 3, limit // 2]
        if changes is not None:
            ends = [step for step in range(1, limit) if changes.random() < 0.2]
        for last in (*ends, limit):
            if first and changes is not None:
                self.change(changes)
            with self.collection.lookahead(batches[first:]) as ahead:
                for _ in range(last - first):
                    yield next(ahead)
                if first:
                    next(ahead, None)
            first = last

    def stored_rows(self):
        """Return the counts in the owners' rows, by id. Collective."""
        ids = torch.arange(self.IDS)
        return [
            -self.collection.rows("few", ids)[:, 0].numpy(),
            -self.collection.rows("any", -ids * 7)[:, 0].numpy(),
        ]


BOUNDS = [(0, None), (1, None), (3, 0), (3, 3), (10, 4), (1000, None)]


def count_batches(mesh, cases, steps, servers=0):
    """Return by case the most updates that a read missed."""
    missed = []
    for case, (staleness, read, rows, policy, depth, tier) in enumerate(cases):
        share, step = ((1.0, None), (0.3, None), (1.0, 2), (0.5, 2))[case % 4]
        world = Ones(
            mesh, staleness, rows, read=read, share=share, step=step, policy=policy, depth=depth,
            seed=staleness, tier=tier, servers=servers,
        )  # fmt: skip
        total, worst = world.run(steps)
        with world.rows.synchronized_view():
            for stored in world.stored_rows():
                assert np.array_equal(stored, total), "I1: every batch once"
            world.collection.eval()
            every = torch.arange(world.IDS)
            bag = torch.tensor([0, len(every)])
            batch = Batch(1, torch.zeros(1, 0), {"a": Ids(every, bag), "b": Ids(-every * 7, bag)})
            for output in world.collection(batch).values():
                assert np.array_equal(-output.detach()[:, 0].numpy(), total), "evaluation sees all"
            world.collection.train()
        after = world.stored_rows()
        more, _ = world.run(steps // 3)  # goes on as if nobody had looked
        for stored, before in zip(world.stored_rows(), after, strict=True):
            assert (stored <= more).all()
            assert (stored >= before).all()
        with world.rows.synchronized_view():
            assert all(np.array_equal(stored, more) for stored in world.stored_rows())
        missed.append(worst)
    return missed


LONG = [pytest.param(num_ranks, 60, marks=pytest.mark.slow) for num_ranks in (2, 3)]


@pytest.mark.parametrize("is_first", [True, False], ids=["first four", "others"])
@pytest.mark.parametrize(("num_ranks", "steps"), [(3, 20), *LONG])
def test_reads_miss_no_more_than_the_bounds_and_nothing_is_lost(num_ranks, steps, is_first):
    cases = [
        (staleness, read, rows, policy, depth, "dram")
        for (staleness, read), rows, policy, depth in zip(
            BOUNDS,
            (3, 0, 12, 60, 12, 60),
            ("lru", "lfu", "lookahead") * 2,
            (2, 0, 3, 1, 5, 2),
            strict=True,
        )
    ]
    cases.insert(1, (10, 4, 12, "lfu", 2, "hbm"))  # "cpu" as a device
    part = cases[:4] if is_first else cases[4:]
    for missed in run_ranks(num_ranks, count_batches, part, steps):
        if is_first:
            assert missed[0] == 0  # I5
        else:
            assert missed[-1] > 5  # the bounds are used


def count_batches_by_changing_bounds(mesh, cases, steps, servers=0):
    for seed, (staleness, rows, policy, depth) in enumerate(cases):
        share, step = ((1.0, None), (0.4, 3))[seed % 2]
        world = Ones(
            mesh, staleness, rows, share=share, step=step, policy=policy, depth=depth, seed=seed,
            servers=servers,
        )  # fmt: skip
        total, _ = world.run(steps, np.random.default_rng(seed))
        with world.rows.synchronized_view():
            for stored in world.stored_rows():
                assert np.array_equal(stored, total), "I1: every batch once"
        counts, copies = world.collection.cached.counts, world.collection.cached.cached_rows
        waiting = sum(int(ticks.sum()) for ticks in copies.num_pending)
        assert counts.ticks + waiting == counts.hits + counts.misses + counts.lease_over


@pytest.mark.parametrize("is_first", [True, False], ids=["first two", "others"])
@pytest.mark.parametrize(("num_ranks", "steps"), [(3, 26), *LONG])
def test_reads_miss_no_more_than_the_bounds_that_a_run_goes_on_with(num_ranks, steps, is_first):
    """Bounds by table become others after any step: decisions are those of the slow twin, and invariants hold of every
    read from the next one on."""
    cases = [(10, 12, "lru", 2), (7, 5, "lfu", 0), (1000, 60, "lookahead", 3), (40, 60, "lru", 5)]
    part = cases[:2] if is_first else cases[2:]
    run_ranks(num_ranks, count_batches_by_changing_bounds, part, steps)


def begin_while_settled(mesh):
    """Batches and moments that begin inside of a settled one are refused; then it goes on."""
    world = Ones(mesh, 6, 9)
    own_batches, _ = world.batches(3)
    ahead = world.collection.lookahead(own_batches)
    sum(output.sum() for output in world.collection(next(ahead)).values()).backward()
    world.rows.step()
    with world.rows.synchronized_view():
        for call in (lambda: world.rows.synchronized_view().__enter__(), lambda: next(ahead)):
            with pytest.raises(RuntimeError, match="inside"):
                call()
        ahead.close()
    world.collection.discard_batches()
    with world.collection.lookahead(own_batches[1:]) as ahead:
        assert next(ahead).size == 1


def test_nothing_begins_while_rows_are_settled():
    run_ranks(2, begin_while_settled)


@pytest.mark.parametrize(
    "bound", [(-5,), (2.5,), (True,), ("4",), (4, -1), (4, 1.5), (4, None, 2.0)]
)
def test_bounds_are_whole_numbers(bound):
    with pytest.raises(ConfigError, match=r"row_clock: got .*, wanted 0 or more batches"):
        row_clock(*bound)
    assert row_clock(np.int64(5)) == RowClock(2, 3)


def beside_tables_that_are_cut(mesh):
    """Return the rows of a cached table and of an uncached one after a few steps, by sharding of the latter."""
    results = []
    hot = replace(row_wise(2), hot=build_hot_rows([0, 3], 2))
    for sharding in (row_wise(2), hot, column_wise([0, 1])):
        declared = [
            Table("cut", 4, rows=9, optimizer=Adagrad(lr=0.3), dtype="float64"),
            Table("kept", 2, rows=9, optimizer=SGD(lr=0.1, momentum=0.9), dtype="float64"),
        ]
        collection = EmbeddingCollection(declared, [Feature(t.name, t.name) for t in declared])
        retained = {"kept": TableCache(9, row_clock(6))}
        collection.open(
            build_plan(
                declared,
                2,
                PlanConfig(cache=cache_settings(retained), tables={"cut": {"sharding": sharding}}),
            ),
            mesh,
        )
        rows, ids = RowOptimizer(collection), torch.tensor([0, 3, 4 + mesh.rank])
        batch = Batch(3, torch.zeros(3, 0), {t.name: Ids(ids) for t in declared})
        for coming in collection.lookahead([batch] * 3):
            sum(output.square().sum() for output in collection(coming).values()).backward()
            rows.step()
        with rows.synchronized_view():
            results.append([collection.rows(t.name, torch.arange(9)) for t in declared])
    return results


def test_other_tables_may_be_cut_or_have_hot_rows():
    """Pending gradients of cached rows are applied by their own table's rules, however others are cut."""
    for whole, *others in run_simulated(World(ranks_per_host=2), beside_tables_that_are_cut):
        for rows in others:
            torch.testing.assert_close(rows, whole, rtol=1e-12, atol=0)


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


def gathering(mesh, batches, caches):
    """Rank 0 alone uses row 1 of each table, once a batch, with these gradients; what it read, by batch and table; then
    the owners' rows, with and without what waits."""
    declared = [
        Table(f"t{i}", 3, rows=4, optimizer=optimizer, dtype="float64")
        for i, optimizer in enumerate(OPTIMIZERS)
    ]
    collection = EmbeddingCollection(
        declared, [Feature(t.name, t.name, pooling="sequence") for t in declared]
    )
    retained = {t.name: caches for t in declared} if caches else None
    collection.open(
        build_plan(declared, mesh.num_ranks, PlanConfig(cache=cache_settings(retained))), mesh
    )
    rows, outputs = RowOptimizer(collection), []
    count = int(mesh.rank == 0)
    ids = Ids(torch.ones(count, dtype=torch.int64), torch.tensor([0, count]))
    stream = (Batch(1, torch.zeros(1, 0), {t.name: ids for t in declared}) for _ in batches)
    for batch, gradient in zip(collection.lookahead(stream), batches, strict=True):
        result = collection(batch)
        outputs.append([result[t.name].detach().clone() for t in declared])
        sum((result[t.name] * gradient).sum() for t in declared).backward()
        rows.step()
    one = torch.tensor([1])
    stored = [collection.rows(t.name, one) for t in declared]
    with rows.synchronized_view():
        return outputs, stored, [collection.rows(t.name, one) for t in declared]


def test_gathered_gradients_are_one_step_of_their_sum():
    """Owners apply one step of the sum, with every optimizer; the rank that gathers sees a step for each of its batches
    at once."""
    random = torch.Generator().manual_seed(2)
    gradients = [torch.randn(3, generator=random, dtype=torch.float64) for _ in range(7)]
    single, first, _ = gathering(Mesh(), gradients, None)
    _, _, summed = gathering(Mesh(), [sum(gradients[:4])], None)
    _, _, again = gathering(Mesh(), [sum(gradients[:4]), sum(gradients[4:])], None)
    output, stored, settled = run_ranks(
        2, gathering, gradients, TableCache(4, row_clock(103, 100))
    )[0]
    for batch, own in zip(single, output, strict=True):
        for one, other in zip(batch, own, strict=True):
            assert torch.equal(one, other)  # the copy: a step a batch
    for t in range(len(OPTIMIZERS)):
        torch.testing.assert_close(stored[t], summed[t], rtol=1e-12, atol=1e-14)  # sent after four
        torch.testing.assert_close(settled[t], again[t], rtol=1e-12, atol=1e-14)
    assert not all(torch.allclose(one, other) for one, other in zip(settled, first, strict=True))


CONFIG = {
    "data": {"name": "synthetic", "options": {"num_train": 900, "num_test": 60, "cardinalities": [50, 900]}},
    "model": {"dim": 4, "bottom": [8], "top": [8]},
    "train": {"batch_size": 60, "epochs": 1, "checkpoint_steps": 7, "threads": 1},
    "plan": {
        "cache": {
            "size": "20%",
            "staleness": 9,
            "write_share": 1,
            "step_bound": None,
            "tables": {"C1": {"policy": "lfu", "write_share": 0.5}},
        }
    },
}  # fmt: skip


def run_on(mesh, folder, epochs, staleness):
    """Goes on to `epochs`: all rows with what waits, those their owners have, test scores, rows used without a word."""
    config = override_settings(
        build_config(CONFIG), {"train.epochs": epochs, "plan.cache.staleness": staleness}
    )
    run = open_run(config, mesh, folder, console=console_of(mesh))
    try:
        run.train()
        collection, ids = run.trainer.collection, torch.arange(50)
        stored = collection.rows("C1", ids)
        with run.trainer.rows.synchronized_view():
            every = [collection.rows("C1", ids), collection.rows("C2", torch.arange(900))]
        number = 0 if collection.cached is None else collection.cached.number
        return every, stored, run.summary["metrics"], number
    finally:
        run.close()


def test_checkpoints_have_all_that_waits_and_go_on_with_other_bounds(tmp_path):
    every, stored, metrics, number = run_ranks(2, run_on, tmp_path / "run", 1, 9)[0]
    assert number == 15
    assert not torch.equal(every[0], stored)  # something waited
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    *_, gone_on = run_ranks(2, run_on, tmp_path / "other", 2, 3)[0]
    assert gone_on == 30  # the copies were taken up: they count from where they were
    alone, owned, again, _ = run_on(Mesh(), tmp_path / "run", 1, 9)  # another world, no copies
    assert torch.equal(owned, alone[0])
    for one, other in zip(every, alone, strict=True):
        assert torch.equal(one, other)
    assert again["test_auc"] == metrics["test_auc"]


def run_parts(mesh, folder, parts):
    """Runs one after the other, each on from the last: (steps, settings). Of the last: all rows, the largest number of
    batches that wait at a copy, and the bounds of C2."""
    for steps, settings in parts:
        overrides = {"train.epochs": 2, "train.max_steps": steps, **settings}
        run = open_run(
            override_settings(build_config(CONFIG), overrides),
            mesh,
            folder,
            console=console_of(mesh),
        )
        try:
            run.train()
            collection, waiting, bounds = run.trainer.collection, 0, None
            if (cached := collection.cached) is not None:
                on_device = settings.get("plan.cache.tier") == "hbm"
                assert isinstance(cached.cached_rows, DeviceCachedRows) == on_device
                waiting = max(int(ticks.max(initial=0)) for ticks in cached.cached_rows.num_pending)
                last = cached.directories[1]
                bounds = last.clock.read_bound, last.clock.write_bound
            with run.trainer.rows.synchronized_view():
                sizes = {"C1": 50, "C2": 900}
                every = [collection.rows(name, torch.arange(n)) for name, n in sizes.items()]
        finally:
            run.close()
    return every, waiting, bounds


def go_on_and_be_cut(mesh, folder):
    runs.move_dense_network = lambda *_: None  # "cpu" as a device
    on_device = {"train.device": "cuda", "plan.cache.tier": "hbm"}
    lower, higher = {"plan.cache.staleness": 3}, {"plan.cache.staleness": 7}
    parts = {
        "whole": [(8, {}), (16, lower), (30, higher)],
        "cut": [(8, {}), (9, lower | on_device), (16, lower), (22, higher | on_device), (30, higher)],
    }  # fmt: skip
    return {name: run_parts(mesh, folder / name, part) for name, part in parts.items()}


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_bounds_can_be_cut_anywhere(tmp_path):
    """Bits are the same wherever copies lie."""
    results = run_ranks(2, go_on_and_be_cut, tmp_path)[0]
    for one, same in zip(results["whole"][0], results["cut"][0], strict=True):
        assert torch.equal(one, same)
    assert {result[2] for result in results.values()} == {(3, 4)}
    assert 0 < results["whole"][1] <= 4


def go_on_with_other_bounds(mesh, folder):
    results = {}
    changes = {
        "as it was": {}, "lower": {"plan.cache.staleness": 3}, "zero": {"plan.cache.staleness": 0},
        "none": {"plan.cache": None},
    }  # fmt: skip
    run_parts(mesh, folder / "begun", [(12, {})])
    for name in changes if mesh.rank == 0 else ():
        shutil.copytree(folder / "begun", folder / name)
    mesh.all_gather_bytes("control", b"copied")
    for name, settings in changes.items():
        results[name] = run_parts(mesh, folder / name, [(13, settings)])
    results["late again"] = run_parts(
        mesh, folder / "again", [(12, {"plan.cache.staleness": 0}), (13, {})]
    )
    return results


def test_lower_bounds_of_a_run_that_goes_on_hold_at_once(tmp_path):
    """No more waits at a copy than they allow, whether it was used since or not; at 0 it is a run without copies.
    Copies of a run whose bound was 0 are not taken up: nobody trained them."""
    results = run_ranks(2, go_on_with_other_bounds, tmp_path)[0]
    waiting = {name: result[1] for name, result in results.items()}
    assert waiting["as it was"] > 2 >= waiting["lower"] > waiting["zero"] == 0
    assert waiting["late again"] == 1
    for one, same in zip(results["zero"][0], results["none"][0], strict=True):
        assert torch.equal(one, same)


def leave_one_out(mesh):
    """Return the error; then training continues."""
    world = Ones(mesh, 6, 9)
    own_batches, _ = world.batches(4)

    def late_on_one_rank():
        """Give the next batch when the first has been left out here, and long before that on other ranks."""
        for number, batch in enumerate(own_batches):
            time.sleep(0.3 if number and mesh.rank else 0.0)
            yield batch

    with world.collection.lookahead(late_on_one_rank()) as ahead:
        next(ahead)
        with pytest.raises(RuntimeError) as error:
            next(ahead)
        world.collection.discard_batches()  # the remedy: both are dropped, and later ones follow
        sum(output.sum() for output in world.collection(next(ahead)).values()).backward()
        world.rows.step()
        assert next(ahead).ids["a"].values.equal(own_batches[3].ids["a"].values)
    world.collection.discard_batches()
    world = Ones(mesh, 6, 9, seed=1)
    total, _ = world.run(9)
    other = EmbeddingCollection(world.collection.tables, world.collection.declaration.features)
    with pytest.raises(ConfigError, match="'any': got a policy of your own together with copies"):
        other.open(world.collection.plan, mesh, policies={"any": object()})
    with world.rows.synchronized_view():
        return str(error.value), [np.array_equal(stored, total) for stored in world.stored_rows()]


def test_a_batch_that_is_left_out_is_said_and_what_copies_would_not_see_is_refused():
    for text, stored in run_ranks(2, leave_one_out):
        assert "one was left out" in text
        assert stored == [True, True]


def go_on_after(mesh, staleness, reads):
    """Batches of which one is read and never stepped, others follow, and the remedy that is said: bits of all rows, and
    of a run that never read it."""
    results = []
    for reads_it in (True, False):
        world = Ones(mesh, staleness, 9)
        own_batches, _ = world.batches(8)
        for part in (own_batches[:3], own_batches[4:]):
            ahead = world.collection.lookahead(
                [*part, own_batches[3]] if part[0] is own_batches[0] else part
            )
            with ahead:
                for _ in part:
                    outputs = world.collection(next(ahead))
                    sum(output.sum() for output in outputs.values()).backward()
                    world.rows.step()
                if reads_it and part[0] is own_batches[0]:
                    world.collection(next(ahead))
            if reads_it and part[0] is own_batches[0]:
                for _ in range(reads):  # nothing is left behind by what is refused
                    with pytest.raises(RuntimeError, match=r"collection\.discard_batches\(\)"):
                        world.collection(own_batches[4])
                world.collection.discard_batches()
        with world.rows.synchronized_view():
            results.append(world.stored_rows())
    return results


def test_after_a_batch_that_was_read_and_never_stepped_the_remedy_works():
    for with_it, without in run_ranks(2, go_on_after, 6, 2):
        for one, other in zip(with_it, without, strict=True):
            assert np.array_equal(one, other)


def lose_letters(mesh):
    """Batches that do not come to their owners leave nothing behind: nothing is lost."""
    world = Ones(mesh, 10, 12)
    own_batches, _ = world.batches(2)
    sent = exchange.exchange_messages

    def lost(*_):
        raise OSError("the letters")

    exchange.exchange_messages = lost
    for batch in own_batches:
        with pytest.raises(OSError, match="the letters"):
            world.collection(batch)
    exchange.exchange_messages = sent
    total, _ = world.run(20)
    with world.rows.synchronized_view():
        return [np.array_equal(stored, total) for stored in world.stored_rows()]


def test_what_was_asked_and_not_answered_is_taken_back():
    assert run_ranks(2, lose_letters) == [[True, True]] * 2


def forget_a_batch(mesh):
    """Return the counts before and after a batch is read and dropped."""
    world = Ones(mesh, 6, 9, read=0)
    own_batches, _ = world.batches(4)
    with world.collection.lookahead(own_batches[:3]) as ahead:
        for batch in ahead:
            sum(output.sum() for output in world.collection(batch).values()).backward()
            world.rows.step()
    before = asdict(world.collection.cached.counts)
    with world.collection.lookahead(own_batches[3:]) as ahead:
        world.collection(next(ahead))
    world.collection.discard_batches()
    return before, asdict(world.collection.cached.counts)


def test_a_batch_that_is_forgotten_is_not_counted():
    for before, after in run_simulated(World(ranks_per_host=2), forget_a_batch):
        assert before["renewed"] and before == after
