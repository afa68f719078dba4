"""State files of a checkpoint: torch's format inside a checked file, which says whose state it is; tensors come back on
the CPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import CorruptionError
from colonnade.formats import check_stamp, stamp
from colonnade.store.durable import read_verified

FORMAT = "colonnade state"


def dump(state: dict[str, Any], run: str, path: Path) -> bytes:
    """What the state file at `path` of a checkpoint of `run` holds."""
    buffer = io.BytesIO()
    torch.save({**stamp(FORMAT), "of": _words(run, path), "state": state}, buffer)
    return buffer.getvalue()


def load_state(path: Path, run: str) -> dict[str, Any]:
    """Read a state file. Raises CorruptionError (torn, altered, another checkpoint's or another file), CheckpointError
    (another version), StorageError."""
    # On the CPU wherever it was: a checkpoint made beside a GPU is read on machines without one.
    data = io.BytesIO(read_verified(path))
    try:
        saved = torch.load(data, weights_only=True, map_location="cpu")
    except Exception:  # torch advises to load such files without a check: never
        saved = None
    if not isinstance(saved, dict):
        raise CorruptionError(
            f"{path}: got a file that holds more than tensors and plain values, or none of them, wanted a checkpoint's "
            "state. It is not what was saved, and nothing in it was run. Restore it from a copy, or go back to an "
            "older checkpoint"
        )
    check_stamp(path, saved, FORMAT)
    if saved["of"] != _words(run, path):
        raise CorruptionError(
            f"{path}: got the state {saved['of']}, wanted {_words(run, path)}: the file is another's. Restore it "
            "from a copy, or go back to an older checkpoint"
        )
    return saved["state"]


def _words(run: str, path: Path) -> str:
    """`rank-0 of step 12 of run 4f2a...`; a state file lies in the folder of its step."""
    return f"{path.name} of step {int(path.parent.name)} of run {run}"
