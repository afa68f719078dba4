"""Checkpoints copied to where machines come and go: any place fsspec reaches, by URL.

A run trains on local files, which can be locked, renamed and read at random; each checkpoint is then copied, and a
bare machine fetches the newest copy before it opens the folder. (Alternative dropped: stores on an object store
itself, which has no rename, no lock and no cheap small read.)

URL/checkpoints/<step>.json                    written last: from here on the copy counts
URL/checkpoints/<step>/files/<path>            small files by their path in the run folder
URL/rows/<home>/<table>/<segment or key file>-<content>    never changed, shared by checkpoints
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from colonnade.checkpoint.header import parse_header, read_header
from colonnade.checkpoint.stores import homes
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, StorageError
from colonnade.store.disk import Disk
from colonnade.store.durable import read_verified, write_durably
from colonnade.store.manifest import (
    FILE_NAME,
    CommitFile,
    describe,
    file_name,
    files_of,
    live_file,
)
from colonnade.store.untrusted import check_file_name

BESIDE = ("config.yaml", "plan.json", "metrics.jsonl")  # of the run, not of a checkpoint


class Mirror:
    """Rank 0's copier. A failure is said and tried again at the next checkpoint; local checkpoints do not depend on
    it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.problem: StorageError | None = None  # of the newest checkpoint

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        """Make the URL hold the checkpoints `kept`, the newest being `step`: copy what is not there, each header after
        its files; then remove other checkpoints, headers first."""
        try:
            files, root = open_url(self.url)
            with explained(self.url, f"copy the checkpoint of step {step}"):
                there = mirrored_steps(files, root)
                sizes = _sizes(files, f"{root}/rows")
                for each in kept:
                    self._copy(files, root, each, each not in there or each == step, sizes)
                _forget(files, root, kept)
            self.problem = None
        except StorageError as error:
            self.problem = error
            say(f"{error}. Training goes on; the next checkpoint is copied again")

    def close(self) -> None:
        """Raises StorageError if the newest checkpoint is not at the URL: it is only in the run folder."""
        if self.problem is not None:
            raise self.problem

    def _copy(self, files: Any, root: str, step: int, is_new: bool, sizes: dict[str, int]) -> None:
        place = f"{root}/checkpoints/{step:012d}"
        header = read_header(self.folder, step)
        small = [p for p in (self.folder / "checkpoints" / f"{step:012d}").iterdir() if p.is_file()]
        small += [self.folder / name for name in BESIDE if (self.folder / name).exists()]
        for shard in _shards(self.folder, header):
            small += shard.small
            for file in shard.files:
                # As if it lay in the store's own directory, where a store looks for copies of its stripes.
                name = f"{_relative(self.folder, shard.place / file.path.name)}-{file.content}"
                # A name says the content; the size tells a copy that was cut short.
                if sizes.get(name) != file.num_bytes:
                    _put(files, file.path, f"{root}/{name}")
                    sizes[name] = file.num_bytes
        if is_new:
            for path in small:
                _put(files, path, f"{place}/files/{_relative(self.folder, path)}")
            _put(files, self.folder / "checkpoints" / f"{step:012d}.json", f"{place}.part")
            files.mv(f"{place}.part", f"{place}.json")  # there whole, wherever puts are not


def fetch_run(url: str, folder: Path | str, *, at: int | None = None) -> int:
    """Copy a checkpoint (the newest, or step `at`), and the best that it knows of, from a mirror into `folder`, which
    must hold none; returns its step.

    The folder's checkpoint counts when the last file is there; a fetch cut short is simply done again. Raises
    CheckpointError where there is no such checkpoint, StorageError where the URL cannot be read.
    """
    folder = Path(folder)
    if any((folder / "checkpoints").glob("*.json")):
        raise CheckpointError(f"{folder} holds checkpoints already; fetch into another folder")
    files, root = open_url(url)
    with explained(url, "read"):
        steps = mirrored_steps(files, root)
        step = (steps[-1] if steps else None) if at is None else at
        if step not in steps:
            raise CheckpointError(
                f"{url} holds no checkpoint of step {step}; it has {steps or 'none'}"
            )
        assert step is not None
        there: set[Path] = set()
        header = _fetch_checkpoint(files, root, folder, step, there)
        best = header.get("best_step")
        if best is not None and best != step and best in steps:
            _fetch_checkpoint(files, root, folder, best, there)
    return step


def _fetch_checkpoint(
    files: Any, root: str, folder: Path, step: int, there: set[Path]
) -> dict[str, Any]:
    """One checkpoint's files, its header last; returns the header. `there`: segments that a newer checkpoint
    brought."""
    disk = Disk()
    small = f"{root}/checkpoints/{step:012d}/files"
    for path in files.find(small):
        name = _inside(small, path)
        for part in name.split("/"):
            check_file_name(part, path)
        _get(disk, files, path, folder / name)
    local_header = folder / "checkpoints" / f"{step:012d}.json"
    header_bytes = files.cat_file(f"{root}/checkpoints/{step:012d}.json")
    # Under another name first: the rows it speaks of are not there yet.
    waiting = local_header.with_suffix(".fetched")
    disk.make_dir(waiting.parent)
    write_durably(disk, waiting, header_bytes, checked=False)
    header = parse_header(local_header, read_verified(waiting))
    for shard in _shards(folder, header):
        for file in shard.files:
            path = shard.place / file.path.name
            if path not in there:
                there.add(path)
                _get(disk, files, f"{root}/{_relative(folder, path)}-{file.content}", path)
    disk.rename(waiting, local_header)
    disk.sync_dir(local_header.parent)
    return header


def open_url(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it). Raises ConfigError for a protocol that nothing here speaks."""
    try:
        return fsspec.core.url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url!r}: {error}. Install fsspec's package for it (s3fs, gcsfs, ...), or give "
            "another URL"
        ) from None


def mirrored_steps(files: Any, root: str) -> list[int]:
    """Steps whose copy is whole, ascending."""
    if not files.exists(f"{root}/checkpoints"):
        return []
    names = [PurePosixPath(path) for path in files.ls(f"{root}/checkpoints", detail=False)]
    return sorted(int(p.stem) for p in names if p.suffix == ".json" and p.stem.isdigit())


def _sizes(files: Any, folder: str) -> dict[str, int]:
    """Bytes of the files under `folder`, by path from its parent."""
    if not files.exists(folder):
        return {}
    parent = folder.rpartition("/")[0]
    found = files.find(folder, detail=True).items()
    return {_inside(parent, path): said["size"] for path, said in found}


def _forget(files: Any, root: str, kept: Sequence[int]) -> None:
    steps = mirrored_steps(files, root)
    for step in steps:
        if step not in kept:
            files.rm(f"{root}/checkpoints/{step:012d}.json")
    used = set()
    for path in list(files.ls(f"{root}/checkpoints", detail=False)):
        name = PurePosixPath(path).name
        if name.isdigit() and int(name) not in kept:
            files.rm(path, recursive=True)
        elif name.isdigit():
            small = f"{path}/files"
            for manifest in files.find(f"{small}/rows"):
                place = PurePosixPath(_inside(small, manifest)).parent
                if FILE_NAME.fullmatch(PurePosixPath(manifest).name):
                    said = json.loads(_content(files.cat_file(manifest)))
                    used |= {f"{place}/{f.path.name}-{f.content}" for f in files_of(Path(), said)}
    if files.exists(f"{root}/rows"):
        for path in files.find(f"{root}/rows"):
            if _inside(root, path) not in used:
                files.rm(path)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One store's part of a checkpoint: its directory, its manifest and bitmaps, its segments and key lists."""

    place: Path
    small: list[Path]
    files: list[CommitFile]


def _shards(folder: Path, header: dict[str, Any]) -> Iterator[_Shard]:
    step = header["step"]
    for each in homes(header):
        place = folder / "rows" / each.path
        said = describe(place, step)
        small = [place / file_name(step), live_file(place, said)]
        yield _Shard(place, small, list(files_of(place, said)))


def _put(files: Any, path: Path, target: str) -> None:
    files.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
    files.put_file(str(path), target)


def _get(disk: Disk, files: Any, source: str, path: Path) -> None:
    disk.make_dir(path.parent)
    files.get_file(source, str(path))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    disk.sync_dir(path.parent)


def _relative(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _inside(root: str, path: str) -> str:
    """`path` as seen from `root`, whichever of the two has a leading slash."""
    return path.strip("/").removeprefix(root.strip("/")).strip("/")


def _content(data: bytes) -> bytes:
    """A checked file's content without its last line (store/durable.py)."""
    return data[: data.rindex(b"\ncrc32c ")]


@contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turn whatever a file system raises into one StorageError that names the URL."""
    with storage_errors(
        f"{url}: could not {what}", ". The run folder's own checkpoints are intact"
    ):
        yield


@contextmanager
def storage_errors(failure: str, hint: str = "") -> Iterator[None]:
    """Turn whatever a file system raises into one StorageError: `failure`, what was raised, `hint`."""
    try:
        yield
    except ColonnadeError:
        raise
    except Exception as error:
        raise StorageError(f"{failure}: {str(error) or type(error).__name__}{hint}") from error
