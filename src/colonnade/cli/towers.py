"""`colonnade towers`: which features are to stand together in a tower, from what a run has learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colonnade.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from colonnade.plan.towers.partition import Capacity, TowerMap

EXAMPLES = (
    "The mean |cosine| of pooled vectors says how alike features are. Coherent towers have alike features, diverse "
    "ones unlike features. The map is written into the run folder (towers.json), and colonnade report draws it.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade towers runs/mine --towers 4\n\n"
    "  colonnade towers runs/mine --towers 4 --capacity bytes=1.5 --capacity lookups=1.2 --out partition.json\n\n"
    "  colonnade towers runs/mine --predict 8x8 --predict 64x8 --uplink 3200Gbit --local 450GB/s --latency 10"
)


def towers(
    run: Annotated[Path, typer.Argument(help="Run folder with at least one checkpoint.")],
    num: Annotated[
        int | None, typer.Option("--towers", min=1, help="How many: as a rule one for each host.")
    ] = None,
    distance: Annotated[
        str, typer.Option(help="coherent: alike features together; diverse: unlike ones.")
    ] = "coherent",
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="count, bytes or lookups of a tower over the mean of all, e.g. bytes=1.5; none: no bound. "
            "Repeatable; default: count=1."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the partition alone here, too, for a plan.")
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, help="Batches of the run's data to probe with.")
    ] = 8,
    part: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    at: Annotated[str | None, typer.Option(help="best, last or a saved step.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the clustering's starts.")] = 0,
    predict: Annotated[
        list[str] | None,
        typer.Option(help="Foretell the exchange in such a world, HOSTSxRANKS. Repeatable."),
    ] = None,
    uplink: Annotated[
        str | None, typer.Option(help="Of --predict: what a host's link carries, e.g. 10Gbit.")
    ] = None,
    local: Annotated[
        str | None, typer.Option(help="Of --predict: a rank's from its host, e.g. 5GB/s.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, help="Of --predict: microseconds of a message.")
    ] = None,
    compute: Annotated[
        float,
        typer.Option(min=0, help="Of --predict: milliseconds of a step besides the exchange."),
    ] = 0.0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Of --predict: samples of a rank; default: the run's batch size."),
    ] = None,
) -> None:
    """Group a run's features into towers, beside striped and random ones; or foretell what towers would save."""
    if num is None and not predict:
        raise ConfigError(
            "got neither --towers nor --predict, wanted --towers N, or a world to foretell"
        )
    if num is not None:
        _partition(run, num, distance, capacity or [], out, batches, part, at, seed)
    elif out is not None:
        raise ConfigError("--out: got a file for a partition without --towers; say how many towers")
    if predict:
        _predict(run, predict, uplink, local, latency, compute * 1e-3, batch_size)


def _partition(
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
    from colonnade.cli.feature_sample import probe
    from colonnade.comm.mesh import Mesh
    from colonnade.plan.towers.affinity import DISTANCES
    from colonnade.plan.towers.partition import tower_map
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
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    room = parse_capacity(capacity)
    config = load_run_config(run)
    opened = open_run(config, Mesh(), run, read_only=True, at=at)
    try:
        if opened.resumed_at is None:
            raise CheckpointError(f"{run} holds no checkpoint yet; train it first")
        source = getattr(opened.trainer.data, part)
        if source is None:
            raise ConfigError(f"this data set has no {part} part; choose another with --part")
        collection = opened.trainer.collection
        affinity, loads = probe(collection, source, config.train.samples_per_step, batches)
    finally:
        opened.close()
    found = tower_map(
        affinity.matrix(),
        loads,
        num,
        distance=distance,
        capacity=room,
        silent=affinity.silent,
        made={"step": opened.resumed_at, "samples": affinity.num_samples},
        seed=seed,
    )
    write_durably(Disk(), run / FILE_NAME, found.to_json().encode(), checked=False)
    if out is not None:
        write_durably(Disk(), out, found.partition.to_json().encode(), checked=False)
    _show(run, found, out)


def parse_capacity(said: Sequence[str]) -> Capacity:
    """["bytes=1.5", ...]. Raises ConfigError."""
    from colonnade.plan.towers.partition import MEASURES, Capacity

    given: dict[str, float | None] = {}
    for each in said:
        name, _, ratio = each.partition("=")
        if name not in MEASURES:
            raise ConfigError(
                f"--capacity: got {each!r}, wanted one of {', '.join(MEASURES)} and a ratio, such as bytes=1.5"
            )
        try:
            given[name] = None if ratio == "none" else float(ratio)
        except ValueError:
            raise ConfigError(
                f"--capacity {name}: got {ratio!r}, wanted a tower's share over the mean, such as {name}=1.5"
            ) from None
    return Capacity(**given)


def _show(run: Path, found: TowerMap, out: Path | None) -> None:
    from rich.table import Table as Grid

    from colonnade.report import tower_map as report
    from colonnade.terminal import Terminal

    console = Terminal()
    console.print(
        f"{run}, step {found.made['step']:,}: {found.distance} towers from {found.made['samples']:,} samples",
        markup=False,
    )
    grid = Grid()
    for name in (*report.LOAD_COLUMNS, "which"):
        grid.add_column(
            name, justify="left" if name in ("tower", "which") else "right", overflow="fold"
        )
    for line, features in zip(report.load_lines(found), found.partition.towers, strict=True):
        grid.add_row(*line, " ".join(features))
    console.print(grid)
    grid = Grid(title="mean |cosine| of two features", title_justify="left")
    for name in report.AFFINITY_COLUMNS:
        grid.add_column(name, justify="left" if name == "towers" else "right")
    for line in report.affinity_lines(found):
        grid.add_row(*line)
    console.print(grid)
    if found.silent:
        console.print(
            f"no vector in any sample, so like no other: {', '.join(found.silent)}", markup=False
        )
    console.print(f"towers: {run / report.FILE_NAME}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"partition: {out}", markup=False, soft_wrap=True)
    console.print(f"open its page: colonnade report {run}", markup=False, soft_wrap=True)


def _predict(
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
    from colonnade.plan.measure.links import planned_world
    from colonnade.plan.towers.forecast import PAPER, RATIOS, forecast
    from colonnade.report.words import seconds_words
    from colonnade.run.run import load_run_config
    from colonnade.terminal import Terminal

    seconds = None if latency is None else latency * 1e-6
    worlds = [planned_world(each, uplink=uplink, local=local, latency=seconds) for each in shapes]
    steps = list_checkpoints(run)
    if not steps:
        raise CheckpointError(f"{run} holds no checkpoint yet; train it first")
    model = read_header(run, max(steps))["model"]
    tables, features = model["tables"], model["features"]
    widths = {name: each["dim"] for name, each in tables.items()}
    floats = sum(_width(widths[table]) for table, _ in features.values())
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
        said = forecast(world, num_tables=len(tables), floats=floats, samples=samples)
        cells = [
            f"{seconds_words(each)} ({(compute + said.flat) / (compute + each):.2f}x)"
            for each in (said.towers, *said.modules.values())
        ]
        shape = f"{world.num_hosts}x{world.ranks_per_host}"
        grid.add_row(shape, str(said.num_towers), seconds_words(said.flat), *cells)
    console.print(grid)
    console.print(str(worlds[0]).split("; ", 1)[-1], markup=False)
    of = f"a step that computes {seconds_words(compute)}" if compute else "the exchange alone"
    console.print(
        f"A prediction: by a formula of the links, measured by nobody. In brackets: how much faster than flat, of {of}."
        f" Published: {PAPER}.",
        markup=False,
    )


def _width(dim: int | dict[str, int]) -> int:
    return sum(dim.values()) if isinstance(dim, dict) else dim
