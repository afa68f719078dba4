"""`colonnade report`: write a run's report as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.terminal import print_text

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade report runs/mine\n\n"
    "  colonnade report runs/mine --output mine.html\n\n"
    "The page contains everything it needs (about 5 MB) and opens in any browser, without a network."
)


def report(
    run: Annotated[Path, typer.Argument(help="Run folder; the run may be in progress, or killed.")],
    output: Annotated[
        Path | None, typer.Option(help="File for the page; default: report.html in the run folder.")
    ] = None,
) -> None:
    """Write a run's report: metrics, throughput, time by phase, rows, tables, settings, machine."""
    from colonnade.report.page import write_page
    from colonnade.report.pages import render_run_page
    from colonnade.report.reading import read_run_folder

    path = output or run / "report.html"
    write_page(render_run_page(read_run_folder(run)), path)
    print_text(f"report: {path}")
