"""`colonnade compare`: compare runs on the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade compare runs/a runs/b\n\n"
    "  colonnade compare runs/* --output compared.html\n\n  colonnade compare runs/a runs/b --churn"
)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write a page with the curves of all runs to.")
    ] = None,
    churn: Annotated[
        bool,
        typer.Option(
            "--churn",
            help="Predict the test parts, and print how much predictions differ from the first run's.",
        ),
    ] = False,
) -> None:
    """Compare final and best metrics, throughput, and the settings that differ."""
    from rich.text import Text

    from colonnade.cli.churn import print_churn
    from colonnade.report.page import write_page
    from colonnade.report.pages import (
        build_figure_lines,
        find_different_settings,
        find_distinct_run_names,
        render_comparison_page,
    )
    from colonnade.report.reading import read_run_folder
    from colonnade.terminal import Terminal, build_grid, escape_control_characters

    if len(runs) < 2:
        raise ConfigError(f"got {len(runs)} run, wanted at least two: colonnade compare RUN RUN")
    records = [read_run_folder(run) for run in runs]
    console = Terminal()
    names = find_distinct_run_names(records)
    different = find_different_settings(records)
    for title, lines in (
        ("figures", build_figure_lines(records)),
        ("settings that differ", different),
    ):
        if not lines:
            console.print(f"{title}: none")
            continue
        rows = [
            (
                line.name,
                *(
                    Text(f"{escape_control_characters(value)} *", style="bold green")
                    if i in line.best
                    else Text(escape_control_characters(value))
                    for i, value in enumerate(line.values)
                ),
            )
            for line in lines
        ]
        console.print(build_grid(["", *names], rows, title=title, title_justify="left"))
        if any(line.best for line in lines):
            console.print("* better than the runs without a mark", highlight=False)
    if churn:
        print_churn(console, runs)
    if output is not None:
        write_page(render_comparison_page(records), output)
        console.print(f"report: {output}", markup=False, soft_wrap=True)
