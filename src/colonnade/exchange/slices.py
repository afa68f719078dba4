"""A declaration whose tables are cut by columns, or have hot rows apart: what rows and messages see of it, and what a
model gets back.

Every slice of a table is a table by itself, every feature that reads the table reads each of its slices. Pooled fields
come side by side in the order of the columns, so an output holds what it would hold of whole rows. Hot and cold rows
are slices, too, of which a lookup is in one (`hot.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.exchange.contract import Consumer, Exchange, Ticket
from colonnade.exchange.hot import Dealt, deal
from colonnade.exchange.layout import Declaration
from colonnade.exchange.recording import evaluate
from colonnade.interaction import Concat
from colonnade.store.slices import Laid, lay_out
from colonnade.table import Feature, Pooling, TableSide
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

    def is_cut_part(self, p: int) -> bool:
        """Whether rows of part p of `declared` lie in slices of columns."""
        return self.declared.parts[p][0] not in self.hot and self.of_part.count(p) > 1

    @cached_property
    def hot(self) -> Mapping[int, Tensor]:
        """By declared table whose hot rows lie apart: their ids (H,) int64, ascending."""
        return {
            each.number: each.sharding.hot.tensor
            for each in self.laid
            if each.is_hot and each.sharding.hot is not None
        }

    @cached_property
    def readers(self) -> tuple[tuple[int, int], ...]:
        """By feature of `declaration`: the number of the declared one, and of the slice that it reads."""
        return tuple(
            (f, number)
            for f, feature in enumerate(self.declared.features)
            for number in self.of_table[self.declared.table_of(feature)]
        )

    @cached_property
    def declaration(self) -> Declaration:
        """Of the slices. Consumers take the values of their fields, and are evaluated by `seen`."""
        declared = self.declared
        if not self.is_cut:
            return declared
        tables = tuple(each.table for each in self.laid)
        features = tuple(self._reader(f, number) for f, number in self.readers)
        # Sums that are yet to be added and divided are not rounded before that.
        output = declared.tables[0].compute_dtype if self.hot else declared.output
        bare = Declaration(tables, features, {}, output)
        consumers = {
            name: Consumer(
                Concat(), tuple(each for taken in consumer.features for each in self.names[taken])
            )
            for name, consumer in declared.consumers.items()
        }
        for name in self.alone:
            if name not in self.sequences and self.names[name] != (name,):
                consumers[name] = Consumer(Concat(), self.names[name])
        return replace(bare, consumers=consumers)

    def _reader(self, f: int, number: int) -> Feature:
        """A declared feature, reading one slice of its table."""
        feature, table = self.declared.features[f], self.laid[number].table
        if not isinstance(table, TableSide):
            return replace(feature, table=table.name)
        pooling: Pooling = "sequence" if feature.pooling == "sequence" else "sum"
        return Feature(f"{feature.name}[{table.side}]", table.name, pooling=pooling)

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """By declared field: those of its slices, from the left."""
        declared, found = self.declared, {}
        for field in declared.fields:
            part = declared.parts[field.part][1]
            found[field.name] = tuple(
                (f"{feature.name}.{part.name}" if part.name else feature.name) + table.suffix
                for f, number in self.readers
                if f == field.feature
                for feature, table in [(self._reader(f, number), self.laid[number].table)]
                if part.name in (other.name for other in table.parts)
            )
        return found

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """Declared fields that no consumer takes."""
        taken = {name for each in self.declared.consumers.values() for name in each.features}
        return tuple(field.name for field in self.declared.fields if field.name not in taken)

    @cached_property
    def sequences(self) -> frozenset[str]:
        """Declared fields of sequences."""
        declared = self.declared
        return frozenset(
            field.name
            for field in declared.fields
            if declared.features[field.feature].pooling == "sequence"
        )

    def route(self, exchange: Exchange, batch: Batch, step: int, purpose: str) -> Ticket:
        """`Exchange.route` of a batch of declared features."""
        if not self.hot:
            return exchange.route(batch, step, purpose=purpose)
        dealt = deal(batch, self.declared, self.hot)
        ticket = exchange.route(dealt.batch, step, purpose=purpose)
        ticket.dealt = dealt
        return ticket

    def values(
        self, exchange: Exchange, ticket: Ticket, handle: Tensor, device: torch.device
    ) -> dict[str, Tensor]:
        """`Exchange.values`, as a model sees them."""
        return self.seen(exchange.values(ticket, handle, device), ticket.dealt)

    def seen(self, found: Mapping[str, Tensor], dealt: Dealt | None = None) -> dict[str, Tensor]:
        """What a model sees, from what an exchange of `declaration` gives."""
        if not self.is_cut:
            return dict(found)
        seen = {}
        for name, each in self.declared.consumers.items():
            seen[name] = evaluate(each, self._whole(each.features, found[name], dealt))
        for name in self.alone:
            if name not in self.sequences:
                seen[name] = self._whole((name,), found[name], dealt)
                continue
            parts = [found[each] for each in self.names[name]]
            f = self._feature(name)
            if dealt is not None and f.name in dealt.order:
                order = dealt.order[f.name].to(parts[0].device)
                seen[name] = torch.cat(parts)[order].to(self.declared.output_dtype)
            else:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                seen[name] = whole.to(self.declared.output_dtype)
        return seen

    def _whole(self, fields: Sequence[str], found: Tensor, dealt: Dealt | None) -> Tensor:
        """found: slices of these fields, side by side -> (B, sum of dims) of the fields."""
        if dealt is None:
            return found
        dims = {field.name: field.dim for field in self.declared.fields}
        parts, column = [], 0
        for name in fields:
            feature, dim = self._feature(name), dims[name]
            part, column = found[:, column : column + dim], column + dim
            if self.declared.table_of(feature) in self.hot:
                part, column = part + found[:, column : column + dim], column + dim
                if feature.name in dealt.lengths:
                    part = part / dealt.lengths[feature.name].to(part.device)
            parts.append(part)
        return torch.cat(parts, 1).to(self.declared.output_dtype)

    def _feature(self, field: str) -> Feature:
        """Of a declared field."""
        each = next(each for each in self.declared.fields if each.name == field)
        return self.declared.features[each.feature]


def slices_of(declared: Declaration, shardings: Sequence[Sharding]) -> Slices:
    """Raises ConfigError for a table that cannot be cut as its sharding says."""
    return Slices(declared, lay_out(declared.tables, shardings))
