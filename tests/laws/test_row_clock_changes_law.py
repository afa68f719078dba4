"""row_clock(s) beside servers, skipped steps, rows that are loaded or deleted, and tables that are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plans import cache_settings
from ranks import run_ranks
from simulated import run_simulated
from test_row_clock_law import Ones, count_batches, count_batches_by_changing_bounds

from colonnade import (
    Adagrad,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    Table,
    World,
    build_plan,
)
from colonnade.staleness import TableCache, row_clock
from colonnade.topology.sharding import build_hot_rows, column_wise, row_wise


def keep_the_law_beside_servers(mesh, servers):
    """Return this rank's largest number of missed updates, its rows, and the rows that it read from copies or asked
    for."""
    cases = [(10, 4, 12, "lfu", 3, "dram"), (1000, None, 60, "lookahead", 2, "dram")]
    missed = count_batches(mesh, cases, 15, servers)
    count_batches_by_changing_bounds(mesh, [(10, 12, "lru", 2)], 12, servers)
    world = Ones(mesh, 6, 9, servers=servers)
    world.run(9)
    counts = world.collection.cached.counts
    num_rows = sum(world.collection.store.num_rows(t) for t in range(2))
    return max(missed), num_rows, counts.hits, counts.misses


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_holds_where_servers_own_the_rows(servers):
    """All ranks but one may be servers. Those read nothing, and trainers own nothing."""
    results = run_ranks(3, keep_the_law_beside_servers, servers)
    for missed, num_rows, hits, misses in results[: 3 - servers]:
        assert num_rows == 0 and hits and misses
        assert (missed > 5) == (servers == 1)  # one trainer alone has its own updates, all of them
    for missed, num_rows, hits, misses in results[3 - servers :]:
        assert num_rows and not (missed or hits or misses)


def skip_batches(mesh, policy, depth, tier):
    world = Ones(
        mesh,
        10,
        60 if policy == "lookahead" else 12,
        share=0.5,
        policy=policy,
        depth=depth,
        tier=tier,
    )
    total, _ = world.run(24, skipped=(0, 3, 4, 5, 11, 14, 23))
    with world.rows.synchronized_view():
        for stored in world.stored_rows():
            assert np.array_equal(stored, total), "I1: every batch once, and no skipped one"
    return sum(total)


@pytest.mark.parametrize(
    ("policy", "depth", "tier"),
    [("lru", 3, "dram"), ("lfu", 0, "dram"), ("lookahead", 2, "dram"), ("lfu", 1, "hbm")],
)
def test_the_same_holds_of_a_run_that_skips_batches(policy, depth, tier):
    """Decisions are those of a slow twin that never saw a skipped batch, though later ones were decided before."""
    assert all(run_ranks(2, skip_batches, policy, depth, tier))


def load_and_delete_rows(mesh, policy, depth, servers):
    world = Ones(mesh, 20, 12, share=0.5, policy=policy, depth=depth, servers=servers)
    for _ in range(2):
        total, _ = world.run(16, resets=(0, 6, 7, 13))
        with world.rows.synchronized_view():
            for stored in world.stored_rows():
                assert np.array_equal(stored, total), "I1: every batch since, once"
            for change in (
                world.reset_rows,
                lambda: world.collection.delete("any", torch.tensor([3])),
            ):
                with pytest.raises(RuntimeError, match="synchronized_view"):
                    change()
    counts, copies = world.collection.cached.counts, world.collection.cached.cached_rows
    waiting = sum(int(ticks.sum()) for ticks in copies.num_pending)
    assert counts.ticks + waiting == counts.hits + counts.misses + counts.lease_over
    batches, _ = world.batches(2)
    with world.collection.lookahead(batches) as ahead:
        world.collection(next(ahead))
        with pytest.raises(RuntimeError, match="was read and not trained on"):
            world.reset_rows()
    return True


@pytest.mark.parametrize(
    ("policy", "depth", "servers"), [("lru", 3, 0), ("lfu", 0, 0), ("lfu", 2, 1)]
)
def test_rows_that_are_loaded_or_deleted_are_read_at_once(policy, depth, servers):
    """Copies of them are gone on every rank, and gradients that waited were applied before."""
    assert all(run_ranks(2 + servers, load_and_delete_rows, policy, depth, servers))


def train_cut_tables(mesh):
    """Return the rows of a table that is cut, by sharding and staleness; and how many batches waited at copies."""
    results = {}
    hot = replace(row_wise(2), hot=build_hot_rows([0, 3], 2))
    shardings = {"whole": row_wise(2), "hot": hot, "columns": column_wise([0, 1])}
    for staleness in (0, 8):
        for name, sharding in shardings.items():
            declared = [Table("cut", 5, rows=30, optimizer=Adagrad(lr=0.3), dtype="float64")]
            collection = EmbeddingCollection(declared, [Feature("cut", "cut")])
            cache = TableCache(6, row_clock(staleness, write_share=1.0), "lfu")
            settings = PlanConfig(
                cache=cache_settings({"cut": cache}), tables={"cut": {"sharding": sharding}}
            )
            collection.open(build_plan(declared, 2, settings), mesh)
            rows, random = RowOptimizer(collection), np.random.default_rng(mesh.rank)
            batches = [
                Batch(
                    9, torch.zeros(9, 0), {"cut": Ids(torch.from_numpy(random.integers(0, 30, 9)))}
                )
                for _ in range(12)
            ]
            for batch in collection.lookahead(batches):
                collection(batch)["cut"].square().sum().backward()
                rows.step()
            waiting = max(int(n.max(initial=0)) for n in collection.cached.cached_rows.num_pending)
            with rows.synchronized_view():
                results[name, staleness] = collection.rows("cut", torch.arange(30)), waiting
    return results


def test_rows_that_are_cut_have_copies_of_their_parts_and_hot_rows_have_none():
    """Copies of columns leave and are sent together, as those of whole rows; hot rows are never late."""
    for results in run_simulated(World(ranks_per_host=2), train_cut_tables):
        for name in ("hot", "columns"):
            torch.testing.assert_close(
                results[name, 0][0], results["whole", 0][0], rtol=1e-12, atol=0
            )
            assert results[name, 8][1] >= 2
        torch.testing.assert_close(
            results["columns", 8][0], results["whole", 8][0], rtol=1e-12, atol=0
        )
        assert not torch.allclose(results["hot", 8][0], results["whole", 8][0])
