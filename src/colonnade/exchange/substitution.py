"""Which consumers their fields' owners evaluate: the cut between rows and model across which the fewest floats travel.

A consumer's partial costs its width from every rank that has some of its fields; a field whose values travel costs its
dim from every rank that has rows of it, and is then free for all others that take it (DES, Rong et al. 2020, section 3;
the cut is the minimum over all sets of consumers). Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from colonnade.exchange.layout import Declaration
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World

MOST_CONSUMERS = 12
"""Of those that have partials: beyond, sets are not tried one by one but grown."""


def substituted(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    *,
    world: World | None = None,
    reads_ahead: int = 0,
    bags: Collection[str] = (),
    exchanges: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Names of consumers, as declared, whose partials travel instead of their fields' values. Of sets as good, the
    smallest: partials that save nothing are not made. world: None, several ranks without servers. reads_ahead: steps
    between reading a row and its use. bags: features known to have several ids a sample; `SubstituteExchange`, which
    does not know, looks at each batch. exchanges: by table, where some are not `substitute`."""
    barred = bars(
        declaration, shardings, world=world, reads_ahead=reads_ahead, bags=bags, exchanges=exchanges
    )
    able = [name for name in declaration.consumers if name not in barred]
    best: tuple[str, ...] = ()
    least = floats(declaration, shardings, best)
    for some in sets(able, lambda some: floats(declaration, shardings, some)):
        found = floats(declaration, shardings, some)
        if found < least:
            best, least = some, found
    return best


def reasons(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    *,
    world: World | None = None,
    reads_ahead: int = 0,
    bags: Collection[str] = (),
    exchanges: Sequence[str] | None = None,
) -> dict[str, str]:
    """By consumer that is not evaluated at the owners of its fields: why, in words. As `substituted`."""
    given: dict[str, Any] = {
        "world": world, "reads_ahead": reads_ahead, "bags": bags, "exchanges": exchanges,
    }  # fmt: skip
    barred = bars(declaration, shardings, **given)
    chosen = substituted(declaration, shardings, **given)
    owners = owners_by_field(declaration, shardings)
    dims = {field.name: field.dim for field in declaration.fields}
    found = {}
    for name, consumer in declaration.consumers.items():
        if name in barred:
            found[name] = barred[name]
        elif name not in chosen:
            travels = _values(declaration, {*chosen, name})
            others = {field for field in consumer.features if field not in travels}
            if not others:
                found[name] = "the values of its fields travel anyway, for another consumer"
                continue
            values = sum(len(owners[field]) * dims[field] for field in others)
            partials = _width(declaration, name, owners)
            found[name] = (
                f"its partials would be {partials} floats a sample, the values that they would save {values}"
            )
    return found


def bars(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    *,
    world: World | None = None,
    reads_ahead: int = 0,
    bags: Collection[str] = (),
    exchanges: Sequence[str] | None = None,
) -> dict[str, str]:
    """By consumer that owners cannot evaluate, whatever it would save: why, in words. As `substituted`."""
    if cut := [
        t.name for t, each in zip(declaration.tables, shardings, strict=True) if each.slices > 1
    ]:
        words = f"rows of table {cut[0]!r} are cut by columns, so values are put together where the samples are"
        return dict.fromkeys(declaration.consumers, words)
    found = {}
    for name in declaration.consumers:
        why = _other_exchange(declaration, name, exchanges) or _of_operator(declaration, name)
        why = why or _split_bags(declaration, name, shardings, bags)
        if why := why or _weights(declaration, name, shardings, world, reads_ahead):
            found[name] = why
    return found


def _other_exchange(
    declaration: Declaration, name: str, exchanges: Sequence[str] | None
) -> str | None:
    if exchanges is None:
        return None
    for field in declaration.fields:
        t, _ = declaration.parts[field.part]
        if field.name in declaration.consumers[name].features and exchanges[t] != "substitute":
            return f"its field {field.name!r} comes by exchange {exchanges[t]}"
    return None


def _of_operator(declaration: Declaration, name: str) -> str | None:
    if partial_width(declaration, name) is not None:
        return None
    interaction = declaration.consumers[name].interaction
    kind = type(interaction).__name__
    if interaction.merge != "sum":
        return f"partials of {kind} do not add up"
    return f"nothing smaller than its fields' values stands for them in {kind}"


def _split_bags(
    declaration: Declaration, name: str, shardings: Sequence[Sharding], bags: Collection[str]
) -> str | None:
    consumer = declaration.consumers[name]
    if consumer.interaction.needs() == "rows":
        return None
    for field in declaration.fields:
        feature = declaration.features[field.feature]
        num_owners = len(shardings[declaration.parts[field.part][0]].ranks)
        if field.name in consumer.features and feature.name in bags and num_owners > 1:
            return (
                f"it needs whole bags, and rows of table {feature.table!r}, of which feature {feature.name!r} "
                f"has bags, lie on {num_owners} ranks"
            )
    return None


def _weights(
    declaration: Declaration,
    name: str,
    shardings: Sequence[Sharding],
    world: World | None,
    reads_ahead: int,
) -> str | None:
    consumer = declaration.consumers[name]
    if not any(True for _ in consumer.interaction.parameters()):
        return None
    if reads_ahead:
        return f"owners would evaluate it {reads_ahead} steps early, and its weights are dense, which are never stale"
    if world is None:
        return None
    if world.num_ranks == 1:
        return "nothing travels on one rank"
    owners = owners_by_field(declaration, shardings)
    if servers := {r for field in consumer.features for r in owners[field]} & {*world.servers}:
        return f"rank {min(servers)} is a server, which has none of its weights"
    return None


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
    values = _values(declaration, consumers)
    return sum(_width(declaration, name, owners) for name in consumers) + sum(
        len(owners[field.name]) * field.dim for field in declaration.fields if field.name in values
    )


def _values(declaration: Declaration, consumers: Collection[str]) -> set[str]:
    """Fields whose values travel where those consumers' partials do."""
    given = declaration.consumers.items()
    taken = {name for _, consumer in given for name in consumer.features}
    alone = {field.name for field in declaration.fields if field.name not in taken}
    return alone.union(*(consumer.features for name, consumer in given if name not in consumers))


def _width(declaration: Declaration, name: str, owners: Mapping[str, frozenset[int]]) -> int:
    """Floats per sample of a consumer's partials, from all ranks that have some of its fields."""
    ranks = set().union(*(owners[field] for field in declaration.consumers[name].features))
    return len(ranks) * (partial_width(declaration, name) or 0)


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
