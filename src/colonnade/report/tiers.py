"""What each tier of a run did: words for its table, charts over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from colonnade.report.figures import COLORS, Figure, chart, curve, thinned
from colonnade.report.reading import RunRecord
from colonnade.report.words import bytes_words, count_words, seconds_words
from colonnade.store.tier_counts import LEVELS, TierCounts

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


def tier_words(counts: TierCounts) -> list[str]:
    """One tier's values for TIER_LINES. "-" where a tier has no such thing: memory is read and written in place."""
    has_device = counts.reads or counts.written_bytes or counts.lifetime_bytes
    device = [
        count_words(counts.reads),
        bytes_words(counts.read_bytes),
        count_words(counts.rows_written),
        bytes_words(counts.written_bytes),
        _times(counts.write_amplification),
        _times(counts.space_amplification),
        seconds_words(counts.stall_seconds),
        bytes_words(counts.lifetime_bytes),
    ]
    if not has_device:
        device = ["-" if i != 2 else count_words(counts.rows_written) for i in range(len(device))]
    rate = counts.hit_rate
    return ["-" if rate is None else f"{rate:.1%}", count_words(counts.hits), *device]


def has_rows_below_memory(counts: Mapping[str, TierCounts], evicted: float) -> bool:
    """Return whether rows moved between tiers: false where files hold nothing but checkpoints."""
    names, tiers = list(counts), list(counts.values())
    if len(names) < 2:
        return False
    return names[0] != "dram" or evicted > 0 or any(tier.hits or tier.reads for tier in tiers[1:])


def totals(run: RunRecord) -> dict[str, TierCounts]:
    """By tier, from the top: of the run's summary, else the sum of its lines; {} of a record without tiers."""
    if run.summary.get("tiers"):
        return {name: TierCounts.of(values) for name, values in run.summary["tiers"].items()}
    found: dict[str, TierCounts] = {}
    for each in run.of_kind("tiers"):
        for name, values in each["tiers"].items():
            before, now = found.get(name, TierCounts()), TierCounts.of(values)
            # What is there now is not added up.
            levels = {level: getattr(now, level) for level in (*LEVELS, "lifetime_bytes")}
            found[name] = replace(before + now, **levels)
    return found


def charts(run: RunRecord) -> list[Figure | None]:
    lines = [each for each in run.of_kind("tiers") if each["tiers"]]
    return [
        _hit_rates(lines),
        _rates(lines, "reads", "Reads from below", "reads/s", 1.0),
        _bytes(lines),
        _waiting(lines),
        _amplification(lines),
        _lifetime(lines),
    ]


def _names(lines: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for each in lines for name in each["tiers"]))


def _points(lines: list[dict], name: str) -> list[tuple[int, float, TierCounts]]:
    """(step, seconds, counts) of each line that has the tier."""
    return [
        (each["step"], each.get("seconds") or 0.0, TierCounts.of(each["tiers"][name]))
        for each in lines
        if name in each["tiers"]
    ]


def _hit_rates(lines: list[dict]) -> Figure | None:
    data = []
    for number, name in enumerate(_names(lines)):
        points = [
            (step, 100 * counts.hit_rate)
            for step, _, counts in _points(lines, name)
            if counts.hit_rate is not None
        ]
        if points:
            data.append(curve(*thinned(points), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Of the rows looked for in a tier, those that were there. What no tier has is new."
    found = chart("Hit rates", note, data, y="percent of rows", from_zero=True)
    found["layout"]["yaxis"]["range"] = [0, 101]
    return found


def _rates(lines: list[dict], field: str, title: str, y: str, unit: float) -> Figure | None:
    data = []
    for number, name in enumerate(_names(lines)):
        points = [
            (step, getattr(counts, field) / unit / seconds)
            for step, seconds, counts in _points(lines, name)
            if seconds > 0
        ]
        if any(value for _, value in points):
            data.append(curve(*thinned(points), name, COLORS[number % len(COLORS)]))
    return chart(title, "Requests to the device.", data, y=y, from_zero=True) if data else None


def _bytes(lines: list[dict]) -> Figure | None:
    data: list[dict] = []
    for name in _names(lines)[1:]:
        for field, words in (("read_bytes", "read"), ("written_bytes", "written")):
            points = [
                (step, getattr(counts, field) / MIB / seconds)
                for step, seconds, counts in _points(lines, name)
                if seconds > 0
            ]
            if any(value for _, value in points):
                color = COLORS[len(data) % len(COLORS)]
                data.append(curve(*thinned(points), f"{name} {words}", color))
    if not data:
        return None
    note = "Whole pages read; frames, moved rows and checkpoints written."
    return chart("Bytes to and from below", note, data, y="MiB/s", from_zero=True)


def _waiting(lines: list[dict]) -> Figure | None:
    points = [
        (each["step"], 100 * min(1.0, (each.get("waited") or 0.0) / each["seconds"]))
        for each in lines
        if (each.get("seconds") or 0.0) > 0
    ]
    if not points:
        return None
    total = sum(each.get("seconds") or 0.0 for each in lines)
    waited = sum(each.get("waited") or 0.0 for each in lines)
    share = waited / max(total, 1e-9)
    note = f"Share of the training thread's time, evaluation and checkpoints included: {share:.1%} in all."
    data = [curve(*thinned(points), "waited", COLORS[1])]
    return chart("Time spent waiting for rows", note, data, y="percent of time", from_zero=True)


def _amplification(lines: list[dict]) -> Figure | None:
    """So far, not of each line: a single line writes now what came before it."""
    data = []
    for number, name in enumerate(_names(lines)):
        points = _points(lines, name)
        written = accumulate(counts.written_bytes for _, _, counts in points)
        payload = accumulate(counts.payload_bytes for _, _, counts in points)
        ratios = [
            (step, w / p) for (step, _, _), w, p in zip(points, written, payload, strict=True) if p
        ]
        if ratios:
            data.append(curve(*thinned(ratios), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Bytes written so far, for each byte of a row that came from memory: frames, compaction, checkpoints."
    return chart("Write amplification", note, data, y="times", from_zero=True)


def _lifetime(lines: list[dict]) -> Figure | None:
    data = []
    for number, name in enumerate(_names(lines)):
        points = [(step, counts.lifetime_bytes / MIB) for step, _, counts in _points(lines, name)]
        if any(value for _, value in points):
            data.append(curve(*thinned(points), name, COLORS[number % len(COLORS)]))
    if not data:
        return None
    note = "Since the run began, restarts included: what wears a device out."
    return chart("Lifetime bytes written", note, data, y="MiB", from_zero=True)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
