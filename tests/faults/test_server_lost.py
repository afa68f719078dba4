"""A server or a reader is lost: torchrun starts all ranks again, and they go on to the bits of an undisturbed run."""

from __future__ import annotations

import pytest
from forked_run import run_to_end
from small_run import digest
from test_heartbeat import PEER
from test_restart import SETTINGS, torchrun, undisturbed  # noqa: F401

from colonnade.comm.peer_status import PeerStatus, diagnose_stuck_call


def test_a_server_is_not_blamed_for_calls_of_trainers():
    calls = {1: {"push": 7, "trainers dense": 3}, 2: {"push": 7}}
    statuses = {rank: PeerStatus(PEER, 0.1, "running", 7, made) for rank, made in calls.items()}
    assert diagnose_stuck_call(statuses, "trainers dense", 4, (0, 1)).ranks == (1,)
    assert diagnose_stuck_call(statuses, "push", 8).ranks == (1, 2)


ROLES = {**SETTINGS, "plan.servers": 1}
PHASES = [
    "start 0",
    "control 5",
    "route 9",
    "fetch 7",
    "push 16",
    "checkpoint 6",
    "evaluate 4",
    "end 0",
]
SLOW = [
    *[f"rank 2 0.3x8 {phase}" for phase in PHASES[1:-1]],
    *[f"rank 1 0.3x8 {phase}" for phase in ("route 9", "fetch 7", "push 8", "trainers dense 6")],
    "rank 0 0.3x8 checkpoint 6",
    "rank 0 0.3x8 evaluate 4",
    "rank 2 4x1 push 16",
    "rank 1 4x1 fetch 7",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
def test_a_server_lost_in_each_phase(undisturbed, sent, phase, tmp_path):  # noqa: F811
    """Without servers as many ranks train the same bits."""
    limit = 15 if sent == "SIGSTOP" else 60
    torchrun(tmp_path / "run", 3, f"rank 2 {sent} {phase}", settings=ROLES, limit=limit)
    assert digest(tmp_path / "run") == undisturbed(2)


def is_only_slower(fault, settings, folder, wanted, monkeypatch):
    """Ranks that wait for one another name nobody: the run goes on, at once, to the same bits."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("LIMIT", "15")
    run_to_end(folder, settings, num_ranks=3)
    assert folder.with_name(f"{folder.name}.fault").exists(), "nothing was slow"
    assert digest(folder) == wanted


def test_a_server_that_is_slow(undisturbed, tmp_path, monkeypatch):  # noqa: F811
    fault = "rank 2 0.1x4 push 16"
    is_only_slower(fault, ROLES, tmp_path / "run", undisturbed(2), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", SLOW)
def test_who_is_slow_in_each_phase(undisturbed, fault, tmp_path, monkeypatch):  # noqa: F811
    wanted = undisturbed(2)
    is_only_slower(fault, ROLES, tmp_path / "run", wanted, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["0.3x8 push 5", "4x1 fetch 7"])
def test_a_reader_that_is_slow(undisturbed, fault, tmp_path, monkeypatch):  # noqa: F811
    wanted, settings = undisturbed(2), {**ROLES, "data.readers": 1}
    is_only_slower(f"reader 1 {fault}", settings, tmp_path / "run", wanted, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["SIGKILL push 5", "SIGKILL fetch 2", "SIGSTOP push 5"])
def test_a_reader_lost_beside_a_server(fault, tmp_path):
    """Lost reader is noticed when its next batch is due. (One that is stopped outlives a trainer that is killed.)"""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    torchrun(whole, 2, settings=SETTINGS)
    settings = {**SETTINGS, "plan.servers": 1, "data.readers": 1}
    limit = 15 if "SIGSTOP" in fault else 60
    output = torchrun(cut, 3, f"reader 1 {fault}", settings=settings, limit=limit)
    assert digest(cut) == digest(whole)
    assert output.count("started at") >= 6, "all ranks, again"
