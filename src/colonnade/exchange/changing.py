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

from colonnade.errors import ConfigError
from colonnade.exchange.cached import CachedExchange, TableCache
from colonnade.exchange.settling import GROUP, hand_over, waiting


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
    no room for, RuntimeError for a batch that was read and not stepped, BudgetExceeded as `hand_over`. A rank that does
    not come is lost, as in every call.
    """
    _agree(exchange, caches)
    _check(caches, _planned(exchange))
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


def _check(caches: Mapping[str, TableCache], planned: Mapping[str, TableCache]) -> None:
    """Raises ConfigError."""
    for name, each in caches.items():
        if name not in planned:
            raise ConfigError(
                f"copies: got table {name!r}, wanted one that the plan keeps copies of: {', '.join(planned)}"
            )
        most = planned[name]
        if (each.policy, each.window) != (most.policy, most.window):
            raise ConfigError(
                f"copies of table {name!r}: got policy {each.policy!r} with window={each.window}, wanted "
                f"{most.policy!r} with {most.window} as planned; rows and bounds may change"
            )
        for what, got, planned_for in (
            ("rows", each.rows, most.rows),
            ("a staleness of", each.clock.staleness, most.clock.staleness),
        ):
            if not 0 <= got <= planned_for:
                raise ConfigError(
                    f"copies of table {name!r}: got {what} {got}, wanted 0 .. {planned_for} as planned; open with the "
                    "largest that you need"
                )


def _agree(exchange: CachedExchange, caches: Mapping[str, TableCache]) -> None:
    """Collective. Raises ConfigError, on every rank, where one says something else."""
    mine = json.dumps({name: asdict(each) for name, each in sorted(caches.items())})
    first, *others = exchange.mesh.all_gather_bytes(GROUP, mine.encode())
    for rank, said in enumerate(others, 1):
        if said != first:
            raise ConfigError(
                f"copies: got {said.decode()} on rank {rank} and {first.decode()} on rank 0, wanted the same on every "
                "rank; nothing was changed"
            )
