"""Delivery of publications: upload to a URL, subscription by predictors, and a run's destinations of checkpoints.

Files are copied before the current pointer (published.json), so a subscriber of the copy has one complete checkpoint at
any time. Then files without a reference are deleted. A base's files are compared with the checksums of its model.json
during the copy. If the pointer of the target is torn or missing, its files are checked, and copied again if wrong. If
the target then has bases and none of them is in the source, nothing is written, because they may be another run's.
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
from colonnade.files.checksums import FileChecksums
from colonnade.files.disk import Disk
from colonnade.files.durable import verify_content
from colonnade.files.untrusted import folder_inside, open_inside
from colonnade.publish.deltas import (
    CURRENT,
    REMEDY,
    BaseExport,
    CurrentPointer,
    Delta,
    DeltaPublisher,
    TableDelta,
    check_publication_owner,
    delta_file_name,
    list_changes_by_base,
    parse_current,
    read_current,
    read_delta_header,
    read_linked_delta,
)
from colonnade.publish.mirror import Mirror, convert_to_storage_error, open_url
from colonnade.publish.model_files import MODEL, parse_model_json, read_export
from colonnade.table import Table

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Location of a publication: an fsspec file system and a folder in it."""

    files: Any
    root: str

    def path(self, name: str) -> str:
        """Return the path of a file or folder. name: must be checked or made by this module."""
        return f"{self.root}/{name}"

    def open(self, name: str) -> Any:
        """Open a file for reading. Raises CorruptionError if a local path leaves the folder."""
        path = Path(self.path(name))
        if isinstance(self.files, LocalFileSystem):
            folder = path.parent
            if folder != Path(self.root):
                folder = folder_inside(Path(self.root), folder.name)
            file = open_inside(folder, path.name)
            return os.fdopen(os.dup(file.fd), "rb")
        return self.files.open(str(self.path(name)), "rb")

    def read(self, name: str) -> bytes:
        """Read a file."""
        with self.open(name) as file:
            return file.read()

    def read_current(self) -> bytes | None:
        """Read the bytes of published.json; None if nothing is published."""
        return self.read(CURRENT) if self.files.exists(self.path(CURRENT)) else None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it is missing."""
        path = self.path(name)
        return self.files.size(path) if self.files.exists(path) else None


def is_url(path: object) -> bool:
    """Return whether a path is a URL."""
    return "://" in str(path)


def open_location(path: str | Path) -> RemoteFolder:
    """Return the location of a folder or URL. Raises ConfigError for an unknown protocol."""
    return RemoteFolder(*open_url(str(path)))


def copy_publication(source: RemoteFolder, target: RemoteFolder) -> None:
    """Copy the publication at `source` to `target`.

    Raises CheckpointError if source publishes nothing, ConfigError if target publishes another run, CorruptionError
    (also if a torn pointer may be another run's), StorageError. The earlier publication at target then stays valid.
    """
    with convert_to_storage_error(
        f"could not carry the publication at {source.root} to {target.root}"
    ):
        for location in (source, target):
            location.files.invalidate_cache()
        source_content = source.read_current()
        target_content = target.read_current()
        if source_content is None:
            raise CheckpointError(
                f"{source.root} holds no publication; wanted the place that a run publishes to"
            )
        if source_content == target_content:
            return
        current = _parse_current_of(source_content, source)
        target_current = None
        if target_content is not None:
            try:
                target_current = _parse_current_of(target_content, target)
            except CorruptionError:
                if not _is_same_run(target, current):
                    raise
            else:
                check_publication_owner(Path(target.root), target_current, current.run)
        _copy_base(source, target, current.bases[-1], is_known=target_current is not None)
        is_one_base = target_current is not None and target_current.bases[-1] == current.bases[-1]
        known_number = (
            target_current.number
            if target_current is not None and is_one_base
            else current.bases[-1].number
        )
        for number in range(current.bases[-1].number + 1, current.number + 1):
            name = delta_file_name(number)
            size = source.size(name)
            if number > known_number or size is None or target.size(name) != size:
                _copy_file(source, target, name, None)
        target.files.makedirs(target.root, exist_ok=True)
        target.files.pipe_file(target.path(f"{CURRENT}.part"), source_content)
        target.files.mv(target.path(f"{CURRENT}.part"), target.path(CURRENT))
        _delete_unneeded(target, current)


def check_url_owner(url: str, run_name: str) -> None:
    """Raise ConfigError if another run publishes at `url`.

    A location that cannot be read now is accepted: checkpoints are copied when it can be.
    """
    location = open_location(url)
    with (
        suppress(StorageError, CorruptionError),
        convert_to_storage_error(
            f"could not carry the publication at {location.root} to {location.root}"
        ),
    ):
        if (content := location.read_current()) is not None:
            check_publication_owner(
                Path(location.root), _parse_current_of(content, location), run_name
            )


def _parse_current_of(content: bytes, location: RemoteFolder) -> CurrentPointer:
    """Check and parse the bytes of published.json at `location`."""
    path = Path(location.path(CURRENT))
    return parse_current(verify_content(path, content), path)


def _copy_base(
    source: RemoteFolder, target: RemoteFolder, base: BaseExport, *, is_known: bool
) -> None:
    """Copy a base's files that the target does not have, model.json last.

    is_known: the target has a valid pointer, so files of the right length are right, because a base's name identifies
    its content. Raises CorruptionError for files that do not match model.json.
    """
    name = f"{base.folder}/{MODEL}"
    content = source.read(name)
    export = parse_model_json(content, Path(source.path(name)))
    for file, checksums in export.files.items():
        path = f"{base.folder}/{file}"
        has_same_size = target.size(path) == checksums.bytes
        if not has_same_size or not (is_known or _has_checksum(target, path, checksums)):
            _copy_file(source, target, path, checksums)
    if target.size(name) is None or target.read(name) != content:
        target.files.makedirs(target.path(base.folder), exist_ok=True)
        target.files.pipe_file(target.path(name), content)


def _has_checksum(remote_folder: RemoteFolder, file_name: str, checksums: FileChecksums) -> bool:
    """Read a file and return whether it has the right checksum."""
    crc = 0
    with remote_folder.open(file_name) as file:
        while piece := file.read(COPY_BYTES):
            crc = _native.crc32c(np.frombuffer(piece, np.uint8), crc)
    return f"{crc:08x}" == checksums.crc32c


def _copy_file(
    source: RemoteFolder, target: RemoteFolder, file_name: str, checksums: FileChecksums | None
) -> None:
    """Copy a file and check its length, and its checksum if there is one."""
    target.files.makedirs(target.path(file_name).rpartition("/")[0], exist_ok=True)
    crc = num_bytes = 0
    if target.size(file_name) is not None:
        target.files.rm(
            target.path(file_name)
        )  # do not overwrite a file that a process may have mapped
    with source.open(file_name) as source_file:
        with target.files.open(target.path(file_name), "wb") as target_file:
            while piece := source_file.read(COPY_BYTES):
                target_file.write(piece)
                num_bytes += len(piece)
                if checksums is not None:
                    crc = _native.crc32c(np.frombuffer(piece, np.uint8), crc)
    if checksums is not None and (num_bytes, f"{crc:08x}") != (checksums.bytes, checksums.crc32c):
        target.files.rm(target.path(file_name))
        raise CorruptionError(
            f"{source.path(file_name)}: got {num_bytes:,} bytes of checksum {crc:08x}, wanted {checksums.bytes:,} of "
            f"{checksums.crc32c} by its {MODEL}: it is torn or altered; {REMEDY}"
        )
    if target.size(file_name) != num_bytes:
        raise StorageError(
            f"{target.path(file_name)}: got fewer bytes than {num_bytes:,}; it will be copied again"
        )


def _is_same_run(location: RemoteFolder, current: CurrentPointer) -> bool:
    """Return whether a folder with a torn pointer is this run's, by the names of its bases, which identify runs."""
    bases = {name for name in _list_names(location) if name.startswith("base-")}
    return not bases or any(base.folder in bases for base in current.bases)


def _delete_unneeded(location: RemoteFolder, current: CurrentPointer) -> None:
    """Delete bases and deltas that the current pointer does not need."""
    base_folders = {base.folder for base in current.bases}
    for name in _list_names(location):
        path = location.path(name)
        kind, _, suffix = name.partition("-")
        if kind == "base" and name not in base_folders:
            location.files.rm(path, recursive=True)
        elif kind == "change" and suffix.isdigit() and int(suffix) <= current.bases[0].number:
            location.files.rm(path)


def _list_names(location: RemoteFolder) -> list[str]:
    paths = location.files.ls(location.root, detail=False)
    return [path.rstrip("/").rpartition("/")[2] for path in paths]


LOCAL_FOLDER = "published"
"""Subfolder of the run folder with the publication that is copied to a URL."""


@dataclass
class UrlPublisher:
    """Publisher to a URL, on rank 0: publishes in the run folder, and copies it to the URL after each checkpoint."""

    local_publisher: DeltaPublisher
    url: str

    def send(
        self, newest_step: int, retained_steps: Sequence[int], print_line: Callable[[str], None]
    ) -> None:
        """Publish a checkpoint in the run folder, and copy the publication to the URL."""
        self.local_publisher.send(newest_step, retained_steps, print_line)
        if self.local_publisher.problem is not None:
            return
        try:
            copy_publication(open_location(self.local_publisher.folder), open_location(self.url))
        except (ColonnadeError, OSError) as error:
            self.local_publisher.problem = error
            print_line(f"{error}. Training continues; the next checkpoint publishes it")

    def close(self) -> None:
        """Raise the error of the newest checkpoint, if it was not published."""
        self.local_publisher.close()


def open_destinations(
    config: TrainConfig, folder: Path, checkpoints: Checkpoints, step: int | None, disk: Disk
) -> list[Destination]:
    """Open the destinations of a run's checkpoints. Every rank calls it; only rank 0 gets any.

    If the run was killed after a checkpoint and before it was published, it is published now. Raises ConfigError for
    a publication of another run.
    """
    is_published_to_url = config.publish is not None and is_url(config.publish)
    published_folder = None if config.publish is None else Path(config.publish)
    published_folder = folder / LOCAL_FOLDER if is_published_to_url else published_folder
    if published_folder is not None and (current := read_current(published_folder)) is not None:
        check_publication_owner(published_folder, current, checkpoints.run)
    if is_published_to_url:
        check_url_owner(str(config.publish), checkpoints.run)
    if checkpoints.mesh.rank:
        return []
    destinations: list[Destination] = []
    if config.mirror is not None:
        destinations.append(Mirror(folder, config.mirror))
    if published_folder is not None:
        publisher = DeltaPublisher(
            folder, published_folder, disk, only_best=config.publish_at == "best"
        )
        destinations.append(
            UrlPublisher(publisher, str(config.publish)) if is_published_to_url else publisher
        )
    if config.codistill.peer is not None:
        teacher = DeltaPublisher(
            folder,
            folder / TEACHER_FOLDER,
            disk,
            only_best=False,
            every_steps=config.codistill.every_steps,
            num_old_bases=NUM_OLD_TEACHERS,
        )
        destinations.append(teacher)
    for destination in destinations:
        if step is not None and not isinstance(destination, Mirror):
            destination.send(step, [step], print)
    return destinations


TEACHER_FOLDER = "teacher"
"""Subfolder of the run folder of a group with its publication for the other group (`train.codistill`)."""
NUM_OLD_TEACHERS = 3
"""Publications that a group may need beside the newest one of its peer. Both waited for each other, so a group that
resumes at interval k needs publication k - 1, and its peer has published k + 2 at most: it waits only after that."""


MAX_ATTEMPTS = 3  # to open a base while the run may replace it


class Subscriber:
    """Subscriber of a publication: position of one predictor in it. Not thread-safe."""

    def __init__(
        self, folder: Path, run: str, base: BaseExport, source: RemoteFolder | None = None
    ) -> None:
        """base: export that the predictor has opened; source: location that the folder is a copy of."""
        self.folder = folder
        self.run = run
        self.source = source
        self.record_base(base)

    def find_updates(self) -> tuple[BaseExport | None, CurrentPointer]:
        """Return the base to open instead of applying deltas (None: apply deltas), and the current pointer.

        A new base is opened as soon as it exists, because its rows are mapped, and those of deltas use this process's
        memory. The base of a publication that was deleted and restarted is new, too, whatever its number is.
        Raises CheckpointError if the folder publishes nothing or another run, StorageError if its source cannot be
        read.
        """
        if self.source is not None:
            copy_publication(self.source, open_location(self.folder))
        current = read_current_or_raise(self.folder)
        if current.run != self.run:
            raise CheckpointError(
                f"{self.folder}: got a publication of run {current.run}, wanted run {self.run}, which has the "
                "open rows; open the predictor again to take the other model"
            )
        newest = current.bases[-1]
        is_restarted = current.number <= self.number and current.tag != self.tag
        return (newest if newest.folder != self.base or is_restarted else None), current

    def read_next_delta(
        self, tables: Sequence[Table], dense: dict[str, Tensor], current: CurrentPointer
    ) -> Delta:
        """Read the next delta and check it against the predictor's network, without applying it.

        Raises StorageError, CorruptionError, CheckpointError that names the problem.
        """
        delta = read_linked_delta(self.folder, self.number + 1, self.tag, current)
        shapes = [(len(c.ids), tuple(c.weights.shape), str(c.weights.dtype)) for c in delta.tables]
        wanted_shapes = [
            (count, (count, table.width), f"torch.{table.dtype}")
            for (count, _, _), table in zip(shapes, tables, strict=False)
        ]
        if (
            len(shapes) != len(tables)
            or shapes != wanted_shapes
            or not all(map(_are_ids_valid, delta.tables, tables))
            or _shapes(delta.dense) != _shapes(dense)
        ):
            raise CheckpointError(
                f"{self.folder}: change {self.number + 1}: got rows or weights of other shapes than this network's; it "
                "is another model's"
            )
        return delta

    def fork(self) -> Subscriber:
        """Return a subscriber at the same position, which moves by itself."""
        position = BaseExport(self.base, self.number, self.tag, 0)
        return Subscriber(self.folder, self.run, position, self.source)

    def mark_base_damaged(self) -> None:
        """Mark the open base as damaged, so that the next `find_updates` returns it again; a copy is deleted first."""
        self.base = self.tag = ""
        if self.source is not None:
            invalidate_copy(self.folder)

    def record_base(self, base: BaseExport) -> None:
        """Record that the predictor has opened a base."""
        self.base = base.folder
        self.number = base.number
        self.tag = base.tag

    def record_delta(self, delta: Delta) -> None:
        """Record that the predictor has applied a delta."""
        self.number = delta.header.number
        self.tag = delta.header.tag


def invalidate_copy(folder: Path) -> None:
    """Delete the pointer of a damaged copy, so that the next `copy_publication` copies files that differ from the
    source."""
    (folder / CURRENT).unlink(missing_ok=True)


def _are_ids_valid(delta: TableDelta, table: Table) -> bool:
    """Return whether all ids are in the table. Ids ascend, so the first and the last decide."""
    ends = [ids[end] for ids in (delta.ids, delta.gone) if len(ids) for end in (0, -1)]
    return table.rows is None or all(0 <= int(id) < table.rows for id in ends)


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], object]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}


def read_current_or_raise(folder: Path) -> CurrentPointer:
    """Read the current pointer. Raises CheckpointError if nothing is published, CorruptionError."""
    current = read_current(folder)
    if current is None:
        raise CheckpointError(
            f"{folder} holds no publication; train with --set train.publish={folder}"
        )
    return current


def find_newest_base(folder: Path) -> tuple[Path, CurrentPointer]:
    """Return the folder of the newest base, and the current pointer. Raises StorageError if the base is missing."""
    for _ in range(MAX_ATTEMPTS):
        current = read_current_or_raise(folder)
        base_folder = folder_inside(folder, current.bases[-1].folder)
        if (base_folder / MODEL).exists():
            return base_folder, current
    raise StorageError(
        f"{base_folder}: missing, but {folder} names it; let the run publish to another folder"
    )


def find_published_step(folder: Path, step: int) -> tuple[CurrentPointer, BaseExport, int]:
    """Return the current pointer, the base to open for a step, and the number of the last delta to apply to it.

    Raises CheckpointError that lists the published steps if this one is not among them any more.
    """
    current = read_current_or_raise(folder)
    numbers = list_published_steps(folder, current)
    if step not in numbers:
        raise CheckpointError(
            f"{folder}: got step {step}, wanted one that is published still: "
            f"{', '.join(map(str, numbers)) or 'none'}"
        )
    number = numbers[step]
    base = [base for base in current.bases if base.number <= number][-1]
    return current, base, number


def list_published_steps(folder: Path, current: CurrentPointer) -> dict[int, int]:
    """Return the number of each published step with a base and all deltas on disk, by step, ascending."""
    steps: dict[int, int] = {}
    for base, numbers in list_changes_by_base(folder, current):
        with suppress(
            StorageError, CheckpointError
        ):  # what follows a missing file cannot be reached
            steps[read_export(folder_inside(folder, base.folder)).step] = base.number
            for number in numbers:
                steps[read_delta_header(folder, number).step] = number
    return dict(sorted(steps.items()))
