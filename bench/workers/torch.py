"""The plain peer: one nn.EmbeddingBag(sparse=True) per table, torch.optim.Adagrad on their sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from workers.loop import Case, Laps, Step, serve


def build(case: Case) -> tuple[Step, dict[str, str]]:
    scale = case.dim**-0.5
    bags = nn.ModuleList(
        nn.EmbeddingBag(
            rows, case.dim, mode="sum", sparse=True,
            _weight=torch.empty(rows, case.dim).uniform_(-scale, scale),
        )
        for rows in case.rows
    )  # fmt: skip
    rows = torch.optim.Adagrad(bags.parameters(), lr=case.rows_lr)
    inputs, ids, label = case.load()
    bag_starts = torch.arange(ids.shape[2])
    batches = iter(range(len(ids)))

    def look_up(i: int) -> Tensor:
        return torch.cat([bag(ids[i, f], bag_starts) for f, bag in enumerate(bags)], dim=1)

    gradient = case.gradient(ids.shape[2])

    def sparse_step(laps: Laps) -> Tensor:
        rows.zero_grad()
        laps("dense")
        fields = look_up(next(batches))
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
        loss = bce(network(inputs[i], look_up(i)), label[i])
        laps("forward")
        loss.backward()
        laps("backward")
        rows.step()
        laps("rows")
        dense.step()
        laps("dense")
        return loss

    return step, {}


if __name__ == "__main__":
    serve(build)
