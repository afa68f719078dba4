"""Values of several blocks, put side by side: a column at a time, with zeros first, for comparison."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.wire.transport import assemble_columns


def placed_slowly(blocks, dims):
    starts, width = {}, 0
    for key, dim in dims.items():
        starts[key], width = width, width + dim
    result = torch.zeros(len(blocks[0][0]), width)
    for block, places in blocks:
        for key, first in places:
            for column in range(dims[key]):
                result[:, starts[key] + column] += block[:, first + column]
    return result


@st.composite
def cases(draw):
    keys = draw(st.lists(st.integers(0, 9) | st.sampled_from("abc"), unique=True, max_size=6))
    dims = {key: draw(st.integers(1, 4)) for key in keys}
    num_rows, blocks = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(1, 3))):
        taken = draw(st.permutations(keys))[: draw(st.integers(0, len(keys)))]
        places, width = [], draw(st.integers(0, 2))
        for key in taken:
            places.append((key, width))
            width += dims[key] + draw(st.integers(0, 1))
        width += draw(st.integers(0, 1))
        values = torch.arange(num_rows * width).view(num_rows, width) + len(blocks)
        blocks.append((values.float(), tuple(places)))
    return blocks, dims


@given(cases())
def test_as_column_by_column(case):
    blocks, dims = case
    before = [block.clone() for block, _ in blocks]
    result = assemble_columns(blocks, dims)
    assert torch.equal(result, placed_slowly(blocks, dims)) and result.is_contiguous()
    assert all(torch.equal(block, old) for (block, _), old in zip(blocks, before, strict=True))


def test_what_is_the_whole_already_is_not_copied():
    block = torch.rand(3, 5)
    dims = {0: 2, "a": 3}
    assert assemble_columns([(block, ((0, 0), ("a", 2)))], dims) is block
    turned = assemble_columns([(block, ((0, 3), ("a", 0)))], dims)
    assert torch.equal(turned, block[:, [3, 4, 0, 1, 2]])
