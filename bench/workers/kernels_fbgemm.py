"""FBGEMM's table-batched embeddings on the CPU, called as its user calls them: one module for all tables, ids and
offsets of all features in one tensor each, the optimizer fused into backward, bounds checks and threads as shipped.

Inside `forward`: the module's Python, its bounds check, the lookup, a fresh output. Inside `backward`: autograd's
call, the sort by row, the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from workers.kernels_loop import EPS, Step, fill, gradient_of, serve
from workers.loop import Laps
from workers.workload import NUM_FEATURES, Tables, Workload

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}
STATE_ELEMENTS = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
}


class Fbgemm:
    phases = ("forward", "backward")

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        num_rows = NUM_FEATURES * tables.rows
        self.buffers = {"weights": fill(torch.empty(num_rows * tables.dim))}
        if state := STATE_ELEMENTS[tables.optimizer](tables.dim):
            self.buffers["momentum1"] = torch.empty(
                num_rows * state
            ).zero_()  # zeros() touches no page
        self.modules: dict[PoolingMode, SplitTableBatchedEmbeddingBagsCodegen] = {}

    def module(self, pooling: PoolingMode) -> SplitTableBatchedEmbeddingBagsCodegen:
        """Bags and sequences are two modules, here over the same memory."""
        if pooling not in self.modules:
            spec = (self.tables.rows, self.tables.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            self.modules[pooling] = SplitTableBatchedEmbeddingBagsCodegen(
                embedding_specs=[spec] * NUM_FEATURES,
                optimizer=OPTIMIZERS[self.tables.optimizer],
                learning_rate=self.tables.lr,
                eps=EPS,
                pooling_mode=pooling,
                device=torch.device("cpu"),
                preallocated_host_buffers=self.buffers,
            )
        return self.modules[pooling]

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        module = self.module(PoolingMode.SUM if workload.pooled else PoolingMode.NONE)
        gradient = gradient_of(workload, self.tables.dim)
        offsets = torch.arange(0, workload.num_lookups + 1, workload.lookups)

        def step(laps: Laps) -> None:
            indices = next(batches).view(-1)
            laps.start()
            out = module(indices, offsets)
            laps("forward")
            out.backward(gradient)
            laps("backward")

        return step


def open_systems(tables: Tables, also: Sequence[str]) -> Mapping[str, Fbgemm]:
    return {"fbgemm": Fbgemm(tables)}


if __name__ == "__main__":
    serve(open_systems)
