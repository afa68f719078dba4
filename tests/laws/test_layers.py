"""Dependencies point one way, and the files are where the documents say."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import tree  # noqa: E402

SOURCE = ROOT / "src" / "colonnade"

# A room may import from its own rank's left. Same-rank rooms may not import each other.
LAYERS = [
    {"errors", "_native", "section", "sizes", "processors", "terminal"},
    {"retention", "retention_config", "plan_config", "model_config", "formats"},
    {"optimizers", "batch", "config", "ops"},
    {"table", "topology", "interaction"},
    {"store", "consistency", "data"},
    {"cache"},
    {"exchange"},
    {"plan"},
    {"row_state"},
    {"embedding"},
    {"row_optimizer"},
    {"models"},
    {"train"},
    {"report", "predict"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def files():
    return sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms of this package that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "colonnade":
                names = [f"colonnade.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "colonnade" and len(parts) > 1 and not parts[1].startswith("__"):
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    room = room_of(path)
    assert room in LEVEL, f"{room} has no layer: add it to LAYERS and to DESIGN.md"
    for other in imports(path) - {room}:
        assert LEVEL[other] < LEVEL[room], (
            f"{path.name} ({room}) imports {other}, which is not below it"
        )


def test_one_call_points_up():
    """Modules loaded by name escape the law above: `collection.save` and `load` alone do that."""
    pattern = r"import_module\(\s*\"colonnade\.([\w.]+)\""
    names = {
        (path.name, name)
        for path in files()
        for name in re.findall(pattern, path.read_text(encoding="utf-8"))
    }
    assert names == {("row_state.py", "train.checkpoint")}


def test_the_tree_lists_every_file():
    """docs/tree.md is what docs/tree.py writes, and every file says what it is."""
    assert tree.PAGE.read_text(encoding="utf-8") == tree.build_page(), "run python docs/tree.py"
    assert [name for name, sentence in tree.lines() if not sentence] == []


MOST_LINES_OF_A_FILE = 700
MOST_LINES, MOST_COMPLEX = 80, 25
ABOVE = {
    ("cli/plan.py", "plan"),
    ("cli/predict.py", "predict"),
    ("data/tabular/columns.py", "_wanted"),
    ("embedding.py", "open"),
    ("lookup/layout.py", "declare"),
    ("plan/search/search.py", "_possible"),
    ("plan/cost/consumers.py", "model_load"),
    ("plan/plan.py", "build_plan"),
    ("plan/search/explanation.py", "consumer_choices"),
    ("plan/search/tower_choice.py", "narrowed"),
    ("report/pages.py", "figure_lines"),
    ("store/dram.py", "open_dram"),
    ("store/log.py", "open_log"),
    ("table.py", "__post_init__"),
    ("checkpoint/commits.py", "open_commits"),
    ("checkpoint/commits.py", "restore"),
    ("run/planning.py", "plan_from_sample"),
    ("run/run.py", "prepare"),
}
"""Functions that are longer or more complex than others may be. The list only shrinks."""
BRANCHES = (
    ast.If, ast.For, ast.While, ast.ExceptHandler, ast.With, ast.IfExp, ast.Assert,
    ast.comprehension, ast.match_case,
)  # fmt: skip


def count_branches(function: ast.AST) -> int:
    """Return a function's cyclomatic complexity, nested functions included (McCabe 1976)."""
    nodes = list(ast.walk(function))
    joined = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + sum(isinstance(node, BRANCHES) for node in nodes) + joined


def test_files_and_functions_stay_small():
    above = set()
    for path in files():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE, f"{path.relative_to(ROOT)}: split it"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES or count_branches(node) > MOST_COMPLEX:
                    above.add((path.relative_to(SOURCE).as_posix(), node.name))
    assert above - ABOVE == set(), "split these functions"
    assert ABOVE - above == set(), "take these off the list: they are small now"
