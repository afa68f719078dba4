"""No collective is called under a condition that holds on some ranks only: the others would wait for it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "colonnade"
FILES = sorted(SOURCE.rglob("*.py"))

COLLECTIVE = re.compile(r"\bCollective(?=[.,:;])")
"""Mark in a docstring. Functions that are collective in some cases only ("Collective where ...") are not checked."""
PER_RANK = frozenset({"console", "rank"})
"""Last words of names whose value depends on the rank: `console`, `mesh.rank`, `own_rank`."""

LEAVING = ast.Return | ast.Continue | ast.Break
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_collectives(trees: Sequence[ast.Module]) -> frozenset[str]:
    """Return the names under which only collectives are defined: a call by such a name is one."""
    definitions: dict[str, list[bool]] = defaultdict(list)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, Function):
                is_collective = COLLECTIVE.search(ast.get_docstring(node) or "") is not None
                definitions[node.name].append(is_collective)
    return frozenset(name for name, marks in definitions.items() if all(marks))


def find_conditional_calls(tree: ast.Module, collectives: frozenset[str]) -> Iterator[str]:
    """Yield "LINE: NAME" of each collective under an `if` that tests a console or a rank, or after one that leaves.

    Not seen are tests by way of a call or an attribute, and calls by way of a function that is not collective by its
    docstring. Both branches may call the same collectives.
    """
    for function in ast.walk(tree):
        if isinstance(function, Function):
            tests = _find_test_names(function)
            yield from _check_block(function.body, tests, collectives)


def _find_test_names(function: Function) -> set[str]:
    """Return the local names of conditions on a console or a rank: `is_first = mesh.rank == 0`."""
    tests: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            if _is_per_rank(node.value, tests):
                tests |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return tests


def _is_per_rank(test: ast.expr, tests: set[str]) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(names & tests) or any(name.split("_")[-1] in PER_RANK for name in names)


def _check_block(
    block: Sequence[ast.stmt], tests: set[str], collectives: frozenset[str]
) -> Iterator[str]:
    for number, statement in enumerate(block):
        if isinstance(statement, ast.If | ast.While) and _is_per_rank(statement.test, tests):
            branches = statement.body, statement.orelse
            leaves = [bool(branch) and isinstance(branch[-1], LEAVING) for branch in branches]
            rest = block[number + 1 :] if any(leaves) else []
            calls = [
                _list_calls([*branch, *([] if is_left else rest)], collectives)
                for branch, is_left in zip(branches, leaves, strict=True)
            ]
            if [name for _, name in calls[0]] != [name for _, name in calls[1]]:
                for line, name in sorted(calls[0] + calls[1]):
                    yield f"{line}: {name}"
                if rest:
                    return
        elif not isinstance(statement, Function | ast.ClassDef):
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.expr):
                    yield from _check_expression(part, tests, collectives)
            for field in ("body", "orelse", "finalbody"):
                yield from _check_block(getattr(statement, field, []), tests, collectives)
            for field in ("handlers", "cases"):
                for part in getattr(statement, field, []):
                    yield from _check_block(part.body, tests, collectives)


def _check_expression(
    expression: ast.expr, tests: set[str], collectives: frozenset[str]
) -> Iterator[str]:
    """Yield the collectives of `A if rank else B` and `rank and A`."""
    for node in ast.walk(expression):
        parts: list[ast.expr] = []
        if isinstance(node, ast.IfExp) and _is_per_rank(node.test, tests):
            parts = [node.body, node.orelse]
            if len({tuple(n for _, n in _list_calls([part], collectives)) for part in parts}) == 1:
                continue
        elif isinstance(node, ast.BoolOp):
            first = [_is_per_rank(value, tests) for value in node.values]
            parts = node.values[first.index(True) + 1 :] if any(first) else []
        for line, name in _list_calls(parts, collectives):
            yield f"{line}: {name}"


def _list_calls(nodes: Sequence[ast.AST], collectives: frozenset[str]) -> list[tuple[int, str]]:
    """Return line and name of the collectives that these nodes call, in order; not those of functions they define."""
    calls = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in collectives:
                calls.append((node.lineno, name))
        calls += _list_calls(list(ast.iter_child_nodes(node)), collectives)
    return calls


def test_no_collective_is_called_on_some_ranks_only():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    collectives = find_collectives(list(trees.values()))
    assert {"describe_lost_checkpoints", "all_gather_bytes", "barrier"} <= collectives
    wrong = [
        f"{path.relative_to(ROOT)}:{call}"
        for path, tree in trees.items()
        for call in find_conditional_calls(tree, collectives)
    ]
    assert not wrong, "collectives under a condition on the console or the rank: " + ", ".join(
        wrong
    )


HEAD = '''
def gather(x):
    """Gather. Collective."""
def share(x):
    """Share. Collective: every rank calls it."""
def sometimes(x):
    """Share. Collective where there are servers."""
def wait(x):
    """Wait. Collective."""
class Other:
    def wait(self):
        """Wait for a file."""
'''
WRONG = {
    "console": "if console is not None:\n    gather(1)",
    "its attribute": "if setup.console:\n    mesh.gather(1)",
    "among others": "if step is not None and console is not None:\n    for x in gather(1): pass",
    "rank": "if mesh.rank == 0:\n    share(1)",
    "else": "if mesh.rank == 0:\n    pass\nelse:\n    share(1)",
    "deeper": "with a:\n    for b in c:\n        if rank:\n            try: x = f(gather(1))\n            finally: z",
    "after leaving": "if mesh.rank > 0:\n    return\nx = 1\ngather(x)",
    "after going on": "for own_rank in ranks:\n    if own_rank:\n        continue\n    gather(x)",
    "named": "is_first = mesh.rank == 0\nif is_first:\n    gather(1)",
    "twice named": "is_first = mesh.rank == 0\nis_quiet = not is_first\nif is_quiet: gather(1)",
    "expression": "x = gather(1) if mesh.rank == 0 else None",
    "and": "x = console and gather(1)",
    "while": "while mesh.rank < 3:\n    gather(1)",
    "others in the other branch": "if rank:\n    gather(1)\nelse:\n    share(1)",
}  # fmt: skip
RIGHT = {
    "before": "lines = gather(1)\nif console is not None:\n    console.print(lines)",
    "number of ranks": "if mesh.num_ranks > 1:\n    gather(1)",
    "same in both": "if rank:\n    x = gather(a)\nelse:\n    x = gather(b)",
    "same expression": "x = gather(1) if rank else gather(2)",
    "raised": "if rank > 5:\n    raise ValueError\ngather(1)",
    "another function": "if rank == 0:\n    def f(): gather(1)\n    g = lambda: gather(1)",
    "not always": "if rank == 0:\n    sometimes(1)",
    "name of others": "if rank == 0:\n    file.wait()",
    "and before": "x = gather(1) and console",
    "of the argument": "gather(1 if rank == 0 else 2)\nshare(console and 1)",
}  # fmt: skip


def check(body: str) -> list[str]:
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    tree = ast.parse(f"{HEAD}def function():\n{indented}")
    return list(find_conditional_calls(tree, find_collectives([tree])))


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_refused(body):
    assert check(body), body


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_what_is_allowed(body):
    assert check(body) == [], body
