"""Runs side by side: their figures, the settings in which they differ, their curves in one chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from colonnade import __version__
from colonnade.report import figures, traffic
from colonnade.report.page import Page
from colonnade.report.reading import (
    RunRecord,
    best_of,
    choice_of,
    chosen_value,
    flatten,
    is_constant,
    is_judged,
    metrics_of,
    tables_of,
)
from colonnade.report.words import (
    bytes_words,
    count_words,
    metric_value,
    metric_words,
    seconds_words,
    setting_words,
)


@dataclass(frozen=True)
class Line:
    """One figure of all runs."""

    name: str
    values: tuple[str, ...]
    best: tuple[int, ...] = ()  # positions of the runs that are best; () where no one is


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Folder names; with as much of the path before them as tells them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def figure_lines(runs: Sequence[RunRecord]) -> list[Line]:
    """Metrics first (at the chosen step, then last), then speed and size. A run without a figure shows "-"."""
    found: list[Line] = []
    evaluated, choices = [metrics_of(run) for run in runs], [choice_of(run) for run in runs]
    if any(choices):
        found.append(Line("chosen step", tuple(c.words if c else "-" for c in choices)))
    pairs = dict.fromkeys(
        (metric, part) for each in evaluated for metric, parts in each.items() for part in parts
    )
    for metric, part in pairs:
        points = [each.get(metric, {}).get(part, []) for each in evaluated]
        name = f"{part} {metric_words(metric)}"
        if is_judged(metric):
            chosen = [
                chosen_value(c, p)[1] if c and p else None
                for c, p in zip(choices, points, strict=True)
            ]
            found.append(_judged(f"{name}, chosen", metric, chosen))
        elif is_constant(metric):
            continue
        if any(len(p) > 1 for p in points) or not is_judged(metric):
            last = [p[-1][1] if p else None for p in points]
            found.append(
                _judged(f"{name}, last", metric, last)
                if is_judged(metric)
                else Line(name, tuple(metric_value(metric, v) for v in last))
            )
    rates = [_rate(run) for run in runs]
    known = [rate for rate in rates if rate is not None]
    fastest = tuple(i for i, r in enumerate(rates) if len(known) > 1 and r == max(known))
    found.append(Line("samples/s, median", tuple(map(count_words, rates)), fastest))
    found.append(Line("steps", tuple(f"{run.step:,}" for run in runs)))
    found.append(Line("time", tuple(seconds_words(run.seconds or None) for run in runs)))
    found.append(Line("ranks", tuple(str(run.plan.get("num_ranks", "-")) for run in runs)))
    rows = [sum(t.rows_known for t in tables_of(run)) or None for run in runs]
    found.append(Line("rows known, rank 0", tuple(map(count_words, rows))))
    sizes = [run.summary.get("resident_bytes") for run in runs]
    found.append(Line("memory for rows, rank 0", tuple(map(bytes_words, sizes))))
    sent = [sum(traffic.totals(run).values()) for run in runs]
    if any(sent):
        found.append(Line("sent by rank 0", tuple(map(bytes_words, sent))))
    found.append(Line("status", tuple(run.status for run in runs)))
    return found


def different_settings(runs: Sequence[RunRecord]) -> list[Line]:
    """Those that are not the same in all runs, and only those; of machines the processor, threads and torch."""
    flat = [flatten(run.config) | _machine(run) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    missing = object()
    found = []
    for name in names:
        values = [each.get(name, missing) for each in flat]
        if any(value != values[0] for value in values):
            found.append(
                Line(name, tuple("-" if v is missing else setting_words(v, name) for v in values))
            )
    return found


def compare_page(runs: Sequence[RunRecord]) -> str:
    """The page's HTML."""
    names = names_of(runs)
    page = Page(f"{len(runs)} runs compared")
    page.header("Comparison", "Best figures are marked. Runs: " + ", ".join(names) + ".")
    lines = figure_lines(runs)
    page.numbers(
        ["", *names], [[line.name, *line.values] for line in lines],
        best={i: [1 + b for b in line.best] for i, line in enumerate(lines)},
    )  # fmt: skip
    page.heading("Settings that differ")
    different = different_settings(runs)
    if different:
        rows = [[line.name, *line.values] for line in different]
        page.numbers(["setting", *names], rows, wraps=True)
    else:
        page.charts([], "None: all settings are the same.")
    page.heading("Curves")
    page.charts(figures.overlaid(dict(zip(names, runs, strict=True))), "Nothing recorded yet.")
    page.footer(f"Colonnade {__version__} · written {datetime.now():%Y-%m-%d %H:%M}")
    return page.html()


def _judged(name: str, metric: str, values: Sequence[float | None]) -> Line:
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    best: tuple[int, ...] = ()
    if len(points) > 1:
        top = best_of(metric, points)[1]
        best = tuple(i for i, value in points if value == top)
        best = () if len(best) == len(points) else best
    return Line(name, tuple(metric_value(metric, value) for value in values), best)


def _rate(run: RunRecord) -> float | None:
    rates = [v for line in run.of_kind("train") if (v := line.get("samples_per_second"))]
    return statistics.median(rates) if rates else None


def _machine(run: RunRecord) -> dict[str, Any]:
    versions = run.machine.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {
        "machine.processor": run.machine.get("processor"),
        "machine.processors": run.machine.get("processors"),
        "machine.threads": run.machine.get("threads"),
        "machine.isa": run.machine.get("isa"),
        "machine.torch": versions.get("torch"),
        "machine.colonnade": versions.get("colonnade"),
    }
