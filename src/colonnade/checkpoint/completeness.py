"""Completeness of a checkpoint: check that all its files exist, are undamaged, and are visible to every rank.

A checkpoint's header has a digest of every rank's manifests, by the folder of its rows ("1-of-2"), and the checksum of
each state file. Manifests identify segments by checksums, and each store by an id. So a file that is missing, or that
belongs to another checkpoint, run or rank, is detected without reading a row.

`find_problems` has all these checks: resume, predict, evaluate, export, publish, warm start and verify call it.

`verify_checkpoint` reads every byte. It does not parse state files and does not import torch: the checksum in the
header identifies each file.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.checkpoint.header import (
    REMEDY,
    header_path,
    list_checkpoints,
    read_header,
    state_folder,
)
from colonnade.comm.differences import MAX_SHOWN, format_ranks
from colonnade.config.run import RunConfig, list_fixed_settings, load_config
from colonnade.errors import CheckpointError, ColonnadeError, WorldError
from colonnade.files.durable import (
    VerifiedFile,
    read_checksum,
    read_verified,
    verify_durable,
    verify_file,
)
from colonnade.store.log.commits import verify_store
from colonnade.store.log.manifest import manifest_file_name

if TYPE_CHECKING:
    from colonnade.comm.mesh import Mesh


VISIBLE_SECONDS = (
    10.0  # until a new file is visible on other hosts: network file systems cache missing files
)


def collect_file_entries(
    run_folder: Path,
    store_folders: Iterable[Path],
    step: int,
    state_names: Sequence[str],
    mesh: Mesh,
) -> dict[str, Any]:
    """Return the header's entries for all files, after every rank has written its stores and state files.

    Collective, on the channel `checkpoint`. state_names: names of this rank's state files.
    "rows": by folder of rows, for each rank with tables in it, the table folders and a digest of their manifests.
    "states": checksums of all ranks' state files by name.
    """
    tables: dict[str, list[str]] = {}
    for store in store_folders:
        rows_folder, table = store.relative_to(run_folder / "rows").parts
        tables.setdefault(rows_folder, []).append(table)
    own_files = {
        "rows": {
            rows_folder: [
                *names,
                _compute_manifest_digest(run_folder / "rows" / rows_folder, names, step),
            ]
            for rows_folder, names in sorted(tables.items())
        },
        "states": {
            name: read_checksum(state_folder(run_folder, step) / name) for name in state_names
        },
    }
    rows: dict[str, list[list[str]]] = {}
    checksums: dict[str, str] = {}
    for text in mesh.all_gather_bytes("checkpoint", json.dumps(own_files).encode()):
        files_of_rank = json.loads(text)
        checksums |= files_of_rank["states"]
        for rows_folder, entry in files_of_rank["rows"].items():
            rows.setdefault(rows_folder, []).append(entry)
    return {"rows": rows, "states": checksums}


def read_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Read a checkpoint's header and check that all its files exist. Raises CheckpointError, CorruptionError."""
    header = read_header(folder, step)
    _raise_checkpoint_problems(
        folder, step, [text for _, text in find_file_problems(folder, header)]
    )
    return header


def check_checkpoint_complete(folder: Path, step: int | None, mesh: Mesh) -> None:
    """Raise CheckpointError on every rank, naming the problems, if a checkpoint is incomplete. Collective.

    Each rank checks a share of the files. step: None for a new run, which has nothing to check.
    """
    problems: list[str] = []
    if step is not None:
        try:
            header = read_header(folder, step)
            own_share = slice(mesh.rank, None, mesh.num_ranks)
            problems = [text for _, text in find_file_problems(folder, header, own_share)]
        except (ColonnadeError, OSError) as error:
            problems = [str(error)]
    gathered = mesh.all_gather_bytes("control", json.dumps(problems).encode())
    # Problems that several ranks report are listed once.
    _raise_checkpoint_problems(
        folder,
        step,
        dict.fromkeys(text for texts_of_rank in gathered for text in json.loads(texts_of_rank)),
    )


def find_file_problems(
    run_folder: Path, header: Mapping[str, Any], file_slice: slice = slice(None)
) -> Iterator[tuple[Path, str]]:
    """Yield files and folders of a checkpoint that are missing or wrong, with a description of the problem.

    file_slice: slice of the files to check. Reads manifests and the last lines of state files.
    """
    step = header["step"]
    if not file_slice.start and (edit := find_edited_setting(run_folder, header)):
        yield run_folder / "config.yaml", edit
    for name, checksum in list(header["states"].items())[file_slice]:
        path = state_folder(run_folder, step) / name
        shown_path = f"checkpoints/{path.parent.name}/{name}"
        if not path.is_file():
            yield path, f"{shown_path} is missing"
        elif read_checksum(path) != checksum:
            yield (
                path,
                f"{shown_path} is not what this run saved there: of another checkpoint, or cut short",
            )
    entries = [
        (name, entry)
        for name, entries_of_folder in header["rows"].items()
        for entry in entries_of_folder
    ]
    for name, (*tables, digest) in entries[file_slice]:
        rows = run_folder / "rows" / name
        if not rows.is_dir():
            yield rows, f"rows/{name} is missing"
        elif not any(rows.glob(f"*/{manifest_file_name(step)}")):
            yield rows, f"rows/{name} has no checkpoint of step {step}"
        elif _compute_manifest_digest(rows, tables, step) != digest:
            yield (
                rows,
                _find_damaged_manifest(rows, tables, step)
                or (
                    f"rows/{name} is not what this run saved there: of another run or rank, or cut short"
                ),
            )


EDITED = "config.yaml was edited"


def find_edited_setting(run_folder: Path, header: Mapping[str, Any]) -> str | None:
    """Describe how a run's config.yaml, which has no checksum, differs from what a checkpoint was trained with.

    None: it does not, or the header is of a loop of your own, which has no settings. Raises ConfigError if it is
    missing or cannot be read.
    """
    if not header["settings"]:
        return None
    defaults = list_fixed_settings(RunConfig())  # for settings that a later Colonnade has added
    got = defaults | list_fixed_settings(load_config(run_folder / "config.yaml"))
    wanted = defaults | header["settings"]
    edited = [name for name in got | wanted if got.get(name) != wanted.get(name)]
    if not edited:
        return None
    values = f"got {edited[0]}={got.get(edited[0])!r}, wanted {wanted.get(edited[0])!r}"
    return f"{EDITED}: {values}, as this checkpoint was trained"


def _raise_checkpoint_problems(run_folder: Path, step: int | None, problems: Iterable[str]) -> None:
    """Raise CheckpointError that lists the first problems, if there are any."""
    if texts := list(problems):
        if texts[0].startswith(EDITED):
            raise CheckpointError(f"{run_folder}: {texts[0]}. Set it back in config.yaml")
        more_text = f" (and {len(texts) - MAX_SHOWN} more)" if len(texts) > MAX_SHOWN else ""
        raise CheckpointError(
            f"{run_folder}: the checkpoint of step {step} is not whole: {'; '.join(texts[:MAX_SHOWN])}{more_text}. "
            f"{REMEDY[:1].upper()}{REMEDY[1:]}"
        )


def check_folder_is_shared(folder: Path, mesh: Mesh) -> None:
    """Raise WorldError on every rank unless all see the same folder, which rank 0 creates. Collective."""
    if mesh.num_ranks == 1:
        return
    probe_name = mesh.all_gather_bytes("control", uuid.uuid4().hex.encode())[0].decode()
    probe = folder / f".seen-by-all-{probe_name}"
    is_visible_to_own_rank = True
    try:
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    except OSError:
        is_visible_to_own_rank = False  # opening the folder later raises the reason
    mesh.barrier()
    deadline = time.monotonic() + VISIBLE_SECONDS
    while mesh.rank and not probe.exists() and time.monotonic() < deadline:
        is_visible_to_own_rank = False
        if not any(mesh.peers[mesh.rank].host != peer.host for peer in mesh.peers):
            break  # one host needs no time
        time.sleep(0.2)
    is_visible_to_own_rank = is_visible_to_own_rank or probe.exists()
    visibility = [
        int(flag)
        for flag in mesh.all_gather_bytes("control", b"1" if is_visible_to_own_rank else b"0")
    ]
    if mesh.rank == 0:
        probe.unlink(missing_ok=True)
    blind_ranks = [rank for rank, is_visible in enumerate(visibility) if not is_visible]
    if 0 in blind_ranks:
        raise WorldError(f"rank 0 cannot write to the run folder {folder}")
    if blind_ranks:
        hosts = ", ".join(sorted({mesh.peers[rank].host for rank in blind_ranks}))
        raise WorldError(
            f"{format_ranks(blind_ranks)} on {hosts} cannot see the run folder of rank 0, {folder} on "
            f"{mesh.peers[0].host}: give all ranks one folder, on a file system that all hosts share. "
            "Rows may be stored on each host's own disks (plan.memory.ssd)"
        )


def _find_damaged_manifest(
    rows_folder: Path, table_folders: Sequence[str], step: int
) -> str | None:
    """Return the error of the first damaged manifest; None if all have the right checksum."""
    for path in (rows_folder / table / manifest_file_name(step) for table in table_folders):
        try:
            if path.is_file():
                read_verified(path)
        except ColonnadeError as error:
            return str(error)
    return None


def _compute_manifest_digest(rows_folder: Path, table_folders: Sequence[str], step: int) -> str:
    """Compute the digest of the manifests of tables in a folder of rows. A missing one counts as empty."""
    digest = hashlib.sha256()
    for table in table_folders:
        path = rows_folder / table / manifest_file_name(step)
        digest.update(f"{table}/".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def verify_other_checkpoints(folder: Path, step: int) -> Iterator[VerifiedFile]:
    """Check headers and manifests of a run's checkpoints other than that of `step`, and yield each header."""
    for other in list_checkpoints(folder):
        if other != step:
            yield verify_file(header_path(folder, other), partial(read_checkpoint, folder, other))


def verify_checkpoint(
    run_folder: Path, step: int, moved_folders: Sequence[Path] = ()
) -> Iterator[VerifiedFile]:
    """Verify every byte of a checkpoint and yield each file.

    Order: header, each rank's state, dense network, every rank's rows; last, undamaged files of another checkpoint.
    moved_folders: new paths of moved directories of `plan.memory.ssd`. Raises CheckpointError, CorruptionError if the
    header cannot be read, which lists all other files.
    """
    damaged: list[Path] = []
    header = read_header(run_folder, step)
    for file in _verify_listed_files(run_folder, header, moved_folders):
        if file.problem:
            damaged.append(file.path)
        yield file
    for path, problem in find_file_problems(run_folder, header):
        if not any(
            damaged_path == path or path in damaged_path.parents for damaged_path in damaged
        ):
            yield VerifiedFile(path, 0, problem)


def _verify_listed_files(
    run_folder: Path, header: dict, moved_folders: Sequence[Path]
) -> Iterator[VerifiedFile]:
    """Verify every byte of all files that a header lists, and yield each file."""
    step = header["step"]
    yield verify_durable(header_path(run_folder, step))
    for name in header["states"]:
        yield verify_durable(state_folder(run_folder, step) / name)
    for rows_folder, entries in header["rows"].items():
        for table in (table for *tables, _ in entries for table in tables):
            moved_stores = [
                folder / f"colonnade-{header['run']}" / rows_folder / table
                for folder in moved_folders
            ]
            yield from verify_store(
                run_folder / "rows" / rows_folder / table, step, places=moved_stores
            )
