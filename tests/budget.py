"""Budget of a test: how much processor time it may use, and the hooks that enforce it. A test that is marked slow has
none, unless it declares one: `budget(seconds)`, which journeys do.

Measured is processor time of the process that runs the test and of all processes that it starts, with what the test's
fixtures use where it is the first one to need them. Wall time on a busy machine would say nothing.
"""

from __future__ import annotations

import math
import os
import resource
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

MOST_SECONDS = 20.0
"""Twice what a test may take on a quiet machine: the same test uses up to twice the processor time on a crowded one."""
TICKS = os.sysconf("SC_CLK_TCK")
_began = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Return the processor time of this process and its descendants until now, of those that have ended, too.

    Left out is what the server that forks ranks imports: it does so once, whoever comes first. Missed is what threads
    but the main one of a process have started, as long as it runs.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    waiting = _children(os.getpid())
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        own, of_ended = (sum(map(int, fields[first : first + 2])) / TICKS for first in (11, 13))
        seconds += of_ended if pid == server else own + of_ended
        waiting += _children(pid)
    return seconds


def _children(pid: int) -> list[int]:
    """Return the processes that another one's main thread has started; [] where the system does not tell."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_began] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that has passed, but used more than its budget."""
    report = yield
    budget = item.get_closest_marker("budget")
    if call.when == "teardown" and report.passed:
        limit = MOST_SECONDS if item.get_closest_marker("slow") is None else math.inf
        if budget is not None:
            limit = 2 * budget.args[0]
        used = processor_seconds() - item.stash[_began]
        if used > limit:
            report.outcome = "failed"
            report.longrepr = (
                f"got {used:.1f} s of processor time, of this test with its fixtures and processes, wanted at most "
                f"{limit:g} s; do less, or mark it slow and keep a shorter test of the same"
            )
    return report
