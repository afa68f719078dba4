"""What several verbs read alike."""

from __future__ import annotations

from colonnade.errors import ConfigError


def step_asked(at: str | None) -> int | str | None:
    """ "2000" -> 2000; "best", "last" and None as they are. Raises ConfigError."""
    if at is None or at in ("best", "last"):
        return at
    if at.isdecimal() and at.isascii():
        return int(at)
    raise ConfigError(f"--at got {at!r}, wanted a committed step, best or last")
