"""Where ranks that should be alike differ, in words: who has what. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 3  # differences in one message; the others are counted
LISTED = 8  # runs of ranks in one message; the others are counted
ABSENT = "nothing"


def disagreements(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the facts of ranks 0, 1, ... differ in, one text for each, in the order in which they are said. Nobody's
    are right; those that fewest have come first."""
    found = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            value = json.dumps(facts[name], default=str) if name in facts else ABSENT
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            few = sorted(ranks.items(), key=lambda item: len(item[1]))
            found.append(", ".join(_said(name, *item, i == 0) for i, item in enumerate(few)))
    return found


def joined(found: Sequence[str]) -> str:
    left = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return f"ranks disagree: {'; '.join(found[:SHOWN])}{left}"


def rank_words(ranks: Sequence[int]) -> str:
    """[2] -> "rank 2"; [0, 1, 3] -> "ranks 0, 1, 3"; longer runs as "0-62"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:LISTED]
    ]
    more = sum(map(len, runs[LISTED:]))
    text = ", ".join(parts) + (f" and {more} more" if more else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _said(name: str, value: str, ranks: Sequence[int], first: bool) -> str:
    if value == ABSENT:
        value = f"no {name}" if first else "none"
    elif first:
        value = f"{name}={value}"
    return f"{rank_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
