"""Manifests: `manifest-<step>.json` says which bytes are one commit. Format: format.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from colonnade.errors import CheckpointError
from colonnade.store import segment
from colonnade.store.contract import Manifest
from colonnade.store.disk import Disk
from colonnade.store.durable import read_verified, write_durably

FORMAT = "colonnade store manifest"
VERSION = 1
FILE_NAME = re.compile(r"manifest-(0|[1-9]\d*)\.json")


def file_name(step: int) -> str:
    return f"manifest-{step}.json"


def committed_steps(directory: Path) -> list[int]:
    """The steps committed in a store's directory, ascending; their content is not looked at."""
    if not directory.is_dir():
        return []
    matches = [FILE_NAME.fullmatch(path.name) for path in directory.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def write_manifest(
    disk: Disk, directory: Path, manifest: Manifest, segments: list[segment.Segment], identity: str
) -> None:
    """Durable when this returns. `segments` are the manifest's, for the counts people like to read."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "table": manifest.table,
        "identity": identity,
        "record_bytes": manifest.record_bytes,
        "num_rows": manifest.num_rows,
        "segments": [
            {
                "file": file,
                "bytes": num_bytes,
                "checksum": f"{checksum:016x}",
                "records": part.num_records,
                "live_rows": part.num_live,
            }
            for (file, num_bytes, checksum), part in zip(manifest.segments, segments, strict=True)
        ],
    }
    write_durably(disk, directory / file_name(manifest.step), json.dumps(fields, indent=1).encode())


def describe(directory: Path, step: int) -> dict[str, Any]:
    """What a commit's manifest says, for readers who do not know the table. Raises CorruptionError, CheckpointError."""
    path = directory / file_name(step)
    if not path.exists():
        raise CheckpointError(
            f"{path}: missing, but its run's commit names it. Restore it from a copy"
        )
    return json.loads(read_verified(path))


def read_manifest(
    directory: Path, step: int, *, table: str, identity: str, record_bytes: int
) -> Manifest:
    """Raises CorruptionError (altered), CheckpointError (absent, or of another table, run or version)."""
    path = directory / file_name(step)
    if not path.exists():
        known = ", ".join(map(str, committed_steps(directory))) or "none"
        raise CheckpointError(
            f"{directory}: step {step} was not committed here; committed steps: {known}. Open one of "
            "these, or step=None for an empty store"
        )
    fields = json.loads(read_verified(path))
    wanted = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "table": table,
        "identity": identity,
        "record_bytes": record_bytes,
    }
    for name, value in wanted.items():
        if fields.get(name) != value:
            raise CheckpointError(
                f"{path}: got {name} {fields.get(name)!r}, wanted {value!r}. Name the run, rank and table "
                "that wrote this directory, or start a new one"
            )
    return Manifest(
        step=step,
        table=table,
        record_bytes=record_bytes,
        num_rows=fields["num_rows"],
        segments=tuple((s["file"], s["bytes"], int(s["checksum"], 16)) for s in fields["segments"]),
    )
