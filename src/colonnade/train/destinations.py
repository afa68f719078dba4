"""Where a run's commits go beside its folder: a mirror for machines that come and go, a publication for predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from colonnade.config import TrainConfig
from colonnade.store.disk import Disk
from colonnade.train.commits import Commits
from colonnade.train.mirror import Mirror
from colonnade.train.publication import Publication, check_owner, read_word


class Destination(Protocol):
    """Rank 0 has it; its commit thread calls it, training thread opens and closes it."""

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        """The commit of `step`, the newest of those `kept`, is there: take it. Says what fails, raises nothing."""
        ...

    def close(self) -> None:
        """Raises StorageError if the newest commit was not taken."""
        ...


def open_destinations(
    config: TrainConfig, folder: Path, commits: Commits, step: int | None, disk: Disk
) -> list[Destination]:
    """Every rank; only rank 0 gets any. A commit that was made and not published, because the run was killed between
    the two, is published now. Raises ConfigError for a publication that is another run's."""
    publishes = None if config.publish is None else Path(config.publish)
    if publishes is not None and (word := read_word(publishes)) is not None:
        check_owner(publishes, word, commits.run)
    if commits.mesh.rank:
        return []
    found: list[Destination] = []
    if config.mirror is not None:
        found.append(Mirror(folder, config.mirror))
    if publishes is not None:
        found.append(Publication(folder, publishes, disk))
        if step is not None:
            found[-1].send(step, [step], print)
    return found
