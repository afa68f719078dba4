"""`colonnade settings`: every setting of a run, with unit and default."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from colonnade.errors import ConfigError
from colonnade.sizes import Said

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade settings\n\n  colonnade settings train\n\n"
    "  colonnade settings plan.memory.dram"
)


def settings(
    of: Annotated[
        str | None,
        typer.Argument(help="A section (train) or one setting (plan.memory.dram); default: all."),
    ] = None,
) -> None:
    """List settings: name, default, what may stand there, what it means."""
    from rich.table import Table as Grid
    from rich.text import Text

    from colonnade.cli.app import nearest
    from colonnade.config import RunConfig
    from colonnade.terminal import Terminal

    lines = list(_lines(RunConfig))
    names = [name for name, _ in lines]
    if of is not None:
        chosen = [(n, f) for n, f in lines if n == of or n.startswith(f"{of}.")]
        if not chosen:
            sections = list(RunConfig.model_fields)
            raise ConfigError(
                f"unknown setting or section {of!r}; {nearest(of, [*sections, *names])}"
            )
        lines = chosen
    grid = Grid(show_lines=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for title in ("setting", "default", "values", "meaning"):
        grid.add_column(title, overflow="fold", no_wrap=title in ("setting",))
    for name, field in lines:
        grid.add_row(
            Text(name, style="bold"),
            Text(_shown(field.get_default(call_default_factory=True))),
            Text(_said(field) or _values(field.annotation)),
            Text(field.description or ""),
        )
    Terminal().print(grid)


def _lines(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, field) of every setting, those of sections inside sections after their own line."""
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if prefix or not hasattr(inner, "model_fields"):
            yield f"{prefix}{name}", field
        if hasattr(inner, "model_fields"):
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _lines(inner, f"{prefix}{name}.{named}")


def _section(annotation: Any) -> Any:
    """The section's class; of an optional one, what it may be."""
    return next((a for a in get_args(annotation) if hasattr(a, "model_fields")), annotation)


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if hasattr(default, "model_fields_set"):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _said(field: Any) -> str:
    """What its own type says of itself, "" if nothing."""
    return next((part.words for part in field.metadata if isinstance(part, Said)), "")


def _values(annotation: Any) -> str:
    """A type in words."""
    if hasattr(annotation, "model_fields"):
        return "a section"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _values(a) for a in inner)
    if origin is Annotated:
        said = [part.words for part in inner if isinstance(part, Said)]
        return said[0] if said else _values(inner[0])
    if origin is list:
        return f"list of {_values(inner[0])}" if inner else "list"
    if origin is tuple:
        return ", ".join(_values(a) for a in inner if a is not Ellipsis)
    words = {int: "integer", float: "number", str: "text", bool: "true | false", dict: "mapping"}
    return words.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
