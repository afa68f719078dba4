"""`colonnade export`: write a checkpoint's weights as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.cli.predict import AtOption
from colonnade.sizes import format_bytes
from colonnade.terminal import print_text

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade export runs/mine served\n\n"
    "  colonnade export runs/mine served-2000 --at 2000\n\n"
    "  colonnade export runs/mine my-model --torch --hub\n\n"
    "  colonnade export runs/mine models/ctr --triton"
)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="Folder to create.")],
    at: AtOption = None,
    torch: Annotated[
        bool,
        typer.Option("--torch", help="Add model.pt2 and dense.pt2, programs of torch.export."),
    ] = False,
    aoti: Annotated[
        bool,
        typer.Option(
            "--aoti",
            help="Add what --torch does, and both programs compiled by AOTInductor, for Python and C++ on this "
            "processor.",
        ),
    ] = False,
    triton: Annotated[
        bool,
        typer.Option(
            "--triton", help="Make the folder a model of NVIDIA Triton's Python backend, version 1."
        ),
    ] = False,
    hub: Annotated[
        bool,
        typer.Option(
            "--hub", help="Add README.md, a model card with the run's metrics, and config.json."
        ),
    ] = False,
) -> None:
    """Write weights as safetensors: dense.safetensors, one file of ids and rows per table, model.json."""
    from colonnade.checkpoint.header import explain_chosen_step
    from colonnade.publish.model_files import read_export

    if torch or aoti or triton or hub:
        from colonnade.export import export_model

        weights = export_model(
            run, destination, at=at, torch=torch, aoti=aoti, triton=triton, hub=hub
        )
    else:
        from colonnade.publish.model_writer import export_run

        export_run(run, destination, at=at)
        weights = destination
    exported = read_export(weights)
    rows = sum(table.count for table in exported.tables)
    size = sum(path.stat().st_size for path in destination.rglob("*") if path.is_file())
    print_text(
        f"step {exported.step} ({explain_chosen_step(run, exported.step)}): "
        f"{len(exported.tables)} tables, {rows:,} trained rows, {format_bytes(size)}\nexport: {destination}"
    )
    if triton:
        print_text(f"serve it: tritonserver --model-repository {destination.absolute().parent}")
