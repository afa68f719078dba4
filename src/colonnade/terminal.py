"""Terminal output: text from files and users is printed literally, never as markup or control characters."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text


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
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """Return the text with control characters, except newlines and tabs, as escapes: `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def say(text: str) -> None:
    """Print text to standard output, with control characters as escapes."""
    print(printable(text), flush=True)
