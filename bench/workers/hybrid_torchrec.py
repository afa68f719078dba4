"""TorchRec between hosts with dense work beside the exchange; ids of the next batch may travel ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workers.exchange_loop import Built, serve
from workers.exchange_torchrec import Sharded, build
from workers.hybrid_dense import DenseWork, HybridCase


class Hybrid(Sharded):
    def __init__(self, case: HybridCase, *rest: Any) -> None:
        super().__init__(case, *rest)
        self.dense = DenseWork(case)

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        self.dense.run(outputs[0])
        return super().gradients(outputs)


def build_hybrid(case: HybridCase, choices: Mapping[str, Any]) -> Built:
    return build(case, choices, Hybrid)


if __name__ == "__main__":
    serve(build_hybrid, HybridCase)
