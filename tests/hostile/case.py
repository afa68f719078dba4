"""A hostile case: small files, a command line, and words its one error line must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    name: str
    command: tuple[str, ...]
    words: tuple[str, ...]
    """All of them stand in the error line."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by path under the folder in which the command runs."""
    may_leave: tuple[str, ...] = ()
    """Paths that may exist afterwards besides `files`: a run that had begun before the fault was read."""


def train(data: str, path: str | None, *settings: str, run: str = "run") -> tuple[str, ...]:
    """A small training run over `path`."""
    place = ("--path", path) if path else ()
    pairs = [part for setting in settings for part in ("--set", setting)]
    return ("train", "--data", data, *place, "--run", run, *pairs)
