"""`colonnade verify`: check every file of a checkpoint, an export or a publication against its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.errors import ConfigError, CorruptionError
from colonnade.terminal import print_text

if TYPE_CHECKING:
    from colonnade.files.durable import VerifiedFile

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade verify runs/mine\n\n  colonnade verify runs/mine --at 2000\n\n"
    "  colonnade verify runs/mine --directory /nvme1/rows\n\n  colonnade verify exported"
)


def verify(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder with at least one checkpoint, an exported folder or a publication (train.publish)."
        ),
    ],
    at: Annotated[str | None, typer.Option(help="Saved step, best or last; default: last.")] = None,
    directory: Annotated[
        list[Path] | None,
        typer.Option(help="New path of a directory of plan.memory.ssd that was moved. Repeatable."),
    ] = None,
) -> None:
    """Check all files of a checkpoint, an export or a publication, and name damaged or missing ones.

    All bytes are read, rows included; of a run's other checkpoints, without --at, headers and lists of rows. Nothing is
    changed."""
    from colonnade.checkpoint.completeness import verify_checkpoint, verify_other_checkpoints
    from colonnade.checkpoint.header import resolve_step
    from colonnade.publish.model_files import MODEL
    from colonnade.report.formatting import format_bytes

    is_export = (run / MODEL).exists()
    if is_export or _is_publication(run):
        if at is not None or directory:
            raise ConfigError(
                f"{run} has one checkpoint and no stores; leave --at and --directory out"
            )
        subject = str(run)
        remedy = "Restore them from a copy, or export the run again"
        files = _export_files(run) if is_export else _publication_files(run)
    elif not (run / "checkpoints").is_dir():
        raise ConfigError(
            f"{run}: got a folder without checkpoints/ (a run), {MODEL} (an export) or published.json (a publication), "
            "wanted one of them; name its folder"
            if run.exists()
            else f"{run} does not exist; name the folder of a run, an export or a publication"
        )
    else:
        step = resolve_step(run, at or "last")
        subject = f"{run}, step {step}"
        files = verify_checkpoint(run, step, directory or ())
        files = chain(files, verify_other_checkpoints(run, step) if at is None else ())
        remedy = "Restore them from a copy, or go back to an older checkpoint (--at STEP)"
    num_files = num_bytes = 0
    damaged: list[Path] = []
    for file in files:
        num_files += 1
        num_bytes += file.num_bytes
        if file.problem:
            damaged.append(file.path)
            problem = (
                file.problem if str(file.path) in file.problem else f"{file.path}: {file.problem}"
            )
            print_text(f"damaged  {problem}")
    if damaged:
        raise CorruptionError(
            f"{run}: {len(damaged):,} of {num_files:,} files are damaged or missing. {remedy}"
        )
    print_text(f"{subject}: intact; {num_files:,} files, {format_bytes(num_bytes)} read")


def _is_publication(folder: Path) -> bool:
    if (folder / "checkpoints").is_dir():
        return False  # a run; the import below would load torch
    from colonnade.publish.deltas import CURRENT

    return (folder / CURRENT).exists()


def _export_files(folder: Path) -> Iterator[VerifiedFile]:
    from colonnade.publish.model_files import verify_each_file

    yield from verify_each_file(folder)
    if (folder / "program.json").exists() or any(folder.glob("*.pt2")):
        from colonnade.export.torch_files import verify_programs  # loads torch

        yield from verify_programs(folder)


def _publication_files(folder: Path) -> Iterator[VerifiedFile]:
    from colonnade.publish.deltas import verify_publication

    return verify_publication(folder)
