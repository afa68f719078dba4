"""Plain torch: one nn.EmbeddingBag (sequences: embedding) with sparse=True per table, torch.optim on the sparse
gradients, called as its user calls them. torch.optim has no row-wise Adagrad.

Inside `forward`: the modules, fresh outputs. Inside `backward`: autograd, which makes sparse gradients. Inside
`rows`: zero_grad and the optimizer's step, which sums duplicate rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from workers.kernels_loop import EPS, Step, fill, gradient_of, serve
from workers.loop import Laps
from workers.workload import NUM_FEATURES, Tables, Workload

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": partial(torch.optim.Adagrad, eps=EPS)}


class Torch:
    phases = ("forward", "backward", "rows")

    def __init__(self, tables: Tables) -> None:
        self.dim = tables.dim
        weights = [fill(torch.empty(tables.rows, tables.dim)) for _ in range(NUM_FEATURES)]
        self.bags = [nn.EmbeddingBag(*w.shape, mode="sum", sparse=True, _weight=w) for w in weights]
        # Adagrad touches its state here.
        self.optimizer = OPTIMIZERS[tables.optimizer]([b.weight for b in self.bags], lr=tables.lr)

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        starts = torch.arange(0, workload.batch_size * workload.lookups, workload.lookups)
        gradient = gradient_of(workload, self.dim)
        if workload.pooled:
            gradients = [part.contiguous() for part in gradient.split(self.dim, dim=1)]
        else:
            gradients = list(gradient.split(workload.num_outputs))

        def step(laps: Laps) -> None:
            ids = next(batches)
            laps.start()
            if workload.pooled:
                outs = [bag(ids[f], starts) for f, bag in enumerate(self.bags)]
            else:
                outs = [
                    embedding(ids[f], bag.weight, sparse=True) for f, bag in enumerate(self.bags)
                ]
            laps("forward")
            torch.autograd.backward(outs, gradients)
            laps("backward")
            self.optimizer.step()
            self.optimizer.zero_grad()
            laps("rows")

        return step


def open_systems(tables: Tables, also: Sequence[str]) -> Mapping[str, Torch]:
    return {"torch": Torch(tables)}


if __name__ == "__main__":
    serve(open_systems)
