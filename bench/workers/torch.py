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
    network = case.network()
    rows = torch.optim.Adagrad(bags.parameters(), lr=case.rows_lr)
    dense = torch.optim.Adam(network.parameters(), lr=case.dense_lr, fused=True)
    inputs, ids, label = case.load()
    bag_starts = torch.arange(ids.shape[2])
    batches = iter(range(len(ids)))

    def step(laps: Laps) -> Tensor:
        i = next(batches)
        laps("wait")
        rows.zero_grad()
        dense.zero_grad()
        laps("dense")
        fields = torch.cat([bag(ids[i, f], bag_starts) for f, bag in enumerate(bags)], dim=1)
        loss = bce(network(inputs[i], fields), label[i])
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
