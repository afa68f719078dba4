"""Size of a model's first operators: their fields, partials and bytes, for the choice of `partials`. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import (
    choose_cheapest_set,
    choose_remote_consumers,
    explain_never_in_towers,
    explain_not_remote,
    get_partial_width,
    get_result_width,
    list_whole_fields,
    restrict_declaration_to_tables,
)
from colonnade.hops.kinds import Flow
from colonnade.hops.load import ColumnLoad, TableLoad
from colonnade.interaction import Concat, FieldSubset
from colonnade.lookup.layout import EmbeddingDeclaration, query_fields
from colonnade.lookup.views import is_merged_at_samples, slices_of
from colonnade.plan.plan import EXACT, Codecs
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS


@dataclass(frozen=True, slots=True)
class FieldLoad:
    """Size of one field: what one feature reads of one part of its table."""

    name: str
    table: int
    """Index into the tables of the model."""
    feature: int
    """Index of the feature."""
    dim: int
    value_bytes: float
    """Bytes of a sample's pooled values in a message."""
    gradient_bytes: float
    """Bytes of their gradients in a message."""
    added_bytes: float = 0.0
    """Bytes of lookup weights that a rank sends to owners that divide the sums (mean, sqrtn): one for each lookup."""
    has_bags: bool = False
    """True if a sample may have several ids."""
    per_sample: float | None = None
    """Number of rows of a sequence per sample, which are read one by one; None: the field is pooled."""
    is_squared: bool = False
    """True for the sum of the squares of its feature's rows (`interaction.contract.SQUARES`)."""
    needs_rows: bool = False
    """True if rows must be sent instead of bags: for squares of rows that are read ahead."""


@dataclass(frozen=True, slots=True)
class ConsumerLoad:
    """Size of one consumer: one of the model's first operators."""

    name: str
    fields: tuple[int, ...]
    """Indices into `ModelLoad.fields`."""
    width: int | None
    """Number of floats of a sample's partial; None: it has no partial that can be summed."""
    value_bytes: float = 0.0
    """Bytes of a sample's partial in a message."""
    gradient_bytes: float = 0.0
    """Bytes of its gradient in a message."""
    whole_bags: frozenset[int] = frozenset()
    """Fields of which a sample's bag must be on one rank."""
    why_not_partial: str = ""
    """Reason why it has no partial, for messages."""
    inside_width: int | None = None
    """Number of floats of its result inside a tower with all its fields; None: towers do not evaluate it."""
    inside_value_bytes: float = 0.0
    """Bytes of that result of a sample in a message."""
    inside_gradient_bytes: float = 0.0
    """Bytes of its gradient in a message."""
    sequences: tuple[int, ...] = ()
    """Fields with rows that are read one by one. Owners of these rows compute the partials."""
    query_floats: int = 0
    """Number of floats of a sample's queries, which are sent to the owners of sequence rows."""
    query_bytes: float = 0.0
    """Bytes of a sample's queries in a message; their gradients have the same size."""
    depends_on_hot_rows: bool = False
    """True if only the hot rows of a table keep it from having a partial."""
    hot_table: str = ""
    """Table with hot rows that it reads in addition; the values of this table are sent even if partials are."""
    is_whole: bool = False
    """True for a tower module: one rank evaluates all fields at once."""
    can_be_split: bool = False
    """True if owners may evaluate some of its fields, and the ranks of the samples the others."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Sizes of all fields and consumers of a model."""

    fields: tuple[FieldLoad, ...]
    consumers: tuple[ConsumerLoad, ...] = ()

    @property
    def partial_candidates(self) -> tuple[ConsumerLoad, ...]:
        """Consumers with partials that are smaller than their fields if one owner has all of them."""
        return tuple(
            consumer
            for consumer in self.consumers
            if consumer.width is not None
            and (
                consumer.sequences
                or consumer.width < sum(self.fields[f].dim for f in consumer.fields)
            )
        )


def build_model_load_without_consumers(table_loads: Sequence[TableLoad]) -> ModelLoad:
    """Return a model load without consumers, if only the tables of a model are known: values are sent."""
    return ModelLoad(
        tuple(
            FieldLoad(f"{load.name} {c}", t, c, load.width, load.bag_bytes, load.gradient_bytes)
            for t, load in enumerate(table_loads)
            for c in range(len(load.columns))
        )
    )


def build_model_load(
    declaration: EmbeddingDeclaration,
    loads: Sequence[TableLoad],
    *,
    codecs: Codecs = EXACT,
    bags: Collection[str] = (),
    world: World | None = None,
    reads_ahead: int = 0,
    declared: EmbeddingDeclaration | None = None,
) -> ModelLoad:
    """Build the sizes of a model's fields and consumers.

    loads: of the declaration's tables. bags: features with several ids per sample, in addition to those that a sample
    of the data shows. world, reads_ahead: as in `operator_cut.explain_not_remote`. declared: the model's own
    declaration, if `declaration` splits tables into hot and cold rows."""
    compute = declaration.compute_dtype
    samples = max(loads[0].samples, 1e-300)
    columns: dict[str, ColumnLoad] = {}
    for load in loads:
        readers = [feature.name for feature in declaration.features if feature.table == load.name]
        columns |= zip(readers, load.columns, strict=False)
    fields = []
    for field in declaration.fields:
        feature = declaration.features[field.feature]
        # Without a sample of the data, a feature has one id per sample.
        column = columns.get(feature.name, ColumnLoad(samples, 1))
        has_bags = feature.name in bags or column.longest > 1
        divides = feature.pooling in ("mean", "sqrtn") and has_bags and not column.is_weighted
        divides = divides and feature.name in columns
        fields.append(
            FieldLoad(
                field.name,
                declaration.parts[field.part][0],
                field.feature,
                field.dim,
                float(CODECS[codecs.values].row_bytes([field.dim], compute)),
                float(CODECS[codecs.gradients].row_bytes([field.dim], compute)),
                column.lookups * compute.itemsize if divides else 0.0,
                has_bags,
                column.lookups / samples if feature.pooling == "sequence" else None,
                is_squared=field.is_squared,
                needs_rows=field.is_squared and reads_ahead > 0,
            )
        )
    original = declared or declaration
    consumers = [
        _build_consumer_load(
            declaration,
            name,
            fields,
            codecs,
            explain_not_remote(original, name, world=world, reads_ahead=reads_ahead),
            explain_never_in_towers(declaration, name, world, reads_ahead=reads_ahead) is None,
            None if declared is None else _find_hot_table(name, declared, declaration),
        )
        for name in declaration.consumers
    ]
    return ModelLoad(tuple(fields), tuple(consumers))


def add_squares(table_loads: Sequence[TableLoad], model_load: ModelLoad) -> list[TableLoad]:
    """Return the loads with the bytes of squares that the model's fields read of each table. Pure."""
    results = []
    for t, load in enumerate(table_loads):
        squares = [field for field in model_load.fields if field.table == t and field.is_squared]
        values = sum(field.value_bytes for field in squares)
        gradients = sum(field.gradient_bytes for field in squares)
        results.append(replace(load, squares_bytes=values, squares_gradient_bytes=gradients))
    return results


def _build_consumer_load(
    declaration: EmbeddingDeclaration,
    consumer_name: str,
    fields: Sequence[FieldLoad],
    codecs: Codecs,
    why_not_partial: str | None,
    can_be_inside: bool,
    hot_table: str | None,
) -> ConsumerLoad:
    """Return the size of a consumer.

    why_not_partial: reason why owners cannot evaluate it, if any. can_be_inside: whether a tower can evaluate it.
    hot_table: table with hot rows that it reads, if any."""
    consumer = declaration.consumers[consumer_name]
    compute = declaration.compute_dtype
    values = CODECS[codecs.values]
    gradients = CODECS[codecs.gradients]
    exact = CODECS["exact"]
    indices = {field.name: i for i, field in enumerate(fields)}
    depends_on_hot_rows = (
        hot_table is not None
        and why_not_partial is None
        and isinstance(consumer.interaction, Concat)
    )
    if depends_on_hot_rows:
        why_not_partial = (
            f"hot and cold rows of table {hot_table} are combined on the ranks of the samples"
        )
    width = None if why_not_partial else get_partial_width(declaration, consumer_name)
    is_split = isinstance(consumer.interaction, FieldSubset)  # Towers do not evaluate these.
    inside = (
        get_result_width(declaration, consumer_name) if can_be_inside and not is_split else None
    )
    queries = query_fields(consumer)
    query_floats = sum(fields[indices[query]].dim for query in queries)
    # Logarithms of sums are sent exactly (exchange/partials.py).
    codec, gradient_codec = (exact, exact) if queries else (values, gradients)
    sequences = consumer.features[len(queries) :] if queries else ()
    return ConsumerLoad(
        consumer_name,
        tuple(indices[feature] for feature in consumer.features),
        width,
        float(codec.row_bytes([width or 0], compute)),
        float(gradient_codec.row_bytes([width or 0], compute)),
        frozenset(indices[f] for f in list_whole_fields(declaration, consumer_name)),
        why_not_partial or "",
        inside,
        float(values.row_bytes([inside or 0], compute)),
        float(gradients.row_bytes([inside or 0], compute)),
        tuple(indices[feature] for feature in sequences),
        query_floats,
        float(exact.row_bytes([query_floats], compute)) if queries else 0.0,
        depends_on_hot_rows,
        str(hot_table) if is_split else "",
        consumer.interaction.merge == "whole",
        consumer.interaction.merge == "sum"
        and not queries
        and not isinstance(consumer.interaction, Concat),
    )


def _find_hot_table(
    consumer_name: str, declared: EmbeddingDeclaration, split_declaration: EmbeddingDeclaration
) -> str | None:
    """Return a table of a consumer that `split_declaration` splits into hot and cold rows; None if there is none."""
    unsplit = {table.name for table in split_declaration.tables}
    features = declared.consumers[consumer_name].features
    tables = [
        declared.tables[declared.parts[f.part][0]].name
        for f in declared.fields
        if f.name in features
    ]
    return next((table for table in tables if table not in unsplit), None)


def find_remote_consumers(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
) -> tuple[str, ...]:
    """Return the names of the consumers that owners evaluate, so that partials are sent.

    shardings, exchanges: by table."""
    slices = slices_of(declaration, shardings, exchanges)
    tables = {
        shard.table.name for shard in slices.table_shards if exchanges[shard.number] == "partials"
    }
    under_partials = restrict_declaration_to_tables(slices.declaration, tables, "partials")
    slice_shardings = [shard.sharding for shard in slices.table_shards]
    return choose_remote_consumers(under_partials, slice_shardings)


def check_whole_bags(
    declaration: EmbeddingDeclaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    bag_features: Collection[str],
) -> None:
    """Raise ConfigError if an operator that owners evaluate needs whole bags, and a bag's rows may be on several
    ranks.

    bag_features: features with any number of ids per sample."""
    fields = {field.name: field for field in declaration.fields}
    for name in find_remote_consumers(declaration, shardings, exchanges):
        for field in sorted(list_whole_fields(declaration, name)):
            feature = declaration.features[fields[field].feature]
            sharding = shardings[declaration.table_index_of(feature)]
            if is_merged_at_samples(sharding):  # Owners do not evaluate this field.
                continue
            if feature.name in bag_features and sharding.num_owners > 1:
                raise build_split_bag_error(feature.table, sharding.kind, feature.name, name)


def build_split_bag_error(
    table_name: str, sharding_kind: str, feature_name: str, consumer_name: str
) -> ConfigError:
    """Build the error for a consumer that needs whole bags of a feature with bags on several ranks."""
    return ConfigError(
        f"table {table_name!r}: got exchange=partials with sharding={sharding_kind}, but feature "
        f"{feature_name!r} has bags of ids, and "
        f"consumer {consumer_name!r}, which owners evaluate, needs a sample's whole bag on one rank; set "
        f"plan.tables.{table_name}.sharding=table_wise (plan.sharding=auto finds a rank for it), or "
        f"plan.tables.{table_name}.exchange=pooled; FM and BiInteraction with over='ids' (model.over=ids) "
        "take split bags"
    )


@dataclass(frozen=True, slots=True)
class TowerCompression:
    """Change of the bytes between towers by operators inside towers: per sample, by table, mostly negative.

    The bytes of an operator's result are divided among its tables by the widths of its fields, so that their sum is
    exact.
    """

    inside: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Tower of each consumer that is evaluated inside one, by index of the consumer."""
    values: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Additional bytes of values."""
    gradients: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Additional bytes of gradients."""
    weight_bytes: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Bytes of lookup weights that a rank's batch sends to all owners, for bags that are split over owners."""

    def list_flows(self, table_index: int, samples_per_rank: float, num_owners: int) -> list[Flow]:
        """List the change of what is sent for a table, `samples_per_rank` samples of a rank and `num_owners`
        owners."""
        weights = self.weight_bytes.get(table_index, 0.0) / num_owners
        return [
            Flow("route", "owners", weights),
            Flow("fetch", "relays", samples_per_rank * self.values.get(table_index, 0.0)),
            Flow("push", "relays", samples_per_rank * self.gradients.get(table_index, 0.0)),
        ]


def find_tower_compression(
    model_load: ModelLoad,
    tower_by_table: Sequence[int | None],
    num_owners: Sequence[int],
    is_cut: Sequence[bool],
    exchanges: Sequence[str],
) -> TowerCompression:
    """Find the consumers to evaluate inside towers so that the fewest floats leave them.

    By table: tower_by_table, the tower with all its rows, if any; num_owners, ranks that hold parts of its bags before
    they are pooled; is_cut, whether its rows are cut by columns; exchanges."""
    fields = model_load.fields
    candidates: dict[int, int | None] = {}
    for c, consumer in enumerate(model_load.consumers):
        tables = {fields[f].table for f in consumer.fields}
        table_towers = {tower_by_table[t] for t in tables}
        table_exchanges = {exchanges[t] for t in tables}
        can_be_inside = consumer.inside_width is not None and not any(is_cut[t] for t in tables)
        if (
            can_be_inside
            and len(table_towers) == len(table_exchanges) == 1
            and table_towers != {None}
        ):
            candidates[c] = next(iter(table_towers))
    if not candidates:
        return TowerCompression()

    def find_sent_fields(inside: Sequence[int]) -> set[int]:
        read = {f for consumer in model_load.consumers for f in consumer.fields}
        others = [consumer for c, consumer in enumerate(model_load.consumers) if c not in inside]
        unread = {f for f in range(len(fields)) if f not in read}
        return unread.union(*(consumer.fields for consumer in others))

    def count_floats(inside: Sequence[int]) -> float:
        widths = sum(model_load.consumers[c].inside_width or 0 for c in inside)
        return widths + sum(fields[f].dim for f in find_sent_fields(inside))

    best = choose_cheapest_set(list(candidates), count_floats)
    inside = {c: tower for c in best if (tower := candidates[c]) is not None}
    return _count_byte_changes(model_load, inside, find_sent_fields(best), num_owners)


def _count_byte_changes(
    model_load: ModelLoad,
    tower_by_consumer: Mapping[int, int],
    sent_fields: Collection[int],
    num_owners: Sequence[int],
) -> TowerCompression:
    """Count the change of bytes by table. tower_by_consumer: tower by index of the consumers that are evaluated in
    one.

    sent_fields: fields with values that leave their tower all the same.
    """
    fields = model_load.fields
    values = dict[int, float]()
    gradients = dict[int, float]()
    weight_bytes = dict[int, float]()
    weighted = set()
    for f in {f for c in tower_by_consumer for f in model_load.consumers[c].fields}:
        load = fields[f]
        if f not in sent_fields:
            values[load.table] = values.get(load.table, 0.0) - load.value_bytes
            gradients[load.table] = gradients.get(load.table, 0.0) - load.gradient_bytes
        if load.added_bytes and num_owners[load.table] > 1 and load.feature not in weighted:
            weighted.add(load.feature)
            weight_bytes[load.table] = weight_bytes.get(load.table, 0.0) + load.added_bytes
    for c in tower_by_consumer:
        consumer = model_load.consumers[c]
        width = sum(fields[f].dim for f in consumer.fields)
        for f in consumer.fields:
            table = fields[f].table
            part = fields[f].dim / width
            values[table] = values.get(table, 0.0) + part * consumer.inside_value_bytes
            gradients[table] = gradients.get(table, 0.0) + part * consumer.inside_gradient_bytes
    return TowerCompression(tower_by_consumer, values, gradients, weight_bytes)
