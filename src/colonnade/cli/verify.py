"""`colonnade verify`: is every byte of a run's commit as it was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import CorruptionError

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade verify runs/mine\n\n  colonnade verify runs/mine --at 2000\n\n"
    "  colonnade verify runs/mine --directory /nvme1/rows"
)


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one commit.")],
    at: Annotated[
        str | None, typer.Option(help="best, last or a committed step; default: last.")
    ] = None,
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where a directory of plan.memory.ssd lies now, if it was moved; repeat for more."
        ),
    ] = None,
) -> None:
    """Read a commit whole, rows included, and name every file that is not as it was written. Changes nothing."""
    from colonnade.report.words import bytes_words
    from colonnade.train.commits import resolve
    from colonnade.train.verification import verify_commit

    step = resolve(run, at or "last")
    num_files = num_bytes = 0
    damaged: list[Path] = []
    for file in verify_commit(run, step, directory or ()):
        num_files += 1
        num_bytes += file.num_bytes
        if file.problem:
            damaged.append(file.path)
            words = (
                file.problem if str(file.path) in file.problem else f"{file.path}: {file.problem}"
            )
            typer.echo(f"damaged  {words}")
    if damaged:
        raise CorruptionError(
            f"{run}, step {step}: {len(damaged):,} of {num_files:,} files are damaged or missing. Restore them from a "
            "copy, or go back to an older commit (--at STEP)"
        )
    typer.echo(f"{run}, step {step}: whole; {num_files:,} files, {bytes_words(num_bytes)} read")
