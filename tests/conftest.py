"""Fixtures for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from budget import pytest_runtest_makereport, pytest_runtest_protocol  # noqa: F401  (hooks)
from hypothesis import settings
from own_signals import restore_signals
from slices import pytest_collection_modifyitems  # noqa: F401  (hook)

ROOT = Path(__file__).resolve().parents[1]

# No deadline: on a busy machine a slow example says nothing. No database: a run depends on the code only.
settings.register_profile("colonnade", deadline=None, derandomize=True, database=None)
settings.load_profile("colonnade")

restore_signals()


@pytest.fixture(scope="session", autouse=True)
def standing_worlds():
    """Close the worlds that `run_ranks` keeps for further calls, after the last test."""
    yield
    if (ranks := sys.modules.get("ranks")) is not None:
        ranks.close_worlds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Compare the calls of ranks that the test has started."""
    result = yield
    if (call_records := sys.modules.get("call_records")) is not None:
        call_records.check_children()
    return result


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with ml-1m/, criteo10k/ ...: `$COLONNADE_DATA`, else ../shared/data beside the repository."""
    root = Path(os.environ.get("COLONNADE_DATA") or ROOT.parent / "shared" / "data")
    if not root.is_dir():
        pytest.skip(f"real data absent: {root} is no folder (set COLONNADE_DATA)")
    return root


@pytest.fixture
def colonnade(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process: words -> (exit status, output, errors)."""
    from colonnade.cli import main

    monkeypatch.setenv("COLUMNS", "200")  # a long path breaks no line

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["colonnade", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
