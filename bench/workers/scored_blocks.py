"""A model's AUC on blocks of test samples: the same samples for all systems, so differences are paired by them."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import nn

from colonnade.comm.mesh import Mesh
from colonnade.data.batches import read_rank_batches
from colonnade.data.contract import Source
from colonnade.train.metrics import auc
from colonnade.train.trainer import Outcome

BLOCKS, LEAST = 50, 200
"""Blocks, where each has as many samples as that; fewer of few samples."""


def check_whole(outcome: Outcome) -> None:
    """Raises KeyboardInterrupt for a training that a signal ended early: its model says nothing of the whole run."""
    if outcome.stopped:
        raise KeyboardInterrupt


@torch.no_grad()
def block_aucs(model: nn.Module, source: Source, mesh: Mesh) -> list[float]:
    """By block, to six digits; the few samples behind the last one are left out. The model has one task and is in one
    process; its training flag is put back."""
    was_training, found = model.training, []
    model.eval()
    size = block_size(source)
    for batch in read_rank_batches(source, size, mesh, channel="evaluate"):
        if batch.size == size:
            assert batch.label is not None
            found.append(round(auc(model(batch).double(), batch.label), 6))
    model.train(was_training)
    return found


def block_ceiling(source: Source) -> float:
    """The mean AUC of the true probabilities, which synthetic samples carry."""
    size = block_size(source)
    return fmean(
        auc(batch.key, batch.label)
        for batch in source.batches(size)
        if batch.size == size and batch.key is not None and batch.label is not None
    )


def block_size(source: Source) -> int:
    """Of a source that knows how many samples it has."""
    assert source.num_samples
    return source.num_samples // max(1, min(BLOCKS, source.num_samples // LEAST))
