"""Dependencies point one way, and the files are where the documents say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import pytest  # noqa: E402
import tree  # noqa: E402

SOURCE = ROOT / "src" / "colonnade"

# A folder or file may import from lower levels only; those of one level may not import each other.
LEVELS = [
    {"errors", "_native", "sizes", "processors", "terminal"},
    {"config.validation"},
    {"config.problems"},
    {"config.section"},
    {"formats", "machine", "retention", "staleness", "batch", "optimizers", "ops"},
    {"files"},
    {"topology"},
    {"hops"},
    {"plan.names", "plan.comparison"},
    {"plan.plan"},
    {"config"},
    {"table", "interaction"},
    {"store", "comm"},
    {"data"},
    {"lookup"},
    {"wire", "cache"},
    {"exchange"},
    {"plan.measure"},
    {"plan.cost"},
    {"plan.search"},
    {"plan.towers"},
    {"plan"},
    {"pipeline"},
    {"row_state"},
    {"embedding"},
    {"row_optimizer"},
    {"models"},
    {"checkpoint"},
    {"publish"},
    {"train"},
    {"predict"},
    {"planning"},
    {"run"},
    {"report"},
    {"serve", "export"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FAMILIES = {
    "cli",
    "data/sets",
    "data/tabular",
    "export",
    "interaction",
    "models",
}
"""Folders with one file for each member of a family: any number of files, which their door alone may import."""
MOST_FILES = 16
SINGLE: set[str] = set()
"""Files with one user that stand by themselves still. The list only shrinks."""


def files():
    return sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def module_of(path: Path) -> str:
    """Return a file's module without `colonnade.`; a package's is its folder's."""
    return (
        path.relative_to(SOURCE)
        .with_suffix("")
        .as_posix()
        .replace("/", ".")
        .removesuffix(".__init__")
    )


MODULES = {module_of(path): path for path in files()}


def unit_of(module: str) -> str:
    """Return the longest part of a module's name that has a level."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVEL), module)


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, at the top, inside functions or for type checking."""
    imported = set()
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "colonnade"
        ):
            base = (node.module or "").removeprefix("colonnade").lstrip(".")
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            imported |= {name if name in MODULES else base or name for name in names}
        elif isinstance(node, ast.Import):
            imported |= {
                alias.name.removeprefix("colonnade.")
                for alias in node.names
                if alias.name.startswith("colonnade.")
            }
    return {name for name in imported if not name.startswith("__")}


@cache
def all_imports() -> dict[str, set[str]]:
    """Return what each module imports, read when a test asks: collection alone parses nothing."""
    return {module: imports(path) - {module} for module, path in MODULES.items()}


def test_imports_point_down():
    missing = {module for module in MODULES if unit_of(module) not in LEVEL}
    assert missing == set(), "give these a level in LEVELS, and in DESIGN.md"
    upwards = [
        f"{module} imports {other}"
        for module, others in all_imports().items()
        for other in others
        if unit_of(other) != unit_of(module) and LEVEL[unit_of(other)] >= LEVEL[unit_of(module)]
    ]
    assert upwards == [], "these are not below"


def test_no_circle_of_imports():
    """Modules without imports among the others are removed until none is left; a circle would remain."""
    rest = {module: others & set(MODULES) for module, others in all_imports().items()}
    while free := {module for module, others in rest.items() if not others}:
        rest = {m: others - free for m, others in rest.items() if m not in free}
    assert rest == {}


def test_folders_do_one_job():
    """Folders have at most MOST_FILES files, each used by two others at least, except families.

    A package's `__init__` is its door and no user of its files; modules of the public API have users outside.
    """
    folders = {path.parent for path in files()}
    crowded = [
        folder.relative_to(SOURCE).as_posix()
        for folder in folders
        if len(list(folder.glob("*.py"))) > MOST_FILES
    ]
    assert set(crowded) - FAMILIES == set()
    assert {name for name in FAMILIES if not (SOURCE / name).is_dir()} == set()
    users = {module: set() for module in MODULES}
    for module, others in all_imports().items():
        for other in others & set(MODULES) if MODULES[module].name != "__init__.py" else ():
            users[other].add(module)
    exported = {imported.removeprefix("colonnade.") for imported in _list_exporting_modules()}
    single = {
        module
        for module, path in MODULES.items()
        if len(users[module]) == 1 and path.name != "__init__.py"
        and path.parent.relative_to(SOURCE).as_posix() not in FAMILIES and module not in exported
    }  # fmt: skip
    assert single - SINGLE == set(), "merge these into their users"
    assert SINGLE - single == set(), "take these off the list"


def _list_exporting_modules() -> set[str]:
    nodes = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8")).body
    return {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def _is_in(module: str, excluded: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in excluded)


def list_closure(module: str) -> set[str]:
    """Return the modules that importing a module in a fresh process loads."""
    program = f"import sys, colonnade.{module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = [name for name in loaded.stdout.split() if name.startswith("colonnade.")]
    return {name.removeprefix("colonnade.") for name in names} & set(MODULES)


@pytest.mark.parametrize(
    ("module", "max_modules", "excluded"),
    [
        # Values: reading a plan.json loads no planner.
        ("plan.plan", 16, ("config", "store", "plan", "planning", "exchange", "embedding")),
        ("embedding", 146, ("plan.search", "plan.measure.device", "planning", "train", "run")),
        (
            "predict",
            198,
            ("plan.search", "plan.measure.device", "planning", "train.trainer", "run"),
        ),
    ],
)
def test_a_value_loads_nothing_of_its_users(module, max_modules, excluded):
    loaded = list_closure(module)
    own = {"plan", "plan.plan", "plan.names", "plan.comparison"} if module == "plan.plan" else set()
    assert module in loaded  # the comparison can fail
    assert len(loaded) <= max_modules
    assert [name for name in sorted(loaded - own) if _is_in(name, excluded)] == []


def test_one_call_points_up():
    """Modules loaded by name escape the laws above: `collection.save` and `load` alone do that."""
    pattern = r"import_module\(\s*\"colonnade\.([\w.]+)\""
    names = {
        (path.name, name)
        for path in files()
        for name in re.findall(pattern, path.read_text(encoding="utf-8"))
    }
    assert names == {("row_state.py", "checkpoint.collection")}


def test_the_tree_lists_every_file():
    """docs/tree.md is what docs/tree.py writes, and every file says what it is."""
    assert tree.PAGE.read_text(encoding="utf-8") == tree.build_page(), "run python docs/tree.py"
    assert [name for name, sentence in tree.lines() if not sentence] == []


MOST_LINES_OF_A_FILE = 700
MOST_LINES, MOST_COMPLEX = 80, 25
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
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES or count_branches(node) > MOST_COMPLEX:
                    above.add((path.relative_to(SOURCE).as_posix(), node.name))
    assert above == set(), "split these functions"
