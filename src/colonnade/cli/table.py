"""Terminal output of `colonnade train`: the plan's table, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid

from colonnade.plan.build import describe_planned_tables
from colonnade.plan.plan import Plan
from colonnade.report.formatting import format_bytes
from colonnade.report.tiers import TIER_LINES, format_tier_counts
from colonnade.report.traffic import COLUMNS, build_traffic_lines, flatten_counts
from colonnade.run.start import describe_finished_run
from colonnade.store.contract import TierCounts
from colonnade.table import Table
from colonnade.terminal import PLAIN_GRID, build_grid
from colonnade.train.best import select_judged
from colonnade.train.progress import describe_single_classes

MAX_LINES = 12


def show_plan(console: Console, plan: Plan, tables: Sequence[Table]) -> None:
    """Print the plan, one line per table, the largest tables only if there are many. Columns with one value for all
    tables become part of the heading."""
    memory = "no limit" if plan.dram_bytes is None else format_bytes(plan.dram_bytes)
    wire = plan.codecs
    facts = [
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
        + (f" ({len(plan.servers)} of them servers)" if plan.servers else ""),
        "" if wire.is_exact else f"values {wire.values}, gradients {wire.gradients}",
        "" if wire.dense == "exact" else f"dense gradients {wire.dense}",
        _describe_staleness(plan),
        f"lookahead {plan.lookahead}",
        f"memory for rows {memory}",
    ]
    order = sorted(range(len(tables)), key=lambda t: -plan.tables[t].capacity_rows)
    lines = describe_planned_tables(plan, tables)
    values = {name: {line[name] for line in lines} for name in lines[0] if name != "table"}
    common = {name: min(column) for name, column in values.items() if len(column) == 1}
    if len(tables) > 1:
        facts += [f"{name} {value}" for name, value in common.items() if value not in ("-", "")]
    else:
        common = {name: value for name, value in common.items() if value in ("-", "")}
    console.print(f"plan: {', '.join(fact for fact in facts if fact)}", soft_wrap=False)
    columns = [name for name in lines[0] if name not in common]
    rows = [[lines[t][name] for name in columns] for t in order[:MAX_LINES]]
    grid = build_grid(columns, rows, header_style="dim", **PLAIN_GRID)
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    if len(order) > MAX_LINES:
        console.print(f"  and {len(order) - MAX_LINES} smaller tables")


def _describe_staleness(plan: Plan) -> str:
    """Describe how late reads of rows are."""
    cached = max((table.cache.clock.staleness for table in plan.tables if table.cache), default=0)
    if cached:
        return f"cached rows up to {cached} batches late"
    bound = plan.max_staleness_steps
    by_table = " by table" if len(set(plan.staleness_by_table)) > 1 else ""
    return (f"bounded({bound})" if bound else "synchronous") + by_table


def _build_tier_table(counts_by_tier: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Build a table with one column per tier, the fastest first, and one line per count."""
    by_tier = [format_tier_counts(TierCounts.of(values)) for values in counts_by_tier.values()]
    options: dict[str, Any] = {"title": "tiers (this rank)", "title_justify": "left", "box": None}
    rows = zip(TIER_LINES, *by_tier, strict=True)
    return build_grid(["", *counts_by_tier], rows, pad_edge=False, **options)


def _build_traffic_table(sent_bytes: Mapping[str, Any], num_steps: int) -> Grid:
    """Build a table of the bytes and messages sent to other ranks."""
    lines = build_traffic_lines(
        flatten_counts(sent_bytes["bytes"]), flatten_counts(sent_bytes["messages"]), num_steps
    )
    options: dict[str, Any] = {
        "title": "sent to other ranks (this rank)",
        "title_justify": "left",
        "box": None,
    }
    return build_grid(COLUMNS, lines, text_columns=(0, 1), **options)


SOURCES = {
    "resident": "already in memory",
    "mapped": "in mapped memory",
    "read": "read from files",
    "copied": "not yet in files",
    "born": "new (first value)",
}
MIN_SHARE = 0.005  # smaller shares are not shown


def _format_shares(amounts: Mapping[str, float], total: float) -> str:
    """Join names with their percentages, largest first."""
    shown = sorted(amounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {a / total:.0%}" for n, a in shown if a >= MIN_SHARE * total)


def describe_popularity(value: float | None) -> str:
    """Describe the metric of a ranking by popularity beside the model's; nothing where there is none."""
    return "" if value is None else f"   by popularity {value:.4f}"


def show_types(console: Console, by_type: Mapping[str, Mapping[str, float]]) -> None:
    """Print figures of each type of feedback, by training pairs."""
    columns = list(next(iter(by_type.values())))
    rows = [[name, *(f"{x[column]:,.4g}" for column in columns)] for name, x in by_type.items()]
    names = ["type", *(column.replace("_", " ") for column in columns)]
    grid = build_grid(names, rows, **PLAIN_GRID)
    console.print("  types of feedback, strongest first, by training pairs:")
    console.print(Padding(grid, (0, 0, 0, 2)))


def describe_metrics_step(summary: Mapping[str, Any]) -> str:
    """Describe the step of the metrics, and the metric that selected it."""
    if summary["best_step"] is None:
        return f"at the last step, {summary['step']:,}; no validation part"
    monitor = str(summary.get("monitor", "validation")).replace("_", " ")
    return f"at step {summary['best_step']:,}, the best of {monitor}"


def show_outcome(console: Console, summary: Mapping[str, Any], folder: Path | None) -> None:
    """Print the final metrics, the speed, the time by phase and the rows by source."""
    metrics = select_judged(summary["metrics"])
    is_below = False
    for name, value in metrics.items():
        part, _, metric = name.partition("_")
        popular = summary["metrics"].get(f"{part}_popularity_{metric}")
        beside = describe_popularity(popular)
        is_below |= popular is not None and name == f"test_{summary['monitor']}" and value < popular
        console.print(f"{name.replace('_', ' ')}: {value:.4f}{beside}", style="bold")
    if metrics:
        console.print(describe_metrics_step(summary))
    elif summary["step"]:
        console.print(
            "no metrics, because no sample is held out: see data.options.test_fraction, data.options.test and "
            "data.options.split",
            highlight=False,
        )
    for line in describe_single_classes(summary["metrics"]):
        console.print(line, markup=False)
    if is_below:
        console.print(
            "the model ranks worse than popularity: too little data, or too few or too many steps; try other learning "
            "rates (embedding.lr, dense.lr), a smaller train.batch_size, or model.temperature"
        )
    if summary["stopped_early"]:
        console.print("stopped early: no improvement (train.patience)")
    if summary["stopped"]:
        console.print("stopped as requested; everything is saved, the same command continues here")
    seconds = summary["seconds"] or 1e-9
    console.print(
        f"{summary['steps']:,} steps in {seconds:,.1f} s, {summary['samples_per_second']:,.0f} samples/s while training"
    )
    phases = dict(summary["phases_seconds"])
    phases["everything else"] = max(0.0, seconds - sum(phases.values()))
    console.print(f"where the time went: {_format_shares(phases, seconds)}")
    sources = summary["row_sources"]
    total = sum(sources[name] for name in SOURCES)
    if total:
        rows = {words: sources[name] for name, words in SOURCES.items()}
        console.print(f"where rows came from: {_format_shares(rows, total)}")
    if sources["read"] or sources["evicted_dirty"]:
        console.print(_build_tier_table(summary["tiers"]))
    if summary["sent"]["bytes"]:
        console.print(_build_traffic_table(summary["sent"], summary["steps"]))
    if "prediction_error" in summary:
        console.print(
            f"the plan predicted {summary['predicted_samples_per_second']:,.0f} samples/s: "
            f"{summary['prediction_error']:+.0%} of what was measured"
        )
    if "sent_error" in summary:
        console.print(
            f"the plan predicted {format_bytes(summary['predicted_sent_bytes'])} sent by a rank per step for rows and "
            f"gradients: {summary['sent_error']:+.1%} of what was counted"
        )
    if folder is not None and summary.get("ended_before"):
        console.print(describe_finished_run(folder, summary["step"]), markup=False, soft_wrap=True)
    elif folder is not None:
        console.print(f"run folder: {folder}", markup=False, soft_wrap=True)
    if folder is not None:
        console.print(f"open its page: colonnade report {folder}", markup=False, soft_wrap=True)
