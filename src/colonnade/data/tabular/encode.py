"""Encoding of Arrow columns under a file schema: ids, numbers, buckets, times, labels and weights.

Legend: S samples of a block, E elements of its lists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.counter import mix_words, stream_key
from colonnade.data.tabular.arrow_types import (
    MISSING_NUMBER,
    is_integer,
    is_list,
    is_text_type,
    replace_null_type,
)
from colonnade.data.tabular.chunk import Bags, Chunk, Floats, Longs, gather_bags
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.fields import (
    NULL_VALUES,
    Bag,
    Bucket,
    Category,
    Cross,
    DeclaredField,
    Group,
    Key,
    Label,
    Number,
    Sequence,
    Time,
    Weight,
)
from colonnade.data.tabular.hashing import (
    MAX_TEXT_BYTES,
    MISSING_ID,
    add_namespace_to_ids,
    combine_ids,
    hash_texts,
    hash_to_rows,
    view_text_buffers,
)
from colonnade.data.tabular.times import (
    DAY,
    MICROS,
    UNITS,
    Unit,
    convert_to_microseconds,
    parse_time,
)

FIX = "Repair or remove the row"
SPLIT_KEY = 0x53504C49
"""Constant key of the hash that assigns keys to splits, so that the split does not depend on the run's seed."""
SplitField = Key | Number | Time
"""Field of the column that splits samples: by hash, or by the order of numbers or times."""


class InvalidValue(Exception):
    """Value that does not fit its field; `row` counts from 0 in the block. It becomes a DataError naming the file."""

    def __init__(self, row: int, column: str, got: str, wanted: str, fix: str = FIX) -> None:
        super().__init__(f"row {row}, column {column}: got {got}, wanted {wanted}. {fix}")
        self.row = row
        self.column = column
        self.got = got
        self.wanted = wanted
        self.fix = fix


def refuse_values(
    is_invalid: NDArray[np.bool_],
    column: str,
    describe: Callable[[int], str],
    wanted: str,
    fix: str = FIX,
) -> None:
    """Raise InvalidValue for the first invalid value. describe: function from its row to its words."""
    if is_invalid.any():
        row = int(is_invalid.argmax())
        raise InvalidValue(row, column, describe(row), wanted, fix)


def encode_number(field: Number, arrow_column: pa.Array, numbers_out: NDArray[np.float32]) -> None:
    """Encode numbers into `numbers_out` (S,); missing values without a substitute and infinite ones stay not
    finite."""
    x = transform_numbers(field, arrow_column)
    missing = np.isnan(x)
    if field.mean or (field.std or 1) != 1:
        x = (x - (field.mean or 0.0)) / (field.std or 1.0)
    with np.errstate(over="ignore"):
        numbers_out[:] = x
    if field.missing is not None and missing.any():
        numbers_out[missing] = field.missing


def transform_numbers(field: Number, arrow_column: pa.Array) -> NDArray[np.float64]:
    """Return numbers (S,) clipped and transformed, NaN where missing."""
    x = convert_to_numbers(field, arrow_column)
    if field.transform == "is_missing":
        return np.isnan(x).astype(np.float64)
    if field.clip is not None or field.transform is not None:
        # Clip and transform would hide an infinite value.
        infinite = np.isinf(x)
        if infinite.any():
            raise build_number_error(field, arrow_column, int(infinite.argmax()))
    if field.clip is not None:
        x = np.clip(x, *field.clip)
    if field.transform == "log1p":
        x = np.log1p(np.maximum(x, 0))
    return x


def build_number_error(field: Number, arrow_column: pa.Array, row_index: int) -> InvalidValue:
    """Build the error for a number that is missing, infinite, or too large for float32."""
    value = convert_to_numbers(field, arrow_column.slice(row_index, 1))[0]
    if np.isnan(value):
        return InvalidValue(
            row_index,
            field.column,
            "nothing",
            "a number",
            f"Say what a missing {field.name} is: `missing: 0.0` is common",
        )
    wanted = "a finite number" if np.isinf(value) else "one that float32 holds once transformed"
    return InvalidValue(row_index, field.column, f"{value:g}", wanted)


def convert_to_numbers(field: DeclaredField, array: pa.Array) -> NDArray[np.float64]:
    """Read numbers (S,) float64, NaN where missing: text as numbers, times as days before `days_before`."""
    if isinstance(field, Number) and field.days_before is not None:
        times, missing = parse_times(field, array)
        return np.where(missing, np.nan, (parse_time(field.days_before) - times) / DAY)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_type(array.type):
        array = parse_number_texts(field, array, pa.float64(), "a number")
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count:
        array = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan)
    return array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def parse_number_texts(
    field: DeclaredField, arrow_column: pa.Array, number_type: pa.DataType, wanted_words: str
) -> pa.Array:
    """Parse texts as numbers of type `number_type`; MISSING_NUMBER is missing. Raises InvalidValue."""
    arrow_column = pc.utf8_trim_whitespace(arrow_column.cast(pa.string()))
    arrow_column = pc.if_else(
        pc.match_substring_regex(arrow_column, MISSING_NUMBER), None, arrow_column
    )
    if isinstance(field, Label):
        lower = pc.utf8_lower(arrow_column)
        for word, number in (("true", "1"), ("false", "0")):
            arrow_column = pc.if_else(pc.equal(lower, word), number, arrow_column)
    try:
        return arrow_column.cast(number_type)
    except pa.ArrowInvalid:
        for row, text in enumerate(arrow_column):
            try:
                text.cast(number_type)
            except pa.ArrowInvalid:
                fix = FIX
                if isinstance(field, Label):
                    fix += ", or say which value is 1: `positive: 'yes'`"
                elif isinstance(field, Number | Bucket):
                    fix += ", or declare a category"
                raise InvalidValue(
                    row, field.column, repr(text.as_py())[:60], wanted_words, fix
                ) from None
        raise


def encode_bucket(field: Bucket, array: pa.Array) -> Longs:
    """Encode numbers, also infinite ones, as bucket ids (S,): the count of boundaries <= the number."""
    x = convert_to_numbers(field, array)
    ids = np.searchsorted(np.array(field.boundaries), x, side="right").astype(np.int64)
    missing = np.isnan(x)
    refuse_missing(field, missing)
    ids[missing] = len(field.boundaries) + 1
    return ids


def encode_time(field: Time, array: pa.Array) -> Longs:
    """Encode times as hours of the day or weekdays (S,)."""
    times, missing = parse_times(field, array)
    hours = times // (3600 * MICROS)
    # 1970 began on a Thursday.
    ids = hours % 24 if field.part == "hour" else (hours // 24 + 3) % 7
    refuse_missing(field, missing)
    ids[missing] = field.num_values
    return ids


def parse_times(
    field: Number | Time, array: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microseconds since 1970 (S,) and a missing mask (S,). Raises InvalidValue for the first invalid time."""
    unit: Unit = field.unit or "s"
    try:
        return convert_to_microseconds(array, unit)
    except pa.ArrowInvalid:
        for row in range(len(array)):
            try:
                convert_to_microseconds(array.slice(row, 1), unit)
            except pa.ArrowInvalid:
                raise InvalidValue(
                    row,
                    field.column,
                    repr(array.slice(row, 1).cast(pa.string())[0].as_py())[:60],
                    f"a time such as 2024-05-31T12:00:00 of the years 1 to 9999, or {UNITS[unit]}",
                    f"{FIX}, or declare the column's unit: {', '.join(UNITS)}",
                ) from None
        raise


def refuse_missing(
    field: Category | Bag | Sequence | Bucket | Time, missing: NDArray[np.bool_]
) -> None:
    """Raise InvalidValue for the first missing value of a field with `missing: error`."""
    if field.missing == "error":
        wanted = "a value, because the schema says missing: error"
        refuse_values(missing, field.column, lambda _: "nothing", wanted)


def encode_label(field: Label, arrow_column: pa.Array) -> Floats:
    """Encode labels (S,) float32, NaN where unknown."""
    if field.positive is not None:
        x = _mark_positive_labels(field, arrow_column)
    else:
        x = convert_to_numbers(field, arrow_column)
    missing = np.isnan(x)
    if field.missing == "error":
        fix = "Remove the row, or declare `missing: unknown`"
        refuse_values(missing, field.column, lambda _: "nothing", "a label", fix)
    if field.at_least is not None:
        x = np.where(missing, np.nan, x >= field.at_least)
    elif field.kind == "binary":
        refuse_values(
            (x != 0) & (x != 1) & ~missing,
            field.column,
            lambda row: f"{x[row]:g}",
            "a label that is 0 or 1",
            "Declare at_least= to make one of a number, or `kind: number` for ratings (gplvmf) or your own loss",
        )
    else:
        low, high = field.between or (np.finfo(np.float32).min, np.finfo(np.float32).max)
        scale = f"from {low:g} to {high:g}" if field.between else "finite"
        is_outside = (x < low) | (x > high)
        refuse_values(is_outside, field.column, lambda row: f"{x[row]:g}", f"a number, {scale}")
    return x.astype(np.float32)


def _mark_positive_labels(field: Label, arrow_column: pa.Array) -> NDArray[np.float64]:
    """Return 1.0 where the value is the positive one, else 0.0, and NaN where it is missing (S,)."""
    texts = pc.utf8_trim_whitespace(arrow_column.cast(pa.string()))
    missing = pc.is_in(texts, pa.array([None, "", *NULL_VALUES], pa.string()))
    is_positive = pc.equal(texts, str(field.positive)).fill_null(False)
    x = is_positive.to_numpy(zero_copy_only=False).astype(np.float64)
    x[missing.to_numpy(zero_copy_only=False)] = np.nan
    return x


def encode_weight(field: Weight, array: pa.Array) -> Floats:
    """Encode sample weights (S,) float32, each finite and 0 or more."""
    x = convert_to_numbers(field, array)
    refuse_values(
        ~((x >= 0) & (x < np.finfo(np.float32).max)),
        field.column,
        lambda row: "nothing" if np.isnan(x[row]) else f"{x[row]:g}",
        "a finite weight of 0 or more",
    )
    return x.astype(np.float32)


def encode_ids(field: Category | Bag | Sequence, array: pa.Array) -> Longs:
    """Encode values as rows of a table or as open ids: (S,) single values, or (E,) elements of lists."""
    if pa.types.is_dictionary(array.type):
        return _encode_dictionary_ids(field, array)
    array = _convert_to_integers(field, array)
    _check_id_text_lengths(field, array)
    missing = _mark_missing_values(array, _get_null_values(field))
    if missing is not None:
        refuse_missing(field, missing)
    if field.vocabulary is not None:
        ids = _look_up_vocabulary(field, array, missing)
        missing_id = len(field.vocabulary) + field.unknown_rows
    elif field.cardinality is not None:
        ids = _to_int64(array)
        missing_id = field.cardinality
        if missing is not None:
            ids[missing] = 0
        refuse_values(
            (ids < 0) | (ids >= field.cardinality),
            field.column,
            lambda row: str(array[row].as_py()),
            f"an id 0 .. {field.cardinality - 1}",
            "Raise the cardinality, or declare rows= to hash",
        )
    else:
        ids = to_open_ids(array)
        missing_id = MISSING_ID
        if is_integer(array.type):
            refuse_values(
                ids == MISSING_ID,
                field.column,
                lambda row: str(array[row].as_py()),
                "another id, because -2^63 (2^63 unsigned) stands for missing values",
                "Write nothing if the value is missing, else another id",
            )
    if missing is not None:
        ids[missing] = missing_id
    if field.namespace:
        ids = add_namespace_to_ids(ids, field.name)
    return ids if field.rows is None else hash_to_rows(ids, field.rows)


def _convert_to_integers(
    field: Category | Bag | Sequence | Group | Key, array: pa.Array
) -> pa.Array:
    """Convert texts and whole floats (which pandas writes) to integers where the schema declares integers."""
    is_written = is_text_type(array.type) or pa.types.is_decimal(array.type)
    if field.dtype in ("integer", "boolean") and is_written:
        return _parse_integer_texts(field, array.cast(pa.string()))
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            x = array.to_numpy(zero_copy_only=False)
            bad = ~np.isnan(x) & ((x != np.round(x)) | (np.abs(x) >= 2.0**63))
            row = int(bad.argmax())
            raise InvalidValue(row, field.column, f"{x[row]:g}", "an integer of 64 bits") from None
    return array


def _encode_dictionary_ids(
    field: Category | Bag | Sequence, dictionary_column: pa.DictionaryArray
) -> Longs:
    """Encode each distinct value of a dictionary once. Unused invalid values are no error."""
    if (
        dictionary_column.null_count
        or len(dictionary_column.dictionary) > len(dictionary_column)
        or field.missing == "error"
    ):
        return encode_ids(field, dictionary_column.dictionary_decode())
    try:
        by_entry = encode_ids(field, dictionary_column.dictionary)
    except InvalidValue:
        return encode_ids(field, dictionary_column.dictionary_decode())
    return by_entry.take(dictionary_column.indices.to_numpy(zero_copy_only=False))


def _check_id_text_lengths(field: Category | Bag | Sequence | Group | Key, array: pa.Array) -> None:
    """Raise InvalidValue for a text too long to be an id: hashing takes a microsecond per byte of the longest text."""
    if not (is_text_type(array.type) and len(array)):
        return
    lengths = np.diff(view_text_buffers(array)[0])
    row = int(lengths.argmax())
    if lengths[row] > MAX_TEXT_BYTES:
        raise InvalidValue(
            row,
            field.column,
            f"a text of {lengths[row]:,} bytes",
            f"at most {MAX_TEXT_BYTES:,} bytes, as an id",
            "Leave the column out of the schema, or hash such texts yourself",
        )


def _get_null_values(field: Category | Bag | Sequence) -> tuple[str, ...]:
    if field.null_values is not None:
        return field.null_values
    return tuple(text for text in NULL_VALUES if text not in (field.vocabulary or ()))


def _mark_texts(array: pa.Array, texts: Collection[str]) -> NDArray[np.bool_]:
    vocabulary = pa.array([text.encode() for text in texts], pa.large_binary())
    return pc.is_in(array.cast(pa.large_binary()), vocabulary).to_numpy(zero_copy_only=False)


def _mark_missing_values(
    arrow_column: pa.Array, null_texts: Collection[str] = ()
) -> NDArray[np.bool_] | None:
    """Return a mask (S,) of nulls, empty texts and `null_texts`; None if there are none."""
    missing = None
    if is_text_type(arrow_column.type):
        offsets, _ = view_text_buffers(arrow_column)
        lengths = np.diff(offsets)
        missing = lengths == 0
        # Texts of other lengths, such as hashes of 8 digits, need not be compared.
        if any((lengths == len(text.encode())).any() for text in null_texts):
            missing |= _mark_texts(arrow_column, null_texts)
    if arrow_column.null_count:
        nulls = arrow_column.is_null().to_numpy(zero_copy_only=False)
        missing = nulls if missing is None else missing | nulls
    return missing if missing is not None and missing.any() else None


def _to_int64(array: pa.Array) -> Longs:
    """Copy integers to int64 (S,); nulls become any number. An unsigned integer above 2**63 wraps around."""
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    return np.array(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def wrap_unsigned(value: int) -> int:
    """Return an integer of 64 bits, signed or unsigned, as signed."""
    return value - 2**64 if value >= 2**63 else value


def to_open_ids(array: pa.Array) -> Longs:
    """Return open ids in a new array (S,): integers unchanged, texts hashed; missing values get any id."""
    return hash_texts(array) if is_text_type(array.type) else _to_int64(array)


def _look_up_vocabulary(
    field: Category | Bag | Sequence, arrow_column: pa.Array, is_missing: NDArray[np.bool_] | None
) -> Longs:
    assert field.vocabulary is not None
    if is_text_type(arrow_column.type):
        arrow_column = arrow_column.cast(pa.large_string())
        vocabulary = pa.array(field.vocabulary, pa.large_string())
    else:
        # Both sides are compared as signed 64-bit numbers, like all ids.
        arrow_column = pa.array(_to_int64(arrow_column))
        vocabulary = pa.array([wrap_unsigned(int(value)) for value in field.vocabulary])
    indices = pc.index_in(arrow_column, value_set=vocabulary)
    ids = np.array(pc.fill_null(indices, -1).to_numpy(zero_copy_only=False)).astype(np.int64)
    unknown = ids < 0
    if is_missing is not None:
        unknown &= ~is_missing
    if field.unknown_rows == 0:
        refuse_values(
            unknown,
            field.column,
            lambda row: repr(arrow_column[row].as_py())[:60],
            f"one of the {len(vocabulary)} values of the vocabulary",
            "Add it, or give unknown values rows with unknown_rows: 1",
        )
    if unknown.any():
        ids[unknown] = len(vocabulary)
        if field.unknown_rows > 1:
            unknown_values = arrow_column.filter(pa.array(unknown))
            ids[unknown] += hash_to_rows(to_open_ids(unknown_values), field.unknown_rows)
    return ids


def encode_lists(
    field: Bag | Sequence,
    list_column: pa.Array,
    weight_column: pa.Array | None = None,
) -> Bags:
    """Encode lists, or texts split at the separator; a missing list has no element. Padding and missing elements are
    no items."""
    lists = _split_text_lists(field, list_column)
    lengths = _list_lengths(lists)
    elements = replace_null_type(lists.flatten())  # skips values under a null list
    numbers = None if weight_column is None else _read_id_weights(field, weight_column, lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    try:
        elements, is_item = _convert_and_mark_items(field, elements)
        if not is_item.all():
            elements = elements.filter(pa.array(is_item))
            rows = rows[is_item]
            numbers = None if numbers is None else numbers[is_item]
            lengths = np.bincount(rows, minlength=len(lengths)).astype(np.int64)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        offsets = np.append(begins, ends[-1:] if len(ends) else [0])
        if field.max_length is not None and len(lengths) and lengths.max() > field.max_length:
            lengths = np.minimum(lengths, field.max_length)
            begins = begins if field.keep == "first" else ends - lengths
            indices = gather_bags(np.arange(len(elements)), begins, lengths)
            elements = elements.take(pa.array(indices.values))
            offsets = indices.offsets
            rows = rows[indices.values]
            numbers = None if numbers is None else numbers.take(indices.values)
        return Bags(encode_ids(field, elements), offsets, numbers)
    except InvalidValue as fault:
        fault.row = int(rows[fault.row])
        raise


def _convert_and_mark_items(
    field: Bag | Sequence, list_elements: pa.Array
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return the elements of lists, integers parsed, and a mask (E,) of those that are items."""
    if pa.types.is_dictionary(list_elements.type):
        list_elements = list_elements.dictionary_decode()
    list_elements = _convert_to_integers(field, list_elements)
    is_item = np.ones(len(list_elements), np.bool_)
    if field.missing == "row":
        missing = _mark_missing_values(list_elements, _get_null_values(field))
        is_item = is_item if missing is None else ~missing
    if isinstance(field.padding, str):
        is_item &= ~_mark_texts(list_elements, [field.padding])
    elif field.padding is not None:
        is_item &= _to_int64(list_elements) != wrap_unsigned(field.padding)
    return list_elements, is_item


def _list_lengths(lists: pa.Array) -> Longs:
    return np.array(pc.fill_null(pc.list_value_length(lists), 0).to_numpy()).astype(np.int64)


def _read_id_weights(field: Bag | Sequence, weight_column: pa.Array, list_lengths: Longs) -> Floats:
    """Return the weights of all ids (E,). Raises InvalidValue unless a sample has one finite weight for each id."""
    assert isinstance(field, Bag)
    lists = _split_text_lists(field, weight_column)
    counts = _list_lengths(lists)
    if (counts != list_lengths).any():
        row = int((counts != list_lengths).argmax())
        raise InvalidValue(
            row, field.weights, f"{counts[row]} weights", f"one for each of {list_lengths[row]} ids"
        )
    rows = np.repeat(np.arange(len(list_lengths)), list_lengths)
    try:
        numbers = convert_to_numbers(field, replace_null_type(lists.flatten()))
    except InvalidValue as fault:
        raise InvalidValue(int(rows[fault.row]), field.weights, fault.got, fault.wanted) from None
    with np.errstate(over="ignore"):
        weights = numbers.astype(np.float32)
    bad = ~np.isfinite(weights)
    if bad.any():
        i = int(bad.argmax())
        raise InvalidValue(int(rows[i]), field.weights, f"{weights[i]:g}", "a finite weight")
    return weights


def _split_text_lists(field: Bag | Sequence, array: pa.Array) -> pa.Array:
    if is_list(array.type):
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    text = array.cast(pa.string())
    # An empty text has no element, rather than one empty element.
    text = pc.if_else(pc.equal(text, ""), None, text)
    return pc.split_pattern(text, field.separator)


def encode_required_ids(field: Group | Key, array: pa.Array) -> Longs:
    """Encode groups, keys or split keys as open ids (S,). Raises InvalidValue for a missing value."""
    array = read_required_values(field, array)
    _check_id_text_lengths(field, array)
    return to_open_ids(array)


def read_required_values(field: Group | Key, array: pa.Array) -> pa.Array:
    """Return a column's values, plain and integers where they are whole. Raises InvalidValue for a missing value."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = _convert_to_integers(field, array)
    missing = _mark_missing_values(array)
    if missing is not None:
        refuse_values(missing, field.column, lambda _: "nothing", "a value")
    return array


def _parse_integer_texts(
    field: Category | Bag | Sequence | Group | Key, array: pa.Array
) -> pa.Array:
    """Parse texts as integers, including unsigned ones, and "31.0", "1e+15", "true" of pandas, pyarrow."""
    try:
        return parse_number_texts(field, array, pa.int64(), "an integer")
    except InvalidValue:
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(array.cast(pa.string())))
        texts = pc.replace_substring_regex(texts, r"^(-?[0-9]+)\.0*$", r"\1")
        for word, number in (("true", "1"), ("false", "0")):
            texts = pc.if_else(pc.equal(texts, word), number, texts)
        is_float = pc.match_substring_regex(texts, r"^[+-]?[0-9.]+e[+-]?[0-9]+$")
        # A key is joined unchanged, so that it does not wrap around.
        long = r"^$" if isinstance(field, Key) else r"^[0-9]{19,}$"
        is_long = pc.match_substring_regex(texts, long)

        def parse(mask: pa.Array, number_type: pa.DataType) -> pa.Array:
            chosen = pc.if_else(mask, texts, None)
            return parse_number_texts(field, chosen, number_type, "an integer")

        integers = parse(pc.invert(pc.or_(is_float, is_long)), pa.int64())
        unsigned = parse(is_long, pa.uint64()).view(pa.int64())
        floats = _convert_to_integers(field, parse(is_float, pa.float64()))
        return pc.coalesce(integers, unsigned, floats)


def read_join_keys(field: Key, array: pa.Array) -> NDArray:
    """Return the values on which predictions are joined (S,), unchanged: integers, or texts as objects."""
    array = read_required_values(field, array)
    if is_text_type(array.type):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(array.type):
        return np.array(array)  # a copy, because torch needs writable memory
    return to_open_ids(array)


def encode_split_keys(field: SplitField, array: pa.Array) -> NDArray[np.float64]:
    """Return the numbers (S,) that assign samples to splits: hashes in [0, 1), numbers, or microseconds since 1970."""
    array = replace_null_type(array)
    if isinstance(field, Key):
        ids = encode_required_ids(field, array)
        random_words = mix_words(ids.astype(np.uint64) + np.uint64(stream_key(SPLIT_KEY)))
        return (random_words >> np.uint64(11)) * 2.0**-53  # exact, so never 1: no sample is lost
    if isinstance(field, Time):
        times, missing = parse_times(field, array)
        keys = times.astype(np.float64)
    else:
        keys = convert_to_numbers(field, array)
        missing = np.isnan(keys)
    wanted = "a value, because order_by orders the samples by it"
    refuse_values(missing, field.column, lambda _: "nothing", wanted)
    return keys


def encode_block(
    file_schema: FileSchema,
    columns: Mapping[str, pa.Array],
    num_samples: int,
    *,
    split_field: SplitField | None = None,
) -> Chunk:
    """Encode all fields of a block. `columns`: arrays of length S, by the file's column.

    Raises InvalidValue for the first value that does not fit its field.
    """
    columns = {name: replace_null_type(array) for name, array in columns.items()}
    numbers = file_schema.numbers
    dense = np.empty((num_samples, len(numbers)), dtype=np.float32)
    for j, field in enumerate(numbers):
        encode_number(field, columns[field.column], dense[:, j])
    if not np.isfinite(dense).all():
        row, j = np.argwhere(~np.isfinite(dense))[0]
        raise build_number_error(numbers[j], columns[numbers[j].column], int(row))

    ids: dict[str, Longs | Bags] = {}
    for id_field in file_schema.categorical:
        if isinstance(id_field, Cross):
            continue
        array = columns[id_field.column]
        if isinstance(id_field, Bucket):
            ids[id_field.name] = encode_bucket(id_field, array)
        elif isinstance(id_field, Time):
            ids[id_field.name] = encode_time(id_field, array)
        elif isinstance(id_field, Category):
            ids[id_field.name] = encode_ids(id_field, array)
        else:
            weights = (
                columns[id_field.weights]
                if isinstance(id_field, Bag) and id_field.weights
                else None
            )
            ids[id_field.name] = encode_lists(id_field, array, weights)
    for cross in file_schema.categorical:
        if isinstance(cross, Cross):
            crossed = combine_ids([ids[part] for part in cross.of])  # type: ignore[misc]
            ids[cross.name] = crossed if cross.rows is None else hash_to_rows(crossed, cross.rows)

    label = None
    if file_schema.labels:
        label = np.empty((num_samples, len(file_schema.labels)), dtype=np.float32)
        for j, task in enumerate(file_schema.labels):
            label[:, j] = encode_label(task, columns[task.column])
    weight, group, key = (file_schema.find_field(kind) for kind in (Weight, Group, Key))
    return Chunk(
        dense,
        tuple(ids[field.name] for field in file_schema.categorical),
        label,
        None if weight is None else encode_weight(weight, columns[weight.column]),
        None if group is None else encode_required_ids(group, columns[group.column]),
        None if key is None else read_join_keys(key, columns[key.column]),
        None
        if split_field is None
        else encode_split_keys(split_field, columns[split_field.column]),
    )
