"""What a model's first operators take of its tables, as numbers: what the choice of `partials` goes by. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import (
    barred,
    never_in_towers,
    part_of,
    partial_width,
    remote_consumers,
    result_width,
)
from colonnade.interaction import Concat, SomeFields
from colonnade.lookup.layout import Declaration, Field, queries_of
from colonnade.lookup.views import slices_of
from colonnade.plan.cost.table_stats import ColumnLoad, TableLoad
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, EXACT, Codecs


@dataclass(frozen=True, slots=True)
class FieldLoad:
    """Of what one feature reads of one part of its table."""

    name: str
    table: int
    """Index into the tables of the model."""
    feature: int
    """That reads it."""
    dim: int
    value_bytes: float
    """Of a sample's pooled values as they travel."""
    gradient_bytes: float
    added_bytes: float = 0.0
    """To owners, of all of a rank's lookups, where they divide: a weight each."""
    has_bags: bool = False
    """A sample may have several ids."""
    per_sample: float | None = None
    """Rows of a sequence, which are taken one by one; None: it is pooled."""


@dataclass(frozen=True, slots=True)
class ConsumerLoad:
    """Of one of the model's first operators."""

    name: str
    fields: tuple[int, ...]
    """Indices into `ModelLoad.fields`."""
    width: int | None
    """Floats of a sample's partial; None: it has none that adds up."""
    value_bytes: float = 0.0
    """Of a sample's partial as it travels."""
    gradient_bytes: float = 0.0
    needs_bags: bool = True
    """A sample's bag of a field must lie on one rank."""
    barred: str = ""
    """Why it has none, in words."""
    inside_width: int | None = None
    """Floats of what it gives where all its fields lie in one tower; None: it is not evaluated there."""
    inside_value_bytes: float = 0.0
    """Of that, of a sample, as it travels."""
    inside_gradient_bytes: float = 0.0
    sequences: tuple[int, ...] = ()
    """Those of its fields whose rows it takes one by one. Partials come from where these lie."""
    query_floats: int = 0
    """Of a sample, to where they lie."""
    query_bytes: float = 0.0
    """The same, which gradients of queries are, too."""
    is_apart: bool = False
    """It would have a partial, were it not for how rows of a table are laid out."""
    beside: str = ""
    """A table with hot rows that it takes, too, of which values travel whatever its partial is of."""
    is_whole: bool = False
    """One rank evaluates it of all its fields at once: a tower module."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """All of them."""

    fields: tuple[FieldLoad, ...]
    consumers: tuple[ConsumerLoad, ...] = ()

    @property
    def able(self) -> tuple[ConsumerLoad, ...]:
        """Those with partials that may save something, were all fields of one owner."""
        return tuple(
            each
            for each in self.consumers
            if each.width is not None
            and (each.sequences or each.width < sum(self.fields[f].dim for f in each.fields))
        )


def bare(loads: Sequence[TableLoad]) -> ModelLoad:
    """Of a model of which nothing is known but its tables: all values travel."""
    return ModelLoad(
        tuple(
            FieldLoad(f"{load.name} {c}", t, c, load.width, load.bag_bytes, load.gradient_bytes)
            for t, load in enumerate(loads)
            for c in range(len(load.columns))
        )
    )


def model_load(
    declaration: Declaration,
    loads: Sequence[TableLoad],
    *,
    codecs: Codecs = EXACT,
    bags: Collection[str] = (),
    world: World | None = None,
    reads_ahead: int = 0,
    declared: Declaration | None = None,
) -> ModelLoad:
    """`loads`: of the declaration's tables. `bags`: features whose samples may have several ids, beside those of which
    a sample of the data has shown some. `world`, `reads_ahead`: as `substitution.barred`. `declared`: by the model, of
    a declaration that has hot rows of tables beside cold ones."""
    columns: dict[str, ColumnLoad] = {}
    for load in loads:
        readers = [each for each in declaration.features if each.table == load.name]
        columns |= {each.name: column for each, column in zip(readers, load.columns, strict=False)}
    fields = []
    for field in declaration.fields:
        name = declaration.features[field.feature].name
        fields.append(
            _field_load(declaration, field, columns.get(name), loads, codecs, name in bags)
        )
    original = declared or declaration
    consumers = [
        _consumer_load(
            declaration, name, fields, codecs,
            barred(original, name, world=world, reads_ahead=reads_ahead),
            never_in_towers(declaration, name, world, reads_ahead=reads_ahead) is None,
            None if declared is None else _hot_of(name, declared, declaration),
        )
        for name in declaration.consumers
    ]  # fmt: skip
    return ModelLoad(tuple(fields), tuple(consumers))


def _field_load(
    declaration: Declaration,
    field: Field,
    column: ColumnLoad | None,
    loads: Sequence[TableLoad],
    codecs: Codecs,
    has_bags: bool,
) -> FieldLoad:
    """Return what a field costs. column: its feature's in a sample of the data, if there is one; has_bags: samples may
    have several ids though the sample of the data shows none."""
    compute, feature = declaration.compute_dtype, declaration.features[field.feature]
    has_bags |= column is not None and column.longest > 1
    added = 0.0
    if feature.pooling in ("mean", "sqrtn") and column and has_bags and not column.is_weighted:
        added = column.lookups * compute.itemsize
    return FieldLoad(
        field.name, declaration.parts[field.part][0], field.feature, field.dim,
        float(CODECS[codecs.values].row_bytes([field.dim], compute)),
        float(CODECS[codecs.gradients].row_bytes([field.dim], compute)), added, has_bags,
        _per_sample(column, loads) if feature.pooling == "sequence" else None,
    )  # fmt: skip


def _consumer_load(
    declaration: Declaration,
    name: str,
    fields: Sequence[FieldLoad],
    codecs: Codecs,
    why: str | None,
    can_be_inside: bool,
    hot: str | None,
) -> ConsumerLoad:
    """Return what a consumer costs. why: nobody but the samples' ranks may evaluate it, if so; can_be_inside: a tower
    may; hot: table of which it takes hot rows beside cold ones."""
    consumer, compute = declaration.consumers[name], declaration.compute_dtype
    values, gradients, exact = (
        CODECS[codecs.values], CODECS[codecs.gradients], CODECS["exact"],
    )  # fmt: skip
    numbers = {field.name: i for i, field in enumerate(fields)}
    is_apart = hot is not None and why is None and isinstance(consumer.interaction, Concat)
    if is_apart:
        why = f"what hot and cold rows of table {hot} give is put together where the samples are"
    width = None if why else partial_width(declaration, name)
    is_split = isinstance(consumer.interaction, SomeFields)  # which towers do not do
    inside = result_width(declaration, name) if can_be_inside and not is_split else None
    queries = queries_of(consumer)
    of_query = sum(fields[numbers[each]].dim for each in queries)
    # Logarithms of sums are not rounded (exchange/partials.py).
    codec, gradient_codec = (exact, exact) if queries else (values, gradients)
    sequences = consumer.features[len(queries) :] if queries else ()
    return ConsumerLoad(
        name, tuple(numbers[each] for each in consumer.features), width,
        float(codec.row_bytes([width or 0], compute)),
        float(gradient_codec.row_bytes([width or 0], compute)),
        consumer.interaction.needs() == "fields", why or "", inside,
        float(values.row_bytes([inside or 0], compute)),
        float(gradients.row_bytes([inside or 0], compute)),
        tuple(numbers[each] for each in sequences), of_query,
        float(exact.row_bytes([of_query], compute)) if queries else 0.0,
        is_apart, str(hot) if is_split else "", consumer.interaction.merge == "whole",
    )  # fmt: skip


def _hot_of(name: str, declared: Declaration, sides: Declaration) -> str | None:
    """A table of a consumer's whose hot rows are beside cold ones."""
    left = {table.name for table in sides.tables}
    taken = declared.consumers[name].features
    tables = [
        declared.tables[declared.parts[f.part][0]].name for f in declared.fields if f.name in taken
    ]
    return next((table for table in tables if table not in left), None)


def _per_sample(column: ColumnLoad | None, loads: Sequence[TableLoad]) -> float:
    """Rows of a sequence; one, of which nothing is known."""
    return 1.0 if column is None else column.lookups / max(loads[0].samples, 1e-300)


def evaluated_at_owners(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    *,
    world: World | None = None,
    reads_ahead: int = 0,
) -> tuple[str, ...]:
    """Names of the consumers whose partials travel; by table: `shardings`, `exchanges`. `world`, `reads_ahead`: as
    `substitution.remote_consumers`."""
    slices = slices_of(declaration, shardings, exchanges)
    names = [exchanges[each.number] for each in slices.laid]
    tables = {
        each.table.name for each, name in zip(slices.laid, names, strict=True) if name == "partials"
    }
    mine = part_of(slices.declaration, tables, "partials")
    of_laid = [each.sharding for each in slices.laid]
    return remote_consumers(mine, of_laid, world=world, reads_ahead=reads_ahead)


def check_bags(
    declaration: Declaration,
    shardings: Sequence[Sharding],
    exchanges: Sequence[str],
    bags: Collection[str],
) -> None:
    """`bags`: features whose samples have any number of ids. Raises ConfigError where rows of such a bag may lie on
    several ranks, and an operator that is evaluated there needs the whole bag."""
    fields = {field.name: field for field in declaration.fields}
    for name in evaluated_at_owners(declaration, shardings, exchanges):
        consumer = declaration.consumers[name]
        if consumer.interaction.needs() != "fields":
            continue
        for each in consumer.features:
            feature = declaration.features[fields[each].feature]
            sharding = shardings[declaration.table_of(feature)]
            if sharding.has_hot:  # added up where the samples are
                continue
            if feature.name in bags and sharding.num_owners > 1:
                raise split_bag(feature.table, sharding.kind, feature.name, name)


def split_bag(table: str, kind: str, feature: str, consumer: str) -> ConfigError:
    """To be raised."""
    return ConfigError(
        f"table {table!r}: got exchange=partials with sharding={kind}, but feature {feature!r} has bags of ids, and "
        f"consumer {consumer!r}, which is evaluated where rows lie, needs a sample's whole bag on one rank; set "
        f"plan.tables.{table}.sharding=table_wise (plan.sharding=auto finds a rank for it), or "
        f"plan.tables.{table}.exchange=pooled"
    )
