"""A declaration whose tables are cut by columns, or have hot rows apart: what rows and messages see of it, and what a
model gets back.

Every slice of a table is a table by itself, every feature that reads the table reads each of its slices. Pooled fields
come side by side in the order of the columns, so an output holds what it would hold of whole rows. Hot and cold rows
are slices, too, of which a lookup is in one (`hot.py`).

Consumers are evaluated here, of what exchanges give of their fields, where some of their rows lie so, or where they
take sequences; all others exchanges know as they are declared, and may evaluate elsewhere. Of a consumer that adds up,
some of whose tables have hot rows, owners may evaluate the other fields; these are added here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.interaction import Concat, SomeFields
from colonnade.lookup.hops import EVALUATING
from colonnade.lookup.hot import Dealt, deal
from colonnade.lookup.layout import Consumer, Declaration, queries_of
from colonnade.lookup.outputs import combine, evaluate
from colonnade.lookup.stacking import added_up, stacked, stacks_of
from colonnade.store.table_shards import Laid, lay_out
from colonnade.table import Feature, Pooling, TableSide
from colonnade.topology.sharding import Sharding

OTHERS = "[others]"
"""Behind the name of a consumer that is split: its fields of tables with hot rows."""


@dataclass(frozen=True)
class Slices:
    """`declared` as tables are laid out."""

    declared: Declaration
    laid: tuple[Laid, ...]
    given: frozenset[str]
    """Consumers that exchanges are given as they are declared; beside these, where nothing is cut, all that take no
    sequence."""
    split: Mapping[str, tuple[int, ...]]
    """By consumer: which of its fields are of tables without hot rows, and given to an exchange that may evaluate them;
    the others have some."""

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

    def by_part(self, values: Tensor) -> Tensor:
        """(P, ..) by part of `declared` -> by part of `declaration`."""
        return values[list(self.of_part)] if self.is_cut else values

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
            whole = {
                name: Consumer(Concat(), self._pooled(name)) if name in self.attending else each
                for name, each in declared.consumers.items()
            }
            return replace(declared, consumers=whole) if self.attending else declared
        tables = tuple(each.table for each in self.laid)
        features = tuple(self._reader(f, number) for f, number in self.readers)
        # Sums that are yet to be added and divided are not rounded before that.
        output = declared.tables[0].compute_dtype if self.hot else declared.output
        bare = Declaration(tables, features, {}, output)
        consumers = {
            name: consumer
            if name in self.given
            else Consumer(
                Concat(), tuple(each for taken in self._pooled(name) for each in self.names[taken])
            )
            for name, consumer in declared.consumers.items()
        }
        for name in self.split:
            consumer, (some, others) = declared.consumers[name], self._sides(name)
            numbers = [consumer.features.index(each) for each in some]
            consumers[name] = Consumer(SomeFields(consumer.interaction, numbers), some)
            taken = tuple(each for other in others for each in self.names[other])
            consumers[f"{name}{OTHERS}"] = Consumer(Concat(), taken)
        for name in self.alone:
            if name not in self.sequences and self.names[name] != (name,):
                consumers[name] = Consumer(Concat(), self.names[name])
        return replace(bare, consumers=consumers)

    def _sides(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Fields of a consumer that is split: those without hot rows, and the others."""
        features, numbers = self.declared.consumers[name].features, self.split[name]
        others = tuple(each for n, each in enumerate(features) if n not in numbers)
        return tuple(features[n] for n in numbers), others

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
    def attending(self) -> tuple[str, ...]:
        """Declared consumers of sequences that are evaluated here."""
        given = self.declared.consumers.items()
        return tuple(
            name for name, each in given if each.interaction.sequences and name not in self.given
        )

    def _pooled(self, name: str) -> tuple[str, ...]:
        """Fields of a declared consumer, but for sequences that are given one by one."""
        consumer = self.declared.consumers[name]
        return queries_of(consumer) if name in self.attending else consumer.features

    def _sequences_of(self, name: str) -> tuple[str, ...]:
        return self.declared.consumers[name].features[len(self._pooled(name)) :]

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """Declared fields that exchanges give one by one."""
        taken = {field for name in self.declared.consumers for field in self._pooled(name)}
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

    def split_hot(self, batch: Batch) -> Dealt:
        """Return a batch by the rows of each table, those of hot rows apart."""
        return deal(batch, self.declared, self.hot)

    @cached_property
    def is_hashed(self) -> bool:
        """Whether ids of some table are hashed to rows."""
        return bool(stacks_of(self.declared))

    def looked_up(self, batch: Batch) -> Batch:
        """Return a batch by the rows of each table, where ids are others."""
        return stacked(batch, self.declared) if self.is_hashed else batch

    def offsets_of(self, batch: Batch) -> dict[str, Tensor]:
        """(B + 1,) of each sequence that is attended to here, by field. Of a batch that was checked."""
        found = {}
        for name in self.attending:
            for field in self._sequences_of(name):
                offsets = batch.ids[self._feature(field).name].offsets
                found[field] = torch.arange(batch.size + 1) if offsets is None else offsets
        return found

    @cached_property
    def merges_nothing(self) -> bool:
        """Whether outputs of exchanges are those that the model declared."""
        return not (self.is_cut or self.attending or self.stacks)

    def seen(
        self,
        found: Mapping[str, Tensor],
        offsets: Mapping[str, Tensor],
        dealt: Dealt | None = None,
        dense: Tensor | None = None,
        evaluated: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """What a model sees, from what an exchange of `declaration` gives. offsets: those of `offsets_of`; dense: of
        the batch; evaluated: consumers whose partials travelled."""
        seen = self._joined(found, dealt, dense, evaluated) if self.is_cut else dict(found)
        if self.stacks:
            seen = added_up(seen, self.stacks)
        if not self.is_cut and not self.attending:
            return seen
        for name in self.attending:
            each, (field,) = self.declared.consumers[name], self._sequences_of(name)
            seen[name] = each.interaction(seen[name], seen[field], offsets[field])
        return {name: seen[name] for name in self.declared.output_names}

    @cached_property
    def stacks(self) -> Mapping[str, int]:
        """By declared field of a sequence that reads a hash-stacked table: hashes."""
        tables = stacks_of(self.declared)
        return {
            name: int(tables[feature].hashes or 1)
            for name in sorted(self.sequences)
            if (feature := self._feature(name).name) in tables
        }

    def _joined(
        self,
        found: Mapping[str, Tensor],
        dealt: Dealt | None,
        dense: Tensor | None,
        evaluated: Collection[str],
    ) -> dict[str, Tensor]:
        """Of fields and consumers as they are declared, but for those of sequences: theirs is what they pool."""
        seen = {}
        for name, each in self.declared.consumers.items():
            if name in self.attending:
                seen[name] = self._whole(self._pooled(name), found[name], dealt)
            elif name in self.given:
                seen[name] = found[name].to(self.declared.output_dtype)
            elif name in self.split:
                others = self._whole(self._sides(name)[1], found[f"{name}{OTHERS}"], dealt)
                seen[name] = self._put_together(name, found[name], others, dense, name in evaluated)
            else:
                whole = self._whole(each.features, found[name], dealt)
                seen[name] = evaluate(name, each, whole, dense)
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

    def _put_together(
        self, name: str, found: Tensor, others: Tensor, dense: Tensor | None, is_partial: bool
    ) -> Tensor:
        """A consumer that is split. found: the partial of its fields without hot rows, or these side by side; others:
        its other fields side by side."""
        consumer, output = self.declared.consumers[name], self.declared.output_dtype
        some, rest = self._sides(name)
        dims = {each.name: each.dim for each in self.declared.fields}
        if not is_partial:
            parts = dict(zip(some, found.to(output).split([dims[f] for f in some], 1), strict=True))
            parts |= zip(rest, others.split([dims[f] for f in rest], 1), strict=True)
            whole = torch.cat([parts[each] for each in consumer.features], 1)
            return evaluate(name, consumer, whole, dense)
        operator, others = consumer.interaction, others.to(found)
        given = others.unflatten(1, (len(rest), -1)) if operator.one_width else others
        numbers = [consumer.features.index(each) for each in rest]
        stats = found + operator.partial_of(given, numbers)
        return combine(name, consumer, stats, dense).to(output)

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


def slices_of(
    declared: Declaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str] = (),
    bounds: Sequence[int] = (),
) -> Slices:
    """By table: exchanges, as far as some evaluates consumers elsewhere, and steps that rows are read ahead. Raises
    ConfigError for a table that cannot be cut as its sharding says."""
    laid = lay_out(declared.tables, shardings)
    if not exchanges:
        return Slices(declared, laid, frozenset(), {})
    late = bounds or [0] * len(exchanges)
    whole = [sharding.slices == 1 and not sharding.has_hot for sharding in shardings]
    given, split = set(), {}
    for name, consumer in declared.consumers.items():
        fields = {each.name: declared.parts[each.part][0] for each in declared.fields}
        tables = [fields[each] for each in consumer.features]
        kinds = {(exchanges[t], late[t]) for t in tables if not shardings[t].has_hot}
        if len(kinds) != 1 or any(shardings[t].slices > 1 for t in tables):
            continue
        ((exchange, _),) = kinds
        interaction = consumer.interaction
        if not all(whole[t] for t in tables):
            adds_up = interaction.merge == "sum" and not interaction.sequences
            if adds_up and exchange == "substitute" and not isinstance(interaction, Concat):
                split[name] = tuple(n for n, t in enumerate(tables) if whole[t])
            continue
        # Of hashed tables, what is attended to is known where their rows have been added up.
        is_hashed = any(declared.tables[t].hashes is not None for t in tables)
        is_attended = exchange == "substitute" and not is_hashed
        if is_attended if interaction.sequences else exchange in EVALUATING:
            given.add(name)
    return Slices(declared, laid, frozenset(given), split)
