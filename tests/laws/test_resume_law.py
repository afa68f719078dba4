"""Kill anything at any instruction: the run resumes from its newest checkpoint to the same bits."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
from forked_run import finish, run_to_end, start
from small_run import digest

MAPPED = Path(tempfile.gettempdir()) / "colonnade-mapped-rows"
"""Directory of files without names, which leave nothing."""
VARIANTS = {
    "plain": {},
    "tiered": {"plan.memory.dram": 60_000},
    "stale": {"plan.staleness_steps": 2, "plan.memory.dram": 90_000},
    "sgd": {"embedding.optimizer": "sgd", "embedding.lr": 0.5, "plan.lookahead": 0},
    "open": {
        "plan.memory.dram": 60_000,
        "embedding.admission.updates": 2,
        "embedding.admission.expected_ids": 2000,
        "embedding.admission.halve_steps": 9,
        "embedding.eviction.max_rows": 150,
        "embedding.eviction.by": "frequency",
        "embedding.eviction.halve_steps": 7,
    },
    "decisions": {
        "train.accumulate": 4,
        "train.evaluate_steps": 3,
        "train.patience": 3,
        "train.min_delta": 0.02,
        "train.keep_checkpoints": 1,
        "embedding.clip_norm": 0.05,
        "embedding.schedule.name": "linear",
        "embedding.schedule.warmup_steps": 5,
        "dense.schedule.name": "cosine",
    },
    "mapped": {"plan.memory.dram": 50_000, "plan.memory.mapped": f"{MAPPED}:20KiB"},
}
OF_TWO = {
    "tiered": VARIANTS["tiered"],
    "stale": VARIANTS["stale"],
    "cached": {
        "plan.cache": {
            "size": 40, "staleness": 6, "policy": "lookahead", "window": 3,
            "tables": {"C1": {"policy": "lfu", "write_share": 0.5, "step_bound": 2}},
        },
        "plan.memory.dram": 60_000,
    },
    "pooled": {
        "plan.exchange": "pooled", "plan.staleness_steps": 1, "plan.memory.dram": 90_000,
        "plan.tables": {"C1": {"sharding": "table_wise"}}, "plan.codec.dense": "int8",
    },
    "partials": {
        "model.name": "nfm", "model.bottom": None, "plan.exchange": "partials",
        "plan.staleness_steps": 1, "plan.memory.dram": 120_000,
    },
    "towers": {
        "plan.exchange": "towers", "plan.towers": 2, "plan.staleness_steps": 1,
        "plan.memory.dram": 120_000,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digest of a run that is never killed, by (variant, ranks)."""
    results: dict = {}

    def of(variant: str, num_ranks: int) -> str:
        key = (variant, num_ranks)
        if key not in results:
            folder = tmp_path_factory.mktemp("undisturbed")
            run_to_end(folder, (VARIANTS | OF_TWO)[variant], num_ranks)
            results[key] = digest(folder)
        return results[key]

    return of


def later(*values):
    """Cases of `make test-all`: the others have shown what is different about them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("kill_at", [97, *later(1, 30, 61, 64, 140, 149, 222, 300)])
def test_killed_inside_a_change_of_the_disk(undisturbed, kill_at, tmp_path):
    variant = list(VARIANTS)[kill_at % len(VARIANTS)]
    children = start(tmp_path, VARIANTS[variant], kill_at)
    finish(children)
    assert children[0].code == -signal.SIGKILL
    run_to_end(tmp_path, VARIANTS[variant])
    assert digest(tmp_path) == undisturbed(variant, 1)


@pytest.mark.parametrize("variant", later("stale", "tiered", "open", "mapped"))
def test_killed_at_random_moments(undisturbed, variant, tmp_path):
    chance = random.Random(variant)
    for _ in range(4):
        children = start(tmp_path, VARIANTS[variant])
        while "started" not in children[0].read_output():
            assert children[0].code is None
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.5))
        children[0].kill()
        finish(children)
    run_to_end(tmp_path, VARIANTS[variant])
    assert digest(tmp_path) == undisturbed(variant, 1)


@pytest.mark.parametrize(
    ("variant", "kill_at"),
    [
        pytest.param("tiered", 201, marks=pytest.mark.slow),
        pytest.param("pooled", 150, marks=pytest.mark.slow),
        ("partials", 150),
        pytest.param("towers", 150, marks=pytest.mark.slow),
        pytest.param("cached", 150, marks=pytest.mark.slow),
        pytest.param("stale", 90, marks=pytest.mark.slow),
    ],
)
def test_one_of_two_ranks_killed(undisturbed, variant, kill_at, tmp_path):
    children = start(tmp_path, (VARIANTS | OF_TWO)[variant], kill_at, num_ranks=2)
    finish(children)
    assert children[0].code == -signal.SIGKILL
    run_to_end(tmp_path, (VARIANTS | OF_TWO)[variant], num_ranks=2)
    assert digest(tmp_path) == undisturbed(variant, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(undisturbed, tmp_path):
    chance = random.Random(7)
    for i in range(100):
        variant = chance.choice(list(VARIANTS))
        folder = tmp_path / str(i)
        finish(start(folder, VARIANTS[variant], chance.randrange(1, 330)))
        run_to_end(folder, VARIANTS[variant])
        assert digest(folder) == undisturbed(variant, 1)
