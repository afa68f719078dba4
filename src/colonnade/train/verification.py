"""Every byte of a run's commit, compared with what its checksums say; nothing needs to be known of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from colonnade.store.verification import Verified, verify_durable, verify_file, verify_store
from colonnade.train.commits import read_header
from colonnade.train.states import load_state
from colonnade.train.stores import homes


def verify_commit(folder: Path, step: int, places: Sequence[Path] = ()) -> Iterator[Verified]:
    """Files as they are read: the commit's word, each rank's state, the dense network, then every rank's rows.

    places: where directories of `plan.memory.ssd` lie now, if they moved. Raises CheckpointError, CorruptionError
    where the word of the commit itself cannot be read, which names all others.
    """
    header = read_header(folder, step)
    yield verify_durable(folder / "commits" / f"{step:012d}.json")
    num_ranks, state = header["num_ranks"], folder / "commits" / f"{step:012d}"
    states = [state / "dense", *(state / f"rank-{rank}" for rank in range(num_ranks))]
    for path in [*states, *sorted(state.glob("retention-*[0-9]"))]:
        yield verify_file(path, partial(load_state, path, header["run"]))
    for each in homes(header):
        moved = [place / f"colonnade-{header['run']}" / each.path for place in places]
        yield from verify_store(folder / "rows" / each.path, step, table=each.table, places=moved)
