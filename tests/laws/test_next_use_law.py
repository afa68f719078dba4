"""Look-ahead eviction: what training decides is what the order of batches says, however early, wherever it stops."""

from __future__ import annotations

import numpy as np
import torch
from ranks import console_of, run_ranks
from slow_directory import HIT, SlowDirectory
from test_next_use_window import slowly
from test_row_clock_law import CONFIG, Ones

from colonnade.config.run import build_config, override_settings
from colonnade.run.run import open_run

STEPS, ROWS, STALENESS, WINDOW = 40, 9, 6, 4


def decide(mesh, cases):
    """Return this rank's rows by step, its directories at the end and its counts, by (policy, depth)."""
    results = []
    for policy, depth in cases:
        world = Ones(mesh, STALENESS, ROWS, policy=policy, depth=depth, seed=3)
        own_batches, drawn_ids = world.batches(STEPS)
        with world.collection.lookahead(own_batches) as ahead:
            for batch in ahead:
                outputs = world.collection(batch)
                sum(output.sum() for output in outputs.values()).backward()
                world.rows.step()
        cached = world.collection.cached
        ids = [step[mesh.rank] for step in drawn_ids]
        states = [directory.export_state() for directory in cached.directories]
        results.append(([ids, [np.sort(-id_ * 7) for id_ in ids]], states, cached.counts))
    return results


def test_it_decides_by_the_next_uses_that_a_window_shows():
    """Slot by slot, at any depth; of the same batches, fewer rows are missed than by recency."""
    cases = [("lookahead", depth) for depth in (0, 3)] + [("lru", 2)]
    ranks = run_ranks(2, decide, cases)
    for *looking, _ in ranks:
        for tables, states, counts in looking:
            wanted = 0
            for ids, state in zip(tables, states, strict=True):
                batches = [id_.tolist() for id_ in ids]
                slow = SlowDirectory(ROWS, STALENESS // 2, STALENESS // 2, "lookahead")
                for step, batch in enumerate(batches):
                    next_uses, coming = slowly(batches, step, WINDOW)
                    expected = slow.decide_batch(batch, next_uses, coming or (), WINDOW)
                    wanted += sum(row[1] == HIT for row in expected.by_row.values())
                rows = sorted(slow.rows.items())
                assert state["ids"].tolist() == [id for id, _ in rows]
                assert state["slots"].tolist() == [row.slot for _, row in rows]
                assert state["copied"].tolist() == [row.copied for _, row in rows]
                assert state["ticks"].tolist() == [row.ticks for _, row in rows]
            assert counts.hits == wanted
    misses = [sum(counts.misses for _, _, counts in case) for case in zip(*ranks, strict=True)]
    assert misses[0] == misses[1] < 0.9 * misses[2]


def train_on(mesh, folder, max_steps):
    """All rows with what waits, and what the directories remember."""
    config = override_settings(
        build_config(CONFIG),
        {
            "train.max_steps": max_steps,
            "plan.cache": {"size": "8%", "staleness": 9, "policy": "lookahead", "window": 3},
        },
    )
    run = open_run(config, mesh, folder, console=console_of(mesh))
    try:
        run.train()
        collection = run.trainer.collection
        with run.trainer.rows.synchronized_view():
            rows = [
                collection.rows("C1", torch.arange(50)),
                collection.rows("C2", torch.arange(900)),
            ]
        return rows, [directory.export_state() for directory in collection.cached.directories]
    finally:
        run.close()


def stop_and_go_on(mesh, folder):
    straight = train_on(mesh, folder / "straight", 11)
    train_on(mesh, folder / "stopped", 6)
    return straight, train_on(mesh, folder / "stopped", 11)


def test_a_run_that_stopped_goes_on_to_the_same_bits(tmp_path):
    """Run stops where it should: its last decisions see later batches, as those of a longer run do."""
    for (rows, states), (others, other_states) in run_ranks(2, stop_and_go_on, tmp_path):
        for one, other in zip(rows, others, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(states, other_states, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)
