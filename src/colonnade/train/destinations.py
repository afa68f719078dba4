"""Where a run's commits go beside its folder: a mirror for machines that come and go, a publication for predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from colonnade.config import TrainConfig
from colonnade.errors import ColonnadeError
from colonnade.store.disk import Disk
from colonnade.train.carriage import carry, check_target, is_url, place_of
from colonnade.train.commits import Commits
from colonnade.train.mirror import Mirror
from colonnade.train.publication import Publication, check_owner, read_word

PUBLISHED = "published"
"""In the run folder: what is carried to a URL."""


class Destination(Protocol):
    """Rank 0 has it; its commit thread calls it, training thread opens and closes it."""

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        """The commit of `step`, the newest of those `kept`, is there: take it. Says what fails, raises nothing."""
        ...

    def close(self) -> None:
        """Raises StorageError if the newest commit was not taken."""
        ...


@dataclass
class Carried:
    """Rank 0's publication at a URL: one in the run folder, and its copy there after each commit."""

    here: Publication
    url: str

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        self.here.send(step, kept, say)
        if self.here.problem is not None:
            return
        try:
            carry(place_of(self.here.folder), place_of(self.url))
        except (ColonnadeError, OSError) as error:
            self.here.problem = error
            say(f"{error}. Training goes on; the next commit makes it up")

    def close(self) -> None:
        self.here.close()


def open_destinations(
    config: TrainConfig, folder: Path, commits: Commits, step: int | None, disk: Disk
) -> list[Destination]:
    """Every rank; only rank 0 gets any. A commit that was made and not published, because the run was killed between
    the two, is published now. Raises ConfigError for a publication that is another run's."""
    at_url = config.publish is not None and is_url(config.publish)
    publishes = None if config.publish is None else Path(config.publish)
    publishes = folder / PUBLISHED if at_url else publishes
    if publishes is not None and (word := read_word(publishes)) is not None:
        check_owner(publishes, word, commits.run)
    if at_url:
        check_target(str(config.publish), commits.run)
    if commits.mesh.rank:
        return []
    found: list[Destination] = []
    if config.mirror is not None:
        found.append(Mirror(folder, config.mirror))
    if publishes is not None:
        published = Publication(folder, publishes, disk, only_best=config.publish_at == "best")
        found.append(Carried(published, str(config.publish)) if at_url else published)
        if step is not None:
            found[-1].send(step, [step], print)
    return found
