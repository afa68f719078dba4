"""Terminal output: text from files and users is printed literally, never as markup or control characters."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


class Terminal(Console):
    """Console without markup, emoji codes and highlighting; prints control characters as escapes.

    Pass plain strings, also in tables: a `rich.text.Text` is printed unchecked. In a file or a pipe a string is not
    wrapped, so that it can be searched; set COLUMNS to wrap it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **options: Any) -> None:
        is_text = all(isinstance(item, str) for item in objects)
        if is_text and not self.is_terminal and "COLUMNS" not in os.environ:
            options["soft_wrap"] = True
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_characters(text), **options)


PLAIN_GRID: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
"""Options of a table without lines."""


def build_grid(
    columns: Iterable[str],
    rows: Iterable[Sequence[Any]],
    *,
    text_columns: Collection[int] = (0,),
    **options: Any,
) -> Table:
    """Build a table for the terminal. text_columns: indices of left-aligned columns; the others are right-aligned."""
    from rich.table import Table

    grid = Table(**options)
    for number, name in enumerate(columns):
        grid.add_column(
            name, justify="left" if number in text_columns else "right", overflow="fold"
        )
    for row in rows:
        grid.add_row(*row)
    return grid


def escape_control_characters(text: str) -> str:
    """Return the text with control characters, except newlines and tabs, as escapes: `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def print_text(text: str) -> None:
    """Print text to standard output, with control characters as escapes."""
    print(escape_control_characters(text), flush=True)
