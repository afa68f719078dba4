"""Names and docstrings follow the rules of CONTRIBUTING.md, as far as a program can see."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "colonnade"
FILES = sorted(SOURCE.rglob("*.py"))
OTHERS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])

BAD_OPENERS = frozenset(
    "A After All An As At Before Between By Collective Each Every For From How If In It Its More Most Of On One Pure "
    "Raises Some Such That The There This Those To Until What When Where Whether Which Who Whole Why With".split()
)
"""Words that begin no docstring: its first word is a verb, or a noun that names the subject."""
BAD_NAMES = frozenset(
    "asked back both due each found given heard held here kept laid left mine most named said seen some theirs there "
    "told".split()
)
"""Names that say how a value was come by, not what it is."""
STATEMENT_OPENERS = frozenset("A All An Each Every If Most One The".split())
"""Words that may begin a docstring of tests and benches, which may be a statement."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, and of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or "Nothing"
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                        yield after.value.value


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, arguments, variables and attributes that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def find_wrong_words(path: Path, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Find docstrings that begin badly and names that are not plain. allowed: words that may begin a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = []
    for text in docstrings(tree):
        word = re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0]
        if word in BAD_OPENERS - allowed or not re.match(r"[\w`\"'<:*.\-+@]", word):
            wrong.append(f"{path.name}: docstring {text.strip()[:50]!r}")
    names = [name for name in bound_names(tree) if name.strip("_") in BAD_NAMES]
    return wrong + [f"{path.name}: name {name}" for name in names]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_docstrings_and_names(folder):
    assert [text for path in folder.glob("*.py") for text in find_wrong_words(path)] == []


def test_docstrings_and_names_of_tests_and_benches():
    """Test names are sentences, so only the other names and the docstrings count."""
    wrong = {
        path.relative_to(ROOT).as_posix(): words
        for path in OTHERS
        if (words := find_wrong_words(path, STATEMENT_OPENERS))
    }
    assert wrong == {}


def test_a_class_name_has_one_meaning():
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_function_name_has_one_meaning():
    """Public functions alone count, and no commands, which have the name of their verb."""
    names = Counter(
        node.name
        for path in FILES
        if path.relative_to(SOURCE).parts[0] != "cli"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
