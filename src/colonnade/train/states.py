"""State files of a commit: torch's format inside a checked file, which says whose state it is; tensors come back on
the CPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import CorruptionError
from colonnade.store.durable import read_verified


def dump(state: dict[str, Any], run: str, path: Path) -> bytes:
    """What the state file at `path` of a commit of `run` holds."""
    buffer = io.BytesIO()
    torch.save({"of": _words(run, path), "state": state}, buffer)
    return buffer.getvalue()


def load_state(path: Path, run: str) -> dict[str, Any]:
    """Raises CorruptionError (torn, altered, another commit's or another file), StorageError."""
    # On the CPU wherever it was: a commit made beside a GPU is read on machines without one.
    data = io.BytesIO(read_verified(path))
    saved = torch.load(data, weights_only=True, map_location="cpu")
    if saved["of"] != _words(run, path):
        raise CorruptionError(
            f"{path}: got the state {saved['of']}, wanted {_words(run, path)}: the file is another's. Restore it "
            "from a copy, or go back to an older commit"
        )
    return saved["state"]


def _words(run: str, path: Path) -> str:
    """`rank-0 of step 12 of run 4f2a...`; a state file lies in the folder of its step."""
    return f"{path.name} of step {int(path.parent.name)} of run {run}"
