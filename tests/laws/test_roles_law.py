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
    "data.options.num_train": 800,
    "train.epochs": 1,
    "train.evaluate_steps": 3,
}  # fmt: skip


def test_trainers_with_caches_and_a_server_train_what_two_ranks_train(tmp_path):
    run_to_end(tmp_path / "plain", CACHED, num_ranks=2)
    run_to_end(tmp_path / "roles", {**CACHED, "plan.servers": 1}, num_ranks=3)
    assert digest(tmp_path / "roles") == digest(tmp_path / "plain")
