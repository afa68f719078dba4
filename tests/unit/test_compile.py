"""torch.compile and torch.export beside lookups: these stay outside of graphs, the dense network goes in."""

from __future__ import annotations

import subprocess
import sys

import torch
from own_model import USERS, Net, assert_same

from colonnade import Batch, Concat, EmbeddingCollection, Feature, Ids, RowOptimizer, Table


def batch_of(size, seed=0):
    random = torch.Generator().manual_seed(seed)
    film = torch.randint(0, 40, (size,), generator=random) * 7919 - 5
    user = torch.randint(0, USERS, (size,), generator=random)
    dense = torch.rand(size, 2, generator=random)
    return Batch(size, dense, {"user": Ids(user), "film": Ids(film)}, label=dense[:, :1].round())


def train(model, called):
    rows, dense = RowOptimizer(model.collection), torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in model.collection.lookahead(batch_of(16, step) for step in range(4)):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(called(batch), batch.label)
        dense.zero_grad()
        loss.backward()
        rows.step()
        dense.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, called(batch_of(16, 9))


def test_a_compiled_model_breaks_its_graph_at_the_lookup_alone():
    eager, model = Net(), Net()
    losses, scores = train(eager, eager)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    try:
        compiled = train(model, torch.compile(model, backend="eager"))
        reasons = list(counters["graph_break"])
    finally:
        torch._dynamo.reset()
    assert compiled[0] == losses
    assert torch.equal(compiled[1], scores)
    assert_same(model, eager)
    assert reasons
    assert all("torch.compiler.disable()" in reason for reason in reasons)


def test_lookups_alone_do_not_import_the_compiler():
    program = """
import sys, torch
from colonnade import Batch, EmbeddingCollection, Feature, Ids, Table
collection = EmbeddingCollection([Table("a", 2, rows=3)], [Feature("a", "a")])
collection(Batch(1, torch.zeros(1, 0), {"a": Ids(torch.tensor([1]))}))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class Dense(torch.nn.Module):
    """Dense network of a model."""

    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(8, 1)

    def forward(self, deep, dense):
        return torch.sigmoid(self.top(deep) + dense.sum(1, keepdim=True))


def test_the_dense_part_is_exported_with_looked_up_tensors():
    names = ["user", "film"]
    collection = EmbeddingCollection(
        [Table(name, 4) for name in names],
        [Feature(name, name) for name in names],
        consumers={"deep": (Concat(), names)},
    )
    dense, example, other = Dense(), batch_of(4), batch_of(7)
    collection.eval()
    with torch.no_grad():
        size = {0: torch.export.Dim("size")}
        exported = torch.export.export(
            dense, (collection(example)["deep"], example.dense), dynamic_shapes=(size, size)
        )
        fields = collection(other)["deep"]
        assert torch.equal(exported.module()(fields, other.dense), dense(fields, other.dense))
