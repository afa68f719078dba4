"""Exported rows, memory-mapped and read in place: weights only, nothing pinned, nothing remembered of a read.

Processes that map the same file share its pages. Each keeps an index of its own: 4 bytes per row of a
vocabulary table, 23 per row of an open one. Rows that are not there read as their first value (birth law):
it is written behind the mapped rows, in memory of this process, so that every row of a table lies at
`base + slot * stride`. Between the two lie rows that are newer than the file (`change`), with an index of
their own: 23 bytes beside a row. Legend: N rows of a file or of a change, T tables, E lookups.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CorruptionError, StorageError
from colonnade.store.dram import open_dram
from colonnade.table import Table

MAP_FIXED = 0x10  # the mmap module has no name for it
INDEX_RUN = 1 << 20  # ids put into the index at a time
SPARSE = 16
"""A vocabulary table with fewer than one exported row in so many is indexed by hash."""
GONE = 1 << 40  # no slot: a row of the file that is none any more
DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}


class MappedRows:
    """All tables of an exported model. One thread at a time. Built by `open_mapped`."""

    def __init__(self, tables: Sequence[MappedTable]) -> None:
        self.tables = tuple(tables)

    def find(self, ids: Tensor, offsets: Tensor, tables: Tensor) -> Tensor:
        """The slot of each lookup, (E,) int32, valid until the next call.

        ids (E,) column by column, offsets (C + 1,), tables (C,): the table of each column. IndexError
        for an id outside its vocabulary table.
        """
        slots, lookups = np.empty(len(ids), np.int32), ids.numpy()
        bounds = offsets.tolist()
        absent: dict[int, list[np.ndarray]] = {}
        for c, t in enumerate(tables.tolist()):
            first, last = bounds[c], bounds[c + 1]
            missing = self.tables[t].find(lookups[first:last], slots[first:last])
            if len(missing):
                absent.setdefault(t, []).append(missing + first)
        for t, parts in absent.items():
            where = np.concatenate(parts)
            slots[where] = self.tables[t].bear(lookups[where])
        return torch.from_numpy(slots)

    def places(self) -> tuple[Tensor, Tensor]:
        """(T,) each: the address of slot 0, and the bytes between slots. Valid until the next `find`."""
        return (
            torch.tensor([table.base for table in self.tables], dtype=torch.int64),
            torch.tensor([table.stride for table in self.tables], dtype=torch.int64),
        )

    def change(self, t: int, ids: Tensor, weights: Tensor, gone: Tensor) -> None:
        """Rows of table t are these from now on: ids (N,) unique, weights (N, width) of the table's dtype; gone (G,):
        ids that read as their first value again."""
        self.tables[t].change(ids.numpy(), weights, gone.numpy())

    def become(self, other: MappedRows) -> None:
        """Serve the rows of another file of each table instead; `other` is used up."""
        self.close()
        self.tables = other.tables

    def close(self) -> None:
        for table in self.tables:
            table.close()


class MappedTable:
    """One table's file and the memory behind it."""

    def __init__(
        self, number: int, table: Table, file: RowFile, index: SlotIndex, births: _native.Dram
    ) -> None:
        self.number, self.table, self.file, self.index = number, table, file, index
        self.stride = table.width * table.itemsize
        self.base = 0
        self._births = births
        self._mapping = _Mapping(file, self.stride)
        self._capacity = self._room = 0
        self._newer: _native.RowIndex | None = (
            None  # id -> slot, or GONE, where it is not as in the file
        )
        self._num_newer = 0

    def find(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Fills slots (E,); returns the positions of ids that the file does not hold."""
        self.index.get(ids, slots)
        if self._newer is not None and len(ids):
            places = np.empty(len(ids), np.int64)
            self._newer.get(np.ascontiguousarray(ids), places)
            known = np.flatnonzero(places != -1)
            slots[known] = (
                np.where(places[known] == GONE, -1, places[known]).astype(np.uint32).view(np.int32)
            )
        return np.flatnonzero(slots == -1) if slots.size and slots.min() < 0 else slots[:0]

    def bear(self, ids: np.ndarray) -> np.ndarray:
        """First values of ids (N,), which need not differ, in place of those of the call before; their slots (N,)."""
        if len(ids) > self._capacity:
            self.reserve(2 * len(ids))
        out = self._mapping.behind(self._room, len(ids))
        values = torch.from_numpy(out).view(getattr(torch, self.table.dtype))
        self._births.birth_values(
            self.number, torch.from_numpy(ids), values.view(len(ids), self.table.width)
        )
        first = self._mapping.first_free + self._room
        return np.arange(first, first + len(ids), dtype=np.uint32).view(np.int32)

    def change(self, ids: np.ndarray, weights: Tensor, gone: np.ndarray) -> None:
        """See `MappedRows.change`. A row that was newer already changes in place; one that is gone leaves its place to
        nobody until the file is replaced."""
        if self._newer is None:
            self._newer = _native.RowIndex()
        places = np.empty(len(ids), np.int64)
        self._newer.get(ids, places)
        fresh = np.flatnonzero((places == -1) | (places == GONE))
        if self._num_newer + len(fresh) > self._room:
            self.reserve(self._capacity, 2 * (self._num_newer + len(fresh)))
        first = self._mapping.first_free + self._num_newer
        places[fresh] = np.arange(first, first + len(fresh))
        self._num_newer += len(fresh)
        out = self._mapping.behind(0, self._num_newer).reshape(-1, self.stride)
        rows = weights.contiguous().view(torch.uint8).numpy().reshape(len(ids), self.stride)
        out[places - self._mapping.first_free] = rows
        self._newer.put(ids, places)
        self._newer.put(gone, np.full(len(gone), GONE, np.int64))

    def reserve(self, capacity: int, room: int | None = None) -> None:
        """Address space for `room` rows that are newer than the file's, behind those, and `capacity` first values
        behind them."""
        newer = self._mapping.behind(0, self._num_newer).copy() if self._num_newer else None
        self._capacity, self._room = capacity, self._room if room is None else room
        self.base = self._mapping.map(self._room + capacity)
        if newer is not None:
            self._mapping.behind(0, self._num_newer)[:] = newer

    def close(self) -> None:
        self._mapping.close()


class RowFile:
    """A safetensors file with `ids` (N,) int64 ascending and `weights` (N, width)."""

    def __init__(self, path: Path, ids: np.ndarray, weights_begin: int, weights_bytes: int) -> None:
        self.path, self.ids = path, ids
        self.weights_begin, self.weights_bytes = weights_begin, weights_bytes


class SlotIndex:
    """id -> number of the row in its file, -1 where it is not there."""

    def __init__(self, rows: int | None, ids: np.ndarray) -> None:
        """`rows` of a vocabulary table."""
        self.rows = rows
        self.is_all = rows == len(ids)
        self._direct: np.ndarray | None = None
        self._hashed: _native.RowIndex | None = None
        self._ids = ids

    def build(self) -> SlotIndex:
        if self.is_all:
            return self
        if self.rows is not None and self.rows <= SPARSE * len(self._ids) + (1 << 16):
            self._direct = np.full(self.rows, -1, np.int32)
            self._direct[self._ids] = np.arange(len(self._ids), dtype=np.int32)
            return self
        self._hashed = _native.RowIndex()
        for start in range(0, len(self._ids), INDEX_RUN):
            part = np.ascontiguousarray(self._ids[start : start + INDEX_RUN])
            self._hashed.put(part, np.arange(start, start + len(part), dtype=np.int64))
        return self

    def get(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """slots (E,) int32, written. IndexError for an id outside the vocabulary."""
        if not len(ids):
            return
        if self.rows is not None and int(ids.view(np.uint64).max()) >= self.rows:
            raise IndexError("an id is outside its vocabulary table")
        if self.is_all:
            slots[:] = ids
        elif self._direct is not None:
            np.take(self._direct, ids, out=slots, mode="clip")
        else:
            assert self._hashed is not None
            found = np.empty(len(ids), np.int64)
            self._hashed.get(ids, found)
            slots[:] = found


class _Mapping:
    """A file's rows, and room behind them, at neighbouring addresses."""

    def __init__(self, file: RowFile, stride: int) -> None:
        self.file, self.stride = file, stride
        self.first_free = 0  # slot
        self._base = 0
        self._unmap: Callable[[], object] = lambda: None
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
        )  # fmt: skip
        self._library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def map(self, capacity: int) -> int:
        """Map anew, with room for `capacity` rows behind those of the file; the address of slot 0."""
        self.close()
        begin, page = self.file.weights_begin, mmap.PAGESIZE
        first = begin // page * page if self.file.weights_bytes else begin
        length = begin - first + self.file.weights_bytes
        end = -(-length // page) * page
        self.first_free = -(-(end - (begin - first)) // self.stride)
        size = end + (capacity + 1) * self.stride
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._call(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        self._unmap = unmap = weakref.finalize(self, self._library.munmap, address, size)
        unmap.atexit = False  # the system does that
        self._base = address + begin - first
        if self.file.weights_bytes:
            fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                flags = mmap.MAP_SHARED | MAP_FIXED
                self._call(address, length, mmap.PROT_READ, flags, fd, first)
            finally:
                os.close(fd)
        return self._base

    def behind(self, first: int, count: int) -> np.ndarray:
        """The bytes of `count` rows behind the file's, from number `first` of them on, writable."""
        start = self._base + (self.first_free + first) * self.stride
        return np.ctypeslib.as_array((ctypes.c_uint8 * (count * self.stride)).from_address(start))

    def close(self) -> None:
        """As when nobody holds the object any more."""
        self._unmap()

    def _call(self, *arguments: int | None) -> int:
        address = self._library.mmap(*arguments)
        if address is None or address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise StorageError(
                number, f"{self.file.path}: could not map: {os.strerror(number)}. Raise the limit on address "
                "space (`ulimit -v`), or on mappings (vm.max_map_count)",
            )  # fmt: skip
        return int(address)


def open_mapped(tables: Sequence[Table], paths: Sequence[Path], *, seed: int) -> MappedRows:
    """One file per table. Raises StorageError, CorruptionError naming the file that cannot be read.

    seed: the collection's; it decides first values.
    """
    births = open_dram(tables, [1] * len(tables), seed=seed).native
    found = []
    for number, (table, path) in enumerate(zip(tables, paths, strict=True)):
        file = open_row_file(path, table)
        mapped = MappedTable(number, table, file, SlotIndex(table.rows, file.ids).build(), births)
        mapped.reserve(0)
        found.append(mapped)
    return MappedRows(found)


def open_row_file(path: Path, table: Table) -> RowFile:
    """Raises StorageError, CorruptionError where the file is not one of this table's rows."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = path.stat().st_size
            is_sane = 0 < length <= min(size, 100 << 20)
            text = opened.read(length) if is_sane else b""
    except OSError as error:
        raise StorageError(
            error.errno, f"{path}: cannot be read: {error.strerror}; export the run again"
        ) from None
    if not is_sane:
        raise _wrong(path, f"a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(text)
    except ValueError:
        raise _wrong(path, "a header that is not JSON") from None
    try:
        ids, weights = header["ids"], header["weights"]
        num_rows = int(weights["shape"][0])
        wanted = [("I64", [num_rows]), (DTYPES[table.dtype], [num_rows, table.width])]
        got = [(part["dtype"], part["shape"]) for part in (ids, weights)]
        begins = [int(part["data_offsets"][0]) for part in (ids, weights)]
        sizes = [int(part["data_offsets"][1]) - b for part, b in zip((ids, weights), begins, strict=True)]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise _wrong(path, "a header without ids (N,) and weights (N, width)") from None
    if got != wanted:
        raise _wrong(path, f"ids and weights {got}, wanted {wanted} for table {table.name!r}")
    if (
        sizes != [8 * num_rows, num_rows * table.width * table.itemsize]
        or max(b + s for b, s in zip(begins, sizes, strict=True)) + 8 + length > size
    ):
        raise _wrong(path, f"{size} bytes, fewer than its header says")
    start = 8 + length
    empty = np.empty(0, np.int64)
    mapped = np.memmap(path, np.int64, "r", start + begins[0], (num_rows,)) if num_rows else empty
    if num_rows > 1 and not bool((mapped[1:] > mapped[:-1]).all()):
        raise _wrong(path, "ids that do not ascend")
    return RowFile(path, mapped, start + begins[1], sizes[1])


def _wrong(path: Path, got: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: got {got}; it is no file of exported rows. Export the run again"
    )
