"""Colonnade between hosts with dense work beside the exchange: synchronous, or with rows read exactly k steps late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.exchange_colonnade import Opened, build
from workers.exchange_loop import Built, serve
from workers.hybrid_dense import HybridCase, WithDense


class Hybrid(WithDense, Opened):
    pass


def build_hybrid(case: HybridCase, choices: Mapping[str, Any]) -> Built:
    systems, left_out, facts, _ = build(case, choices, Hybrid)
    return systems, left_out, facts, None  # nothing is foretold of dense work here


if __name__ == "__main__":
    serve(build_hybrid, HybridCase)
