"""When commits are due by the clock: rank 0's, heard by all ranks at a few steps of each interval."""

from __future__ import annotations

import time

import torch

from colonnade.topology.mesh import Mesh


class CommitClock:
    """Every rank has one and asks it after each step. A word between ranks costs a hop, so rank 0 also says after how
    many steps it is to be asked again: half of those that it expects until the commit is due."""

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        """seconds: between commits; 0: never due."""
        self.mesh, self.seconds = mesh, seconds
        self._began = time.monotonic()
        self._asked = self._began
        self._left = self._every = 1  # steps until the next word; between the last two words

    def is_due(self, is_busy: bool) -> bool:
        """Collective, once a step, but for most steps without a word. `is_busy`: the commit before is being written, so
        another one would make training wait."""
        if not self.seconds:
            return False
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        pace = (now - self._asked) / self._every
        due, steps = word(now - self._began, pace, self.seconds, is_busy)
        said = self.mesh.broadcast("control", torch.tensor([due, steps])).tolist()
        self._asked, self._left, self._every = now, said[1], said[1]
        if said[0]:
            self._began = now
        return bool(said[0])

    def restart(self) -> None:
        """A commit begins, for whatever reason."""
        self._began = time.monotonic()


def word(since: float, pace: float, seconds: float, is_busy: bool = False) -> tuple[int, int]:
    """Whether a commit is due, `since` seconds after the one before, and in how many steps to ask again, at `pace`
    seconds a step. Pure."""
    is_due = since >= seconds and not is_busy
    left = seconds if is_due else max(seconds - since, seconds / 8)
    return int(is_due), max(1, min(1 << 20, int(left / 2 / max(pace, 1e-6))))
