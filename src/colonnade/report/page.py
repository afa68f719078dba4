"""One self-contained HTML page, from templates: text, charts and what draws them; nothing is loaded from anywhere."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from colonnade import __version__
from colonnade.errors import StorageError
from colonnade.formats import file_kind
from colonnade.report.figures import Figure
from colonnade.report.words import setting_words

TEMPLATES = Environment(
    loader=PackageLoader("colonnade.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["setting_words"] = setting_words
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False}


@dataclass(frozen=True, kw_only=True)
class NumberTable:
    """Table of numbers on a page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    wide: Collection[int] = ()
    """Columns that are left out on phones."""
    best: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Columns to mark, by row."""
    wraps: bool = False
    """Whether cells are words, which may be cut into lines."""


def render_page(template: str, charts: Mapping[str, Sequence[Figure | None]], **values: Any) -> str:
    """Return the HTML of a page. charts: by section, None where there is nothing to draw; values: by name in the
    template."""
    figures: list[Figure] = []
    numbered = {}
    for section, group in charts.items():
        drawn = [figure for figure in group if figure is not None]
        numbered[section] = list(enumerate(drawn, start=len(figures)))
        figures += drawn
    return TEMPLATES.get_template(template).render(
        charts=numbered,
        figures=[{"data": figure["data"], "layout": figure["layout"]} for figure in figures],
        plotly=get_plotlyjs(),
        version=__version__,
        now=datetime.now(),
        **values,
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
