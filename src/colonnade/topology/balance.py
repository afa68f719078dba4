"""Which rank, or which host, each whole table goes to: even in bytes and in lookups. Pure functions of numbers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colonnade.errors import ConfigError
from colonnade.topology.sharding import Sharding, host_wise, table_wise
from colonnade.topology.world import World

TABLES_TRIED = (
    24  # of the fullest place, and of another, to swap: those with most of what it is full of
)
PLACES_TRIED = 12  # the emptiest
WORTH = 1e-3  # of how full the fullest is: less is not looked for
ROUNDS = 4  # of improvement, by place


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLoad:
    """What a table costs the rank that has it."""

    bytes: float
    """Of its rows at rest on the rank: what memory and disk must hold."""
    lookups: float
    """Rows of it that a step's batches ask for: what fetching, sending and updating them take."""


@dataclass(frozen=True, slots=True)
class Balance:
    """places: by table, the number of the rank or host it goes to."""

    places: tuple[int, ...]
    bytes: tuple[float, ...]
    """By place."""
    lookups: tuple[float, ...]
    """By place."""

    @property
    def imbalance(self) -> float:
        """The fullest place, in bytes or in lookups, over the mean; 1 where all are alike or there is nothing."""
        shares = [np.array(values) for values in (self.bytes, self.lookups)]
        return max([1.0, *(float(each.max() / each.mean()) for each in shares if each.sum() > 0)])


def balanced(
    loads: Sequence[TableLoad],
    num_places: int,
    *,
    beside: Sequence[TableLoad] = (),
) -> Balance:
    """Each table on one of `num_places`, so that the fullest is as little full as can quickly be found.

    How full a place is: the larger of its shares of all bytes and of all lookups. Longest first onto the emptiest
    (Graham 1969: at most 4/3 of the best, were there one load), then moves and swaps away from the fullest while they
    help. Equal inputs give equal results, in any order of equal tables. `beside`: by place, what it has already.
    """
    if num_places < 1:
        raise ConfigError(f"got {num_places} places to balance tables over, wanted at least 1")
    if beside and len(beside) != num_places:
        raise ConfigError(f"got loads of {len(beside)} places, wanted {num_places}")
    weights = _weights([*loads, *beside])
    tables, before = weights[: len(loads)], weights[len(loads) :]
    full = np.zeros((num_places, 2))
    if len(before):
        full += before
    places = _longest_first(tables, full)
    _improve(tables, places, full)
    totals = np.zeros((num_places, 2))
    for place, load in zip(places, loads, strict=True):
        totals[place] += load.bytes, load.lookups
    return Balance(tuple(places), tuple(totals[:, 0].tolist()), tuple(totals[:, 1].tolist()))


def table_wise_shardings(loads: Sequence[TableLoad], world: World) -> list[Sharding]:
    """By table: the rank that has it."""
    return [table_wise(rank) for rank in balanced(loads, world.num_ranks).places]


def host_wise_shardings(loads: Sequence[TableLoad], world: World) -> list[Sharding]:
    """By table: the host whose ranks share it."""
    return [host_wise(world, host) for host in balanced(loads, world.num_hosts).places]


def _weights(loads: Sequence[TableLoad]) -> np.ndarray:
    """(T, 2): shares of all bytes and of all lookups."""
    found = np.array([(load.bytes, load.lookups) for load in loads], dtype=np.float64)
    found = found.reshape(-1, 2)
    if not np.isfinite(found).all() or (found < 0).any():
        raise ConfigError("got loads of tables below 0 or not finite, wanted bytes and lookups")
    total = found.sum(0)
    return found / np.where(total > 0, total, 1.0)


def _longest_first(tables: np.ndarray, full: np.ndarray) -> list[int]:
    """Onto the place whose larger share is least; `full` (P, 2) is filled."""
    order = np.lexsort((np.arange(len(tables)), -tables.sum(1), -tables.max(1, initial=0.0)))
    heap = [(max(row), sum(row), p) for p, row in enumerate(full.tolist())]
    heapq.heapify(heap)
    places = [0] * len(tables)
    near = min(8, len(heap))  # of the emptiest, the one that the table's two loads fit best
    for t in order.tolist():
        tried = [heapq.heappop(heap) for _ in range(near)]
        after = [(float((full[p] + tables[t]).max()), total, p) for _, total, p in tried]
        chosen = min(after)[2]
        full[chosen] += tables[t]
        places[t] = chosen
        for peak, total, p in tried:
            if p == chosen:
                peak, total = float(full[p].max()), float(full[p].sum())
            heapq.heappush(heap, (peak, total, p))
    return places


def _improve(tables: np.ndarray, places: list[int], full: np.ndarray) -> None:
    """Move a table of the fullest place, or swap it for another's, while that place and the other end below it."""
    members: list[list[int]] = [[] for _ in full]
    for t, place in enumerate(places):
        members[place].append(t)
    for _ in range(ROUNDS * len(full)):
        worst = int(full.max(1).argmax())
        peak, axis = float(full[worst].max()), int(full[worst].argmax())
        mine = sorted(members[worst], key=lambda t: -tables[t][axis])[:TABLES_TRIED]
        best: tuple[float, int, int, int] | None = (
            None  # peak after, my table, place, its table or -1
        )
        targets = np.argsort(full.max(1), kind="stable")[:PLACES_TRIED].tolist()
        for other in (p for p in targets if p != worst):
            theirs = sorted(members[other], key=lambda t: -tables[t][axis])[:TABLES_TRIED]
            given = tables[mine][:, None] - np.concatenate([np.zeros((1, 2)), tables[theirs]])[None]
            after = np.maximum(
                (full[worst] - given).max(2, initial=0.0), (full[other] + given).max(2, initial=0.0)
            )
            if not after.size:
                continue
            at = int(after.argmin())
            value = float(after.flat[at])
            if value < peak * (1 - WORTH) and (best is None or value < best[0]):
                i, j = divmod(at, after.shape[1])
                best = (value, mine[i], other, theirs[j - 1] if j else -1)
        if best is None:
            return
        _, given_away, other, taken = best
        for t, source, target in ((given_away, worst, other), (taken, other, worst)):
            if t >= 0:
                members[source].remove(t)
                members[target].append(t)
                full[source] -= tables[t]
                full[target] += tables[t]
                places[t] = target
