"""Self-contained HTML pages, from templates: text, charts and the code that draws them. They load nothing."""

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
from colonnade.formats import describe_file_kind
from colonnade.report.figures import Figure
from colonnade.report.formatting import format_setting

TEMPLATES = Environment(
    loader=PackageLoader("colonnade.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["format_setting"] = format_setting
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False}


@dataclass(frozen=True, kw_only=True)
class NumberTable:
    """Table of numbers on a page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    wide: Collection[int] = ()
    """Indices of columns that are hidden on phones."""
    best: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Indices of columns to mark, by row."""
    wraps: bool = False
    """True if cells are text that may wrap."""


def render_page(template: str, charts: Mapping[str, Sequence[Figure | None]], **values: Any) -> str:
    """Return the HTML of a page. charts: by section, None without data; values: by their names in the template."""
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
    """Write the page atomically. Raises StorageError naming the file, also for a device, which the page would
    replace."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StorageError(
            f"{path}: got {describe_file_kind(path.stat().st_mode)}, wanted a file's name. Name a file in a folder you "
            "can write to"
        )
    path = Path(os.path.realpath(path))  # replace the target of a link, not the link
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
        raise StorageError(
            error.errno,
            f"{path}: could not write: {error.strerror}. Name a file in a folder you can write to",
        ) from None
