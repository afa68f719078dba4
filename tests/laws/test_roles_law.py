"""All roles in one world: two trainers, a server and a reader process for each trainer, tables of several bounds. They
train what two ranks train that do everything themselves, killed in between or not."""

from __future__ import annotations

import pytest
from small_run import digest
from test_resume_law import finish, run_to_end, start

LATE = {
    "plan.staleness_steps": 4,
    "plan.tables": {"C1": {"staleness_steps": 0}},
    "plan.lookahead": 3,
    "data.options.num_train": 1000,
    "plan.memory.dram": 200_000,
    "train.epochs": 1,
}
ROLES = {**LATE, "plan.servers": 1, "data.readers": 1}


@pytest.mark.slow  # `test_server_law.py` has servers, `test_staleness_law.py` bounds, `test_data_processes.py` readers
def test_trainers_a_server_and_readers_train_what_two_ranks_train(tmp_path):
    run_to_end(tmp_path / "plain", LATE, num_ranks=2)
    children = start(tmp_path / "roles", ROLES, kill_at=25, num_ranks=3)
    output = finish(children)
    assert any(child.code for child in children), output
    run_to_end(tmp_path / "roles", ROLES, num_ranks=3)
    assert digest(tmp_path / "roles") == digest(tmp_path / "plain")


CACHED = {
    "plan.cache": {"size": 40, "staleness": 20, "write_share": 0.4, "tables": {"C1": {"policy": "lfu"}}},
    "plan.lookahead": 3,
    "plan.memory.dram": 200_000,
    "train.epochs": 1,
    "train.evaluate_steps": 4,
}  # fmt: skip
PARTS = [
    {"train.max_steps": 6},
    {"plan.cache.staleness": 4, "plan.cache.size": 25},
]
"""Calls of one run: each goes on with other bounds."""


def run_parts(folder, settings, num_ranks):
    for part in PARTS:
        run_to_end(folder, {**settings, **part}, num_ranks)
    return digest(folder)


@pytest.mark.slow
def test_trainers_with_caches_and_a_server_train_what_two_ranks_train(tmp_path):
    """Small caches evict, reads are late, and bounds change while gradients wait at copies."""
    wanted = run_parts(tmp_path / "plain", CACHED, num_ranks=2)
    assert run_parts(tmp_path / "roles", {**CACHED, "plan.servers": 1}, num_ranks=3) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2], ids=["a trainer", "the server"])
def test_and_so_they_do_after_a_rank_is_killed(killed, tmp_path, monkeypatch):
    """Gradients that wait at copies of others are in the checkpoint that all go on from."""
    settings = {**CACHED, "plan.servers": 1}
    monkeypatch.setenv("FAULT", f"rank {killed} SIGKILL push 11")
    children = start(tmp_path / "roles", settings, num_ranks=3)
    output = finish(children)
    assert any(child.code for child in children), output
    run_to_end(tmp_path / "roles", settings, num_ranks=3)
    monkeypatch.delenv("FAULT")
    run_to_end(tmp_path / "plain", CACHED, num_ranks=2)
    assert digest(tmp_path / "roles") == digest(tmp_path / "plain")


@pytest.mark.slow
def test_a_run_with_caches_of_tables_that_are_cut_resumes(tmp_path):
    """Copies of slices are in checkpoints."""
    cut = {
        **CACHED,
        "embedding.optimizer": "adagrad",
        "plan.tables": {
            "C2": {"sharding": "column_wise", "ranks": [0, 1]},
            "C3": {"replicated_rows": [0, 1, 2]},
        },
    }
    run_to_end(tmp_path / "whole", cut, num_ranks=2)
    run_to_end(tmp_path / "run", {**cut, "train.max_steps": 6}, num_ranks=2)
    run_to_end(tmp_path / "run", cut, num_ranks=2)
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
