"""A server or a reader is lost: torchrun starts all ranks again, and they go on to the bits of an undisturbed run."""

from __future__ import annotations

import pytest
from small_run import digest
from test_presence import PEER
from test_restart import SETTINGS, torchrun

from colonnade.topology.presence import Heard, verdict


def test_a_server_is_not_blamed_for_calls_of_trainers():
    calls = {1: {"push": 7, "trainers dense": 3}, 2: {"push": 7}}
    heard = {rank: Heard(PEER, 0.1, "running", 7, made) for rank, made in calls.items()}
    assert verdict(heard, "trainers dense", 4, (0, 1)).ranks == (1,)
    assert verdict(heard, "push", 8).ranks == (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_killed_in_a_push(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    torchrun(whole, 2, settings=SETTINGS)  # without servers: as many ranks train the same bits
    said = torchrun(cut, 3, "rank 2 SIGKILL push 16", settings={**SETTINGS, "plan.servers": 1})
    assert digest(cut) == digest(whole)
    assert "started at None" in said and "started at 4" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["SIGKILL push 5", "SIGKILL fetch 2"])
def test_a_reader_lost_beside_a_server(fault, tmp_path):
    """It is missed when its next batch is due. (One that is stopped outlives a trainer that is killed.)"""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    torchrun(whole, 2, settings=SETTINGS)
    settings = {**SETTINGS, "plan.servers": 1, "data.readers": 1}
    said = torchrun(cut, 3, f"reader 1 {fault}", settings=settings)
    assert digest(cut) == digest(whole)
    assert said.count("started at") >= 6, "all ranks, again"
