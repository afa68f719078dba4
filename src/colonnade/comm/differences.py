"""Differences between facts that all ranks should share, as text that names the ranks. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN = 3  # differences in one message; the others are counted
MAX_RUNS = 8  # runs of consecutive ranks in one message; the other ranks are counted
ABSENT = "nothing"


def find_disagreements(facts_by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one text for each fact that differs between ranks 0, 1, ..., in the order of the facts.

    No value is taken as the right one; a text lists the values with the fewest ranks first."""
    texts = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            value = json.dumps(facts[name], default=str) if name in facts else ABSENT
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            rarest_first = sorted(ranks_by_value.items(), key=lambda item: len(item[1]))
            texts.append(
                ", ".join(
                    _format_rank_value(name, *item, i == 0) for i, item in enumerate(rarest_first)
                )
            )
    return texts


def format_differences(differences: Sequence[str]) -> str:
    """Join the first differences into one text, and count the others."""
    more = len(differences) - MAX_SHOWN
    suffix = f" (and {more} more)" if more > 0 else ""
    return f"ranks disagree: {'; '.join(differences[:MAX_SHOWN])}{suffix}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for messages: [2] as "rank 2", [0, 1, 3] as "ranks 0, 1, 3", longer runs as "0-62"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs[:MAX_RUNS]
    ]
    more = sum(map(len, runs[MAX_RUNS:]))
    text = ", ".join(parts) + (f" and {more} more" if more else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _format_rank_value(
    fact_name: str, fact_value: str, ranks: Sequence[int], is_first: bool
) -> str:
    """Return "rank 2 has name=value"; the name only in the first text of a fact."""
    if fact_value == ABSENT:
        fact_value = f"no {fact_name}" if is_first else "none"
    elif is_first:
        fact_value = f"{fact_name}={fact_value}"
    return f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {fact_value}"
