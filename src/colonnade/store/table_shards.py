"""Shards of tables: whole tables, column slices, hot and cold rows; and readers that join their records again.

A slice is a table by itself wherever rows are stored or sent. Its records have the same ids and clocks as those of the
other slices, because all slices of a row are looked up, updated and deleted together.

Legend: N rows, R bytes of a whole record, S of a slice's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.errors import ConfigError, StorageError
from colonnade.store.contract import DeferredResult, Pending, RowBatch
from colonnade.store.shards import ReadOnly, ShardReader, join_shard_reads
from colonnade.table import (
    CLOCK_BYTES,
    ITEM_BYTES,
    Table,
    TableSide,
    TableSlice,
    select_table_side,
    slice_table_columns,
)
from colonnade.topology.sharding import HotRows, Sharding, is_hot, slice_columns


@dataclass(frozen=True, slots=True)
class TableShard:
    """Shard of a declared table: the whole table, one column slice of it, or its hot or cold rows."""

    number: int
    """Index of the declared table."""
    table: Table
    sharding: Sharding
    """Sharding of this shard alone, never a kind that cuts."""

    @property
    def label(self) -> str:
        """Name of its folders."""
        columns = self.columns if isinstance(self.table, TableSlice) else None
        return label(self.number, columns, self.sharding.hot)

    @property
    def is_hot(self) -> bool:
        return isinstance(self.table, TableSide) and self.table.side == "hot"

    @property
    def stored(self) -> Table:
        """Table as stores see it: memory for hot rows must not grow with the table's number of rows."""
        return replace(self.table, rows=None) if self.is_hot else self.table

    def max_resident_rows(self, planned: int) -> int:
        """Return the rows of it that may be in memory at once: all hot ones, else the number planned for the table."""
        hot = self.sharding.hot
        return len(hot.ids) if self.is_hot and hot is not None else planned

    @property
    def columns(self) -> tuple[int, int]:
        """Columns (first, last + 1) of the declared table."""
        first = self.table.origin[1]
        return first, first + self.table.width


def label(number: int, columns: tuple[int, int] | None = None, hot: HotRows | None = None) -> str:
    """Return the folder name of a table, of some of its columns, or of its rows on one side of a hot list."""
    if hot is not None:
        return f"{number:03d}-{hot.side}-{hot.digest}"
    return f"{number:03d}" if columns is None else f"{number:03d}-{columns[0]}-{columns[1]}"


def shard_tables(tables: Sequence[Table], shardings: Sequence[Sharding]) -> tuple[TableShard, ...]:
    """Split tables into shards: in the order of the tables, slices from the left, cold rows before hot ones.

    Pure. Raises ConfigError for more slices than columns.
    """
    shards = []
    for t, (table, sharding) in enumerate(zip(tables, shardings, strict=True)):
        if sharding.has_hot:
            shards.append(TableShard(t, select_table_side(table, "cold"), sharding.cold_sharding))
            shards.append(TableShard(t, select_table_side(table, "hot"), sharding.hot_sharding))
            continue
        if sharding.slices == 1:
            shards.append(TableShard(t, table, sharding))
            continue
        if sharding.slices > table.width:
            raise ConfigError(
                f"table {table.name!r}: got sharding {sharding.kind} with {sharding.slices} slices for rows of "
                f"{table.width} columns, wanted at least a column for each; name fewer ranks "
                f"(plan.tables.{table.name}.ranks), or choose another sharding"
            )
        columns = slice_columns(table.width, sharding.slices)
        for (first, last), own_sharding in zip(columns, sharding.slice_shardings, strict=True):
            shards.append(TableShard(t, slice_table_columns(table, first, last), own_sharding))
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Layout of a record, for readers that know a table only from a commit."""

    dims: tuple[int, ...]
    """Number of columns, by part."""
    states: tuple[int, ...]
    """Number of optimizer state scalars, by part."""
    itemsize: int
    state_itemsize: int
    has_master: bool

    @classmethod
    def of(cls, table: Table) -> RecordShape:
        return cls(
            tuple(part.dim for part in table.parts),
            tuple(part.optimizer.state_floats(part.dim) for part in table.parts),
            table.itemsize,
            ITEM_BYTES[table.compute_dtype],
            table.master,
        )

    @property
    def record_bytes(self) -> int:
        width = sum(self.dims)
        state = sum(self.states) * self.state_itemsize
        return width * self.itemsize + state + 2 * width * self.has_master + CLOCK_BYTES

    def bytes_of(self, first: int, last: int) -> Tensor:
        """Return the positions (S,) int64, in a whole record, of the bytes of a record of columns first .. last - 1.

        A part that is cut has state scalars for each column, stored kind by kind.
        """
        width = sum(self.dims)
        pieces = []
        pieces.append(torch.arange(first * self.itemsize, last * self.itemsize))
        column = 0
        begin = width * self.itemsize
        for dim, state in zip(self.dims, self.states, strict=True):
            low = max(first, column) - column
            high = min(last, column + dim) - column
            if low < high:
                kinds = [range(state)]
                if high - low < dim:
                    kinds = [range(k + low, k + high) for k in range(0, state, dim)]
                scalars = torch.tensor([s for kind in kinds for s in kind], dtype=torch.int64)
                ramp = torch.arange(self.state_itemsize)
                pieces.append((begin + scalars[:, None] * self.state_itemsize + ramp).flatten())
            column = column + dim
            begin = begin + state * self.state_itemsize
        if self.has_master:
            pieces.append(torch.arange(begin + 2 * first, begin + 2 * last))
        pieces.append(torch.arange(self.record_bytes - CLOCK_BYTES, self.record_bytes))
        return torch.cat(pieces)


class ColumnShardReader(ReadOnly):
    """Reader of the column slices of a table as one store of whole records."""

    def __init__(
        self,
        slices: Sequence[ShardReader],
        columns: Sequence[tuple[int, int]],
        shape: RecordShape,
        identity: str = "",
    ) -> None:
        """identity: meaning of the bytes of whole records (`checkpoint.fingerprint.get_record_identity`)."""
        self.slices = tuple(slices)
        self.identity = identity
        self.bytes = [shape.bytes_of(first, last) for first, last in columns]
        self.record_bytes = shape.record_bytes

    def __len__(self) -> int:
        return len(self.slices[0])

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        parts = []
        for part in self.slices:
            records = torch.empty(len(ids), part.record_bytes, dtype=torch.uint8)
            parts.append((records, part.read(ids, records)))

        def finish() -> Tensor:
            exists = torch.stack([pending.wait() for _, pending in parts]).all(0)
            rows = torch.nonzero(exists)
            for (records, _), positions in zip(parts, self.bytes, strict=True):
                records_out[rows, positions] = records[rows[:, 0]]
            return exists

        return DeferredResult(finish)

    def scan(self) -> Iterator[RowBatch]:
        """Yield all rows. Raises StorageError if the slices do not have the same rows."""
        for rows in self.slices[0].scan():
            records = torch.empty(len(rows.ids), self.record_bytes, dtype=torch.uint8)
            if not bool(self.read(rows.ids, records).wait().all()):
                raise StorageError(
                    "slices of a table have other rows than its first; restore the commit from a copy"
                )
            yield RowBatch(rows.ids, records)

    def close(self) -> None:
        for part in self.slices:
            part.close()


class HotColdReader(ReadOnly):
    """Reader of the cold and the hot rows of a table as one store."""

    def __init__(self, cold: ShardReader, hot: ShardReader, ids: Tensor) -> None:
        """ids (H,) int64 ascending: the hot rows."""
        self.cold = cold
        self.hot = hot
        self.ids = ids
        self.record_bytes = cold.record_bytes

    def __len__(self) -> int:
        return len(self.cold) + len(self.hot)

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        mask = is_hot(ids, self.ids)
        parts = []
        for side, store in ((mask, self.hot), (~mask, self.cold)):
            positions = side.nonzero()[:, 0]
            records = torch.empty(len(positions), self.record_bytes, dtype=torch.uint8)
            parts.append((positions, records, store.read(ids[positions], records)))
        return join_shard_reads(parts, len(ids), records_out)

    def scan(self) -> Iterator[RowBatch]:
        yield from self.cold.scan()
        yield from self.hot.scan()

    def close(self) -> None:
        self.cold.close()
        self.hot.close()


class ColumnSliceReader(ReadOnly):
    """Reader of some columns of a store of whole records, as a slice's store."""

    def __init__(
        self,
        whole: ShardReader | ColumnShardReader | HotColdReader,
        columns: tuple[int, int],
        shape: RecordShape,
    ) -> None:
        self.whole = whole
        self.bytes = shape.bytes_of(*columns)
        self.record_bytes = len(self.bytes)

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, ids: Tensor, records_out: Tensor) -> Pending:
        records = torch.empty(len(ids), self.whole.record_bytes, dtype=torch.uint8)
        pending = self.whole.read(ids, records)

        def finish() -> Tensor:
            exists = pending.wait()
            records_out[exists] = records[exists][:, self.bytes]
            return exists

        return DeferredResult(finish)

    def scan(self) -> Iterator[RowBatch]:
        for rows in self.whole.scan():
            yield RowBatch(rows.ids, rows.records[:, self.bytes])

    def close(self) -> None:
        self.whole.close()
