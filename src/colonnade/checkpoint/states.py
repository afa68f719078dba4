"""State files of a checkpoint: torch's format in a file with a checksum and the name of its run and step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import CorruptionError
from colonnade.files.durable import read_verified
from colonnade.formats import check_format_version, make_format_stamp

FORMAT = "colonnade state"


def serialize_rank_state(rank_state: dict[str, Any], run_name: str, state_path: Path) -> bytes:
    """Serialize the state file at `state_path` of a checkpoint of `run_name`."""
    buffer = io.BytesIO()
    torch.save(
        {
            **make_format_stamp(FORMAT),
            "of": _describe_owner(run_name, state_path),
            "state": rank_state,
        },
        buffer,
    )
    return buffer.getvalue()


def load_state(state_path: Path, run_name: str) -> dict[str, Any]:
    """Read a state file; tensors are on the CPU.

    Raises CorruptionError (torn, altered, another checkpoint's or another file), CheckpointError (another version),
    StorageError.
    """
    # Load to the CPU, because the checkpoint of a GPU run may be read on a machine without GPU.
    data = io.BytesIO(read_verified(state_path))
    try:
        saved = torch.load(data, weights_only=True, map_location="cpu")
    except Exception:  # torch suggests to load such files unsafely, which must not happen
        saved = None
    if not isinstance(saved, dict):
        raise CorruptionError(
            f"{state_path}: got a file that holds more than tensors and plain values, or none of them, "
            "wanted a checkpoint's "
            "state. It is not what was saved, and nothing in it was run. Restore it from a copy, or go back to an "
            "older checkpoint"
        )
    check_format_version(state_path, saved, FORMAT)
    if saved["of"] != _describe_owner(run_name, state_path):
        raise CorruptionError(
            f"{state_path}: got the state {saved['of']}, wanted {_describe_owner(run_name, state_path)}: the "
            "file is another's. "
            "Restore it from a copy, or go back to an older checkpoint"
        )
    return saved["state"]


def _describe_owner(run: str, path: Path) -> str:
    """Describe the owner of a state file: `rank-0 of step 12 of run 4f2a...`. Its folder is named by the step."""
    return f"{path.name} of step {int(path.parent.name)} of run {run}"
