"""Files of samples as one run of blocks: what all kinds of files have in common.

A block is what is read at once: a row group, or some megabytes of text. Blocks are numbered through all
files, in the natural order of the files' paths (day_2 before day_10).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from colonnade.data.lines import check_regular
from colonnade.data.tabular.arrow import one_array, typed
from colonnade.data.tabular.chunk import Chunk, Longs
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.encode import Fault, check_times, encode, encode_part
from colonnade.data.tabular.fields import Dtype, Number
from colonnade.errors import ConfigError, DataError

T = TypeVar("T")


class TableFile(Protocol):
    """One file, indexed: plain values that travel to other processes."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns."""
        ...

    @property
    def header_types(self) -> Mapping[str, str]:
        """Types of columns that the header gives (infer.TYPES), by name."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(blocks,) samples of each block, 1 or more."""
        ...

    def dtype_of(self, column: str) -> Dtype | None:
        """Return what ids of the column are in this kind of file; None where they may be either."""
        ...

    def declared(self) -> Declaration | None:
        """Return the schema that the file itself holds."""
        ...

    def head(self, num_rows: int) -> Mapping[str, pa.Array]:
        """Return the first rows, all columns. Raises DataError."""
        ...

    def bind(self, declaration: Declaration, split_by: str | None) -> TableFile:
        """Return the file as a settled declaration reads it. Raises DataError for columns that do not suit it."""
        ...

    def read(self, block: int, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """Return arrays of lengths[block] values. Called from any thread. Raises DataError, Fault."""
        ...

    def place(self, block: int, row: int) -> str:
        """What a person calls this row of the block: "line 7" of text, "row 5" else."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Some files under one declaration."""

    declaration: Declaration
    files: tuple[TableFile, ...]
    split_by: str | None  # column whose ids go into Chunk.part
    lengths: NDArray[np.int64]  # (blocks of all files,)
    bounds: NDArray[np.int64]  # (files + 1,): file i has the blocks bounds[i] .. bounds[i + 1] - 1

    def read(self, block: int) -> Chunk:
        """Raises DataError naming file, row and column."""
        wanted = self.declaration.columns + ((self.split_by,) if self.split_by else ())

        def make(columns: Mapping[str, pa.Array], size: int) -> Chunk:
            return encode(self.declaration, columns, size, split_by=self.split_by)

        return self._read(block, tuple(dict.fromkeys(wanted)), make)

    def read_parts(self, block: int) -> Longs:
        """`Chunk.part` alone, (samples of the block,)."""
        assert self.split_by is not None
        column = self.split_by
        return self._read(block, (column,), lambda read, _: encode_part(column, read[column]))

    def read_times(self, block: int, field: Number) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return a column's times in microseconds, and which are missing."""
        return self._read(
            block, (field.column,), lambda read, _: check_times(field, typed(read[field.column]))
        )

    def _read(
        self,
        block: int,
        names: tuple[str, ...],
        make: Callable[[Mapping[str, pa.Array], int], T],
    ) -> T:
        number = int(np.searchsorted(self.bounds, block, side="right")) - 1
        file, local = self.files[number], block - int(self.bounds[number])
        try:
            return make(file.read(local, names), int(file.lengths[local]))
        except Fault as fault:
            raise locate_fault(file, local, fault) from None
        except pa.ArrowException as error:
            raise DataError(
                f"{file.path}, from {file.place(local, 0)} on: cannot be read as declared "
                f"({str(error).splitlines()[0]})"
            ) from None


def read_blocks(file: TableFile, num_rows: int) -> Mapping[str, pa.Array]:
    """Return the first rows of a file that has some, all columns. Raises DataError."""
    parts: list[pa.Table] = []
    for block in range(len(file.lengths)):
        try:
            part = pa.table(dict(file.read(block, file.names)))
        except Fault as fault:
            raise locate_fault(file, block, fault) from None
        parts.append(part.slice(0, num_rows - sum(map(len, parts))))
        if sum(map(len, parts)) == num_rows:
            break
    whole = pa.concat_tables(parts, promote_options="permissive")
    return {name: one_array(whole.column(name)) for name in file.names}


def locate_fault(file: TableFile, block: int, fault: Fault) -> DataError:
    """Return the error that names file, row and column."""
    return DataError(
        f"{file.path}, {file.place(block, fault.row)}, column {fault.column}: got {fault.got}, wanted {fault.wanted}. "
        f"{fault.fix}"
    )


def bind_files(
    declaration: Declaration, files: Sequence[TableFile], split_by: str | None = None
) -> Files:
    """`declaration` settled; every file has what it reads."""
    lengths = np.concatenate([file.lengths for file in files])
    bounds = np.cumsum([0, *(len(file.lengths) for file in files)])
    return Files(declaration, tuple(files), split_by, lengths, bounds)


def find_files(path: str | Path | Sequence[str | Path], endings: tuple[str, ...]) -> list[Path]:
    """The files of a data set, in order: those of `find_days`."""
    return [file for day in find_days(path, endings) for file in day]


def find_days(
    path: str | Path | Sequence[str | Path], endings: tuple[str, ...]
) -> list[list[Path]]:
    """The files of a data set, day by day, in natural order. Raises DataError where there are none.

    path                          days
    a file, of any name           it
    a folder                      every file right below it, and every folder right below it with all its files
    a pattern, "day_*.parquet"    everything that matches: a file, or a folder with all its files
    several of these              each of them

    In folders, files that end in none of `endings` are left out, and names that begin with . or _, as Spark and
    Hive leave them out.
    """
    if not isinstance(path, str | Path):
        if not isinstance(path, Sequence) or not all(isinstance(p, str | Path) for p in path):
            raise ConfigError(
                f"got path={path!r}, wanted a file, a folder, a pattern, or a list of these"
            )
        if not path:
            raise ConfigError("got an empty list of paths, wanted at least one")
        return [[file for day in find_days(each, endings) for file in day] for each in path]
    given = Path(path).expanduser()
    if given.is_file():
        return [[given]]
    if given.is_dir():
        days = [
            _files_below(child, endings) if child.is_dir() else [check_regular(child)]
            for child in sorted(given.iterdir(), key=natural)
            if child.is_dir() or child.name.lower().endswith(endings)
            if child.name[0] not in "._"
        ]
        days = [day for day in days if day]
        if not days:
            raise DataError(
                f"{given}: got a folder without a file that ends in {' or '.join(endings)}, "
                "wanted at least one. Name the folder that holds them"
            )
        return days
    if glob.has_magic(str(given)):
        matches = sorted(map(Path, glob.glob(str(given), recursive=True)), key=natural)
        days = [_files_below(m, endings) if m.is_dir() else [check_regular(m)] for m in matches]
        days = [day for day in days if day]
        if not days:
            raise DataError(f"{given}: no file matches this pattern. Check the path")
        return days
    return [[check_regular(given)]]


def _files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    found = [
        file
        for file in folder.rglob("*")
        if file.name.lower().endswith(endings)
        and not file.is_dir()
        and not any(part[0] in "._" for part in file.relative_to(folder).parts)
    ]
    return sorted(map(check_regular, found), key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """A key to sort by under which day_2 comes before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)]
