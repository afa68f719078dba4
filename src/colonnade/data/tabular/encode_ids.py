"""From Arrow columns to ids: of one value per sample, or of lists.

Legend: S samples of a block, E elements of its lists.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from colonnade.data.tabular.arrow import is_list, is_text, typed
from colonnade.data.tabular.chunk import Bags, Floats, Longs, gather
from colonnade.data.tabular.encode_numbers import Fault, missing_fault, parse, read_numbers
from colonnade.data.tabular.fields import Bag, Category, Group, Key, Sequence
from colonnade.data.tabular.hashing import (
    MAX_TEXT_BYTES,
    MISSING_ID,
    hash_texts,
    ids_apart,
    rows_of,
    text_buffers,
)


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
    if field.apart:
        ids = ids_apart(ids, field.name)
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
