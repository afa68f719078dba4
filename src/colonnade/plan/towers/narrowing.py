"""What operators that are evaluated inside towers leave of the bytes between them: as the exchange decides it. Pure
functions of numbers.

What an operator gives is its tables', by the widths of the fields it takes: together they sum to the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colonnade.exchange.substitution import sets
from colonnade.plan.consumers import ModelLoad


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Bytes of a sample more than its values, most of them less than 0; by table."""

    inside: Mapping[int, int] = field(default_factory=dict)
    """Consumers that are evaluated inside, and the tower of each."""
    values: Mapping[int, float] = field(default_factory=dict)
    gradients: Mapping[int, float] = field(default_factory=dict)
    asked: Mapping[int, float] = field(default_factory=dict)
    """Of a rank's batch, to all owners: weights of lookups whose bags are split and divided there."""


def narrowed(
    model: ModelLoad,
    towers: Sequence[int | None],
    num_owners: Sequence[int],
    cut: Sequence[bool],
    exchanges: Sequence[str],
) -> Narrowed:
    """By table: `towers`, where it goes by one; on how many ranks its bags come together, before they are pooled;
    whether its rows are `cut` by columns; its exchange."""
    fields = model.fields
    able = {}
    for c, consumer in enumerate(model.consumers):
        mine = {towers[fields[f].table] for f in consumer.fields}
        of = {exchanges[fields[f].table] for f in consumer.fields}
        is_cut = any(cut[fields[f].table] for f in consumer.fields)
        if (
            not is_cut
            and consumer.inside_width is not None
            and len(mine) == len(of) == 1
            and mine != {None}
        ):
            able[str(c)] = next(iter(mine))
    if not able:
        return Narrowed()

    def needed(some: Sequence[str]) -> set[int]:
        taken = {f for each in model.consumers for f in each.fields}
        others = [each for c, each in enumerate(model.consumers) if str(c) not in some]
        alone = {f for f in range(len(fields)) if f not in taken}
        return alone.union(*(each.fields for each in others))

    def floats(some: Sequence[str]) -> float:
        widths = sum(model.consumers[int(c)].inside_width or 0 for c in some)
        return widths + sum(fields[f].dim for f in needed(some))

    best: tuple[str, ...] = ()
    for some in sets(list(able), floats):
        if floats(some) < floats(best):
            best = tuple(some)
    kept, values, gradients = needed(best), dict[int, float](), dict[int, float]()
    asked: dict[int, float] = {}
    weighed = set()
    taken = {f for c in best for f in model.consumers[int(c)].fields}
    for f in taken:
        each = fields[f]
        if f not in kept:
            values[each.table] = values.get(each.table, 0.0) - each.value_bytes
            gradients[each.table] = gradients.get(each.table, 0.0) - each.gradient_bytes
        if each.added_bytes and num_owners[each.table] > 1 and each.feature not in weighed:
            weighed.add(each.feature)
            asked[each.table] = asked.get(each.table, 0.0) + each.added_bytes
    for name in best:
        consumer = model.consumers[int(name)]
        width = sum(fields[f].dim for f in consumer.fields)
        for f in consumer.fields:
            table, part = fields[f].table, fields[f].dim / width
            values[table] = values.get(table, 0.0) + part * consumer.inside_value_bytes
            gradients[table] = gradients.get(table, 0.0) + part * consumer.inside_gradient_bytes
    inside = {int(c): tower for c in best if (tower := able[c]) is not None}
    return Narrowed(inside, values, gradients, asked)
