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
        numbers: list[list[int]] = [[] for _ in self.declared.tables]
        for number, laid_table in enumerate(self.laid):
            numbers[laid_table.number].append(number)
        return tuple(map(tuple, numbers))

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
            laid_table.number: laid_table.sharding.hot.tensor
            for laid_table in self.laid
            if laid_table.is_hot and laid_table.sharding.hot is not None
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
        """Of the slices. Consumers take the values of their fields, and are evaluated by `merge_outputs`."""
        declared = self.declared
        if not self.is_cut:
            whole = {
                name: Consumer(Concat(), self._pooled(name)) if name in self.attending else consumer
                for name, consumer in declared.consumers.items()
            }
            return replace(declared, consumers=whole) if self.attending else declared
        tables = tuple(laid_table.table for laid_table in self.laid)
        features = tuple(self._slice_feature(f, number) for f, number in self.readers)
        # Sums that are yet to be added and divided are not rounded before that.
        output = declared.tables[0].compute_dtype if self.hot else declared.output
        bare = Declaration(tables, features, {}, output)
        consumers = {
            name: consumer
            if name in self.given
            else Consumer(
                Concat(),
                tuple(
                    slice_name for taken in self._pooled(name) for slice_name in self.names[taken]
                ),
            )
            for name, consumer in declared.consumers.items()
        }
        for name in self.split:
            consumer, (whole_fields, others) = declared.consumers[name], self._split_fields(name)
            numbers = [consumer.features.index(field) for field in whole_fields]
            consumers[name] = Consumer(SomeFields(consumer.interaction, numbers), whole_fields)
            taken = tuple(slice_name for other in others for slice_name in self.names[other])
            consumers[f"{name}{OTHERS}"] = Consumer(Concat(), taken)
        for name in self.alone:
            if name not in self.sequences and self.names[name] != (name,):
                consumers[name] = Consumer(Concat(), self.names[name])
        return replace(bare, consumers=consumers)

    def _split_fields(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Fields of a consumer that is split: those without hot rows, and the others."""
        features, numbers = self.declared.consumers[name].features, self.split[name]
        others = tuple(field for n, field in enumerate(features) if n not in numbers)
        return tuple(features[n] for n in numbers), others

    def _slice_feature(self, f: int, number: int) -> Feature:
        """A declared feature, reading one slice of its table."""
        feature, table = self.declared.features[f], self.laid[number].table
        if not isinstance(table, TableSide):
            return replace(feature, table=table.name)
        pooling: Pooling = "sequence" if feature.pooling == "sequence" else "sum"
        return Feature(f"{feature.name}[{table.side}]", table.name, pooling=pooling)

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """By declared field: those of its slices, from the left."""
        declared, slice_names = self.declared, {}
        for field in declared.fields:
            part = declared.parts[field.part][1]
            slice_names[field.name] = tuple(
                (f"{feature.name}.{part.name}" if part.name else feature.name) + table.suffix
                for f, number in self.readers
                if f == field.feature
                for feature, table in [(self._slice_feature(f, number), self.laid[number].table)]
                if part.name in (other.name for other in table.parts)
            )
        return slice_names

    @cached_property
    def attending(self) -> tuple[str, ...]:
        """Declared consumers of sequences that are evaluated here."""
        consumers = self.declared.consumers.items()
        return tuple(
            name
            for name, consumer in consumers
            if consumer.interaction.sequences and name not in self.given
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

    def prepare_ids(self, batch: Batch) -> Batch:
        """Return a batch by the rows of each table, where ids are others."""
        return stacked(batch, self.declared) if self.is_hashed else batch

    def offsets_of(self, batch: Batch) -> dict[str, Tensor]:
        """(B + 1,) of each sequence that is attended to here, by field. Of a batch that was checked."""
        offsets_by_field = {}
        for name in self.attending:
            for field in self._sequences_of(name):
                offsets = batch.ids[self._feature(field).name].offsets
                offsets_by_field[field] = (
                    torch.arange(batch.size + 1) if offsets is None else offsets
                )
        return offsets_by_field

    @cached_property
    def merges_nothing(self) -> bool:
        """Whether outputs of exchanges are those that the model declared."""
        return not (self.is_cut or self.attending or self.stacks)

    def merge_outputs(
        self,
        values: Mapping[str, Tensor],
        offsets: Mapping[str, Tensor],
        dealt: Dealt | None = None,
        dense: Tensor | None = None,
        evaluated: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """What a model sees, from what an exchange of `declaration` gives. offsets: those of `offsets_of`; dense: of
        the batch; evaluated: consumers whose partials travelled."""
        outputs = (
            self._join_outputs(values, dealt, dense, evaluated) if self.is_cut else dict(values)
        )
        if self.stacks:
            outputs = added_up(outputs, self.stacks)
        if not self.is_cut and not self.attending:
            return outputs
        for name in self.attending:
            consumer, (field,) = self.declared.consumers[name], self._sequences_of(name)
            outputs[name] = consumer.interaction(outputs[name], outputs[field], offsets[field])
        return {name: outputs[name] for name in self.declared.output_names}

    @cached_property
    def stacks(self) -> Mapping[str, int]:
        """By declared field of a sequence that reads a hash-stacked table: hashes."""
        tables = stacks_of(self.declared)
        return {
            name: int(tables[feature].hashes or 1)
            for name in sorted(self.sequences)
            if (feature := self._feature(name).name) in tables
        }

    def _join_outputs(
        self,
        values: Mapping[str, Tensor],
        dealt: Dealt | None,
        dense: Tensor | None,
        evaluated: Collection[str],
    ) -> dict[str, Tensor]:
        """Of fields and consumers as they are declared, but for those of sequences: theirs is what they pool."""
        outputs = {}
        for name, consumer in self.declared.consumers.items():
            if name in self.attending:
                outputs[name] = self._merge_slices(self._pooled(name), values[name], dealt)
            elif name in self.given:
                outputs[name] = values[name].to(self.declared.output_dtype)
            elif name in self.split:
                others = self._merge_slices(
                    self._split_fields(name)[1], values[f"{name}{OTHERS}"], dealt
                )
                outputs[name] = self._merge_partial(
                    name, values[name], others, dense, name in evaluated
                )
            else:
                whole = self._merge_slices(consumer.features, values[name], dealt)
                outputs[name] = evaluate(name, consumer, whole, dense)
        for name in self.alone:
            if name not in self.sequences:
                outputs[name] = self._merge_slices((name,), values[name], dealt)
                continue
            parts = [values[slice_name] for slice_name in self.names[name]]
            f = self._feature(name)
            if dealt is not None and f.name in dealt.order:
                order = dealt.order[f.name].to(parts[0].device)
                outputs[name] = torch.cat(parts)[order].to(self.declared.output_dtype)
            else:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                outputs[name] = whole.to(self.declared.output_dtype)
        return outputs

    def _merge_partial(
        self, name: str, values: Tensor, others: Tensor, dense: Tensor | None, is_partial: bool
    ) -> Tensor:
        """A consumer that is split. found: the partial of its fields without hot rows, or these side by side; others:
        its other fields side by side."""
        consumer, output = self.declared.consumers[name], self.declared.output_dtype
        without_hot, with_hot = self._split_fields(name)
        dims = {field.name: field.dim for field in self.declared.fields}
        if not is_partial:
            parts = dict(
                zip(
                    without_hot,
                    values.to(output).split([dims[f] for f in without_hot], 1),
                    strict=True,
                )
            )
            parts |= zip(with_hot, others.split([dims[f] for f in with_hot], 1), strict=True)
            whole = torch.cat([parts[f] for f in consumer.features], 1)
            return evaluate(name, consumer, whole, dense)
        operator, others = consumer.interaction, others.to(values)
        other_values = others.unflatten(1, (len(with_hot), -1)) if operator.one_width else others
        numbers = [consumer.features.index(f) for f in with_hot]
        stats = values + operator.partial_of(other_values, numbers)
        return combine(name, consumer, stats, dense).to(output)

    def _merge_slices(self, fields: Sequence[str], values: Tensor, dealt: Dealt | None) -> Tensor:
        """found: slices of these fields, side by side -> (B, sum of dims) of the fields."""
        if dealt is None:
            return values
        dims = {field.name: field.dim for field in self.declared.fields}
        parts, column = [], 0
        for name in fields:
            feature, dim = self._feature(name), dims[name]
            part, column = values[:, column : column + dim], column + dim
            if self.declared.table_of(feature) in self.hot:
                part, column = part + values[:, column : column + dim], column + dim
                if feature.name in dealt.lengths:
                    part = part / dealt.lengths[feature.name].to(part.device)
            parts.append(part)
        return torch.cat(parts, 1).to(self.declared.output_dtype)

    def _feature(self, field: str) -> Feature:
        """Of a declared field."""
        declared_field = next(
            declared_field
            for declared_field in self.declared.fields
            if declared_field.name == field
        )
        return self.declared.features[declared_field.feature]


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
    exchanged, split = set(), {}
    for name, consumer in declared.consumers.items():
        fields = {field.name: declared.parts[field.part][0] for field in declared.fields}
        tables = [fields[f] for f in consumer.features]
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
            exchanged.add(name)
    return Slices(declared, laid, frozenset(exchanged), split)
