"""Report of a run's tiers: the lines of a table, and charts over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from colonnade.report.figures import COLORS, Figure, build_chart, build_line_trace, thin_points
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


def draw_tier_charts(run: RunRecord) -> list[Figure | None]:
    """Draw the charts of the run's tiers; None for each without data."""
    lines = [line for line in run.lines_of_kind("tiers") if line["tiers"]]
    return [
        _draw_hit_rate_chart(lines),
        _draw_request_rate_chart(lines, "reads", "Reads from below", "reads/s", 1.0),
        _draw_byte_rate_chart(lines),
        _draw_waiting_chart(lines),
        _draw_write_amplification_chart(lines),
        _draw_lifetime_chart(lines),
    ]


def _tier_names(lines: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line["tiers"]))


def _list_tier_points(lines: list[dict], name: str) -> list[tuple[int, float, TierCounts]]:
    """Return (step, seconds, counts) of each line that has the tier."""
    return [
        (line["step"], line.get("seconds") or 0.0, TierCounts.of(line["tiers"][name]))
        for line in lines
        if name in line["tiers"]
    ]


def _draw_hit_rate_chart(lines: list[dict]) -> Figure | None:
    data = []
    for number, name in enumerate(_tier_names(lines)):
        points = [
            (step, 100 * counts.hit_rate)
            for step, _, counts in _list_tier_points(lines, name)
            if counts.hit_rate is not None
        ]
        if points:
            data.append(build_line_trace(*thin_points(points), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Share of the rows looked up in a tier that it had. Rows that no tier has are new."
    figure = build_chart("Hit rates", note, data, y="percent of rows", from_zero=True)
    figure["layout"]["yaxis"]["range"] = [0, 101]
    return figure


def _draw_request_rate_chart(
    lines: list[dict], field: str, title: str, y: str, unit: float
) -> Figure | None:
    data = []
    for number, name in enumerate(_tier_names(lines)):
        points = [
            (step, getattr(counts, field) / unit / seconds)
            for step, seconds, counts in _list_tier_points(lines, name)
            if seconds > 0
        ]
        if any(value for _, value in points):
            data.append(build_line_trace(*thin_points(points), name, COLORS[number % len(COLORS)]))
    return (
        build_chart(title, "Requests to the device.", data, y=y, from_zero=True) if data else None
    )


def _draw_byte_rate_chart(lines: list[dict]) -> Figure | None:
    data: list[dict] = []
    for name in _tier_names(lines)[1:]:
        for field, words in (("read_bytes", "read"), ("written_bytes", "written")):
            points = [
                (step, getattr(counts, field) / MIB / seconds)
                for step, seconds, counts in _list_tier_points(lines, name)
                if seconds > 0
            ]
            if any(value for _, value in points):
                color = COLORS[len(data) % len(COLORS)]
                data.append(build_line_trace(*thin_points(points), f"{name} {words}", color))
    if not data:
        return None
    note = "Whole pages read; frames, moved rows and checkpoints written."
    return build_chart("Bytes to and from below", note, data, y="MiB/s", from_zero=True)


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
    data = [build_line_trace(*thin_points(points), "waited", COLORS[1])]
    return build_chart(
        "Time spent waiting for rows", note, data, y="percent of time", from_zero=True
    )


def _draw_write_amplification_chart(lines: list[dict]) -> Figure | None:
    """Draw the write amplification so far. That of a single line means little: it writes rows of earlier lines."""
    data = []
    for number, name in enumerate(_tier_names(lines)):
        points = _list_tier_points(lines, name)
        written = accumulate(counts.written_bytes for _, _, counts in points)
        payload = accumulate(counts.payload_bytes for _, _, counts in points)
        ratios = [
            (step, w / p) for (step, _, _), w, p in zip(points, written, payload, strict=True) if p
        ]
        if ratios:
            data.append(build_line_trace(*thin_points(ratios), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Bytes written so far, per byte of evicted or saved rows: includes frames, compaction, checkpoints."
    return build_chart("Write amplification", note, data, y="times", from_zero=True)


def _draw_lifetime_chart(lines: list[dict]) -> Figure | None:
    data = []
    for number, name in enumerate(_tier_names(lines)):
        points = [
            (step, counts.lifetime_bytes / MIB)
            for step, _, counts in _list_tier_points(lines, name)
        ]
        if any(value for _, value in points):
            data.append(build_line_trace(*thin_points(points), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Since the run began, restarts included. These bytes wear a device out."
    return build_chart("Lifetime bytes written", note, data, y="MiB", from_zero=True)


def _format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
