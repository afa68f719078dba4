"""Gradients of lookups whose squares were pooled: the native core's bits are those of plain PyTorch."""

import pytest
import torch

from colonnade import _native
from colonnade.lookup.reads import compute_lookup_gradients
from colonnade.table import POOLINGS


def draw(num_bags: int, dim: int, dtype: torch.dtype, *, is_weighted: bool):
    """Return vectors, offsets and weights of bags of 0 to 4 lookups."""
    generator = torch.Generator().manual_seed(num_bags * 100 + dim)
    lengths = torch.randint(0, 5, (num_bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    rows = torch.randn(count, dim, generator=generator, dtype=dtype)
    weights = torch.randn(count, generator=generator, dtype=dtype) if is_weighted else None
    return rows, offsets, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize(("num_bags", "dim"), [(0, 4), (1, 1), (7, 3), (301, 16), (97, 37)])
def test_bits_are_those_of_torch(num_bags, dim, pooling, is_weighted, dtype) -> None:
    rows, offsets, weights = draw(num_bags, dim, dtype, is_weighted=is_weighted)
    bag, code = (offsets, pooling, weights), POOLINGS.index(pooling)
    gradient, of_squares = torch.randn(2, num_bags, dim, dtype=dtype)
    for sources in ((gradient, of_squares), (gradient, None), (None, of_squares)):
        out = torch.full_like(rows, float("nan"))
        _native.square_gradients(rows, offsets, code, weights, *sources, out)
        assert torch.equal(out, compute_lookup_gradients(*sources, rows, bag, len(rows)))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_one_lookup_per_sample_needs_no_offsets(is_weighted: bool) -> None:
    rows, _, weights = draw(50, 8, torch.float32, is_weighted=is_weighted)
    out, gradient = torch.empty_like(rows), torch.randn_like(rows)
    bag = (None, "sequence", weights)
    _native.square_gradients(rows, None, POOLINGS.index("sequence"), weights, None, gradient, out)
    assert torch.equal(out, compute_lookup_gradients(None, gradient, rows, bag, len(rows)))


def test_gradients_are_autograds() -> None:
    rows, offsets, weights = draw(40, 5, torch.float64, is_weighted=True)
    leaf = rows.clone().requires_grad_()
    gradient, of_squares = torch.randn(2, 40, 5, dtype=torch.float64)
    samples = torch.repeat_interleave(offsets.diff())
    values = leaf * (weights / offsets.diff()[samples])[:, None]
    pooled, squares = (
        torch.zeros(40, 5, dtype=torch.float64).index_add(0, samples, terms)
        for terms in (values, values.square())
    )
    torch.autograd.backward([pooled, squares], [gradient, of_squares])
    out = torch.empty_like(rows)
    mean = POOLINGS.index("mean")
    _native.square_gradients(rows, offsets, mean, weights, gradient, of_squares, out)
    torch.testing.assert_close(out, leaf.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 1, 2, 3])}, "offsets"),
        ({"offsets": torch.tensor([0, 2, 1, 4])}, "offsets"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "offsets"),
        ({"gradient": torch.zeros(3, 2)}, "gradient"),
        ({"gradient": torch.zeros(4, 3).T}, "gradient"),
        ({"out": torch.zeros(3, 4)}, "out"),
        ({"weights": torch.ones(3)}, "weights"),
        ({"rows": torch.ones(4, 4, dtype=torch.int64)}, "rows"),
    ],
)
def test_wrong_arrays_are_refused(change, message) -> None:
    arguments = {
        "rows": torch.ones(4, 4), "offsets": torch.tensor([0, 1, 2, 4]), "pooling": 0,
        "weights": None, "gradient": torch.zeros(3, 4), "of_squares": None, "out": torch.zeros(4, 4),
    }  # fmt: skip
    _native.square_gradients(*arguments.values())
    with pytest.raises(ValueError, match=message):
        _native.square_gradients(*(arguments | change).values())
