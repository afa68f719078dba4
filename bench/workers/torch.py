"""The plain peer: one nn.EmbeddingBag(sparse=True) per table, torch.optim.Adagrad on their sparse gradients.

Helped, it has one nn.EmbeddingBag for all tables, and row-wise Adagrad on its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from workers.loop import Case, Laps, Step, build_part, serve
from workers.network import DenseNetwork

EPS = 1e-8


def build(case: Case) -> tuple[Step, dict[str, str]]:
    if case.part in ("interaction", "products"):
        network = case.network()
        assert isinstance(network, DenseNetwork), "parts are of DLRM"
        return build_part(case, network.bottom, network.interact, network.top), {}
    dims = [case.dim, 1] if case.model == "deepfm" else [case.dim]
    inputs, ids, label = case.load()
    batches = iter(range(len(ids)))
    tables: nn.ModuleList
    rows: torch.optim.Adagrad | StackedRows
    if "rows" in case.options:
        tables = nn.ModuleList(stacked_bag_of(case, dim) for dim in dims)
        rows = StackedRows(tables, case.embedding_lr)
        first_rows = torch.tensor([0, *case.rows[:-1]]).cumsum(0)
        ids = ids.transpose(1, 2) + first_rows  # (N, B, F): as a reader of one table gives them
        bag_starts = torch.arange(ids[0].numel())
    else:
        tables = nn.ModuleList(bags_of(case, dim) for dim in dims)
        rows = torch.optim.Adagrad(tables.parameters(), lr=case.embedding_lr)
        bag_starts = torch.arange(ids.shape[2])

    def look_up(i: int) -> list[Tensor]:
        """Look up a batch: (B, F * D), and (B, F) of first-order weights where the model has them."""
        if "rows" in case.options:
            batch = ids[i]
            return [bag(batch.reshape(-1), bag_starts).view(len(batch), -1) for bag in tables]
        return [
            torch.cat([bag(ids[i, f], bag_starts) for f, bag in enumerate(bags)], dim=1)
            for bags in tables
        ]

    gradient = case.gradient(label.shape[1])

    def sparse_step(laps: Laps) -> Tensor:
        rows.zero_grad()
        laps("dense")
        [fields] = look_up(next(batches))
        laps("forward")
        fields.backward(gradient)
        laps("backward")
        rows.step()
        laps("rows")
        return torch.zeros(())

    if case.part == "embeddings":
        return sparse_step, {}
    network = case.network()
    dense = torch.optim.Adam(network.parameters(), lr=case.dense_lr, fused=True)

    def step(laps: Laps) -> Tensor:
        i = next(batches)
        laps("wait")
        rows.zero_grad()
        dense.zero_grad()
        laps("dense")
        loss = bce(network(inputs[i], *look_up(i)), label[i])
        laps("forward")
        loss.backward()
        laps("backward")
        rows.step()
        laps("rows")
        dense.step()
        laps("dense")
        return loss

    return step, {}


def bags_of(case: Case, dim: int) -> nn.ModuleList:
    scale = dim**-0.5 if dim > 1 else 0.0  # first-order weights start at zero
    return nn.ModuleList(
        nn.EmbeddingBag(
            rows, dim, mode="sum", sparse=True,
            _weight=torch.empty(rows, dim).uniform_(-scale, scale),
        )
        for rows in case.rows
    )  # fmt: skip


def stacked_bag_of(case: Case, dim: int) -> nn.EmbeddingBag:
    """Stack all tables into one."""
    bags = bags_of(case, dim)
    weight = torch.cat([bag.weight.detach() for bag in bags])
    return nn.EmbeddingBag(len(weight), dim, mode="sum", sparse=True, _weight=weight)


class StackedRows:
    """Row-wise Adagrad on the sparse gradients of stacked tables."""

    def __init__(self, bags: nn.ModuleList, lr: float) -> None:
        self.weights, self.lr = list(bags.parameters()), lr
        self.accumulators = [torch.zeros(len(weight)) for weight in self.weights]

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Add up each row's gradients and update it: `unique` and `index_add_` are faster than `coalesce`."""
        for weight, accumulator in zip(self.weights, self.accumulators, strict=True):
            assert weight.grad is not None, "backward was called"
            rows, inverse = torch.unique(weight.grad._indices()[0], return_inverse=True)
            summed = torch.zeros(len(rows), weight.shape[1])
            summed.index_add_(0, inverse, weight.grad._values())
            state = accumulator.index_select(0, rows) + summed.square().mean(1)
            accumulator.index_copy_(0, rows, state)
            weight.index_add_(0, rows, summed.mul_((-self.lr / (state.sqrt() + EPS))[:, None]))


if __name__ == "__main__":
    serve(build)
