"""List the public names with their signatures: `python tests/public_api.py` rewrites tests/fixtures/public_api.txt."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

FILE = Path(__file__).resolve().parent / "fixtures" / "public_api.txt"
MODULES = ("colonnade", "colonnade.data", "colonnade.export", "colonnade.models")


def list_names() -> list[str]:
    """Return one line per public name, method or property, sorted by module."""
    lines: list[str] = []
    for module in MODULES:
        namespace = import_module(module)
        for name in sorted(namespace.__all__):
            lines += describe(f"{module}.{name}", getattr(namespace, name))
    return lines


def describe(name: str, value: object) -> Iterator[str]:
    """Yield the line of a name, and of a class those of its own public members."""
    if not inspect.isclass(value):
        yield name + signature_of(value)
        return
    yield f"class {name}{signature_of(value)}"
    for member, inner in sorted(vars(value).items()):
        if member.startswith("_"):
            continue
        if isinstance(inner, property):
            yield f"    {member}: property"
        elif inspect.isfunction(inner) or isinstance(inner, classmethod | staticmethod):
            yield f"    {member}{signature_of(getattr(value, member))}"


def signature_of(value: object) -> str:
    """Return names, defaults and kinds of the parameters, without annotations: these differ by version of Python."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


if __name__ == "__main__":
    FILE.write_text("\n".join(list_names()) + "\n", encoding="utf-8")
