"""Exported rows, memory-mapped and read in place: weights only, nothing pinned, reads leave no trace.

Processes that map the same file share its pages. Each has an index of its own: 4 bytes per row of a vocabulary table,
23 per row of an open one. Absent rows read as their first value (lazy initialisation): it is written behind the mapped
rows, in memory of this process, so that every row of a table is at `base + slot * stride`. Between the two are rows
that are newer than the file (`change`), with an index of their own: 23 bytes a row.

If the files are larger than memory, a `RowCache` has the rows that are used most. Rows that it lacks are read from the
files, all those of a batch with many reads in flight; the mapping then serves only what `MappedRows.read` gives up.

Legend: N rows of a file or of a change, T tables, E lookups.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Ids
from colonnade.errors import ConfigError, CorruptionError, StorageError
from colonnade.files.checksums import AGAIN, BLOCK_BYTES, FileChecksums, Scrub
from colonnade.files.disk import FileMapping
from colonnade.store.dram import open_dram_store
from colonnade.store.row_file import RowFile, open_row_file
from colonnade.table import Table

SPARSE = 16
"""Rows of a vocabulary for each exported row, above which a table is indexed by hash."""
GONE = 1 << 40  # instead of a slot: a row of the file that was deleted


class MappedRows:
    """Mapped rows of all tables of an exported model. One thread at a time. Built by `open_mapped`."""

    def __init__(
        self,
        tables: Sequence[MappedTable],
        initialiser: _native.Dram,
        cache: _native.RowCache | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.cache = cache
        self._initialiser = initialiser
        self._native_tables = [table.native for table in tables]
        self._num_damaged = 0  # mappings of this process known as damaged, none of these tables
        self._scrub: Scrub | None = None
        self._failure: StorageError | None = None
        """Failure of a mapping, or of the rows that these are a fork of."""
        self._is_closed = False

    def find_slots(self, ids: Tensor, feature_offsets: Tensor, table_indices: Tensor) -> Tensor:
        """Return the slot of each lookup, (E,) int32, valid until the next call.

        ids (E,) column by column, feature_offsets (C + 1,), table_indices (C,): the table of each column. IndexError
        for an id outside its vocabulary table; CorruptionError if a row's block of its file is damaged, StorageError
        if it cannot be read; ConfigError once the rows are closed.
        """
        self._check_open()
        _native.handle_faults()  # other libraries may have installed their handlers meanwhile
        slots = np.empty(len(ids), np.int32)
        lookups = ids.numpy()
        bounds = feature_offsets.tolist()
        absent: dict[int, list[np.ndarray]] = {}
        for c, t in enumerate(table_indices.tolist()):
            first = bounds[c]
            last = bounds[c + 1]
            missing = self.tables[t].find_slots(lookups[first:last], slots[first:last])
            if len(missing):
                absent.setdefault(t, []).append(missing + first)
        for t, parts in absent.items():
            positions = np.concatenate(parts)
            slots[positions] = self.tables[t].initialise(lookups[positions])
        return torch.from_numpy(slots)

    def read(
        self,
        native_reader: _native.MappedReader,
        ids: Mapping[str, Ids],
        batch_size: int,
        *,
        is_sharing: bool,
    ) -> list[Tensor] | None:
        """Look up a batch's features and pool them in one native call. Return the reader's outputs; None if an id, a
        tensor or a row is invalid, a row's block was not checked yet, or a file could not be read: `find_slots` and
        `check_damage` then say what, or check it.

        is_sharing: a feature with one sample has it for all samples. Raises ConfigError once the rows are closed.
        """
        self._check_open()
        _native.handle_faults()  # other libraries may have installed their handlers meanwhile
        return native_reader.read(
            self._native_tables, self._initialiser, ids, batch_size, is_sharing, self.cache
        )

    def addresses_and_strides(self) -> tuple[Tensor, Tensor]:
        """Return the address of slot 0 and the bytes between slots, (T,) each. Valid until the next `find_slots`."""
        return (
            torch.tensor([table.base for table in self.tables], dtype=torch.int64),
            torch.tensor([table.stride for table in self.tables], dtype=torch.int64),
        )

    def check_damage(self) -> None:
        """Raise CorruptionError if a file could not be read under a lookup: results computed from it are void.

        Call it after rows were read, before anything is returned.
        """
        count = _native.num_damaged()
        if count == self._num_damaged:
            return
        for table in self.tables:
            if table.is_damaged:
                self._failure = CorruptionError(
                    f"{table.file.path}: got a file that was cut short, or that its disk cannot read, while its rows "
                    f"were served. {AGAIN}, and open it anew; write exports to new folders, never over one in use"
                )
                raise self._failure
        self._num_damaged = count

    def start_scrub(self) -> None:
        """Check blocks that no lookup has read yet, in a thread."""
        self._scrub = Scrub([table.file.file for table in self.tables])

    def check_files(self) -> None:
        """Check the blocks of files again that were written to or cut short since the last call, at their next use and
        in a thread: a change in place shows through a mapping."""
        if any([table.file.file.forget_checks_if_written() for table in self.tables]):
            if self._scrub is not None:
                self._scrub.stop()
            self.start_scrub()

    @property
    def problem(self) -> StorageError | None:
        """Damage detected in the background, or under a lookup; None if none was."""
        return self._failure or (self._scrub.problem if self._scrub else None)

    @property
    def is_replaced(self) -> bool:
        """True if a file was rewritten since it was opened."""
        return any(table.file.file.is_replaced for table in self.tables)

    @property
    def newer_bytes(self) -> int:
        """Bytes of rows that are newer than the files, in the memory of this process."""
        return sum(table.newer_bytes for table in self.tables)

    def apply_delta(
        self, table_index: int, ids: Tensor, weights: Tensor, deleted_ids: Tensor
    ) -> None:
        """Overwrite and delete rows of a table, in memory only.

        ids (N,) unique, weights (N, width) of the table's dtype; deleted_ids (G,): ids that read as their first value
        again.
        """
        self._check_open()
        self.tables[table_index].apply_delta(ids.numpy(), weights, deleted_ids.numpy())

    def replace_files(self, newer_rows: MappedRows) -> None:
        """Replace the mapped files by those of `newer_rows`, which must not be used any more."""
        self._check_open()
        self._unmap()
        self.tables = newer_rows.tables
        self._scrub = newer_rows._scrub
        self._failure = None
        self.cache = newer_rows.cache
        self._initialiser = newer_rows._initialiser
        self._native_tables = newer_rows._native_tables

    def fork(self, seed: int) -> MappedRows:
        """Return other rows of the same content, which change by themselves. Files, their indices, their cached rows
        and what is known of their checksums are shared; rows that are newer than the files are copied. seed: the
        collection's."""
        self._check_open()
        declared = [table.table for table in self.tables]
        initialiser = open_dram_store(declared, [1] * len(declared), seed=seed).native
        other = MappedRows(
            [table.fork(initialiser) for table in self.tables], initialiser, self.cache
        )
        other._failure = self.problem
        if self._scrub is not None:
            other.start_scrub()
        return other

    def close(self) -> None:
        """Unmap and close the files, and drop their indices; later reads are refused."""
        self._is_closed = True
        self.cache = None
        self._unmap()
        self.tables = ()
        self._native_tables = []

    def _unmap(self) -> None:
        if self._scrub is not None:
            self._scrub.stop()
        for table in self.tables:
            table.close()

    def _check_open(self) -> None:
        """Raise ConfigError instead of reading unmapped memory, which would end the process."""
        if self._is_closed:
            raise ConfigError("got a predictor that is closed; open it again: Predictor.open(path)")


class MappedTable:
    """Mapped file of one table and the memory behind it."""

    def __init__(
        self,
        table_index: int,
        file: RowFile,
        initialiser: _native.Dram,
        index: SlotIndex | None = None,
    ) -> None:
        """Index the file's ids, unless another table of the file has done it (index). Raises CorruptionError,
        StorageError if they are damaged."""
        self.table_index = table_index
        self.table = file.table
        self.file = file
        self.index = SlotIndex(file) if index is None else index
        self.stride = file.stride
        self.base = 0
        self._initialiser = initialiser
        self._mapping = _Mapping(file)
        self._capacity = self._room = 0
        # id -> slot, or GONE, of rows that differ from the file
        self._newer: _native.RowIndex | None = None
        self._num_newer = 0
        self.native = _native.MappedTable(
            self.table.rows or 0,
            file.num_rows,
            self.index.slots_by_id,
            self.index.hashed,
            file.stride,
            file.weights_begin,
            BLOCK_BYTES,
            file.file.checked,
        )

    def find_slots(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Fill slots (E,); returns the positions of ids that have no row. Raises CorruptionError, StorageError if a row
        is damaged."""
        self.index.get(ids, slots)
        if self._newer is not None and len(ids):
            newer_slots = np.empty(len(ids), np.int64)
            self._newer.get(np.ascontiguousarray(ids), newer_slots)
            newer_rows = np.flatnonzero(newer_slots != -1)
            slots[newer_rows] = (
                np.where(newer_slots[newer_rows] == GONE, -1, newer_slots[newer_rows])
                .astype(np.uint32)
                .view(np.int32)
            )
        self.file.check_row_blocks(slots)
        return np.flatnonzero(slots == -1) if slots.size and slots.min() < 0 else slots[:0]

    def initialise(self, ids: np.ndarray) -> np.ndarray:
        """Write first values of ids (N,), repeats allowed, over those of the last call. Returns their slots (N,)."""
        if len(ids) > self._capacity:
            self.reserve(2 * len(ids))
        out = self._mapping.rows_behind(self._room, len(ids))
        values = torch.from_numpy(out).view(getattr(torch, self.table.dtype))
        self._initialiser.initial_values(
            self.table_index, torch.from_numpy(ids), values.view(len(ids), self.table.width)
        )
        first = self._mapping.first_free + self._room
        return np.arange(first, first + len(ids), dtype=np.uint32).view(np.int32)

    def apply_delta(self, ids: np.ndarray, weights: Tensor, gone: np.ndarray) -> None:
        """Overwrite and delete rows as `MappedRows.apply_delta`.

        A row that was newer already changes in place. The slot of a deleted row stays unused until the file is
        replaced.
        """
        if self._newer is None:
            self._newer = _native.RowIndex()
            self.native.set_newer(self._newer)
        slots = np.empty(len(ids), np.int64)
        self._newer.get(ids, slots)
        new = np.flatnonzero((slots == -1) | (slots == GONE))
        if self._num_newer + len(new) > self._room:
            self.reserve(self._capacity, 2 * (self._num_newer + len(new)))
        first = self._mapping.first_free + self._num_newer
        slots[new] = np.arange(first, first + len(new))
        self._num_newer += len(new)
        out = self._mapping.rows_behind(0, self._num_newer).reshape(-1, self.stride)
        rows = weights.contiguous().view(torch.uint8).numpy().reshape(len(ids), self.stride)
        out[slots - self._mapping.first_free] = rows
        self._newer.put(ids, slots)
        self._newer.put(gone, np.full(len(gone), GONE, np.int64))

    def fork(self, initialiser: _native.Dram) -> MappedTable:
        """Return another table of the same file, with a copy of the rows that are newer."""
        file = replace(self.file, file=self.file.file.duplicate())
        other = MappedTable(self.table_index, file, initialiser, self.index)
        other.reserve(0, self._num_newer)
        if self._newer is not None:
            other._newer = _native.RowIndex()
            other._num_newer = self._num_newer
            other._newer.put(*self._newer.items())
            other.native.set_newer(other._newer)
            if self._num_newer:
                rows = self._mapping.rows_behind(0, self._num_newer)
                other._mapping.rows_behind(0, self._num_newer)[:] = rows
        return other

    def reserve(self, num_first_values: int, num_newer_rows: int | None = None) -> None:
        """Reserve address space for `num_newer_rows` rows that are newer than the file's, then for `num_first_values`
        first values."""
        newer = self._mapping.rows_behind(0, self._num_newer).copy() if self._num_newer else None
        self._capacity = num_first_values
        self._room = self._room if num_newer_rows is None else num_newer_rows
        self.base = self._mapping.map_with_room(self._room + num_first_values)
        self.native.set_base(self.base)
        if newer is not None:
            self._mapping.rows_behind(0, self._num_newer)[:] = newer

    @property
    def newer_bytes(self) -> int:
        """Bytes of rows that are newer than the file."""
        return self._num_newer * self.stride

    @property
    def is_damaged(self) -> bool:
        """True if the file could not be read under a lookup."""
        return self._mapping.is_damaged

    def close(self) -> None:
        self.native.set_base(0)
        self._mapping.close()
        self.file.file.file.close()


class SlotIndex:
    """Index from id to the row's number in its file, -1 if absent."""

    def __init__(self, file: RowFile) -> None:
        """Index the file's ids. Raises CorruptionError, StorageError if they are damaged."""
        self.rows = file.table.rows
        # Ids ascend and are in range, so they are then 0 .. rows - 1.
        self.is_all = self.rows == file.num_rows
        self.slots_by_id: np.ndarray | None = None
        self.hashed: _native.RowIndex | None = None
        if self.rows is not None and self.rows <= SPARSE * file.num_rows + (1 << 16):
            self.slots_by_id = None if self.is_all else np.full(self.rows, -1, np.int32)
        else:
            self.hashed = _native.RowIndex()
        first = 0
        for ids in file.ids():
            if self.slots_by_id is not None:
                self.slots_by_id[ids] = np.arange(first, first + len(ids), dtype=np.int32)
            elif self.hashed is not None:
                self.hashed.put(ids, np.arange(first, first + len(ids), dtype=np.int64))
            first += len(ids)

    def get(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Fill slots (E,) int32. IndexError for an id outside the vocabulary."""
        if not len(ids):
            return
        if self.rows is not None and int(ids.view(np.uint64).max()) >= self.rows:
            raise IndexError("an id is outside its vocabulary table")
        if self.is_all:
            slots[:] = ids
        elif self.slots_by_id is not None:
            np.take(self.slots_by_id, ids, out=slots, mode="clip")
        else:
            assert self.hashed is not None
            row_numbers = np.empty(len(ids), np.int64)
            self.hashed.get(ids, row_numbers)
            slots[:] = row_numbers


class _Mapping:
    """Mapping of a file's rows, with writable memory behind them at the following addresses."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.stride = file.stride
        self.first_free = 0  # slot
        self._base = 0
        self._pages: FileMapping | None = None

    def map_with_room(self, num_extra_rows: int) -> int:
        """Map the file again, with room for `num_extra_rows` rows behind its own. Returns the address of slot 0."""
        self.close()
        begin = self.file.weights_begin
        page = mmap.PAGESIZE
        first = begin // page * page if self.file.num_rows else begin
        length = begin - first + self.file.num_rows * self.stride
        end = -(-length // page) * page
        self.first_free = -(-(end - (begin - first)) // self.stride)
        room = (num_extra_rows + 1) * self.stride
        offset = first if length else 0
        self._pages = FileMapping(
            self.file.file.file, length, offset=offset, room=room, is_random=True
        )
        self._base = self._pages.address + begin - first
        return self._base

    def rows_behind(self, first: int, count: int) -> np.ndarray:
        """View the bytes of `count` rows behind the file's, from their number `first` on, writable."""
        start = self._base + (self.first_free + first) * self.stride
        return np.ctypeslib.as_array((ctypes.c_uint8 * (count * self.stride)).from_address(start))

    @property
    def is_damaged(self) -> bool:
        return self._pages is not None and self._pages.is_damaged

    def close(self) -> None:
        """Unmap, as when the object is dropped."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None


def open_mapped(
    tables: Sequence[Table],
    folder: Path,
    files: Sequence[tuple[str, FileChecksums]],
    *,
    seed: int,
    full: bool = False,
    previous_rows: MappedRows | None = None,
    row_memory: int | None = None,
) -> MappedRows:
    """Map one file of `folder` per table. Raises StorageError, CorruptionError naming the file that is damaged.

    seed: the collection's; it decides first values. Headers and ids are checked now; rows when they are first read, or
    now if `full`. previous_rows: other rows; files that are open there are not checked again. row_memory: bytes of a
    cache of rows, ConfigError if they are too few; None: rows are read in place.
    """
    opened = [
        open_row_file(folder, name, checksums, table)
        for table, (name, checksums) in zip(tables, files, strict=True)
    ]
    for previous, file in zip(previous_rows.tables if previous_rows else (), opened, strict=False):
        file.file.take_over(previous.file.file)
    if full:
        for file in opened:
            file.file.check_all()
    initialiser = open_dram_store(tables, [1] * len(tables), seed=seed).native
    mapped = [MappedTable(t, file, initialiser) for t, file in enumerate(opened)]
    for table in mapped:
        table.reserve(0)
    cache = None if row_memory is None else _open_cache(opened, row_memory)
    return MappedRows(mapped, initialiser, cache)


def _open_cache(files: Sequence[RowFile], num_bytes: int) -> _native.RowCache:
    """Open a cache of the files' rows. Raises ConfigError if the memory is too small, StorageError."""
    sources = [
        (file.file.file.fd, file.weights_begin, file.stride, file.num_rows) for file in files
    ]
    try:
        return _native.RowCache(sources, num_bytes)
    except ValueError as error:
        raise ConfigError(f"row memory: {error}") from None
    except RuntimeError as error:
        raise StorageError(f"{error}. Raise the limit on open files (`ulimit -n`)") from error
