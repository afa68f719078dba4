"""`colonnade towers`: partition a run's features into towers, from its trained embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from colonnade.plan.towers.partition import Capacity, TowerMap

EXAMPLES = (
    "The affinity of two features is the mean |cosine| of their pooled vectors. Coherent towers group features of high "
    "affinity, diverse towers features of low affinity. The map is written to the run folder (towers.json), and "
    "colonnade report draws it.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade towers runs/mine --towers 4\n\n"
    "  colonnade towers runs/mine --towers 4 --capacity bytes=1.5 --capacity lookups=1.2 --out partition.json\n\n"
    "  colonnade towers runs/mine --predict 8x8 --predict 64x8 --uplink 3200Gbit --local 450GB/s --latency 10"
)


def towers(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    num: Annotated[
        int | None, typer.Option("--towers", min=1, help="Number of towers: usually one per host.")
    ] = None,
    distance: Annotated[
        str, typer.Option(help="coherent: similar features together; diverse: dissimilar ones.")
    ] = "coherent",
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
    predict: Annotated[
        list[str] | None,
        typer.Option(
            help="Predict the time of the exchange in this world, HOSTSxRANKS. Repeatable."
        ),
    ] = None,
    uplink: Annotated[
        str | None, typer.Option(help="For --predict: bandwidth of a host's link, e.g. 10Gbit.")
    ] = None,
    local: Annotated[
        str | None,
        typer.Option(help="For --predict: bandwidth between ranks of a host, e.g. 5GB/s."),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(min=0, help="For --predict: latency of a message in microseconds."),
    ] = None,
    compute: Annotated[
        float,
        typer.Option(min=0, help="For --predict: milliseconds of a step without the exchange."),
    ] = 0.0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="For --predict: samples per rank; default: the run's batch size."),
    ] = None,
) -> None:
    """Group a run's features into towers, or predict the savings of towers.

    The towers are compared with striped and random ones."""
    if num is None and not predict:
        raise ConfigError(
            "got neither --towers nor --predict, wanted --towers N, or --predict HOSTSxRANKS"
        )
    if num is not None:
        _write_partition(run, num, distance, capacity or [], out, batches, part, at, seed)
    elif out is not None:
        raise ConfigError("--out: got a file for a partition without --towers; give --towers N too")
    if predict:
        _print_prediction(run, predict, uplink, local, latency, compute * 1e-3, batch_size)


def _write_partition(
    run: Path,
    num: int,
    distance: str,
    capacity: Sequence[str],
    out: Path | None,
    batches: int,
    part: str,
    at: str | None,
    seed: int,
) -> None:
    from colonnade.cli.feature_sample import measure_affinity
    from colonnade.comm.mesh import Mesh
    from colonnade.plan.towers.affinity import DISTANCES
    from colonnade.plan.towers.partition import build_tower_map
    from colonnade.report.tower_map import FILE_NAME
    from colonnade.run.run import load_run_config, open_run
    from colonnade.store.disk import Disk
    from colonnade.store.durable import write_durably

    if distance not in DISTANCES:
        raise ConfigError(f"unknown distance {distance!r}; choose from {', '.join(DISTANCES)}")
    parts = ("train", "validation", "test")
    if part not in parts:
        raise ConfigError(f"unknown part {part!r}; choose from {', '.join(parts)}")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; create it first")
    bounds = parse_tower_capacity(capacity)
    config = load_run_config(run)
    opened = open_run(config, Mesh(), run, read_only=True, at=at)
    try:
        if opened.resumed_at is None:
            raise CheckpointError(f"{run} has no checkpoint yet; train it first")
        source = getattr(opened.trainer.data, part)
        if source is None:
            raise ConfigError(f"this data set has no {part} part; choose another with --part")
        collection = opened.trainer.collection
        affinity, loads = measure_affinity(
            collection, source, config.train.samples_per_step, batches
        )
    finally:
        opened.close()
    chosen_map = build_tower_map(
        affinity.matrix(),
        loads,
        num,
        distance=distance,
        capacity=bounds,
        silent=affinity.silent,
        made={"step": opened.resumed_at, "samples": affinity.num_samples},
        seed=seed,
    )
    write_durably(Disk(), run / FILE_NAME, chosen_map.to_json().encode(), checked=False)
    if out is not None:
        write_durably(Disk(), out, chosen_map.partition.to_json().encode(), checked=False)
    _print_towers(run, chosen_map, out)


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
    from rich.table import Table as Grid

    from colonnade.report import tower_map as report
    from colonnade.terminal import Terminal

    console = Terminal()
    console.print(
        f"{run}, step {towers.made['step']:,}: {towers.distance} towers from {towers.made['samples']:,} samples",
        markup=False,
    )
    grid = Grid()
    for name in (*report.LOAD_COLUMNS, "features"):
        grid.add_column(
            name, justify="left" if name in ("tower", "features") else "right", overflow="fold"
        )
    for line, features in zip(
        report.format_load_lines(towers), towers.partition.towers, strict=True
    ):
        grid.add_row(*line, " ".join(features))
    console.print(grid)
    grid = Grid(title="mean |cosine| of two features", title_justify="left")
    for name in report.AFFINITY_COLUMNS:
        grid.add_column(name, justify="left" if name == "towers" else "right")
    for line in report.format_affinity_lines(towers):
        grid.add_row(*line)
    console.print(grid)
    if towers.silent:
        console.print(
            f"no vector in any sample, so without affinity: {', '.join(towers.silent)}",
            markup=False,
        )
    console.print(f"towers: {run / report.FILE_NAME}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"partition: {out}", markup=False, soft_wrap=True)
    console.print(f"open its page: colonnade report {run}", markup=False, soft_wrap=True)


def _print_prediction(
    run: Path,
    shapes: Sequence[str],
    uplink: str | None,
    local: str | None,
    latency: float | None,
    compute: float,
    batch_size: int | None,
) -> None:
    from rich.table import Table as Grid

    from colonnade.checkpoint.header import list_checkpoints, read_header
    from colonnade.plan.measure.links import build_planned_world
    from colonnade.plan.towers.forecast import PAPER, RATIOS, forecast_exchange_seconds
    from colonnade.report.formatting import format_seconds
    from colonnade.run.run import load_run_config
    from colonnade.terminal import Terminal

    seconds = None if latency is None else latency * 1e-6
    worlds = [
        build_planned_world(shape, uplink=uplink, local=local, latency=seconds) for shape in shapes
    ]
    steps = list_checkpoints(run)
    if not steps:
        raise CheckpointError(f"{run} has no checkpoint yet; train it first")
    model = read_header(run, max(steps))["model"]
    tables, features = model["tables"], model["features"]
    widths = {name: table["dim"] for name, table in tables.items()}
    floats = sum(_total_width(widths[table]) for table, _ in features.values())
    samples = batch_size or load_run_config(run).train.samples_per_step
    console = Terminal()
    grid = Grid(
        title=f"prediction: exchange of a step, {len(features)} features, {floats:,} floats a sample, {samples:,} "
        "samples a rank",
        title_justify="left",
    )
    for name in ("world", "towers", "flat", "SPTT", *(f"modules, {r}x less" for r in RATIOS)):
        grid.add_column(name, justify="right")
    for world in worlds:
        prediction = forecast_exchange_seconds(
            world, num_tables=len(tables), floats=floats, samples=samples
        )
        cells = [
            f"{format_seconds(time)} ({(compute + prediction.flat) / (compute + time):.2f}x)"
            for time in (prediction.towers, *prediction.modules.values())
        ]
        shape = f"{world.num_hosts}x{world.ranks_per_host}"
        grid.add_row(shape, str(prediction.num_towers), format_seconds(prediction.flat), *cells)
    console.print(grid)
    console.print(str(worlds[0]).split("; ", 1)[-1], markup=False)
    scope = f"a step that computes {format_seconds(compute)}" if compute else "the exchange alone"
    console.print(
        f"A prediction by a formula of the links, not a measurement. In brackets: speedup over flat, for {scope}."
        f" Published: {PAPER}.",
        markup=False,
    )


def _total_width(dim: int | dict[str, int]) -> int:
    return sum(dim.values()) if isinstance(dim, dict) else dim
