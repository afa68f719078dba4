"""`colonnade export`: a checkpoint as files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.terminal import say

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade export runs/mine served\n\n"
    "  colonnade export runs/mine served-2000 --at 2000"
)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    at: Annotated[
        str | None,
        typer.Option(
            help="A saved step, best or last; default: best where a validation part chose one, else last."
        ),
    ] = None,
) -> None:
    """Write weights as safetensors: dense.safetensors, one file of ids and rows per table, model.json."""
    from colonnade.checkpoint.header import describe_choice
    from colonnade.publish.export import export_run

    said = export_run(run, destination, at=at)
    rows = sum(table["count"] for table in said["tables"])
    size = sum(path.stat().st_size for path in destination.iterdir())
    say(
        f"step {said['step']} ({describe_choice(run, said['step'])}): {len(said['tables'])} tables, "
        f"{rows:,} trained rows, {size / 2**20:,.1f} MiB\nexport: {destination}"
    )
