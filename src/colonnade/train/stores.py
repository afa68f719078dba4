"""The stores of a run: which folder holds which rank's rows of which table, opened, found again, adopted.

run/rows/<place>-of-<owners>/<table>/   rows dealt to so many owners; `Sharding.home_of`
run/rows/copy-<rank>/<table>/           a rank's copy of a replicated table
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from colonnade import _native
from colonnade.sizes import Place
from colonnade.store.absent import AbsentRows
from colonnade.store.collection import Collector
from colonnade.store.disk import Disk
from colonnade.store.log import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_SEGMENT_BYTES,
    LogBacking,
    open_log,
)
from colonnade.store.manifest import describe
from colonnade.store.shards import Shards
from colonnade.store.space import Space
from colonnade.store.stripes import Stripe
from colonnade.store.writer import LogWriter
from colonnade.table import Table
from colonnade.topology.sharding import Shard, Sharding, row_wise, sharding_from
from colonnade.train.fingerprint import identity_of

GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, modulo 1, fill the interval evenly from the beginning."""
READ_DEPTH = (
    32  # reads in flight: an SSD answers most from about six on, a deeper queue finds more to merge
)

Stores = list[LogBacking | AbsentRows]


@dataclass(frozen=True, slots=True)
class Home:
    """Where one rank's rows of one table lie."""

    number: int
    table: str
    shard: Shard
    path: Path
    """Inside a run's `rows`, and inside the directories of `plan.memory.ssd`."""


def shardings_of(header: Mapping[str, Any]) -> list[Sharding]:
    """Of a commit, by table. Before there were others, rows were dealt to all ranks."""
    said, num_ranks = header.get("shardings", {}), header["num_ranks"]
    return [
        sharding_from(said[name]) if name in said else row_wise(num_ranks)
        for name in header["model"]["tables"]
    ]


def homes(header: Mapping[str, Any]) -> Iterator[Home]:
    """All that a commit has, copies of replicated tables included."""
    for number, (name, sharding) in enumerate(
        zip(header["model"]["tables"], shardings_of(header), strict=True)
    ):
        for rank in sharding.ranks:
            path = home(sharding, rank, number)
            assert path is not None
            yield Home(number, name, sharding.shard_of(rank), path)


def home(sharding: Sharding, rank: int, number: int) -> Path | None:
    """Of a rank's rows of table `number`; None: it has none."""
    folder = sharding.home_of(rank)
    return None if folder is None else Path(folder) / f"{number:03d}"


def open_recorded_stores(folder: Path, header: dict[str, Any], number: int) -> list[LogBacking]:
    """Table `number`'s stores of a commit that have all its rows between them, each once, read-only, as their manifests
    describe them: nothing needs to be known of the model."""
    name, of_table = list(header["model"]["tables"].items())[number]
    step, sharding = header["step"], shardings_of(header)[number]
    reader = _native.PageReader("auto", READ_DEPTH)
    stores = []
    for rank in sharding.holders:
        shard, path = sharding.shard_of(rank), home(sharding, rank, number)
        assert shard.place is not None and path is not None
        said = describe(folder / "rows" / path, step)
        stores.append(
            open_log(
                folder / "rows" / path,
                table_name=name,
                record_bytes=said["record_bytes"],
                identity=said["identity"],
                rows=of_table["rows"],
                num_owners=shard.num_owners,
                place=shard.place,
                reader=reader,
                step=step,
                read_only=True,
            )
        )
    return stores


def open_stores(
    folder: Path,
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    rank: int,
    disk: Disk,
    step: int | None,
    read_only: bool = False,
    outside: Sequence[Place] = (),
    write_budget: int | None = None,
    fresh: Collection[int] = (),
) -> Stores:
    """One rank's stores, by table, as committed at `step`; None: empty. They share reader, writer and collector.

    shardings: by table; where they give this rank no rows, there is no file. `outside`: directories of this run's that
    take their segments instead of the run folder. `fresh`: tables that start empty, whatever lies there."""
    reader = _native.PageReader("auto", READ_DEPTH)
    writer, collector = LogWriter(bytes_per_second=write_budget), Collector()
    sizes = [place.bytes or _disk_bytes(Path(place.path)) for place in outside]
    # People gave the directory that this run's lies in.
    spaces = [Space(Path(place.path).parent, place.bytes) for place in outside]
    opened: Stores = []
    try:
        for t, (table, sharding) in enumerate(zip(tables, shardings, strict=True)):
            shard, path = sharding.shard_of(rank), home(sharding, rank, t)
            if path is None or shard.place is None:
                opened.append(AbsentRows(table.name, table.record_bytes))
                continue
            opened.append(
                open_log(
                    folder / "rows" / path,
                    table_name=table.name,
                    record_bytes=table.record_bytes,
                    identity=identity_of(table),
                    rows=table.rows,
                    num_owners=shard.num_owners,
                    place=shard.place,
                    disk=disk,
                    reader=reader,
                    writer=writer,
                    collector=collector,
                    step=None if t in fresh else step,
                    read_only=read_only,
                    segment_bytes=segment_size([each.bytes for each in outside]),
                    stripes=[
                        Stripe(Path(outside[i].path) / path, sizes[i], spaces[i])
                        for i in stripe_order(sizes, rank + len(sharding.ranks) * t)
                    ],
                )
            )
    except BaseException:
        for store in opened:
            store.close()
        raise
    return opened


def open_holders(
    folder: Path, table: Table, number: int, sharding: Sharding, disk: Disk, step: int
) -> list[LogBacking]:
    """The stores of one table that have all its rows between them, in order of their places, read-only."""
    opened: list[LogBacking] = []
    reader = _native.PageReader("auto", READ_DEPTH)
    for rank in sharding.holders:
        shard, path = sharding.shard_of(rank), home(sharding, rank, number)
        assert shard.place is not None and path is not None
        open_one = partial(open_log, folder / "rows" / path, table_name=table.name)
        opened.append(
            open_one(
                record_bytes=table.record_bytes,
                identity=identity_of(table),
                rows=table.rows,
                num_owners=shard.num_owners,
                place=shard.place,
                disk=disk,
                reader=reader,
                step=step,
                read_only=True,
            )
        )
    return opened


def open_shards(
    folder: Path,
    tables: Sequence[Table],
    then: Sequence[Sharding],
    now: Sequence[Sharding],
    rank: int,
    disk: Disk,
    step: int,
) -> list[Shards | AbsentRows]:
    """What a rank needs to read a commit of other shardings in place: of each table it has rows of now, all that were
    there then."""
    return [
        AbsentRows(table.name, table.record_bytes)
        if now[t].shard_of(rank).place is None
        else Shards(open_holders(folder, table, t, then[t], disk, step), table.rows)
        for t, table in enumerate(tables)
    ]


def adopt(
    folder: Path,
    tables: Sequence[Table],
    then: Sequence[Sharding],
    now: Sequence[Sharding],
    rank: int,
    disk: Disk,
    step: int,
    stores: Stores,
    fresh: Collection[int],
) -> None:
    """Copy the rows that this rank has now out of the stores of those that had them, and commit them as of `step`.
    fresh: the tables whose rows it has none of yet."""
    for t in fresh:
        shard, target = now[t].shard_of(rank), stores[t]
        for source in open_holders(folder, tables[t], t, then[t], disk, step):
            for rows in source.scan():
                mine = shard.owns(rows.ids, tables[t].rows)
                target.write(rows.ids[mine], rows.records[mine]).wait()
            source.close()
        target.commit(step)


def to_adopt(then: Sequence[Sharding], now: Sequence[Sharding], rank: int) -> list[int]:
    """Tables whose rows on `rank` no folder holds yet. Pure."""
    return [
        t
        for t, (before, after) in enumerate(zip(then, now, strict=True))
        if after.shard_of(rank).place is not None and not after.continues(before, rank)
    ]


def segment_size(limits: Sequence[int | None]) -> int:
    """Where new segments start: a segment goes to one directory, so small directories take small ones. Pure."""
    least = min((limit for limit in limits if limit is not None), default=DEFAULT_SEGMENT_BYTES * 8)
    return min(DEFAULT_SEGMENT_BYTES, max(DEFAULT_CHUNK_BYTES, least // 8))


def stripe_order(sizes: Sequence[int], number: int) -> list[int]:
    """Which directories a store fills first: one for each of many small stores, in proportion to the sizes. Pure."""
    if not sizes:
        return []
    ends = list(accumulate(sizes))
    first = bisect_right(ends, number * GOLDEN % 1 * ends[-1])
    return [first, *(i for i in range(len(sizes)) if i != first)]


def _disk_bytes(path: Path) -> int:
    """Of the file system that a directory lies on, or would."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).total
