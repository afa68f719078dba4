"""`colonnade plan`: which rows get the memory, who owns them, what travels, and how fast that will train."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.config.run import RunConfig
    from colonnade.run.planning import Planned
    from colonnade.table import Table
    from colonnade.topology.world import World

HOST = "480GiB:8TiB"
"""What --simulate takes a host to have."""

EXAMPLES = (
    "A sample of the data says how often rows are used; the disk and the model are timed; each table gets the memory "
    "that saves most reads. For several ranks each table gets the sharding and exchange that cost least on the links: "
    "those of --world, --uplink and --local, or under torchrun as measured. [bold]colonnade train[/bold] does the same "
    "with --set plan.placement=profiled and auto for plan.exchange, plan.sharding; it says what came of "
    "the prediction.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade plan --data synthetic --dram 16MiB\n\n"
    "  colonnade plan mine.yaml --dram 8GiB --set plan.memory.ssd=/fast:200GiB --target 100000\n\n"
    "  colonnade plan mine.yaml --world 4x2 --uplink 10Gbit --table item\n\n"
    "  torchrun --nproc-per-node 2 -m -- colonnade plan mine.yaml\n\n"
    "  colonnade plan mine.yaml --dram 64MiB --simulate 100e12 --host 480GiB:8TiB --world 1x16 --uplink 100Gbit\n\n"
    "  colonnade plan mine.yaml --dram 8GiB --json > plan.json"
)


RunOption = Annotated[
    Path, typer.Option(help="Where the run folder is to lie: whose disk rows rest on by default.")
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes of one machine that the plan is for, default 1; or --world."
    ),
]
WorldOption = Annotated[
    str | None,
    typer.Option(help="Hosts and ranks that the plan is for, e.g. 4x2; under torchrun: its."),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        help=f"With --simulate: memory for rows of each host, or MEMORY:SSD. Default: {HOST}."
    ),
]


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file with sections data, model, rows, dense, plan, train."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data set, with settings that suit it; as of train.")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="File or folder of the data; default: its folder in $COLONNADE_DATA."),
    ] = None,
    run: RunOption = Path("runs"),
    ranks: RanksOption = None,
    world: WorldOption = None,
    uplink: Annotated[
        str | None, typer.Option(help="What a host's link to others carries, e.g. 10Gbit.")
    ] = None,
    local: Annotated[
        str | None, typer.Option(help="What a rank gets from others of its host, e.g. 5GB/s.")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Show every choice that this table has.")
    ] = None,
    dram: Annotated[
        str | None, typer.Option(help="Memory for rows on each rank, e.g. 2GiB: plan.memory.dram.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(min=1.0, help="Samples/s to say bytes per second for; default: as foretold."),
    ] = None,
    simulate: Annotated[
        float | None,
        typer.Option(min=1.0, help="Parameters: hosts and seconds for so many, as a simulation."),
    ] = None,
    host: HostOption = None,
    sample: Annotated[int, typer.Option(min=1, help="Lookups of the sample that is profiled.")] = 1
    << 20,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, as of train. Repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print plan, prediction and measurements as JSON.")
    ] = False,
) -> None:
    """Profile a sample, measure tiers and links, choose where rows lie and what travels, predict. Writes nothing."""
    from colonnade.cli.plan_tables import show
    from colonnade.cli.train import choose_config
    from colonnade.config.run import override
    from colonnade.run.run import plan_run

    if simulate is None and host is not None:
        raise ConfigError(
            f"--host: got {host} without --simulate, which alone has other hosts than this one; say how many "
            "parameters, e.g. --simulate 100e12, or leave it out"
        )
    topology = _world(world, ranks, uplink, local)
    if topology is None:  # another rank says it
        return
    is_one_host = topology.num_hosts == 1 and topology.origin == "planned"
    if simulate is None and uplink is not None and is_one_host:
        raise ConfigError(
            f"--uplink: got {uplink} for one host, which sends nothing over it; say how many, e.g. --world 2x1"
        )
    chosen = override(
        choose_config(config, data, path, {"plan.memory.dram": dram}, set_),
        _left_open(config, set_),
    )
    if simulate is not None:
        if table is not None:
            raise ConfigError(
                "--table: got a table beside --simulate, which has no choices to show; leave one of them out"
            )
        _simulate(chosen, run, topology, simulate, host or HOST, sample, as_json)
        return
    choice, tables = plan_run(chosen, run, topology, lookups=sample, table=table)
    if as_json:
        print(json.dumps(as_values(choice, tables), indent=2))
    else:
        show(choice, tables, target, table)


def _simulate(
    config: RunConfig,
    run: Path,
    world: World,
    parameters: float,
    host: str,
    sample: int,
    as_json: bool,
) -> None:
    """Print hosts and seconds for a model of so many parameters, from what this machine measures of a smaller one."""
    from colonnade.cli.plan_tables import as_values, room_of, show_simulation, simulated
    from colonnade.plan.measure.links import planned_world
    from colonnade.run.run import plan_run

    room = room_of(host, parameters)  # refused before anything is measured
    planned, tables = plan_run(config, run, planned_world("1"), lookups=sample)
    batch_size = config.train.samples_per_step
    work, cases = simulated(planned, tables, batch_size, parameters, room, world)
    if as_json:
        print(json.dumps(as_values(parameters, work, cases), indent=2))
    else:
        show_simulation(parameters, batch_size, work, cases)


def _world(
    shape: str | None, ranks: int | None, uplink: str | None, local: str | None
) -> World | None:
    """Under torchrun the running world with its links measured, None on all ranks but 0; else as it is said to be."""
    from colonnade.comm.process_groups import close_mesh, open_mesh
    from colonnade.plan.measure.links import measure_links, planned_world

    said = {"--world": shape, "--ranks": ranks, "--uplink": uplink, "--local": local}
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if shape is not None and ranks is not None:
            raise ConfigError(
                f"got --ranks {ranks} beside --world {shape}, which says how many there are; leave one of them out"
            )
        return planned_world(shape or str(ranks or 1), uplink=uplink, local=local)
    if given := [name for name, value in said.items() if value is not None]:
        raise ConfigError(
            f"got {', '.join(given)} in a world that runs, whose links are measured; leave it out, or plan without "
            "torchrun"
        )
    mesh = open_mesh(verb="plan")
    found = measure_links(mesh)
    close_mesh(mesh)
    return found if mesh.rank == 0 else None


def _left_open(config: Path | None, set_: list[str] | None) -> dict[str, str]:
    """Return `auto` for the shardings and exchanges that the user left out, which this command is to choose; nothing
    beside `plan.cache`, whose cached rows need the exchange rows and whole rows."""
    from colonnade.cli.train import parse_settings
    from colonnade.formats import parse_yaml, read_text

    said: dict[str, Any] = {}
    if config is not None:
        values = parse_yaml(read_text(config))
        said |= {f"plan.{name}": each for name, each in ((values or {}).get("plan") or {}).items()}
    said |= parse_settings(set_ or [])
    if said.keys() & {"plan.exchange", "plan.sharding"}:
        return {}
    of_copies = [said[name] for name in said if f"{name}.".startswith("plan.cache.")]
    if any(each is not None for each in of_copies):
        return {}
    return {"plan.exchange": "auto", "plan.sharding": "auto"}


def as_values(found: Planned, tables: Sequence[Table]) -> dict[str, Any]:
    """Plain values: the plan with its prediction, what it cost, what machine and links do, what else there was; and
    what of it the prediction leaves out, in words."""
    from dataclasses import asdict

    from colonnade.cli.plan_tables import NO_COPIES, copies_bytes

    copies = copies_bytes(found, tables)

    def cost(each: Any) -> dict[str, Any]:
        return {
            "exchange": each.exchange,
            "sharding": asdict(each.sharding),
            "sent": {f"{channel} {link}": size for (channel, link), size in each.sent.items()},
            "seconds": each.seconds,
            "more_seconds": each.more,
        }

    return {
        "plan": json.loads(found.plan.to_json()),
        "costs": asdict(found.costs),
        "device": asdict(found.device),
        "world": asdict(found.world),
        "choices": {
            each.name: [cost(each.chosen), *map(cost, each.others)] for each in found.choice.tables
        },
        "consumers": [asdict(each) for each in found.choice.consumers],
        "tower_modules": [asdict(each) for each in found.advice],
        "cache_bytes": copies,
        "left_out": [NO_COPIES] if copies else [],
        "sample": {"samples": found.profile.samples, "batches": found.profile.batches},
    }
