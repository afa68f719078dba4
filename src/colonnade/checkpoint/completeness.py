"""Completeness of a checkpoint: whether all that it names is there, of one run, seen by every rank, and undamaged.

A checkpoint's header holds a digest of what every rank's manifests said, by the folder of its rows ("1-of-2"), and the
checksum of each state file. Manifests name segments by checksums, and each store by an id of its own: so a file that is
missing, or is another checkpoint's, run's or rank's, is found without reading a row.

`find_problems` is the one judge: resume, predict, evaluate, export, publish, warm start and verify all ask it.

`verify_checkpoint` reads every byte. State files are not parsed, nor torch imported: that a file is the one saved
there, its checksum in the header says.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.checkpoint.header import REMEDY, header_path, read_header, state_folder
from colonnade.comm.differences import SHOWN, rank_words
from colonnade.errors import CheckpointError, ColonnadeError, WorldError
from colonnade.store.durable import checksum_of, read_verified
from colonnade.store.manifest import file_name
from colonnade.store.verification import Verified, verify_durable, verify_store

if TYPE_CHECKING:
    from colonnade.comm.mesh import Mesh


SEEN_SECONDS = 10.0  # that a file of another host may take to be seen: network file systems remember what was not there


def describe_files(
    folder: Path, stores: Iterable[Path], step: int, states: Sequence[str], mesh: Mesh
) -> dict[str, Any]:
    """Collective, on the channel `checkpoint`, when every rank's stores and state files are written: what the header
    says
    of them. By folder of rows, for each rank with tables in it, these tables' folders and a digest of their manifests;
    by name, the checksums of the ranks' state files (`states`: this rank's)."""
    tables: dict[str, list[str]] = {}
    for store in stores:
        home, table = store.relative_to(folder / "rows").parts
        tables.setdefault(home, []).append(table)
    mine = {
        "rows": {
            home: [*names, _digest(folder / "rows" / home, names, step)]
            for home, names in sorted(tables.items())
        },
        "states": {name: checksum_of(state_folder(folder, step) / name) for name in states},
    }
    rows: dict[str, list[list[str]]] = {}
    checksums: dict[str, str] = {}
    for text in mesh.all_gather_bytes("checkpoint", json.dumps(mine).encode()):
        of_rank = json.loads(text)
        checksums |= of_rank["states"]
        for home, mark in of_rank["rows"].items():
            rows.setdefault(home, []).append(mark)
    return {"rows": rows, "states": checksums}


def read_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Read a checkpoint's header and check that all it names is present. Raises CheckpointError, CorruptionError."""
    header = read_header(folder, step)
    _refuse(folder, step, [text for _, text in find_problems(folder, header)])
    return header


def check_whole(folder: Path, step: int | None, mesh: Mesh) -> None:
    """Collective `read_checkpoint`: raises CheckpointError on every rank, naming what is missing, or not what was
    saved; nothing to check of a new run (None). Each rank looks at some of the files."""
    problems: list[str] = []
    if step is not None:
        try:
            header = read_header(folder, step)
            every = slice(mesh.rank, None, mesh.num_ranks)
            problems = [text for _, text in find_problems(folder, header, every)]
        except (ColonnadeError, OSError) as error:
            problems = [str(error)]
    gathered = mesh.all_gather_bytes("control", json.dumps(problems).encode())
    # In every rank's order: what several see is said once.
    _refuse(folder, step, dict.fromkeys(text for each in gathered for text in json.loads(each)))


def find_problems(
    folder: Path, header: Mapping[str, Any], share: slice = slice(None)
) -> Iterator[tuple[Path, str]]:
    """Files and folders that a checkpoint names and that are missing or not the checkpoint's, with what is wrong.
    share: of all
    that it names, what to look at. Reads manifests and the last lines of state files."""
    step = header["step"]
    for name, checksum in list(header["states"].items())[share]:
        path = state_folder(folder, step) / name
        shown = f"checkpoints/{path.parent.name}/{name}"
        if not path.is_file():
            yield path, f"{shown} is missing"
        elif checksum_of(path) != checksum:
            yield (
                path,
                f"{shown} is not what this run saved there: of another checkpoint, or cut short",
            )
    marks = [(name, mark) for name, of in header["rows"].items() for mark in of]
    for name, (*tables, digest) in marks[share]:
        rows = folder / "rows" / name
        if not rows.is_dir():
            yield rows, f"rows/{name} is missing"
        elif not any(rows.glob(f"*/{file_name(step)}")):
            yield rows, f"rows/{name} has no checkpoint of step {step}"
        elif _digest(rows, tables, step) != digest:
            yield rows, _damaged(rows, tables, step) or (
                f"rows/{name} is not what this run saved there: of another run or rank, or cut short"
            )  # fmt: skip


def _refuse(folder: Path, step: int | None, problems: Iterable[str]) -> None:
    if texts := list(problems):
        left = f" (and {len(texts) - SHOWN} more)" if len(texts) > SHOWN else ""
        raise CheckpointError(
            f"{folder}: the checkpoint of step {step} is not whole: {'; '.join(texts[:SHOWN])}{left}. "
            f"{REMEDY[:1].upper()}{REMEDY[1:]}"
        )


def check_shared(folder: Path, mesh: Mesh) -> None:
    """Collective. Raises WorldError on every rank unless all see one and the same folder, which rank 0 makes."""
    if mesh.num_ranks == 1:
        return
    word = mesh.all_gather_bytes("control", uuid.uuid4().hex.encode())[0].decode()
    probe, is_seen = folder / f".seen-by-all-{word}", True
    try:
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    except OSError:
        is_seen = False  # opening says why
    mesh.barrier()
    deadline = time.monotonic() + SEEN_SECONDS
    while mesh.rank and not probe.exists() and time.monotonic() < deadline:
        is_seen = False
        if not any(mesh.peers[mesh.rank].host != peer.host for peer in mesh.peers):
            break  # one host needs no time
        time.sleep(0.2)
    is_seen = is_seen or probe.exists()
    seen = [int(said) for said in mesh.all_gather_bytes("control", b"1" if is_seen else b"0")]
    if mesh.rank == 0:
        probe.unlink(missing_ok=True)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if 0 in blind:
        raise WorldError(f"rank 0 cannot write to the run folder {folder}")
    if blind:
        hosts = ", ".join(sorted({mesh.peers[rank].host for rank in blind}))
        raise WorldError(
            f"{rank_words(blind)} on {hosts} cannot see the run folder of rank 0, {folder} on {mesh.peers[0].host}: "
            "give all ranks one folder, on a file system that all hosts share. Rows may rest on each host's own disks "
            "(plan.memory.ssd)"
        )


def _damaged(rows: Path, tables: Sequence[str], step: int) -> str | None:
    """What is said of the first manifest that is not as it was written; None: each is, by its own checksum."""
    for path in (rows / table / file_name(step) for table in tables):
        try:
            if path.is_file():
                read_verified(path)
        except ColonnadeError as error:
            return str(error)
    return None


def _digest(rows: Path, tables: Sequence[str], step: int) -> str:
    """Of the manifests of tables in a folder of rows; of one that is not there, nothing."""
    found = hashlib.sha256()
    for table in tables:
        path = rows / table / file_name(step)
        found.update(f"{table}/".encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def verify_checkpoint(folder: Path, step: int, places: Sequence[Path] = ()) -> Iterator[Verified]:
    """Files as they are read: the checkpoint's header, each rank's state, the dense network, then every rank's rows;
    last,
    what is whole by itself and not this checkpoint's.

    places: where directories of `plan.memory.ssd` lie now, if they moved. Raises CheckpointError, CorruptionError
    where the header of the checkpoint itself cannot be read, which names all others.
    """
    damaged: list[Path] = []
    header = read_header(folder, step)
    for file in _files(folder, header, places):
        if file.problem:
            damaged.append(file.path)
        yield file
    for path, problem in find_problems(folder, header):
        if not any(each == path or path in each.parents for each in damaged):
            yield Verified(path, 0, problem)


def _files(folder: Path, header: dict, places: Sequence[Path]) -> Iterator[Verified]:
    step = header["step"]
    yield verify_durable(header_path(folder, step))
    for name in header["states"]:
        yield verify_durable(state_folder(folder, step) / name)
    for home, marks in header["rows"].items():
        for table in (table for *tables, _ in marks for table in tables):
            moved = [place / f"colonnade-{header['run']}" / home / table for place in places]
            yield from verify_store(folder / "rows" / home / table, step, places=moved)
