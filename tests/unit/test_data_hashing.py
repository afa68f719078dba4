"""Ids of texts: the fast hash against its definition, and values that version 1 will give for ever."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.counter import MASK, stream_key
from colonnade.data.tabular.encode import encode_ids, encode_lists
from colonnade.data.tabular.fields import Bag, Category, field_from_dict, field_to_dict
from colonnade.data.tabular.hashing import (
    HASH_VERSION,
    MISSING_ID,
    SLICE,
    _mix,
    add_namespace_to_ids,
    combine_ids,
    hash_text,
    hash_texts,
    hash_to_rows,
)
from colonnade.errors import ConfigError

texts = st.lists(st.text(max_size=40) | st.text("ab", max_size=17), max_size=30)


@given(texts)
def test_the_fast_hash_is_the_definition(values):
    expected = [hash_text(value.encode()) for value in values]
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.string_view()):
        assert hash_texts(pa.array(values, kind)).tolist() == expected


@given(texts, st.integers(0, 10), st.integers(0, 10))
def test_slices_and_nulls(values, begin, length):
    array = pa.array([None, *values, None], pa.string())
    expected = [hash_text((value or "").encode()) for value in [None, *values, None]]
    assert hash_texts(array).tolist() == expected
    part = array.slice(begin, length)
    assert hash_texts(part).tolist() == expected[begin : begin + length]


def test_more_texts_than_are_hashed_at_a_time():
    values = [f"{'x' * (i % 30)}{i}" for i in range(2 * SLICE + 5)]
    hashes = hash_texts(pa.array(values)).tolist()
    assert hashes[:: SLICE // 7] == [hash_text(value.encode()) for value in values[:: SLICE // 7]]
    assert len(set(hashes)) == len(values)


def test_version_1_stays_what_it_is():
    """These numbers are in people's checkpoints: never change them, add a version."""
    assert HASH_VERSION == 1
    known = {
        "": 0,
        "a": -2528979767223123664,
        "Oslo": 8721087990112126216,
        "exactly8": -6866371766917072280,
        "a text longer than one word: Łódź": -8012857147706944300,
    }
    assert {text: hash_text(text.encode()) for text in known} == known


def test_zeros_at_the_end_count():
    assert len({hash_text(b"a" + b"\0" * i) for i in range(20)}) == 20


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_rows_are_spread_evenly(rows):
    """Chi-square over 100,000 consecutive ids stays within five standard deviations."""
    counts = np.bincount(hash_to_rows(np.arange(-50_000, 50_000), rows), minlength=rows)
    assert len(counts) == rows
    expected = 100_000 / rows
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - (rows - 1)) <= 5 * (2 * rows) ** 0.5


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), min_size=1, max_size=20))
def test_a_cross_is_the_stream_key_of_its_parts(rows):
    parts = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    expected = [stream_key(*(value % 2**64 for value in row)) for row in rows]
    assert combine_ids(parts).view(np.uint64).tolist() == expected


def test_a_thousand_fields_of_one_table_stay_apart():
    """PERSIA's prefixes had eight bits: more than 255 groups shared ids without a word."""
    numbers = np.array([0, 1, 2, -1, 2**63 - 1, MISSING_ID, *range(10, 104)])
    every = [add_namespace_to_ids(numbers, f"field {i}") for i in range(1000)]
    assert len(np.unique(np.concatenate(every))) == 1000 * len(numbers)
    key = hash_text(b"field 7")
    assert every[7].tolist() == [_signed(_mix((i ^ key) & MASK)) for i in numbers.tolist()]


def _signed(word):
    return word - (1 << 64) if word >> 63 else word


def test_fields_of_one_table_share_rows_or_keep_apart():
    words = pa.array(["a", "b", None, "a"])
    for rows in (None, 1000):
        plain, ours, other = (
            encode_ids(Category(name, table="words", namespace=apart, rows=rows), words).tolist()
            for name, apart in (("x", False), ("x", True), ("y", True))
        )
        assert plain == encode_ids(Category("y", table="words", rows=rows), words).tolist()
        assert ours[0] == ours[3] and not {*plain, *ours} & {*other} and not {*plain} & {*ours}
        for ids in (plain, ours, other):
            assert len({*ids}) == 3
    listed = pa.array([["a", "b"], ["a"]])
    of_bag = encode_lists(Bag("x", table="words", namespace=True), listed).values
    assert of_bag.tolist() == [*ours_of("a", "b"), *ours_of("a")]
    for numbered in ({"cardinality": 5}, {"vocabulary": ("a",)}):
        with pytest.raises(ConfigError, match="namespace"):
            Category("x", namespace=True, **numbered)
    field = Category("x", table="words", namespace=True)
    assert field_from_dict("x", field_to_dict(field)) == field


def ours_of(*words):
    return add_namespace_to_ids(hash_texts(pa.array(words)), "x").tolist()
