"""A declaration whose tables are cut by columns: what rows and messages see of it, and what a model gets back.

Every slice of a table is a table by itself, every feature that reads the table reads each of its slices. Pooled fields
come side by side in the order of the columns, so an output holds what it would hold of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from colonnade.exchange.contract import Consumer
from colonnade.exchange.layout import Declaration
from colonnade.exchange.recording import evaluate
from colonnade.interaction import Concat
from colonnade.store.slices import Laid, lay_out
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True)
class Slices:
    """`declared` as tables are laid out."""

    declared: Declaration
    laid: tuple[Laid, ...]

    @cached_property
    def is_cut(self) -> bool:
        return len(self.laid) > len(self.declared.tables)

    @cached_property
    def of_table(self) -> tuple[tuple[int, ...], ...]:
        """By declared table: the numbers of its slices, from the left."""
        found: list[list[int]] = [[] for _ in self.declared.tables]
        for number, each in enumerate(self.laid):
            found[each.number].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def of_part(self) -> tuple[int, ...]:
        """By part of `declaration`: that of `declared` whose settings it has."""
        names = {(t, part.name): p for p, (t, part) in enumerate(self.declared.parts)}
        parts = self.declaration.parts
        return tuple(names[self.laid[t].number, part.name] for t, part in parts)

    @cached_property
    def declaration(self) -> Declaration:
        """Of the slices. Consumers take the values of their fields, and are evaluated by `seen`."""
        declared = self.declared
        if not self.is_cut:
            return declared
        tables = tuple(each.table for each in self.laid)
        features = tuple(
            replace(feature, table=tables[number].name)
            for feature in declared.features
            for number in self.of_table[declared.table_of(feature)]
        )
        bare = Declaration(tables, features, {}, declared.output)
        names: dict[str, list[str]] = {}  # of what was declared, that of each slice
        for field in bare.fields:
            suffix = tables[bare.parts[field.part][0]].suffix
            names.setdefault(field.name.removesuffix(suffix), []).append(field.name)
        consumers = {
            name: Consumer(
                Concat(), tuple(each for taken in consumer.features for each in names[taken])
            )
            for name, consumer in declared.consumers.items()
        }
        for name in self.alone:
            if name not in self.sequences and names[name] != [name]:
                consumers[name] = Consumer(Concat(), tuple(names[name]))
        return replace(bare, consumers=consumers)

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """Declared fields that no consumer takes."""
        taken = {name for each in self.declared.consumers.values() for name in each.features}
        return tuple(field.name for field in self.declared.fields if field.name not in taken)

    @cached_property
    def sequences(self) -> Mapping[str, tuple[str, ...]]:
        """By declared field of a sequence: those of its slices."""
        declared, found = self.declared, {}
        for field in declared.fields:
            feature = declared.features[field.feature]
            if feature.pooling == "sequence":
                t, part = declared.parts[field.part]
                slices = [self.laid[number].table for number in self.of_table[t]]
                has = [each for each in slices if part.name in (other.name for other in each.parts)]
                found[field.name] = tuple(field.name + each.suffix for each in has)
        return found

    def seen(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a model sees, from what an exchange of `declaration` gives."""
        if not self.is_cut:
            return dict(found)
        consumers = self.declared.consumers
        seen = {name: evaluate(each, found[name]) for name, each in consumers.items()}
        for name in self.alone:
            parts = [found[each] for each in self.sequences.get(name, (name,))]
            seen[name] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return seen


def slices_of(declared: Declaration, shardings: Sequence[Sharding]) -> Slices:
    """Raises ConfigError for a table that cannot be cut as its sharding says."""
    return Slices(declared, lay_out(declared.tables, shardings))
