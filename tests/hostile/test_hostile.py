"""Whatever is wrong with a file, a configuration or a command line: one clear line, status 2, nothing half-written."""

from __future__ import annotations

import sys
from pathlib import Path

import command_cases
import config_cases
import criteo_cases
import format_cases
import movielens_cases
import pytest
import table_cases
from case import Case

from colonnade.cli import main

CASES = [
    case
    for module in (
        criteo_cases,
        movielens_cases,
        table_cases,
        format_cases,
        config_cases,
        command_cases,
    )
    for case in module.cases()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_clear_line(case: Case, tmp_path, monkeypatch, capfd):
    for name, content in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["colonnade", *case.command])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capfd.readouterr().err
    assert ended.value.code == 2, output
    assert output.startswith("error: ") and output.endswith("\n"), output
    assert output.count("\n") == 1, output
    for word in case.words:
        assert word in output, f"{word!r} is not in: {output}"
    assert_untouched(tmp_path, case)


def assert_untouched(folder: Path, case: Case) -> None:
    for name, content in case.files.items():
        assert (folder / name).read_bytes() == content
    existing = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    new = sorted(existing - set(case.files))
    remaining = [name for name in new if Path(name).parts[0] not in case.may_leave]
    assert not remaining, f"left behind: {remaining}"
    assert not [name for name in new if "tmp" in Path(name).name or "partial" in name], new


def test_there_are_enough():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) and len(names) >= 300
