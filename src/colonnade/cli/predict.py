"""`colonnade predict`: score files with a trained model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.errors import ConfigError
from colonnade.terminal import Terminal, print_text

if TYPE_CHECKING:
    from rich.progress import Progress


EXAMPLES = (
    "Scores are probabilities, one column per label, or mean and sd of ratings, in the order of the input. The output "
    "file appears when it is "
    "complete. The first time, a run folder's checkpoint is exported to RUN/serving; rows are then read in place.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade predict runs/mine --path tomorrow.txt --output scores.parquet\n\n"
    "  colonnade predict served --part test --output scores.csv\n\n"
    "  colonnade predict runs/mine --at best --path new.tsv --output scores.tsv --batch-size 16384"
)


AtOption = Annotated[
    str | None,
    typer.Option(
        help="Saved step, best or last; default: best if there is a validation part, else last."
    ),
]


def predict(
    model: Annotated[
        Path, typer.Argument(help="Run folder, or a folder that `colonnade export` wrote.")
    ],
    output: Annotated[
        Path,
        typer.Option(help="File for the scores; its suffix is its format: .parquet, .csv, .tsv."),
    ],
    path: Annotated[
        str | None,
        typer.Option(help="File or folder to score, every sample in order; labels may be missing."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Score only this part of the model's data (or of --path): train, validation or test."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Reader of --path; default: the reader that the model was trained with."),
    ] = None,
    at: AtOption = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples scored at a time; default: the batch size of training."),
    ] = None,
) -> None:
    """Score files with a trained model.

    Scores equal those of evaluating the same checkpoint, bit for bit. Rows are mapped read-only."""
    from colonnade.checkpoint.header import explain_chosen_step
    from colonnade.cli.score_files import ScoreFile
    from colonnade.cli.score_inputs import open_inputs
    from colonnade.data.tabular.formats import FORMATS
    from colonnade.predict import Predictor
    from colonnade.train.objective import get_objective

    if path is None and part is None:
        raise ConfigError(
            "nothing to score: give --path FILE, or --part (train, validation or test) for the model's own data"
        )
    console = Terminal(stderr=True)
    is_run = (model / "checkpoints").is_dir()
    with Predictor.open(model, at=at) as predictor:
        config = predictor.config
        assert config is not None  # since the model could be built
        share_schema = data in FORMATS and config.data.name in FORMATS
        source = open_inputs(
            data or config.data.name,
            config.data.path if path is None else path,
            config.data.options if data in (None, config.data.name) or share_schema else {},
            part=part,
            training=config.data,
        )
        size = batch_size or config.train.samples_per_step
        progress = _create_progress_bar(console)
        started = time.perf_counter()
        names = getattr(get_objective(predictor.model), "outputs", ())
        with ScoreFile(output, predictor.labels, names) as file, progress:
            task = progress.add_task("score", total=source.num_samples)
            for batch, scores in predictor.scores(source.batches(size)):
                file.add(batch, scores)
                progress.update(task, completed=file.num_samples)
        seconds = time.perf_counter() - started
        choice = f" ({explain_chosen_step(model, predictor.step)})" if is_run else ""
        print_text(
            f"step {predictor.step}{choice}: {file.num_samples:,} samples scored, "
            f"{file.num_samples / max(seconds, 1e-9):,.0f} samples/s\nscores: {output}"
        )


def _create_progress_bar(console: Terminal) -> Progress:
    """Create a progress bar of scored samples; it is hidden where output is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("score"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
