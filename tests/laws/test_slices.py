"""Every slow test is in one slice of `tests/slices.json`, and each slice was green not long ago."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import slices
from slices import (
    ROOT,
    SLOW_TESTS,
    Slice,
    find_oldest,
    find_overdue,
    read_head,
    read_ledger,
    write_ledger,
)

LEDGER = read_ledger()
MAKEFILE = "green:\n\t@touch ran\nred:\n\t@false\nuntidy:\n\t@touch left\n"


def has_slow_mark(file: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "slow" and ast.unparse(node).endswith("mark.slow")
        for node in ast.walk(ast.parse(file.read_text()))
    )  # fmt: skip


def test_each_slow_test_is_in_one_slice(request):
    """Checked test by test for what was collected with this one, and file by file for benches and journeys."""
    tests = sorted(request.config.stash[SLOW_TESTS])
    for folder in ("bench", "journeys"):
        files = sorted((ROOT / "tests" / folder).glob("test_*.py"))
        tests += [str(file.relative_to(ROOT)) for file in files if has_slow_mark(file)]
    assert tests  # benches have some
    for test in tests:
        names = [name for name, entry in LEDGER.items() if entry.covers(test)]
        assert len(names) == 1, (
            f"got {test} in slices {names}, wanted one: add it to the shortest in {slices.LEDGER}"
        )


def test_each_slice_names_files_or_a_target_of_make():
    makefile = (ROOT / "Makefile").read_text()
    for name, entry in LEDGER.items():
        assert (entry.make is None) != (not entry.tests), name
        assert entry.make is None or f"\n{entry.make}:" in makefile, name
        for target in entry.tests:
            file, _, test = target.partition("::")
            assert (ROOT / file).exists(), f"{name}: {target}"
            assert not test or test.partition("[")[0] in (ROOT / file).read_text(), target


def test_each_slice_was_green_lately():
    try:
        _, date = read_head()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git repository")
    overdue = find_overdue(LEDGER, date)
    assert not overdue, (
        f"got slices that were not green since {slices.MOST_AGE.days} days before HEAD: {overdue}; run "
        f"`make test-slice` until none is left (each runs the oldest), mend what is red, commit {slices.LEDGER}"
    )


def test_the_oldest_is_next_and_an_old_one_is_overdue():
    entries = {
        "new": Slice("2026-11-20T10:00:00+00:00", "c"),
        "old": Slice("2026-11-08T23:00:00-02:00", "b"),  # the 9th in Greenwich
        "older": Slice("2026-11-09T00:30:00+00:00", "a"),
    }
    assert find_oldest(entries) == "older"
    assert find_oldest(entries | {"never": Slice("2026-11-27T10:00:00+00:00")}) == "never"
    assert find_overdue(entries, "2026-11-21T00:20:00+00:00") == []
    assert find_overdue(entries, "2026-11-21T00:40:00+00:00") == ["older"]
    assert find_overdue(entries, "2026-11-21T01:01:00+00:00") == ["old", "older"]


@pytest.mark.parametrize(
    ("target", "test", "is_covered"),
    [
        ("tests/laws", "tests/laws/test_a.py", True),
        ("tests/laws", "tests/laws/test_a.py::test_one[2]", True),
        ("tests/law", "tests/laws/test_a.py", False),
        ("tests/laws/test_a.py", "tests/laws/test_a.py::test_one", True),
        ("tests/laws/test_a.py", "tests/laws/test_ab.py", False),
        ("tests/laws/test_a.py::test_one", "tests/laws/test_a.py::test_one[2]", True),
        ("tests/laws/test_a.py::test_one", "tests/laws/test_a.py::test_one_more", False),
        ("tests/laws/test_a.py::test_one", "tests/laws/test_a.py", False),
        ("tests/laws/test_a.py::test_one[2]", "tests/laws/test_a.py::test_one[2]", True),
        ("tests/laws/test_a.py::test_one[2]", "tests/laws/test_a.py::test_one[21]", False),
    ],
)
def test_what_a_slice_covers(target, test, is_covered):
    assert Slice("", tests=[target]).covers(test) is is_covered


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("ran\n")
    day = "2026-11-01T10:00:00+00:00"
    write_ledger({name: Slice(day, make=name) for name in ("green", "red", "untidy")}, tmp_path)
    author = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_green_slice_is_recorded_with_its_commit(project, capfd):
    before = read_ledger(project)
    assert slices.main([], project) == 0 and (project / "ran").exists()
    entry = read_ledger(project)["green"]
    commit, date = read_head(project)
    assert entry == replace(before["green"], commit=commit, date=date, minutes=0.0)
    assert slices.main(["green"], project) == 0, "only the ledger differs from HEAD"
    assert "not recorded" not in capfd.readouterr().out


def test_what_is_red_or_of_no_commit_is_not_recorded(project, capfd):
    before = read_ledger(project)
    assert slices.main(["red"], project) != 0
    assert read_ledger(project) == before
    assert slices.main(["untidy"], project) == 0  # it leaves a file
    assert slices.main(["green"], project) == 0
    assert capfd.readouterr().out.count("not recorded") == 2
    assert read_ledger(project) == before
    assert slices.main(["blue"], project) == 2
    assert "wanted one of: green, red, untidy" in capfd.readouterr().out
