"""Slices of what `make test` leaves out, of at most 15 minutes each, and a ledger of their last green runs.

python tests/slices.py [NAME]      run this slice, or the one that was green longest ago

The ledger (`slices.json`) is written where the slice is green and the working tree is that of HEAD; commit it then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEDGER = "tests/slices.json"
MOST_MINUTES = 15
"""Time of a slice on two cores; a longer one is cut."""
MOST_AGE = timedelta(days=12)
"""Age of a green run, between its commit and HEAD, from which `test_slices.py` fails."""

SLOW_TESTS = pytest.StashKey[set[str]]()
"""Tests marked slow that were collected, whether they run or not."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Note the slow tests before those that do not run are left out."""
    slow = {item.nodeid for item in items if item.get_closest_marker("slow") is not None}
    config.stash[SLOW_TESTS] = slow


@dataclass(frozen=True)
class Slice:
    """Part of the tests that one call of `make test-slice` runs, and its last green run."""

    date: str
    """Date of `commit`; of a slice that was never green, the date from which it is due."""
    commit: str | None = None
    """Commit of the last green run; None: none yet."""
    minutes: float | None = None
    """Duration of the last green run."""
    make: str | None = None
    """Target of make; None: the slow tests of `tests`."""
    tests: Sequence[str] = ()
    """Folders, files and tests (`FILE::TEST`), from the project's root."""

    def covers(self, test: str) -> bool:
        """Tell whether the slice runs a file (`FILE`) or a test (`FILE::TEST[CASE]`)."""
        return any(
            test == target or test.startswith(tuple(target + end for end in ("/", "::", "[")))
            for target in self.tests
        )

    def command(self) -> list[str]:
        """Return the command that runs the slice in the project's root."""
        if self.make is not None:
            return ["make", self.make]
        options = ["-m", "slow", "-n", "2", "--dist", "worksteal", "--durations", "20"]
        return [sys.executable, "-m", "pytest", *options, *self.tests]


def read_ledger(root: Path = ROOT) -> dict[str, Slice]:
    """Read the slices by name."""
    entries = json.loads((root / LEDGER).read_text(encoding="utf-8"))
    return {name: Slice(**entry) for name, entry in entries.items()}


def write_ledger(slices: Mapping[str, Slice], root: Path = ROOT) -> None:
    """Write the slices."""
    entries = {
        name: {field: value for field, value in asdict(entry).items() if value not in (None, ())}
        for name, entry in slices.items()
    }
    (root / LEDGER).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def find_oldest(slices: Mapping[str, Slice]) -> str:
    """Return the slice to run next: one that was never green, or the one that was green longest ago."""

    def age(name: str) -> tuple[bool, datetime]:
        return slices[name].commit is not None, datetime.fromisoformat(slices[name].date)

    return min(slices, key=age)


def find_overdue(slices: Mapping[str, Slice], head_date: str) -> list[str]:
    """Return the slices whose last green run is too old for a HEAD of that commit date."""
    oldest = datetime.fromisoformat(head_date) - MOST_AGE
    return [name for name, entry in slices.items() if datetime.fromisoformat(entry.date) < oldest]


def read_head(root: Path = ROOT) -> tuple[str, str]:
    """Return HEAD's commit and its date. Raises OSError or CalledProcessError outside a git repository."""
    commit, date = _git(root, "log", "-1", "--format=%H %cI").split()
    return commit, date


def is_clean(root: Path = ROOT) -> bool:
    """Tell whether the working tree is that of HEAD; other slices in the ledger may have been run since."""
    return not _git(root, "status", "--porcelain", "--", ".", f":!{LEDGER}").strip()


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Run a slice; return its status."""
    slices = read_ledger(root)
    name = words[0] if words else find_oldest(slices)
    if name not in slices:
        print(f"got slice {name!r}, wanted one of: {', '.join(slices)}")
        return 2
    head, was_clean = read_head(root), is_clean(root)
    command = slices[name].command()
    print(f"slice {name!r}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=root).returncode
    minutes = (time.monotonic() - began) / 60
    print(f"slice {name!r}: {'red' if code else 'green'} after {minutes:.1f} minutes")
    if minutes > MOST_MINUTES:
        print(f"wanted at most {MOST_MINUTES} minutes on two free cores: cut it in {LEDGER}")
    if code:
        return code
    if not (was_clean and is_clean(root) and head == read_head(root)):
        print("not recorded: the working tree is not that of HEAD; commit first")
        return 0
    commit, date = head
    entry = replace(slices[name], commit=commit, date=date, minutes=round(minutes, 1))
    write_ledger(read_ledger(root) | {name: entry}, root)
    print(f"recorded in {LEDGER}: commit it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
