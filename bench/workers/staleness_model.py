"""Model and samples of every plan of `bench quality`, suite cache: one network, over rows of one table, and the samples
it sees.

All fields share a table, as in HET, field behind field: row = first row of the field + id. A row has D + 1 columns.

Legend: B samples, F fields, W = D + 1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.data import open_source
from colonnade.data.contract import Position, Schema, Source, Splits
from colonnade.optimizers import SGD, Adagrad, SparseOptimizer
from colonnade.staleness import RowClock
from colonnade.train.metrics import auc

RANKS, PER_RANK = 4, 128
"""Size of the world in question."""
DIM, TOP = 16, (64, 32)
DENSE_LR = 1e-3
INIT_SCALE = 0.01
READ_STEPS = 16
"""Batches that are read at once: the streams make samples in blocks."""
SCORED_BLOCKS = 50
"""Blocks of a test set; each has an AUC of its own."""


@dataclass(frozen=True)
class System:
    """Rule by which rows are read. late: number of updates that every read misses. clock: bounds of cached rows;
    cached_share: share of the rows that a rank caches, those used most often."""

    late: int = 0
    clock: RowClock | None = None
    cached_share: float = 0.1


@dataclass(frozen=True)
class Learning:
    """Optimizer of rows, and their beginning. `seed`: first values of rows and network, order of MovieLens' samples."""

    optimizer: str
    lr: float
    epochs: int = 1
    seed: int = 0
    dtype: str = "float32"

    @property
    def rule(self) -> SparseOptimizer:
        if self.optimizer == "sgd":
            return SGD(lr=self.lr)
        return Adagrad(lr=self.lr, initial_accumulator=1e-6)


@dataclass(frozen=True)
class Samples:
    dense: Tensor  # (B, n)
    ids: Tensor  # (B, F) int64, rows of the one table
    label: Tensor  # (B, 1)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, part: slice) -> Samples:
        return Samples(self.dense[part], self.ids[part], self.label[part])


@dataclass
class Trained:
    """`scores` (n,): of the test samples, once every update has reached the rows. `logits` (steps, B): of what was
    trained, before it was, where that was asked for. `facts`: what else a table says of it. `curve`: mean AUC of test
    blocks by step."""

    scores: Tensor
    logits: list[Tensor]
    facts: dict[str, float]
    curve: dict[int, float]


@dataclass(frozen=True)
class Data:
    """A data set whose fields of one id each are rows of one table. Bags are left out."""

    splits: Splits

    @property
    def schema(self) -> Schema:
        return self.splits.train.schema

    @property
    def columns(self) -> list[str]:
        return [c.name for c in self.schema.categorical if c.kind == "one"]

    @property
    def firsts(self) -> Tensor:
        """Return (F + 1,) first rows of the fields; the last is their number."""
        rows = [c.cardinality for c in self.schema.categorical if c.kind == "one"]
        return torch.tensor([0, *rows]).cumsum(0)

    @property
    def num_rows(self) -> int:
        return int(self.firsts[-1])

    def training(self, learning: Learning, batch_size: int) -> Iterator[Samples]:
        """Yield the batches of all epochs, one behind the other."""
        for epoch in range(learning.epochs):
            yield from self.read(self.splits.train, batch_size, epoch)

    def scored(self, part: Source) -> Iterator[Samples]:
        """`SCORED_BLOCKS` blocks, alike in size but for one sample."""
        assert part.num_samples is not None
        bounds = [part.num_samples * k // SCORED_BLOCKS for k in range(SCORED_BLOCKS + 1)]
        whole = next(iter(self.read(part, part.num_samples)))
        return (whole[low:high] for low, high in pairwise(bounds))

    def read(self, source: Source, batch_size: int, epoch: int = 0) -> Iterator[Samples]:
        """The last batch may be smaller."""
        firsts, names = self.firsts[:-1], self.columns
        for read in source.batches(batch_size * READ_STEPS, start=Position(epoch)):
            ids = torch.stack([read.ids[name].values for name in names], 1) + firsts
            assert read.label is not None
            samples = Samples(read.dense, ids, read.label)
            for begin in range(0, read.size, batch_size):
                yield samples[begin : begin + batch_size]


def open_movielens(seed: int) -> Data:
    """Training samples in an order by seed."""
    return Data(open_source("movielens", seed=seed))


def open_stream(samples: int, test_samples: int, **options: Any) -> Data:
    """Open a stream of Criteo's shape. options: of `data.sets.synthetic`."""
    return Data(open_source("synthetic", num_train=samples, num_test=test_samples, **options))


class Network(nn.Module):
    """DeepFM: weights of ids, products of all pairs of vectors, and an MLP over vectors and numbers."""

    def __init__(self, num_fields: int, num_dense: int) -> None:
        super().__init__()
        widths = [num_fields * DIM + num_dense, *TOP]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.top = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        """rows (B, F, W), dense (B, n) -> (B, 1)."""
        deep, wide = rows[..., :DIM], rows[..., DIM]
        pairs = (deep.sum(1).square() - deep.square().sum(1)).sum(1, keepdim=True) / 2
        return wide.sum(1, keepdim=True) + pairs + self.top(torch.cat([deep.flatten(1), dense], 1))


def build_network(data: Data, learning: Learning) -> tuple[Network, torch.optim.Optimizer]:
    """The same at every call with the same seed."""
    torch.manual_seed(learning.seed)
    network = Network(len(data.columns), len(data.schema.dense))
    network.to(getattr(torch, learning.dtype))
    return network, torch.optim.Adam(network.parameters(), lr=DENSE_LR)


def block_aucs(scores: Tensor, blocks: Sequence[Tensor]) -> list[float]:
    """scores (n,), labels by block. What is not a number ranks nothing: 0.5."""
    parts = scores.split([len(block) for block in blocks])
    return [
        auc(part, label) if bool(torch.isfinite(part).all()) else 0.5
        for part, label in zip(parts, blocks, strict=True)
    ]


class Curve:
    """Mean AUC of the test blocks at `num_scored` steps, evenly spread over the run; the last step is one of them."""

    def __init__(
        self, data: Data, learning: Learning, test: Sequence[Samples], num_scored: int
    ) -> None:
        assert data.splits.train.num_samples is not None
        self.num_steps = -(-data.splits.train.num_samples // (RANKS * PER_RANK)) * learning.epochs
        self.labels, self.num_scored = [block.label for block in test], num_scored
        self.aucs: dict[int, float] = {}

    def score_if_due(self, step: int, score: Callable[[], Tensor]) -> None:
        number = step * self.num_scored // self.num_steps
        if self.num_scored > 1 and number > (step - 1) * self.num_scored // self.num_steps:
            self.aucs[step] = fmean(block_aucs(score(), self.labels))
            print(
                f"step {step:,} of {self.num_steps:,}: AUC {self.aucs[step]:.5f}",
                file=sys.stderr,
                flush=True,
            )
