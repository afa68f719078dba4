"""`colonnade export`: write a checkpoint's weights as files for other programs."""

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
    destination: Annotated[Path, typer.Argument(help="Folder to create.")],
    at: Annotated[
        str | None,
        typer.Option(
            help="Saved step, best or last; default: best if there is a validation part, else last."
        ),
    ] = None,
) -> None:
    """Write weights as safetensors: dense.safetensors, one file of ids and rows per table, model.json."""
    from colonnade.checkpoint.header import describe_checkpoint_choice
    from colonnade.publish.export import export_run

    manifest = export_run(run, destination, at=at)
    rows = sum(table["count"] for table in manifest["tables"])
    size = sum(path.stat().st_size for path in destination.iterdir())
    say(
        f"step {manifest['step']} ({describe_checkpoint_choice(run, manifest['step'])}): "
        f"{len(manifest['tables'])} tables, {rows:,} trained rows, {size / 2**20:,.1f} MiB\nexport: {destination}"
    )
