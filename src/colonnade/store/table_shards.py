"""Tables as they are laid out: whole, cut by columns into slices, or with hot rows apart from cold ones; and records
of whole rows from those of slices.

A slice is a table by itself wherever rows lie, rest and travel. Its records hold the same ids and clocks as those of
the other slices, for all slices of a row are looked up, updated and forgotten together.

Legend: N rows, R bytes of a whole record, S of a slice's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.errors import ConfigError, StorageError
from colonnade.store.contract import Pending, RowBatch
from colonnade.store.shards import ReadOnly, Shards, ShardsRead
from colonnade.table import CLOCK_BYTES, ITEM_BYTES, Table, TableSide, TableSlice, side_of, slice_of
from colonnade.topology.sharding import HotRows, Sharding, columns_of, is_hot


@dataclass(frozen=True, slots=True)
class Laid:
    """A declared table as it is, one slice of it, or its hot or cold rows."""

    number: int
    """Of the declared table."""
    table: Table
    sharding: Sharding
    """Of this slice alone: no kind that cuts."""

    @property
    def label(self) -> str:
        """Of its folders."""
        columns = self.columns if isinstance(self.table, TableSlice) else None
        return label(self.number, columns, self.sharding.hot)

    @property
    def is_hot(self) -> bool:
        return isinstance(self.table, TableSide) and self.table.side == "hot"

    @property
    def stored(self) -> Table:
        """As stores know it: memory for hot rows must not grow with all that the table may have."""
        return replace(self.table, rows=None) if self.is_hot else self.table

    def room(self, planned: int) -> int:
        """Rows of it that may be in memory at once, by what is planned of the table: hot ones all are, beside it."""
        hot = self.sharding.hot
        return len(hot.ids) if self.is_hot and hot is not None else planned

    @property
    def columns(self) -> tuple[int, int]:
        """(first, last + 1) of the declared table's rows."""
        first = self.table.origin[1]
        return first, first + self.table.width


def label(number: int, columns: tuple[int, int] | None = None, hot: HotRows | None = None) -> str:
    """Of the folders of table `number`, of some of its columns, or of its rows of one side of a list."""
    if hot is not None:
        return f"{number:03d}-{hot.side}-{hot.word}"
    return f"{number:03d}" if columns is None else f"{number:03d}-{columns[0]}-{columns[1]}"


def lay_out(tables: Sequence[Table], shardings: Sequence[Sharding]) -> tuple[Laid, ...]:
    """In the order of the tables, slices from the left, cold rows before hot ones. Pure. Raises ConfigError for more
    slices than columns."""
    found = []
    for t, (table, sharding) in enumerate(zip(tables, shardings, strict=True)):
        if sharding.has_hot:
            found.append(Laid(t, side_of(table, "cold"), sharding.of_cold))
            found.append(Laid(t, side_of(table, "hot"), sharding.of_hot))
            continue
        if sharding.slices == 1:
            found.append(Laid(t, table, sharding))
            continue
        if sharding.slices > table.width:
            raise ConfigError(
                f"table {table.name!r}: got sharding {sharding.kind} with {sharding.slices} slices for rows of "
                f"{table.width} columns, wanted at least a column for each; name fewer ranks "
                f"(plan.tables.{table.name}.ranks), or choose another sharding"
            )
        columns = columns_of(table.width, sharding.slices)
        for (first, last), each in zip(columns, sharding.of_slices, strict=True):
            found.append(Laid(t, slice_of(table, first, last), each))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RecordShape:
    """What of a record is where, for who knows a table by a commit's word alone."""

    dims: tuple[int, ...]
    """By part."""
    states: tuple[int, ...]
    """Scalars of optimizer state, by part."""
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
        """(S,) int64: where each byte of a record of columns first .. last - 1 is in a whole one. A part that is cut
        has some scalars of state for each column, those of one kind side by side."""
        width, found = sum(self.dims), []
        found.append(torch.arange(first * self.itemsize, last * self.itemsize))
        column, begin = 0, width * self.itemsize
        for dim, state in zip(self.dims, self.states, strict=True):
            low, high = max(first, column) - column, min(last, column + dim) - column
            if low < high:
                kinds = [range(state)]
                if high - low < dim:
                    kinds = [range(k + low, k + high) for k in range(0, state, dim)]
                scalars = torch.tensor([s for kind in kinds for s in kind], dtype=torch.int64)
                ramp = torch.arange(self.state_itemsize)
                found.append((begin + scalars[:, None] * self.state_itemsize + ramp).flatten())
            column, begin = column + dim, begin + state * self.state_itemsize
        if self.has_master:
            found.append(torch.arange(begin + 2 * first, begin + 2 * last))
        found.append(torch.arange(self.record_bytes - CLOCK_BYTES, self.record_bytes))
        return torch.cat(found)


class Joined(ReadOnly):
    """The slices of a table, read as one store of whole records."""

    def __init__(
        self,
        slices: Sequence[Shards],
        columns: Sequence[tuple[int, int]],
        shape: RecordShape,
        identity: str = "",
    ) -> None:
        """identity: what the bytes of whole records mean (`train.fingerprint.identity_of`)."""
        self.slices, self.identity = tuple(slices), identity
        self.bytes = [shape.bytes_of(first, last) for first, last in columns]
        self.record_bytes = shape.record_bytes

    def __len__(self) -> int:
        return len(self.slices[0])

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        parts = []
        for each in self.slices:
            records = torch.empty(len(ids), each.record_bytes, dtype=torch.uint8)
            parts.append((records, each.read(ids, records)))
        return JoinedRead(parts, self.bytes, out)

    def scan(self) -> Iterator[RowBatch]:
        """Raises StorageError where the slices do not hold the same rows."""
        for rows in self.slices[0].scan():
            records = torch.empty(len(rows.ids), self.record_bytes, dtype=torch.uint8)
            if not bool(self.read(rows.ids, records).wait().all()):
                raise StorageError(
                    "slices of a table hold other rows than its first; restore the commit from a copy"
                )
            yield RowBatch(rows.ids, records)

    def close(self) -> None:
        for each in self.slices:
            each.close()


class JoinedRead(Pending):
    """The reads of all slices under way."""

    def __init__(
        self, parts: Sequence[tuple[Tensor, Pending]], places: Sequence[Tensor], out: Tensor
    ) -> None:
        self._parts, self._places, self._out = parts, places, out

    def wait(self) -> Tensor:
        found = [pending.wait() for _, pending in self._parts]
        there = torch.stack(found).all(0)
        rows = torch.nonzero(there)
        for (records, _), place in zip(self._parts, self._places, strict=True):
            self._out[rows, place] = records[rows[:, 0]]
        return there


class Rejoined(ReadOnly):
    """The cold and the hot rows of a table, read as one store."""

    def __init__(self, cold: Shards, hot: Shards, ids: Tensor) -> None:
        """ids (H,) int64 ascending, of the hot ones."""
        self.cold, self.hot, self.ids = cold, hot, ids
        self.record_bytes = cold.record_bytes

    def __len__(self) -> int:
        return len(self.cold) + len(self.hot)

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        mask, parts = is_hot(ids, self.ids), []
        for side, each in ((mask, self.hot), (~mask, self.cold)):
            where = side.nonzero()[:, 0]
            records = torch.empty(len(where), self.record_bytes, dtype=torch.uint8)
            parts.append((where, records, each.read(ids[where], records)))
        return ShardsRead(parts, len(ids), out)

    def scan(self) -> Iterator[RowBatch]:
        yield from self.cold.scan()
        yield from self.hot.scan()

    def close(self) -> None:
        self.cold.close()
        self.hot.close()


class Sliced(ReadOnly):
    """Some columns of a store of whole records, read as a slice's store."""

    def __init__(
        self, whole: Shards | Joined | Rejoined, columns: tuple[int, int], shape: RecordShape
    ) -> None:
        self.whole, self.bytes = whole, shape.bytes_of(*columns)
        self.record_bytes = len(self.bytes)

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, ids: Tensor, out: Tensor) -> Pending:
        records = torch.empty(len(ids), self.whole.record_bytes, dtype=torch.uint8)
        return SlicedRead(records, self.whole.read(ids, records), self.bytes, out)

    def scan(self) -> Iterator[RowBatch]:
        for rows in self.whole.scan():
            yield RowBatch(rows.ids, rows.records[:, self.bytes])

    def close(self) -> None:
        self.whole.close()


class SlicedRead(Pending):
    """The read of whole records under way."""

    def __init__(self, records: Tensor, pending: Pending, place: Tensor, out: Tensor) -> None:
        self._records, self._pending, self._place, self._out = records, pending, place, out

    def wait(self) -> Tensor:
        found = self._pending.wait()
        self._out[found] = self._records[found][:, self._place]
        return found
