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
    """Check that training was not cut short. Raises KeyboardInterrupt if a signal ended it early: its model says
    nothing of the whole run."""
    if outcome.stopped:
        raise KeyboardInterrupt


@torch.no_grad()
def block_aucs(model: nn.Module, source: Source, mesh: Mesh) -> list[float]:
    """Return AUC by block, to six digits; the few samples behind the last one are left out. The model has one task and
    is in one process; its training flag is put back."""
    was_training, results = model.training, []
    model.eval()
    size = block_size(source)
    for batch in read_rank_batches(source, size, mesh, channel="evaluate"):
        if batch.size == size:
            assert batch.label is not None
            results.append(round(auc(model(batch).double(), batch.label), 6))
    model.train(was_training)
    return results


def block_ceiling(source: Source) -> float:
    """The mean AUC of the true probabilities, which synthetic samples carry."""
    size = block_size(source)
    return fmean(
        auc(batch.key, batch.label)
        for batch in source.batches(size)
        if batch.size == size and batch.key is not None and batch.label is not None
    )


def block_size(source: Source) -> int:
    """Return the block size of a source that knows its number of samples."""
    assert source.num_samples
    return source.num_samples // max(1, min(BLOCKS, source.num_samples // LEAST))
