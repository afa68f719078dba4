"""Phases of a step: waiting time is subtracted from the phase that it interrupts, and adds up."""

from __future__ import annotations

import threading
import time

import pytest

from colonnade.comm.traffic import count_waiting_time, waiting_seconds
from colonnade.train.phases import Phases


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return sleep


def test_waits_are_apart_from_the_phase_they_interrupt(clock):
    phases = Phases()
    with phases("forward"):
        clock(2.0)
        with count_waiting_time("fetch"):
            clock(3.0)
            with count_waiting_time("push"):  # part of the wait outside
                clock(0.5)
    with phases("push rows"):
        clock(0.25)
        with count_waiting_time("push"):
            clock(1.0)
        with count_waiting_time("control"):
            clock(0.125)
    with phases("evaluate", include_waits=True), count_waiting_time("fetch"):
        clock(7.0)
    assert dict(phases.seconds) == {
        "forward": 2.0,
        "exchange: rows": 3.5,
        "push rows": 0.25,
        "exchange: row gradients": 1.0,
        "exchange: other": 0.125,
        "evaluate": 7.0,
    }


def test_other_threads_waits_are_their_own(clock):
    phases, before = Phases(), dict(waiting_seconds())

    def wait():
        with count_waiting_time("route"):
            clock(5.0)

    with phases("backward"):
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        with pytest.raises(ValueError, match="no"), count_waiting_time("dense"):
            clock(1.0)
            raise ValueError("no")
    assert dict(phases.seconds) == {"backward": 5.0, "exchange: dense gradients": 1.0}
    assert waiting_seconds().get("route", 0.0) == before.get("route", 0.0)
