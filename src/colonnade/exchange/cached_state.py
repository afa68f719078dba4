"""What a commit holds of a rank's copies, so that a run goes on to the same bits; other worlds need none of it.

A commit is made while owners' rows have what waits at copies (`settling`), so its rows are all that was learned.
Whoever goes on in the same world puts the rows back that were changed for the moment, and takes up the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from colonnade.cache.directory import renumbered, surplus
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.flush import Before

TOGETHER = 4096  # rows that are put back at once


def state(exchange: CachedExchange, before: Sequence[Before]) -> dict[str, Any]:
    """Between steps, as of the newest one, whatever is in flight. Plain values and tensors that nobody trains on."""
    tables = {}
    directories, changes = exchange.decided()
    for t, (table, said) in enumerate(zip(exchange.declaration.tables, directories, strict=True)):
        tables[table.name] = {
            "policy": exchange.directories[t].policy,
            "kept": exchange.is_kept[t],
            "directory": {name: torch.from_numpy(values) for name, values in said.items()},
            "copies": exchange.copies.state(t, said["slots"].astype("int64")),
            "changes": torch.from_numpy(changes[t]),
            "before": {"ids": before[t].ids, "records": before[t].records},
        }
    return {"tables": tables, "rule": exchange.rule, "number": exchange.number}


def is_taken_up(exchange: CachedExchange, states: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether copies of all ranks of a world like this one go on here: bounds and sizes may have changed, not which
    tables have copies, who is worth keeping, nor whether copies outlast their batch; where sizes became less by more
    than `cache.copies.SPARE` rows there may be no room for them."""
    here = {
        table.name: (each.policy, kept)
        for table, each, kept in zip(
            exchange.declaration.tables, exchange.directories, exchange.is_kept, strict=True
        )
    }
    said = [
        # Commits of before did not say whether, and their directories not by which bounds.
        state
        and {name: (table["policy"], table.get("kept")) for name, table in state["tables"].items()}
        for state in states
    ]
    if len(states) != exchange.mesh.num_ranks or any(each != here for each in said):
        return False
    return all(_has_room(exchange, state) for state in states if state is not None)


def _has_room(exchange: CachedExchange, state: Mapping[str, Any]) -> bool:
    """For each copy where it was: what it was rounded with at random goes by its slot."""
    of_tables = (state["tables"][table.name] for table in exchange.declaration.tables)
    return all(
        np.asarray(said["directory"]["slots"]).max(initial=-1) < room
        for said, room in zip(of_tables, exchange.copies.rooms, strict=True)
    )


def load(exchange: CachedExchange, state: Mapping[str, Any]) -> None:
    """Before the first batch. The store has the rows of the commit. Bounds are those of the commit until training
    begins (`apply_planned_bounds`). Batches are counted on; from less where they would come to an end (all ranks alike:
    theirs are one number).
    """
    shift = surplus(state["number"])
    for t, table in enumerate(exchange.declaration.tables):
        said = state["tables"][table.name]
        before = Before(said["before"]["ids"], said["before"]["records"])
        trained = before.is_trained
        ids, records = before.ids[trained], before.records[trained]
        for first in range(0, len(ids), TOGETHER):
            some = slice(first, first + TOGETHER)
            exchange.store.put(t, ids[some].contiguous(), records[some].contiguous())
        exchange.store.delete(t, before.ids[~trained].contiguous())
        directory = {name: values.numpy() for name, values in said["directory"].items()}
        exchange.directories[t].load(renumbered(directory, said["policy"], shift))
        exchange.copies.load(t, directory["slots"].astype("int64"), said["copies"])
        exchange.changes.of(t)[:] = said["changes"].numpy()
    exchange.changes.renumber(shift)
    exchange.rule, exchange.number = state["rule"], state["number"] - shift
