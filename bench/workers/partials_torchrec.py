"""TorchRec with a model's first operators in torch, on what it pooled: a row has D elements and its weight.

A choice is one of `exchange_torchrec`'s. Rows are as wide as its kernels want them: a multiple of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from workers import exchange_torchrec
from workers.exchange_loop import serve
from workers.partials_loop import LR, ModelCase


class Sharded(exchange_torchrec.Sharded):
    optimizer_type, settings = torch.optim.SGD, {"lr": LR}

    def __init__(
        self, case: ModelCase, choice: Mapping[str, Any], keyed: list[KeyedJaggedTensor]
    ) -> None:
        if case.over == "ids":
            raise ValueError("what it pooled has no squares of single ids, which fm over ids needs")
        self.model = case
        super().__init__(replace(case, dim=-(-(case.dim + 1) // 4) * 4), choice, keyed)
        self.output_gradients = case.output_gradients()
        self.weight = case.weight().requires_grad_()

    def outputs_of(self, result: Any) -> list[Tensor]:
        (pooled,) = super().outputs_of(result)
        rows = pooled.view(self.model.batch_size, len(self.model.rows), self.case.dim)
        vectors = rows[:, :, : self.model.dim]
        outputs = []
        for name in self.model.operators:
            if name == "linear":
                outputs.append(rows[:, :, self.model.dim].sum(1, keepdim=True))
            elif name == "deep":
                outputs.append(vectors.flatten(1) @ self.weight)
            else:
                squares = vectors.square().sum((1, 2))
                outputs.append(((vectors.sum(1).square().sum(1) - squares) / 2)[:, None])
        self.weight.grad = None
        return outputs

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return self.output_gradients


def build(case: ModelCase, choices: Mapping[str, Any]) -> Any:
    return exchange_torchrec.build(case, choices, Sharded)


if __name__ == "__main__":
    serve(build, ModelCase)
