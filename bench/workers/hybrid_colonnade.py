"""Colonnade between hosts with dense work beside the exchange: synchronous, or with rows read exactly k steps late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workers.exchange_colonnade import Opened, build
from workers.exchange_loop import Built, serve
from workers.hybrid_dense import DenseWork, HybridCase


class Hybrid(Opened):
    def __init__(self, case: HybridCase, *rest: Any) -> None:
        super().__init__(case, *rest)
        self.dense = DenseWork(case)

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        self.dense.run(outputs[0])
        return super().gradients(outputs)


def build_hybrid(case: HybridCase, choices: Mapping[str, Any]) -> Built:
    systems, left_out, facts, _ = build(case, choices, Hybrid)
    return systems, left_out, facts, None  # nothing is foretold of dense work here


if __name__ == "__main__":
    serve(build_hybrid, HybridCase)
