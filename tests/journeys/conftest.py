"""Folder of a journey, and the seconds that each one took, which are printed after the last."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from budget import processor_seconds
from shell import Shell

SECONDS = "journey_seconds"


@pytest.fixture
def shell(tmp_path) -> Iterator[Shell]:
    """A fresh folder. What still runs in it at the end of the journey is killed."""
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    began, used = time.monotonic(), processor_seconds()
    try:
        return (yield)
    finally:
        seconds = time.monotonic() - began, processor_seconds() - used
        item.user_properties.append((SECONDS, seconds))


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each journey, and those of processors."""
    total = 0.0
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            seconds = dict(report.user_properties).get(SECONDS)
            if seconds is None or report.when != "call":
                continue
            if not total:
                terminalreporter.section("journeys: seconds, and those of processors")
            total += seconds[0]
            terminalreporter.line(
                f"{seconds[0]:6.1f} {seconds[1]:6.1f}  {outcome}  {report.nodeid}"
            )
    if total:
        terminalreporter.line(f"{total:6.1f}         all")
