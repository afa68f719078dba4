"""Dense gradients in flat buffers: by dtype and device, with the ranks' signals at the end of the first."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

from colonnade import Mesh
from colonnade.train.dense import DenseGradients


class Mixed(nn.Module):
    """Parameters of two dtypes; `device` for some of them."""

    def __init__(self, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(3, 2, device=device)
        self.two = nn.Linear(2, 2, dtype=torch.float64)
        self.three = nn.Linear(2, 1, device=device)

    def forward(self, inputs):
        hidden = self.one(inputs.to(self.one.weight.device)).cpu().double()
        return self.three(self.two(hidden).float().to(self.three.weight.device)).sum()


def attached(model, mesh):
    dense = DenseGradients(list(model.parameters()), mesh)
    dense.attach()
    return dense


def check(mesh, device):
    """Gradients of all ranks are summed, in place; signals travel with them and are no gradient."""
    model = Mixed(device)
    dense = attached(model, mesh)
    dense.synchronise()
    for step in range(2):  # `zero` starts each step anew
        dense.zero()
        model(torch.full((4, 3), 1.0 + mesh.rank + step)).backward()
        answers = dense.reduce(finite=True, stop=mesh.rank == 1, loss=mesh.rank + 1.0)
    reference = Mixed(device)
    for rank in range(mesh.num_ranks):
        reference(torch.full((4, 3), 2.0 + rank)).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    whole = sum(range(1, mesh.num_ranks + 1))  # of the ranks' parts of the loss
    assert answers == (True, mesh.num_ranks > 1, whole)
    model.one.weight.grad[0, 0] = float("nan")
    assert dense.reduce(finite=True, stop=False)[:2] == (False, False)
    dense.zero()
    assert dense.reduce(finite=mesh.rank != 1, stop=False)[0] == (mesh.num_ranks == 1)
    return True


def test_on_one_rank():
    assert check(Mesh(), "cpu")


def on_two(mesh):
    return check(mesh, "cpu")


def test_on_two_ranks():
    assert run_ranks(2, on_two) == [True, True]


def on_two_with_a_gpu(mesh):
    return check(mesh, "cuda")


def test_parameters_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: torch.cuda.is_available() is False")
    assert check(Mesh(), "cuda")
    assert run_ranks(2, on_two_with_a_gpu) == [True, True]


def test_a_step_that_clips_and_scales():
    model = Mixed()
    dense = attached(model, Mesh())
    model(torch.ones(4, 3)).backward()
    dense.reduce(finite=True, stop=True)
    dense.scale(0.5)
    norm = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    assert dense.clip_norm(1e9) == pytest.approx(float(norm), rel=1e-5)
    assert dense.clip_norm(0.1) == pytest.approx(float(norm), rel=1e-5)
    after = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    assert float(after) == pytest.approx(0.1, rel=1e-4)
