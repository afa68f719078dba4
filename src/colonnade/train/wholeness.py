"""Whether all that a commit names is there, of one run, and seen by every rank: checked before anything is opened.

A commit's word holds a digest of what every rank's manifests said, by the folder of its rows ("1-of-2"). Manifests name
segments by checksums, and each store by an id of its own: so a folder that is missing, or is another run's or another
rank's, is found without reading a row.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colonnade.errors import CheckpointError, ColonnadeError, WorldError
from colonnade.store.durable import read_verified
from colonnade.store.log import LogBacking
from colonnade.store.manifest import file_name
from colonnade.topology.disagreement import SHOWN, rank_words
from colonnade.topology.mesh import Mesh

SEEN_SECONDS = 10.0  # that a file of another host may take to be seen: network file systems remember what was not there


def marks(
    folder: Path, backings: Sequence[Any], step: int, mesh: Mesh
) -> dict[str, list[list[str]]]:
    """Collective, on the purpose `commit`, when every rank's stores have committed: by folder of rows, of each rank
    that has tables in it, these tables' folders and a digest of their manifests."""
    tables: dict[str, list[str]] = {}
    for backing in backings:
        if isinstance(backing, LogBacking):
            home, table = backing.directory.relative_to(folder / "rows").parts
            tables.setdefault(home, []).append(table)
    mine = {
        home: [*names, _digest(folder / "rows" / home, names, step)]
        for home, names in sorted(tables.items())
    }
    found: dict[str, list[list[str]]] = {}
    for said in mesh.all_gather_bytes("commit", json.dumps(mine).encode()):
        for home, mark in json.loads(said).items():
            found.setdefault(home, []).append(mark)
    return found


def check_whole(folder: Path, step: int | None, mesh: Mesh) -> None:
    """Collective. Raises CheckpointError on every rank, naming what is missing, or not what was committed; nothing to
    check of a new run (None). Each rank looks at some of the folders."""
    problems = [] if step is None else _problems(folder, step, mesh)
    heard = mesh.all_gather_bytes("control", json.dumps(problems).encode())
    # In every rank's order: what several see is said once.
    found = list(dict.fromkeys(problem for said in heard for problem in json.loads(said)))
    if found:
        left = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise CheckpointError(
            f"{folder}: the commit of step {step} is not whole: {'; '.join(found[:SHOWN])}{left}. Restore it from a "
            "copy, or go back to an older commit (--at STEP)"
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


def _problems(folder: Path, step: int, mesh: Mesh) -> list[str]:
    word = folder / "commits" / f"{step:012d}.json"
    try:
        header = json.loads(read_verified(word))
    except (ColonnadeError, OSError, ValueError) as error:
        return [f"rank {mesh.rank} cannot read {word.name} ({error})"]
    place = word.with_suffix("")
    states = ["dense", *(f"rank-{rank}" for rank in range(header["num_ranks"]))]
    found = [
        f"commits/{place.name}/{name} is missing" for name in states if not (place / name).is_file()
    ]
    wanted = [(name, mark) for name, of in header.get("rows", {}).items() for mark in of]
    for name, (*tables, digest) in wanted[mesh.rank :: mesh.num_ranks]:
        rows = folder / "rows" / name
        if not rows.is_dir():
            found.append(f"rows/{name} is missing")
        elif not any(rows.glob(f"*/{file_name(step)}")):
            found.append(f"rows/{name} has no commit of step {step}")
        elif _digest(rows, tables, step) != digest:
            found.append(_damaged(rows, tables, step) or (
                f"rows/{name} is not what this run committed there: of another run or rank, or cut short"
            ))  # fmt: skip
    return found


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
