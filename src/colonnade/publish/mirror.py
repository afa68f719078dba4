"""Mirror of a run: copies of its checkpoints at any URL that fsspec supports, for machines without their own disks.

A run trains on local files, which can be locked, renamed and read at random. Each checkpoint is then copied, and a new
machine fetches the newest copy before it opens the folder. (Alternative dropped: stores on an object store itself,
which has no rename, no lock and no cheap small read.)

URL/checkpoints/<step>.json                    written last: now the copy is valid
URL/checkpoints/<step>/files/<path>            small files by their path in the run folder
URL/rows/<home>/<table>/<segment or key file>-<content>    immutable, shared by checkpoints
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
from colonnade.checkpoint.stores import list_store_folders
from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    CorruptionError,
    StorageError,
)
from colonnade.files.disk import Disk
from colonnade.files.durable import read_verified, write_durably
from colonnade.files.untrusted import check_file_name
from colonnade.store.log.manifest import (
    FILE_NAME,
    CommitFile,
    list_commit_files,
    live_bitmap_path,
    manifest_file_name,
    read_manifest_fields,
)

RUN_FILES = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
)  # files of the run, copied with each checkpoint


class Mirror:
    """Copier of checkpoints to a URL, on rank 0.

    A failure is printed, and the next checkpoint tries again. Local checkpoints do not depend on it.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.problem: StorageError | None = None  # of the newest checkpoint

    def send(
        self, newest_step: int, retained_steps: Sequence[int], print_line: Callable[[str], None]
    ) -> None:
        """Copy the retained checkpoints, of which `newest_step` is the newest, to the URL, and delete all others
        there.

        Copies missing files only, each header after its files. Deletes headers first.
        """
        try:
            files, root = open_url(self.url)
            with name_url_in_errors(self.url, f"copy the checkpoint of step {newest_step}"):
                mirrored = list_mirrored_steps(files, root)
                sizes = _list_file_sizes(files, f"{root}/rows")
                for retained_step in retained_steps:
                    is_new = retained_step not in mirrored or retained_step == newest_step
                    try:
                        self._copy_checkpoint(files, root, retained_step, is_new, sizes)
                    except (CheckpointError, CorruptionError) as error:
                        if retained_step == newest_step:
                            raise
                        # An older checkpoint that is damaged must not keep the newest from the mirror.
                        print_line(
                            f"{self.url}: left out the checkpoint of step {retained_step}: {error}"
                        )
                _delete_unretained(files, root, retained_steps)
            self.problem = None
        except StorageError as error:
            self.problem = error
            print_line(f"{error}. Training continues; the next checkpoint is copied again")

    def close(self) -> None:
        """Raise StorageError if the newest checkpoint is in the run folder only, and not at the URL."""
        if self.problem is not None:
            raise self.problem

    def _copy_checkpoint(
        self,
        file_system: Any,
        remote_root: str,
        step: int,
        is_new: bool,
        remote_sizes: dict[str, int],
    ) -> None:
        """Copy the missing files of one checkpoint, its header last."""
        target = f"{remote_root}/checkpoints/{step:012d}"
        header = read_header(self.folder, step)
        small_files = [
            p for p in (self.folder / "checkpoints" / f"{step:012d}").iterdir() if p.is_file()
        ]
        small_files += [self.folder / name for name in RUN_FILES if (self.folder / name).exists()]
        for shard in _list_store_files(self.folder, header):
            small_files += shard.small_files
            for file in shard.files:
                # Named as a file in the store's own directory, where a store looks for copies of its stripes.
                name = f"{_relative_to_folder(self.folder, shard.folder / file.path.name)}-{file.content}"
                # The name identifies the content; a wrong size means an incomplete copy.
                if remote_sizes.get(name) != file.num_bytes:
                    _upload(file_system, file.path, f"{remote_root}/{name}")
                    remote_sizes[name] = file.num_bytes
        if is_new:
            for path in small_files:
                _upload(
                    file_system, path, f"{target}/files/{_relative_to_folder(self.folder, path)}"
                )
            _upload(
                file_system, self.folder / "checkpoints" / f"{step:012d}.json", f"{target}.part"
            )
            file_system.mv(f"{target}.part", f"{target}.json")  # atomic, even where uploads are not


def fetch_run(url: str, folder: Path | str, *, at: int | None = None) -> int:
    """Fetch a checkpoint (the newest, or step `at`) and the best one from a mirror into `folder`; return its step.

    The folder must have no checkpoint. A checkpoint is valid when its last file is written, so an interrupted fetch can
    be repeated. Raises CheckpointError if there is no such checkpoint, StorageError if the URL cannot be read.
    """
    folder = Path(folder)
    if any((folder / "checkpoints").glob("*.json")):
        raise CheckpointError(f"{folder} holds checkpoints already; fetch into another folder")
    files, root = open_url(url)
    with name_url_in_errors(url, "read"):
        steps = list_mirrored_steps(files, root)
        step = (steps[-1] if steps else None) if at is None else at
        if step not in steps:
            raise CheckpointError(
                f"{url} holds no checkpoint of step {step}; it has {steps or 'none'}"
            )
        assert step is not None
        fetched: set[Path] = set()
        header = _fetch_checkpoint(files, root, folder, step, fetched)
        best = header.get("best_step")
        if best is not None and best != step and best in steps:
            _fetch_checkpoint(files, root, folder, best, fetched)
    return step


def _fetch_checkpoint(
    file_system: Any, remote_root: str, run_folder: Path, step: int, downloaded_paths: set[Path]
) -> dict[str, Any]:
    """Fetch one checkpoint's files, its header last; return the header. downloaded_paths: segments of earlier
    fetches."""
    disk = Disk()
    small_folder = f"{remote_root}/checkpoints/{step:012d}/files"
    for path in file_system.find(small_folder):
        name = _relative_to_root(small_folder, path)
        for part in name.split("/"):
            check_file_name(part, path)
        _download(disk, file_system, path, run_folder / name)
    local_header = run_folder / "checkpoints" / f"{step:012d}.json"
    header_bytes = file_system.cat_file(f"{remote_root}/checkpoints/{step:012d}.json")
    # Under another name first, because its rows are not fetched yet.
    unfinished_header = local_header.with_suffix(".fetched")
    disk.make_dir(unfinished_header.parent)
    write_durably(disk, unfinished_header, header_bytes, checked=False)
    header = parse_header(local_header, read_verified(unfinished_header))
    for shard in _list_store_files(run_folder, header):
        for file in shard.files:
            path = shard.folder / file.path.name
            if path not in downloaded_paths:
                downloaded_paths.add(path)
                _download(
                    disk,
                    file_system,
                    f"{remote_root}/{_relative_to_folder(run_folder, path)}-{file.content}",
                    path,
                )
    disk.rename(unfinished_header, local_header)
    disk.sync_dir(local_header.parent)
    return header


def open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Raises ConfigError for an unknown protocol."""
    try:
        return fsspec.core.url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url!r}: {error}. Install fsspec's package for it (s3fs, gcsfs, ...), or give "
            "another URL"
        ) from None


def list_mirrored_steps(files: Any, root: str) -> list[int]:
    """List the steps with complete copies, ascending."""
    if not files.exists(f"{root}/checkpoints"):
        return []
    names = [PurePosixPath(path) for path in files.ls(f"{root}/checkpoints", detail=False)]
    return sorted(int(p.stem) for p in names if p.suffix == ".json" and p.stem.isdigit())


def _list_file_sizes(file_system: Any, remote_folder: str) -> dict[str, int]:
    """Return the sizes of all files under `remote_folder`, by path relative to its parent."""
    if not file_system.exists(remote_folder):
        return {}
    parent = remote_folder.rpartition("/")[0]
    entries = file_system.find(remote_folder, detail=True).items()
    return {_relative_to_root(parent, path): entry["size"] for path, entry in entries}


def _delete_unretained(file_system: Any, remote_root: str, retained_steps: Sequence[int]) -> None:
    """Delete the mirrored checkpoints that are not retained, and row files that none uses."""
    steps = list_mirrored_steps(file_system, remote_root)
    for step in steps:
        if step not in retained_steps:
            file_system.rm(f"{remote_root}/checkpoints/{step:012d}.json")
    used = set()
    for path in list(file_system.ls(f"{remote_root}/checkpoints", detail=False)):
        name = PurePosixPath(path).name
        if name.isdigit() and int(name) not in retained_steps:
            file_system.rm(path, recursive=True)
        elif name.isdigit():
            small_folder = f"{path}/files"
            for manifest in file_system.find(f"{small_folder}/rows"):
                store_folder = PurePosixPath(_relative_to_root(small_folder, manifest)).parent
                if FILE_NAME.fullmatch(PurePosixPath(manifest).name):
                    manifest_content = json.loads(
                        _strip_checksum_line(file_system.cat_file(manifest))
                    )
                    used |= {
                        f"{store_folder}/{f.path.name}-{f.content}"
                        for f in list_commit_files(Path(), manifest_content)
                    }
    if file_system.exists(f"{remote_root}/rows"):
        for path in file_system.find(f"{remote_root}/rows"):
            if _relative_to_root(remote_root, path) not in used:
                file_system.rm(path)


@dataclass(frozen=True, slots=True)
class _StoreFiles:
    """Files of one store in a checkpoint: manifest and bitmaps (small), segments and key lists."""

    folder: Path
    small_files: list[Path]
    files: list[CommitFile]


def _list_store_files(folder: Path, header: dict[str, Any]) -> Iterator[_StoreFiles]:
    """Yield the files of each store of a checkpoint."""
    step = header["step"]
    for store in list_store_folders(header):
        folder_of_store = folder / "rows" / store.path
        manifest = read_manifest_fields(folder_of_store, step)
        small_files = [
            folder_of_store / manifest_file_name(step),
            live_bitmap_path(folder_of_store, manifest),
        ]
        yield _StoreFiles(
            folder_of_store, small_files, list(list_commit_files(folder_of_store, manifest))
        )


def _upload(files: Any, path: Path, target: str) -> None:
    files.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
    files.put_file(str(path), target)


def _download(disk: Disk, files: Any, source: str, path: Path) -> None:
    disk.make_dir(path.parent)
    files.get_file(source, str(path))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    disk.sync_dir(path.parent)


def _relative_to_folder(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _relative_to_root(root: str, path: str) -> str:
    """Return `path` relative to `root`; either may have a leading slash."""
    return path.strip("/").removeprefix(root.strip("/")).strip("/")


def _strip_checksum_line(data: bytes) -> bytes:
    """Return a file's content without its checksum line (files/durable.py)."""
    return data[: data.rindex(b"\ncrc32c ")]


@contextmanager
def name_url_in_errors(url: str, action: str) -> Iterator[None]:
    """Convert any error of a file system to one StorageError that names the URL."""
    with convert_to_storage_error(
        f"{url}: could not {action}", ". The run folder's own checkpoints are intact"
    ):
        yield


@contextmanager
def convert_to_storage_error(failure: str, hint: str = "") -> Iterator[None]:
    """Convert any error of a file system to one StorageError with `failure`, the error's text, and `hint`."""
    try:
        yield
    except ColonnadeError:
        raise
    except Exception as error:
        raise StorageError(f"{failure}: {str(error) or type(error).__name__}{hint}") from error
