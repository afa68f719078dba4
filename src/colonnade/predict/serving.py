"""Where a run's exports for prediction lie: each commit is written once and then mapped by whoever predicts.

run/serving/<step>-<tag>-v<version>/     as `train/export.py` writes it; the tag tells commits of one step apart
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from colonnade.errors import CheckpointError, ConfigError, StorageError
from colonnade.formats import VERSIONS
from colonnade.train.commit_header import committed_steps, resolve
from colonnade.train.export import export_run
from colonnade.train.exported import FORMAT, MODEL
from colonnade.train.wholeness import read_commit

FOLDER = "serving"
ABANDONED_SECONDS = 3600.0


def exported(path: Path, *, at: int | str | None = None) -> Path:
    """`path` itself if it is an exported model; of a run folder the export of a commit, made now if there is none.

    Raises CheckpointError where it is neither, or has no such commit.
    """
    if (path / MODEL).exists():
        if at is not None:
            raise ConfigError(
                f"{path} is an exported model and holds one commit; leave --at out, or give the run folder"
            )
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder; give a run folder or one that `colonnade export` wrote"
        )
    if not (path / "commits").is_dir():
        raise CheckpointError(
            f"{path} is neither a run folder with a commit nor an exported model; "
            "train first, or give another folder"
        )
    step = resolve(path, at)
    read_commit(path, step)  # an export made before the commit was damaged does not speak for it
    destination = path / FOLDER / _name(path, step)
    if destination.is_dir():
        return destination
    try:
        export_run(path, destination, at=step)
    except (ConfigError, StorageError):
        if not destination.is_dir():  # else another process was faster
            raise
    _drop_old(path)
    return destination


def _name(path: Path, step: int) -> str:
    """A run that went back and trained again commits the same step anew."""
    tag = (path / "commits" / f"{step:012d}.json").stat().st_mtime_ns
    return f"{step}-{tag:x}-v{VERSIONS[FORMAT]}"


def _drop_old(path: Path) -> None:
    """Exports of commits that are no more, and what killed ones left behind. Who has mapped one keeps it."""
    current = {_name(path, step) for step in committed_steps(path)}
    for place in (path / FOLDER).iterdir():
        is_left = _is_abandoned(place) if place.name.startswith(".") else place.name not in current
        if place.is_dir() and is_left:
            shutil.rmtree(place, ignore_errors=True)


def _is_abandoned(place: Path) -> bool:
    """Nobody wrote there for an hour. A process number would not tell: another host may be writing."""
    try:
        newest = max(each.stat().st_mtime for each in (place, *place.iterdir()))
    except OSError:  # it went, or changes right now
        return False
    return time.time() - newest > ABANDONED_SECONDS
