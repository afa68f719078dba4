"""Which sealed segments a commit rewrites: a pure function of counts.

Rewriting a segment appends its live rows, and the tombstones that are still needed, to the active
segment. Three reasons, in this order:
  1. a sync of it failed: it must not be trusted;
  2. less than half of it is of use: space stays below about twice the live rows;
  3. too many of one size: eight segments of one power-of-eight class merge, so that a run of small
     commits leaves few files; and where tombstones outnumber half the live rows the oldest segment
     is rewritten, because a tombstone is needed only while an older segment exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAN_IN = 8


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """Counts of one sealed segment, in records."""

    number: int
    records: int
    live: int
    tombstones: int  # that are the last word on their id
    is_suspect: bool = False


def choose_victims(
    uses: Sequence[SegmentUse], *, budget_records: int, full_records: int
) -> list[int]:
    """Segment numbers to rewrite, ascending. `uses` ascends by number.

    Beyond the suspect ones, one segment or `budget_records` records are rewritten, whichever is more;
    segments of more than an eighth of `full_records` are not merged for being small.
    """
    forced = [use for use in uses if use.is_suspect]
    others = [use for use in uses if not use.is_suspect]
    if not others:
        return [use.number for use in forced]

    oldest = min(use.number for use in uses)

    def useful(use: SegmentUse) -> int:
        return use.live + (use.tombstones if use.number != oldest else 0)

    sparse = sorted(
        (use for use in others if 2 * useful(use) < use.records),
        key=lambda use: (useful(use) / use.records, use.number),
    )
    wanted = sparse + _too_many(others, useful=useful, full_records=full_records)
    if 2 * sum(use.tombstones for use in uses) > sum(use.live for use in uses):
        wanted += others[:1]

    chosen: dict[int, int] = {}
    for use in wanted:
        fits = sum(chosen.values()) + useful(use) <= budget_records
        if use.number not in chosen and (fits or not chosen):
            chosen[use.number] = useful(use)
    return sorted([use.number for use in forced] + list(chosen))


def _too_many(
    others: Sequence[SegmentUse], *, useful: Callable[[SegmentUse], int], full_records: int
) -> list[SegmentUse]:
    classes: dict[int, list[SegmentUse]] = {}
    for use in others:
        if useful(use) * FAN_IN <= full_records:
            size_class = max(useful(use).bit_length() - 1, 0) // 3
            classes.setdefault(size_class, []).append(use)
    return [use for group in classes.values() if len(group) >= FAN_IN for use in group]
