"""Pages show the figures that bench/results holds, and only those that can be trusted."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


figures = load_generator()
needs_history = pytest.mark.skipif(
    not figures.has_history(), reason="commits cannot be looked up: a shallow clone, or no git"
)


@needs_history
@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_the_files_hold(page):
    text = page.read_text(encoding="utf-8")
    assert figures.names_in(text), "no block of figures"
    assert figures.rewrite(text) == text, "run make figures"


@needs_history
@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_a_result_file_names_a_commit_of_this_history(path):
    commit = json.loads(path.read_text(encoding="utf-8"))["commit"]
    assert not figures.run_git("merge-base", "--is-ancestor", commit, "HEAD").returncode, commit


@needs_history
def test_a_changed_figure_is_noticed():
    text = figures.PAGES[0].read_text(encoding="utf-8")
    changed = re.sub(r"\| (\d+),(\d{3}) \|", "| 999,999 |", text, count=1)
    assert changed != text and figures.rewrite(changed) == text


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_no_table_of_figures_is_typed_by_hand(page):
    """Tables of numbers stand between the marks. A cell that is a number and nothing else is a figure."""
    text = page.read_text(encoding="utf-8")
    for name in figures.names_in(text):
        text = text.split(figures.BEGIN.format(name))[0] + text.split(figures.END, 1)[1]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    typed = [row for row in rows if re.search(r"\|\s*\**[\d.,]+\**\s*\|", row)]
    assert not typed, f"give docs/figures.py a table for these: {typed[:3]}"


TRUSTED = {"commit": "0123456789ab", "machine": {"others_share": 0.05}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commit": "unknown"}, "'unknown'"),
        ({"commit": "0123456789ab-dirty"}, "dirty"),
        ({"machine": {"others_share": 0.06}}, r"others used 0\.06"),
        ({"machine": {}}, "an unknown share"),
    ],
)
def test_a_file_that_cannot_be_trusted_has_a_reason(change, reason):
    assert figures.find_distrust(TRUSTED, True, True) == ""
    assert re.search(reason, figures.find_distrust({**TRUSTED, **change}, True, True))


def test_a_count_is_trusted_of_a_busy_machine_and_no_file_without_its_commit():
    busy = {**TRUSTED, "machine": {"others_share": 0.9}}
    assert figures.find_distrust(busy, False, True) == ""
    assert "no ancestor" in figures.find_distrust(busy, False, False)


def test_rows_without_a_trusted_file_leave_the_page(tmp_path, monkeypatch):
    path = figures.RESULTS / "train.json"
    results = copy.deepcopy(json.loads(path.read_text(encoding="utf-8")))
    results["commit"] += "-dirty"
    (tmp_path / "train.json").write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for cached in (figures.read_results, figures.distrust_of):
        cached.cache_clear()
    try:
        text = figures.render(figures.TABLES["train"])
    finally:
        monkeypatch.undo()
        for cached in (figures.read_results, figures.distrust_of):
            cached.cache_clear()
    assert "`train.json`, its commit is" in text and "92,197" not in text and "|" not in text
