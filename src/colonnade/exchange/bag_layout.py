"""Layout of an exchange of bags: columns that each rank sends and receives, bags that are divided; and its lookups.

Legend: C columns of lookups, W columns of all fields side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import ConfigError, DataError
from colonnade.exchange.contract import RowsLookup
from colonnade.exchange.operator_cut import get_result_width, list_whole_fields
from colonnade.exchange.operators import Attended, Partials
from colonnade.lookup.contract import PartLookup
from colonnade.lookup.fields import ColumnKey, ColumnRun, FieldColumns, FieldLayout, find_runs
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    LookupColumns,
    Lookups,
    Output,
    collect_lookups,
    list_lookup_outputs,
    replace_weights,
)
from colonnade.table import POOLINGS
from colonnade.topology.sharding import Sharding
from colonnade.wire.transport import LastTransport, PendingTransfer


@dataclass(frozen=True, slots=True)
class EvaluatedFields:
    """Fields of consumers that are evaluated before values reach the samples' ranks. Numbers are indices into
    Declaration.features, except in `taken_by` and `attended`."""

    consumers: tuple[str, ...] = ()
    taken_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Fields by consumer of pooled values: indices into Declaration.fields."""
    attended: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Fields of the query and of the sequence, by consumer of a sequence."""
    averaged: frozenset[int] = frozenset()
    """Features whose means are computed before the samples' ranks, which need not divide them."""
    averaged_by_owner: frozenset[int] = frozenset()
    """Features of `averaged` whose bags are whole on one rank, which pools them as declared."""
    unsplit: frozenset[int] = frozenset()
    """Features of which a sample may have at most one id: a consumer needs whole bags, and rows are on several
    ranks."""

    @property
    def weighed(self) -> frozenset[int]:
        """Features whose lookups are weighed by the inverse length of their bag, because owners have parts of bags."""
        return self.averaged - self.averaged_by_owner

    @property
    def queries(self) -> tuple[int, ...]:
        """Fields whose values go to the ranks that have rows of a sequence."""
        return tuple(dict.fromkeys(query for query, _ in self.attended.values()))


def find_evaluated_fields(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    consumers: Sequence[str],
    *,
    has_whole_bags: bool,
) -> EvaluatedFields:
    """Return the fields that these consumers are evaluated of. has_whole_bags: whether bags whose rows are split are
    added up before."""
    numbers = {declared_field.name: i for i, declared_field in enumerate(declaration.fields)}
    taken_by = {}
    attended = {}
    for name in consumers:
        consumer = declaration.consumers[name]
        fields = tuple(numbers[feature_name] for feature_name in consumer.features)
        if consumer.interaction.sequences:
            attended[name] = (fields[0], fields[1])
        else:
            taken_by[name] = fields
    taken = [*taken_by.values(), *((query,) for query, _ in attended.values())]
    features = {declaration.fields[i].feature for fields in taken for i in fields}
    whole = {
        f
        for f in features
        if shardings[declaration.table_index_of(declaration.features[f])].num_owners == 1
    }
    averaged = {f for f in features if declaration.features[f].pooling in ("mean", "sqrtn")}
    unsplit = {
        declaration.fields[i].feature
        for name, fields in taken_by.items()
        for whole_fields in [list_whole_fields(declaration, name)]
        for i in fields
        if declaration.fields[i].name in whole_fields
    }
    return EvaluatedFields(
        tuple(consumers),
        taken_by,
        attended,
        frozenset(averaged),
        frozenset(averaged & whole),
        frozenset() if has_whole_bags else frozenset(unsplit - whole),
    )


@dataclass(frozen=True, slots=True)
class Division:
    """Division of bags by their lengths, or the roots of these, on the samples' rank."""

    column: int  # of lookups
    pooling: str
    columns: slice  # of the arriving columns
    is_squared: bool  # the divisor of squares is squared, too

    def compute_divisors(self, bag_offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the sums of each bag are divided by, (B, 1). bag_offsets (B + 1,): of the bags."""
        lengths = bag_offsets.diff().clamp(min=1).to(dtype)
        if self.pooling == "mean":
            return (lengths.square() if self.is_squared else lengths)[:, None]
        # Correctly rounded roots, as the native kernels'; torch's own on a CPU are not.
        root = torch.from_numpy(np.sqrt(lengths.numpy()))
        return (lengths if self.is_squared else root)[:, None]


@dataclass(frozen=True)
class BagLayout:
    """Layout of one exchange, on one rank."""

    declaration: EmbeddingDeclaration
    evaluated: EvaluatedFields
    outputs: tuple[Output, ...]
    fields: FieldLayout
    """Fields of all outputs, pooled ones first."""
    shares: tuple[FieldLayout, ...]
    """Fields of tables that a rank has rows of, by rank."""
    arriving: FieldColumns
    """Columns that arrive at the samples' ranks."""
    requested: LookupColumns
    """Lookups of a rank's own samples, in the form in which they are requested."""
    runs: tuple[list[ColumnRun], ...]
    """Runs of an output's columns among the arriving ones, by output."""
    divisions: tuple[Division, ...]

    def pooled_declaration(self, rank: int) -> EmbeddingDeclaration:
        """Return the declaration that a rank pools: sums of its share, and means where it has whole bags."""
        return self.shares[rank].as_sum_declaration(
            declared_pooling=self.evaluated.averaged_by_owner
        )

    def pooled_columns(self, rank: int) -> FieldColumns:
        """Return the columns that a rank pools."""
        return self.shares[rank].columns

    def sent_columns(self, rank: int) -> FieldColumns:
        """Return the columns that a rank sends where owners evaluate consumers: partials of the consumers that it has
        fields of, and fields that are needed themselves."""
        share = set(self.shares[rank].order)

        def is_sent(key: ColumnKey) -> bool:
            if isinstance(key, int):
                return key in share
            return bool(share & set(self.evaluated.taken_by.get(key, ())))

        return FieldColumns({key: dim for key, dim in self.arriving.dims.items() if is_sent(key)})

    def fields_of_column(self, key: ColumnKey) -> tuple[int, ...]:
        """Return the fields that a column of `arriving` is made of."""
        return (key,) if isinstance(key, int) else self.evaluated.taken_by[key]


def build_bag_layout(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    num_ranks: int,
    evaluated: EvaluatedFields,
    *,
    sums_groups: bool = False,
) -> BagLayout:
    """Build the layout of an exchange of bags. sums_groups: whether owners pool fields together of which consumers need
    the sum alone. Raises ConfigError for sequences whose rows would have to be sent."""
    split_outputs = tuple(_separate_evaluated_outputs(declaration, evaluated.consumers))
    for output in split_outputs:
        if output.is_sequence:
            feature = declaration.features[declaration.fields[output.fields[0]].feature]
            raise ConfigError(
                f"feature {feature.name!r} of table {feature.table!r}: got exchange pooled, partials, "
                "towers or tower_rows for a sequence, whose rows reach the model one by one; give this table "
                "exchange rows"
            )
    order = dict.fromkeys(i for output in split_outputs for i in output.fields)
    unordered = FieldLayout(declaration, tuple(order))
    fields = FieldLayout(declaration, unordered.pooled + unordered.sequences)
    arriving = _list_arriving_columns(declaration, evaluated, split_outputs)
    groups = _group_summed_fields(declaration, evaluated, arriving) if sums_groups else {}
    features = fields.features
    poolings = [declaration.features[f].pooling for f in features]
    column = {f: c for c, f in enumerate(features)}
    divisions = [
        Division(
            column[f],
            declaration.features[f].pooling,
            arriving.slice_of(key),
            declaration.fields[key].is_squared,
        )
        for key, f in (
            (k, declaration.fields[k].feature) for k in arriving.dims if isinstance(k, int)
        )
        if declaration.features[f].pooling in ("mean", "sqrtn") and f not in evaluated.averaged
    ]
    return BagLayout(
        declaration=declaration,
        evaluated=evaluated,
        outputs=split_outputs,
        fields=fields,
        shares=tuple(fields.select_rank(rank, shardings, groups) for rank in range(num_ranks)),
        arriving=arriving,
        requested=LookupColumns(
            features,
            (),
            torch.tensor(
                [declaration.table_index_of(declaration.features[f]) for f in features],
                dtype=torch.int32,
            ),
            torch.tensor(
                [
                    _requested_pooling(f, pooling, evaluated, num_ranks)
                    for f, pooling in zip(features, poolings, strict=True)
                ],
                dtype=torch.uint8,
            ),
        ),
        runs=tuple(find_runs([output.column_starts for output in split_outputs], arriving)),
        divisions=tuple(divisions),
    )


def _group_summed_fields(
    declaration: EmbeddingDeclaration, evaluated: EvaluatedFields, arriving: FieldColumns
) -> dict[int, Hashable]:
    """Return the group of each field that reaches the samples' ranks, or a consumer, only as a part of sums."""
    uses: dict[int, list[tuple[str, int | None]]] = {}
    for name, fields in evaluated.taken_by.items():
        kinds = declaration.consumers[name].interaction.group_summed_inputs(len(fields))
        for i, kind in zip(fields, kinds, strict=True):
            uses.setdefault(i, []).append((name, kind))
    return {
        i: tuple(taken)
        for i, taken in uses.items()
        if i not in arriving.dims and all(kind is not None for _, kind in taken)
    }


def _separate_evaluated_outputs(
    declaration: EmbeddingDeclaration, consumers: Collection[str]
) -> list[Output]:
    """Return outputs, with those of evaluated consumers as separate ones."""
    separate: list[Output] = []
    for output in list_lookup_outputs(declaration):
        if others := tuple(name for name in output.names if name not in consumers):
            separate.append(replace(output, names=others))
        for name in output.names:
            if name in consumers:
                width = get_result_width(declaration, name)
                assert width is not None
                separate.append(Output((name,), output.fields, (), width, False, True))
    return separate


def _list_arriving_columns(
    declaration: EmbeddingDeclaration, evaluated: EvaluatedFields, split_outputs: Sequence[Output]
) -> FieldColumns:
    """Return the arriving columns: fields and partials of the outputs, then queries, then merged results of
    attention."""
    dims: dict[ColumnKey, int] = {}
    merged: dict[ColumnKey, int] = {}
    for output in split_outputs:
        for key, _ in output.column_starts:
            if key in evaluated.attended:
                merged[key] = output.width
            else:
                is_partial = isinstance(key, str)
                dims[key] = output.width if is_partial else declaration.fields[int(key)].dim
    for i in evaluated.queries:
        dims[i] = declaration.fields[i].dim
    return FieldColumns({**dims, **merged})


def _requested_pooling(f: int, pooling: str, evaluated: EvaluatedFields, num_ranks: int) -> int:
    """Return the pooling that the owner of feature f's lookups applies, as `_native.Lookups` numbers it. In a world of
    one the lookups are the owner's, too."""
    is_whole = f in evaluated.averaged_by_owner or (pooling == "sequence" and num_ranks == 1)
    return POOLINGS.index(pooling if is_whole else "sum")


def collect_weighed_lookups(batch: Batch, layout: BagLayout) -> Lookups:
    """Return a batch's lookups, weighed by the lengths of bags where several owners compute a mean. Raises DataError,
    NonFiniteError."""
    declaration = layout.declaration
    evaluated = layout.evaluated
    lookups = collect_lookups(batch, declaration, layout.requested)
    if not evaluated.weighed and not evaluated.unsplit:
        return lookups
    weights = list(lookups.weights)
    dtype = declaration.compute_dtype
    for c, f in enumerate(layout.requested.features):
        if (bags := lookups.bags[c]) is None:
            continue
        lengths = bags.diff()
        feature = declaration.features[f]
        if f in evaluated.unsplit and len(lengths) and int(lengths.max()) > 1:
            raise DataError(
                f"feature {feature.name!r}: got a sample with {int(lengths.max())} ids, wanted at most one: its "
                "table's rows are on several ranks and its consumer needs a sample's whole bag on one. Give table "
                f"{feature.table!r} the sharding table_wise, or exchange pooled; FM and BiInteraction with over='ids' "
                "(model.over=ids) take split bags"
            )
        if f in evaluated.weighed:
            weights[c] = _compute_mean_weights(lengths, feature.pooling, weights[c], dtype)
    if not evaluated.weighed:
        return lookups
    return replace_weights(lookups, weights, layout.requested, dtype)


def _compute_mean_weights(
    bag_lengths: Tensor, pooling: str, lookup_weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the weight of each lookup, so that the weighted sum of a bag is its mean, or its sum divided by the root
    of its length. bag_lengths: by bag."""
    divisors = bag_lengths.clamp(min=1).to(dtype)
    shares = 1 / (divisors if pooling == "mean" else divisors.sqrt())
    shares = shares.repeat_interleave(bag_lengths)
    return shares if lookup_weights is None else shares * lookup_weights.to(dtype)


@dataclass(slots=True)
class EvaluatedBatch:
    """State of a batch on one rank between sending values and their gradients."""

    pooled: Tensor | None = None  # (G, W_o), where owners evaluate operators
    partials: list[Partials] = field(default_factory=list)  # by chunk
    gathered: list[Tensor] | None = None  # by chunk: sums that wait inside a tower for their use
    sequence_rows: list[Tensor] = field(default_factory=list)  # of attended sequences, (E, D)
    attended: dict[str, Attended] = field(default_factory=dict)  # by consumer
    row_gradients: dict[int, Tensor] = field(default_factory=dict)  # by field of such a sequence


@dataclass(slots=True)
class BagReads:
    """Columns that the samples' rank reads: a pending transfer, or all of them."""

    pending: PendingTransfer | None = None
    total: Tensor | None = None  # (B, W)


@dataclass(slots=True)
class BagsLookup(PartLookup):
    """Lookup of one batch whose bags are pooled by owners. `lookups` are all ranks' lookups of this rank's rows; in a
    tower, all peers'."""

    sizes: list[int] = field(default_factory=list)  # samples by rank
    requested: Lookups | None = None  # of this rank's own samples
    reads: BagReads | None = None
    evaluation: EvaluatedBatch = field(default_factory=EvaluatedBatch)
    inner: RowsLookup | None = None  # of rows that are requested once a tower


@dataclass(frozen=True, slots=True)
class LastHop:
    """Hop that ends at the samples' ranks."""

    transport: LastTransport
    columns: FieldColumns  # at its senders
    sent: FieldColumns  # as sent: columns, or partials of some of them
