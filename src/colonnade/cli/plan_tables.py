"""Tables that `colonnade plan` shows: memory, shardings and exchanges by table, what a step will take, and simulated
worlds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from colonnade.errors import ConfigError
from colonnade.models.dense_cost import FLOPS_PER_PRODUCT
from colonnade.plan.caching import kept_bytes
from colonnade.plan.cost.prediction import PERSIA, Machine, Simulated, Work, simulate
from colonnade.plan.plan import held_bytes, memory_bytes
from colonnade.plan.search.candidates import Choice, Cost, TableChoice
from colonnade.plan.towers.forecast import PAPER
from colonnade.report.words import bytes_words, count_words, seconds_words
from colonnade.run.planning import Planned
from colonnade.sizes import positive_bytes
from colonnade.store.budget import slot_bytes
from colonnade.table import Table
from colonnade.terminal import Terminal
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World


def room_of(host: str, parameters: float) -> tuple[int, int]:
    """Bytes of memory and of disks of a host, said as MEMORY or MEMORY:SSD. Raises ConfigError for what is none, or
    where `parameters` are no number of any."""
    if not math.isfinite(parameters):
        raise ConfigError(
            f"--simulate: got {parameters}, wanted a number of parameters, e.g. 100e12"
        )
    memory, _, disk = host.partition(":")
    try:
        return positive_bytes(memory), positive_bytes(disk) if disk else 0
    except ValueError as error:
        raise ConfigError(f"--host: {error}; give MEMORY or MEMORY:SSD, e.g. 480GiB:8TiB") from None


def simulated(
    found: Planned,
    tables: Sequence[Table],
    batch_size: int,
    parameters: float,
    room: tuple[int, int],
    world: World,
) -> tuple[Work, list[Simulated]]:
    """`found`: a plan of one rank, whose sample and rates are taken. `room`: of each host of `world`. Raises
    ConfigError where it has disks and none was measured."""
    work = work_of(found, tables, batch_size)
    pages = sum(place.pages for place in found.device.directories)
    if room[1] and not pages:
        raise ConfigError(
            "--host: got a size of disks, but no disk was measured; give --dram less than the rows take, so that some "
            "rest on this one"
        )
    machine = Machine(
        memory_bytes=room[0],
        ssd_bytes=room[1],
        ranks=world.ranks_per_host,
        uplink=world.remote_bytes_per_second,
        pages=pages,
    )
    return work, simulate(parameters, work, machine, batch_size)


def show_simulation(
    parameters: float, batch_size: int, work: Work, cases: Sequence[Simulated]
) -> None:
    """A line of what was measured, one for each place of rows, one of what was published."""
    console = Terminal(soft_wrap=True)
    console.print(
        f"SIMULATION of {parameters:,.0f} parameters, run by nobody: rates of one rank of this machine "
        f"({1 / work.seconds:,.0f} samples/s, {work.rows:.1f} rows of {work.row_floats:.0f} floats a sample, "
        f"{work.record_bytes:.0f} bytes each with state), links and hosts as given."
    )
    for each in cases:
        console.print(
            f"rows in {each.where}: {each.rows:,.0f} rows, {bytes_words(each.total_bytes)}: {each.hosts:,} hosts, "
            f"{each.ranks:,} ranks. A step of {batch_size:,} samples: processors {1e3 * each.compute_seconds:.3f} ms, "
            f"uplinks {1e3 * each.link_seconds:.3f} ms each way, disks {1e3 * each.disk_seconds:.3f} ms; "
            f"{each.samples_per_second:,.0f} samples/s reading ahead, {each.synchronous:,.0f} synchronously"
        )
    console.print(PERSIA)


def as_values(parameters: float, work: Work, cases: Sequence[Simulated]) -> dict[str, Any]:
    """Plain values of the same, under a name that says that nobody ran it. Pure."""
    return {
        "simulation": {
            "parameters": parameters,
            "measured": asdict(work),
            "cases": [asdict(each) for each in cases],
        }
    }


def work_of(found: Planned, tables: Sequence[Table], batch_size: int) -> Work:
    """Of one sample, by the sample that was profiled and the steps that were rehearsed. Pure."""
    rows = []
    for t, profile in enumerate(found.profile.tables):
        sizes, counted = profile.unique
        most = counted[-1] / sizes[-1] if sizes else found.profile.lookups_per_sample(t)
        rows.append(max(most, 1e-9))
    total = sum(rows)
    return Work(
        seconds=found.costs.step_seconds / batch_size,
        moved_seconds=found.costs.moved_seconds,
        rows=total,
        row_floats=sum(n * each.width for n, each in zip(rows, tables, strict=True)) / total,
        record_bytes=sum(n * each.record_bytes for n, each in zip(rows, tables, strict=True))
        / total,
    )


MAX_LINES = 40
NO_COPIES = (
    "plan.cache is not foretold: bytes and seconds are of a run without it. What it saves follows from the order of "
    "batches: train some steps with it and look at `cache` and `sent` of the record, or the report"
)


def show(
    found: Planned, tables: Sequence[Table], target: float | None, table: str | None = None
) -> None:
    """`target`: samples/s that bytes per second are said for; `table`: show this one's choices."""
    console = Terminal()
    if table is not None:
        _show_choices(console, found, next(t for t in found.choice.tables if t.name == table))
        return
    _show_memory(console, found, tables, target or found.prediction.samples_per_second)
    if found.world.num_ranks > 1:
        _show_exchanges(console, found)
    _show_totals(console, found, tables)


def copies_bytes(found: Planned, tables: Sequence[Table]) -> int:
    """That `plan.cache` takes on each rank, beside the memory of its own rows."""
    kept = [each.cache for each in found.plan.tables]
    return sum(kept_bytes(cache, table) for cache, table in zip(kept, tables, strict=True))


def _grid(columns: Sequence[str], left: Sequence[str]) -> Grid:
    """Fits 80 columns: the first column gives way."""
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        is_name = name == columns[0]
        grid.add_column(
            name,
            justify="left" if name in left or is_name else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=8 if is_name else len(name),
        )
    return grid


def _show_memory(console: Console, found: Planned, tables: Sequence[Table], rate: float) -> None:
    console.print(
        f"memory: {found.profile.samples:,} samples for {found.plan.num_ranks} rank(s); rows and bytes of "
        f"{'a server' if found.world.has_servers else 'one'}, "
        f"MB/s at {rate:,.0f} samples/s, lookups per sample, reads per 1,000"
    )
    grid = _grid(
        ("table", "rows", "bytes", "lookups", "MB/s", "memory", "tier", "hits", "reads"), ("tier",)
    )
    lines = []
    for table, planned, each in zip(
        tables, found.plan.tables, found.prediction.tables, strict=True
    ):
        rows = None if table.rows is None else -(-table.rows // planned.sharding.num_owners)
        rest = {"run folder": "+files", "ssd": "+ssd"}.get(planned.rest, "")
        size = held_bytes(table, planned.sharding)
        lines.append((each.reads_per_sample, each.bytes_per_sample, [
            table.name, "any" if rows is None else count_words(rows),
            "-" if rows is None else bytes_words(rows * size), f"{each.lookups_per_sample:.3g}",
            _short(each.bytes_per_sample * rate / 1e6),
            bytes_words(each.rows_in_memory * slot_bytes(table)), planned.tier + rest, f"{each.hit_rate:.1%}",
            f"{1000 * each.reads_per_sample:.3g}",
        ]))  # fmt: skip
    lines.sort(key=lambda line: (-line[0], -line[1]))
    for *_, cells in lines[:MAX_LINES]:
        grid.add_row(*cells)
    console.print(grid)
    if len(lines) > MAX_LINES:
        console.print(f"  and {len(lines) - MAX_LINES} more, which read less")


def _show_exchanges(console: Console, found: Planned) -> None:
    console.print(
        "\nexchange: what travels and who owns the rows; bytes that a rank sends per step, in its host and over its "
        "uplink"
    )
    grid = _grid(
        ("table", "choice", "in host", "uplink", "takes", "next best", "more"),
        ("choice", "next best"),
    )
    lines = sorted(found.choice.tables, key=lambda table: -table.chosen.seconds)
    for table in lines[:MAX_LINES]:
        best, other = table.chosen, table.others[0] if table.others else None
        grid.add_row(
            table.name, _words(best, found) + ("!" if table.is_forced else ""),
            bytes_words(best.bytes_over("local")), bytes_words(best.bytes_over("remote")),
            seconds_words(best.seconds), "-" if other is None else _kind_words(other),
            "-" if other is None else _more(other.more),
        )  # fmt: skip
    console.print(grid)
    if len(lines) > MAX_LINES:
        console.print(f"  and {len(lines) - MAX_LINES} more, which take less")
    if any(table.is_forced for table in lines):
        console.print("  !: as it was said, not chosen")
    _show_consumers(console, found)


def _show_consumers(console: Console, found: Planned) -> None:
    """What travels of the model's first operators, where one of them could be evaluated at the owners, or could if rows
    were laid out otherwise."""
    consumers = found.choice.consumers
    if all(each.partial_floats is None and not each.is_apart for each in consumers):
        return
    console.print("\nconsumers: what travels of first operators; floats of a sample, all owners")
    for each in consumers[:MAX_LINES]:
        partial = "no partial"
        if each.partial_floats is not None:
            partial = f"partial {each.partial_floats:,.0f}"
        what = "partial" if each.is_partial else "values"
        console.print(
            f"  {each.name}: {what} (values {each.value_floats:,.0f}, {partial}): {each.why}",
            markup=False,
        )


def _show_choices(console: Console, found: Planned, table: TableChoice) -> None:
    console.print(f"choices of table {table.name}; bytes that a rank sends per step", markup=False)
    columns = ("choice", "route", "fetch", "push", "in host", "uplink", "takes", "more")
    grid = _grid(columns, ("choice",))
    for cost in (table.chosen, *table.others):
        by_purpose = [
            bytes_words(cost.sent[channel, "local"] + cost.sent[channel, "remote"])
            for channel in ("route", "fetch", "push")
        ]
        grid.add_row(
            _words(cost, found), *by_purpose, bytes_words(cost.bytes_over("local")),
            bytes_words(cost.bytes_over("remote")), seconds_words(cost.seconds),
            "chosen" if cost is table.chosen else _more(cost.more),
        )  # fmt: skip
    console.print(grid)
    how = "as it was said" if table.is_forced else "the fewest seconds of the whole step"
    name = table.name.removesuffix("[cold]").removesuffix("[hot]")
    console.print(
        f"chosen: {how}, all other tables staying as they are. To force another: "
        f"--set plan.tables.{name}.exchange=... --set plan.tables.{name}.sharding=...",
        markup=False,
    )
    console.print(str(found.world))


def _show_totals(console: Console, found: Planned, tables: Sequence[Table]) -> None:
    console.print()
    said = found.prediction
    used: dict[str, Any] = {"dram": 0, "mapped": 0}
    for table, planned in zip(tables, found.plan.tables, strict=True):
        used[planned.tier] += memory_bytes(table, planned)
    budget = found.plan.dram_bytes
    memory = f"memory {bytes_words(used['dram'])}"
    memory += " (no limit)" if budget is None else f" of {bytes_words(budget)}"
    if used["mapped"]:
        memory += f", mapped {bytes_words(used['mapped'])}"
    if copies := copies_bytes(found, tables):
        memory += f", and up to {bytes_words(copies)} beside it for plan.cache"
    console.print(
        f"{memory}; {said.hit_rate:.2%} of a batch's rows are there or new; a sample reads {said.reads_per_sample:.3g} "
        f"rows from files and meets {said.births_per_sample:.3g} for the first time; "
        f"{bytes_words(said.written_per_second)}/s written; lookahead {said.lookahead}"
    )
    console.print(str(found.device), markup=False)
    costs = found.costs
    console.print(
        f"a step takes {seconds_words(costs.step_seconds)} with all rows in memory, "
        f"{seconds_words(costs.born_seconds)} more for each new row, {seconds_words(costs.moved_seconds)} "
        "for each that is read or evicted"
    )
    if found.world.num_ranks > 1:
        _show_links(console, found.choice, found)
    if found.advice:
        _show_advice(console, found)
    if copies:
        console.print(NO_COPIES, markup=False)
    console.print(
        f"predicted: {said.samples_per_second:,.0f} samples/s, {said.samples_per_second / said.all_in_memory:.0%} of "
        f"{said.all_in_memory:,.0f} with all rows in memory; what limits: {said.limit}",
        style="bold",
    )


def _show_links(console: Console, choice: Choice, found: Planned) -> None:
    said, seconds = found.prediction, choice.seconds
    console.print(str(found.world))
    if found.world.origin != "measured":
        console.print("this world does not run here: what is said of its links is taken as it is")
    total = {
        link: sum(size for (_, over), size in choice.sent.items() if over == link)
        for link in ("local", "remote")
    }
    dense = said.waited_seconds - seconds.waited
    console.print(
        f"a rank sends {bytes_words(total['local'])} in its host and {bytes_words(total['remote'])} over the uplink "
        f"per step, which takes {seconds_words(seconds.fetch)} for rows, {seconds_words(seconds.push)} for gradients, "
        f"{seconds_words(dense)} for dense ones, and {seconds_words(seconds.route)} behind the model for ids"
    )
    console.print(
        f"a step: {seconds_words(said.step_seconds)}, of which {seconds_words(said.processor_seconds)} computing and "
        f"{seconds_words(said.waited_seconds)} waiting for links; 16-bit values and gradients, which are not exact "
        f"and never chosen, would save {seconds_words(choice.halved_seconds)}"
    )


def _show_advice(console: Console, found: Planned) -> None:
    """What tower modules would do to a step, beside what was published of them."""
    step = found.prediction.step_seconds
    console.print(
        f"a prediction of {found.advice[0].towers} towers whose modules, a linear layer each, let less out; they "
        "change the model, so they are never put in (model.towers, model.tower_dim, or a TowerModule):"
    )
    grid = _grid(("CR", "step saves", "faster", "MFLOP a sample", "weights"), ())
    for each in found.advice:
        saved, flops = each.saved_seconds, FLOPS_PER_PRODUCT * each.products
        faster = f"{step / max(step - saved, 1e-9):.2f}x"
        said = seconds_words(saved) if saved > 0 else "nothing"
        grid.add_row(str(each.ratio), said, faster, f"{flops / 1e6:.2f}", f"{each.parameters:,}")
    console.print(grid)
    console.print(f"computing them is not in it. Published: {PAPER}", markup=False)


def _words(cost: Cost, found: Planned) -> str:
    if cost.exchange == "replicated":
        return "copies"
    return f"{cost.exchange}, {_place(cost.sharding, found)}"


def _place(sharding: Sharding, found: Planned) -> str:
    first = sharding.ranks[0]
    if sharding.kind == "table_wise":
        return f"rank {first}"
    if sharding.slices > 1:
        of = "ranks" if sharding.kind == "column_wise" else "hosts"
        return f"columns on {sharding.slices} {of}"
    if sharding.kind == "host_wise":
        hosts = {found.world.host(rank) for rank in sharding.ranks}
        if len(hosts) > 1 or len(sharding.ranks) < len(found.world.owners) // found.world.num_hosts:
            return f"ranks {first}-{sharding.ranks[-1]}"  # a tower
        return f"host {found.world.host(first)}"
    return "servers" if found.world.has_servers else "all"


def _kind_words(cost: Cost) -> str:
    if cost.exchange == "replicated":
        return "copies"
    kinds = {
        "table_wise": "a rank", "host_wise": "a host", "column_wise": "columns", "grid": "a grid"
    }  # fmt: skip
    return f"{cost.exchange}, {kinds.get(cost.sharding.kind, 'all')}"


def _more(seconds: float) -> str:
    return f"+{seconds_words(seconds)}" if seconds > 1e-9 else "same"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
