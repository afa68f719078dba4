"""`colonnade towers`: partition a run's features into towers, from its trained embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.cli.settings import check_part
from colonnade.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from colonnade.cli.feature_sample import FeatureSample
    from colonnade.plan.towers.affinity import AffinityKind
    from colonnade.plan.towers.partition import Capacity, TowerMap

EXAMPLES = (
    "The affinity of two features is how far the effects of both on the model's logit are not the sum of each one's "
    "(interactions), or the mean |cosine| of their pooled vectors (cosine). Coherent towers group features of high "
    "affinity, diverse towers features of low affinity. The map is written to the run folder (towers.json), and "
    "colonnade report draws it.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade towers runs/mine --towers 4\n\n"
    "  colonnade towers runs/mine --towers 4 --capacity bytes=1.5 --capacity lookups=1.2 --out partition.json"
)


def towers(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    num: Annotated[
        int, typer.Option("--towers", min=1, help="Number of towers: usually one per host.")
    ],
    distance: Annotated[
        str, typer.Option(help="coherent: similar features together; diverse: dissimilar ones.")
    ] = "coherent",
    affinity: Annotated[
        str,
        typer.Option(
            help="interactions: of two features in the model's logit; cosine: of their pooled vectors."
        ),
    ] = "interactions",
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="Bound on a tower's count, bytes or lookups, relative to the mean, e.g. bytes=1.5; none: no bound. "
            "Repeatable; default: count=1."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write the partition to as well, for model.towers.")
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, help="Number of batches of the run's data to measure with.")
    ] = 8,
    part: Annotated[
        str, typer.Option(help="Part of the data to measure with: train, validation or test.")
    ] = "train",
    at: Annotated[str | None, typer.Option(help="Saved step, best or last.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clustering.")] = 0,
) -> None:
    """Group a run's features into towers, compared with striped and random ones."""
    from colonnade.files.disk import Disk
    from colonnade.files.durable import write_durably
    from colonnade.plan.towers.affinity import AFFINITIES, DISTANCES
    from colonnade.plan.towers.partition import build_tower_map
    from colonnade.report.tower_map import FILE_NAME

    if distance not in DISTANCES:
        raise ConfigError(f"unknown distance {distance!r}; choose from {', '.join(DISTANCES)}")
    if affinity not in AFFINITIES:
        raise ConfigError(f"unknown affinity {affinity!r}; choose from {', '.join(AFFINITIES)}")
    check_part(part)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; create it first")
    bounds = parse_tower_capacity(capacity or [])
    sample, step = _measure_run(run, at, part, batches, affinity)
    chosen_map = build_tower_map(
        sample.affinity,
        sample.loads,
        num,
        distance=distance,
        capacity=bounds,
        silent=sample.silent,
        halves=sample.halves,
        seed=seed,
    )
    made = {"step": step, "samples": sample.num_samples}
    chosen_map = replace(chosen_map, affinity=affinity, made=made)
    write_durably(Disk(), run / FILE_NAME, chosen_map.to_json().encode(), checked=False)
    if out is not None:
        write_durably(Disk(), out, chosen_map.partition.to_json().encode(), checked=False)
    _print_towers(run, chosen_map, out)


def _measure_run(
    run: Path, at: str | None, part: str, batches: int, affinity: AffinityKind
) -> tuple[FeatureSample, int]:
    """Measure the affinities of a run's features, and return the step of the checkpoint that was read, too."""
    from colonnade.cli.feature_sample import measure_affinity
    from colonnade.comm.mesh import Mesh
    from colonnade.run.run import load_run_config, open_run

    config = load_run_config(run)
    opened = open_run(config, Mesh(), run, read_only=True, at=at)
    try:
        if opened.resumed_at is None:
            raise CheckpointError(f"{run} has no checkpoint yet; train it first")
        source = getattr(opened.trainer.data, part)
        if source is None:
            raise ConfigError(f"this data set has no {part} part; choose another with --part")
        sample = measure_affinity(
            opened.trainer.model,
            opened.trainer.collection,
            source,
            config.train.samples_per_step,
            batches,
            kind=affinity,
        )
    finally:
        opened.close()
    return sample, opened.resumed_at


def parse_tower_capacity(settings: Sequence[str]) -> Capacity:
    """Parse the bounds of `--capacity`: ["bytes=1.5", ...]. Raises ConfigError."""
    from colonnade.plan.towers.partition import MEASURES, Capacity

    bounds: dict[str, float | None] = {}
    for setting in settings:
        name, _, ratio = setting.partition("=")
        if name not in MEASURES:
            raise ConfigError(
                f"--capacity: got {setting!r}, wanted one of {', '.join(MEASURES)} and a ratio, such as bytes=1.5"
            )
        try:
            bounds[name] = None if ratio == "none" else float(ratio)
        except ValueError:
            raise ConfigError(
                f"--capacity {name}: got {ratio!r}, wanted a ratio to the mean of the towers, such as {name}=1.5"
            ) from None
    return Capacity(**bounds)


def _print_towers(run: Path, towers: TowerMap, out: Path | None) -> None:
    from colonnade.report import tower_map as report
    from colonnade.terminal import Terminal, build_grid

    console = Terminal()
    console.print(
        f"{run}, step {towers.made['step']:,}: {towers.distance} towers from {towers.made['samples']:,} samples",
        markup=False,
    )
    loads = zip(report.format_load_lines(towers), towers.partition.towers, strict=True)
    columns = (*report.LOAD_COLUMNS, "features")
    rows = [(*line, " ".join(features)) for line, features in loads]
    console.print(build_grid(columns, rows, text_columns=(0, len(columns) - 1)))
    title = f"{report.describe_affinity(towers)} of two features"
    lines = report.format_affinity_lines(towers)
    console.print(build_grid(report.AFFINITY_COLUMNS, lines, title=title, title_justify="left"))
    for line in report.list_doubts(towers):
        console.print(line, style="yellow", markup=False)
    console.print(f"towers: {run / report.FILE_NAME}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"partition: {out}", markup=False, soft_wrap=True)
    console.print(f"open its page: colonnade report {run}", markup=False, soft_wrap=True)
