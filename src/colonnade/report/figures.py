"""A run's charts as plain plotly.js figures: pure functions of what was read.

A figure is {"title", "note", "data", "layout"}, or None where the run has nothing to draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from colonnade.report.reading import (
    RunRecord,
    TableFigures,
    choice_of,
    chosen_value,
    is_constant,
    is_judged,
    metrics_of,
    sums_of,
)
from colonnade.report.words import (
    bytes_words,
    count_words,
    metric_value,
    metric_words,
    seconds_words,
)

Figure = dict[str, Any]

COLORS = ("#3a6fb0", "#c8772f", "#2f9080", "#8a63ad", "#b0923a", "#b6546a", "#5c8f3f", "#7b8794")
FAINT = "rgba(123,135,148,0.45)"
MAX_POINTS = 1200
"""Longer curves are drawn as means of runs of points: a page must stay light."""
MAX_TABLES = 15
MAX_METRICS = 8
PHASE_ORDER = (
    "forward",
    "backward",
    "check gradients",
    "push rows",
    "clip rows",
    "clip dense",
    "update rows",
    "update dense",
    "wait for rows",
    "exchange: rows",
    "exchange: row gradients",
    "exchange: dense gradients",
    "exchange: samples",
    "exchange: other",
    "evaluate",
    "checkpoint",
)
PER_STEP = PHASE_ORDER[:-2]
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def losses(run: RunRecord) -> Figure | None:
    lines = run.of_kind("train")
    known = [(line["step"], line.get("loss")) for line in lines]
    points = [(step, value) for step, value in known if value is not None]
    if not known:
        return None
    steps, values = thinned(points)
    smooth = smoothed(values)
    data = [curve(steps, smooth, "loss", COLORS[0], width=2.4)]
    if smooth != [_short(value) for value in values]:
        data = [
            curve(steps, values, "recorded", FAINT, width=1.2),
            curve(steps, smooth, "smoothed", COLORS[0], width=2.4),
        ]
    bad = len(known) - len(points)
    note = f"Mean over a batch, in nats. {_every(lines)}"
    if bad:
        first = next(step for step, value in known if value is None)
        note += (
            f" {bad} of {len(known)} recorded losses are not finite, the first at step {first:,}."
        )
    return chart("Training loss", note, data, y="loss")


def metric_charts(run: RunRecord) -> list[Figure]:
    """One chart for each metric that was evaluated more than once, the chosen step marked."""
    found: list[Figure] = []
    choice = choice_of(run)
    order = ("test", "validation", "train")
    for metric, parts in metrics_of(run).items():
        if is_constant(metric) or len(found) == MAX_METRICS:
            continue
        if max(map(len, parts.values())) < 2:
            continue
        data, note = [], []
        for number, part in enumerate(sorted(parts, key=lambda p: (p not in order, p))):
            points = parts[part]
            steps, values = [p[0] for p in points], [p[1] for p in points]
            data.append(curve(steps, values, part, COLORS[number % len(COLORS)], markers=True))
            if is_judged(metric) and choice is not None:
                step, value = chosen_value(choice, points)
                note.append(f"{part} {metric_value(metric, value)} at step {step:,}")
                data.append(
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "x": [step],
                        "y": [value],
                        "name": f"chosen {part}",
                        "showlegend": False,
                        "hoverinfo": "skip",
                        "marker": {
                            "symbol": "circle-open",
                            "size": 17,
                            "line": {"width": 2},
                            "color": COLORS[number % len(COLORS)],
                        },
                    }
                )
        words = metric_words(metric)
        title = words[0].upper() + words[1:]
        found.append(
            chart(title, "; ".join(note).capitalize() + "." if note else "", data, y=words)
        )
    return found


def learning_rates(run: RunRecord) -> Figure | None:
    """None where they never change: then the settings say it all."""
    lines = [line for line in run.of_kind("train") if isinstance(line.get("lr"), dict)]
    names = dict.fromkeys(name for line in lines for name in line["lr"])
    curves = {
        name: [(line["step"], line["lr"][name]) for line in lines if name in line["lr"]]
        for name in names
    }
    moving = {n: points for n, points in curves.items() if len({v for _, v in points}) > 1}
    if not moving:
        return None
    data = []
    for number, (name, points) in enumerate(list(moving.items())[: len(COLORS)]):
        steps, values = thinned(points)
        data.append(curve(steps, values, name.replace(".", " "), COLORS[number]))
    return chart("Learning rates", "By param group.", data, y="learning rate")


def throughput(run: RunRecord) -> Figure | None:
    points = [
        (line["step"], line["samples_per_second"])
        for line in run.of_kind("train")
        if line.get("samples_per_second")
    ]
    if not points:
        return None
    steps, values = thinned(points)
    middle = statistics.median(value for _, value in points)
    data = [curve(steps, values, "samples/s", COLORS[2])]
    note = (
        f"Over all ranks, evaluation and checkpoints aside. Median {count_words(middle)} samples/s."
    )
    return chart("Throughput", note, data, y="samples per second", from_zero=True)


def phases_total(run: RunRecord) -> Figure | None:
    """Where the training thread's time went, all in all."""
    sums = sums_of(run, "phases")
    total = sums.pop("total", 0.0) or sum(sums.values())
    if not total:
        return None
    sums["everything else"] = max(0.0, total - sum(sums.values()))
    steps = max(1, _steps(run))
    parts = sorted(((s, n) for n, s in sums.items() if s > 0), reverse=True)
    names = [name for _, name in parts][::-1]
    seconds = [spent for spent, _ in parts][::-1]
    words = [
        f" {spent / total:.1%}" + (f" · {seconds_words(spent / steps)}" if name in PER_STEP else "")
        for name, spent in zip(names, seconds, strict=True)
    ]
    data = [_bars(names, seconds, "seconds", COLORS[0], words, unit=" s")]
    note = (
        f"{seconds_words(total)} on the training thread in {steps:,} steps; beside each bar its share, "
        "and its time in one step."
    )
    return chart("Phases of a step", note, data, x="seconds", bars=len(names), room=0.68)


def phases_over_time(run: RunRecord) -> Figure | None:
    """Milliseconds a step, stacked."""
    lines = run.of_kind("phases")
    if len(lines) < 3:
        return None
    spans = steps_between(lines)
    found = [name for name in PER_STEP if any(line.get(name) for line in lines)]
    data = []
    for number, name in enumerate(found):
        points = [
            (line["step"], 1e3 * (line.get(name) or 0.0) / span)
            for line, span in zip(lines, spans, strict=True)
            if span
        ]
        steps, values = thinned(points)
        data.append(area(steps, values, name, COLORS[number % len(COLORS)], unit=" ms"))
    return chart(
        "Phases of a step over time",
        "Stacked: together they are the time of a step, evaluation and checkpoints aside.",
        data,
        y="milliseconds a step",
        from_zero=True,
    )


def row_sources(run: RunRecord) -> Figure | None:
    lines = [line for line in run.of_kind("rows") if _needed(line)]
    if not lines:
        return None
    words = {"resident": "already in memory", "read": "read from files", "born": "new"}
    data = []
    for number, (name, shown) in enumerate(words.items()):
        points = [(line["step"], 100 * (line.get(name) or 0) / _needed(line)) for line in lines]
        steps, values = thinned(points)
        data.append(area(steps, values, shown, COLORS[number], unit=" %"))
    sums = sums_of(run, "rows")
    total = sum(sums.get(name, 0) for name in words) or 1
    said = ", ".join(f"{sums.get(n, 0) / total:.1%} {shown}" for n, shown in words.items())
    note = f"Of {count_words(total)} rows that batches needed: {said}. {count_words(sums.get('evicted', 0))} evicted."
    figure = chart("Row sources", note, data, y="percent of rows needed", from_zero=True)
    figure["layout"]["yaxis"]["range"] = [0, 100]
    return figure


def table_sizes(tables: Sequence[TableFigures]) -> Figure | None:
    sized = [t for t in tables if t.bytes_in_memory or t.bytes_in_files]
    if not sized:
        return None
    shown, rest = sized[:MAX_TABLES][::-1], sized[MAX_TABLES:]
    names = [t.name for t in shown]
    largest = max(max(t.bytes_in_memory, t.bytes_in_files) for t in shown)
    power, unit = next(((p, u) for p, u in UNITS if largest >= 2**p), UNITS[-1])
    memory = [t.bytes_in_memory / 2**power for t in shown]
    files = [t.bytes_in_files / 2**power for t in shown]
    data = [_bars(names, memory, "in memory", COLORS[0], unit=f" {unit}")]
    if any(files):  # drawn from the bottom up: memory is to be on top
        data.insert(0, _bars(names, files, "in files", COLORS[1], unit=f" {unit}"))
    total = bytes_words(sum(t.bytes_in_memory for t in sized))
    below = bytes_words(sum(t.bytes_in_files for t in sized))
    note = f"Weights, optimizer state and clocks of the first rank with rows: {total} in memory, {below} in files."
    if rest:
        more = bytes_words(sum(t.bytes_in_memory for t in rest))
        note += f" Not drawn: {len(rest):,} smaller tables, {more} in memory."
    return chart("Table sizes", note, data, x=unit, bars=len(names), barmode="group")


def table_traffic(tables: Sequence[TableFigures]) -> Figure | None:
    used = sorted((t for t in tables if t.lookups), key=lambda t: -(t.unique or 0))
    if not used:
        return None
    shown, rest = used[:MAX_TABLES][::-1], used[MAX_TABLES:]
    names = [t.name for t in shown]
    data = [
        _bars(names, [t.lookups or 0 for t in shown], "lookups", FAINT),
        _bars(names, [t.unique or 0 for t in shown], "different rows", COLORS[2]),
    ]
    all_lookups, all_unique = sum(t.lookups or 0 for t in used), sum(t.unique or 0 for t in used)
    note = (
        f"The median batch of rank 0 makes {count_words(all_lookups)} lookups of {count_words(all_unique)} "
        f"different rows, {all_lookups / max(1.0, all_unique):.1f} of each on average."
    )
    if rest:
        note += f" Not drawn: {len(rest):,} tables with fewer rows in a batch."
    return chart("Table traffic", note, data, x="per batch", bars=len(names), barmode="overlay")


def overlaid(runs: Mapping[str, RunRecord]) -> list[Figure]:
    """The same curves of several runs, by name: losses, metrics, throughput."""
    found = []
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, run in runs.items():
        lines = run.of_kind("train")
        known = [(line["step"], line.get("loss")) for line in lines]
        curves.setdefault("training loss", {})[name] = [(s, v) for s, v in known if v is not None]
        for metric, parts in metrics_of(run).items():
            for part, points in parts.items():
                if not is_constant(metric):
                    curves.setdefault(f"{part} {metric_words(metric)}", {})[name] = points
        rates = [(line["step"], line.get("samples_per_second")) for line in lines]
        curves.setdefault("samples per second", {})[name] = [(s, v) for s, v in rates if v]
    for title, by_run in curves.items():
        data = []
        for number, name in enumerate(runs):
            steps, values = thinned(by_run.get(name, []))
            if title == "training loss":
                values = smoothed(values)
            if steps:
                color = COLORS[number % len(COLORS)]
                data.append(curve(steps, values, name, color, markers=len(steps) < 40))
        if data:
            note = "Smoothed." if title == "training loss" else ""
            is_rate = title == "samples per second"
            figure = chart(title[0].upper() + title[1:], note, data, y=title, from_zero=is_rate)
            figure["layout"]["showlegend"] = True
            found.append(figure)
    return found


def thinned(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS, each the mean of a run of neighbours."""
    run = -(-len(points) // MAX_POINTS) if points else 1
    steps, values = [], []
    for start in range(0, len(points), run):
        part = points[start : start + run]
        steps.append(part[-1][0])
        values.append(_short(sum(value for _, value in part) / len(part)))
    return steps, values


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponentially, over about a fiftieth of the curve, free of bias at its start."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(_short(total / weight))
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _needed(line: Mapping[str, Any]) -> float:
    return sum(line.get(name) or 0 for name in ("resident", "read", "born"))


def steps_between(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps that each line covers."""
    steps = [0, *(line["step"] for line in lines)]
    return [max(0, after - before) for before, after in pairwise(steps)]


def _steps(run: RunRecord) -> int:
    return sum(steps_between(run.of_kind("phases")))


def _every(lines: Sequence[Mapping[str, Any]]) -> str:
    gaps = [b["step"] - a["step"] for a, b in pairwise(lines)]
    gap = round(statistics.median(gaps)) if gaps else 0
    return f"One point in {gap} steps." if gap > 1 else ""


def curve(
    x: list, y: list, name: str, color: str, *, width: float = 2.0, markers: bool = False
) -> dict:
    trace = {"type": "scatter", "mode": "lines+markers" if markers or len(x) == 1 else "lines"}
    return trace | {
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 7},
        "hovertemplate": "%{y:.6g}",
    }


def area(x: list, y: list, name: str, color: str, unit: str) -> dict:
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": x,
        "y": y,
        "name": name,
        "stackgroup": "all",
        "line": {"color": color, "width": 0.8},
        "fillcolor": _pale(color),
        "marker": {"color": color, "size": 7},
        "hovertemplate": f"%{{y:.4g}}{unit}",
    }


def _bars(
    names: list, values: list, name: str, color: str, words: list | None = None, unit: str = ""
) -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": [_short(v) for v in values],
        "name": name,
        "marker": {"color": color},
        "text": words,
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"%{{y}}: %{{x:,.4g}}{unit}",
    }


def _pale(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.62)"


def chart(
    title: str,
    note: str,
    data: list[dict],
    *,
    x: str = "step",
    y: str = "",
    from_zero: bool = False,
    bars: int = 0,
    barmode: str = "stack",
    room: float = 0.0,
) -> Figure:
    """`bars`: how many lines of horizontal bars; 0: curves. `room`: share of the width to leave right of the
    longest bar, for its words."""
    named = [trace for trace in data if trace.get("showlegend", True)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": x}, "rangemode": "tozero" if bars else "normal"},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero" if from_zero else "normal"},
        "showlegend": len(named) > 1,
        "barmode": barmode,
        "height": 120 + 26 * bars if bars else 320 + 12 * max(0, len(named) - 3),
        "hovermode": "closest" if bars else "x unified",
    }
    if bars:
        layout["yaxis"] |= {"type": "category", "showgrid": False, "ticks": ""}
    if room:
        longest = max((max(t["x"], default=0) for t in data), default=0)
        layout["xaxis"]["range"] = [0, longest / (1 - room)]
    return {"title": title, "note": note, "data": data, "layout": layout}
