"""Tables a person reads on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from colonnade.plan.plan import Plan, explain
from colonnade.report.tiers import TIER_LINES, tier_words
from colonnade.report.traffic import COLUMNS, flat, table_lines
from colonnade.report.words import bytes_words
from colonnade.store.tier_counts import TierCounts
from colonnade.table import Table
from colonnade.train.finished import describe_end
from colonnade.train.progress import SHOWN_METRICS

MAX_LINES = 12


def show_plan(console: Console, plan: Plan, tables: Sequence[Table]) -> None:
    """One line per table; of many tables the largest."""
    late = plan.latest
    staleness = (
        "unbounded" if late == "unbounded" else f"bounded({late})" if late else "synchronous"
    ) + (" by table" if len(set(plan.bounds)) > 1 else "")
    memory = "no limit" if plan.dram_bytes is None else f"{plan.dram_bytes / 2**20:,.0f} MiB"
    wire = plan.codecs
    coded = "" if wire.is_exact else f"values {wire.values}, gradients {wire.gradients}, "
    coded += "" if wire.dense == "exact" else f"dense gradients {wire.dense}, "
    rows_only = f" ({len(plan.servers)} of them for rows only)" if plan.servers else ""
    grid = Grid(
        title=f"plan: {plan.num_ranks} rank(s){rows_only}, exchange {', '.join(plan.exchanges)}, {coded}{staleness}, "
        f"lookahead {plan.lookahead}, memory for rows {memory}",
        title_justify="left",
    )
    order = sorted(range(len(tables)), key=lambda t: -plan.tables[t].capacity_rows)
    lines = explain(plan, tables)
    for name in lines[0]:
        grid.add_column(name, justify="left" if name == "table" else "right")
    for t in order[:MAX_LINES]:
        grid.add_row(*lines[t].values())
    console.print(grid)
    if len(order) > MAX_LINES:
        console.print(f"  and {len(order) - MAX_LINES} smaller tables")


def _tiers(said: Mapping[str, Mapping[str, Any]]) -> Grid:
    """One column per tier, from the top: that fits any terminal."""
    grid = Grid(title="tiers (this rank)", title_justify="left")
    for name in ("", *said):
        grid.add_column(name, justify="right" if name else "left")
    by_tier = [tier_words(TierCounts.of(values)) for values in said.values()]
    for name, *values in zip(TIER_LINES, *by_tier, strict=True):
        grid.add_row(name, *values)
    return grid


def _sent(said: Mapping[str, Any], steps: int) -> Grid:
    grid = Grid(title="what was sent to other ranks (this rank)", title_justify="left")
    for column, name in enumerate(COLUMNS):
        grid.add_column(name, justify="left" if column < 2 else "right")
    for line in table_lines(flat(said["bytes"]), flat(said["messages"]), steps):
        grid.add_row(*line)
    return grid


def show_outcome(console: Console, summary: Mapping[str, Any], folder: Path | None) -> None:
    """Where rows came from, where the time went, and what was reached."""
    sources, total = summary["row_sources"], 0
    grid = Grid(title="where rows came from (this rank)", title_justify="left")
    for name in ("source", "rows", "share"):
        grid.add_column(name, justify="left" if name == "source" else "right")
    names = {
        "resident": "already in memory",
        "read": "read from files",
        "copied": "not yet in files",
        "born": "new (first value)",
    }
    total = sum(sources[name] for name in names) or 1
    for name, words in names.items():
        grid.add_row(words, f"{sources[name]:,}", f"{sources[name] / total:.1%}")
    evicted = sources["evicted_clean"] + sources["evicted_dirty"]
    grid.add_row("(evicted meanwhile)", f"{evicted:,}", "")
    console.print(grid)
    if len(summary.get("tiers") or {}) > 1:
        console.print(_tiers(summary["tiers"]))
    grid = Grid(title="where the time went (training thread)", title_justify="left")
    for name in ("phase", "seconds", "share"):
        grid.add_column(name, justify="left" if name == "phase" else "right")
    seconds = summary["seconds"] or 1e-9
    phases = dict(summary["phases_seconds"])
    phases["everything else"] = max(0.0, seconds - sum(phases.values()))
    for name, spent in sorted(phases.items(), key=lambda item: -item[1]):
        grid.add_row(name, f"{spent:.2f}", f"{spent / seconds:.1%}")
    console.print(grid)
    if summary["sent"]["bytes"]:
        console.print(_sent(summary["sent"], summary["steps"]))
    console.print(
        f"{summary['steps']:,} steps, {summary['samples_per_second']:,.0f} samples/s while training"
    )
    if "prediction_error" in summary:
        console.print(
            f"the plan foretold {summary['predicted_samples_per_second']:,.0f} samples/s: "
            f"{summary['prediction_error']:+.0%} of what was measured"
        )
    if "sent_error" in summary:
        console.print(
            f"the plan foretold {bytes_words(summary['predicted_sent_bytes'])} sent by a rank per step for rows and "
            f"gradients: {summary['sent_error']:+.1%} of what was counted"
        )
    for name, value in summary["metrics"].items():
        if name.split("@")[0].endswith(SHOWN_METRICS) and value == value:  # NaN: undefined here
            console.print(f"{name.replace('_', ' ')}: {value:.4f}")
    if summary["stopped_early"]:
        console.print(
            f"stopped early: scores no longer got better; the best step is {summary['best_step']}"
        )
    if summary["stopped"]:
        console.print(
            "stopped as asked; everything is committed, the same command goes on from here"
        )
    if folder is not None and summary.get("ended_before"):
        console.print(describe_end(folder, summary["step"]), markup=False, soft_wrap=True)
    elif folder is not None:
        console.print(f"run folder: {folder}", markup=False)
        console.print(f"to see it drawn: colonnade report {folder}", markup=False, soft_wrap=True)
