"""What a predictor reads of a publication (`train/publication.py`): the newest base, and changes in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from colonnade.errors import CheckpointError, StorageError
from colonnade.store.untrusted import folder_inside
from colonnade.table import Table
from colonnade.train.carriage import Place, carry, place_of
from colonnade.train.exported import MODEL
from colonnade.train.publication import (
    WORD,
    Base,
    ChangeSet,
    Published,
    TableChange,
    read_change,
    read_word,
)

TRIES = 3  # to open a base while the run replaces it


class Following:
    """Where one predictor is in a publication. One thread at a time."""

    def __init__(self, folder: Path, run: str, base: Base, source: Place | None = None) -> None:
        """base: what the predictor has opened; source: what the folder is a copy of."""
        self.folder, self.run, self.source = folder, run, source
        self.opened(base)

    def behind(self) -> tuple[Base | None, Published]:
        """The base to open instead of going on (None: go on by changes), and the word.

        Another base is opened as soon as it is there: its rows are mapped, those of changes are this process's memory.
        That of a publication that was removed and began anew is another one, too, whatever its number.
        Raises CheckpointError where the folder publishes nothing, or another run; StorageError where its source cannot
        be read.
        """
        if self.source is not None:
            carry(self.source, place_of(self.folder))
        word = published(self.folder)
        if word.run != self.run:
            raise CheckpointError(
                f"{self.folder}: got a publication of run {word.run}, wanted run {self.run}, whose rows these are; "
                "open the predictor again to take the other model"
            )
        newest = word.bases[-1]
        went_back = word.number <= self.number and word.tag != self.tag
        return (newest if newest.folder != self.base or went_back else None), word

    def next_change(self, tables: Sequence[Table], dense: dict[str, Tensor]) -> ChangeSet:
        """The change that applies to what the predictor has, checked against its network; nothing of it is applied.

        Raises StorageError, CorruptionError, CheckpointError naming what is wrong with it.
        """
        change = read_change(self.folder, self.number + 1)
        header = change.header
        path = f"{self.folder}: change {self.number + 1}"
        if (header.run, header.number, header.before) != (self.run, self.number + 1, self.tag):
            raise CheckpointError(
                f"{path}: got one of run {header.run} that applies to commit {header.before}, wanted run {self.run} "
                f"and commit {self.tag}: it is another publication's. Publish to a folder of its own"
            )
        got = [(len(c.ids), tuple(c.weights.shape), str(c.weights.dtype)) for c in change.tables]
        wanted = [
            (count, (count, table.width), f"torch.{table.dtype}")
            for (count, _, _), table in zip(got, tables, strict=False)
        ]
        if (
            len(got) != len(tables)
            or got != wanted
            or not all(map(_are_ids_inside, change.tables, tables))
            or _shapes(change.dense) != _shapes(dense)
        ):
            raise CheckpointError(
                f"{path}: got rows or weights of other shapes than this network's; it is another model's"
            )
        return change

    def distrust(self) -> None:
        """After damage of the base that is open: open it again at the next look, from a copy that is carried again
        where the folder is one."""
        self.base = self.tag = ""
        if self.source is not None:
            distrust_copy(self.folder)

    def opened(self, base: Base) -> None:
        self.base, self.number, self.tag = base.folder, base.number, base.tag

    def applied(self, change: ChangeSet) -> None:
        self.number, self.tag = change.header.number, change.header.tag


def distrust_copy(folder: Path) -> None:
    """After something damaged was read in a copy: let the next look carry again what the source has otherwise."""
    (folder / WORD).unlink(missing_ok=True)


def _are_ids_inside(change: TableChange, table: Table) -> bool:
    """Ascending ids are all in a vocabulary table if the first and the last are."""
    ends = [ids[end] for ids in (change.ids, change.gone) if len(ids) for end in (0, -1)]
    return table.rows is None or all(0 <= int(id) < table.rows for id in ends)


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], object]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}


def published(folder: Path) -> Published:
    """Raises CheckpointError where nothing is published, CorruptionError."""
    word = read_word(folder)
    if word is None:
        raise CheckpointError(
            f"{folder} holds no publication; train with --set train.publish={folder}"
        )
    return word


def newest_base(folder: Path) -> tuple[Path, Published]:
    """An export that is there, and the word that names it. Raises StorageError where a base that is named is gone."""
    for _ in range(TRIES):
        word = published(folder)
        place = folder_inside(folder, word.bases[-1].folder)
        if (place / MODEL).exists():
            return place, word
    raise StorageError(
        f"{place}: missing, but {folder} names it; let the run publish to another folder"
    )
