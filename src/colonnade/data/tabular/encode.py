"""Encoding of Arrow columns: ids, numbers, buckets, labels and weights, as a declaration says.

Legend: S samples of a block, E elements of its lists.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow import is_list, is_text, typed
from colonnade.data.tabular.chunk import Bags, Chunk, Floats, Longs, gather
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.fields import (
    Bag,
    Bucket,
    Category,
    Cross,
    Field,
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
    add_namespace,
    cross_ids,
    hash_texts,
    rows_of,
    text_buffers,
)
from colonnade.data.tabular.times import DAY, MICROS, parse_time, read_times

FIX = "Repair or remove the row"


class Fault(Exception):
    """A value that does not fit its field; `row` counts from 0 in the block. Becomes a DataError naming the file."""

    def __init__(self, row: int, column: str, got: str, wanted: str, fix: str = FIX) -> None:
        super().__init__(f"row {row}, column {column}: got {got}, wanted {wanted}. {fix}")
        self.row, self.column = row, column
        self.got, self.wanted, self.fix = got, wanted, fix


def encode_number(field: Number, array: pa.Array, out: NDArray[np.float32]) -> None:
    """(S,) into `out`; a missing value without a substitute, or an infinite one, is left there not finite."""
    x = read_numbers(field, array)
    missing = np.isnan(x)
    if field.clip is not None or field.transform is not None:
        # These would hide an infinite value.
        infinite = np.isinf(x)
        if infinite.any():
            raise number_fault(field, array, int(infinite.argmax()))
    if field.clip is not None:
        x = np.clip(x, *field.clip)
    if field.transform == "log1p":
        x = np.log1p(np.maximum(x, 0))
    if field.mean or field.std != 1:
        x = (x - field.mean) / field.std
    with np.errstate(over="ignore"):
        out[:] = x
    if field.missing is not None and missing.any():
        out[missing] = field.missing


def number_fault(field: Number, array: pa.Array, row: int) -> Fault:
    value = read_numbers(field, array.slice(row, 1))[0]
    if np.isnan(value):
        return Fault(row, field.column, "nothing", "a number",
                     f"Say what a missing {field.name} is: `missing: 0.0` is common")  # fmt: skip
    wanted = "a finite number" if np.isinf(value) else "one that float32 holds once transformed"
    return Fault(row, field.column, f"{value:g}", wanted)


def read_numbers(field: Field, array: pa.Array) -> NDArray[np.float64]:
    """(S,) float64, NaN where missing. Text must spell numbers; of times, the days before `days_before`."""
    if isinstance(field, Number) and field.days_before is not None:
        times, missing = check_times(field, array)
        return np.where(missing, np.nan, (parse_time(field.days_before) - times) / DAY)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = parse(field, array, pa.float64(), "a number")
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count:
        array = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan)
    return array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def parse(field: Field, array: pa.Array, kind: pa.DataType, wanted: str) -> pa.Array:
    """Texts -> numbers; an empty text is missing."""
    array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    array = pc.if_else(pc.equal(array, ""), None, array)
    if isinstance(field, Label):
        lower = pc.utf8_lower(array)
        for word, number in (("true", "1"), ("false", "0")):
            array = pc.if_else(pc.equal(lower, word), number, array)
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        for row, text in enumerate(array):
            try:
                text.cast(kind)
            except pa.ArrowInvalid:
                fix = FIX
                if isinstance(field, Label):
                    fix += ", or say which value is 1: `positive: 'yes'`"
                elif isinstance(field, Number | Bucket):
                    fix += ", or declare a category"
                raise Fault(row, field.column, repr(text.as_py())[:60], wanted, fix) from None
        raise


def encode_bucket(field: Bucket, array: pa.Array) -> Longs:
    """(S,): how many boundaries are <= the number; infinite ones lie beyond all."""
    x = read_numbers(field, array)
    ids = np.searchsorted(np.array(field.boundaries), x, side="right").astype(np.int64)
    missing = np.isnan(x)
    if missing.any():
        if field.missing == "error":
            raise missing_fault(field, int(missing.argmax()))
        ids[missing] = len(field.boundaries) + 1
    return ids


def encode_time(field: Time, array: pa.Array) -> Longs:
    """Return (S,) hours of the day or weekdays."""
    times, missing = check_times(field, array)
    hours = times // (3600 * MICROS)
    # 1970 began on a Thursday.
    ids = hours % 24 if field.part == "hour" else (hours // 24 + 3) % 7
    if missing.any():
        if field.missing == "error":
            raise missing_fault(field, int(missing.argmax()))
        ids[missing] = field.num_values
    return ids


def check_times(
    field: Number | Time, array: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return microseconds since 1970 (S,) and which are missing (S,). Raises Fault for the first that is no time."""
    try:
        return read_times(array)
    except pa.ArrowInvalid:
        for row in range(len(array)):
            try:
                read_times(array.slice(row, 1))
            except pa.ArrowInvalid:
                raise Fault(row, field.column, repr(str(array[row]))[:60],
                            "a time such as 2024-05-31T12:00:00, or Unix seconds") from None  # fmt: skip
        raise


def missing_fault(field: Field, row: int) -> Fault:
    return Fault(row, field.column, "nothing", "a value, because the schema says missing: error")


def encode_label(field: Label, array: pa.Array) -> Floats:
    """(S,) float32, NaN where nobody knows."""
    if field.positive is not None:
        x = _is_positive(field, array)
    else:
        x = read_numbers(field, array)
    missing = np.isnan(x)
    if missing.any() and field.missing == "error":
        raise Fault(int(missing.argmax()), field.column, "nothing", "a label",
                    "Remove the row, or declare `missing: unknown`")  # fmt: skip
    if field.at_least is not None:
        x = np.where(missing, np.nan, x >= field.at_least)
    elif field.kind == "binary":
        bad = (x != 0) & (x != 1) & ~missing
        if bad.any():
            row = int(bad.argmax())
            raise Fault(row, field.column, f"{x[row]:g}", "a label that is 0 or 1",
                        "Declare at_least= to make one of a number, or `kind: number` for your own loss")  # fmt: skip
    elif np.isinf(x).any():
        row = int(np.isinf(x).argmax())
        raise Fault(row, field.column, f"{x[row]:g}", "a finite number")
    return x.astype(np.float32)


def _is_positive(field: Label, array: pa.Array) -> NDArray[np.float64]:
    """(S,): 1.0 where the value is the positive one, NaN where there is none."""
    texts = pc.utf8_trim_whitespace(array.cast(pa.string()))
    missing = pc.or_kleene(pc.is_null(texts), pc.equal(texts, "")).fill_null(True)
    found = pc.equal(texts, str(field.positive)).fill_null(False)
    x = found.to_numpy(zero_copy_only=False).astype(np.float64)
    x[missing.to_numpy(zero_copy_only=False)] = np.nan
    return x


def encode_weight(field: Weight, array: pa.Array) -> Floats:
    """(S,) float32."""
    x = read_numbers(field, array)
    bad = ~((x >= 0) & (x < np.finfo(np.float32).max))
    if bad.any():
        row = int(bad.argmax())
        got = "nothing" if np.isnan(x[row]) else f"{x[row]:g}"
        raise Fault(row, field.column, got, "a finite weight of 0 or more")
    return x.astype(np.float32)


def encode_ids(field: Category | Bag | Sequence, array: pa.Array) -> Longs:
    """(S,) rows or open ids of single values, or (E,) of a list's elements."""
    if pa.types.is_dictionary(array.type):
        return _encode_dictionary(field, array)
    array = _as_integers(field, array)
    _check_lengths(field, array)
    missing = _is_missing(array)
    if missing is not None and field.missing == "error":
        raise missing_fault(field, int(missing.argmax()))
    if field.vocabulary is not None:
        ids = _look_up(field, array, missing)
        missing_id = len(field.vocabulary) + field.unknown_rows
    elif field.cardinality is not None:
        ids = _integers(array)
        missing_id = field.cardinality
        if missing is not None:
            ids[missing] = 0
        outside = (ids < 0) | (ids >= field.cardinality)
        if outside.any():
            row = int(outside.argmax())
            raise Fault(row, field.column, str(array[row].as_py()), f"an id 0 .. {field.cardinality - 1}",
                        "Raise the cardinality, or declare rows= to hash")  # fmt: skip
    else:
        ids = open_ids(array)
        missing_id = MISSING_ID
    if missing is not None:
        ids[missing] = missing_id
    if field.namespace:
        ids = add_namespace(ids, field.name)
    return ids if field.rows is None else rows_of(ids, field.rows)


def _as_integers(field: Category | Bag | Sequence | Group | Key, array: pa.Array) -> pa.Array:
    """Where the schema says integers: texts that spell them, and floats that are whole, as pandas makes them."""
    if field.dtype == "integer" and is_text(array.type):
        return _parse_integers(field, array)
    if field.dtype == "integer" and pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            x = array.to_numpy(zero_copy_only=False)
            bad = ~np.isnan(x) & ((x != np.round(x)) | (np.abs(x) >= 2.0**63))
            row = int(bad.argmax())
            raise Fault(row, field.column, f"{x[row]:g}", "an integer of 64 bits") from None
    return array


def _encode_dictionary(field: Category | Bag | Sequence, array: pa.DictionaryArray) -> Longs:
    """Each distinct value is encoded once. A value that nobody refers to is at no fault."""
    if array.null_count or len(array.dictionary) > len(array) or field.missing == "error":
        return encode_ids(field, array.dictionary_decode())
    try:
        by_entry = encode_ids(field, array.dictionary)
    except Fault:
        return encode_ids(field, array.dictionary_decode())
    return by_entry.take(array.indices.to_numpy(zero_copy_only=False))


def _check_lengths(field: Category | Bag | Sequence | Group | Key, array: pa.Array) -> None:
    """Refuse texts that are longer than an id may be: hashing takes a microsecond for each byte of the longest."""
    if not (is_text(array.type) and len(array)):
        return
    lengths = np.diff(text_buffers(array)[0])
    row = int(lengths.argmax())
    if lengths[row] > MAX_TEXT_BYTES:
        raise Fault(row, field.column, f"a text of {lengths[row]:,} bytes",
                    f"at most {MAX_TEXT_BYTES:,} bytes, as an id",
                    "Leave the column out of the schema, or hash such texts yourself")  # fmt: skip


def _is_missing(array: pa.Array) -> NDArray[np.bool_] | None:
    """(S,) nulls and empty texts; None: there are none."""
    missing = None
    if is_text(array.type):
        offsets, _ = text_buffers(array)
        missing = offsets[1:] == offsets[:-1]
    if array.null_count:
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        missing = nulls if missing is None else missing | nulls
    return missing if missing is not None and missing.any() else None


def _integers(array: pa.Array) -> Longs:
    """(S,) a fresh array; what is null is any number. An unsigned one beyond 2**63 wraps around."""
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    return np.array(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def open_ids(array: pa.Array) -> Longs:
    """(S,) a fresh array: integers as they are, texts hashed; what is missing has any id."""
    return hash_texts(array) if is_text(array.type) else _integers(array)


def _look_up(
    field: Category | Bag | Sequence, array: pa.Array, missing: NDArray[np.bool_] | None
) -> Longs:
    assert field.vocabulary is not None
    if is_text(array.type):
        array = array.cast(pa.large_string())
        known = pa.array(field.vocabulary, pa.large_string())
    else:
        # As signed 64-bit numbers on both sides, as ids are everywhere.
        array, known = pa.array(_integers(array)), pa.array(field.vocabulary, pa.int64())
    found = pc.index_in(array, value_set=known)
    ids = np.array(pc.fill_null(found, -1).to_numpy(zero_copy_only=False)).astype(np.int64)
    unknown = ids < 0
    if missing is not None:
        unknown &= ~missing
    if unknown.any():
        if field.unknown_rows == 0:
            row = int(unknown.argmax())
            raise Fault(row, field.column, repr(array[row].as_py())[:60],
                        f"one of the {len(known)} values of the vocabulary",
                        "Add it, or give unknown values rows with unknown_rows: 1")  # fmt: skip
        ids[unknown] = len(known)
        if field.unknown_rows > 1:
            strange = array.filter(pa.array(unknown))
            ids[unknown] += rows_of(open_ids(strange), field.unknown_rows)
    return ids


def encode_several(field: Bag | Sequence, array: pa.Array, weights: pa.Array | None = None) -> Bags:
    """Encode lists, or texts cut at the separator; a missing one has no element."""
    lists = _lists(field, array)
    lengths = _lengths(lists)
    elements = typed(lists.flatten())  # skips what lies under a null list
    numbers = None if weights is None else _weights(field, weights, lengths)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    if field.max_length is not None and len(lengths) and lengths.max() > field.max_length:
        kept = np.minimum(lengths, field.max_length)
        begins = begins if field.keep == "first" else ends - kept
        places = gather(np.arange(len(elements)), begins, kept)
        elements, offsets = elements.take(pa.array(places.values)), places.offsets
        numbers = None if numbers is None else numbers.take(places.values)
    else:
        offsets = np.append(begins, ends[-1:] if len(ends) else [0])
    try:
        return Bags(encode_ids(field, elements), offsets, numbers)
    except Fault as fault:
        fault.row = int(np.searchsorted(offsets, fault.row, side="right")) - 1
        raise


def _lengths(lists: pa.Array) -> Longs:
    return np.array(pc.fill_null(pc.list_value_length(lists), 0).to_numpy()).astype(np.int64)


def _weights(field: Bag | Sequence, array: pa.Array, lengths: Longs) -> Floats:
    """Return (E,) the weights of all ids. Raises Fault where a sample has not one for each id, all of them finite."""
    assert isinstance(field, Bag)
    lists = _lists(field, array)
    counts = _lengths(lists)
    if (counts != lengths).any():
        row = int((counts != lengths).argmax())
        raise Fault(
            row, field.weights, f"{counts[row]} weights", f"one for each of {lengths[row]} ids"
        )
    rows = np.repeat(np.arange(len(lengths)), lengths)
    try:
        weights = read_numbers(field, typed(lists.flatten())).astype(np.float32)
    except Fault as fault:
        raise Fault(int(rows[fault.row]), field.weights, fault.got, fault.wanted) from None
    bad = ~np.isfinite(weights)
    if bad.any():
        at = int(bad.argmax())
        raise Fault(int(rows[at]), field.weights, f"{weights[at]:g}", "a finite weight")
    return weights


def _lists(field: Bag | Sequence, array: pa.Array) -> pa.Array:
    if is_list(array.type):
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    text = array.cast(pa.string())
    # An empty text is no element, not one empty element.
    given = pc.if_else(pc.equal(text, ""), None, text)
    return pc.split_pattern(given, field.separator)


def encode_name(field: Group | Key, array: pa.Array) -> Longs:
    """(S,) ids; none may be missing."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = _as_integers(field, array)
    missing = _is_missing(array)
    if missing is not None:
        raise Fault(int(missing.argmax()), field.column, "nothing", "a value")
    _check_lengths(field, array)
    return open_ids(array)


def _parse_integers(field: Category | Bag | Sequence | Group | Key, array: pa.Array) -> pa.Array:
    """Texts that spell integers, "31.0", "1e+15" and "true" too, as pandas and pyarrow write them."""
    try:
        return parse(field, array, pa.int64(), "an integer")
    except Fault:
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(array.cast(pa.string())))
        texts = pc.replace_substring_regex(texts, r"^(-?[0-9]+)\.0*$", r"\1")
        for word, number in (("true", "1"), ("false", "0"), ("nan", None)):
            texts = pc.if_else(pc.equal(texts, word), number, texts)
        is_float = pc.match_substring_regex(texts, r"^[+-]?[0-9.]+e[+-]?[0-9]+$")
        whole = parse(field, pc.if_else(is_float, None, texts), pa.int64(), "an integer")
        if not pc.any(is_float).as_py():
            return whole
        floats = parse(field, pc.if_else(is_float, texts, None), pa.float64(), "an integer")
        return pc.coalesce(whole, _as_integers(field, floats))


def encode_key(field: Key, array: pa.Array) -> NDArray:
    """(S,) what predictions are joined on, as it stands in the file: integers, or texts as objects."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = _as_integers(field, array)
    missing = _is_missing(array)
    if missing is not None:
        raise Fault(int(missing.argmax()), field.column, "nothing", "a value")
    if is_text(array.type):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(array.type):
        return np.array(array)  # a copy: torch wants to be able to write
    return open_ids(array)


def encode_part(column: str, array: pa.Array) -> Longs:
    """(S,) ids by which samples are dealt to splits."""
    return encode_name(Key("part", column=column), typed(array))


def encode(
    declaration: Declaration,
    columns: Mapping[str, pa.Array],
    num_samples: int,
    *,
    split_by: str | None = None,
) -> Chunk:
    """Of one block. `columns`: arrays of length S, by column of the file. Raises Fault at the first value at fault."""
    columns = {name: typed(array) for name, array in columns.items()}
    numbers = declaration.numbers
    dense = np.empty((num_samples, len(numbers)), dtype=np.float32)
    for j, field in enumerate(numbers):
        encode_number(field, columns[field.column], dense[:, j])
    if not np.isfinite(dense).all():
        row, j = np.argwhere(~np.isfinite(dense))[0]
        raise number_fault(numbers[j], columns[numbers[j].column], int(row))

    ids: dict[str, Longs | Bags] = {}
    for each in declaration.categorical:
        if isinstance(each, Cross):
            continue
        array = columns[each.column]
        if isinstance(each, Bucket):
            ids[each.name] = encode_bucket(each, array)
        elif isinstance(each, Time):
            ids[each.name] = encode_time(each, array)
        elif isinstance(each, Category):
            ids[each.name] = encode_ids(each, array)
        else:
            weights = columns[each.weights] if isinstance(each, Bag) and each.weights else None
            ids[each.name] = encode_several(each, array, weights)
    for each in declaration.categorical:
        if isinstance(each, Cross):
            crossed = cross_ids([ids[part] for part in each.of])  # type: ignore[misc]
            ids[each.name] = crossed if each.rows is None else rows_of(crossed, each.rows)

    label = None
    if declaration.labels:
        label = np.empty((num_samples, len(declaration.labels)), dtype=np.float32)
        for j, task in enumerate(declaration.labels):
            label[:, j] = encode_label(task, columns[task.column])
    weight, group, key = (declaration.one(kind) for kind in (Weight, Group, Key))
    return Chunk(
        dense,
        tuple(ids[each.name] for each in declaration.categorical),
        label,
        None if weight is None else encode_weight(weight, columns[weight.column]),
        None if group is None else encode_name(group, columns[group.column]),
        None if key is None else encode_key(key, columns[key.column]),
        None if split_by is None else encode_part(split_by, columns[split_by]),
    )
