"""The stores of a run: which folder holds which rank's rows of which table, opened, found again, adopted.

run/rows/<place>-of-<owners>/<table>/   rows dealt to so many owners; `Sharding.home_of`
run/rows/copy-<rank>/<table>/           a rank's copy of a replicated table

<table> is its number; of one that is cut by columns, with the columns: 003-16-32; of one with hot rows, with the side
and a word of their list: 003-hot-7c0a3ef19b52.
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
from colonnade.checkpoint.fingerprint import identity_of, identity_words
from colonnade.sizes import Place
from colonnade.store.compaction import Collector
from colonnade.store.disk import Disk
from colonnade.store.log import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_SEGMENT_BYTES,
    LogBacking,
    open_log,
)
from colonnade.store.manifest import describe
from colonnade.store.shards import AbsentRows, Shards
from colonnade.store.stripes import Space, Stripe
from colonnade.store.table_shards import Joined, Laid, RecordShape, Rejoined, Sliced, label, lay_out
from colonnade.store.writer import LogWriter
from colonnade.table import ITEM_BYTES, Table, TableSlice
from colonnade.topology.sharding import Shard, Sharding, columns_of, row_wise, sharding_from

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
    """Of a checkpoint, by table. Before there were others, rows were dealt to all ranks."""
    said, num_ranks = header.get("shardings", {}), header["num_ranks"]
    return [
        sharding_from(said[name]) if name in said else row_wise(num_ranks)
        for name in header["model"]["tables"]
    ]


def homes(header: Mapping[str, Any]) -> Iterator[Home]:
    """All that a checkpoint has, copies of replicated tables included."""
    for number, (name, of_table, sharding) in enumerate(
        zip(
            header["model"]["tables"],
            header["model"]["tables"].values(),
            shardings_of(header),
            strict=True,
        )
    ):
        for each, columns in _slices(sharding, of_table):
            for rank in each.ranks:
                path = home(each, rank, label(number, columns, each.hot))
                assert path is not None
                yield Home(number, _name(name, each, columns), each.shard_of(rank), path)


def holders(
    header: Mapping[str, Any], number: int
) -> list[tuple[tuple[int, int] | None, list[Path]]]:
    """The folders, inside `rows`, that have all of table `number`'s rows of a checkpoint between them, each row once;
    of a
    table cut by columns, for each slice with its columns."""
    of_table = list(header["model"]["tables"].values())[number]
    found = []
    for each, columns in _slices(shardings_of(header)[number], of_table):
        named = label(number, columns, each.hot)
        paths = [path for rank in each.holders if (path := home(each, rank, named)) is not None]
        found.append((columns, paths))
    return found


def home(sharding: Sharding, rank: int, label: str) -> Path | None:
    """Of a rank's rows of a table or slice, by its folders' label; None: it has none."""
    folder = sharding.home_of(rank)
    return None if folder is None else Path(folder) / label


def _slices(
    sharding: Sharding, of_table: Mapping[str, Any]
) -> list[tuple[Sharding, tuple[int, int] | None]]:
    """A table of a checkpoint as it was laid out: shardings, and columns where rows were cut."""
    if sharding.has_hot:
        return [(sharding.of_cold, None), (sharding.of_hot, None)]
    if sharding.slices == 1:
        return [(sharding, None)]
    columns = columns_of(sum(_dims(of_table)), sharding.slices)
    return list(zip(sharding.of_slices, columns, strict=True))


def _dims(of_table: Mapping[str, Any]) -> tuple[int, ...]:
    dim = of_table["dim"]
    return tuple(dim.values()) if isinstance(dim, Mapping) else (dim,)


def _name(table: str, sharding: Sharding, columns: tuple[int, int] | None) -> str:
    if sharding.hot is not None:
        return f"{table}[{sharding.hot.side}]"
    return table if columns is None else f"{table}[{columns[0]}:{columns[1]}]"


def open_recorded_stores(
    folder: Path, header: dict[str, Any], number: int
) -> Sequence[LogBacking | Joined]:
    """Table `number`'s stores of a checkpoint that have all its rows between them, each once and whole, read-only, as
    their
    manifests describe them: nothing needs to be known of the model."""
    name, of_table = list(header["model"]["tables"].items())[number]
    sharding, slices = shardings_of(header)[number], []
    for each, columns in _slices(sharding, of_table):
        slices.append(_open_recorded(folder, header, number, each, columns))
    if sharding.slices == 1:
        return [store for each in slices for store in each]
    dims, dtype = _dims(of_table), of_table["dtype"].split()[0]
    states = tuple(header["shardings"][name]["states"])
    compute = ITEM_BYTES["float64" if dtype == "float64" else "float32"]
    shape = RecordShape(
        dims, states, ITEM_BYTES[dtype], compute, of_table["dtype"].endswith("with master")
    )
    parts = of_table["dim"] if isinstance(of_table["dim"], Mapping) else {"": of_table["dim"]}
    identity = identity_words(name, parts, of_table["optimizer"], of_table["dtype"])
    cuts = columns_of(sum(dims), sharding.slices)
    return [Joined([Shards(each, of_table["rows"]) for each in slices], cuts, shape, identity)]


def _open_recorded(
    folder: Path,
    header: dict[str, Any],
    number: int,
    sharding: Sharding,
    columns: tuple[int, int] | None,
) -> list[LogBacking]:
    """Of a table, or of some of its columns."""
    name, of_table = list(header["model"]["tables"].items())[number]
    step = header["step"]
    reader = _native.PageReader("auto", READ_DEPTH)
    stores = []
    for rank in sharding.holders:
        shard, path = (
            sharding.shard_of(rank),
            home(sharding, rank, label(number, columns, sharding.hot)),
        )
        assert shard.place is not None and path is not None
        said = describe(folder / "rows" / path, step)
        stores.append(
            open_log(
                folder / "rows" / path,
                table_name=_name(name, sharding, columns),
                record_bytes=said["record_bytes"],
                identity=said["identity"],
                rows=None if sharding.hot and sharding.is_replicated else of_table["rows"],
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
    """One rank's stores, by table or slice (`lay_out`), as saved at `step`; None: empty. They share reader,
    writer and collector.

    shardings: by table; where they give this rank no rows, there is no file. `outside`: directories of this run's that
    take their segments instead of the run folder. `fresh`: tables or slices that start empty, whatever lies there."""
    reader = _native.PageReader("auto", READ_DEPTH)
    writer, collector = LogWriter(bytes_per_second=write_budget), Collector()
    sizes = [place.bytes or _disk_bytes(Path(place.path)) for place in outside]
    # People gave the directory that this run's lies in.
    spaces = [Space(Path(place.path).parent, place.bytes) for place in outside]
    opened: Stores = []
    try:
        for t, each in enumerate(lay_out(tables, shardings)):
            table, sharding = each.stored, each.sharding
            shard, path = sharding.shard_of(rank), home(sharding, rank, each.label)
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
                    segment_bytes=segment_size([place.bytes for place in outside]),
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


def _open_holders(folder: Path, laid: Laid, disk: Disk, step: int) -> Shards:
    """The stores of one table or slice that have all its rows between them, in order of their places, read-only."""
    opened: list[LogBacking] = []
    reader = _native.PageReader("auto", READ_DEPTH)
    table, sharding = laid.stored, laid.sharding
    for rank in sharding.holders:
        shard, path = sharding.shard_of(rank), home(sharding, rank, laid.label)
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
    return Shards(opened, table.rows)


def _open_source(
    folder: Path,
    tables: Sequence[Table],
    then: Sequence[Laid],
    wanted: Laid,
    disk: Disk,
    step: int,
) -> Shards | Joined | Rejoined | Sliced:
    """All rows of a table or slice, and maybe others of the table, out of the stores of a checkpoint whose tables may
    have
    been cut otherwise."""
    had = [each for each in then if each.number == wanted.number]
    for each in had:
        if each.label == wanted.label:
            return _open_holders(folder, each, disk, step)
    shape = RecordShape.of(tables[wanted.number])
    shards = [_open_holders(folder, each, disk, step) for each in had]
    whole: Shards | Joined | Rejoined = shards[0]
    if (hot := had[0].sharding.hot) is not None:
        whole = Rejoined(shards[0], shards[1], hot.tensor)
    elif len(had) > 1:
        whole = Joined(shards, [each.columns for each in had], shape)
    is_cut = isinstance(wanted.table, TableSlice)
    return Sliced(whole, wanted.columns, shape) if is_cut else whole


def open_shards(
    folder: Path,
    tables: Sequence[Table],
    then: Sequence[Laid],
    now: Sequence[Laid],
    rank: int,
    disk: Disk,
    step: int,
) -> list[Shards | Joined | Rejoined | Sliced | AbsentRows]:
    """What a rank needs to read a checkpoint of other shardings in place: of each table or slice it has rows of now,
    all
    that were there then."""
    return [
        AbsentRows(each.table.name, each.table.record_bytes)
        if each.sharding.shard_of(rank).place is None
        else _open_source(folder, tables, then, each, disk, step)
        for each in now
    ]


def adopt(
    folder: Path,
    tables: Sequence[Table],
    then: Sequence[Laid],
    now: Sequence[Laid],
    rank: int,
    disk: Disk,
    step: int,
    stores: Stores,
    fresh: Collection[int],
) -> None:
    """Copy the rows that this rank has now out of the stores of those that had them, and checkpoint them as of `step`.
    fresh: the tables or slices, of `now`, whose rows it has none of yet."""
    for t in fresh:
        shard, target = now[t].sharding.shard_of(rank), stores[t]
        source = _open_source(folder, tables, then, now[t], disk, step)
        for rows in source.scan():
            mine = shard.owns(rows.ids, now[t].table.rows)
            target.write(rows.ids[mine], rows.records[mine].contiguous()).wait()
        source.close()
        target.commit(step)


def to_adopt(then: Sequence[Laid], now: Sequence[Laid], rank: int) -> list[int]:
    """Tables or slices, of `now`, whose rows on `rank` no folder holds yet. Pure."""
    before = {each.label: each.sharding for each in then}
    return [
        t
        for t, each in enumerate(now)
        if each.sharding.shard_of(rank).place is not None
        and not ((had := before.get(each.label)) and each.sharding.continues(had, rank))
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
