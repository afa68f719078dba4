"""Every byte of a run's commit, compared with what its checksums say; nothing needs to be known of the model.

State files are not parsed, nor torch imported: that a file is the one committed there, its checksum in the header says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from colonnade.store.verification import Verified, verify_durable, verify_store
from colonnade.train.commit_header import header_path, read_header, state_folder
from colonnade.train.wholeness import find_problems


def verify_commit(folder: Path, step: int, places: Sequence[Path] = ()) -> Iterator[Verified]:
    """Files as they are read: the commit's header, each rank's state, the dense network, then every rank's rows; last,
    what is whole by itself and not this commit's.

    places: where directories of `plan.memory.ssd` lie now, if they moved. Raises CheckpointError, CorruptionError
    where the header of the commit itself cannot be read, which names all others.
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
