"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    assert "loss" in capsys.readouterr().out


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@", README.read_text(encoding="utf-8"))
