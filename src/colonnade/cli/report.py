"""`colonnade report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.terminal import say

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade report runs/mine\n\n"
    "  colonnade report runs/mine --output mine.html\n\n"
    "The page holds everything it needs (about 5 MB) and opens in any browser, without a network."
)


def report(
    run: Annotated[
        Path, typer.Argument(help="Run folder; it may be under way, or have been killed.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run folder.")
    ] = None,
) -> None:
    """Draw a run: losses and metrics, throughput, phases of a step, row sources, tables, settings, machine."""
    from colonnade.report.page import write_page
    from colonnade.report.pages import run_page
    from colonnade.report.reading import read_run

    place = output or run / "report.html"
    write_page(run_page(read_run(run)), place)
    say(f"report: {place}")
