"""The training loop of the peers of `bench tiers`: rows are got from a store and put back, batch by batch.

    unique rows of the batch -> get -> one output row for each lookup -> a fixed gradient -> its sum for each row ->
    row-wise Adagrad -> put

A record is dim weights and one accumulator, float32. Legend: U unique rows, R rows of all fields, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.tiers_loop import Case, Gate

EPS = 1e-10


class Store(Protocol):
    def get(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read the records (U, D + 1) of rows (U,), which ascend, into an array that the caller owns."""
        ...

    def put(self, rows: NDArray[np.int64], records: NDArray[np.float32]) -> None: ...

    def counts(self) -> Mapping[str, float]: ...


class PeerTraining:
    """`System`, without a dense network."""

    def __init__(self, case: Case, store: Store) -> None:
        self.case, self.store = case, store
        self.stream = case.open_stream()
        shape = self.stream.shape
        self.gate = Gate(shape.num_batches, 0)
        self.batches = iter(self.gate)
        self.ids = self.stream.rows()
        generator = torch.Generator().manual_seed(case.seed)
        self.gradient = torch.randn(shape.lookups, case.dim, generator=generator)
        self.gradient /= shape.batch_size

    def step(self, network: bool) -> None:
        assert not network, "peers are measured without a network"
        lookups = torch.from_numpy(self.ids[next(self.batches)].reshape(-1).astype(np.int64))
        rows, inverse = torch.unique(lookups, return_inverse=True)
        records = torch.from_numpy(self.store.get(rows.numpy()))
        look_up(records, inverse)
        update(records, inverse, self.gradient, self.case.embedding_lr)
        self.store.put(rows.numpy(), records.numpy())

    def settle(self) -> None:
        """A peer reads when it is asked."""

    def counts(self) -> Mapping[str, float]:
        return self.store.counts()


def look_up(records: Tensor, inverse: Tensor) -> Tensor:
    """One row per lookup: every field is one-hot."""
    return records[:, :-1].index_select(0, inverse)


def update(records: Tensor, inverse: Tensor, gradient: Tensor, lr: float) -> None:
    """Row-wise Adagrad, in place: records (U, D + 1), gradient (lookups, D)."""
    dim = gradient.shape[1]
    summed = torch.zeros(len(records), dim).index_add_(0, inverse, gradient)
    state = records[:, dim]
    state += summed.square().mean(1)
    records[:, :dim] -= lr * summed / (state.sqrt() + EPS)[:, None]


def first_records(count: int, dim: int) -> NDArray[np.float32]:
    """Make records (count, D + 1) to fill a store with."""
    records = np.random.default_rng(0).standard_normal((count, dim + 1), np.float32)
    records[:, dim] = 0.1
    return records
