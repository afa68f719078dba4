"""Files of samples as one run of blocks: what CSV and Parquet have in common.

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

from colonnade.data.chunk import Chunk, Longs
from colonnade.data.declaration import Declaration
from colonnade.data.encode import Fault, encode, encode_part
from colonnade.errors import DataError

T = TypeVar("T")


class TableFile(Protocol):
    """One file, indexed: plain values that travel to other processes."""

    @property
    def path(self) -> Path: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(blocks,) samples of each block, 1 or more."""
        ...

    def read(self, block: int, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """Arrays of lengths[block] values. Called from any thread. Raises DataError."""
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

    def _read(
        self,
        block: int,
        names: tuple[str, ...],
        make: Callable[[Mapping[str, pa.Array], int], T],
    ) -> T:
        number = int(np.searchsorted(self.bounds, block, side="right")) - 1
        file, local = self.files[number], block - int(self.bounds[number])
        columns = file.read(local, names)
        try:
            return make(columns, int(file.lengths[local]))
        except Fault as fault:
            place = file.place(local, fault.row)
            raise DataError(
                f"{file.path}, {place}, column {fault.column}: got {fault.got}, wanted {fault.wanted}. {fault.fix}"
            ) from None
        except pa.ArrowException as error:
            raise DataError(
                f"{file.path}, from {file.place(local, 0)} on: cannot be read as declared "
                f"({str(error).splitlines()[0]})"
            ) from None


def bind_files(
    declaration: Declaration, files: Sequence[TableFile], split_by: str | None = None
) -> Files:
    """`declaration` settled; every file has what it reads."""
    lengths = np.concatenate([file.lengths for file in files])
    bounds = np.cumsum([0, *(len(file.lengths) for file in files)])
    return Files(declaration, tuple(files), split_by, lengths, bounds)


def find_files(path: str | Path | Sequence[str | Path], endings: tuple[str, ...]) -> list[Path]:
    """The files of a data set in natural order. Raises DataError where there are none.

    `path`: a file (of any name), a folder (all files below it with one of `endings`; names that begin with
    . or _ are left out, as Spark and Hive do), a pattern such as "day_*.parquet", or several of these.
    """
    if not isinstance(path, str | Path):
        return [file for each in path for file in find_files(each, endings)]
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        found = [
            file
            for file in given.rglob("*")
            if file.name.lower().endswith(endings)
            and file.is_file()
            and not any(part[0] in "._" for part in file.relative_to(given).parts)
        ]
        if not found:
            raise DataError(
                f"{given}: got a folder without a file that ends in {' or '.join(endings)}, "
                "wanted at least one. Name the folder that holds them"
            )
        return sorted(found, key=natural)
    if glob.has_magic(str(given)):
        matches = [Path(match) for match in glob.glob(str(given), recursive=True)]
        if matches:
            matches.sort(key=natural)
            return [file for match in matches for file in find_files(match, endings)]
        raise DataError(f"{given}: no file matches this pattern. Check the path")
    raise DataError(f"{given}: no such file or folder. Check the path given with --path")


def natural(path: Path) -> list[tuple[int, str]]:
    """A key to sort by under which day_2 comes before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)]


def days_of(files: Sequence[TableFile], root: str | Path) -> list[tuple[int, int]]:
    """Runs [begin, end) of files that are one day each: a file that lies right under `root`, or a folder's files."""
    base = (
        Path(root).expanduser() if not isinstance(root, Sequence) or isinstance(root, str) else None
    )
    names = []
    for file in files:
        inside = base is not None and base.is_dir() and file.path.is_relative_to(base)
        names.append(file.path.relative_to(base).parts[0] if inside and base else str(file.path))
    starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    return list(zip(starts, [*starts[1:], len(names)], strict=True))
