"""Ranks whose own data ends at different steps: every batch is trained on once, as one rank would train them joined."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import run_ranks
from scenario import Net, all_rows, global_batch
from torch import nn
from torch.utils.data import IterableDataset

import colonnade
from colonnade import Batch, Ids, Mesh, RowOptimizer
from colonnade.data import Column, Schema, Splits, open_batches
from colonnade.errors import PeerLost

COUNTS = [5, 2, 0]  # batches of each rank in an epoch
SIZE = 7  # samples of a batch
SCHEMA = Schema(
    (),
    (
        Column("user", 53),
        Column("item", None),
        Column("seen", None, "bag"),
        Column("tags", 11, "bag"),
        Column("history", None, "bag"),
    ),
)
PLANS = {
    "rows": {},
    "pooled, late by one": {
        "exchange": "pooled",
        "tables": {"wide": {"exchange": "rows"}},  # sequences
        "staleness_steps": 2,
    },
    "replicated": {"sharding": "replicated"},
    "mixed, in halves": {
        "tables": {
            "item": {"sharding": "table_wise", "exchange": "pooled", "ranks": [2]},
            "tag": {"sharding": "replicated"},
            "user": {"sharding": "table_wise", "ranks": [1]},
        },
        "accumulate": 2,
    },
}


def batch_of(rank: int, step: int) -> Batch:
    return global_batch(10 * step + rank, SIZE)


class Stream(IterableDataset):
    """A rank's own batches; it says when it is asked for more."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for step in range(COUNTS[self.rank]):
            yield batch_of(self.rank, step)


def joined(batches: list[Batch]) -> Batch:
    ids = {}
    for name in batches[0].ids:
        parts = [batch.ids[name] for batch in batches]
        values = torch.cat([part.values for part in parts])
        offsets = weights = None
        if parts[0].offsets is not None:
            sizes = torch.cat([part.offsets.diff() for part in parts])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        if parts[0].weights is not None:
            weights = torch.cat([part.weights for part in parts])
        ids[name] = Ids(values, offsets, weights)
    size = sum(batch.size for batch in batches)
    return Batch(size, torch.zeros(size, 0), ids, label=torch.cat([b.label for b in batches]))


def joined_steps() -> list[Batch]:
    ranks = range(len(COUNTS))
    return [joined([batch_of(r, t) for r in ranks if t < COUNTS[r]]) for t in range(max(COUNTS))]


def sample_loss(logits, batch):
    entropy = nn.functional.binary_cross_entropy_with_logits
    return entropy(logits, batch.label.to(logits), reduction="none")[:, 0]


def fitted(mesh: Mesh, data, settings, folder=None, **more):
    model = Net()
    result = colonnade.fit(
        model,
        Splits(open_batches(data, SCHEMA), test=open_batches(data, SCHEMA)),
        run=folder,
        mesh=mesh,
        loss=sample_loss,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=2,
        **{"batch_size": 3 * SIZE * settings.get("accumulate", 1), **settings, **more},
    )
    weights = {
        name: value.clone()
        for name, value in colonnade.dense_state_dict(model).items()
        if "weight" in name
    }
    return result.outcome.steps, result.metrics, weights, all_rows(model.embeddings)


def on_a_rank(mesh, folder):
    stream = Stream(mesh.rank)
    whole = {name: fitted(mesh, stream, settings) for name, settings in PLANS.items()}
    for limit in (3, 8, None):  # stopped where ranks 1 and 2 have none left, and gone on
        parts = fitted(mesh, stream, {}, folder / "run", max_steps=limit)
    return whole, parts


def test_every_batch_is_trained_on_once(tmp_path):
    reported = run_ranks(3, on_a_rank, tmp_path)
    for name, settings in PLANS.items():
        alone = {
            key: value
            for key, value in settings.items()
            if key in ("staleness_steps", "accumulate")
        }
        steps, metrics, weights, rows = fitted(Mesh(), joined_steps(), alone)
        for whole, _ in reported:
            result = whole[name]
            assert result[0] == steps == (6 if "accumulate" in settings else 10), name
            assert result[1] == pytest.approx(metrics, rel=1e-10), name
            torch.testing.assert_close(result[2], weights, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(result[3], rows, rtol=1e-10, atol=1e-12)
    for whole, parts in reported:
        assert parts[1] == whole["rows"][1]
        torch.testing.assert_close(parts[3], whole["rows"][3], rtol=0, atol=0)


def train_own_loop(mesh: Mesh, counts: list[list[int]]) -> None:
    """Train epochs in a loop of one's own."""
    model = Net(stays=None, seed=3)
    model.embeddings.open(mesh=mesh)
    rows = RowOptimizer(model.embeddings)
    began = time.monotonic()
    for epoch in counts:
        batches = (batch_of(mesh.rank, step) for step in range(epoch[mesh.rank]))
        try:
            for batch in model.embeddings.lookahead(batches):
                model(batch).sum().backward()
                rows.step()
                began = time.monotonic()
        except PeerLost as error:
            is_soon = time.monotonic() - began < 10
            raise AssertionError(f"{'soon' if is_soon else 'late'}: {error}") from error


def test_the_rank_that_runs_out_of_batches_is_named():
    """Another rank has more, and does not wait for its time-out."""
    with pytest.raises(AssertionError) as error:
        run_ranks(2, train_own_loop, [[2, 2], [4, 3]], timeout=60, fresh=True)
    assert "soon: rank 0 of 2 lost rank 1 in 'route'" in str(error.value)
    message = str(error.value).partition("has no more batches: its data ended after 3")[2]
    assert "last seen in step 5" in message
