"""Raw records to batches: JSON values as a row of the training file has them, encoded by the schema of training.

    encoder = build_encoder(predictor.config, predictor.schema)
    batch = encoder.encode([{"user": "u17", "price": 9.5, "tags": ["a", "b"]}])
    batch = encoder.encode_candidates({"user": "u17"}, [{"item": 3}, {"item": 8}])

Values become Arrow arrays, which `data/tabular/encode.py` encodes as it does the columns of a file. A value of another
type than the file's is read as the characters by which a CSV file would store it: 12 and "12" are one integer id, and
12 in a column of texts is "12". What a record becomes does not depend on the other records.

Legend: N records, E elements of all their lists, n dense columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch, Ids
from colonnade.config.run import RunConfig
from colonnade.data.contract import Schema
from colonnade.data.graph import NODE, has_neighbours
from colonnade.data.interactions.columns import USER
from colonnade.data.tabular.arrow_types import MISSING_NUMBER
from colonnade.data.tabular.columns import resolve_dtypes
from colonnade.data.tabular.declaration import FileSchema, load_file_schema
from colonnade.data.tabular.encode import InvalidValue, encode_block, encode_ids
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Categorical,
    Category,
    Cross,
    DeclaredField,
    Group,
    Key,
    Number,
    reads_times,
    suggest_name,
)
from colonnade.data.tabular.fields import Sequence as SequenceField
from colonnade.data.tabular.formats import FORMATS, NUMBER, ValueRules
from colonnade.data.tabular.join import KeyedTable, read_keyed_table
from colonnade.errors import ConfigError, DataError

Record = Mapping[str, Any]
ScalarKind = Literal["number", "integer", "boolean", "text", "time"]
PLAIN = frozenset((str, int, float, bool, type(None), list))
"""Types of the values of parsed JSON, except objects."""
MAX_NAME = 100
"""Number of characters of an unknown column's name that are shown and compared."""


@dataclass(frozen=True, slots=True)
class RawColumn:
    """Column of a record: how its values become an Arrow array."""

    name: str
    kind: ScalarKind
    """Type of the values, or of the elements of lists."""
    is_list: bool = False
    separators: frozenset[str] = frozenset()
    """Separators of lists written as text: one for each field that reads them."""
    is_required: bool = False
    """True if a missing value is an error, as for features that no file declares."""

    def build_array(self, record_values: list[Any], value_rules: ValueRules) -> pa.Array:
        """Build an array (N,) of the values of all records. Raises InvalidValue."""
        if not PLAIN.issuperset(map(type, record_values)):
            record_values = [
                self._convert_to_json_value(value, row) for row, value in enumerate(record_values)
            ]
        if self.is_list:
            return self._build_lists(record_values, value_rules)
        if self.is_required and None in record_values:
            raise self._build_error(record_values.index(None), None)
        return self._build_scalars(record_values, value_rules)

    def _build_lists(self, record_values: list[Any], value_rules: ValueRules) -> pa.Array:
        """Build lists, or texts that the fields split if no value is a list."""
        if list not in set(map(type, record_values)):
            return self._build_texts(record_values, value_rules)
        lists = [
            self._split_list(value, row, value_rules) for row, value in enumerate(record_values)
        ]
        offsets = np.cumsum([0, *map(len, lists)])
        elements = list(chain.from_iterable(lists))
        try:
            if not PLAIN.issuperset(map(type, elements)):
                elements = [
                    self._convert_to_json_value(value, at) for at, value in enumerate(elements)
                ]
            array = self._build_scalars(elements, value_rules)
        except InvalidValue as fault:
            fault.row = int(np.searchsorted(offsets, fault.row, side="right")) - 1
            raise
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), array)

    def _split_list(self, list_value: Any, row_index: int, value_rules: ValueRules) -> list[Any]:
        """Return the elements of a list, or of a text with separators."""
        if isinstance(list_value, list):
            return list_value
        text = (
            None
            if list_value is None
            else self._format_request_value(list_value, row_index, value_rules)
        )
        if not text or text in value_rules.null_texts:
            return []
        if len(self.separators) > 1:
            raise InvalidValue(
                row_index, self.name, describe_value(list_value), "a list", "Send lists only"
            )
        return text.split(next(iter(self.separators)))

    def _build_scalars(self, record_values: list[Any], value_rules: ValueRules) -> pa.Array:
        kinds = set(map(type, record_values))
        if list in kinds:
            row = next(row for row, value in enumerate(record_values) if isinstance(value, list))
            raise self._build_error(row, record_values[row])
        has_nulls = bool(value_rules.null_texts)
        if self.kind == "integer" and not has_nulls and kinds <= {int, type(None)}:
            try:
                return pa.array(record_values, pa.int64())
            except (OverflowError, pa.ArrowInvalid):
                pass  # the slow path finds the value
        if self.kind == "number" and not has_nulls and kinds <= {int, float, type(None)}:
            return self._build_numbers(record_values, value_rules)
        return self._build_texts(record_values, value_rules)

    def _build_numbers(self, record_values: list[Any], value_rules: ValueRules) -> pa.Array:
        try:
            x = np.array(
                record_values, np.float64
            )  # None becomes NaN, which is a missing value too
        except OverflowError:
            row = next(row for row, value in enumerate(record_values) if not _fits_float(value))
            raise self._build_error(row, record_values[row]) from None
        if value_rules.has_float32:
            is_float = np.array([type(value) is float for value in record_values], np.bool_)
            with np.errstate(over="ignore"):
                x[is_float] = x[is_float].astype(np.float32)
        return pa.array(x)

    def _build_texts(self, record_values: list[Any], value_rules: ValueRules) -> pa.Array:
        """Build the texts by which a CSV file would store the values."""
        texts = [
            value if value is None else self._format_request_value(value, row, value_rules)
            for row, value in enumerate(record_values)
        ]
        if value_rules.null_texts:
            texts = [None if text in value_rules.null_texts else text for text in texts]
        try:
            return pa.array(texts, pa.string())
        except UnicodeEncodeError:
            row = next(row for row, text in enumerate(texts) if not _is_encodable(text))
            raise InvalidValue(
                row, self.name, describe_value(record_values[row]), "text without lone surrogates"
            ) from None

    def _format_request_value(self, value: Any, row_index: int, value_rules: ValueRules) -> str:
        """Return the characters of a value that is not missing."""
        if isinstance(value, str):
            pattern = (
                value_rules.number_pattern if self.kind == "number" and not self.is_list else None
            )
            is_missing = value in value_rules.null_texts or re.match(MISSING_NUMBER, value.strip())
            if pattern is not None and not is_missing and not pattern.fullmatch(value):
                raise self._build_error(row_index, value)
            return value
        if isinstance(value, bool):
            is_number = self.kind == "number" and not value_rules.has_booleans
            if is_number or self.kind == "integer":
                raise self._build_error(row_index, value)
            word = "true" if value else "false"
            return str(int(value)) if self.kind == "number" else word
        if isinstance(value, int):
            if not _fits_float(value):  # nor may its digits be printed beyond some thousand
                raise self._build_error(row_index, value)
            return str(value)
        assert isinstance(value, float)
        if self.kind == "number" and value_rules.has_float32:
            with np.errstate(over="ignore"):
                value = float(np.float32(value))
        return repr(value)

    def _convert_to_json_value(self, value: Any, row: int) -> Any:
        """Convert values that records made in Python may have (numpy, datetime, Decimal) to those of JSON."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, date):  # also a datetime
            value = value.isoformat()
        elif isinstance(value, Decimal):
            value = str(value)
        for kind in (str, bool, int, float):
            if isinstance(value, kind):
                return kind(value)
        if value is None or isinstance(value, list):
            return value
        raise self._build_error(row, value)

    def _build_error(self, row: int, value: Any) -> InvalidValue:
        wanted = {
            "number": "a number",
            "integer": "an integer",
            "boolean": "true or false",
            "text": "one text or number",
            "time": "a time such as 2024-05-31T12:00:00, or a number",
        }[self.kind]
        if self.is_list:
            wanted = f"a list, and each of its elements {wanted}"
        return InvalidValue(row, self.name, describe_value(value), wanted)


def describe_value(value: Any) -> str:
    """Describe a value in a message, in bounded space and time whatever it is."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return (
            repr(value[:60])
            if len(value) <= 60
            else f"{value[:40]!r}... of {len(value):,} characters"
        )
    if isinstance(value, int):
        return (
            str(value) if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"
        )
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"a list of {len(value):,} values"
    if isinstance(value, Mapping):
        return "an object"
    return f"a value of type {type(value).__name__}"


def _fits_float(value: Any) -> bool:
    return not isinstance(value, int) or value.bit_length() < 1024


def _is_encodable(text: str | None) -> bool:
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        return False
    return True


def plan_columns(file_schema: FileSchema, *, is_required: bool) -> list[RawColumn]:
    """Plan how each column is read; of fields that need different types, one is chosen from which all can read."""
    readers: dict[str, list[tuple[DeclaredField, str]]] = {}
    for field in file_schema.fields:
        for column in field.columns:
            is_weights = isinstance(field, Bag) and column == field.weights
            readers.setdefault(column, []).append((field, _choose_scalar_kind(field, is_weights)))
    columns = []
    for name, pairs in readers.items():
        kinds = {kind for _, kind in pairs}
        order: list[ScalarKind] = ["text", "time", "boolean", "integer", "number"]
        # Texts are read by all; times and numbers together are written as texts.
        kind: ScalarKind = "text" if {"time"} < kinds else next(k for k in order if k in kinds)
        lists = [field for field, _ in pairs if isinstance(field, Bag | SequenceField)]
        is_list = len(lists) == len(pairs)
        separators = frozenset(field.separator for field in lists)
        columns.append(RawColumn(name, kind, is_list, separators, is_required and not is_list))
    return columns


def _choose_scalar_kind(field: DeclaredField, is_weights: bool) -> ScalarKind:
    """Return the type that a field reads from a column."""
    if reads_times(field):
        return "time"
    if is_weights or isinstance(field, Bucket | Number):
        return "number"
    assert isinstance(field, Category | Bag | SequenceField)
    return field.dtype or "text"


@dataclass(frozen=True, slots=True)
class EncodedFields:
    """Fields that are encoded together from one block of records."""

    file_schema: FileSchema | None  # None: no field
    columns: tuple[RawColumn, ...]
    outputs: tuple[str, ...]
    """Names of the categorical fields that enter the batch; the others are only crossed."""
    dense: tuple[int, ...]
    """Positions of the numbers in the batch's dense columns."""


class RecordEncoder:
    """Encoder of raw records to batches. Build one with `build_encoder`; any thread may use it.

    `columns`: the raw columns that are read. `ignored`: columns of the training file that may be sent and are not read:
    labels, weights, groups and keys.
    """

    def __init__(
        self,
        file_schema: FileSchema,
        columns: Sequence[RawColumn],
        rules: ValueRules,
        *,
        ignored: Collection[str] = (),
        names: Mapping[str, str] | None = None,
        selected: Collection[str] | None = None,
        tables: Sequence[KeyedTable] = (),
    ) -> None:
        """Create an encoder. `names`: names in the batch by field, where they differ. `selected`: fields to encode;
        default: all. `tables`: joined to records that have their keys and lack their columns."""
        self._file_schema = file_schema
        self._rules = rules
        self._tables = tables
        self._raw_columns = {column.name: column for column in columns}
        self._names = dict(names or {})
        self._selected = frozenset(
            field.name
            for field in file_schema.fields
            if selected is None or self._names.get(field.name, field.name) in selected
        )
        needed = select_fields(file_schema, self._selected)
        read = {column for field in needed for column in field.columns}
        self.columns = tuple(column for column in self._raw_columns if column in read)
        self.ignored = (frozenset(ignored) | self._raw_columns.keys()) - read
        scalars = (column.name for column in columns if column.name in read and not column.is_list)
        self._needed = frozenset(scalars) or frozenset(self.columns)
        self._column_names = {*self.columns, *self.ignored}
        self.text_fields = {
            self._names.get(field.name, field.name): field
            for field in file_schema.categorical
            if isinstance(field, Category | Bag | SequenceField) and field.dtype == "text"
        }
        """Fields that read texts as ids, by the names of their features."""
        self._everything = self._build_subset(self._selected)
        self._split = lru_cache(maxsize=64)(self._split_fields)

    def encode_texts(self, name: str, texts: Collection[str]) -> NDArray[np.int64]:
        """Encode texts (E,) of the feature `name` in `text_fields` to ids (E,); of lists, their elements. Raises
        DataError."""
        field = self.text_fields[name]
        column = RawColumn(field.column, "text")
        with describing_records(f"input {name!r}, element"):
            return encode_ids(field, column.build_array(list(texts), self._rules))

    def select(self, names: Collection[str], *, ignored: Collection[str] = ()) -> RecordEncoder:
        """Return an encoder of the features and dense columns `names`; other dense columns are 0. `ignored`: further
        columns that may be sent and are not read."""
        return RecordEncoder(
            self._file_schema,
            list(self._raw_columns.values()),
            self._rules,
            ignored=self.ignored | frozenset(ignored),
            names=self._names,
            selected=names,
            tables=self._tables,
        )

    def find_columns(self, name: str) -> tuple[str, ...]:
        """Return the raw columns that a feature or dense column reads: `name` itself if no field has that name."""
        fields = self._file_schema.fields
        return next((f.columns for f in fields if self._names.get(f.name, f.name) == name), (name,))

    def encode(self, records: Sequence[Record]) -> Batch:
        """Encode records to a batch of N samples, without labels.

        A null is a missing value, as in a file, and an absent list is empty. Raises DataError naming record and column,
        for an absent column of single values and for one that the training file does not have, too.
        """
        self._check_records(records, "record", frozenset())
        records = self._join_tables(records, frozenset())
        self._check_records(records, "record", self._needed)
        dense, ids = self._encode_subset(self._everything, records, "record")
        parts = [(self._everything, dense)]
        return Batch(len(records), self._spread_dense(parts, len(records)), ids)

    def encode_candidates(self, user: Record, candidates: Sequence[Record]) -> Batch:
        """Encode the candidates of one user to a batch of N samples.

        The user's features are encoded once and shared: their `Ids` have one sample. They are the features that read no
        column of a candidate. Dense columns are (1, n) if all are the user's, else (N, n). Raises DataError as `encode`
        does, and for a column that both user and candidates have, or neither.
        """
        self._check_records([user], "user", frozenset())
        self._check_records(candidates, "candidate", frozenset())
        (user,) = self._join_tables([user], frozenset(chain.from_iterable(candidates)))
        candidates = self._join_tables(candidates, user.keys())
        self._check_records(candidates, "candidate", self._needed.difference(user))
        columns = frozenset(chain.from_iterable(candidates))
        for row, candidate in enumerate(candidates):
            if common := user.keys() & candidate.keys():
                column = min(common)
                raise DataError(
                    f"candidate {row}, column {column}: got it in the user too, wanted it in one of them. Leave it out "
                    "of the user if candidates differ in it"
                )
        shared, own, repeated = self._split(columns & frozenset(self.columns))
        shared_dense, shared_ids = self._encode_subset(shared, [user], "user")
        records = candidates
        if repeated:
            values = {column: user.get(column) for column in repeated}
            records = [{**values, **candidate} for candidate in candidates]
        own_dense, own_ids = self._encode_subset(own, records, "candidate")
        size = 1 if shared.dense and not own.dense else len(candidates)
        dense = self._spread_dense([(shared, shared_dense), (own, own_dense)], size)
        ids = {**shared_ids, **own_ids}
        names = (self._names.get(f.name, f.name) for f in self._file_schema.categorical)
        return Batch(len(candidates), dense, {name: ids[name] for name in names if name in ids})

    def _join_tables(
        self, records: Sequence[Record], other_columns: Collection[str]
    ) -> Sequence[Record]:
        """Add the columns of the joined tables that neither a record nor `other_columns` have."""
        for table in self._tables:
            columns = table.columns.keys() & self._column_names - {*other_columns}
            records = table.join_records(records, sorted(columns))
        return records

    def _split_fields(
        self, candidate_columns: frozenset[str]
    ) -> tuple[EncodedFields, EncodedFields, tuple[str, ...]]:
        """Return the fields shared by all candidates, those of each candidate, and the user's columns that these read.

        candidate_columns: columns that the candidates have.
        """
        fields = [field for field in self._file_schema.fields if field.name in self._selected]
        own = {field.name for field in fields if candidate_columns.intersection(field.columns)}
        parts = {
            f.name for f in self._file_schema.fields if candidate_columns.intersection(f.columns)
        }
        own |= {field.name for field in fields if isinstance(field, Cross) and parts & {*field.of}}
        shared = self._build_subset({field.name for field in fields} - own)
        subset = self._build_subset(own)
        repeated = tuple(c.name for c in subset.columns if c.name not in candidate_columns)
        return shared, subset, repeated

    def _build_subset(self, names: Collection[str]) -> EncodedFields:
        """Build the subset of the fields `names`, with the fields that they cross."""
        fields = select_fields(self._file_schema, names)
        read = {column for field in fields for column in field.columns}
        numbers = self._file_schema.numbers
        return EncodedFields(
            replace(self._file_schema, fields=fields) if fields else None,
            tuple(column for column in self._raw_columns.values() if column.name in read),
            tuple(f.name for f in fields if isinstance(f, Categorical) and f.name in names),
            tuple(i for i, field in enumerate(numbers) if field.name in names),
        )

    def _encode_subset(
        self, subset: EncodedFields, records: Sequence[Record], message_subject: str
    ) -> tuple[torch.Tensor, dict[str, Ids]]:
        """Encode a subset of the fields: dense columns (N, k), and ids by name in the batch."""
        if subset.file_schema is None:
            return torch.zeros(len(records), 0), {}
        with describing_records(message_subject):
            arrays = {
                column.name: column.build_array([r.get(column.name) for r in records], self._rules)
                for column in subset.columns
            }
            chunk = encode_block(subset.file_schema, arrays, len(records))
        batch = chunk.to_batch([field.name for field in subset.file_schema.categorical])
        ids = {self._names.get(name, name): batch.ids[name] for name in subset.outputs}
        return batch.dense, ids

    def _spread_dense(
        self, encoded_subsets: list[tuple[EncodedFields, torch.Tensor]], num_samples: int
    ) -> torch.Tensor:
        """Combine the dense columns of subsets in the order of the schema, (size, n); others are 0."""
        num_columns = len(self._file_schema.numbers)
        for subset, dense in encoded_subsets:
            if len(subset.dense) == num_columns and len(dense) == num_samples:
                return dense
        combined = torch.zeros(num_samples, num_columns)
        for subset, dense in encoded_subsets:
            combined[:, list(subset.dense)] = dense
        return combined

    def _check_records(
        self, records: Sequence[Record], message_subject: str, required_columns: frozenset[str]
    ) -> None:
        """Raise DataError unless these are objects with known columns, all of `required_columns`, and at least one."""
        if not isinstance(records, Sequence) or isinstance(records, str | bytes):
            raise DataError(
                f"got {describe_value(records)}, wanted a list of {message_subject}s. Send each as an object "
                "of its columns"
            )
        if not records:
            raise DataError(f"got no {message_subject}, wanted at least one. Send one or more")
        column_names = self._column_names
        for row, record in enumerate(records):
            place = message_subject if message_subject == "user" else f"{message_subject} {row}"
            if not isinstance(record, Mapping):
                raise DataError(
                    f"{place}: got {describe_value(record)}, wanted an object. Send the columns by name: "
                    + "{"
                    + ", ".join(f'"{name}": ...' for name in self.columns[:3])
                    + "}"
                )
            if not record.keys() <= column_names:
                column = next(name for name in record if name not in column_names)
                raise DataError(f"{place}: {self._describe_unknown(column)}")
            if not required_columns <= record.keys():
                column = next(
                    name for name in self.columns if name in required_columns - record.keys()
                )
                elsewhere = " in it or in the user" if message_subject == "candidate" else ""
                raise DataError(
                    f"{place}: got no column {column!r}{elsewhere}, which the model reads. Send it: null is a missing "
                    "value"
                )

    def _describe_unknown(self, column: Any) -> str:
        if not isinstance(column, str):
            return f"got {describe_value(column)} as the name of a column, wanted text. Send the columns by name"
        hint = suggest_name(column[:MAX_NAME], self._column_names)
        return f"got a column {describe_value(column)}, which the model was not trained on; {hint}"


@contextmanager
def describing_records(subject: str) -> Iterator[None]:
    """Turn errors of values into DataErrors that name record and column."""
    try:
        yield
    except InvalidValue as fault:
        place = subject if subject == "user" else f"{subject} {fault.row}"
        wanted = fault.wanted.removesuffix(", because the schema says missing: error")
        fix = "Send what a row of the training file has there"
        if fault.got == "nothing":
            fix = f"Send the column, or train with files that have missing values in {fault.column}"
        raise DataError(
            f"{place}, column {fault.column}: got {fault.got}, wanted {wanted}. {fix}"
        ) from None
    except pa.ArrowException as error:
        raise DataError(
            f"{subject}s: cannot be read as declared ({str(error).splitlines()[0][:200]}). Send what rows of the "
            "training file have"
        ) from None


def select_fields(file_schema: FileSchema, names: Collection[str]) -> tuple[DeclaredField, ...]:
    """Return the fields `names` and those that they cross, in the order of the schema."""
    crossed = {
        part
        for field in file_schema.fields
        if isinstance(field, Cross) and field.name in names
        for part in field.of
    }
    return tuple(f for f in file_schema.fields if f.name in names or f.name in crossed)


def build_encoder(config: RunConfig | None, schema: Schema) -> RecordEncoder:
    """Build the encoder of raw records for a model. Raises ConfigError for a recorded schema that cannot be used.

    The model was trained on            a record has
    files with a schema (FORMATS)       the columns of the files
    interactions                        history, and the columns of users, of items and of the files that describe them
    a graph                             the user's id, or `node`
    any other reader, or its own loop   the features and dense columns of `schema`: integer ids, numbers, lists of ids
    """
    name = "" if config is None else config.data.name
    options: Mapping[str, Any] = {} if config is None else config.data.options
    if name in FORMATS:
        if "schema" not in options:
            raise ConfigError(
                f"got a model trained by the {name} reader without a schema in its configuration, wanted "
                "data.options.schema. Export the model again from its run folder"
            )
        return _build_file_encoder(name, options)
    if has_neighbours(schema):
        recorded = options.get("schema")
        return _build_node_encoder(load_file_schema(recorded).fields if recorded else ())
    if name == "interactions" and "schema" in options:
        return _build_interaction_encoder(load_file_schema(options["schema"]), schema)
    return _build_schema_encoder(schema)


def _build_file_encoder(name: str, options: Mapping[str, Any]) -> RecordEncoder:
    """Build the encoder for files of the format `name` with a schema."""
    declared = load_file_schema(options["schema"])
    inputs = declared.inputs()
    fields = tuple(f for f in inputs.fields if not isinstance(f, Group | Key))
    file_schema = resolve_dtypes(replace(inputs, fields=fields), {})
    null_texts = frozenset(options.get("null_values") or ())
    rules = replace(FORMATS[name].value_rules, null_texts=null_texts)
    others = {*declared.columns, *(options.get("names") or ())}
    others |= {options[name] for name in ("split_by", "order_by") if options.get(name)}
    join = options.get("join") or {}
    columns = plan_columns(file_schema, is_required=False)
    return RecordEncoder(
        file_schema,
        columns,
        rules,
        ignored={*others, *join} - {column.name for column in columns},
        tables=[read_keyed_table(source, key) for key, source in join.items()],
    )


def _build_interaction_encoder(record_schema: FileSchema, schema: Schema) -> RecordEncoder:
    """Build the encoder for users and items of interactions: in sequences the item is the column `target`."""
    dense = [Number(name, missing=0.0) for name in schema.dense]
    file_schema = FileSchema((*record_schema.fields, *dense))
    columns = plan_columns(file_schema, is_required=False)
    is_sequence = any(column.name == "target" for column in schema.categorical)
    names = {"item": "target"} if is_sequence else {}
    return RecordEncoder(file_schema, columns, FORMATS["csv"].value_rules, names=names)


def _build_node_encoder(recorded_fields: Sequence[DeclaredField]) -> RecordEncoder:
    """Build the encoder for nodes of a graph: their records have an id alone, of a user or a `node`."""
    fields = (*recorded_fields, Category(USER, column=NODE))
    file_schema = FileSchema((next(field for field in fields if field.name == USER),))
    columns = plan_columns(file_schema, is_required=True)
    return RecordEncoder(file_schema, columns, FORMATS["csv"].value_rules)


def _build_schema_encoder(schema: Schema) -> RecordEncoder:
    """Build the encoder for a schema of batches, which no file declares."""
    names: dict[str, str] = {}
    fields: list[DeclaredField] = []
    kinds: dict[str, Callable[..., DeclaredField]] = {
        "one": Category, "bag": Bag, "sequence": SequenceField
    }  # fmt: skip
    for i, column in enumerate(schema.categorical):
        fields.append(
            kinds[column.kind](
                f"ids_{i}",
                column=column.name,
                dtype="integer",
                cardinality=column.cardinality,
                missing="error",
            )
        )
        names[f"ids_{i}"] = column.name
    for i, name in enumerate(schema.dense):
        fields.append(Number(f"dense_{i}", column=name))
        names[f"dense_{i}"] = name
    file_schema = FileSchema(tuple(fields))
    columns = plan_columns(file_schema, is_required=True)
    return RecordEncoder(
        file_schema, columns, ValueRules(number_pattern=NUMBER), ignored=schema.labels, names=names
    )
