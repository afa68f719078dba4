"""Declaration of tables, features and consumers; a batch's lookups in feature-major order; layout of output tensors.

Legend: B samples, F features, T tables, E lookups, D dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch, Ids
from colonnade.errors import ConfigError, DataError, IdRangeError, NonFiniteError
from colonnade.interaction import Interaction
from colonnade.interaction.contract import SQUARES
from colonnade.table import POOLINGS, Feature, Part, RowDtype, Table


@dataclass(frozen=True, slots=True)
class Consumer:
    """Operator of the model and the names of the fields that it takes, in order, squares included."""

    interaction: Interaction
    features: tuple[str, ...]


def query_fields(consumer: Consumer) -> tuple[str, ...]:
    """Return the fields whose values go to where rows of its sequences are stored."""
    sequences = consumer.interaction.sequences
    return consumer.features[:-sequences] if sequences else ()


@dataclass(frozen=True, slots=True)
class LookupField:
    """Field: the columns of one part of a table as one feature reads them, the unit that consumers take."""

    name: str  # of the feature; after a dot that of the part, where the table has parts; then a slice's columns
    feature: int  # index into Declaration.features
    part: int  # index into Declaration.parts
    dim: int
    is_squared: bool = False  # the squares of another field (`interaction.contract.SQUARES`)


@dataclass(frozen=True)
class EmbeddingDeclaration:
    """Tables, features and consumers of a model, in declared order, which determines every output order (order law)."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    consumers: Mapping[str, Consumer]
    output: RowDtype
    shared: tuple[Output, ...] | None = None
    """Outputs of the whole, where this is a part of a declaration: each with the fields that are in this part, at their
    columns in the whole's output. None: this is whole."""

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached properties, some of which are native objects."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of the elements of rows."""
        return _find_dtype(self.tables[0].dtype)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """Type of lookup weights, sums of gradients and optimizer state."""
        return _find_dtype(self.tables[0].compute_dtype)

    @cached_property
    def output_dtype(self) -> torch.dtype:
        """Type of the outputs that the collection returns."""
        return _find_dtype(self.output)

    @cached_property
    def parts(self) -> tuple[tuple[int, Part], ...]:
        """Table index and part, of all parts, table by table."""
        return tuple((t, part) for t, table in enumerate(self.tables) for part in table.parts)

    @cached_property
    def native_parts(self) -> _native.Parts:
        numbers = [(t, part.column, part.dim, part.state) for t, part in self.parts]
        return _native.Parts(*torch.tensor(numbers, dtype=torch.int32).T.contiguous())

    @cached_property
    def widths(self) -> np.ndarray:
        """Elements of a row by table, (T,) int64."""
        return np.array([table.width for table in self.tables], dtype=np.int64)

    @cached_property
    def fields(self) -> tuple[LookupField, ...]:
        fields = []
        for f, feature in enumerate(self.features):
            for p, (t, part) in enumerate(self.parts):
                if self.tables[t].name == feature.table:
                    name = f"{feature.name}.{part.name}" if part.name else feature.name
                    fields.append(LookupField(name + self.tables[t].suffix, f, p, part.dim))
        by_name = {field.name: field for field in fields}
        taken = (name for consumer in self.consumers.values() for name in consumer.features)
        squared = [
            replace(by_name[name.removesuffix(SQUARES)], name=name, is_squared=True)
            for name in dict.fromkeys(taken)
            if name not in by_name and name.removesuffix(SQUARES) in by_name
        ]
        return (*fields, *squared)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Names of a model's outputs, in order."""
        return tuple(name for output in list_lookup_outputs(self) for name in output.names)

    def is_looked_up(self, table: Table) -> bool:
        """Return whether a feature reads the table."""
        return any(feature.table == table.name for feature in self.features)

    def table_index(self, name: str) -> int:
        """Return the number of a table. Raises ConfigError for an unknown one."""
        names = [table.name for table in self.tables]
        if name not in names:
            raise ConfigError(f"unknown table {name!r}; choose from {', '.join(names)}")
        return names.index(name)

    def table_index_of(self, feature: Feature) -> int:
        return next(t for t, table in enumerate(self.tables) if table.name == feature.table)


@dataclass(frozen=True, slots=True)
class Output:
    """Tensor that lookups write: pooled fields side by side, or the rows of one sequence. Where other parts write
    fields of it, too (`EmbeddingDeclaration.shared`), `width` includes their columns."""

    names: tuple[str, ...]  # consumers that take it (same fields, pooled once), or the field
    fields: tuple[int, ...]  # indices into Declaration.fields
    columns: tuple[int, ...]  # first column of each field
    width: int
    is_sequence: bool
    is_partial: bool = False
    """True if the tensor is the merged partial of its only consumer, without fields."""

    @property
    def column_starts(self) -> list[tuple[int | str, int]]:
        """Keys of the columns of the tensor, fields or its consumer's partial, and the first column of each."""
        if self.is_partial:
            return [(self.names[0], 0)]
        return list(zip(self.fields, self.columns, strict=True))


@dataclass(frozen=True, slots=True)
class LookupColumns:
    """Columns of lookups: the features that are looked up, in order, and the parts that are read by each column.

    A feature is looked up once for all outputs that read its parts and their squares.
    """

    features: tuple[int, ...]  # (C,) by column of lookups: index into Declaration.features
    reads: tuple[
        tuple[int, int], ...
    ]  # (R,) in the order of the outputs' fields: (column, part); it may repeat
    tables: Tensor  # (C,) int32
    poolings: Tensor  # (C,) uint8, as `_native.Lookups` numbers them
    squared: tuple[bool, ...] = ()  # (R,) whether a read is of squares


def _find_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def declare(
    tables: Sequence[Table],
    features: Sequence[Feature],
    consumers: Mapping[str, tuple[Interaction, Sequence[str]]],
    output_dtype: torch.dtype | None = None,
) -> EmbeddingDeclaration:
    """Check a model's declaration and return it. Raises ConfigError that names what does not fit."""
    _check_lists(tables, features)
    _check_tables(tables, features)
    compute = tables[0].compute_dtype
    output = compute if output_dtype is None else str(output_dtype).removeprefix("torch.")
    allowed = ("float64",) if compute == "float64" else ("float32", "bfloat16", "float16")
    if output not in allowed:
        raise ConfigError(
            f"got output_dtype={output} for tables of {tables[0].dtype}; choose from {', '.join(allowed)}"
        )
    declaration = EmbeddingDeclaration(tuple(tables), tuple(features), {}, output)  # type: ignore[arg-type]
    by_name = {field.name: field for field in declaration.fields}
    twice = sorted({f.name for f in declaration.fields if f is not by_name[f.name]})
    if twice:
        raise ConfigError(f"two fields are named {twice[0]!r}; rename the feature or the part")
    checked: dict[str, Consumer] = {}
    for name, (interaction, wanted) in consumers.items():
        if name in by_name:
            raise ConfigError(f"consumer {name!r} has the name of a feature; rename one of them")
        _check_inputs(declaration, by_name, name, interaction, wanted)
        checked[name] = Consumer(interaction, interaction.list_inputs(wanted))
        _check_squares(declaration, by_name, name, checked[name])
    return replace(declaration, consumers=checked)


def _check_lists(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise ConfigError for a value that is not a list, an empty list, or a name that is declared twice."""
    if not isinstance(tables, Collection) or not all(isinstance(t, Table) for t in tables):
        raise ConfigError(
            f"got {tables!r} as tables, wanted a list of Table: EmbeddingCollection([Table('item', 16, rows=1000)], "
            "[Feature('item', 'item')])"
        )
    if not isinstance(features, Collection) or not all(isinstance(f, Feature) for f in features):
        raise ConfigError(f"got {features!r} as features, wanted a list of Feature('item', 'item')")
    if not tables:
        raise ConfigError("got no tables, wanted at least one: Table('item', dim=16)")
    for kind, names in (
        ("table", [t.name for t in tables]),
        ("feature", [f.name for f in features]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{kind} {twice[0]!r} is declared twice; give each {kind} its own name"
            )
    if not features:
        raise ConfigError("got no features, wanted at least one: Feature('item', 'item')")


def _check_tables(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise ConfigError for tables of several dtypes, or features of tables that are not declared."""
    kinds = {(table.dtype, table.master) for table in tables}
    if len(kinds) > 1:
        words = sorted(dtype + " with master" * master for dtype, master in kinds)
        raise ConfigError(
            f"got tables of dtypes {words}, wanted one dtype for a collection; "
            "use one EmbeddingCollection per dtype"
        )
    tables_by_name = {table.name: table for table in tables}
    for feature in features:
        if feature.table not in tables_by_name:
            raise ConfigError(
                f"feature {feature.name!r} looks up table {feature.table!r}; declared tables: "
                f"{', '.join(sorted(tables_by_name))}"
            )


def _check_inputs(
    declaration: EmbeddingDeclaration,
    fields: Mapping[str, LookupField],
    consumer_name: str,
    interaction: Interaction,
    wanted_fields: Sequence[str],
) -> None:
    """Raise ConfigError where consumer `consumer_name` cannot take the fields that it wants, in this order."""
    for position, field in enumerate(wanted_fields):
        if field not in fields:
            raise ConfigError(
                f"consumer {consumer_name!r} takes feature {field!r}; declared features: {', '.join(fields)}"
            )
        is_sequence = declaration.features[fields[field].feature].pooling == "sequence"
        if is_sequence and position < len(wanted_fields) - interaction.sequences:
            raise ConfigError(
                f"consumer {consumer_name!r} takes feature {field!r}, which is a sequence; "
                "pool it (sum, mean), take it with TargetAttention, or leave it without a consumer"
            )
        if not is_sequence and position >= len(wanted_fields) - interaction.sequences:
            raise ConfigError(
                f"consumer {consumer_name!r} takes feature {field!r} as a sequence, but it is pooled; declare "
                "it with pooling='sequence'"
            )
    if problem := interaction.find_dims_problem([fields[field].dim for field in wanted_fields]):
        raise ConfigError(f"consumer {consumer_name!r} {problem}")


def _check_squares(
    declaration: EmbeddingDeclaration,
    fields: Mapping[str, LookupField],
    consumer_name: str,
    consumer: Consumer,
) -> None:
    """Raise ConfigError where consumer `consumer_name` cannot read the squares of its fields."""
    for field in consumer.features:
        if not field.endswith(SQUARES) or field.removesuffix(SQUARES) not in consumer.features:
            continue
        if field in fields:
            raise ConfigError(
                f"consumer {consumer_name!r} reads the squares of {field.removesuffix(SQUARES)!r}, which are "
                "named like "
                f"feature {field!r}; rename the feature"
            )
        table = declaration.parts[fields[field.removesuffix(SQUARES)].part][0]
        if declaration.tables[table].hashes is not None:
            raise ConfigError(
                f"consumer {consumer_name!r}: got over='ids' and feature {field.removesuffix(SQUARES)!r} of "
                "hash-stacked table "
                f"{declaration.tables[table].name!r}, wanted a table with one row per id: the vector of an id is a sum "
                "of rows there. Use over='fields', a table without hashes, or, if no sample has several ids, list the "
                "field in `single`"
            )


def list_lookup_outputs(declaration: EmbeddingDeclaration) -> tuple[Output, ...]:
    """List the outputs of a declaration: those of consumers in declared order, then fields without a consumer in
    declared order."""
    if declaration.shared is not None:
        return declaration.shared
    readers: dict[tuple[str, ...], list[str]] = {}
    for name, consumer in declaration.consumers.items():
        readers.setdefault(consumer.features, []).append(name)
    index = {field.name: i for i, field in enumerate(declaration.fields)}
    taken = {name for consumer in declaration.consumers.values() for name in consumer.features}
    listed = []
    groups = list(readers.items())
    groups += [((f.name,), [f.name]) for f in declaration.fields if f.name not in taken]
    for members, names in groups:
        fields = [declaration.fields[index[member]] for member in members]
        starts = np.concatenate([[0], np.cumsum([field.dim for field in fields])])
        listed.append(
            Output(
                tuple(names),
                tuple(index[member] for member in members),
                tuple(int(start) for start in starts[:-1]),
                int(starts[-1]),
                len(fields) == 1 and declaration.features[fields[0].feature].pooling == "sequence",
            )
        )
    return tuple(listed)


def restrict_outputs_to_part(
    full_declaration: EmbeddingDeclaration, part_declaration: EmbeddingDeclaration
) -> tuple[Output, ...]:
    """Return the outputs of the whole that have fields of a part of it, with those fields."""
    part_fields = {field.name: i for i, field in enumerate(part_declaration.fields)}
    restricted = []
    for output in list_lookup_outputs(full_declaration):
        own_columns = [
            (part_fields[name], column)
            for i, column in zip(output.fields, output.columns, strict=True)
            if (name := full_declaration.fields[i].name) in part_fields
        ]
        if own_columns:
            fields, columns = zip(*own_columns, strict=True)
            restricted.append(replace(output, fields=fields, columns=columns))
    return tuple(restricted)


def build_lookup_columns(declaration: EmbeddingDeclaration) -> LookupColumns:
    """Build the columns of lookups, and the reads of them, in the order of the outputs' fields."""
    outputs = list_lookup_outputs(declaration)
    fields = [declaration.fields[i] for output in outputs for i in output.fields]
    features = list(dict.fromkeys(field.feature for field in fields))
    reads = [(features.index(field.feature), field.part, field.is_squared) for field in fields]
    looked_up = [declaration.features[f] for f in features]
    return LookupColumns(
        tuple(features),
        tuple((column, part) for column, part, _ in reads),
        torch.tensor([declaration.table_index_of(f) for f in looked_up], dtype=torch.int32),
        torch.tensor([POOLINGS.index(f.pooling) for f in looked_up], dtype=torch.uint8),
        tuple(is_squared for *_, is_squared in reads),
    )


@dataclass(frozen=True, slots=True)
class Lookups:
    """Lookups of a batch, feature-major, as tensors and as the native core takes them."""

    ids: Tensor  # (E,) int64
    feature_offsets: Tensor  # (F + 1,) int64
    native: _native.Lookups
    batch_size: int
    bags: list[Tensor | None]  # by column, (B + 1,) into its lookups; None: one lookup per sample
    weights: list[Tensor | None]  # by column, (E_c,)
    squared_rows: dict[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)
    """Vectors (E_c, dim) whose squares were pooled, by column and part: their gradients need them."""


def collect_lookups(
    batch: Batch, declaration: EmbeddingDeclaration, lookup_columns: LookupColumns
) -> Lookups:
    """Collect a batch's ids, one column of lookups after another. Raises DataError and NonFiniteError that name the
    feature."""
    values = []
    bags = []
    weights = []
    dtype = declaration.compute_dtype
    for f in lookup_columns.features:
        feature = declaration.features[f]
        ids = batch.ids.get(feature.name)
        if not _is_column(ids, batch.size):
            ids = get_checked_ids(batch, feature, dtype)
        assert ids is not None
        values.append(ids.values)
        bags.append(ids.offsets)
        weights.append(ids.weights)
    # A tensor's `len` is a function in Python, and takes forty times as long as `numel`.
    offsets = torch.from_numpy(
        np.cumsum([0, *[column.numel() for column in values]], dtype=np.int64)
    )
    all_ids = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
    return _build_lookups(all_ids, offsets, bags, weights, lookup_columns, batch.size, dtype)


def get_checked_ids(batch: Batch, feature: Feature, compute_dtype: torch.dtype) -> Ids:
    """Return the ids of a feature in a batch, checked. Raises DataError and NonFiniteError that name the feature."""
    ids = batch.ids.get(feature.name)
    if ids is None:
        raise DataError(
            f"the batch has no feature {feature.name!r}; it has {', '.join(sorted(batch.ids))}. "
            "The reader's schema and the model's features must agree"
        )
    _check_ids(feature, ids, batch.size, compute_dtype)
    return ids


def replace_weights(
    lookups: Lookups,
    column_weights: Sequence[Tensor | None],
    lookup_columns: LookupColumns,
    compute_dtype: torch.dtype,
) -> Lookups:
    """Return the same lookups with other weights, by column. compute_dtype: the compute dtype."""
    return _build_lookups(
        lookups.ids,
        lookups.feature_offsets,
        lookups.bags,
        column_weights,
        lookup_columns,
        lookups.batch_size,
        compute_dtype,
    )


def replace_poolings(
    lookups: Lookups,
    column_weights: Sequence[Tensor | None],
    lookup_columns: LookupColumns,
    sequence_columns: Collection[int],
    compute_dtype: torch.dtype,
) -> Lookups:
    """Return the same lookups with other weights, and with the columns `sequence_columns` as sequences."""
    poolings = lookup_columns.poolings.clone()
    poolings[list(sequence_columns)] = POOLINGS.index("sequence")
    return replace_weights(
        lookups, column_weights, replace(lookup_columns, poolings=poolings), compute_dtype
    )


def _build_lookups(
    ids: Tensor,
    column_offsets: Tensor,
    column_bags: Sequence[Tensor | None],
    column_weights: Sequence[Tensor | None],
    lookup_columns: LookupColumns,
    batch_size: int,
    dtype: torch.dtype,
) -> Lookups:
    bag_offsets = None
    if column_bags.count(None) < len(column_bags):
        ramp = torch.arange(batch_size + 1, dtype=torch.int64)
        starts = [
            (ramp if bag is None else bag)[:-1] + start
            for bag, start in zip(column_bags, column_offsets.tolist(), strict=False)
        ]
        bag_offsets = torch.cat([*starts, column_offsets[-1:]])
    all_weights = None
    if column_weights.count(None) < len(column_weights):
        all_weights = torch.cat(
            [
                torch.ones(count, dtype=dtype) if column is None else column.to(dtype)
                for count, column in zip(
                    column_offsets.diff().tolist(), column_weights, strict=True
                )
            ]
        )
    native = _native.Lookups(
        ids,
        column_offsets,
        lookup_columns.tables,
        lookup_columns.poolings,
        batch_size,
        bag_offsets,
        all_weights,
    )
    return Lookups(ids, column_offsets, native, batch_size, list(column_bags), list(column_weights))


def collect_next_use(
    batch: Batch, declaration: EmbeddingDeclaration, lookup_columns: LookupColumns
) -> np.ndarray:
    """`Batch.next_use`, (E,) uint8 in the order of `collect_lookups`; a feature without codes has zeros. Raises
    DataError."""
    hints = batch.next_use or {}
    collected = []
    for f in lookup_columns.features:
        name = declaration.features[f].name
        num_lookups = len(batch.ids[name].values)
        codes = hints.get(name)
        if codes is None:
            collected.append(np.zeros(num_lookups, np.uint8))
        elif codes.dtype != torch.uint8 or tuple(codes.shape) != (num_lookups,):
            raise DataError(
                f"feature {name!r}: next_use: got {codes.dtype} of shape {tuple(codes.shape)}, wanted uint8 "
                f"({num_lookups},), a code for each lookup"
            )
        else:
            collected.append(codes.numpy())
    return np.concatenate(collected) if collected else np.zeros(0, np.uint8)


def _check_ids(feature: Feature, ids: Ids, batch_size: int, compute_dtype: torch.dtype) -> None:
    if not isinstance(ids, Ids):
        raise DataError(
            f"feature {feature.name!r}: got a {type(ids).__name__}, wanted Ids(values, offsets, weights)"
        )
    for kind, tensor in (("ids", ids.values), ("offsets", ids.offsets), ("weights", ids.weights)):
        if tensor is None and kind != "ids":
            continue
        if (
            not isinstance(tensor, Tensor)
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
            or not _has_memory(tensor)
        ):
            raise DataError(
                f"feature {feature.name!r}: got {kind} of type {_describe_kind(tensor)}, wanted a dense CPU tensor"
            )
    if ids.values.dtype != torch.int64 or ids.values.dim() != 1:
        raise DataError(
            f"feature {feature.name!r}: got ids of {ids.values.dtype} and shape {tuple(ids.values.shape)}, wanted "
            "int64 (lookups,). Convert smaller integers with ids.to(torch.int64); readers of files hash texts to ids"
        )
    if ids.offsets is None:
        if len(ids.values) != batch_size:
            raise DataError(
                f"feature {feature.name!r}: got {len(ids.values)} ids for {batch_size} samples and no offsets; "
                "a feature with any number of ids per sample needs offsets (samples + 1,)"
            )
    else:
        _check_offsets(feature, ids.offsets, len(ids.values), batch_size)
    if ids.weights is not None:
        if ids.weights.shape != ids.values.shape or not ids.weights.is_floating_point():
            raise DataError(
                f"feature {feature.name!r}: got {ids.weights.numel()} weights for {len(ids.values)} ids "
                f"({ids.weights.dtype}, shape {tuple(ids.weights.shape)}), wanted one real number per id"
            )
        if ids.weights.requires_grad:
            raise DataError(
                f"feature {feature.name!r}: its weights require a gradient, which lookups do not give; "
                "detach them, or weigh a sequence feature's rows in the model"
            )
        if not bool(torch.isfinite(ids.weights.to(compute_dtype)).all()):
            raise NonFiniteError(
                f"feature {feature.name!r}: got NaN or inf among its weights, wanted finite numbers"
            )


def _is_column(ids: object, size: int) -> bool:
    """Return whether these are valid ids, one per sample, as most features have."""
    if type(ids) is not Ids or ids.offsets is not None or ids.weights is not None:
        return False
    values = ids.values
    return (
        type(values) is Tensor
        and values.dtype is torch.int64
        and values.is_cpu
        and values.layout is torch.strided
        and values.dim() == 1
        and values.numel() == size
        and _has_memory(values)
    )


def _has_memory(tensor: Tensor) -> bool:
    """Return False for a tensor whose storage was freed: it keeps its shape, and reading it ends the process."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def _describe_kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    is_freed = value.is_cpu and value.layout == torch.strided
    return f"{value.device.type} {value.layout}{' whose storage was freed' if is_freed else ''}"


def _check_offsets(feature: Feature, bag_offsets: Tensor, num_ids: int, batch_size: int) -> None:
    wanted = f"wanted {batch_size + 1} int64 offsets from 0 to {num_ids} that never decrease"
    if bag_offsets.dtype != torch.int64 or bag_offsets.shape != (batch_size + 1,):
        raise DataError(
            f"feature {feature.name!r}: got offsets of {bag_offsets.dtype} and shape {tuple(bag_offsets.shape)} "
            f"for {batch_size} samples, {wanted}"
        )
    first = int(bag_offsets[0])
    last = int(bag_offsets[-1])
    if first != 0 or last != num_ids or bool((bag_offsets.diff() < 0).any()):
        raise DataError(
            f"feature {feature.name!r}: got offsets from {first} to {last} for {num_ids} ids, {wanted}"
        )


def explain_range_error(
    error: IndexError, declaration: EmbeddingDeclaration, features: Sequence[int]
) -> IdRangeError:
    """Translate the native core's `table <t> feature <f> position <i> id <id> rows <rows>` into an error for users.
    features: indices into Declaration.features by column of lookups."""
    words = str(error).split()
    numbers = {words[i]: int(words[i + 1]) for i in range(0, len(words) - 1, 2)}
    table = declaration.tables[numbers["table"]]
    feature = declaration.features[features[numbers["feature"]]]
    return id_range_error(
        feature.name, numbers["position"], numbers["id"], numbers["rows"], table.origin[0]
    )


def id_range_error(
    feature_name: str, lookup_position: int, invalid_id: int, num_table_rows: int, table_name: str
) -> IdRangeError:
    """Return the error for an id outside its vocabulary table. lookup_position: of the lookup among the feature's of a
    batch."""
    return IdRangeError(
        f"feature {feature_name!r}, lookup {lookup_position} of the batch: got id {invalid_id}, "
        f"wanted 0 .. {num_table_rows - 1} of vocabulary table {table_name!r}. Declare more rows, "
        "hash the id into range, or leave rows out for an open table"
    )
