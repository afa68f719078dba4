"""`colonnade evaluate`: compute metrics of a run's best checkpoint, or of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colonnade.cli.predict import AtOption
from colonnade.cli.settings import PARTS, check_part
from colonnade.errors import ConfigError, DataError

EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade evaluate runs/mine\n\n"
    "  colonnade evaluate runs/mine --at 2000 --part validation\n\n"
    "  colonnade evaluate runs/mine --ranked-negatives 99"
)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    at: AtOption = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="train, validation or test; default: test if the data has one, else validation."
        ),
    ] = None,
    ranked_negatives: Annotated[
        str | None,
        typer.Option(
            help="Items among which held-out items are ranked: all, a number of drawn ones, or those of a file. "
            "Default: data.options.ranked_negatives of the run."
        ),
    ] = None,
) -> None:
    """Compute the metrics of a checkpoint: AUC and log loss, or the model's own.

    The checkpoint may come from any number of ranks. The folder is not changed."""
    from colonnade.checkpoint.header import explain_chosen_step, resolve_step
    from colonnade.cli.table import describe_popularity, show_types
    from colonnade.comm.mesh import Mesh
    from colonnade.data.interactions.negatives import replace_negatives
    from colonnade.models.retriever import POPULARITY
    from colonnade.report.formatting import format_metric
    from colonnade.run.run import load_run_config, open_run
    from colonnade.terminal import Terminal

    if part is not None:
        check_part(part)
    config = load_run_config(run)
    step = resolve_step(run, at)
    opened = open_run(config, Mesh(), run, read_only=True, at=step)
    try:
        splits = opened.trainer.data
        present = [name for name in PARTS if getattr(splits, name) is not None]
        part = part or next((name for name in ("test", "validation") if name in present), None)
        if part is None:
            if check_source := getattr(opened.trainer.objective, "check_source", None):
                check_source(splits.train)  # a test part would be of no use to this model
            raise ConfigError(
                "this data set has no test or validation part; give --part train, or train with "
                "--set data.options.test_fraction=0.1"
            )
        if part not in present:
            raise ConfigError(
                f"this data set has no {part} part; choose from {', '.join(present)} with --part"
            )
        source = getattr(splits, part)
        if ranked_negatives is not None:
            source = replace_negatives(source, ranked_negatives)
        metrics = opened.trainer.evaluate(source)
    finally:
        opened.close()
    if not metrics["num_samples"]:
        raise DataError(
            f"got no samples in the {part} part, wanted some; choose another with --part"
        )
    console = Terminal()
    console.print(f"{run}, step {step} ({explain_chosen_step(run, step)}), {part}:")
    if ranking := getattr(source, "ranking", ""):
        console.print(f"  {ranking}", highlight=False)
    for name, value in metrics.items():
        if not name.startswith(POPULARITY):
            beside = describe_popularity(metrics.get(f"{POPULARITY}{name}"))
            console.print(f"  {name.replace('_', ' ')}: {format_metric(name, value)}{beside}")
    if by_type := getattr(metrics, "by_type", {}):
        show_types(console, by_type)
