"""A publication carried to another place, by URL: for predictors on hosts that do not see the run's file system.

What the word names travels first and the word last, so whoever follows the other place finds one whole commit at every
moment; then goes what the word names no longer. A file that was cut short is known by its size and carried again, and
where the word itself is torn, which tells nobody anything, all changes are: unless bases lie there of which the source
has none, which another run may have published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.errors import CheckpointError, ColonnadeError, CorruptionError, StorageError
from colonnade.store.durable import checked_content
from colonnade.train.mirror import open_url
from colonnade.train.publication import WORD, Published, change_name, check_owner, parse_word


@dataclass(frozen=True, slots=True)
class Place:
    """Where a publication lies: a file system of fsspec's, and the folder in it."""

    files: Any
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def word(self) -> bytes | None:
        """As it lies there; None where nothing is published."""
        path = self.path(WORD)
        return self.files.cat_file(path) if self.files.exists(path) else None

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
    with _explained(source, target):
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
        for name, is_same in _needed(source, said, there):
            _copy(source, target, name, is_same)
        target.files.makedirs(target.root, exist_ok=True)
        target.files.pipe_file(target.path(f"{WORD}.part"), content)
        target.files.mv(target.path(f"{WORD}.part"), target.path(WORD))
        _forget(target, said)


def check_target(url: str, run: str) -> None:
    """Raises ConfigError where another run publishes there. A place that cannot be read now is not refused: commits
    are carried when it can be."""
    place = place_of(url)
    with suppress(StorageError, CorruptionError), _explained(place, place):
        if (content := place.word()) is not None:
            check_owner(Path(place.root), _said(content, place), run)


def _said(content: bytes, place: Place) -> Published:
    path = Path(place.path(WORD))
    return parse_word(checked_content(path, content), path)


def _needed(source: Place, said: Published, there: Published | None) -> Iterator[tuple[str, bool]]:
    """What followers of the newest base read; and whether a file of that name and size at the target is the same: a
    base's name says its content, a change's does within what followed one base."""
    base = said.bases[-1]
    model = json.loads(source.files.cat_file(source.path(f"{base.folder}/model.json")))
    for name in ["dense.safetensors", *(table["file"] for table in model["tables"]), "model.json"]:
        yield f"{base.folder}/{name}", True
    known = there.number if there is not None and there.bases[-1] == base else base.number
    for number in range(base.number + 1, said.number + 1):
        yield change_name(number), number <= known


def _copy(source: Place, target: Place, name: str, is_same: bool) -> None:
    size = source.size(name)
    if is_same and size is not None and target.size(name) == size:
        return
    target.files.makedirs(target.path(name).rpartition("/")[0], exist_ok=True)
    with source.files.open(source.path(name), "rb") as here:
        with target.files.open(target.path(name), "wb") as there:
            shutil.copyfileobj(here, there, 1 << 20)
    if size is not None and target.size(name) != size:
        raise StorageError(
            f"{target.path(name)}: got fewer bytes than {size:,}; it is carried again"
        )


def _may_own(place: Place, said: Published) -> bool:
    """By the bases there, whose names tell commits of one run from those of every other."""
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


@contextmanager
def _explained(source: Place, target: Place) -> Iterator[None]:
    """Whatever a file system raises becomes one StorageError."""
    try:
        yield
    except ColonnadeError:
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise StorageError(
            f"could not carry the publication at {source.root} to {target.root}: {said}"
        ) from error
