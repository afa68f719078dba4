"""Evaluation: sees every update, leaves no trace on the run."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from colonnade.data.batches import until_all_end
from colonnade.data.contract import Source
from colonnade.errors import DataError
from colonnade.topology.mesh import Mesh
from colonnade.train.metrics import Evaluation


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, batch_size: int, mesh: Mesh) -> dict[str, float]:
    """Collective: each rank scores its share of one pass over `source`; every rank returns the same metrics.

    Only the first task's logit is scored. The model's training flag is put back.
    """
    was_training = model.training
    model.eval()
    scores, labels, weights = [], [], []
    try:
        batches = source.batches(batch_size, rank=mesh.rank, num_ranks=mesh.num_ranks)
        if source.num_samples is None:
            batches = until_all_end(batches, source.schema, mesh, purpose="evaluate")
        for batch in batches:
            if batch.label is None:
                raise DataError("the batch has no label; evaluation compares scores with labels")
            scores.append(torch.sigmoid(model(batch)[:, 0].double()))
            labels.append(batch.label[:, 0].double())
            weight = batch.sample_weight
            weights.append(torch.ones(batch.size) if weight is None else weight)
    finally:
        model.train(was_training)
    table = torch.stack([torch.cat(part).double() for part in (scores, labels, weights)])
    found = Evaluation()
    for data in mesh.all_gather_bytes("evaluate", table.numpy().tobytes()):
        found.add(*torch.from_numpy(np.frombuffer(data, dtype=np.float64).reshape(3, -1).copy()))
    return found.result()
