"""Report of a run's tiers: the lines of a table, and charts over the steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from colonnade.report.figures import (
    COLORS,
    Figure,
    Point,
    build_chart,
    build_line_trace,
    thin_points,
)
from colonnade.report.formatting import format_bytes, format_count, format_seconds
from colonnade.report.reading import RunRecord
from colonnade.store.contract import LEVELS, TierCounts

TIER_LINES = (
    "hit rate",
    "rows found",
    "reads",
    "read",
    "rows written",
    "written",
    "write amp.",
    "space amp.",
    "waited",
    "lifetime written",
)
MIB = 2**20


def format_tier_counts(counts: TierCounts) -> list[str]:
    """Return one tier's cells for TIER_LINES; "-" for counts that memory, used in place, does not have."""
    has_device = counts.reads or counts.written_bytes or counts.lifetime_bytes
    device = [
        format_count(counts.reads),
        format_bytes(counts.read_bytes),
        format_count(counts.rows_written),
        format_bytes(counts.written_bytes),
        _format_ratio(counts.write_amplification),
        _format_ratio(counts.space_amplification),
        format_seconds(counts.stall_seconds),
        format_bytes(counts.lifetime_bytes),
    ]
    if not has_device:
        device = ["-" if i != 2 else format_count(counts.rows_written) for i in range(len(device))]
    rate = counts.hit_rate
    return ["-" if rate is None else f"{rate:.1%}", format_count(counts.hits), *device]


def has_moved_rows(counts: Mapping[str, TierCounts], evicted: float) -> bool:
    """Return whether rows moved between tiers; false if files store only checkpoints."""
    names = list(counts)
    tiers = list(counts.values())
    if len(names) < 2:
        return False
    return names[0] != "dram" or evicted > 0 or any(tier.hits or tier.reads for tier in tiers[1:])


def sum_tier_counts(run: RunRecord) -> dict[str, TierCounts]:
    """Return the counts by tier, fastest first: the summary's, else the sums of the lines; {} without tiers."""
    if run.summary.get("tiers"):
        return {name: TierCounts.of(values) for name, values in run.summary["tiers"].items()}
    sums: dict[str, TierCounts] = {}
    for line in run.lines_of_kind("tiers"):
        for name, values in line["tiers"].items():
            earlier = sums.get(name, TierCounts())
            counts = TierCounts.of(values)
            # Current levels are not summed.
            levels = {level: getattr(counts, level) for level in (*LEVELS, "lifetime_bytes")}
            sums[name] = replace(earlier + counts, **levels)
    return sums


TierPoint = tuple[int, float, TierCounts]
"""Step, seconds and counts of a line that has the tier."""


def draw_tier_charts(run: RunRecord) -> list[Figure | None]:
    """Draw the charts of the run's tiers; None for each without data."""
    lines = [line for line in run.lines_of_kind("tiers") if line["tiers"]]
    tiers: dict[str, list[TierPoint]] = defaultdict(list)
    for line in lines:
        for name, values in line["tiers"].items():
            tiers[name].append((line["step"], line.get("seconds") or 0.0, TierCounts.of(values)))
    return [
        _draw_hit_rate_chart(tiers),
        _draw_curves(
            {name: _compute_rates(points, "reads") for name, points in tiers.items()},
            "Reads from below",
            "Requests to the device.",
            y="reads/s",
        ),
        _draw_byte_rate_chart(tiers),
        _draw_waiting_chart(lines),
        _draw_curves(
            {name: _compute_write_amplification(points) for name, points in tiers.items()},
            "Write amplification",
            "Bytes written so far, per byte of evicted or saved rows: includes frames, compaction, checkpoints.",
            y="times",
        ),
        _draw_curves(
            {
                name: _drop_zero_curve([(step, c.lifetime_bytes / MIB) for step, _, c in points])
                for name, points in tiers.items()
            },
            "Lifetime bytes written",
            "Since the run began, restarts included. These bytes wear a device out.",
            y="MiB",
        ),
    ]


def _draw_curves(
    curves: Mapping[str, Sequence[Point]], title: str, note: str, y: str
) -> Figure | None:
    """Draw a line for each curve that has points, in the colour of its place; None without any."""
    data = [
        build_line_trace(thin_points(points), name, COLORS[number % len(COLORS)])
        for number, (name, points) in enumerate(curves.items())
        if points
    ]
    return build_chart(title, note, data, y=y, from_zero=True) if data else None


def _drop_zero_curve(points: list[Point]) -> list[Point]:
    """Return no point if all values are zero."""
    return points if any(value for _, value in points) else []


def _compute_rates(points: Sequence[TierPoint], field: str, unit: float = 1.0) -> list[Point]:
    """Compute a count's increments per second; no points if all are zero."""
    return _drop_zero_curve(
        [(step, getattr(counts, field) / unit / s) for step, s, counts in points if s > 0]
    )


def _draw_hit_rate_chart(tiers: Mapping[str, Sequence[TierPoint]]) -> Figure | None:
    curves = {
        name: [(step, 100 * c.hit_rate) for step, _, c in points if c.hit_rate is not None]
        for name, points in tiers.items()
    }
    note = "Share of the rows looked up in a tier that it had. Rows that no tier has are new."
    figure = _draw_curves(curves, "Hit rates", note, y="percent of rows")
    if figure is not None:
        figure["layout"]["yaxis"]["range"] = [0, 101]
    return figure


def _draw_byte_rate_chart(tiers: Mapping[str, Sequence[TierPoint]]) -> Figure | None:
    curves = {
        f"{name} {words}": _compute_rates(points, field, MIB)
        for name, points in list(tiers.items())[1:]
        for field, words in (("read_bytes", "read"), ("written_bytes", "written"))
    }
    note = "Whole pages read; frames, moved rows and checkpoints written."
    drawn = {name: points for name, points in curves.items() if points}
    return _draw_curves(drawn, "Bytes to and from below", note, y="MiB/s")


def _draw_waiting_chart(lines: list[dict]) -> Figure | None:
    points = [
        (line["step"], 100 * min(1.0, (line.get("waited") or 0.0) / line["seconds"]))
        for line in lines
        if (line.get("seconds") or 0.0) > 0
    ]
    if not points:
        return None
    total = sum(line.get("seconds") or 0.0 for line in lines)
    waited = sum(line.get("waited") or 0.0 for line in lines)
    share = waited / max(total, 1e-9)
    note = f"Share of the training thread's time, evaluation and checkpoints included: {share:.1%} in all."
    data = [build_line_trace(thin_points(points), "waited", COLORS[1])]
    return build_chart(
        "Time spent waiting for rows", note, data, y="percent of time", from_zero=True
    )


def _compute_write_amplification(points: Sequence[TierPoint]) -> list[Point]:
    """Compute the write amplification so far. That of a single line means little: it writes rows of earlier lines."""
    written = accumulate(counts.written_bytes for _, _, counts in points)
    payload = accumulate(counts.payload_bytes for _, _, counts in points)
    return [(step, w / p) for (step, _, _), w, p in zip(points, written, payload, strict=True) if p]


def _format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
