"""The Python of the README and of docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), {"__name__": "page"})


def test_the_readme_trains_something(capsys):
    test_python_blocks_run(README)
    assert "loss" in capsys.readouterr().out


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@", README.read_text(encoding="utf-8"))
