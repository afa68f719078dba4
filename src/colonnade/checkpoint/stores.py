"""Stores of a run: find and open the folders with each rank's rows of each table, and copy rows when resharding.

run/rows/<shard>-of-<owners>/<table>/   rows sharded over <owners> ranks; `Sharding.row_folder_name`
run/rows/copy-<rank>/<table>/           a rank's copy of a replicated table

<table> is the table's index. If it is cut by columns, the columns follow: 003-16-32. If it has hot rows, the side and a
digest of the hot ids follow: 003-hot-7c0a3ef19b52.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from colonnade.checkpoint.fingerprint import build_record_identity, get_record_identity
from colonnade.files.disk import Disk
from colonnade.sizes import StorageLocation
from colonnade.store.log.backing import (
    DEFAULT_SEGMENT_BYTES,
    LogBacking,
    LogLayout,
    open_log,
)
from colonnade.store.log.manifest import LogTable, read_manifest
from colonnade.store.log.segment import DEFAULT_CHUNK_BYTES
from colonnade.store.log.stripes import SpaceAccount, Stripe
from colonnade.store.log.writer import LogWorkers, LogWriter
from colonnade.store.shards import AbsentRows, ShardReader
from colonnade.store.table_shards import (
    ColumnShardReader,
    ColumnSliceReader,
    HotColdReader,
    RecordShape,
    TableShard,
    label,
    shard_tables,
)
from colonnade.table import ITEM_BYTES, Table, TableSlice
from colonnade.topology.sharding import Shard, Sharding, read_sharding, row_wise, slice_columns

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Factor with multiples modulo 1 that fill the unit interval evenly from the start."""

RankStores = list[LogBacking | AbsentRows]


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of a run's rows: where they are, and how they are written."""

    folder: Path
    """Run folder."""
    disk: Disk = field(default_factory=Disk)
    directories: Sequence[StorageLocation] = ()
    """Directories outside the run folder, for new rows."""
    write_budget: int | None = None
    """Bytes per second."""


@dataclass(frozen=True, slots=True)
class SavedShards:
    """Rows of one checkpoint, by table or slice as it was saved."""

    files: RowFiles
    step: int
    tables: Sequence[Table]
    shards: Sequence[TableShard]


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """Folder with one rank's rows of one table or slice."""

    table_index: int
    table: str
    shard: Shard
    path: Path
    """Path relative to a run's `rows`, and to the directories of `plan.memory.ssd`."""


def read_table_shardings(header: Mapping[str, Any]) -> list[Sharding]:
    """Return the shardings of a checkpoint by table. Old headers without shardings mean row_wise over all ranks."""
    saved_kinds = header.get("shardings", {})
    num_ranks = header["num_ranks"]
    return [
        read_sharding(saved_kinds[name]) if name in saved_kinds else row_wise(num_ranks)
        for name in header["model"]["tables"]
    ]


def list_store_folders(header: Mapping[str, Any]) -> Iterator[StoreFolder]:
    """Yield all store folders of a checkpoint, including copies of replicated tables."""
    for table_index, (name, table_header, sharding) in enumerate(
        zip(
            header["model"]["tables"],
            header["model"]["tables"].values(),
            read_table_shardings(header),
            strict=True,
        )
    ):
        for slice_sharding, columns in _list_table_slices(sharding, table_header):
            for rank in slice_sharding.ranks:
                path = store_folder(
                    slice_sharding, rank, label(table_index, columns, slice_sharding.hot)
                )
                assert path is not None
                yield StoreFolder(
                    table_index,
                    _stored_name(name, slice_sharding, columns),
                    slice_sharding.shard_of(rank),
                    path,
                )


def find_row_folders_by_slice(
    header: Mapping[str, Any], table_index: int
) -> list[tuple[tuple[int, int] | None, list[Path]]]:
    """Return the folders inside `rows` that together have each row of a table once, by columns of the slices.

    Columns are None for a table that is not cut by columns.
    """
    table_header = list(header["model"]["tables"].values())[table_index]
    folders_by_columns = []
    for slice_sharding, columns in _list_table_slices(
        read_table_shardings(header)[table_index], table_header
    ):
        folder_label = label(table_index, columns, slice_sharding.hot)
        paths = [
            path
            for rank in slice_sharding.row_owners
            if (path := store_folder(slice_sharding, rank, folder_label)) is not None
        ]
        folders_by_columns.append((columns, paths))
    return folders_by_columns


def store_folder(sharding: Sharding, rank: int, label: str) -> Path | None:
    """Return the folder of a rank's rows of the table or slice with this label; None if it has no rows."""
    folder = sharding.row_folder_name(rank)
    return None if folder is None else Path(folder) / label


def _list_table_slices(
    sharding: Sharding, table_header: Mapping[str, Any]
) -> list[tuple[Sharding, tuple[int, int] | None]]:
    """List the slices of a saved table: the sharding of each, and its columns if rows are cut."""
    if sharding.has_hot:
        return [(sharding.cold_sharding, None), (sharding.hot_sharding, None)]
    if sharding.slices == 1:
        return [(sharding, None)]
    columns = slice_columns(sum(_part_dims(table_header)), sharding.slices)
    return list(zip(sharding.slice_shardings, columns, strict=True))


def _part_dims(table_header: Mapping[str, Any]) -> tuple[int, ...]:
    dim = table_header["dim"]
    return tuple(dim.values()) if isinstance(dim, Mapping) else (dim,)


def _stored_name(table: str, sharding: Sharding, columns: tuple[int, int] | None) -> str:
    """Return the name of a table or slice as its stores have it: "item[0:32]", "item[hot]"."""
    if sharding.hot is not None:
        return f"{table}[{sharding.hot.side}]"
    return table if columns is None else f"{table}[{columns[0]}:{columns[1]}]"


def open_recorded_stores(
    run_folder: Path, header: dict[str, Any], table_index: int
) -> Sequence[LogBacking | ColumnShardReader]:
    """Open the stores of a saved table read-only. Together they have each row once, with all columns.

    They are opened as their manifests describe them, so the model is not needed.
    """
    name, table_header = list(header["model"]["tables"].items())[table_index]
    sharding = read_table_shardings(header)[table_index]
    stores_of_slices = []
    for slice_sharding, columns in _list_table_slices(sharding, table_header):
        stores_of_slices.append(
            _open_recorded_slice(run_folder, header, table_index, slice_sharding, columns)
        )
    if sharding.slices == 1:
        return [store for stores in stores_of_slices for store in stores]
    dims = _part_dims(table_header)
    dtype = table_header["dtype"].split()[0]
    states = tuple(header["shardings"][name]["states"])
    compute = ITEM_BYTES["float64" if dtype == "float64" else "float32"]
    record_shape = RecordShape(
        dims, states, ITEM_BYTES[dtype], compute, table_header["dtype"].endswith("with master")
    )
    parts = (
        table_header["dim"]
        if isinstance(table_header["dim"], Mapping)
        else {"": table_header["dim"]}
    )
    identity = build_record_identity(name, parts, table_header["optimizer"], table_header["dtype"])
    column_ranges = slice_columns(sum(dims), sharding.slices)
    return [
        ColumnShardReader(
            [ShardReader(stores, table_header["rows"]) for stores in stores_of_slices],
            column_ranges,
            record_shape,
            identity,
        )
    ]


def _open_recorded_slice(
    run_folder: Path,
    header: dict[str, Any],
    table_index: int,
    slice_sharding: Sharding,
    column_range: tuple[int, int] | None,
) -> list[LogBacking]:
    """Open the recorded stores of a table or of some of its columns."""
    name, table_header = list(header["model"]["tables"].items())[table_index]
    step = header["step"]
    workers = LogWorkers()
    stores = []
    for rank in slice_sharding.row_owners:
        shard = slice_sharding.shard_of(rank)
        path = store_folder(
            slice_sharding, rank, label(table_index, column_range, slice_sharding.hot)
        )
        assert shard.owner_index is not None and path is not None
        manifest = read_manifest(run_folder / "rows" / path, step)
        table = LogTable(
            name=_stored_name(name, slice_sharding, column_range),
            record_bytes=manifest.record_bytes,
            identity=manifest.identity,
            rows=None
            if slice_sharding.hot and slice_sharding.is_replicated
            else table_header["rows"],
            num_owners=shard.num_owners,
            owner_index=shard.owner_index,
        )
        stores.append(
            open_log(run_folder / "rows" / path, table, step=step, read_only=True, workers=workers)
        )
    return stores


def open_stores(
    files: RowFiles,
    tables: Sequence[Table],
    shardings: Sequence[Sharding],
    rank: int,
    step: int | None,
    read_only: bool = False,
    new_shards: Collection[int] = (),
) -> RankStores:
    """Open one rank's stores, by table or slice (`shard_tables`), as saved at `step`; empty if None.

    They share reader, writer and collector.
    files: with directories of this run, for segments, instead of the run folder.
    shardings: by table; a rank without rows has no files.
    new_shards: tables or slices that start empty, even if files exist.
    """
    workers = LogWorkers(files.disk, writer=LogWriter(bytes_per_second=files.write_budget))
    directories = files.directories
    sizes = [directory.bytes or _disk_bytes(Path(directory.path)) for directory in directories]
    # The limits apply to the configured directory, which is the parent of this run's.
    spaces = [
        SpaceAccount(Path(directory.path).parent, directory.bytes) for directory in directories
    ]
    segment_bytes = choose_segment_size([directory.bytes for directory in directories])
    opened: RankStores = []
    try:
        for shard_index, table_shard in enumerate(shard_tables(tables, shardings)):
            table = table_shard.stored
            sharding = table_shard.sharding
            shard = sharding.shard_of(rank)
            path = store_folder(sharding, rank, table_shard.label)
            if path is None or shard.owner_index is None:
                opened.append(AbsentRows(table.name, table.record_bytes))
                continue
            store_index = rank + len(sharding.ranks) * shard_index
            stripes = [
                Stripe(Path(directories[i].path) / path, sizes[i], spaces[i])
                for i in order_stripe_directories(sizes, store_index)
            ]
            opened.append(
                open_log(
                    files.folder / "rows" / path,
                    _describe_log(table, shard),
                    step=None if shard_index in new_shards else step,
                    read_only=read_only,
                    workers=workers,
                    layout=LogLayout(stripes, segment_bytes),
                )
            )
    except BaseException:
        for store in opened:
            store.close()
        raise
    return opened


def _open_saved_shard(files: RowFiles, table_shard: TableShard, step: int) -> ShardReader:
    """Open the stores that together have all rows of a saved table or slice, in shard order, read-only."""
    opened: list[LogBacking] = []
    workers = LogWorkers(files.disk)
    table = table_shard.stored
    sharding = table_shard.sharding
    for rank in sharding.row_owners:
        shard = sharding.shard_of(rank)
        path = store_folder(sharding, rank, table_shard.label)
        assert shard.owner_index is not None and path is not None
        opened.append(
            open_log(
                files.folder / "rows" / path,
                _describe_log(table, shard),
                step=step,
                read_only=True,
                workers=workers,
            )
        )
    return ShardReader(opened, table.rows)


def _describe_log(table: Table, shard: Shard) -> LogTable:
    assert shard.owner_index is not None
    return LogTable(
        name=table.name,
        record_bytes=table.record_bytes,
        identity=get_record_identity(table),
        rows=table.rows,
        num_owners=shard.num_owners,
        owner_index=shard.owner_index,
    )


def _open_rows_of_shard(
    saved: SavedShards, table_shard: TableShard
) -> ShardReader | ColumnShardReader | HotColdReader | ColumnSliceReader:
    """Open a reader of all rows of a table or slice, from a checkpoint that may have other slices.

    It may also read other rows of the table.
    """
    saved_of_table = [
        saved_shard for saved_shard in saved.shards if saved_shard.number == table_shard.number
    ]
    for saved_shard in saved_of_table:
        if saved_shard.label == table_shard.label:
            return _open_saved_shard(saved.files, saved_shard, saved.step)
    record_shape = RecordShape.of(saved.tables[table_shard.number])
    readers = [
        _open_saved_shard(saved.files, saved_shard, saved.step) for saved_shard in saved_of_table
    ]
    all_rows: ShardReader | ColumnShardReader | HotColdReader = readers[0]
    if (hot_ids := saved_of_table[0].sharding.hot) is not None:
        all_rows = HotColdReader(readers[0], readers[1], hot_ids.tensor)
    elif len(saved_of_table) > 1:
        all_rows = ColumnShardReader(
            readers, [saved_shard.columns for saved_shard in saved_of_table], record_shape
        )
    is_cut = isinstance(table_shard.table, TableSlice)
    return ColumnSliceReader(all_rows, table_shard.columns, record_shape) if is_cut else all_rows


def open_saved_shards(
    saved: SavedShards, table_shards: Sequence[TableShard], rank: int
) -> list[ShardReader | ColumnShardReader | HotColdReader | ColumnSliceReader | AbsentRows]:
    """Open readers of a checkpoint with other shardings, for each table or slice that this rank has rows of."""
    return [
        AbsentRows(table_shard.table.name, table_shard.table.record_bytes)
        if table_shard.sharding.shard_of(rank).owner_index is None
        else _open_rows_of_shard(saved, table_shard)
        for table_shard in table_shards
    ]


def copy_rows_to_new_shards(
    saved: SavedShards,
    table_shards: Sequence[TableShard],
    rank: int,
    rank_stores: RankStores,
    new_shard_indices: Collection[int],
) -> None:
    """Copy the rows that this rank owns now from the stores of earlier owners, and commit them as of the saved step.

    new_shard_indices: indices into `table_shards` of tables or slices with rows still to copy.
    """
    for shard_index in new_shard_indices:
        own_shard = table_shards[shard_index].sharding.shard_of(rank)
        target = rank_stores[shard_index]
        source = _open_rows_of_shard(saved, table_shards[shard_index])
        for rows in source.scan():
            is_owned = own_shard.owns(rows.ids, table_shards[shard_index].table.rows)
            target.write(rows.ids[is_owned], rows.records[is_owned].contiguous()).wait()
        source.close()
        target.commit(saved.step)


def find_new_shard_indices(
    saved_shards: Sequence[TableShard], table_shards: Sequence[TableShard], rank: int
) -> list[int]:
    """Return the indices in `table_shards` of tables or slices with no folder of this rank's rows yet. Pure."""
    saved_by_label = {table_shard.label: table_shard.sharding for table_shard in saved_shards}
    return [
        shard_index
        for shard_index, table_shard in enumerate(table_shards)
        if table_shard.sharding.shard_of(rank).owner_index is not None
        and not (
            (saved := saved_by_label.get(table_shard.label))
            and table_shard.sharding.reuses_folder(saved, rank)
        )
    ]


def choose_segment_size(directory_sizes: Sequence[int | None]) -> int:
    """Return the size at which a new segment starts, smaller for small directories. Pure.

    A segment is stored in one directory.
    """
    smallest_limit = min(
        (limit for limit in directory_sizes if limit is not None),
        default=DEFAULT_SEGMENT_BYTES * 8,
    )
    return min(DEFAULT_SEGMENT_BYTES, max(DEFAULT_CHUNK_BYTES, smallest_limit // 8))


def order_stripe_directories(directory_sizes: Sequence[int], store_index: int) -> list[int]:
    """Return the order in which a store fills directories. Pure.

    First choices of many small stores are in proportion to the sizes.
    """
    if not directory_sizes:
        return []
    ends = list(accumulate(directory_sizes))
    first = bisect_right(ends, store_index * GOLDEN_RATIO % 1 * ends[-1])
    return [first, *(i for i in range(len(directory_sizes)) if i != first)]


def _disk_bytes(path: Path) -> int:
    """Return the size of the file system of a directory, which may not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).total
