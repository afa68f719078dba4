"""What rank 0 of a run sent: a table and a chart of bytes per step, by channel and link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colonnade.report.figures import COLORS, Figure, area, chart, steps_between, thinned
from colonnade.report.reading import RunRecord
from colonnade.report.words import bytes_words, count_words

LINK_WORDS = {"local": "same host", "remote": "other hosts", "": "any link"}
"""A record of a version that did not tell links apart has ""."""
COLUMNS = ("channel", "link", "bytes a step", "messages a step", "bytes in all")
MIB = 2**20

Key = tuple[str, str]


def totals(run: RunRecord, what: str = "bytes") -> dict[Key, float]:
    """By (channel, link): "bytes" or "messages" over the lines of the run."""
    found: dict[Key, float] = {}
    for line in run.of_kind("sent"):
        for key, number in flat(line[what]).items():
            found[key] = found.get(key, 0.0) + number
    return found


def flat(counts: Mapping[str, Mapping[str, Any]]) -> dict[Key, float]:
    return {(channel, link): n for channel, by in counts.items() for link, n in by.items()}


def table_lines(
    sent: Mapping[Key, float], messages: Mapping[Key, float], steps: float
) -> list[list[str]]:
    """Words for COLUMNS: most bytes first; then the sum over each link, where there are several lines of it."""
    order = sorted(sent, key=lambda key: -sent[key])
    lines = [_line(*key, sent[key], messages.get(key), steps) for key in order]
    for link in dict.fromkeys(link for _, link in order):
        over = [key for key in order if key[1] == link]
        if len(over) > 1:
            total = sum(messages.get(key, 0.0) for key in over)
            lines.append(_line("all", link, sum(sent[key] for key in over), total, steps))
    return lines


def _line(channel: str, link: str, size: float, messages: float | None, steps: float) -> list[str]:
    per_step = max(steps, 1.0)
    rate = None if messages is None else messages / per_step
    words = LINK_WORDS.get(link, link)
    return [channel, words, bytes_words(size / per_step), count_words(rate), bytes_words(size)]


def steps_of(run: RunRecord) -> float:
    """That the lines cover."""
    lines = run.of_kind("sent")
    return sum(steps_between(lines)) if lines else 0.0


def sent_bytes(run: RunRecord) -> Figure | None:
    """None in a world of one."""
    lines = run.of_kind("sent")
    keys = sorted(totals(run), key=lambda key: (key[1], -totals(run)[key]))
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
        data.append(area(*thinned(points), name, COLORS[number % len(COLORS)], unit=" MiB"))
    by_link: dict[str, float] = {}
    for (_, link), size in totals(run).items():
        by_link[link] = by_link.get(link, 0.0) + size
    said = ", ".join(f"{bytes_words(n)} to {LINK_WORDS.get(to, to)}" for to, n in by_link.items())
    return chart(
        "Bytes sent", f"Payload that rank 0 sent: {said}.", data, y="MiB a step", from_zero=True
    )
