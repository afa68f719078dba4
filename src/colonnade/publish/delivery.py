"""Delivery of publications: uploaded to another place by URL, followed by predictors; and a run's destinations.

What the word names travels first and the word last, so whoever follows the other place finds one whole checkpoint at
every
moment; then goes what the word names no longer. A base's files are compared with the checksums of its model.json on
their way. Where the word itself is torn or was removed, which tells nobody anything, what lies there is read and
carried again unless it is right: unless bases lie there of which the source has none, which another run may have
published.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from colonnade import _native
from colonnade.checkpoint.checkpoints import Checkpoints
from colonnade.checkpoint.contract import Destination
from colonnade.config.run import TrainConfig
from colonnade.errors import CheckpointError, ColonnadeError, CorruptionError, StorageError
from colonnade.publish.deltas import (
    REMEDY,
    WORD,
    Base,
    ChangeSet,
    Publication,
    Published,
    TableChange,
    change_name,
    check_owner,
    parse_word,
    read_change,
    read_word,
)
from colonnade.publish.exported import MODEL, parse_model
from colonnade.publish.mirror import Mirror, open_url, storage_errors
from colonnade.store.checksums import FileChecksums
from colonnade.store.disk import Disk
from colonnade.store.durable import checked_content
from colonnade.store.untrusted import folder_inside, open_inside
from colonnade.table import Table

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a publication lies: a file system of fsspec's, and the folder in it."""

    files: Any
    root: str

    def path(self, name: str) -> str:
        """Of a file or folder; `name` is one that was checked, or of this module's making."""
        return f"{self.root}/{name}"

    def open(self, name: str) -> Any:
        """Open a file for reading. Raises CorruptionError where it leads out of a folder of this machine."""
        path = Path(self.path(name))
        if isinstance(self.files, LocalFileSystem):
            folder = path.parent
            if folder != Path(self.root):
                folder = folder_inside(Path(self.root), folder.name)
            file = open_inside(folder, path.name)
            return os.fdopen(os.dup(file.fd), "rb")
        return self.files.open(str(self.path(name)), "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def word(self) -> bytes | None:
        """As it lies there; None where nothing is published."""
        return self.read(WORD) if self.files.exists(self.path(WORD)) else None

    def size(self, name: str) -> int | None:
        """Bytes; None where it is not there."""
        path = self.path(name)
        return self.files.size(path) if self.files.exists(path) else None


def is_url(path: object) -> bool:
    return "://" in str(path)


def place_of(path: str | Path) -> Place:
    """A folder, or a URL. Raises ConfigError for a protocol that nothing here speaks."""
    return Place(*open_url(str(path)))


def carry(source: Place, target: Place) -> None:
    """`target` publishes what `source` does. Raises CheckpointError where that is nothing, ConfigError where target
    publishes another run, CorruptionError (also where a torn word may be another run's), StorageError; what target
    published then stays whole."""
    with storage_errors(f"could not carry the publication at {source.root} to {target.root}"):
        for place in (source, target):
            place.files.invalidate_cache()
        content, before = source.word(), target.word()
        if content is None:
            raise CheckpointError(
                f"{source.root} holds no publication; wanted the place that a run publishes to"
            )
        if content == before:
            return
        said, there = _said(content, source), None
        if before is not None:
            try:
                there = _said(before, target)
            except CorruptionError:
                if not _may_own(target, said):
                    raise
            else:
                check_owner(Path(target.root), there, said.run)
        _carry_base(source, target, said.bases[-1], is_known=there is not None)
        is_one_base = there is not None and there.bases[-1] == said.bases[-1]
        known = there.number if there is not None and is_one_base else said.bases[-1].number
        for number in range(said.bases[-1].number + 1, said.number + 1):
            name = change_name(number)
            size = source.size(name)
            if number > known or size is None or target.size(name) != size:
                _copy(source, target, name, None)
        target.files.makedirs(target.root, exist_ok=True)
        target.files.pipe_file(target.path(f"{WORD}.part"), content)
        target.files.mv(target.path(f"{WORD}.part"), target.path(WORD))
        _forget(target, said)


def check_target(url: str, run: str) -> None:
    """Raises ConfigError where another run publishes there. A place that cannot be read now is not refused: checkpoints
    are carried when it can be."""
    place = place_of(url)
    with (
        suppress(StorageError, CorruptionError),
        storage_errors(f"could not carry the publication at {place.root} to {place.root}"),
    ):
        if (content := place.word()) is not None:
            check_owner(Path(place.root), _said(content, place), run)


def _said(content: bytes, place: Place) -> Published:
    path = Path(place.path(WORD))
    return parse_word(checked_content(path, content), path)


def _carry_base(source: Place, target: Place, base: Base, *, is_known: bool) -> None:
    """Copy a base's files that the target does not have, model.json last. Where `is_known`, those of the same length
    are right: a base's name says its content. Raises CorruptionError for files that are not as model.json says."""
    name = f"{base.folder}/{MODEL}"
    content = source.read(name)
    export = parse_model(content, Path(source.path(name)))
    for file, checksums in export.files.items():
        path = f"{base.folder}/{file}"
        is_there = target.size(path) == checksums.bytes
        if not is_there or not (is_known or _is_whole(target, path, checksums)):
            _copy(source, target, path, checksums)
    if target.size(name) is None or target.read(name) != content:
        target.files.makedirs(target.path(base.folder), exist_ok=True)
        target.files.pipe_file(target.path(name), content)


def _is_whole(place: Place, name: str, checksums: FileChecksums) -> bool:
    crc = 0
    with place.open(name) as file:
        while piece := file.read(COPY_BYTES):
            crc = _native.crc32c(np.frombuffer(piece, np.uint8), crc)
    return f"{crc:08x}" == checksums.crc32c


def _copy(source: Place, target: Place, name: str, checksums: FileChecksums | None) -> None:
    target.files.makedirs(target.path(name).rpartition("/")[0], exist_ok=True)
    crc = num_bytes = 0
    if target.size(name) is not None:
        target.files.rm(target.path(name))  # not over a file that somebody has mapped
    with source.open(name) as here:
        with target.files.open(target.path(name), "wb") as there:
            while piece := here.read(COPY_BYTES):
                there.write(piece)
                num_bytes += len(piece)
                if checksums is not None:
                    crc = _native.crc32c(np.frombuffer(piece, np.uint8), crc)
    if checksums is not None and (num_bytes, f"{crc:08x}") != (checksums.bytes, checksums.crc32c):
        target.files.rm(target.path(name))
        raise CorruptionError(
            f"{source.path(name)}: got {num_bytes:,} bytes of checksum {crc:08x}, wanted {checksums.bytes:,} of "
            f"{checksums.crc32c} by its {MODEL}: it is torn or altered; {REMEDY}"
        )
    if target.size(name) != num_bytes:
        raise StorageError(
            f"{target.path(name)}: got fewer bytes than {num_bytes:,}; it is carried again"
        )


def _may_own(place: Place, said: Published) -> bool:
    """By the bases there, whose names tell checkpoints of one run from those of every other."""
    bases = {name for name in _names(place) if name.startswith("base-")}
    return not bases or any(base.folder in bases for base in said.bases)


def _forget(place: Place, said: Published) -> None:
    kept = {base.folder for base in said.bases}
    for name in _names(place):
        path = place.path(name)
        kind, _, rest = name.partition("-")
        if kind == "base" and name not in kept:
            place.files.rm(path, recursive=True)
        elif kind == "change" and rest.isdigit() and int(rest) <= said.bases[0].number:
            place.files.rm(path)


def _names(place: Place) -> list[str]:
    found = place.files.ls(place.root, detail=False)
    return [path.rstrip("/").rpartition("/")[2] for path in found]


PUBLISHED = "published"
"""In the run folder: what is carried to a URL."""


@dataclass
class Carried:
    """Rank 0's publication at a URL: one in the run folder, and its copy there after each checkpoint."""

    here: Publication
    url: str

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        self.here.send(step, kept, say)
        if self.here.problem is not None:
            return
        try:
            carry(place_of(self.here.folder), place_of(self.url))
        except (ColonnadeError, OSError) as error:
            self.here.problem = error
            say(f"{error}. Training goes on; the next checkpoint makes it up")

    def close(self) -> None:
        self.here.close()


def open_destinations(
    config: TrainConfig, folder: Path, checkpoints: Checkpoints, step: int | None, disk: Disk
) -> list[Destination]:
    """Every rank; only rank 0 gets any. A checkpoint that was made and not published, because the run was killed
    between
    the two, is published now. Raises ConfigError for a publication that is another run's."""
    at_url = config.publish is not None and is_url(config.publish)
    publishes = None if config.publish is None else Path(config.publish)
    publishes = folder / PUBLISHED if at_url else publishes
    if publishes is not None and (word := read_word(publishes)) is not None:
        check_owner(publishes, word, checkpoints.run)
    if at_url:
        check_target(str(config.publish), checkpoints.run)
    if checkpoints.mesh.rank:
        return []
    found: list[Destination] = []
    if config.mirror is not None:
        found.append(Mirror(folder, config.mirror))
    if publishes is not None:
        published = Publication(folder, publishes, disk, only_best=config.publish_at == "best")
        found.append(Carried(published, str(config.publish)) if at_url else published)
        if step is not None:
            found[-1].send(step, [step], print)
    return found


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
                f"{path}: got one of run {header.run} that applies to checkpoint {header.before}, wanted run "
                f"{self.run} "
                f"and checkpoint {self.tag}: it is another publication's. Publish to a folder of its own"
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
