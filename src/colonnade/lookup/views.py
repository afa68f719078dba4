"""Views of a declaration whose tables are cut into slices: by columns, or by hot and cold rows.

Every slice of a table is a table of its own in the store and in exchanges, and every feature that reads the table reads
each of its slices. Pooled fields of slices are concatenated in the order of columns, so an output has the values that
whole rows would give. Hot and cold rows are slices, too; a lookup reads one of them (`hot.py`).

This module evaluates consumers that take sequences, or fields of tables with slices, from the values that exchanges
return. Exchanges get all other consumers as declared, and may evaluate them on other ranks. If a consumer sums partials
and some of its tables are cut or replicated, owners may evaluate its other fields; this module adds these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError
from colonnade.hops.kinds import EVALUATING
from colonnade.interaction import Concat, FieldSubset
from colonnade.interaction.contract import SQUARES
from colonnade.lookup.hot import SplitBatch, split_hot_rows
from colonnade.lookup.layout import Consumer, EmbeddingDeclaration, query_fields
from colonnade.lookup.outputs import combine, evaluate_consumer
from colonnade.lookup.stacking import hash_ids, hashed_tables_by_feature, sum_hashed_rows
from colonnade.store.table_shards import TableShard, shard_tables
from colonnade.table import Feature, Pooling, TableSide
from colonnade.topology.sharding import Sharding

OTHERS = "[others]"
"""Suffix of a split consumer's name, for its fields of cut and replicated tables."""


@dataclass(frozen=True)
class Slices:
    """View of declaration `declared` whose tables are cut into slices, as they are sharded."""

    declared: EmbeddingDeclaration
    table_shards: tuple[TableShard, ...]
    exchanged: frozenset[str]
    """Consumers that exchanges get as declared. If no table is cut, they also get all that take no sequence."""
    split_consumers: Mapping[str, tuple[int, ...]]
    """Fields of a split consumer that an exchange may evaluate, by consumer. Its other fields are of tables that are
    cut by columns, have hot rows or are replicated."""

    @cached_property
    def is_cut(self) -> bool:
        """True if a table has several slices, or a consumer is split."""
        return len(self.table_shards) > len(self.declared.tables) or bool(self.split_consumers)

    @cached_property
    def slices_of_table(self) -> tuple[tuple[int, ...], ...]:
        """Indices of a table's slices by declared table, from the left."""
        by_table: list[list[int]] = [[] for _ in self.declared.tables]
        for slice_index, shard in enumerate(self.table_shards):
            by_table[shard.number].append(slice_index)
        return tuple(map(tuple, by_table))

    @cached_property
    def declared_parts(self) -> tuple[int, ...]:
        """Index of the declared part that a part takes its settings from, by part of `declaration`."""
        part_indices = {(t, part.name): p for p, (t, part) in enumerate(self.declared.parts)}
        parts = self.declaration.parts
        return tuple(part_indices[self.table_shards[t].number, part.name] for t, part in parts)

    def expand_by_part(self, values: Tensor) -> Tensor:
        """Map values (P, ..) by part of `declared` to values by part of `declaration`."""
        return values[list(self.declared_parts)] if self.is_cut else values

    def is_cut_part(self, p: int) -> bool:
        """Return whether rows of part p of `declared` are cut by columns."""
        return self.declared.parts[p][0] not in self.hot_ids and self.declared_parts.count(p) > 1

    @cached_property
    def hot_ids(self) -> Mapping[int, Tensor]:
        """Ids of hot rows, (H,) int64, ascending, by declared table that has a slice of hot rows."""
        return {
            shard.number: shard.sharding.hot.tensor
            for shard in self.table_shards
            if shard.is_hot and shard.sharding.hot is not None
        }

    @cached_property
    def feature_slice_pairs(self) -> tuple[tuple[int, int], ...]:
        """Indices of the declared feature and of the slice that it reads, by feature of `declaration`."""
        return tuple(
            (f, slice_index)
            for f, feature in enumerate(self.declared.features)
            for slice_index in self.slices_of_table[self.declared.table_index_of(feature)]
        )

    @cached_property
    def declaration(self) -> EmbeddingDeclaration:
        """Declaration of the slices. Its consumers concatenate fields, and are evaluated by `merge_outputs`."""
        declared = self.declared
        if not self.is_cut:
            whole = {
                name: Consumer(Concat(), self._pooled_fields(name))
                if name in self.local_attention
                else consumer
                for name, consumer in declared.consumers.items()
            }
            return replace(declared, consumers=whole) if self.local_attention else declared
        tables = tuple(shard.table for shard in self.table_shards)
        features = tuple(
            self._slice_feature(f, slice_index) for f, slice_index in self.feature_slice_pairs
        )
        # Sums that are still to be added and divided are not rounded before.
        has_sums = bool(self.hot_ids or self.split_consumers)
        output = declared.tables[0].compute_dtype if has_sums else declared.output
        bare = EmbeddingDeclaration(tables, features, {}, output)
        consumers = {
            name: consumer
            if name in self.exchanged
            else Consumer(
                Concat(),
                tuple(
                    slice_name
                    for taken in self._pooled_fields(name)
                    for slice_name in self.slice_names[taken]
                ),
            )
            for name, consumer in declared.consumers.items()
        }
        for name in self.split_consumers:
            consumer = declared.consumers[name]
            whole_fields, others = self._split_fields(name)
            positions = [consumer.features.index(field) for field in whole_fields]
            consumers[name] = Consumer(FieldSubset(consumer.interaction, positions), whole_fields)
            taken = tuple(slice_name for other in others for slice_name in self.slice_names[other])
            consumers[f"{name}{OTHERS}"] = Consumer(Concat(), taken)
        for name in self.unconsumed:
            if name not in self.sequences and self.slice_names[name] != (name,):
                consumers[name] = Consumer(Concat(), self.slice_names[name])
        return replace(bare, consumers=consumers)

    def _split_fields(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the fields of a split consumer: those that an exchange may evaluate, and the others."""
        features = self.declared.consumers[name].features
        positions = self.split_consumers[name]
        others = tuple(field for n, field in enumerate(features) if n not in positions)
        return tuple(features[n] for n in positions), others

    def _slice_feature(self, feature_index: int, slice_index: int) -> Feature:
        """Return a declared feature as the reader of one slice of its table."""
        feature = self.declared.features[feature_index]
        table = self.table_shards[slice_index].table
        if not isinstance(table, TableSide):
            return replace(feature, table=table.name)
        pooling: Pooling = "sequence" if feature.pooling == "sequence" else "sum"
        return Feature(f"{feature.name}[{table.side}]", table.name, pooling=pooling)

    @cached_property
    def slice_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the fields of a field's slices, by declared field, from the left."""
        declared = self.declared
        slice_names = {}
        for field in declared.fields:
            part = declared.parts[field.part][1]
            slice_names[field.name] = tuple(
                (f"{feature.name}.{part.name}" if part.name else feature.name)
                + table.suffix
                + SQUARES * field.is_squared
                for f, slice_index in self.feature_slice_pairs
                if f == field.feature
                for feature, table in [
                    (self._slice_feature(f, slice_index), self.table_shards[slice_index].table)
                ]
                if part.name in (other.name for other in table.parts)
            )
        return slice_names

    @cached_property
    def local_attention(self) -> tuple[str, ...]:
        """Declared consumers of sequences that `merge_outputs` evaluates."""
        consumers = self.declared.consumers.items()
        return tuple(
            name
            for name, consumer in consumers
            if consumer.interaction.sequences and name not in self.exchanged
        )

    def _pooled_fields(self, name: str) -> tuple[str, ...]:
        """Return the fields of a declared consumer that exchanges concatenate: without sequences if it is
        `local_attention`."""
        consumer = self.declared.consumers[name]
        return query_fields(consumer) if name in self.local_attention else consumer.features

    def _sequences_of(self, name: str) -> tuple[str, ...]:
        return self.declared.consumers[name].features[len(self._pooled_fields(name)) :]

    @cached_property
    def unconsumed(self) -> tuple[str, ...]:
        """Declared fields that exchanges return one by one."""
        taken = {field for name in self.declared.consumers for field in self._pooled_fields(name)}
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

    def split_hot(self, batch: Batch) -> SplitBatch:
        """Split a batch's lookups into those of hot and of cold rows."""
        return split_hot_rows(batch, self.declared, self.hot_ids)

    @cached_property
    def is_hashed(self) -> bool:
        """True if ids of some table are hashed to rows."""
        return bool(hashed_tables_by_feature(self.declared))

    def prepare_ids(self, batch: Batch) -> Batch:
        """Map a batch's ids to rows, where some table hashes its ids."""
        return hash_ids(batch, self.declared) if self.is_hashed else batch

    def sequence_offsets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the offsets (B + 1,) of each sequence of `local_attention` consumers, by field. The batch was checked
        before."""
        offsets_by_field = {}
        for name in self.local_attention:
            for field in self._sequences_of(name):
                offsets = batch.ids[self._feature_of(field).name].offsets
                offsets_by_field[field] = (
                    torch.arange(batch.size + 1) if offsets is None else offsets
                )
        return offsets_by_field

    @cached_property
    def has_declared_outputs(self) -> bool:
        """True if outputs of exchanges are the model's declared outputs."""
        return not (self.is_cut or self.local_attention or self.hashes_by_field)

    def merge_outputs(
        self,
        exchange_outputs: Mapping[str, Tensor],
        sequence_offsets: Mapping[str, Tensor],
        split_batch: SplitBatch | None = None,
        dense_columns: Tensor | None = None,
        evaluated_consumers: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Merge the outputs of an exchange of `declaration` into the model's declared outputs. sequence_offsets:
        as the method of that name returns them; dense_columns: of the batch; evaluated_consumers: consumers whose
        partials were sent."""
        outputs = (
            self._join_outputs(exchange_outputs, split_batch, dense_columns, evaluated_consumers)
            if self.is_cut
            else dict(exchange_outputs)
        )
        if self.hashes_by_field:
            outputs = sum_hashed_rows(outputs, self.hashes_by_field)
        if not self.is_cut and not self.local_attention:
            return outputs
        for name in self.local_attention:
            consumer = self.declared.consumers[name]
            (field,) = self._sequences_of(name)
            outputs[name] = consumer.interaction(
                outputs[name], outputs[field], sequence_offsets[field]
            )
        return {name: outputs[name] for name in self.declared.output_names}

    @cached_property
    def hashes_by_field(self) -> Mapping[str, int]:
        """Number of hashes by declared field of a sequence that reads a hash-stacked table."""
        tables = hashed_tables_by_feature(self.declared)
        return {
            name: int(tables[feature].hashes or 1)
            for name in sorted(self.sequences)
            if (feature := self._feature_of(name).name) in tables
        }

    def _join_outputs(
        self,
        exchange_outputs: Mapping[str, Tensor],
        split_batch: SplitBatch | None,
        dense_columns: Tensor | None,
        evaluated_consumers: Collection[str],
    ) -> dict[str, Tensor]:
        """Return the declared outputs, except that those of `local_attention` consumers are their pooled fields."""
        outputs = {}
        for name, consumer in self.declared.consumers.items():
            if name in self.local_attention:
                outputs[name] = self._merge_slices(
                    self._pooled_fields(name), exchange_outputs[name], split_batch
                )
            elif name in self.exchanged:
                outputs[name] = exchange_outputs[name].to(self.declared.output_dtype)
            elif name in self.split_consumers:
                others = self._merge_slices(
                    self._split_fields(name)[1], exchange_outputs[f"{name}{OTHERS}"], split_batch
                )
                outputs[name] = self._merge_partial(
                    name, exchange_outputs[name], others, dense_columns, name in evaluated_consumers
                )
            else:
                whole = self._merge_slices(consumer.features, exchange_outputs[name], split_batch)
                outputs[name] = evaluate_consumer(name, consumer, whole, dense_columns)
        for name in self.unconsumed:
            if name not in self.sequences:
                outputs[name] = self._merge_slices((name,), exchange_outputs[name], split_batch)
                continue
            parts = [exchange_outputs[slice_name] for slice_name in self.slice_names[name]]
            f = self._feature_of(name)
            if split_batch is not None and f.name in split_batch.order:
                order = split_batch.order[f.name].to(parts[0].device)
                outputs[name] = torch.cat(parts)[order].to(self.declared.output_dtype)
            else:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                outputs[name] = whole.to(self.declared.output_dtype)
        return outputs

    def _merge_partial(
        self,
        consumer_name: str,
        own_values: Tensor,
        others: Tensor,
        dense_columns: Tensor | None,
        is_partial: bool,
    ) -> Tensor:
        """Return the output of a split consumer. own_values: the partial of the fields that an exchange may evaluate,
        or these side by side; others: its other fields side by side."""
        consumer = self.declared.consumers[consumer_name]
        output = self.declared.output_dtype
        whole_fields, other_fields = self._split_fields(consumer_name)
        dims = {field.name: field.dim for field in self.declared.fields}
        if not is_partial:
            parts = dict(
                zip(
                    whole_fields,
                    own_values.to(output).split([dims[f] for f in whole_fields], 1),
                    strict=True,
                )
            )
            parts |= zip(
                other_fields, others.split([dims[f] for f in other_fields], 1), strict=True
            )
            whole = torch.cat([parts[f] for f in consumer.features], 1)
            return evaluate_consumer(consumer_name, consumer, whole, dense_columns)
        operator = consumer.interaction
        others = others.to(own_values)
        other_values = (
            others.unflatten(1, (len(other_fields), -1)) if operator.needs_equal_dims else others
        )
        positions = [consumer.features.index(f) for f in other_fields]
        stats = own_values + operator.partial_of_fields(other_values, positions)
        return combine(consumer_name, consumer, stats, dense_columns).to(output)

    def _merge_slices(
        self, field_names: Sequence[str], slice_values: Tensor, split_batch: SplitBatch | None
    ) -> Tensor:
        """Merge slices of these fields, side by side in `slice_values`, into the fields, (B, sum of dims)."""
        if split_batch is None:
            return slice_values.to(self.declared.output_dtype)
        dims = {field.name: field.dim for field in self.declared.fields}
        squared = {field.name for field in self.declared.fields if field.is_squared}
        parts = []
        column = 0
        for name in field_names:
            feature = self._feature_of(name)
            dim = dims[name]
            part = slice_values[:, column : column + dim]
            column = column + dim
            if self.declared.table_index_of(feature) in self.hot_ids:
                part = part + slice_values[:, column : column + dim]
                column = column + dim
                if feature.name in split_batch.lengths:
                    lengths = split_batch.lengths[feature.name].to(part.device)
                    part = part / (lengths.square() if name in squared else lengths)
            parts.append(part)
        return torch.cat(parts, 1).to(self.declared.output_dtype)

    def _feature_of(self, field: str) -> Feature:
        """Return the feature of a declared field."""
        declared_field = next(
            declared_field
            for declared_field in self.declared.fields
            if declared_field.name == field
        )
        return self.declared.features[declared_field.feature]


def is_merged_at_samples(sharding: Sharding) -> bool:
    """Return whether only the ranks of the samples have whole values of a table's fields: it is cut by columns, has hot
    rows, or is replicated."""
    return _explain_not_whole_at_owners(sharding) is not None


def slices_of(
    declared: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str] = (),
    bounds: Sequence[int] = (),
) -> Slices:
    """Return the slices of a declaration under these shardings, by table. exchanges, by table, needed if one of them
    evaluates consumers; bounds: by table, steps that rows are read ahead. Raises ConfigError for a table that cannot be
    cut as its sharding says."""
    shards = shard_tables(declared.tables, shardings)
    if not exchanges:
        return Slices(declared, shards, frozenset(), {})
    late = bounds or [0] * len(exchanges)
    exchanged = set()
    split_consumers = {}
    for name, consumer in declared.consumers.items():
        fields = {field.name: declared.parts[field.part][0] for field in declared.fields}
        tables = [fields[f] for f in consumer.features]
        is_apart = [is_merged_at_samples(shardings[t]) for t in tables]
        kinds = {
            (exchanges[t], late[t]) for t, apart in zip(tables, is_apart, strict=True) if not apart
        }
        if len(kinds) != 1:
            continue
        ((exchange, _),) = kinds
        interaction = consumer.interaction
        if any(is_apart):
            adds_up = interaction.merge == "sum" and not interaction.sequences
            if adds_up and exchange == "partials" and not isinstance(interaction, Concat):
                split_consumers[name] = tuple(n for n, apart in enumerate(is_apart) if not apart)
            continue
        # Rows of hashed tables are added up by `merge_outputs`, so owners cannot attend to them.
        is_hashed = any(declared.tables[t].hashes is not None for t in tables)
        is_attended = exchange == "partials" and not is_hashed
        if is_attended if interaction.sequences else exchange in EVALUATING:
            exchanged.add(name)
    return Slices(declared, shards, frozenset(exchanged), split_consumers)


def check_attention_under_partials(
    table_views: Slices, shardings: Sequence[Sharding], exchanges: Sequence[str]
) -> None:
    """Check that owners can evaluate each consumer of a sequence whose table is under `partials`. shardings, exchanges:
    by declared table. Raises ConfigError."""
    declared = table_views.declared
    tables = {field.name: declared.parts[field.part][0] for field in declared.fields}
    for name in table_views.local_attention:
        consumer = declared.consumers[name]
        sequence = consumer.features[-1]
        table = declared.tables[tables[sequence]].name
        if exchanges[tables[sequence]] != "partials":
            continue
        for field in consumer.features:
            t = tables[field]
            reason = _explain_not_whole_at_owners(shardings[t])
            if reason is None and exchanges[t] != "partials":
                reason = f"is under {exchanges[t]}"
            if reason is not None:
                raise ConfigError(
                    f"table {table!r}: got exchange=partials for {sequence!r}, a sequence that consumer {name!r} "
                    f"({type(consumer.interaction).__name__}) takes, but table {declared.tables[t].name!r} of its "
                    f"field {field!r} {reason}, wanted all its tables under partials and whole; set "
                    f"plan.tables.{table}.exchange=rows, or change table {declared.tables[t].name!r}"
                )


def _explain_not_whole_at_owners(sharding: Sharding) -> str | None:
    """Describe why only the ranks of the samples have whole values of a table's fields; None: its owners have them."""
    if sharding.slices > 1:
        return "is cut by columns"
    if sharding.has_hot:
        return "has hot rows"
    return "is replicated" if sharding.is_replicated else None
