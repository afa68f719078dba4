"""TorchRec between hosts with dense work beside the exchange; ids of the next batch may travel ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.exchange_loop import Built, serve
from workers.exchange_torchrec import Sharded, build
from workers.hybrid_dense import HybridCase, WithDense


class Hybrid(WithDense, Sharded):
    pass


def build_hybrid(case: HybridCase, choices: Mapping[str, Any]) -> Built:
    return build(case, choices, Hybrid)


if __name__ == "__main__":
    serve(build_hybrid, HybridCase)
