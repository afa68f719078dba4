"""Which consumers their fields' owners evaluate: the cut between rows and model across which the fewest floats travel.

A consumer's partial costs its width from every rank that has some of its fields; a field whose values travel costs its
dim from every rank that has rows of it, and is then free for all others that take it (DES, Rong et al. 2020, section 3;
the cut is the minimum over all sets of consumers). Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from colonnade.exchange.layout import Declaration
from colonnade.topology.sharding import Sharding

MOST_CONSUMERS = 12
"""Of those that have partials: beyond, sets are not tried one by one but grown."""


def substituted(declaration: Declaration, shardings: Sequence[Sharding]) -> tuple[str, ...]:
    """Names of consumers, as declared, whose partials travel instead of their fields' values. Of sets as good, the
    smallest: partials that save nothing are not made."""
    able = [name for name in declaration.consumers if partial_width(declaration, name) is not None]
    best: tuple[str, ...] = ()
    least = floats(declaration, shardings, best)
    for some in sets(able, lambda some: floats(declaration, shardings, some)):
        found = floats(declaration, shardings, some)
        if found < least:
            best, least = some, found
    return best


def partial_width(declaration: Declaration, name: str) -> int | None:
    """P of a consumer; None: it has no partial that adds up."""
    consumer = declaration.consumers[name]
    dims = {field.dim for field in declaration.fields if field.name in consumer.features}
    if not dims or consumer.interaction.merge != "sum":
        return None
    return consumer.interaction.width(max(dims))


def floats(
    declaration: Declaration, shardings: Sequence[Sharding], consumers: Collection[str]
) -> int:
    """Per sample, from all owners to its rank, where those consumers' partials travel and every other consumer's
    values do; its own rank counts as any."""
    owners = owners_by_field(declaration, shardings)
    taken = {name for consumer in declaration.consumers.values() for name in consumer.features}
    needed = {field.name for field in declaration.fields if field.name not in taken}
    total = 0
    for name, consumer in declaration.consumers.items():
        if name in consumers:
            ranks = set().union(*(owners[field] for field in consumer.features))
            total += len(ranks) * (partial_width(declaration, name) or 0)
        else:
            needed |= set(consumer.features)
    return total + sum(
        len(owners[field.name]) * field.dim for field in declaration.fields if field.name in needed
    )


def owners_by_field(
    declaration: Declaration, shardings: Sequence[Sharding]
) -> Mapping[str, frozenset[int]]:
    """Ranks that have rows of a field's table."""
    tables = [declaration.table_of(feature) for feature in declaration.features]
    return {
        field.name: frozenset(shardings[tables[field.feature]].ranks)
        for field in declaration.fields
    }


def sets(names: Sequence[str], cost) -> Iterable[tuple[str, ...]]:
    if len(names) <= MOST_CONSUMERS:
        for size in range(1, len(names) + 1):
            yield from combinations(names, size)
        return
    some: tuple[str, ...] = ()
    while len(some) < len(names):
        some = min(
            (tuple(n for n in names if n in {*some, new}) for new in names if new not in some),
            key=cost,
        )
        yield some
