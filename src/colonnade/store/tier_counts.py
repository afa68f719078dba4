"""What each tier of a rank did for its rows: one value, gathered from a store in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reports read these values without torch
    from colonnade.store.dram import DramStore
    from colonnade.store.hbm import HbmStore
    from colonnade.store.log import LogBacking

LEVELS = ("held_bytes", "live_bytes")
"""Counts of what is there now; the others only grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """Of one tier of one rank, since its store opened.

    A row that a batch needs is looked for from the top: it is a hit of the tier that has it, a miss of those above;
    a row that no tier has is a miss of all of them, and born.
    """

    hits: int = 0
    misses: int = 0
    reads: int = 0
    """Requests to the device."""
    read_bytes: int = 0
    """From the device, whole pages."""
    row_bytes: int = 0
    """Of rows that these reads were for, as records."""
    rows_written: int = 0
    """Rows that came from above."""
    rows_moved: int = 0
    """Rows that garbage collection wrote again."""
    payload_bytes: int = 0
    """Of `rows_written`, as records."""
    written_bytes: int = 0
    """To the device: frames, rows moved, files of commits."""
    lifetime_bytes: int = 0
    """To the device since the store was made, in all openings."""
    held_bytes: int = 0
    """Taken now."""
    live_bytes: int = 0
    """Of these, rows that count."""
    stall_seconds: float = 0.0
    """That somebody waited for this tier: for rows on their way, or for room to write."""

    @property
    def hit_rate(self) -> float | None:
        """None: nothing was looked for."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte of a row that came from above."""
        return _ratio(self.written_bytes, self.payload_bytes)

    @property
    def space_amplification(self) -> float | None:
        """Bytes taken for each byte of a row that counts."""
        return _ratio(self.held_bytes, self.live_bytes)

    def since(self, before: TierCounts) -> TierCounts:
        """What was added; what is there now stays as it is."""
        return TierCounts(
            **{
                field.name: getattr(self, field.name)
                - (0 if field.name in LEVELS else getattr(before, field.name))
                for field in fields(self)
            }
        )

    def __add__(self, other: TierCounts) -> TierCounts:
        return TierCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TierCounts:
        """From plain values, as records have them; what is missing is 0, what is unknown is passed over."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def plain(self) -> dict[str, float]:
        return asdict(self)


def tier_counts(store: DramStore | HbmStore) -> dict[str, TierCounts]:
    """By tier, from the top: "hbm" where rows lie on a device, "dram", then those of its backings. Costs microseconds a
    table."""
    from colonnade.store.hbm import HbmStore
    from colonnade.store.log import LogBacking

    if isinstance(store, HbmStore):
        others = tier_counts(store.below)
        missed = others["dram"].hits + others["dram"].misses
        held = store.device_bytes()
        return {
            "hbm": TierCounts(
                hits=store.num_found,
                misses=missed,
                rows_written=missed,
                held_bytes=held,
                live_bytes=held,
            ),
            **others,
        }
    sources = store.sources
    needed = sources.resident + sources.read + sources.copied + sources.born
    resident = store.native.resident_bytes()
    found = {
        "dram": TierCounts(
            hits=sources.resident,
            misses=needed - sources.resident,
            rows_written=needed - sources.resident,
            held_bytes=resident,
            live_bytes=resident,
        )
    }
    below = [backing for backing in store.backings if isinstance(backing, LogBacking)]
    for backing in below:
        name = "mapped" if backing.files.mapped_bytes else "ssd"  # files read by loads, or by reads
        found[name] = found.get(name, TierCounts()) + _of_log(backing)
    if below:
        lowest = list(found)[-1]
        found[lowest] += _shared(below)
        found[lowest] += TierCounts(stall_seconds=sources.stall_seconds)
    return found


def _of_log(backing: LogBacking) -> TierCounts:
    """What a table's log counts of itself. It has looked for the rows of evaluations too."""
    counts = backing.counts()
    return TierCounts(
        hits=counts["rows_copied"] + counts["rows_planned"],
        misses=counts["rows_absent"],
        row_bytes=counts["rows_planned"] * backing.record_bytes,
        rows_written=counts["rows_written"],
        rows_moved=counts["rows_rewritten"],
        payload_bytes=counts["rows_written"] * backing.record_bytes,
        written_bytes=counts["bytes_written"],
        lifetime_bytes=counts["lifetime_bytes"],
        held_bytes=counts["bytes_held"],
        live_bytes=counts["bytes_live"],
    )


def _shared(backings: Sequence[LogBacking]) -> TierCounts:
    """What the logs of a rank share: the reader and the writer."""
    readers = {id(backing.reader): backing.reader for backing in backings}.values()
    writers = {id(b.writer): b.writer for b in backings if b.writer is not None}.values()
    counts = [reader.counts() for reader in readers]
    return TierCounts(
        reads=int(sum(count["reads"] for count in counts)),
        read_bytes=int(sum(count["bytes"] for count in counts)),
        stall_seconds=sum(writer.stall_seconds for writer in writers),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
