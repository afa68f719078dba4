"""Euclid's distances and their squares by a product of matrices, against torch.cdist without one."""

from __future__ import annotations

import pytest
import torch

from colonnade.ops.linear import distances, squared_distances

EXACT = "donot_use_mm_for_euclid_dist"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(70, 90, 33), (3, 5, 4), (0, 5, 4), (3, 0, 4)])
@pytest.mark.parametrize("is_squared", [False, True])
def test_distances_are_torchs(shape, dtype, is_squared):
    p, m, d = shape
    q, o = (torch.randn(n, d, dtype=dtype, requires_grad=True) for n in (p, m))
    result, wanted = distances(q, o), torch.cdist(q, o, compute_mode=EXACT)
    if is_squared:
        result, wanted = squared_distances(q, o), wanted.square()
    assert result.dtype == dtype
    torch.testing.assert_close(result, wanted)
    weight = torch.randn(p, m, dtype=dtype)
    for ours, other in zip(
        torch.autograd.grad((result * weight).sum(), (q, o)),
        torch.autograd.grad((wanted * weight).sum(), (q, o)),
        strict=True,
    ):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_a_distance_of_nothing_has_no_gradient():
    q, o = torch.ones(2, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    result = distances(q, o)
    assert result.tolist() == [[0.0], [0.0]]
    result.sum().backward()
    assert not q.grad.any() and not o.grad.any()


@pytest.mark.parametrize("function", [distances, squared_distances])
def test_what_is_no_number_stays_none(function):
    assert function(torch.full((1, 2), float("nan")), torch.ones(3, 2)).isnan().all()


@pytest.mark.parametrize("function", [distances, squared_distances])
def test_only_one_side_may_want_a_gradient(function):
    q, o = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    function(q, o).sum().backward()
    assert o.grad.isfinite().all()


@pytest.mark.parametrize("function", [distances, squared_distances])
def test_autocast_does_not_touch_it(function):
    q, o = torch.randn(80, 16), torch.randn(70, 16)
    with torch.autocast("cpu", torch.bfloat16):
        result = function(q, o)
    assert torch.equal(result, function(q, o))
