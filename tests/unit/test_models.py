"""The models against plain PyTorch twins with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade import Batch, Feature, Ids, RowOptimizer, Table
from colonnade.models.deepfm import DeepFM
from colonnade.models.dlrm import DLRM
from colonnade.models.mlp import mlp
from colonnade.ops.linear import linear

NAMES = ["a", "b", "c"]
TABLES = [Table(name, 4, rows=20) for name in NAMES]
FEATURES = [Feature(name, name) for name in NAMES]


def batch(size=6, num_dense=3):
    random = torch.Generator().manual_seed(size)
    ids = {name: Ids(torch.randint(0, 20, (size,), generator=random)) for name in NAMES}
    dense = torch.rand(size, num_dense, generator=random)
    return Batch(size, dense, ids, label=torch.ones(size, 1))


def vectors_of(model, given):
    return [model.embeddings.rows(name, given.ids[name].values) for name in NAMES]


@pytest.mark.parametrize("keep_fields", [False, True])
@pytest.mark.parametrize("num_dense", [0, 3])
def test_dlrm(num_dense, keep_fields):
    model = DLRM(TABLES, FEATURES, num_dense=num_dense, keep_fields=keep_fields, top=[5])
    given = batch(num_dense=num_dense)
    fields = vectors_of(model, given)
    vectors = ([model.bottom(given.dense)] if num_dense else []) + fields
    dots = [(vectors[i] * vectors[j]).sum(1, True) for i in range(len(vectors)) for j in range(i)]
    kept = (fields if keep_fields else []) + ([vectors[0]] if num_dense else [])
    torch.testing.assert_close(model(given), model.top(torch.cat([*kept, *dots], 1)))


def test_deepfm():
    model = DeepFM(TABLES, FEATURES, num_dense=3, top=[5])
    given = batch()
    fields = vectors_of(model, given)
    pairs = sum((fields[i] * fields[j]).sum(1, True) for i in range(3) for j in range(i))
    deep = model.deep(torch.cat([given.dense, *fields], 1))
    torch.testing.assert_close(model(given), pairs + deep + model.linear(given.dense))


@pytest.mark.parametrize("build", [DLRM, DeepFM])
def test_one_batch_can_be_learned(build):
    torch.manual_seed(0)
    model = build(TABLES, FEATURES, num_dense=3)
    rows, dense = RowOptimizer(model.embeddings), torch.optim.Adam(model.parameters(), lr=1e-2)
    given = batch()
    given.label = (torch.arange(6) % 2).float()[:, None]
    for _ in range(150):
        dense.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(given), given.label)
        loss.backward()
        rows.step()
        dense.step()
    assert loss.item() < 0.05


def test_an_mlp_runs_whatever_is_in_it():
    torch.manual_seed(0)
    plain = nn.Sequential(*mlp([13, 8, 1]), nn.Sigmoid(), nn.LayerNorm(1))
    ours = mlp([13, 8, 1])
    ours.append(nn.Sigmoid())
    ours.append(nn.LayerNorm(1))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(100, 13)
    torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.parametrize("batch", [1, 63, 64, 100])
def test_a_linear_layer_is_torchs(batch):
    x = torch.randn(batch, 13)
    x[-1, 3] = float("nan")
    w = torch.randn(20, 13)
    for b in (
        torch.randn(20),
        torch.randn(20, 2)[:, 0],
        torch.randn(1).expand(20),
        torch.randn(1),
        None,
    ):
        for relu in (False, True):
            wanted = nn.functional.linear(x, w, b)
            wanted = wanted.relu() if relu else wanted
            torch.testing.assert_close(linear(x, w, b, relu=relu), wanted, equal_nan=True)
    assert linear(torch.randn(batch, 0), torch.randn(3, 0), torch.randn(3)).shape == (batch, 3)


def test_gradients_of_a_linear_layer_are_torchs():
    torch.manual_seed(0)
    found = []
    for function in (
        lambda x, w, b: linear(x, w, b, relu=True),
        lambda x, w, b: nn.functional.linear(x, w, b).relu(),
    ):
        torch.manual_seed(1)
        x, w, b = (torch.randn(*s, requires_grad=True) for s in ((100, 13), (20, 13), (20,)))
        function(x, w, b).square().sum().backward()
        found.append([x.grad, w.grad, b.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
