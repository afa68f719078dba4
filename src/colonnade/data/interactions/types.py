"""Types of feedback: the setting `data.options.types`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colonnade.errors import ConfigError

MAX_TYPES = 100


def read_types(setting: Sequence[Any] | None) -> list[list[str]]:
    """Return the events of each type, the strongest type first; [] without the setting. Raises ConfigError."""
    if setting is None:
        return []
    if isinstance(setting, str) or not 2 <= len(setting) <= MAX_TYPES:
        raise ConfigError(
            f"types: got {setting!r}, wanted a list of 2 to {MAX_TYPES} types of feedback, the strongest first, as in "
            "[purchase, cart, click]. For one type, set data.options.events instead"
        )
    types = [
        [*map(str, entry)] if isinstance(entry, list | tuple) else [str(entry)] for entry in setting
    ]
    events = [event for group in types for event in group]
    if not all(types) or len({*events}) < len(events):
        raise ConfigError(
            f"types: got {setting!r}, wanted at least one event in each type, and no event twice. Repair the list"
        )
    return types


def name_types(setting: Sequence[Any] | None) -> tuple[str, ...]:
    """Return a name for each type: its events, joined by `+`."""
    return tuple("+".join(events) for events in read_types(setting))
