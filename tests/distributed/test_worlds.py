"""Worlds of ranks that stand by for further calls (`tests/ranks.py`): what one call leaves, the next does not find."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from ranks import run_ranks

from colonnade.comm.mesh import Mesh
from colonnade.planning import measure


def return_pid(mesh):
    mesh.barrier()
    return os.getpid(), torch.rand(3).tolist(), dict(mesh.traffic.sent_bytes)


def patch_module(mesh):
    measure.measure_links = None
    return os.getpid()


def patch_class(mesh):
    Mesh.barrier = lambda mesh: None
    return os.getpid()


def leave_thread(mesh):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def change_what_is_reset(mesh):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(mesh.rank)
    os.environ["LEFT_BEHIND"] = "1"
    mesh.peer_monitor.timeout = 0.1
    return os.getpid()


def look_for_changes(mesh):
    is_reset = torch.get_default_dtype() == torch.float32 and "LEFT_BEHIND" not in os.environ
    return os.getpid(), is_reset and mesh.peer_monitor.timeout > 100


def fail_on_rank_one(mesh):
    if mesh.rank == 1:
        raise ZeroDivisionError("on purpose")


def pids():
    return [pid for pid, *_ in run_ranks(2, return_pid)]


def test_a_world_serves_again_and_is_as_new():
    first, second = run_ranks(2, return_pid), run_ranks(2, return_pid)
    assert first == second, "the same processes, random numbers and counters"
    changed = run_ranks(2, change_what_is_reset)
    assert run_ranks(2, look_for_changes) == [(pid, True) for pid in changed]
    assert set(changed) == set(pids())
    assert set(pids()).isdisjoint(pid for pid, *_ in run_ranks(2, return_pid, fresh=True))


@pytest.mark.parametrize("function", [patch_module, patch_class, leave_thread])
def test_a_world_in_which_something_was_left_is_thrown_away(function):
    assert set(run_ranks(2, function)).isdisjoint(pids())


def test_a_world_in_which_a_rank_failed_is_thrown_away():
    before = pids()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed \(1.*ZeroDivisionError: on purp"):
        run_ranks(2, fail_on_rank_one)
    assert set(before).isdisjoint(pids())
