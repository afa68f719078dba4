"""One self-contained HTML page: text, charts and the library that draws them; nothing is loaded from anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from colonnade.errors import StorageError
from colonnade.formats import file_kind
from colonnade.report.figures import Figure
from colonnade.report.words import setting_words


class Page:
    """Collects sections in order; `html` puts them together."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._body: list[str] = []
        self._figures: list[Figure] = []

    def header(self, kind: str, lead: str, status: str = "") -> None:
        word = f'<span class="status {escape(status)}">{escape(status)}</span>' if status else ""
        self._body.append(
            f'<header><p class="kind">{escape(kind)}</p><h1>{escape(self.title)}{word}</h1>'
            f'<p class="lead">{escape(lead)}</p></header>'
        )

    def heading(self, text: str) -> None:
        self._body.append(f"<h2>{escape(text)}</h2>")

    def tiles(self, figures: Sequence[tuple[str, str, str]]) -> None:
        """(name, value, unit) each."""
        cells = "".join(
            f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
            f'<div class="unit">{escape(unit) or "&nbsp;"}</div></div>'
            for name, value, unit in figures
        )
        self._body.append(f'<div class="tiles">{cells}</div>')

    def charts(self, figures: Sequence[Figure | None], nothing: str) -> None:
        """Those that there are; `nothing` is said where there is none."""
        cards = [self._chart(figure) for figure in figures if figure is not None]
        if not cards:
            self._body.append(f'<p class="empty">{escape(nothing)}</p>')
            return
        single = " single" if len(cards) == 1 else ""
        self._body.append(f'<div class="grid{single}">{"".join(cards)}</div>')

    def numbers(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        note: str = "",
        wide: Sequence[int] = (),
        best: Mapping[int, Sequence[int]] | None = None,
        wraps: bool = False,
    ) -> None:
        """A table of numbers; columns `wide` are left out on phones; `best`: by row, the columns to mark; `wraps`:
        its cells are words, which may be cut into lines."""
        marked, kind = best or {}, "numbers words" if wraps else "numbers"
        head = "".join(_cell("th", name, i in wide) for i, name in enumerate(columns))
        body = "".join(
            "<tr>"
            + "".join(
                _cell("td", text, i in wide, i in marked.get(number, ()))
                for i, text in enumerate(row)
            )
            + "</tr>"
            for number, row in enumerate(rows)
        )
        titled = (f"<h3>{escape(title)}</h3>" if title else "") + (
            f'<p class="note">{escape(note)}</p>' if note else ""
        )
        self._body.append(
            f'<div class="grid single"><div class="card long">{titled}<table class="{kind}">'
            f"<thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div></div>"
        )

    def facts(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Cards of names and values."""
        cards = []
        for title, values in groups.items():
            rows = "".join(
                f"<tr><th>{escape(str(name))}</th><td>{escape(setting_words(value))}</td></tr>"
                for name, value in values.items()
            )
            cards.append(
                f'<div class="card"><h3>{escape(title)}</h3><table class="facts">{rows}</table></div>'
            )
        self._body.append(f'<div class="grid">{"".join(cards)}</div>')

    def footer(self, text: str) -> None:
        self._body.append(f"<footer>{escape(text)}</footer>")

    def html(self) -> str:
        drawn = [{"data": f["data"], "layout": f["layout"]} for f in self._figures]
        text = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
        return "\n".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<link rel="icon" href="data:,">',
                f"<title>{escape(self.title)} · Colonnade</title>",
                f"<style>{_part('page.css')}</style></head><body><main>",
                *self._body,
                "</main>",
                f'<script type="application/json" id="figures">{text}</script>',
                f"<script>{get_plotlyjs()}</script>",
                f"<script>{_part('page.js')}</script>",
                "</body></html>",
            ]
        )

    def _chart(self, figure: Figure) -> str:
        number = len(self._figures)
        self._figures.append(figure)
        note = f'<p class="note">{escape(figure["note"])}</p>' if figure["note"] else ""
        return (
            f'<section class="card"><h3>{escape(figure["title"])}</h3>{note}<div class="chart" id="chart-{number}" '
            f'role="img" aria-label="{escape(figure["title"])}" '
            f'style="height:{figure["layout"]["height"]}px"></div></section>'
        )


def write_page(html: str, path: Path) -> None:
    """Write the page whole or not at all. Raises StorageError naming the file; also for a device, which the page would
    replace."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StorageError(
            f"{path}: got {file_kind(path.stat().st_mode)}, wanted a file's name. Name a file in a folder you can "
            "write to"
        )
    path = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(html, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True) if beside.parent.is_dir() else None
        raise StorageError(
            error.errno,
            f"{path}: could not write: {error.strerror}. Name a file in a folder you can write to",
        ) from None


def _cell(kind: str, text: str, is_wide: bool, is_best: bool = False) -> str:
    names = " ".join(n for n, use in (("wide", is_wide), ("best", is_best)) if use)
    return f"<{kind}{f' class={names!r}' if names else ''}>{escape(text)}</{kind}>"


def _part(name: str) -> str:
    return files("colonnade.report").joinpath(name).read_text(encoding="utf-8")
