"""Which fields lie in one tower, which consumers are evaluated there, and why others are not. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from colonnade.exchange.layout import Declaration
from colonnade.exchange.substitution import result_width, sets, values_needed
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import tower_ranks
from colonnade.topology.world import World

BY_TOWERS: tuple[Literal["towers", "tower_rows"], ...] = ("towers", "tower_rows")
"""Exchanges of which values of samples cross between towers alone."""


def tower_of(sharding: Sharding, towers: Sequence[Sequence[int]]) -> int | None:
    """The tower that has all rows of it; None: no single one has."""
    size = len(towers[0])
    first, last = sharding.ranks[0] // size, sharding.ranks[-1] // size
    return first if first == last else None


def towers_of_fields(
    declaration: Declaration, shardings: Sequence[Sharding], towers: Sequence[Sequence[int]]
) -> tuple[int | None, ...]:
    """By field: the tower that has all rows of its table. `shardings`: by table."""
    by_table = [tower_of(sharding, towers) for sharding in shardings]
    return tuple(by_table[declaration.parts[field.part][0]] for field in declaration.fields)


def evaluated_in_towers(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    world: World,
    *,
    num_towers: int,
    reads_ahead: int = 0,
) -> tuple[str, ...]:
    """Names of consumers, as declared, that are evaluated inside a tower, so that the fewest floats leave it; of sets
    as good, the smallest. reads_ahead: steps between reading a row and its use."""
    able = [
        name
        for name in declaration.consumers
        if not barred_in_towers(
            declaration, name, shardings, world, num_towers=num_towers, reads_ahead=reads_ahead
        )
    ]
    best: tuple[str, ...] = ()
    least = tower_floats(declaration, best)
    for some in sets(able, lambda some: tower_floats(declaration, some)):
        if (found := tower_floats(declaration, some)) < least:
            best, least = some, found
    return best


def barred_in_towers(
    declaration: Declaration,
    name: str,
    shardings: Sequence[Sharding],
    world: World,
    *,
    num_towers: int,
    reads_ahead: int = 0,
) -> str | None:
    """Why a consumer cannot be evaluated inside a tower, whatever it would save; None: it can."""
    if why := never_in_towers(declaration, name, world, reads_ahead=reads_ahead):
        return why
    consumer = declaration.consumers[name]
    of_field = dict(
        zip(
            [field.name for field in declaration.fields],
            towers_of_fields(declaration, shardings, tower_ranks(world, num_towers)),
            strict=True,
        )
    )
    for field in consumer.features:
        if of_field[field] is None:
            return f"rows of {field} do not all lie in one tower"
    if reads_ahead and (beside := [each for each, tower in of_field.items() if tower is None]):
        return f"rows are read ahead, and those of {beside[0]} do not all lie in one tower"
    first, *others = consumer.features
    for field in others:
        if of_field[field] != of_field[first]:
            return f"{first} is in tower {of_field[first]}, {field} in tower {of_field[field]}"
    return None


def never_in_towers(
    declaration: Declaration, name: str, world: World | None = None, *, reads_ahead: int = 0
) -> str | None:
    """The same, wherever its tables lie. world: None, several ranks without servers."""
    consumer = declaration.consumers[name]
    if result_width(declaration, name) is None:
        kind = type(consumer.interaction).__name__
        return f"nothing smaller than its fields' values stands for them in {kind}"
    if world is not None and world.num_ranks == 1:
        return "nothing travels on one rank"
    width, floats = result_width(declaration, name), fields_width(declaration, name)
    if reads_ahead and 2 * (width or 0) > floats:
        return (
            f"rows are read ahead, and what is made of them inside a tower leaves it in the step that uses it: {width} "
            f"floats, more than half of the {floats} that would have come before, while others compute"
        )
    if world is not None and world.has_servers:
        return "rows lie on servers, which have none of its weights"
    return None


def fields_width(declaration: Declaration, name: str) -> int:
    """Floats of a sample that a consumer takes."""
    taken = set(declaration.consumers[name].features)
    return sum(field.dim for field in declaration.fields if field.name in taken)


def tower_floats(declaration: Declaration, consumers: Collection[str]) -> int:
    """Per sample, of all towers: what leaves them where those consumers are evaluated inside."""
    values = values_needed(declaration, consumers)
    return sum(result_width(declaration, name) or 0 for name in consumers) + sum(
        field.dim for field in declaration.fields if field.name in values
    )
