"""Bounds and sizes of copies that change between two steps: no read after it is older than the new bounds.

What is decided of batches ahead is undone first, so the change comes with the next batch, however deep the lookahead.
Then what waits at copies beyond the new write bounds is handed over to its owners, and directories go on by the new
numbers: copies that are too old for them are asked for at their next use, and those without room leave with the next
step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from operator import index
from typing import SupportsIndex

from colonnade.consistency.row_clock import RowClock
from colonnade.errors import ConfigError
from colonnade.exchange.cached import CachedExchange, TableCache
from colonnade.exchange.settling import GROUP, hand_over, waiting

REFUSED = "refused"
"""What a rank says that will raise."""


def capped(exchange: CachedExchange, staleness: int | None) -> dict[str, TableCache]:
    """By table, its copies as planned, with bounds of at most `staleness` batches together; None: as planned."""
    return {
        name: each if staleness is None else replace(each, clock=each.clock.at_most(staleness))
        for name, each in _planned(exchange).items()
    }


def change(
    exchange: CachedExchange, caches: Mapping[str, TableCache], undo: Callable[[], None]
) -> None:
    """Collective, between two steps. caches: by name, tables whose rows or bounds are others from here on. undo: drops
    every batch that is prepared.

    Raises on every rank, with nothing changed, ConfigError where ranks say different things and for what the plan has
    no room for, RuntimeError for a batch that was read and not stepped and while rows are settled, BudgetExceeded as
    `hand_over`. A rank that does not come is lost, as in every call.
    """
    caches = _agreed(exchange, caches)
    if exchange.is_settled:
        raise RuntimeError(
            "got other bounds or sizes of copies inside `with rows.settled()`, after which rows are what they were; "
            "change them before or after it"
        )
    undo()
    directories, tables = exchange.directories, exchange.declaration.tables
    if directories[0].number != exchange.number:
        raise RuntimeError(
            "got other bounds or sizes of copies while a batch was read and not stepped; change them between "
            "RowOptimizer.step() and the next batch"
        )
    clocks = [
        (each.clock.read_bound, each.clock.write_bound)
        if (each := caches.get(table.name)) is not None
        else (directory.read_bound, directory.write_bound)
        for table, directory in zip(tables, directories, strict=True)
    ]
    chosen = waiting(exchange, [write_bound for _, write_bound in clocks])
    num_rows = sum(map(len, chosen))
    if any(int(said) for said in exchange.mesh.all_gather_bytes(GROUP, b"%d" % num_rows)):
        hand_over(exchange, chosen)
    for table, directory, bounds in zip(tables, directories, clocks, strict=True):
        exchange.counts.ticks += int(directory.flush(bounds[1]).ticks.sum())
        directory.set_bounds(*bounds)
        if table.name in caches:
            directory.resize(caches[table.name].rows)
    exchange.counts.pushed_full += num_rows


def _planned(exchange: CachedExchange) -> dict[str, TableCache]:
    """By name."""
    return {
        table.name: each
        for table, each, has_copies in zip(
            exchange.declaration.tables, exchange.caches, exchange.has_copies, strict=True
        )
        if has_copies
    }


def _checked(
    caches: Mapping[str, TableCache], planned: Mapping[str, TableCache]
) -> dict[str, TableCache]:
    """Numbers as Python has them. Raises ConfigError."""
    if not isinstance(caches, Mapping):
        raise ConfigError(f"copies: got {caches!r}, wanted a TableCache by the table's name")
    found = {}
    for name, each in caches.items():
        if name not in planned:
            raise ConfigError(
                f"copies: got table {name!r}, wanted one that the plan keeps copies of: {', '.join(planned)}"
            )
        if not isinstance(each, TableCache) or not isinstance(each.clock, RowClock):
            raise ConfigError(
                f"copies of table {name!r}: got {each!r}, wanted a TableCache(rows, RowClock(read_bound, write_bound))"
            )
        most = planned[name]
        if (each.policy, each.window) != (most.policy, most.window):
            raise ConfigError(
                f"copies of table {name!r}: got policy {each.policy!r} with window={each.window}, wanted "
                f"{most.policy!r} with {most.window} as planned; rows and bounds may change"
            )
        if not isinstance(each.rows, SupportsIndex) or isinstance(each.rows, bool):
            raise ConfigError(f"copies of table {name!r}: got rows={each.rows!r}, wanted a number")
        found[name] = replace(each, rows=index(each.rows))
        for what, got, planned_for in (
            ("rows", found[name].rows, most.rows),
            ("a staleness of", each.clock.staleness, most.clock.staleness),
        ):
            if not 0 <= got <= planned_for:
                raise ConfigError(
                    f"copies of table {name!r}: got {what} {got}, wanted 0 .. {planned_for} as planned; open with the "
                    "largest that you need"
                )
    return found


def _agreed(exchange: CachedExchange, caches: Mapping[str, TableCache]) -> Mapping[str, TableCache]:
    """Collective: `_checked`. Raises ConfigError, on every rank, where one refuses or says something else."""
    error, mine = None, REFUSED
    try:
        caches = _checked(caches, _planned(exchange))
        mine = json.dumps({name: asdict(each) for name, each in sorted(caches.items())})
    except ConfigError as found:
        error = found
    heard = [said.decode() for said in exchange.mesh.all_gather_bytes(GROUP, mine.encode())]
    if error is not None:
        raise error
    for rank, said in enumerate(heard):
        if said != heard[0] or said == REFUSED:
            words = "what it refused" if said == REFUSED else said
            first = "what it refused" if heard[0] == REFUSED else heard[0]
            raise ConfigError(
                f"copies: got {words} on rank {rank} and {first} on rank 0, wanted the same on every rank; nothing was "
                "changed"
            )
    return caches
