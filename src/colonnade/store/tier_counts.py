"""Counts of each storage tier of a rank: hits, misses, bytes and waits, collected from its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reports read these values without torch
    from colonnade._native import Dram
    from colonnade.store.dram import DramStore
    from colonnade.store.hbm import HbmStore
    from colonnade.store.log.backing import LogBacking
    from colonnade.table import Table

LEVELS = ("held_bytes", "live_bytes")
"""Counts of the present state; the others only grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """Counts of one tier of one rank, since its store opened.

    A row that a batch needs is looked up from the top: a hit of the tier that has it, a miss of the tiers above. A row
    that no tier has is a miss of all of them, and is initialised.
    """

    hits: int = 0
    misses: int = 0
    reads: int = 0
    """Requests to the device."""
    read_bytes: int = 0
    """Bytes read from the device, in whole pages."""
    row_bytes: int = 0
    """Bytes of the records that these reads were for."""
    rows_written: int = 0
    """Rows written by the tier above."""
    rows_moved: int = 0
    """Rows rewritten by garbage collection."""
    payload_bytes: int = 0
    """Bytes of `rows_written`, as records."""
    written_bytes: int = 0
    """Bytes written to the device: frames, moved rows, files of commits."""
    lifetime_bytes: int = 0
    """Bytes written to the device since the store was made, in all openings."""
    held_bytes: int = 0
    """Bytes in use now."""
    live_bytes: int = 0
    """Bytes of live rows among these."""
    stall_seconds: float = 0.0
    """Seconds that threads waited for this tier: for reads, or for room to write."""

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None without lookups."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte of a row from the tier above."""
        return _ratio(self.written_bytes, self.payload_bytes)

    @property
    def space_amplification(self) -> float | None:
        """Bytes in use for each byte of a live row."""
        return _ratio(self.held_bytes, self.live_bytes)

    def subtract_earlier(self, before: TierCounts) -> TierCounts:
        """Subtract earlier counts; those of the present state (`LEVELS`) stay as they are."""
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
        """Build counts from a record's plain values; missing ones are 0, unknown ones are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def collect_tier_counts(store: DramStore | HbmStore) -> dict[str, TierCounts]:
    """Return the counts of each tier, from the top: "hbm" if rows are on a device, "dram", "mapped" if it has whole
    tables or evicted rows, then those of its backings.

    Costs microseconds a table.
    """
    from colonnade.store.hbm import HbmStore
    from colonnade.store.log.backing import LogBacking

    if isinstance(store, HbmStore):
        others = collect_tier_counts(store.below)
        missed = others["dram"].hits + others["dram"].misses
        num_bytes = store.device_bytes()
        return {
            "hbm": TierCounts(
                hits=store.num_hits,
                misses=missed,
                rows_written=missed,
                held_bytes=num_bytes,
                live_bytes=num_bytes,
            ),
            **others,
        }
    sources = store.sources
    mapped = TierCounts()
    mapped_bytes = store.native.mapped_bytes()
    if store.cache is not None and store.tiers is not None:
        mapped = _count_cache_tier(store.tables, store.cache, store.tiers.cache_counts())
    # Rows of tables that are wholly in mapped memory are used there, so that they are no misses of main memory.
    needed = sources.resident + mapped.hits + sources.read + sources.copied + sources.born
    resident = store.native.resident_bytes()
    tiers = {
        "dram": TierCounts(
            hits=sources.resident,
            misses=needed - sources.resident,
            rows_written=needed - sources.resident,
            held_bytes=resident,
            live_bytes=resident,
        )
    }
    if store.cache is not None or mapped_bytes:
        tiers["mapped"] = replace(
            mapped,
            hits=sources.mapped,
            held_bytes=mapped.held_bytes + mapped_bytes,
            live_bytes=mapped.live_bytes + mapped_bytes,
        )
    below = [backing for backing in store.backings if isinstance(backing, LogBacking)]
    for backing in below:
        tiers["ssd"] = tiers.get("ssd", TierCounts()) + _count_log_tier(backing)
    if below:
        tiers["ssd"] += _count_shared_io(below)
        tiers["ssd"] += TierCounts(stall_seconds=sources.stall_seconds)
    return tiers


def _count_cache_tier(
    tables: Sequence[Table], cache: Dram, counts: Mapping[str, int]
) -> TierCounts:
    """Return the counts of the cache of evicted rows. Each row is a request of its own."""
    num_bytes = sum(cache.num_rows(t) * table.record_bytes for t, table in enumerate(tables))
    return TierCounts(
        hits=counts["hits"],
        misses=counts["misses"],
        reads=counts["hits"],
        read_bytes=counts["bytes_read"],
        row_bytes=counts["bytes_read"],
        rows_written=counts["rows_inserted"],
        payload_bytes=counts["bytes_inserted"],
        written_bytes=counts["bytes_inserted"],
        held_bytes=num_bytes,
        live_bytes=num_bytes,
    )


def _count_log_tier(backing: LogBacking) -> TierCounts:
    """Return the counts of one table's log, lookups of evaluations included."""
    counts = backing.count_rows_and_bytes()
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


def _count_shared_io(backings: Sequence[LogBacking]) -> TierCounts:
    """Return the counts of the reader and the writer that a rank's logs share."""
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
