"""The plain peer: one nn.EmbeddingBag(sparse=True) per table, torch.optim.Adagrad on their sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from workers.loop import Case, Laps, Step, serve


def build(case: Case) -> tuple[Step, dict[str, str]]:
    tables = nn.ModuleList([bags_of(case, case.dim)])
    if case.model == "deepfm":
        tables.append(bags_of(case, 1))
    rows = torch.optim.Adagrad(tables.parameters(), lr=case.embedding_lr)
    inputs, ids, label = case.load()
    bag_starts = torch.arange(ids.shape[2])
    batches = iter(range(len(ids)))

    def look_up(i: int) -> list[Tensor]:
        """(B, F * D), and (B, F) of first-order weights where the model has them."""
        return [
            torch.cat([bag(ids[i, f], bag_starts) for f, bag in enumerate(bags)], dim=1)
            for bags in tables
        ]

    gradient = case.gradient(ids.shape[2])

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

    if case.sparse_only:
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


if __name__ == "__main__":
    serve(build)
