"""Cut between rows and model: which consumers are evaluated at the owners of their fields or in towers, so that the
fewest floats are sent.

A consumer's partial costs its width from every rank that has some of its fields. A field that is sent costs its dim
from every rank that has rows of it, and is then free for all other consumers (DES, Rong et al. 2020, section 3; the cut
is the minimum over all sets of consumers). Rows of a sequence are not sent: its consumer is evaluated where the rows
are, or not under this exchange. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from colonnade.hops.kinds import EVALUATING
from colonnade.interaction import Concat
from colonnade.interaction.contract import SQUARES
from colonnade.lookup.layout import Consumer, EmbeddingDeclaration, query_fields, restrict_outputs
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import list_tower_ranks, tower_of
from colonnade.topology.world import World

MOST_CONSUMERS = 12
"""Largest number of consumers with partials to try all sets of; of more, sets are grown greedily."""


def choose_remote_consumers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    *,
    world: World | None = None,
    reads_ahead: int = 0,
) -> tuple[str, ...]:
    """Return the names of consumers, as declared, to send partials of instead of their fields' values. Of equally good
    sets this is the smallest: no partial is sent that saves nothing. world: None, several ranks without servers.
    reads_ahead: steps between reading a row and its use."""
    candidates = [
        name
        for name in declaration.consumers
        if explain_not_remote(declaration, name, world=world, reads_ahead=reads_ahead) is None
    ]
    # Rows of a sequence are not sent as a sample's values are: their consumers are evaluated where the rows are.
    required = tuple(
        name for name in candidates if declaration.consumers[name].interaction.sequences
    )
    best = required
    others = [name for name in candidates if name not in required]
    least = count_sent_floats(declaration, shardings, best)
    for subset in propose_consumer_sets(
        others, lambda subset: count_sent_floats(declaration, shardings, (*required, *subset))
    ):
        selected = tuple(name for name in candidates if name in required or name in subset)
        num_floats = count_sent_floats(declaration, shardings, selected)
        if num_floats < least:
            best = selected
            least = num_floats
    return best


def explain_not_remote(
    declaration: EmbeddingDeclaration,
    consumer_name: str,
    *,
    world: World | None = None,
    reads_ahead: int = 0,
) -> str | None:
    """Return why owners cannot evaluate a consumer, wherever its tables are and whatever it would save; None: they
    can."""
    interaction = declaration.consumers[consumer_name].interaction
    if get_partial_width(declaration, consumer_name) is None:
        kind = type(interaction).__name__
        if interaction.merge == "whole":
            return f"{kind} needs all fields of a sample on one rank"
        return f"{kind} has no result that is smaller than its fields' values"
    if interaction.sequences and reads_ahead:
        return (
            "its queries are read before its rows, in a round of their own, and rows are read ahead"
        )
    if not any(True for _ in interaction.parameters()):
        return None
    if reads_ahead:
        return "its weights are dense, which are never stale, and rows are read ahead"
    if world is not None and world.num_ranks == 1:
        return "nothing is sent on one rank"
    if world is not None and world.has_servers:
        return "owners are servers, which have none of its weights"
    return None


def get_partial_width(declaration: EmbeddingDeclaration, consumer_name: str) -> int | None:
    """Return the width P of a consumer's partial; None: it has no partial that can be merged."""
    if declaration.consumers[consumer_name].interaction.merge == "whole":
        return None
    return get_result_width(declaration, consumer_name)


def get_result_width(declaration: EmbeddingDeclaration, consumer_name: str) -> int | None:
    """Return the width P of the result of a consumer on all its fields; None: no result can replace their values."""
    consumer = declaration.consumers[consumer_name]
    dims = {field.dim for field in declaration.fields if field.name in consumer.features}
    return consumer.interaction.width(max(dims)) if dims else None


def list_whole_fields(declaration: EmbeddingDeclaration, consumer_name: str) -> frozenset[str]:
    """Return the fields of a consumer that must be pooled on one rank before owners evaluate it: all if it needs pooled
    fields, except those with squares and these."""
    consumer = declaration.consumers[consumer_name]
    if not consumer.interaction.needs_pooled_fields():
        return frozenset()
    squared = {field.name for field in declaration.fields if field.is_squared}
    return frozenset(
        name
        for name in consumer.features
        if name not in squared and name + SQUARES not in squared.intersection(consumer.features)
    )


def count_sent_floats(
    declaration: EmbeddingDeclaration, shardings: Sequence[Sharding], consumers: Collection[str]
) -> int:
    """Return the number of floats per sample that owners send to its rank: partials of those consumers, and values for
    all others. Its own rank counts as any."""
    owners = map_fields_to_owner_ranks(declaration, shardings)
    values = find_sent_fields(declaration, consumers)
    return sum(_count_partial_floats(declaration, name, owners) for name in consumers) + sum(
        len(owners[field.name]) * field.dim for field in declaration.fields if field.name in values
    )


def find_sent_fields(declaration: EmbeddingDeclaration, consumers: Collection[str]) -> set[str]:
    """Return the fields whose values are still sent if those consumers are evaluated before."""
    consumers_by_name = declaration.consumers.items()
    taken = {name for _, consumer in consumers_by_name for name in consumer.features}
    unconsumed = {field.name for field in declaration.fields if field.name not in taken}
    queries = [query_fields(consumer) for name, consumer in consumers_by_name if name in consumers]
    others = [consumer.features for name, consumer in consumers_by_name if name not in consumers]
    return unconsumed.union(*queries, *others)


def _count_partial_floats(
    declaration: EmbeddingDeclaration, consumer_name: str, owners: Mapping[str, frozenset[int]]
) -> int:
    """Return the floats per sample of a consumer's partials from all ranks that have some of its fields, and of queries
    to all ranks that have rows of its sequences."""
    consumer = declaration.consumers[consumer_name]
    queries = query_fields(consumer)
    ranks = set().union(*(owners[field] for field in consumer.features[len(queries) :]))
    query_floats = sum(field.dim for field in declaration.fields if field.name in queries)
    return len(ranks) * ((get_partial_width(declaration, consumer_name) or 0) + query_floats)


def map_fields_to_owner_ranks(
    declaration: EmbeddingDeclaration, shardings: Sequence[Sharding]
) -> Mapping[str, frozenset[int]]:
    """Return the ranks that have rows of each field's table, by field."""
    tables = [declaration.table_index_of(feature) for feature in declaration.features]
    return {
        field.name: frozenset(shardings[tables[field.feature]].ranks)
        for field in declaration.fields
    }


def propose_consumer_sets(
    names: Sequence[str], cost: Callable[[tuple[str, ...]], float]
) -> Iterable[tuple[str, ...]]:
    """Yield sets of names to try, all or greedily grown ones of least cost, smaller before larger."""
    if len(names) <= MOST_CONSUMERS:
        for size in range(1, len(names) + 1):
            yield from combinations(names, size)
        return
    subset: tuple[str, ...] = ()
    while len(subset) < len(names):
        subset = min(
            (tuple(n for n in names if n in {*subset, new}) for new in names if new not in subset),
            key=cost,
        )
        yield subset


def map_fields_to_towers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    towers: Sequence[Sequence[int]],
) -> tuple[int | None, ...]:
    """Return by field the tower that has all rows of its table, or None. shardings: by table."""
    by_table = [tower_of(sharding, towers) for sharding in shardings]
    return tuple(by_table[declaration.parts[field.part][0]] for field in declaration.fields)


def choose_consumers_in_towers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    world: World,
    *,
    num_towers: int,
    reads_ahead: int = 0,
) -> tuple[str, ...]:
    """Return the names of consumers, as declared, to evaluate inside a tower, so that the fewest floats leave it; of
    equally good sets the smallest. reads_ahead: steps between reading a row and its use."""
    candidates = [
        name
        for name in declaration.consumers
        if not explain_not_in_towers(
            declaration, name, shardings, world, num_towers=num_towers, reads_ahead=reads_ahead
        )
    ]
    best: tuple[str, ...] = ()
    least = count_tower_floats(declaration, best)
    for subset in propose_consumer_sets(
        candidates, lambda subset: count_tower_floats(declaration, subset)
    ):
        if (num_floats := count_tower_floats(declaration, subset)) < least:
            best = subset
            least = num_floats
    return best


def explain_not_in_towers(
    declaration: EmbeddingDeclaration,
    consumer_name: str,
    shardings: Sequence[Sharding],
    world: World,
    *,
    num_towers: int,
    reads_ahead: int = 0,
) -> str | None:
    """Return why a consumer cannot be evaluated inside a tower, whatever it would save; None: it can."""
    if why := explain_never_in_towers(declaration, consumer_name, world, reads_ahead=reads_ahead):
        return why
    consumer = declaration.consumers[consumer_name]
    tower_by_field = dict(
        zip(
            [field.name for field in declaration.fields],
            map_fields_to_towers(declaration, shardings, list_tower_ranks(world, num_towers)),
            strict=True,
        )
    )
    for field in consumer.features:
        if tower_by_field[field] is None:
            return f"rows of {field} are not all in one tower"
    first, *others = consumer.features
    for field in others:
        if tower_by_field[field] != tower_by_field[first]:
            return f"{first} is in tower {tower_by_field[first]}, {field} in tower {tower_by_field[field]}"
    return None


def explain_never_in_towers(
    declaration: EmbeddingDeclaration,
    consumer_name: str,
    world: World | None = None,
    *,
    reads_ahead: int = 0,
) -> str | None:
    """Return why a consumer cannot be evaluated inside a tower, wherever its tables are. world: None, several ranks
    without servers."""
    consumer = declaration.consumers[consumer_name]
    if get_result_width(declaration, consumer_name) is None:
        kind = type(consumer.interaction).__name__
        return f"{kind} has no result that is smaller than its fields' values"
    if world is not None and world.num_ranks == 1:
        return "nothing is sent on one rank"
    width = get_result_width(declaration, consumer_name)
    floats = fields_width(declaration, consumer_name)
    if reads_ahead and 2 * (width or 0) > floats:
        return (
            f"rows are read ahead, and its result leaves the tower only in the step that uses it: {width} floats, more "
            f"than half of the {floats} that would have been sent before, during computation"
        )
    if world is not None and world.has_servers:
        return "rows are on servers, which have none of its weights"
    return None


def fields_width(declaration: EmbeddingDeclaration, name: str) -> int:
    """Return the number of floats of a sample that a consumer takes."""
    taken = set(declaration.consumers[name].features)
    return sum(field.dim for field in declaration.fields if field.name in taken)


def count_tower_floats(declaration: EmbeddingDeclaration, consumers: Collection[str]) -> int:
    """Return the number of floats per sample that leave all towers if those consumers are evaluated inside."""
    values = find_sent_fields(declaration, consumers)
    return sum(get_result_width(declaration, name) or 0 for name in consumers) + sum(
        field.dim for field in declaration.fields if field.name in values
    )


def restrict_declaration_to_tables(
    declaration: EmbeddingDeclaration, tables: set[str], exchange: str
) -> EmbeddingDeclaration:
    """Return the part of a declaration for one exchange: the features of these tables, what consumers take of them, and
    the whole's outputs of them. Consumers are declared as they are only if the exchange may send their partials. All
    tables are included, so that table indices do not change."""
    features = tuple(feature for feature in declaration.features if feature.table in tables)
    own_fields = {
        field.name
        for field in declaration.fields
        if declaration.features[field.feature].table in tables
    }
    consumers = {}
    for name, consumer in declaration.consumers.items():
        if taken := tuple(feature for feature in consumer.features if feature in own_fields):
            is_whole = exchange in EVALUATING and taken == consumer.features
            consumers[name] = consumer if is_whole else Consumer(Concat(), taken)
    part = EmbeddingDeclaration(declaration.tables, features, consumers, declaration.output)
    return replace(part, shared=restrict_outputs(declaration, part))
