"""Evaluation: sees every update, leaves no trace on the run.

Legend: S samples of this rank, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.comm.mesh import Mesh
from colonnade.data.batches import batches_of
from colonnade.data.contract import Source
from colonnade.errors import ConfigError, DataError
from colonnade.train.metrics import Evaluation


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, batch_size: int, mesh: Mesh) -> dict[str, float]:
    """Collective: each rank scores its share of one pass over `source`; every rank returns the same metrics.

    `model(batch)` gives logits (B, T). The first task's metrics have plain names ("auc", `Evaluation.result`), the
    others' end in their label's ("auc_buy"). The model's training flag is put back.
    """
    was_training = model.training
    model.eval()
    columns: list[Tensor] = []  # (B, 2 T + 1) float64: scores, labels, weight
    groups: list[Tensor] = []
    try:
        for batch in batches_of(source, batch_size, mesh, purpose="evaluate"):
            if batch.label is None:
                raise DataError("the batch has no label; evaluation compares scores with labels")
            logits = model(batch)
            if logits.shape != batch.label.shape:
                raise ConfigError(
                    f"got logits {tuple(logits.shape)} for labels {tuple(batch.label.shape)}; "
                    "the model's tasks and the data's label columns must agree"
                )
            weight = batch.sample_weight
            weight = torch.ones(batch.size) if weight is None else weight
            parts = (torch.sigmoid(logits.double()), batch.label, weight[:, None])
            columns.append(torch.cat([part.cpu().double() for part in parts], dim=1))
            if batch.group is not None:
                groups.append(batch.group.cpu())
    finally:
        model.train(was_training)
    return _pooled(columns, groups, source.schema.labels, mesh)


def _pooled(
    columns: Sequence[Tensor], groups: Sequence[Tensor], labels: Sequence[str], mesh: Mesh
) -> dict[str, float]:
    """Collective: the metrics of all ranks' samples together."""
    if groups and len(groups) != len(columns):
        raise DataError("got groups with some batches only, wanted them with all or with none")
    table = torch.cat(list(columns)) if columns else torch.empty(0, 3, dtype=torch.float64)
    num_tasks = (table.shape[1] - 1) // 2
    tables = [
        torch.from_numpy(part.reshape(-1, table.shape[1]))
        for part in _gathered(table, np.float64, mesh)
    ]
    everyones_groups: list[Tensor | None] = [None] * mesh.num_ranks
    if groups:
        everyones_groups = [
            torch.from_numpy(part) for part in _gathered(torch.cat(list(groups)), np.int64, mesh)
        ]
    found: dict[str, float] = {}
    for task in range(num_tasks):
        evaluation = Evaluation()
        for part, group in zip(tables, everyones_groups, strict=True):
            evaluation.add(part[:, task], part[:, num_tasks + task], part[:, -1], group)
        suffix = f"_{labels[task] if task < len(labels) else task}" if task else ""
        found |= {f"{name}{suffix}": value for name, value in evaluation.result().items()}
    return found


def _gathered(values: Tensor, dtype: type, mesh: Mesh) -> Iterator[np.ndarray]:
    """Collective: every rank's values, flat, in rank order."""
    for data in mesh.all_gather_bytes("evaluate", values.contiguous().numpy().tobytes()):
        yield np.frombuffer(data, dtype=dtype).copy()
