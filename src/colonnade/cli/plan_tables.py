"""Output of `colonnade plan`: memory, sharding and exchange by table, predicted times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from colonnade.plan.advice import (
    MIN_GAIN,
    MIN_NOISE_STEPS,
    Advice,
    limit_speedup,
    solve_num_ranks,
    solve_overhead,
)
from colonnade.plan.build import (
    find_row_files,
    mapped_cache_bytes,
    memory_bytes,
    resident_row_bytes,
)
from colonnade.plan.caching import full_cache_bytes
from colonnade.plan.search.candidates import PlanDecision, TableChoice, TableCost
from colonnade.planning.planner import PlanningResult
from colonnade.planning.timing import count_plans_to_time
from colonnade.report.formatting import format_bytes, format_count, format_seconds
from colonnade.store.budget import slot_bytes
from colonnade.table import Table
from colonnade.terminal import PLAIN_GRID, Terminal, build_grid
from colonnade.topology.sharding import Sharding

MAX_LINES = 40


def print_plan(
    result: PlanningResult,
    tables: Sequence[Table],
    target_rate: float | None,
    shown_table: str | None = None,
) -> None:
    """Print a plan. target_rate: samples/s for which bytes per second are shown; shown_table: show only its
    candidates."""
    console = Terminal()
    if shown_table is not None:
        _print_table_choices(
            console, result, next(t for t in result.choice.tables if t.name == shown_table)
        )
        return
    _print_table_memory(
        console, result, tables, target_rate or result.prediction.samples_per_second
    )
    if result.world.num_ranks > 1:
        _print_exchanges(console, result)
    _print_total_costs(console, result, tables)


def print_advice(advice: Advice, min_efficiency: float) -> None:
    """Print predicted speed by number of ranks, and a sentence on ranks, servers and batch each."""
    console = Terminal()
    columns = ("ranks", "step ms", "samples/s", "speed-up", "efficiency", "limit")
    rows = [
        (
            f"{point.num_ranks:,}",
            f"{1e3 * point.step_seconds:,.1f}",
            f"{advice.batch_size / point.step_seconds:,.0f}",
            f"{point.speedup:.2f}",
            f"{point.efficiency:.0%}",
            point.limit,
        )
        for point in advice.curve
    ]
    grid = build_grid(columns, rows, text_columns=(0, len(columns) - 1), **PLAIN_GRID)
    console.print(
        f"predicted: batches of {advice.batch_size:,} samples over all ranks, a processor for each thread"
    )
    console.print(grid)
    console.print(f"ranks: {_describe_ranks(advice, min_efficiency)}", markup=False)
    console.print(f"servers: {_describe_servers(advice)}", markup=False)
    console.print(f"batch: {_describe_batch(advice)}", markup=False)


def _describe_ranks(advice: Advice, min_efficiency: float) -> str:
    advised = f"{advice.num_ranks} at an efficiency of {min_efficiency:.0%} or more"
    point = next(p for p in advice.curve if p.num_ranks == advice.world.num_ranks)
    overhead = solve_overhead(point.efficiency, point.num_ranks)
    if (
        not 0 < overhead < math.inf
    ):  # one rank, all of a step is divided, or it is slower than on one
        fastest = max(advice.curve, key=lambda point: point.speedup)
        return f"{advised}; the fastest of these, {fastest.num_ranks}, are {fastest.speedup:.2f} times as fast as one"
    return (
        f"{advised}; R = {overhead:.2g}: what {point.num_ranks} ranks do not divide of a step, over what they divide. "
        f"If it stayed, {solve_num_ranks(min_efficiency, overhead):,.1f} ranks would have this efficiency, and any "
        f"number of ranks at most {limit_speedup(overhead):,.1f} times the speed of one"
    )


def _describe_servers(advice: Advice) -> str:
    need = advice.servers
    compute = format_seconds(need.compute_seconds)
    room = "no limit"
    if need.memory_bytes:
        room = f"{format_bytes(need.row_bytes)} of rows / {format_bytes(need.memory_bytes)}"
    hidden = f"hidden by reads that are {advice.staleness_steps} steps late"
    if not advice.staleness_steps:
        hidden = "not hidden: every step waits for them, unless plan.staleness_steps is 1 or more"
    return (
        f"{advice.num_servers} for {advice.world.num_trainers} trainers: link {need.link:.2g} "
        f"({format_bytes(need.link_bytes)} in {compute} at {need.link_bytes_per_second / 1e6:,.0f} MB/s), processor "
        f"{need.processor:.2g} ({format_seconds(need.processor_seconds)} in {compute}), room {need.room:.2g} "
        f"({room}); {hidden}"
    )


def _describe_batch(advice: Advice) -> str:
    noise = advice.noise
    size = advice.batch_size
    if noise is None:
        return (
            f"{size:,}; no run measured the noise of gradients. Train {MIN_NOISE_STEPS} steps on 2 ranks, or with "
            "train.accumulate=2, without plan.codec.dense=thresholded, and give its folder: --run FOLDER"
        )
    when = f"of steps {noise.first_step:,} to {noise.last_step:,}"
    if noise.samples is None:
        return f"it could be larger than measured: noise hid the gradient {when}"
    cost = advice.batch
    best = max(cost.best_batch(noise.samples), 1.0)
    times = [cost.relative_time(batch, noise.samples) for batch in (best, size)]
    saved = 1 - times[0] / times[1]
    gain = (
        f"saves {saved:.0%} of the time to a loss" if saved > MIN_GAIN else f"{size:,} is as good"
    )
    return (
        f"sqrt(a B_noise / c) = {best:,.0f} on {advice.world.num_ranks} ranks, {gain}; a = "
        f"{format_seconds(cost.fixed_seconds)} a step, c = {format_seconds(cost.sample_seconds)} a sample, B_noise = "
        f"{noise.samples:,.0f} by the gradients {when}"
    )


def cache_bytes(result: PlanningResult, tables: Sequence[Table]) -> int:
    """Return the bytes of `plan.cache` on each rank, in addition to the memory of its own rows."""
    caches = [table_plan.cache for table_plan in result.plan.tables]
    return sum(full_cache_bytes(cache, table) for cache, table in zip(caches, tables, strict=True))


def _create_text_table(columns: Sequence[str], left_aligned: Sequence[str]) -> Grid:
    """Create a table that fits 80 columns by shortening the first one."""
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        is_name = name == columns[0]
        grid.add_column(
            name,
            justify="left" if name in left_aligned or is_name else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=8 if is_name else len(name),
        )
    return grid


def _print_table_memory(
    console: Console,
    result: PlanningResult,
    tables: Sequence[Table],
    samples_per_second: float,
) -> None:
    console.print(
        f"memory: {result.profile.samples:,} samples for {result.plan.num_ranks} rank(s); rows and bytes of "
        f"{'a server' if result.world.has_servers else 'one'}, "
        f"MB/s at {samples_per_second:,.0f} samples/s, lookups per sample, reads per 1,000"
    )
    grid = _create_text_table(
        ("table", "rows", "bytes", "lookups", "MB/s", "memory", "tier", "hits", "reads"), ("tier",)
    )
    lines = []
    for table, table_plan, prediction in zip(
        tables, result.plan.tables, result.prediction.tables, strict=True
    ):
        rows = None if table.rows is None else -(-table.rows // table_plan.sharding.num_owners)
        backing = "+mapped" if table_plan.mapped_rows else ""
        backing += {"run folder": "+files", "ssd": "+ssd"}.get(
            find_row_files(result.plan, table_plan), ""
        )
        size = resident_row_bytes(table, table_plan.sharding)
        lines.append(
            (
                prediction.reads_per_sample,
                prediction.bytes_per_sample,
                [
                    table.name,
                    "any" if rows is None else format_count(rows),
                    "-" if rows is None else format_bytes(rows * size),
                    f"{prediction.lookups_per_sample:.3g}",
                    _format_number(prediction.bytes_per_sample * samples_per_second / 1e6),
                    format_bytes(prediction.rows_in_memory * slot_bytes(table)),
                    table_plan.tier + backing,
                    f"{prediction.hit_rate:.1%}",
                    f"{1000 * prediction.reads_per_sample:.3g}",
                ],
            )
        )
    lines.sort(key=lambda line: (-line[0], -line[1]))
    for *_, cells in lines[:MAX_LINES]:
        grid.add_row(*cells)
    console.print(grid)
    if len(lines) > MAX_LINES:
        console.print(f"  and {len(lines) - MAX_LINES} more with fewer reads")


def _print_exchanges(console: Console, result: PlanningResult) -> None:
    console.print(
        "\nexchange: exchange and owners of each table; bytes that a rank sends per step, in its host and over its "
        "uplink"
    )
    grid = _create_text_table(
        ("table", "choice", "in host", "uplink", "takes", "next best", "more"),
        ("choice", "next best"),
    )
    lines = sorted(result.choice.tables, key=lambda table: -table.chosen.seconds)
    for table in lines[:MAX_LINES]:
        best = table.chosen
        runner_up = table.others[0] if table.others else None
        grid.add_row(
            table.name,
            _describe_choice(best, result) + ("!" if table.is_forced else ""),
            format_bytes(best.bytes_over("local")),
            format_bytes(best.bytes_over("remote")),
            format_seconds(best.seconds),
            "-" if runner_up is None else _label_exchange(runner_up),
            "-" if runner_up is None else _format_added_seconds(runner_up.more),
        )
    console.print(grid)
    if len(lines) > MAX_LINES:
        console.print(f"  and {len(lines) - MAX_LINES} more with fewer seconds")
    if any(table.is_forced for table in lines):
        console.print("  !: set by you, not chosen")
    _print_runners_up(console, result)
    _print_consumers(console, result)


def _print_runners_up(console: Console, result: PlanningResult) -> None:
    """Print the best plans of other kinds, which a run may time beside the choice."""
    if not result.runners_up:
        return
    best = result.prediction.step_seconds
    console.print("\nrunners-up: best plans of other kinds, by prediction")
    for runner_up in result.runners_up:
        seconds = runner_up.prediction.step_seconds
        more = seconds - best
        console.print(
            f"  {runner_up.plan.describe_exchanges()}: a step {format_seconds(seconds)}, "
            f"{_format_added_seconds(more)}",
            markup=False,
        )
    count = count_plans_to_time(
        [best, *(other.prediction.step_seconds for other in result.runners_up)], None
    )
    timed = f"the choice and the first {count - 1} of these on all ranks, and keeps the fastest"
    console.print(
        f"this command only predicts: a long run times {timed if count else 'none of these'}",
        markup=False,
    )


def _print_consumers(console: Console, result: PlanningResult) -> None:
    """Print whether values or partials of each consumer are sent, if owner ranks could evaluate one of them with this
    or another sharding."""
    consumers = result.choice.consumers
    if all(
        choice.partial_floats is None and not choice.depends_on_hot_rows for choice in consumers
    ):
        return
    console.print("\nconsumers: sent for first operators; floats of a sample, all owners")
    for choice in consumers[:MAX_LINES]:
        partial = "no partial"
        if choice.partial_floats is not None:
            partial = f"partial {choice.partial_floats:,.0f}"
        what = "partial" if choice.is_partial else "values"
        console.print(
            f"  {choice.name}: {what} (values {choice.value_floats:,.0f}, {partial}): {choice.why}",
            markup=False,
        )


def _print_table_choices(
    console: Console, result: PlanningResult, table_choice: TableChoice
) -> None:
    console.print(
        f"choices of table {table_choice.name}; bytes that a rank sends per step", markup=False
    )
    columns = ("choice", "route", "fetch", "push", "in host", "uplink", "takes", "more")
    grid = _create_text_table(columns, ("choice",))
    for cost in (table_choice.chosen, *table_choice.others):
        by_channel = [
            format_bytes(cost.sent[channel, "local"] + cost.sent[channel, "remote"])
            for channel in ("route", "fetch", "push")
        ]
        grid.add_row(
            _describe_choice(cost, result),
            *by_channel,
            format_bytes(cost.bytes_over("local")),
            format_bytes(cost.bytes_over("remote")),
            format_seconds(cost.seconds),
            "chosen" if cost is table_choice.chosen else _format_added_seconds(cost.more),
        )
    console.print(grid)
    reason = "set by you" if table_choice.is_forced else "the fewest seconds of the whole step"
    name = table_choice.name.removesuffix("[cold]").removesuffix("[hot]")
    console.print(
        f"chosen: {reason}, with all other tables as they are. To set another: "
        f"--set plan.tables.{name}.exchange=... --set plan.tables.{name}.sharding=...",
        markup=False,
    )
    console.print(str(result.world))


def _print_total_costs(console: Console, result: PlanningResult, tables: Sequence[Table]) -> None:
    console.print()
    prediction = result.prediction
    used: dict[str, Any] = {"dram": 0, "mapped": 0}
    for table, table_plan in zip(tables, result.plan.tables, strict=True):
        used[table_plan.tier] += memory_bytes(table, table_plan)
        used["mapped"] += mapped_cache_bytes(table, table_plan)
    budget = result.plan.dram_bytes
    memory = f"memory {format_bytes(used['dram'])}"
    memory += " (no limit)" if budget is None else f" of {format_bytes(budget)}"
    if used["mapped"]:
        memory += f", mapped {format_bytes(used['mapped'])}"
    if cached_bytes := cache_bytes(result, tables):
        memory += f", and up to {format_bytes(cached_bytes)} more for plan.cache"
    console.print(
        f"{memory}; {prediction.hit_rate:.2%} of a batch's rows are in memory or new; a sample reads "
        f"{prediction.reads_per_sample:.3g} rows from files and initialises {prediction.births_per_sample:.3g}; "
        f"{format_bytes(prediction.written_per_second)}/s written; lookahead {prediction.lookahead}"
    )
    console.print(str(result.device), markup=False)
    costs = result.costs
    console.print(
        f"a step takes {format_seconds(costs.step_seconds)} with all rows in memory, "
        f"{format_seconds(costs.first_use_seconds)} more for each new row, {format_seconds(costs.moved_seconds)} "
        "for each row read or evicted"
    )
    if result.world.num_ranks > 1:
        _print_link_costs(console, result.choice, result)
    if cached_bytes and result.world.num_ranks > 1:
        _print_cached_rows(console, result)
    console.print(
        f"predicted: {prediction.samples_per_second:,.0f} samples/s, "
        f"{prediction.samples_per_second / prediction.all_in_memory:.0%} of {prediction.all_in_memory:,.0f} with all "
        f"rows in memory; what limits: {prediction.limit}",
        style="bold",
    )


def _print_cached_rows(console: Console, result: PlanningResult) -> None:
    """Print the bytes of tables with cached rows, and those of the same tables under exchange `rows`."""
    cached = [table for table in result.choice.tables if table.chosen.exchange == "cached"]
    sent = sum(sum(table.chosen.sent.values()) for table in cached)
    without = sum(
        next(sum(cost.sent.values()) for cost in table.others if cost.exchange == "rows")
        for table in cached
    )
    console.print(
        f"plan.cache: with cached rows of {len(cached)} tables a rank sends {format_bytes(sent)} for them per step; "
        f"with exchange rows and no cache {format_bytes(without)}",
        markup=False,
    )


def _print_link_costs(
    console: Console, plan_decision: PlanDecision, planning_result: PlanningResult
) -> None:
    prediction = planning_result.prediction
    seconds = plan_decision.seconds
    console.print(str(planning_result.world))
    if planning_result.world.origin != "measured":
        console.print("this world is not running: its links are as declared, not measured")
    total = {
        link: sum(size for (_, over), size in plan_decision.sent.items() if over == link)
        for link in ("local", "remote")
    }
    dense = prediction.waited_seconds - seconds.waited
    console.print(
        f"a rank sends {format_bytes(total['local'])} in its host and {format_bytes(total['remote'])} over the uplink "
        f"per step, which takes {format_seconds(seconds.fetch)} for rows, {format_seconds(seconds.push)} for "
        f"gradients, {format_seconds(dense)} for dense gradients, and {format_seconds(seconds.route)} for ids, hidden "
        "by the model"
    )
    console.print(
        f"a step: {format_seconds(prediction.step_seconds)}: {format_seconds(prediction.processor_seconds)} computing "
        f"and {format_seconds(prediction.waited_seconds)} waiting for links; 16-bit values and gradients, which are "
        f"not exact and never chosen, would save {format_seconds(plan_decision.halved_seconds)}"
    )
    seconds_by_codec = ", ".join(
        f"{codec} {format_seconds(seconds)}"
        for codec, seconds in planning_result.dense_seconds.items()
    )
    console.print(
        f"dense gradients, by plan.codec.dense, which is never chosen: {seconds_by_codec}; that is the links' time"
    )


def _describe_choice(cost: TableCost, result: PlanningResult) -> str:
    if cost.exchange == "replicated":
        return "copies"
    return f"{cost.exchange}, {_describe_owners(cost.sharding, result)}"


def _describe_owners(sharding: Sharding, result: PlanningResult) -> str:
    first = sharding.ranks[0]
    if sharding.kind == "table_wise":
        return f"rank {first}"
    if sharding.slices > 1:
        of = "ranks" if sharding.kind == "column_wise" else "hosts"
        return f"columns on {sharding.slices} {of}"
    if sharding.kind == "host_wise":
        hosts = {result.world.host(rank) for rank in sharding.ranks}
        if (
            len(hosts) > 1
            or len(sharding.ranks) < len(result.world.owners) // result.world.num_hosts
        ):
            return f"ranks {first}-{sharding.ranks[-1]}"  # a tower
        return f"host {result.world.host(first)}"
    return "servers" if result.world.has_servers else "all"


def _label_exchange(table_cost: TableCost) -> str:
    if table_cost.exchange == "replicated":
        return "copies"
    kinds = {
        "table_wise": "a rank", "host_wise": "a host", "column_wise": "columns", "grid": "a grid"
    }  # fmt: skip
    return f"{table_cost.exchange}, {kinds.get(table_cost.sharding.kind, 'all')}"


def _format_added_seconds(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds > 1e-9 else "same"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
