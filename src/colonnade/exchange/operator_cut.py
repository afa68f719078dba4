"""Cut between rows and model: which consumers are evaluated at the owners of their fields or in towers, so that the
fewest floats are sent.

A consumer's partial costs its width from every rank that has some of its fields. A field that is sent costs its dim
from every rank that has rows of it, and is then free for all other consumers (DES, Rong et al. 2020, section 3; the cut
is the minimum over all sets of consumers). Rows of a sequence are not sent: its consumer is evaluated where the rows
are, or not under this exchange. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TypeVar

from colonnade.hops.kinds import EVALUATING
from colonnade.interaction import Concat
from colonnade.interaction.contract import SQUARES
from colonnade.lookup.layout import (
    Consumer,
    EmbeddingDeclaration,
    query_fields,
    restrict_outputs_to_part,
)
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import list_tower_ranks, tower_of
from colonnade.topology.world import World

Consumers = TypeVar("Consumers", bound=str | int)
"""Names or indices of consumers."""
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
    required = [name for name in candidates if declaration.consumers[name].interaction.sequences]
    return choose_cheapest_set(
        candidates,
        lambda consumers: count_sent_floats(declaration, shardings, consumers),
        required,
    )


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
    declaration: EmbeddingDeclaration,
    consumer_name: str,
    field_owner_ranks: Mapping[str, frozenset[int]],
) -> int:
    """Return the floats per sample of a consumer's partials from all ranks that have some of its fields, and of queries
    to all ranks that have rows of its sequences."""
    consumer = declaration.consumers[consumer_name]
    queries = query_fields(consumer)
    ranks = set().union(*(field_owner_ranks[field] for field in consumer.features[len(queries) :]))
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


def choose_cheapest_set(
    candidates: Sequence[Consumers],
    count_floats: Callable[[Sequence[Consumers]], float],
    required: Sequence[Consumers] = (),
) -> tuple[Consumers, ...]:
    """Return the set of candidates with the required ones that costs the fewest floats, in their order; of equally good
    sets the smallest. Tries all sets, or greedily grown ones of many candidates."""

    def add(members: Collection[Consumers]) -> tuple[Consumers, ...]:
        return tuple(name for name in candidates if name in members or name in required)

    free = [name for name in candidates if name not in required]
    sets: list[tuple[Consumers, ...]] = [add(())]
    for size in range(1, len(free) + 1):
        if len(free) <= MOST_CONSUMERS:
            sets += map(add, combinations(free, size))
        else:
            grown = [add({*sets[-1], new}) for new in free if new not in sets[-1]]
            sets.append(min(grown, key=count_floats))
    return min(sets, key=count_floats)


def map_fields_to_towers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    towers: Sequence[Sequence[int]],
) -> tuple[int | None, ...]:
    """Return by field the tower that has all rows of its table, or None. shardings: by table."""
    by_table = [tower_of(sharding, towers) for sharding in shardings]
    return tuple(by_table[declaration.parts[field.part][0]] for field in declaration.fields)


def choose_tower_evaluated_consumers(
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
    return choose_cheapest_set(
        candidates, lambda consumers: count_tower_floats(declaration, consumers)
    )


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
    names = [field.name for field in declaration.fields]
    by_field = map_fields_to_towers(declaration, shardings, list_tower_ranks(world, num_towers))
    towers = dict(zip(names, by_field, strict=True))
    for field in consumer.features:
        if towers[field] is None:
            return f"rows of {field} are not all in one tower"
    first = consumer.features[0]
    for field in consumer.features:
        if towers[field] != towers[first]:
            return f"{first} is in tower {towers[first]}, {field} in tower {towers[field]}"
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
    width = get_result_width(declaration, consumer_name)
    if width is None:
        kind = type(consumer.interaction).__name__
        return f"{kind} has no result that is smaller than its fields' values"
    if world is not None and world.num_ranks == 1:
        return "nothing is sent on one rank"
    floats = sum(field.dim for field in declaration.fields if field.name in consumer.features)
    if reads_ahead and 2 * width > floats:
        return (
            f"rows are read ahead, and its result leaves the tower only in the step that uses it: {width} floats, more "
            f"than half of the {floats} that would have been sent before, during computation"
        )
    if world is not None and world.has_servers:
        return "rows are on servers, which have none of its weights"
    return None


def count_tower_floats(declaration: EmbeddingDeclaration, consumers: Collection[str]) -> int:
    """Return the number of floats per sample that leave all towers if those consumers are evaluated inside."""
    values = find_sent_fields(declaration, consumers)
    return sum(get_result_width(declaration, name) or 0 for name in consumers) + sum(
        field.dim for field in declaration.fields if field.name in values
    )


def restrict_declaration_to_tables(
    declaration: EmbeddingDeclaration, table_names: set[str], exchange_name: str
) -> EmbeddingDeclaration:
    """Return the part of a declaration for one exchange: the features of these tables, what consumers take of
    them, and the whole's outputs of them. Consumers are declared as they are only if the exchange may send their
    partials. All tables are included, so that table indices do not change."""
    features = tuple(feature for feature in declaration.features if feature.table in table_names)
    own_fields = {
        field.name
        for field in declaration.fields
        if declaration.features[field.feature].table in table_names
    }
    consumers = {}
    for name, consumer in declaration.consumers.items():
        if taken := tuple(feature for feature in consumer.features if feature in own_fields):
            is_whole = exchange_name in EVALUATING and taken == consumer.features
            consumers[name] = consumer if is_whole else Consumer(Concat(), taken)
    part = EmbeddingDeclaration(declaration.tables, features, consumers, declaration.output)
    return replace(part, shared=restrict_outputs_to_part(declaration, part))
