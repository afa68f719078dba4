"""The folder of a journey, and the seconds that each one took, printed after the last."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
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
    began = time.monotonic()
    try:
        return (yield)
    finally:
        item.user_properties.append((SECONDS, time.monotonic() - began))


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each journey, and of all."""
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if SECONDS in properties and report.when == "call":
                seconds = properties[SECONDS]
                lines.append((seconds, f"{seconds:6.1f} s  {outcome}  {report.nodeid}"))
    if lines:
        terminalreporter.section("journeys")
        for _, line in lines:
            terminalreporter.line(line)
        terminalreporter.line(f"{sum(seconds for seconds, _ in lines):6.1f} s  all")
