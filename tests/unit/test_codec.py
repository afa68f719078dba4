"""Rows while they travel: how far off they may be, and that sums of them are right on the mean."""

from __future__ import annotations

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from references import codec_reference as twin

from colonnade.wire.codec import (
    CODECS,
    RoundingKey,
    RowBlock,
    decode_elements,
    decode_rows,
    encode_elements,
    encode_rows,
)

LOSSY = [CODECS[name] for name in ("bf16", "fp16", "int8")]


def error_of(codec, rows, dims, key):
    """The largest, relative to the largest element of its part."""
    coded = encode_rows(codec, rows, dims, key)
    assert coded.dtype == torch.uint8 and coded.shape == (
        len(rows),
        codec.row_bytes(dims, rows.dtype),
    )
    decoded, column, worst = decode_rows(codec, coded, dims), 0, 0.0
    for dim in dims:
        part = slice(column, column + dim)
        off = (decoded[:, part].double() - rows[:, part].double()).abs().amax(1)
        largest = rows[:, part].double().abs().amax(1)
        assert bool((off[largest == 0] == 0).all())
        worst = max(worst, float((off / largest.clamp(min=1e-300)).max()))
        column += dim
    return worst


@settings(max_examples=examples(25, 80), deadline=None)
@given(st.sampled_from(LOSSY), st.integers(0, 10**6), st.floats(-44, 38), st.booleans())
def test_the_native_codecs_have_the_bits_of_their_twins(codec, seed, exponent, is_random):
    random = torch.Generator().manual_seed(seed)
    dims = torch.randint(1, 40, (3,), generator=random).tolist()
    rows = torch.randn(5, sum(dims), generator=random) * 10.0 ** torch.randn(5, 1, generator=random)
    rows = (rows.double() * 10.0**exponent).float()
    rows[2, : dims[0]] = 0
    rows[3, torch.rand(sum(dims), generator=random) < 0.5] = 0
    rows[4, dims[0] // 2] = torch.tensor([float("inf"), float("-inf"), 1e38])[seed % 3]
    key = RoundingKey(
        torch.randint(-(2**62), 2**62, (5,), generator=random), 2**64 - 1 - seed, seed
    )
    key = key if is_random else None
    coded = encode_rows(codec, rows, dims, key)
    assert torch.equal(coded, twin.encode_rows(codec, rows, dims, key))
    decoded = decode_rows(codec, coded, dims)
    wanted = twin.decode_rows(codec, coded, dims)
    assert torch.equal(decoded.view(torch.int32), wanted.view(torch.int32)) or decoded.isnan().any()
    assert torch.equal(decoded.nan_to_num(), wanted.nan_to_num())


@settings(max_examples=examples(20, 60), deadline=None)
@given(
    st.sampled_from(LOSSY), st.integers(0, 10**6), st.floats(-25, 25), st.booleans(), st.booleans()
)
def test_errors_are_as_described(codec, seed, exponent, is_random, is_wide):
    random = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if is_wide else torch.float32
    rows = torch.randn(7, 14, generator=random, dtype=dtype) * 10**exponent
    rows[:, 8:13] *= 10.0 ** torch.randint(-5, 5, (7, 1), generator=random)
    rows[3, :8] = 0
    ids = torch.randint(-(2**62), 2**62, (7,), generator=random)
    key = RoundingKey(ids, seed, 5) if is_random else None
    bound = codec.random_error if is_random else codec.nearest_error
    assert error_of(codec, rows, (8, 5, 1), key) <= bound


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_random_rounding_is_right_on_the_mean_and_the_same_every_time(codec):
    rows = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(20_000)
    key = RoundingKey(ids, 3, 7)
    coded = encode_rows(codec, rows.expand(20_000, -1), (8, 4), key)
    assert torch.equal(coded, encode_rows(codec, rows.expand(20_000, -1), (8, 4), key))
    # A row's bits are its own: alone or among others, in any order.
    decoded = torch.randperm(20_000)[:50]
    again = encode_rows(codec, rows.expand(50, -1), (8, 4), RoundingKey(ids[decoded], 3, 7))
    assert torch.equal(coded[decoded], again)
    for other in (RoundingKey(ids, 4, 7), RoundingKey(ids, 3, 8), RoundingKey(ids + 1, 3, 7)):
        assert not torch.equal(coded, encode_rows(codec, rows.expand(20_000, -1), (8, 4), other))
    result = decode_rows(codec, coded, (8, 4)).double()
    largest = torch.cat([rows[0, :8].abs().max().expand(8), rows[0, 8:].abs().max().expand(4)])
    step = codec.random_error * largest
    # Five standard deviations of a mean of 20,000 steps, and the bits that a stream does not have.
    assert bool(((result.mean(0) - rows[0]).abs() <= step * (5 * 0.5 / 20_000**0.5 + 2**-12)).all())


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_random", [False, True])
def test_what_is_not_finite_stays_so(codec, bad, is_random):
    rows = torch.ones(3, 6)
    rows[1, 2] = bad
    key = RoundingKey(torch.arange(3), 1, 1) if is_random else None
    decoded = decode_rows(codec, encode_rows(codec, rows, (4, 2), key), (4, 2))
    assert not bool(decoded[1, :4].isfinite().all())
    assert bool(decoded[[0, 2]].isfinite().all()) and bool(decoded[1, 4:].isfinite().all())


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("is_random", [False, True])
def test_what_is_finite_stays_so(codec, is_random):
    """The largest float32 would be rounded up to inf, behind the check that every gradient is finite."""
    limit = torch.finfo(torch.float32).max
    rows = (
        torch.tensor([limit, -limit, 255 * 2.0**120, 1.0, limit * (1 - 2**-9), -limit])
        .expand(50, 6)
        .contiguous()
    )
    key = RoundingKey(torch.arange(50), 1, 1) if is_random else None
    coded = encode_rows(codec, rows, (4, 2), key)
    result = decode_rows(codec, coded, (4, 2))
    assert bool(result.isfinite().all())
    assert bool(
        ((result.double() - rows.double()).abs() <= max(codec.random_error, 2**-8) * limit).all()
    )
    assert torch.equal(coded, twin.encode_rows(codec, rows, (4, 2), key))


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e6, 1e38])
def test_fp16_has_no_limits_of_its_own(scale):
    rows = torch.tensor([[1.0, -0.5, 0.001]]) * scale
    assert error_of(CODECS["fp16"], rows, (3,), None) <= CODECS["fp16"].nearest_error


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_of_any_shape(codec, dtype):
    blocks = [RowBlock(3, (4, 1)), RowBlock(0, (2,)), RowBlock(1, (5,)), RowBlock(2, (1,))]
    elements = torch.randn(22).to(dtype)
    data = encode_elements(codec, elements, blocks)
    assert len(data) == sum(block.encoded_bytes(codec, dtype) for block in blocks)
    out = torch.empty_like(elements)
    decode_elements(codec, data, blocks, out)
    if codec.name == "exact" or (codec.name, dtype) == ("bf16", torch.bfloat16):
        assert torch.equal(out, elements)
    else:
        assert float((out - elements).abs().max()) <= 0.02 * float(elements.abs().max())
    assert len(encode_elements(codec, elements[:0], [RowBlock(0, (4,))])) == 0
