"""`colonnade plan`: choose memory, owners and exchanges for the rows, and predict the speed of training."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.config.run import RunConfig
    from colonnade.planning.planner import PlanningResult
    from colonnade.table import Table
    from colonnade.topology.world import World

EXAMPLES = (
    "The command writes nothing. It counts row uses in a sample of the data, times the disk and the model, and gives "
    "each table the memory that saves most reads. For several ranks each table gets the sharding and exchange that "
    "cost least on the links: those of --world, --uplink and --local, or, under torchrun, as measured. "
    "[bold]colonnade train[/bold] gives memory in the same way; with auto for plan.lookahead, plan.exchange or "
    "plan.sharding it also measures, and at the end compares the prediction with what it measured.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade plan --data synthetic --dram 16MiB\n\n"
    "  colonnade plan mine.yaml --dram 8GiB --set plan.memory.ssd=/fast:200GiB --target 100000\n\n"
    "  colonnade plan mine.yaml --world 4x2 --uplink 10Gbit --table item\n\n"
    "  torchrun --nproc-per-node 2 -m -- colonnade plan mine.yaml\n\n"
    "  colonnade plan mine.yaml --advise --uplink 1Gbit --hosts-up-to 16\n\n"
    "  colonnade plan mine.yaml --dram 8GiB --json > plan.json"
)


RunOption = Annotated[
    Path, typer.Option(help="Run folder, or a folder on its disk, which stores rows by default.")
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of processes, on one machine; default 1. For several machines: --world."
    ),
]
WorldOption = Annotated[
    str | None,
    typer.Option(help="Hosts x ranks per host, e.g. 4x2; under torchrun: leave it out."),
]
AdviseOption = Annotated[
    bool,
    typer.Option(
        "--advise", help="Predict more and fewer hosts, and advise ranks, servers and batch."
    ),
]
EfficiencyOption = Annotated[
    float | None,
    typer.Option(help="With --advise: smallest speed-up per rank that is worthwhile; default 0.8."),
]
HostsOption = Annotated[
    int | None, typer.Option(help="With --advise: largest number of hosts to predict; default 64.")
]


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file with sections data, model, embedding, dense, plan, train."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data set, with its preset of settings; as in train.")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="File or folder of the data; default: its folder in $COLONNADE_DATA."),
    ] = None,
    run: RunOption = Path("runs"),
    ranks: RanksOption = None,
    world: WorldOption = None,
    uplink: Annotated[
        str | None, typer.Option(help="Bandwidth of a host's link to other hosts, e.g. 10Gbit.")
    ] = None,
    local: Annotated[
        str | None, typer.Option(help="Bandwidth between ranks of a host, e.g. 5GB/s.")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Show all candidate shardings and exchanges of this table.")
    ] = None,
    dram: Annotated[
        str | None, typer.Option(help="Memory for rows on each rank, e.g. 2GiB: plan.memory.dram.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(min=1.0, help="Samples/s to show MB/s for; default: as predicted."),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Lookups in the profiled sample.")] = 1 << 20,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, as in train. Repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print plan, prediction and measurements as JSON.")
    ] = False,
    advise: AdviseOption = False,
    efficiency: EfficiencyOption = None,
    hosts_up_to: HostsOption = None,
) -> None:
    """Choose where rows are stored and how values are exchanged, and predict the speed of training."""
    from colonnade.cli.plan_tables import print_plan
    from colonnade.cli.train import build_config
    from colonnade.config.run import override_settings
    from colonnade.run.run import plan_run

    _check_advice_options(advise, (efficiency, hosts_up_to), (table, target))
    topology = _build_plan_world(world, ranks, uplink, local)
    if topology is None:  # another rank prints the plan
        return
    if uplink is not None and topology.num_hosts == 1 and not advise:
        raise ConfigError(
            f"--uplink: got {uplink} for one host, which sends nothing over it; give several hosts, e.g. --world 2x1"
        )
    chosen = override_settings(
        build_config(config, data, path, {"plan.memory.dram": dram}, set_, run),
        _default_to_automatic(config, set_),
    )
    if advise:
        _print_advice(
            chosen,
            topology,
            run,
            0.8 if efficiency is None else efficiency,
            64 if hosts_up_to is None else hosts_up_to,
            sample,
            as_json,
        )
        return
    choice, tables = plan_run(chosen, run, topology, lookups=sample, table=table)
    if as_json:
        print(json.dumps(convert_plan_to_json(choice, tables), indent=2))
    else:
        print_plan(choice, tables, target, table)


def _print_advice(
    config: RunConfig,
    world: World,
    run: Path,
    min_efficiency: float,
    max_hosts: int,
    lookups: int,
    as_json: bool,
) -> None:
    """Predict more and fewer hosts, and print what is advised."""
    from colonnade.cli.plan_tables import print_advice
    from colonnade.planning import planner
    from colonnade.run.run import open_planned_setup

    advice = planner.advise(
        open_planned_setup(config),
        world,
        run_folder=run,
        min_efficiency=min_efficiency,
        max_hosts=max_hosts,
        lookups=lookups,
    )
    if as_json:
        print(json.dumps(asdict(advice), indent=2))
    else:
        print_advice(advice, min_efficiency)


def _check_advice_options(
    advise: bool, only_with_it: Sequence[object], never_with_it: Sequence[object]
) -> None:
    """Raise ConfigError if options are set that belong to the other output."""
    if not advise and any(value is not None for value in only_with_it):
        raise ConfigError("got --efficiency or --hosts-up-to without --advise; add --advise")
    if advise and any(value is not None for value in never_with_it):
        raise ConfigError(
            "got --table or --target with --advise, which shows neither; leave it out"
        )


def _build_plan_world(
    shape: str | None, ranks: int | None, uplink: str | None, local: str | None
) -> World | None:
    """Return the world of the plan: as the options declare it or, under torchrun, the running one with measured links,
    on rank 0; None on its other ranks."""
    from colonnade.comm.process_groups import close_mesh, open_mesh
    from colonnade.planning.measure import build_planned_world, measure_links

    options = {"--world": shape, "--ranks": ranks, "--uplink": uplink, "--local": local}
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if shape is not None and ranks is not None:
            raise ConfigError(
                f"got --ranks {ranks} with --world {shape}, which has a number of ranks; leave one of them out"
            )
        return build_planned_world(shape or str(ranks or 1), uplink_rate=uplink, local_rate=local)
    if forbidden := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"got {', '.join(forbidden)} under torchrun, where the links are measured; leave it out, or plan without "
            "torchrun"
        )
    mesh = open_mesh(verb="plan")
    world = measure_links(mesh)
    close_mesh(mesh)
    return world if mesh.rank == 0 else None


def _default_to_automatic(config: Path | None, set_: list[str] | None) -> dict[str, str]:
    """Return `auto` for shardings and exchanges, which this command chooses if the user sets neither. Return nothing
    with `plan.cache`, whose tables a run caches unless an exchange is set."""
    from colonnade.cli.train import parse_set_options
    from colonnade.formats import parse_yaml, read_text_file

    settings: dict[str, Any] = {}
    if config is not None:
        values = parse_yaml(read_text_file(config))
        plan_section = (values or {}).get("plan") or {}
        settings |= {f"plan.{name}": value for name, value in plan_section.items()}
    settings |= parse_set_options(set_ or [])
    if settings.keys() & {"plan.exchange", "plan.sharding"}:
        return {}
    cache = [value for name, value in settings.items() if f"{name}.".startswith("plan.cache.")]
    if any(value is not None for value in cache):
        return {}
    return {"plan.exchange": "auto", "plan.sharding": "auto"}


def convert_plan_to_json(planned: PlanningResult, tables: Sequence[Table]) -> dict[str, Any]:
    """Return JSON values of the plan: its prediction, the measured costs, device and links, and the alternatives."""
    from colonnade.cli.plan_tables import cache_bytes

    def cost_values(cost: Any) -> dict[str, Any]:
        return {
            "exchange": cost.exchange,
            "sharding": asdict(cost.sharding),
            "sent": {f"{channel} {link}": size for (channel, link), size in cost.sent.items()},
            "seconds": cost.seconds,
            "more_seconds": cost.more,
        }

    return {
        "plan": json.loads(planned.plan.to_json()),
        "costs": asdict(planned.costs),
        "device": asdict(planned.device),
        "world": asdict(planned.world),
        "choices": {
            table.name: [cost_values(table.chosen), *map(cost_values, table.others)]
            for table in planned.choice.tables
        },
        "consumers": [asdict(consumer) for consumer in planned.choice.consumers],
        "cache_bytes": cache_bytes(planned, tables),
        "dense_seconds": dict(planned.dense_seconds),
        "sample": {"samples": planned.profile.samples, "batches": planned.profile.batches},
    }
