"""Charts of a run as plain plotly.js figures: pure functions of a `RunRecord`.

A figure is {"title", "note", "data", "layout"}, or None without data to draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from colonnade.plan.advice import limit_speedup, predict_speedup
from colonnade.report.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_metric_name,
    format_seconds,
)
from colonnade.report.reading import (
    RunRecord,
    TableFigures,
    collect_metrics,
    is_constant,
    is_judged,
    select_evaluation,
    sum_metrics_lines,
    value_at_selection,
)
from colonnade.train.phases import EXPOSED, OTHER, WAITING

Figure = dict[str, Any]
Point = tuple[int, float]
"""Step, and value at that step."""

COLORS = ("#3a6fb0", "#c8772f", "#2f9080", "#8a63ad", "#b0923a", "#b6546a", "#5c8f3f", "#7b8794")
FAINT = "rgba(123,135,148,0.45)"
MAX_POINTS = 1200
"""Number of points of a curve; longer ones are drawn as means of neighbouring points, to keep the page small."""
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
    "teacher",
    "evaluate",
    "checkpoint",
)
PER_STEP = PHASE_ORDER[:-2]
WAITS = (WAITING, *EXPOSED.values(), OTHER)
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def draw_loss_chart(run: RunRecord) -> Figure | None:
    """Draw the training loss, recorded and smoothed."""
    lines = run.lines_of_kind("train")
    losses_by_step = [(line["step"], line.get("loss")) for line in lines]
    points = [(step, value) for step, value in losses_by_step if value is not None]
    if not losses_by_step:
        return None
    thinned = thin_points(points)
    smooth = smooth_curve(thinned)
    data = [build_line_trace(smooth, "loss", COLORS[0], width=2.4)]
    if smooth != thinned:
        data = [
            build_line_trace(thinned, "recorded", FAINT, width=1.2),
            build_line_trace(smooth, "smoothed", COLORS[0], width=2.4),
        ]
    bad = len(losses_by_step) - len(points)
    note = f"Mean over a batch, in nats. {_describe_interval(lines)}"
    if bad:
        first = next(step for step, value in losses_by_step if value is None)
        note += f" {bad} of {len(losses_by_step)} recorded losses are not finite, the first at step {first:,}."
    return build_chart("Training loss", note, data, y="loss")


def draw_metric_charts(run: RunRecord) -> list[Figure]:
    """Draw a chart for each metric that was evaluated more than once, with the selected step marked."""
    charts: list[Figure] = []
    selection = select_evaluation(run)
    order = ("test", "validation", "train")
    for metric, parts in collect_metrics(run).items():
        if is_constant(metric) or len(charts) == MAX_METRICS:
            continue
        if max(map(len, parts.values())) < 2:
            continue
        data = []
        note = []
        for number, part in enumerate(sorted(parts, key=lambda p: (p not in order, p))):
            points = parts[part]
            data.append(build_line_trace(points, part, COLORS[number % len(COLORS)], markers=True))
            if is_judged(metric) and selection is not None:
                step, value = value_at_selection(selection, points)
                note.append(f"{part} {format_metric(metric, value)} at step {step:,}")
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
        label = format_metric_name(metric)
        title = label[0].upper() + label[1:]
        charts.append(
            build_chart(title, "; ".join(note).capitalize() + "." if note else "", data, y=label)
        )
    return charts


def draw_codistillation_chart(run: RunRecord) -> Figure | None:
    """Draw how much the group differs from its teacher, and both terms of its loss; None without a teacher."""
    lines = [line for line in run.lines_of_kind("train") if line.get("teacher")]
    names = ("peer_difference", "label_loss", "peer_loss")
    data = [
        build_line_trace(
            smooth_curve(
                thin_points([(line["step"], line[name]) for line in lines if name in line])
            ),
            name.replace("_", " "),
            color,
        )
        for name, color in zip(names, COLORS, strict=False)
    ]
    note = "Of samples of the first rank: cross entropy of the labels and of the peer's predictions, in nats; mean of "
    return (
        build_chart(
            "Codistillation", f"{note}|own probability - the peer's|.", data, y="loss, difference"
        )
        if lines
        else None
    )


def draw_learning_rate_chart(run: RunRecord) -> Figure | None:
    """Draw the learning rates; None if they are constant, as the settings then show them."""
    lines = [line for line in run.lines_of_kind("train") if isinstance(line.get("lr"), dict)]
    names = dict.fromkeys(name for line in lines for name in line["lr"])
    curves = {
        name: [(line["step"], line["lr"][name]) for line in lines if name in line["lr"]]
        for name in names
    }
    changing = {n: points for n, points in curves.items() if len({v for _, v in points}) > 1}
    if not changing:
        return None
    data = []
    for number, (name, points) in enumerate(list(changing.items())[: len(COLORS)]):
        data.append(build_line_trace(thin_points(points), name.replace(".", " "), COLORS[number]))
    return build_chart("Learning rates", "By param group.", data, y="learning rate")


def draw_throughput_chart(run: RunRecord) -> Figure | None:
    """Draw the samples per second of training."""
    points = [
        (line["step"], line["samples_per_second"])
        for line in run.lines_of_kind("train")
        if line.get("samples_per_second")
    ]
    if not points:
        return None
    median = statistics.median(value for _, value in points)
    data = [build_line_trace(thin_points(points), "samples/s", COLORS[2])]
    note = f"Over all ranks, without evaluation and checkpoints. Median {format_count(median)} samples/s."
    return build_chart("Throughput", note, data, y="samples per second", from_zero=True)


def draw_phase_total_chart(run: RunRecord) -> Figure | None:
    """Draw the total time of the training thread by phase."""
    sums = sum_metrics_lines(run, "phases")
    total = sums.pop("total", 0.0) or sum(sums.values())
    if not total:
        return None
    sums["everything else"] = max(0.0, total - sum(sums.values()))
    steps = max(1, _count_steps(run))
    parts = sorted(((s, n) for n, s in sums.items() if s > 0), reverse=True)
    names = [name for _, name in parts][::-1]
    seconds = [spent for spent, _ in parts][::-1]
    labels = [
        f" {spent / total:.1%}"
        + (f" · {format_seconds(spent / steps)}" if name in PER_STEP else "")
        for name, spent in zip(names, seconds, strict=True)
    ]
    data = [_build_bar_trace(names, seconds, "seconds", COLORS[0], labels, unit=" s")]
    note = (
        f"{format_seconds(total)} on the training thread in {steps:,} steps. Each bar is labelled with its share and "
        "its time in one step."
    )
    figure = build_chart("Phases of a step", note, data, x="seconds", bars=len(names))
    # Room to the right of the longest bar for its label.
    figure["layout"]["xaxis"]["range"] = [0, max(seconds, default=0) / 0.32]
    return figure


def draw_phase_history_chart(run: RunRecord) -> Figure | None:
    """Draw the milliseconds of a step by phase, stacked, over the steps."""
    lines = run.lines_of_kind("phases")
    if len(lines) < 3:
        return None
    spans = steps_between(lines)
    phases = [name for name in PER_STEP if any(line.get(name) for line in lines)]
    data = []
    for number, name in enumerate(phases):
        points = [
            (line["step"], 1e3 * (line.get(name) or 0.0) / span)
            for line, span in zip(lines, spans, strict=True)
            if span
        ]
        data.append(build_area_trace(points, name, COLORS[number % len(COLORS)], unit=" ms"))
    return build_chart(
        "Phases of a step over time",
        "Stacked: the sum is the time of a step, without evaluation and checkpoints.",
        data,
        y="milliseconds a step",
        from_zero=True,
    )


def draw_scaling_chart(run: RunRecord, num_ranks: int) -> Figure | None:
    """Draw the speed-up of more and of fewer ranks if each waited as long in a step as this run's did, and its own
    (lemma of ranks, Zou et al. 2017); None on one rank, or without waits.

    num_ranks: trainers of the run."""
    sums = sum_metrics_lines(run, "phases")
    seconds = {name: sums.get(name, 0.0) for name in PER_STEP}
    waiting = sum(seconds[name] for name in WAITS)
    computing = num_ranks * (sum(seconds.values()) - waiting)
    if num_ranks == 1 or computing <= 0 or not waiting:
        return None
    overhead = waiting / computing
    numbers = sorted({num_ranks, *(2**power for power in range((8 * num_ranks).bit_length()))})
    points = [(number, predict_speedup(overhead, number)) for number in numbers]
    own = predict_speedup(overhead, num_ranks)
    data = [
        build_line_trace(points, "if waits stay the same", COLORS[0]),
        build_line_trace([(num_ranks, own)], "this run", COLORS[1], markers=True),
    ]
    note = (
        f"R = {overhead:.2g}: the time in which rank 0 waited for rows and other ranks, over what {num_ranks} ranks "
        f"computed. So this run has {own / num_ranks:.0%} of the speed of ranks that never wait, and any number of "
        f"ranks at most {limit_speedup(overhead):,.1f} times the speed of one. Waits change with the number of ranks: "
        "colonnade plan --advise predicts each."
    )
    return build_chart("Speed-up by ranks", note, data, x="ranks", y="speed-up", from_zero=True)


ROW_SOURCES = {
    "resident": "already in memory",
    "read": "read from files",
    "born": "new",
    "mapped": "in mapped memory",
}


def draw_row_source_chart(run: RunRecord) -> Figure | None:
    """Draw the shares of rows that were in memory or mapped memory, were read from files, or were initialised."""
    lines = [line for line in run.lines_of_kind("rows") if _count_rows(line)]
    if not lines:
        return None
    labels = dict(ROW_SOURCES)
    if not any(line.get("mapped") for line in lines):
        del labels["mapped"]
    data = []
    for number, (name, label) in enumerate(labels.items()):
        points = [(line["step"], 100 * (line.get(name) or 0) / _count_rows(line)) for line in lines]
        data.append(build_area_trace(points, label, COLORS[number], unit=" %"))
    sums = sum_metrics_lines(run, "rows")
    total = sum(sums.get(name, 0) for name in labels) or 1
    shares = ", ".join(f"{sums.get(n, 0) / total:.1%} {label}" for n, label in labels.items())
    evicted = sums.get("evicted", 0)
    note = f"Of {format_count(total)} rows that batches needed: {shares}. {format_count(evicted)} evicted."
    figure = build_chart("Row sources", note, data, y="percent of rows needed", from_zero=True)
    figure["layout"]["yaxis"]["range"] = [0, 100]
    return figure


def draw_table_size_chart(tables: Sequence[TableFigures]) -> Figure | None:
    """Draw the bytes of the largest tables in memory and in files."""
    sized = [t for t in tables if t.bytes_in_memory or t.bytes_in_files]
    if not sized:
        return None
    shown = sized[:MAX_TABLES][::-1]
    rest = sized[MAX_TABLES:]
    names = [t.name for t in shown]
    largest = max(max(t.bytes_in_memory, t.bytes_in_files) for t in shown)
    power, unit = next(((p, u) for p, u in UNITS if largest >= 2**p), UNITS[-1])
    memory = [t.bytes_in_memory / 2**power for t in shown]
    files = [t.bytes_in_files / 2**power for t in shown]
    data = [_build_bar_trace(names, memory, "in memory", COLORS[0], unit=f" {unit}")]
    if any(files):  # bars are drawn from the bottom up, and memory goes on top
        data.insert(0, _build_bar_trace(names, files, "in files", COLORS[1], unit=f" {unit}"))
    total = format_bytes(sum(t.bytes_in_memory for t in sized))
    below = format_bytes(sum(t.bytes_in_files for t in sized))
    note = f"Weights, optimizer state and clocks of the first rank with rows: {total} in memory, {below} in files."
    if rest:
        more = format_bytes(sum(t.bytes_in_memory for t in rest))
        note += f" Not drawn: {len(rest):,} smaller tables, {more} in memory."
    figure = build_chart("Table sizes", note, data, x=unit, bars=len(names))
    figure["layout"]["barmode"] = "group"
    return figure


def draw_table_traffic_chart(tables: Sequence[TableFigures]) -> Figure | None:
    """Draw the lookups and the distinct rows of a median batch, by table."""
    used = sorted((t for t in tables if t.lookups), key=lambda t: -(t.unique or 0))
    if not used:
        return None
    shown = used[:MAX_TABLES][::-1]
    rest = used[MAX_TABLES:]
    names = [t.name for t in shown]
    data = [
        _build_bar_trace(names, [t.lookups or 0 for t in shown], "lookups", FAINT),
        _build_bar_trace(names, [t.unique or 0 for t in shown], "distinct rows", COLORS[2]),
    ]
    all_lookups = sum(t.lookups or 0 for t in used)
    all_unique = sum(t.unique or 0 for t in used)
    note = (
        f"The median batch of rank 0 makes {format_count(all_lookups)} lookups of {format_count(all_unique)} "
        f"distinct rows, {all_lookups / max(1.0, all_unique):.1f} lookups of each row on average."
    )
    if rest:
        note += f" Not drawn: {len(rest):,} tables with fewer rows in a batch."
    figure = build_chart("Table traffic", note, data, x="per batch", bars=len(names))
    figure["layout"]["barmode"] = "overlay"
    return figure


def draw_overlay_charts(runs: Mapping[str, RunRecord]) -> list[Figure]:
    """Draw the losses, metrics and throughput of several runs in common charts."""
    charts = []
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, run in runs.items():
        lines = run.lines_of_kind("train")
        losses_by_step = [(line["step"], line.get("loss")) for line in lines]
        curves.setdefault("training loss", {})[name] = [
            (s, v) for s, v in losses_by_step if v is not None
        ]
        for metric, parts in collect_metrics(run).items():
            for part, points in parts.items():
                if not is_constant(metric):
                    curves.setdefault(f"{part} {format_metric_name(metric)}", {})[name] = points
        rates = [(line["step"], line.get("samples_per_second")) for line in lines]
        curves.setdefault("samples per second", {})[name] = [(s, v) for s, v in rates if v]
    for title, by_run in curves.items():
        data = []
        for number, name in enumerate(runs):
            points = thin_points(by_run.get(name, []))
            if title == "training loss":
                points = smooth_curve(points)
            if points:
                color = COLORS[number % len(COLORS)]
                data.append(build_line_trace(points, name, color, markers=len(points) < 40))
        if data:
            note = "Smoothed." if title == "training loss" else ""
            is_rate = title == "samples per second"
            figure = build_chart(
                title[0].upper() + title[1:], note, data, y=title, from_zero=is_rate
            )
            figure["layout"]["showlegend"] = True
            charts.append(figure)
    return charts


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Reduce a curve to at most MAX_POINTS points, each the mean of neighbouring points."""
    size = -(-len(points) // MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (group[-1][0], _round_digits(sum(value for _, value in group) / len(group)))
        for group in groups
    ]


def smooth_curve(points: Sequence[Point]) -> list[Point]:
    """Smooth a curve exponentially over about a fiftieth of it, without bias at its start."""
    decay = 1 - 1 / max(1.0, len(points) / 50)
    total = weight = 0.0
    averages = []
    for step, value in points:
        total = decay * total + value
        weight = decay * weight + 1
        averages.append((step, _round_digits(total / weight)))
    return averages


def _round_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _count_rows(line: Mapping[str, Any]) -> float:
    return sum(line.get(name) or 0 for name in ROW_SOURCES)


def steps_between(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of steps that each line covers."""
    steps = [0, *(line["step"] for line in lines)]
    return [max(0, end - begin) for begin, end in pairwise(steps)]


def _count_steps(run: RunRecord) -> int:
    return sum(steps_between(run.lines_of_kind("phases")))


def _describe_interval(lines: Sequence[Mapping[str, Any]]) -> str:
    gaps = [b["step"] - a["step"] for a, b in pairwise(lines)]
    gap = round(statistics.median(gaps)) if gaps else 0
    return f"One point in {gap} steps." if gap > 1 else ""


def build_line_trace(
    points: Sequence[Point], name: str, color: str, *, width: float = 2.0, markers: bool = False
) -> dict:
    """Return a plotly trace of a line."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers or len(points) == 1 else "lines",
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "name": name,
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 7},
        "hovertemplate": "%{y:.6g}",
    }


def build_area_trace(points: Sequence[Point], name: str, color: str, unit: str) -> dict:
    """Return a plotly trace of a stacked area, of the curve's thinned points."""
    return build_line_trace(thin_points(points), name, color, width=0.8) | {
        "mode": "lines" if len(points) > 1 else "markers",
        "stackgroup": "all",
        "fillcolor": _make_translucent(color),
        "hovertemplate": f"%{{y:.4g}}{unit}",
    }


def _build_bar_trace(
    bar_names: list,
    bar_values: list,
    name: str,
    color: str,
    labels: list | None = None,
    unit: str = "",
) -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "y": bar_names,
        "x": [_round_digits(v) for v in bar_values],
        "name": name,
        "marker": {"color": color},
        "text": labels,
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"%{{y}}: %{{x:,.4g}}{unit}",
    }


def _make_translucent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.62)"


def build_chart(
    title: str,
    note: str,
    data: list[dict],
    *,
    x: str = "step",
    y: str = "",
    from_zero: bool = False,
    bars: int = 0,
) -> Figure:
    """Build a figure from traces. bars: number of horizontal bars; 0: curves."""
    in_legend = [trace for trace in data if trace.get("showlegend", True)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": x}, "rangemode": "tozero" if bars else "normal"},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero" if from_zero else "normal"},
        "showlegend": len(in_legend) > 1,
        "barmode": "stack",
        "height": 120 + 26 * bars if bars else 320 + 12 * max(0, len(in_legend) - 3),
        "hovermode": "closest" if bars else "x unified",
    }
    if bars:
        layout["yaxis"] |= {"type": "category", "showgrid": False, "ticks": ""}
    return {"title": title, "note": note, "data": data, "layout": layout}
