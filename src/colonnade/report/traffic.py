"""Traffic of rank 0: a table and a chart of bytes sent per step, by channel and link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colonnade.report.figures import (
    COLORS,
    Figure,
    build_area_trace,
    build_chart,
    steps_between,
)
from colonnade.report.formatting import format_bytes, format_count
from colonnade.report.reading import RunRecord

LINK_WORDS = {"local": "same host", "remote": "other hosts"}
COLUMNS = ("channel", "link", "bytes a step", "messages a step", "bytes in all")
MIB = 2**20

Key = tuple[str, str]


def sum_run_traffic(run: RunRecord, quantity: str = "bytes") -> dict[Key, float]:
    """Sum "bytes" or "messages" over the lines of the run, by (channel, link)."""
    sums: dict[Key, float] = {}
    for line in run.lines_of_kind("sent"):
        for key, number in flatten_counts(line[quantity]).items():
            sums[key] = sums.get(key, 0.0) + number
    return sums


def flatten_counts(counts: Mapping[str, Mapping[str, Any]]) -> dict[Key, float]:
    """Flatten counts by channel and then link to counts by (channel, link)."""
    return {(channel, link): n for channel, links in counts.items() for link, n in links.items()}


def build_traffic_lines(
    sent_bytes: Mapping[Key, float], sent_messages: Mapping[Key, float], num_steps: float
) -> list[list[str]]:
    """Return the cells of COLUMNS, most bytes first, then a sum for each link that has several lines."""
    order = sorted(sent_bytes, key=lambda key: -sent_bytes[key])
    lines = [
        _format_traffic_line(*key, sent_bytes[key], sent_messages.get(key), num_steps)
        for key in order
    ]
    for link in dict.fromkeys(link for _, link in order):
        channels = [key for key in order if key[1] == link]
        if len(channels) > 1:
            total = sum(sent_messages.get(key, 0.0) for key in channels)
            lines.append(
                _format_traffic_line(
                    "all", link, sum(sent_bytes[key] for key in channels), total, num_steps
                )
            )
    return lines


def _format_traffic_line(
    channel: str, link: str, size: float, messages: float | None, steps: float
) -> list[str]:
    per_step = max(steps, 1.0)
    rate = None if messages is None else messages / per_step
    words = LINK_WORDS.get(link, link)
    return [channel, words, format_bytes(size / per_step), format_count(rate), format_bytes(size)]


def count_steps(run: RunRecord) -> float:
    """Return the number of steps that the lines cover."""
    lines = run.lines_of_kind("sent")
    return sum(steps_between(lines)) if lines else 0.0


def draw_sent_bytes_chart(run: RunRecord) -> Figure | None:
    """Draw the bytes sent per step, stacked by channel and link; None in a world of one."""
    lines = run.lines_of_kind("sent")
    keys = sorted(sum_run_traffic(run), key=lambda key: (key[1], -sum_run_traffic(run)[key]))
    if not keys:
        return None
    data = []
    for number, (channel, link) in enumerate(keys):
        points = [
            (line["step"], line["bytes"].get(channel, {}).get(link, 0) / MIB / span)
            for line, span in zip(lines, steps_between(lines), strict=True)
            if span
        ]
        name = f"{channel}, {LINK_WORDS.get(link, link)}"
        data.append(build_area_trace(points, name, COLORS[number % len(COLORS)], unit=" MiB"))
    by_link: dict[str, float] = {}
    for (_, link), size in sum_run_traffic(run).items():
        by_link[link] = by_link.get(link, 0.0) + size
    sums = ", ".join(f"{format_bytes(n)} to {LINK_WORDS.get(to, to)}" for to, n in by_link.items())
    return build_chart(
        "Bytes sent", f"Payload that rank 0 sent: {sums}.", data, y="MiB a step", from_zero=True
    )
