"""Recipes: papers as run configurations, short enough to read at once, that run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def run(name: str, *arguments: str) -> str:
    path = RECIPES / name
    assert len(path.read_text().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mtrains_trains_with_rows_below_memory(tmp_path):
    said = run("mtrains.py", str(tmp_path / "run"))
    rows = dict(line.removeprefix("rows ").split(": ") for line in said.splitlines()[1:])
    count = {name: int(number.replace(",", "")) for name, number in rows.items()}
    assert list(count) == ["resident", "born", "read", "copied"]
    assert count["resident"] > count["born"] > 0 and count["read"] + count["copied"] > 0
    assert "test_auc 0." in said
    assert list((tmp_path / "run-rows").rglob("segment-*"))
    assert (tmp_path / "run" / "summary.json").exists()
