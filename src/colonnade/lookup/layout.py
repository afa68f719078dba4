"""From a batch to lookups in feature-major order, and from lookups to the tensors a model asked for.

Legend: B samples, F features, T tables, E lookups, D dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch, Ids
from colonnade.errors import ConfigError, DataError, IdRangeError, NonFiniteError
from colonnade.interaction import Interaction
from colonnade.table import POOLINGS, Feature, Part, Table


@dataclass(frozen=True, slots=True)
class Consumer:
    """An operator and the features it takes, in order. All of them pooled."""

    interaction: Interaction
    features: tuple[str, ...]


def queries_of(consumer: Consumer) -> tuple[str, ...]:
    """Return the fields whose values go to where rows of its sequences are stored."""
    sequences = consumer.interaction.sequences
    return consumer.features[:-sequences] if sequences else ()


@dataclass(frozen=True, slots=True)
class Field:
    """What one feature reads of one part of its table: the unit that consumers take."""

    name: str  # the feature's; with the part's after a dot where the table has parts, and columns of a slice
    feature: int  # index into Declaration.features
    part: int  # index into Declaration.parts
    dim: int


@dataclass(frozen=True)
class Declaration:
    """What a model declared, in its order; every output order follows from it (order law)."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    consumers: Mapping[str, Consumer]
    output: Literal["float32", "float64", "bfloat16", "float16"]
    shared: tuple[Output, ...] | None = None
    """Of a part of a declaration: the whole's outputs, each with those of its fields that are here, where they lie in
    it. None: this is whole."""

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached properties, some of which are native objects."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of rows."""
        return getattr(torch, self.tables[0].dtype)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """Of lookup weights, sums of gradients and optimizer state."""
        return getattr(torch, self.tables[0].compute_dtype)

    @cached_property
    def output_dtype(self) -> torch.dtype:
        """Of what the collection returns."""
        return getattr(torch, self.output)

    @cached_property
    def parts(self) -> tuple[tuple[int, Part], ...]:
        """(table, part) of all parts, table by table."""
        return tuple((t, part) for t, table in enumerate(self.tables) for part in table.parts)

    @cached_property
    def native_parts(self) -> _native.Parts:
        numbers = [(t, part.column, part.dim, part.state) for t, part in self.parts]
        return _native.Parts(*torch.tensor(numbers, dtype=torch.int32).T.contiguous())

    @cached_property
    def widths(self) -> np.ndarray:
        """(T,) int64: elements of a row."""
        return np.array([table.width for table in self.tables], dtype=np.int64)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        found = []
        for f, feature in enumerate(self.features):
            for p, (t, part) in enumerate(self.parts):
                if self.tables[t].name == feature.table:
                    name = f"{feature.name}.{part.name}" if part.name else feature.name
                    found.append(Field(name + self.tables[t].suffix, f, p, part.dim))
        return tuple(found)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Of what a model gets, in order."""
        return tuple(name for output in list_outputs(self) for name in output.names)

    def is_read(self, table: Table) -> bool:
        """By some feature."""
        return any(feature.table == table.name for feature in self.features)

    def table_number(self, name: str) -> int:
        """Return the number of a table. Raises ConfigError for an unknown one."""
        names = [table.name for table in self.tables]
        if name not in names:
            raise ConfigError(f"unknown table {name!r}; choose from {', '.join(names)}")
        return names.index(name)

    def table_of(self, feature: Feature) -> int:
        return next(t for t, table in enumerate(self.tables) if table.name == feature.table)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that lookups write: pooled fields side by side, or one lone field. Where others write fields of it,
    too (`Declaration.shared`), `width` is of all of them."""

    names: tuple[str, ...]  # the consumers that take it (same fields, pooled once), or the field
    fields: tuple[int, ...]  # indices into Declaration.fields
    columns: tuple[int, ...]  # first column of each field
    width: int
    is_sequence: bool
    is_partial: bool = False
    """Of a single consumer: its partial, merged, and no fields at all."""

    @property
    def pieces(self) -> list[tuple[int | str, int]]:
        """What it is put together from, and the first column of each: fields, or its consumer's partial."""
        if self.is_partial:
            return [(self.names[0], 0)]
        return list(zip(self.fields, self.columns, strict=True))


@dataclass(frozen=True, slots=True)
class LookupColumns:
    """Which features are looked up, in which order, and which of their parts are read.

    A feature is looked up once for all its parts, and once more for each further output that reads
    the same part of it.
    """

    features: tuple[int, ...]  # (C,) by column of lookups: index into Declaration.features
    reads: tuple[tuple[int, int], ...]  # (R,) in the order of the outputs' fields: (column, part)
    tables: Tensor  # (C,) int32
    poolings: Tensor  # (C,) uint8, as `_native.Lookups` numbers them


def declare(
    tables: Sequence[Table],
    features: Sequence[Feature],
    consumers: Mapping[str, tuple],
    output_dtype: torch.dtype | None = None,
) -> Declaration:
    """Check a model's declaration. Raises ConfigError naming what does not fit."""
    _check_lists(tables, features)
    _check_tables(tables, features)
    compute = tables[0].compute_dtype
    output = compute if output_dtype is None else str(output_dtype).removeprefix("torch.")
    allowed = ("float64",) if compute == "float64" else ("float32", "bfloat16", "float16")
    if output not in allowed:
        raise ConfigError(
            f"got output_dtype={output} for tables of {tables[0].dtype}; choose from {', '.join(allowed)}"
        )
    declaration = Declaration(tuple(tables), tuple(features), {}, output)  # type: ignore[arg-type]
    by_name = {field.name: field for field in declaration.fields}
    twice = sorted({f.name for f in declaration.fields if f is not by_name[f.name]})
    if twice:
        raise ConfigError(f"two fields are named {twice[0]!r}; rename the feature or the part")
    checked: dict[str, Consumer] = {}
    for name, (interaction, wanted) in consumers.items():
        if name in by_name:
            raise ConfigError(f"consumer {name!r} has the name of a feature; rename one of them")
        _check_inputs(declaration, by_name, name, interaction, wanted)
        checked[name] = Consumer(interaction, tuple(wanted))
    return replace(declaration, consumers=checked)


def _check_lists(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise ConfigError for what is no list, an empty one, or one with a name twice."""
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
    known = {table.name: table for table in tables}
    for feature in features:
        if feature.table not in known:
            raise ConfigError(
                f"feature {feature.name!r} looks up table {feature.table!r}; declared tables: "
                f"{', '.join(sorted(known))}"
            )


def _check_inputs(
    declaration: Declaration,
    fields: Mapping[str, Field],
    name: str,
    interaction: Interaction,
    wanted: Sequence[str],
) -> None:
    """Raise ConfigError where consumer `name` cannot take the fields that it wants, in this order."""
    for place, field in enumerate(wanted):
        if field not in fields:
            raise ConfigError(
                f"consumer {name!r} takes feature {field!r}; declared features: {', '.join(fields)}"
            )
        is_sequence = declaration.features[fields[field].feature].pooling == "sequence"
        if is_sequence and place < len(wanted) - interaction.sequences:
            raise ConfigError(
                f"consumer {name!r} takes feature {field!r}, which is a sequence; "
                "pool it (sum, mean) or leave it without a consumer"
            )
        if not is_sequence and place >= len(wanted) - interaction.sequences:
            raise ConfigError(
                f"consumer {name!r} takes feature {field!r} as a sequence, but it is pooled; declare "
                "it with pooling='sequence'"
            )
    if problem := interaction.refusal([fields[field].dim for field in wanted]):
        raise ConfigError(f"consumer {name!r} {problem}")


def list_outputs(declaration: Declaration) -> tuple[Output, ...]:
    """Consumers in declared order, then fields nobody consumes in declared order."""
    if declaration.shared is not None:
        return declaration.shared
    readers: dict[tuple[str, ...], list[str]] = {}
    for name, consumer in declaration.consumers.items():
        readers.setdefault(consumer.features, []).append(name)
    index = {field.name: i for i, field in enumerate(declaration.fields)}
    taken = {name for consumer in declaration.consumers.values() for name in consumer.features}
    found = []
    groups = list(readers.items())
    groups += [((f.name,), [f.name]) for f in declaration.fields if f.name not in taken]
    for members, names in groups:
        fields = [declaration.fields[index[member]] for member in members]
        starts = np.concatenate([[0], np.cumsum([field.dim for field in fields])])
        found.append(
            Output(
                tuple(names),
                tuple(index[member] for member in members),
                tuple(int(start) for start in starts[:-1]),
                int(starts[-1]),
                len(fields) == 1
                and declaration.features[fields[0].feature].pooling == "sequence",
            )
        )  # fmt: skip
    return tuple(found)


def restrict_outputs(whole: Declaration, part: Declaration) -> tuple[Output, ...]:
    """Of the whole's outputs, those that fields of a part of it lie in: `Declaration.shared`."""
    here = {field.name: i for i, field in enumerate(part.fields)}
    found = []
    for output in list_outputs(whole):
        mine = [
            (here[name], column)
            for i, column in zip(output.fields, output.columns, strict=True)
            if (name := whole.fields[i].name) in here
        ]
        if mine:
            fields, columns = zip(*mine, strict=True)
            found.append(replace(output, fields=fields, columns=columns))
    return tuple(found)


def build_lookup_columns(declaration: Declaration) -> LookupColumns:
    """Columns of lookups and reads of them, as the outputs' fields come."""
    features: list[int] = []
    taken: set[tuple[int, int]] = set()
    reads = []
    for output in list_outputs(declaration):
        for i in output.fields:
            field = declaration.fields[i]
            columns = [c for c, f in enumerate(features) if f == field.feature]
            column = next((c for c in columns if (c, field.part) not in taken), len(features))
            if column == len(features):
                features.append(field.feature)
            taken.add((column, field.part))
            reads.append((column, field.part))
    looked_up = [declaration.features[f] for f in features]
    return LookupColumns(
        tuple(features),
        tuple(reads),
        torch.tensor([declaration.table_of(f) for f in looked_up], dtype=torch.int32),
        torch.tensor([POOLINGS.index(f.pooling) for f in looked_up], dtype=torch.uint8),
    )


@dataclass(frozen=True, slots=True)
class Lookups:
    """A batch's lookups, feature-major, as tensors and as the native core takes them."""

    ids: Tensor  # (E,) int64
    feature_offsets: Tensor  # (F + 1,) int64
    native: _native.Lookups
    batch_size: int
    bags: list[Tensor | None]  # by column, (B + 1,) into its lookups; None: one a sample
    weights: list[Tensor | None]  # by column, (E_c,)


def collect_lookups(
    batch: Batch, declaration: Declaration, lookup_columns: LookupColumns
) -> Lookups:
    """The batch's ids, a column of lookups after the other. Raises DataError, NonFiniteError naming the feature."""
    values, bags, weights, dtype = [], [], [], declaration.compute_dtype
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
    offsets = torch.from_numpy(np.cumsum([0, *[each.numel() for each in values]], dtype=np.int64))
    all_ids = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
    return _lookups(all_ids, offsets, bags, weights, lookup_columns, batch.size, dtype)


def get_checked_ids(batch: Batch, feature: Feature, compute_dtype: torch.dtype) -> Ids:
    """A feature's. Raises DataError, NonFiniteError naming it."""
    ids = batch.ids.get(feature.name)
    if ids is None:
        raise DataError(
            f"the batch has no feature {feature.name!r}; it has {', '.join(sorted(batch.ids))}. "
            "The reader's schema and the model's features must agree"
        )
    _check_ids(feature, ids, batch.size, compute_dtype)
    return ids


def weighed(
    lookups: Lookups,
    weights: Sequence[Tensor | None],
    lookup_columns: LookupColumns,
    dtype: torch.dtype,
) -> Lookups:
    """The same lookups with other weights, by column; `dtype`: the compute dtype."""
    return _lookups(
        lookups.ids, lookups.feature_offsets, lookups.bags, weights, lookup_columns, lookups.batch_size,
        dtype,
    )  # fmt: skip


def _lookups(
    ids: Tensor,
    offsets: Tensor,
    bags: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    lookup_columns: LookupColumns,
    size: int,
    dtype: torch.dtype,
) -> Lookups:
    bag_offsets = None
    if bags.count(None) < len(bags):
        ramp = torch.arange(size + 1, dtype=torch.int64)
        starts = [
            (ramp if bag is None else bag)[:-1] + start
            for bag, start in zip(bags, offsets.tolist(), strict=False)
        ]
        bag_offsets = torch.cat([*starts, offsets[-1:]])
    all_weights = None
    if weights.count(None) < len(weights):
        all_weights = torch.cat(
            [
                torch.ones(count, dtype=dtype) if each is None else each.to(dtype)
                for count, each in zip(offsets.diff().tolist(), weights, strict=True)
            ]
        )
    native = _native.Lookups(
        ids, offsets, lookup_columns.tables, lookup_columns.poolings, size, bag_offsets, all_weights
    )
    return Lookups(ids, offsets, native, size, list(bags), list(weights))


def collect_next_use(
    batch: Batch, declaration: Declaration, lookup_columns: LookupColumns
) -> np.ndarray:
    """`Batch.next_use`, (E,) uint8 in the order of `collect_lookups`; a feature without codes has zeros. Raises DataError."""
    hints, found = batch.next_use or {}, []
    for f in lookup_columns.features:
        name = declaration.features[f].name
        num_lookups, codes = len(batch.ids[name].values), hints.get(name)
        if codes is None:
            found.append(np.zeros(num_lookups, np.uint8))
        elif codes.dtype != torch.uint8 or tuple(codes.shape) != (num_lookups,):
            raise DataError(
                f"feature {name!r}: next_use: got {codes.dtype} of shape {tuple(codes.shape)}, wanted uint8 "
                f"({num_lookups},), a code for each lookup"
            )
        else:
            found.append(codes.numpy())
    return np.concatenate(found) if found else np.zeros(0, np.uint8)


def _check_ids(feature: Feature, ids: Ids, size: int, compute_dtype: torch.dtype) -> None:
    if not isinstance(ids, Ids):
        raise DataError(
            f"feature {feature.name!r}: got a {type(ids).__name__}, wanted Ids(values, offsets, weights)"
        )
    for what, given in (("ids", ids.values), ("offsets", ids.offsets), ("weights", ids.weights)):
        if given is None and what != "ids":
            continue
        if (
            not isinstance(given, Tensor)
            or given.device.type != "cpu"
            or given.layout != torch.strided
        ):
            raise DataError(
                f"feature {feature.name!r}: got {what} of type {_kind(given)}, wanted a dense CPU tensor"
            )
    if ids.values.dtype != torch.int64 or ids.values.dim() != 1:
        raise DataError(
            f"feature {feature.name!r}: got ids of {ids.values.dtype} and shape "
            f"{tuple(ids.values.shape)}, wanted int64 (lookups,). Hash strings to ids in the reader"
        )
    if ids.offsets is None:
        if len(ids.values) != size:
            raise DataError(
                f"feature {feature.name!r}: got {len(ids.values)} ids for {size} samples and no offsets; "
                "a feature with any number of ids per sample needs offsets (samples + 1,)"
            )
    else:
        _check_offsets(feature, ids.offsets, len(ids.values), size)
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
    """Return whether these are one id a sample, and nothing is wrong with them: what most features have."""
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
    )


def _kind(given: object) -> str:
    return (
        f"{given.device.type} {given.layout}" if isinstance(given, Tensor) else type(given).__name__
    )


def _check_offsets(feature: Feature, offsets: Tensor, num_ids: int, size: int) -> None:
    wanted = f"wanted {size + 1} int64 offsets from 0 to {num_ids} that never decrease"
    if offsets.dtype != torch.int64 or offsets.shape != (size + 1,):
        raise DataError(
            f"feature {feature.name!r}: got offsets of {offsets.dtype} and shape {tuple(offsets.shape)} "
            f"for {size} samples, {wanted}"
        )
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != num_ids or bool((offsets.diff() < 0).any()):
        raise DataError(
            f"feature {feature.name!r}: got offsets from {first} to {last} for {num_ids} ids, {wanted}"
        )


def explain_range_error(
    error: IndexError, declaration: Declaration, consumed: Sequence[int]
) -> IdRangeError:
    """The native core's `table <t> feature <f> position <i> id <id> rows <rows>`, in the user's words."""
    words = str(error).split()
    numbers = {words[i]: int(words[i + 1]) for i in range(0, len(words) - 1, 2)}
    table = declaration.tables[numbers["table"]]
    feature = declaration.features[consumed[numbers["feature"]]]
    return id_range_error(
        feature.name, numbers["position"], numbers["id"], numbers["rows"], table.origin[0]
    )


def id_range_error(feature: str, position: int, id: int, rows: int, table: str) -> IdRangeError:
    """position: of the lookup among the feature's of a batch."""
    return IdRangeError(
        f"feature {feature!r}, lookup {position} of the batch: got id {id}, "
        f"wanted 0 .. {rows - 1} of vocabulary table {table!r}. Declare more rows, "
        "hash the id into range, or leave rows out for an open table"
    )
