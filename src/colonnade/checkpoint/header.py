"""Header of a checkpoint: `checkpoints/<step>.json`, written last, which lists all its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from colonnade.errors import CheckpointError, CorruptionError
from colonnade.files.durable import read_verified
from colonnade.files.untrusted import FileName
from colonnade.formats import check_format_version, parse_json_object

FORMAT = "colonnade checkpoint"
MAX_DIGITS = 20
"""Upper limit of a step's digits."""
REMEDY = "restore it from a copy, or go back to an older checkpoint (--at STEP)"

Count = Annotated[int, Field(ge=0)]
StateName = Annotated[str, Field(pattern=r"^(dense|(rank|retention)-\d+)$")]


class _Table(TypedDict):
    dim: int | dict[str, int]
    rows: int | None
    optimizer: str
    dtype: str


class _Model(TypedDict):
    tables: dict[str, _Table]
    features: dict[str, tuple[str, str]]
    dense: dict[str, list[int]]


class _Sharding(TypedDict):
    kind: str
    ranks: list[tuple[Count, Count]]


class _Header(TypedDict):
    """Fields that readers need; a header has more."""

    step: Count
    num_ranks: Annotated[int, Field(ge=1)]
    run: FileName  # part of folder names in `plan.memory.ssd`
    best_step: int | None
    model: _Model
    shardings: dict[str, _Sharding]
    states: dict[StateName, str]
    rows: dict[FileName, list[list[FileName]]]
    settings: dict[str, Any]  # those that decide scores; {} for a loop of your own


_HEADER = TypeAdapter(_Header)


def header_path(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint's header."""
    return folder / "checkpoints" / f"{step:012d}.json"


def state_folder(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint's state files."""
    return folder / "checkpoints" / f"{step:012d}"


def list_checkpoints(folder: Path) -> list[int]:
    """List the steps that every rank has saved, ascending."""
    paths = (folder / "checkpoints").glob("*.json")
    return sorted(int(path.stem) for path in paths if path.stem.isdecimal())


def read_header(folder: Path, step: int) -> dict[str, Any]:
    """Read the header of a checkpoint. `completeness.read_checkpoint` also checks that all its files exist.

    Raises CheckpointError (absent, another version), CorruptionError (altered, another step's, not a header).
    """
    path = header_path(folder, step)
    if not path.exists():
        raise CheckpointError(f"{folder} has no checkpoint of step {step}")
    return parse_header(path, read_verified(path))


def parse_header(path: Path, content: bytes) -> dict[str, Any]:
    """Parse and check a header's content; its step must be the one in the name of `path`."""
    header = parse_json_object(path, content)
    check_format_version(path, header, FORMAT)
    try:
        _HEADER.validate_python(header)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptionError(
            f"{path}: got a checkpoint's header with a bad {where}: {first['msg']}; {REMEDY}"
        ) from None
    if header["step"] != int(path.stem):
        raise CorruptionError(
            f"{path}: got the header of step {header['step']:,}, wanted that of step {int(path.stem):,}: the file is "
            f"another checkpoint's; {REMEDY}"
        )
    _check_rank_state_files(path, header)
    return header


def _check_rank_state_files(path: Path, header: Mapping[str, Any]) -> None:
    """Check that each rank has a state file, before anything is allocated by the number of ranks."""
    num_ranks = header["num_ranks"]
    num_states = sum(name.startswith("rank-") for name in header["states"])
    last = max((run[1] for s in header["shardings"].values() for run in s["ranks"]), default=0)
    if num_states != num_ranks or last >= num_ranks:
        raise CorruptionError(
            f"{path}: got {num_ranks:,} ranks, state files of {num_states:,} and rows on rank {last:,}, which do not "
            f"agree; {REMEDY}"
        )


def suggest_group(folder: Path) -> str:
    """Return words that name a group's run folder inside `folder`; "" if it is not that of several groups."""
    group = folder / "group-0"
    return f"; give the run folder of one of its groups, {group}" if group.is_dir() else ""


def resolve_step(run_folder: Path, checkpoint_choice: int | str | None) -> int:
    """Return the saved step for `checkpoint_choice`: a step, "last", "best" (by the validation part), or None.

    None means the best if a validation part chose one that is still saved, else the last. Raises CheckpointError that
    lists the saved steps if there is no such checkpoint.
    """
    steps = list_checkpoints(run_folder)
    if not steps:
        raise CheckpointError(
            f"{run_folder} holds no checkpoint; name the folder of a run (`colonnade train --run`), or one that "
            f"`collection.save` wrote{suggest_group(run_folder)}"
        )
    if checkpoint_choice == "last":
        return steps[-1]
    if checkpoint_choice is None:
        best = read_header(run_folder, steps[-1]).get("best_step")
        return best if best in steps else steps[-1]
    if checkpoint_choice == "best":
        best = read_header(run_folder, steps[-1]).get("best_step")
        if best is None:
            raise CheckpointError(
                f"{run_folder}: no checkpoint is known to be the best: the data had no validation part, or it was "
                "not evaluated yet. Ask for the last"
            )
        checkpoint_choice = best
    if (
        isinstance(checkpoint_choice, str)
        and checkpoint_choice.isdecimal()
        and len(checkpoint_choice) < MAX_DIGITS
    ):
        checkpoint_choice = int(checkpoint_choice)
    if checkpoint_choice not in steps:
        raise CheckpointError(
            f"{run_folder} has no checkpoint of step {checkpoint_choice!s:.{MAX_DIGITS}}; it has {steps}, "
            "also called best and last"
        )
    return int(checkpoint_choice)


def explain_chosen_step(run_folder: Path, step: int) -> str:
    """Describe why a saved step is chosen: "best of validation auc", "last; no validation part", ..."""
    steps = list_checkpoints(run_folder)
    header = read_header(run_folder, steps[-1])
    best = header.get("best_step")
    if step == best:
        return f"best of {header.get('monitor', 'validation').replace('_', ' ')}"
    if step != steps[-1]:
        return "an earlier checkpoint"
    return "last; no validation part" if best is None else f"last; step {best} was best"
