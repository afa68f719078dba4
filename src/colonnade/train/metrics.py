"""Metrics of predicted probabilities, exact, in float64, by sorting; and evaluation of a model.

Evaluation sees every update and changes nothing of the run.

Legend: S samples, T tasks, R runs of samples with equal scores, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.errors import ConfigError, DataError, NonFiniteError
from colonnade.models.ranking import BlockedMetrics, evaluation_mode, read_numbered_batches
from colonnade.train.callbacks import name_user_code_in_errors

MetricFunction = Callable[[Tensor, Tensor], float]
"""Metric of a user: a function of scores (S,) and labels (S,) in float64."""


def evaluate(
    model: nn.Module,
    source: Source,
    batch_size: int,
    mesh: Mesh,
    user_metrics: Mapping[str, MetricFunction] = MappingProxyType({}),
) -> dict[str, float]:
    """Evaluate a model on one pass over `source`, of which each rank scores its share. Collective.

    Every rank returns the same metrics. `model(batch)` gives logits (B, T). The first task's metrics have plain names
    ("auc", `Evaluation.result`), the others' end in their label's ("auc_buy"). The model's training flag is restored.
    user_metrics: further metrics of the probabilities, by name.
    """
    columns: list[Tensor] = []  # (B, 2 T + 2) float64: scores, labels, weight, number
    groups: list[Tensor] = []
    with evaluation_mode(model):
        for batch, numbers in read_numbered_batches(source, batch_size, mesh):
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
            parts = (
                torch.sigmoid(logits.double()),
                batch.label,
                weight[:, None],
                numbers[:, None],
            )
            columns.append(torch.cat([part.cpu().double() for part in parts], dim=1))
            if batch.group is not None:
                groups.append(batch.group.cpu())
    return _compute_pooled_metrics(columns, groups, source.schema.labels, mesh, user_metrics)


def _compute_pooled_metrics(
    columns: Sequence[Tensor],
    groups: Sequence[Tensor],
    labels: Sequence[str],
    mesh: Mesh,
    user_metrics: Mapping[str, MetricFunction],
) -> BlockedMetrics:
    """Compute the metrics of all ranks' samples together. Collective."""
    if groups and len(groups) != len(columns):
        raise DataError("got groups with some batches only, wanted them with all or with none")
    table = torch.cat(list(columns)) if columns else torch.empty(0, 4, dtype=torch.float64)
    num_tasks = (table.shape[1] - 2) // 2
    pooled = gather_columns(table, mesh)
    group: Tensor | None = None
    if groups:
        parts = _gather_values(torch.cat(list(groups)), np.int64, mesh)
        group = torch.cat([torch.from_numpy(part) for part in parts])

    def compute(index: Any) -> dict[str, float]:
        part = pooled[index]
        part_group = None if group is None else group[index]
        metrics: dict[str, float] = {}
        for task in range(num_tasks):
            evaluation = Evaluation()
            evaluation.add_predictions(
                part[:, task], part[:, num_tasks + task], part[:, -2], part_group
            )
            metrics |= {
                f"{name}{format_task_suffix(labels, task)}": value
                for name, value in evaluation.compute_metrics().items()
            }
        return metrics

    numbers = pooled[:, -1].numpy().astype(np.int64)
    metrics = BlockedMetrics(compute, numbers, pooled[:, num_tasks:-1].numpy())
    predictions = pooled[:, : 2 * num_tasks]
    metrics |= compute_user_metrics(user_metrics, predictions, labels, mesh)
    return metrics


def compute_user_metrics(
    functions: Mapping[str, MetricFunction], predictions: Tensor, labels: Sequence[str], mesh: Mesh
) -> dict[str, float]:
    """Compute a user's metrics on rank 0, which sends them to the others. Collective.

    predictions (S, 2 T): scores of each task, then its labels, of all ranks' samples. A sample with a NaN label is left
    out. Names of tasks after the first end in their label's. Raises CallbackError if a function does not return a
    number.
    """
    metrics: dict[str, float] = {}
    if not functions:
        return metrics
    num_tasks = predictions.shape[1] // 2
    for task in range(num_tasks if mesh.rank == 0 else 0):
        columns = predictions[:, [task, num_tasks + task]]
        scores, truth = columns[~columns[:, 1].isnan()].T
        for name, function in functions.items():
            with name_user_code_in_errors(f"metrics[{name!r}]"):
                value = float(function(scores.clone(), truth.clone()))
            metrics[f"{name}{format_task_suffix(labels, task)}"] = value
    return json.loads(mesh.all_gather_bytes("evaluate", json.dumps(metrics).encode())[0])


def format_task_suffix(labels: Sequence[str], task: int) -> str:
    """Return the end of the names of a task's metrics: "_LABEL", or "" for the first."""
    return f"_{labels[task] if task < len(labels) else task}" if task else ""


def gather_columns(table: Tensor, mesh: Mesh) -> Tensor:
    """Return every rank's rows (S, n) float64, in rank order. Collective."""
    parts = _gather_values(table, np.float64, mesh)
    return torch.cat([torch.from_numpy(part.reshape(-1, table.shape[1])) for part in parts])


def _gather_values(values: Tensor, dtype: type, mesh: Mesh) -> Iterator[np.ndarray]:
    """Yield every rank's values, flat, in rank order. Collective."""
    for data in mesh.all_gather_bytes("evaluate", values.contiguous().numpy().tobytes()):
        yield np.frombuffer(data, dtype=dtype).copy()


CLIP = 1e-7
"""log_loss moves probabilities this far from 0 and 1: the resolution of a float32 near 1."""

BINS = 15
"""Number of bins of expected_calibration_error, of equal width, as in Guo et al. (2017)."""

Array = Tensor | NDArray
Float64s = NDArray[np.float64]


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float:
    """Compute the area under the ROC curve: the probability that a positive sample scores above a negative one.

    Ties count half. Arguments (S,) or (S, 1); labels 0 or 1; weights >= 0. nan if one class has no weight. Raises
    NonFiniteError for a score that is not finite, DataError for other labels, weights or lengths.
    """
    return _auc(*_check_and_sort_columns(scores, labels, weights)[:3])


def group_auc(scores: Array, labels: Array, groups: Array, weights: Array | None = None) -> float:
    """Compute the AUC inside each group, averaged with the groups' weights; nan without a group that has an AUC.

    groups (S,) integers. A group's weight is the sum of its samples'. A group in which one class has no weight has no
    AUC and is left out.
    """
    return _group_auc(*_check_and_sort_columns(scores, labels, weights, groups))


@dataclass(slots=True)
class Evaluation:
    """Predictions collected batch by batch, on the CPU: 12 bytes per sample, 20 with groups (or float64).

    The result does not depend on the order of samples, to the last bit. So ranks may pool their samples by adding one
    another's `columns()`.
    """

    _parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    _groups: list[Tensor] = field(default_factory=list)

    def add_predictions(
        self,
        probability: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        group: Tensor | None = None,
    ) -> None:
        """Add one batch. Arguments (B,) or (B, 1), on any device; copied, so the caller may reuse their memory.

        A sample with a NaN label is left out. Either every batch has a group, or none.
        """
        if weight is None:
            weight = torch.ones(label.numel(), dtype=torch.float32)
        sizes = {probability.numel(), label.numel(), weight.numel()}
        if len(sizes) > 1:
            raise DataError(
                f"got {probability.numel()} probabilities, {label.numel()} labels and "
                f"{weight.numel()} weights, wanted as many of each. Add one task at a time"
            )
        probability, label, weight = (
            column.detach().flatten().to("cpu", copy=True)
            for column in (probability, label, weight)
        )
        if group is not None and group.numel() != label.numel():
            raise DataError(
                f"got {group.numel()} groups for {label.numel()} labels, wanted as many"
            )
        if len(self._groups) != (len(self._parts) if group is not None else 0):
            raise DataError("got groups with some batches only, wanted them with all or with none")
        is_labelled = ~torch.isnan(label)
        if not is_labelled.all():
            probability = probability[is_labelled]
            label = label[is_labelled]
            weight = weight[is_labelled]
        self._parts.append((probability, label, weight))
        if group is not None:
            self._groups.append(
                group.detach().flatten().to("cpu", torch.int64, copy=True)[is_labelled]
            )

    def concatenate_columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return all added values: probability, label, weight and, if there are any, group, (S,) each."""
        if not self._parts:
            return torch.empty(0), torch.empty(0), torch.empty(0), None
        probability, label, weight = (
            torch.cat(column) for column in zip(*self._parts, strict=True)
        )
        return probability, label, weight, torch.cat(self._groups) if self._groups else None

    def compute_metrics(self) -> dict[str, float]:
        """Compute all metrics by name.

        Names: auc, group_auc (with groups), log_loss, normalized_entropy,
        calibration, expected_calibration_error; and num_samples (unweighted), positive_rate (weighted).
        """
        probability, label, weight, group = self.concatenate_columns()
        columns = _check_and_sort_columns(probability, label, weight)[:3]
        _, labels, weights = columns
        metrics = {
            "auc": _auc(*columns),
            "log_loss": _log_loss(*columns),
            "normalized_entropy": _normalized_entropy(*columns),
            "calibration": _calibration(*columns),
            "expected_calibration_error": _expected_calibration_error(*columns),
            "num_samples": float(len(labels)),
            "positive_rate": _weighted_mean(labels, weights),
        }
        if group is not None:
            metrics["group_auc"] = group_auc(probability, label, group, weight)
        return metrics


def best_possible_metrics(batches: Iterable[Batch]) -> dict[str, float]:
    """Compute the metrics of a perfect model: one that predicts the true probabilities, the batches' `key`.

    Synthetic streams have such a `key` (data/sets/synthetic.py): (B,).
    """
    truth = Evaluation()
    for batch in batches:
        if not isinstance(batch.key, Tensor) or batch.label is None:
            raise DataError(
                "got a batch without labels or without true probabilities in its key; "
                "only synthetic streams have a ceiling that is known"
            )
        truth.add_predictions(batch.key, batch.label[:, 0], batch.sample_weight)
    return truth.compute_metrics()


def _check_and_sort_columns(
    scores: Array, labels: Array, weights: Array | None, groups: Array | None = None
) -> tuple[Float64s, Float64s, Float64s, NDArray[np.int64]]:
    """Check the columns, and return them sorted by (group, score, label, weight), (S,) each, float64, groups int64.

    Sorting makes sums independent of the order of samples. Groups are zeros if there are none.
    """
    scores = _to_float64_array(scores)
    labels = _to_float64_array(labels)
    weight_values = np.ones(len(labels)) if weights is None else _to_float64_array(weights)
    if not len(scores) == len(labels) == len(weight_values):
        raise DataError(
            f"got {len(scores)} scores, {len(labels)} labels, {len(weight_values)} weights, wanted as many of each"
        )
    if not np.isfinite(scores).all():
        position = int(np.argmin(np.isfinite(scores)))
        raise NonFiniteError(
            f"score {position} of {len(scores)} is {scores[position]}, wanted a finite number. "
            "The model diverged: lower its learning rate, or look at the loss before it"
        )
    if not ((labels == 0) | (labels == 1)).all():
        raise DataError(
            f"got labels such as {labels[(labels != 0) & (labels != 1)][0]}, wanted 0 or 1"
        )
    if not (np.isfinite(weight_values) & (weight_values >= 0)).all():
        raise DataError("got weights that are negative or not finite, wanted 0 or more")
    if groups is None:
        order = np.lexsort((weight_values, labels, scores))
        return scores[order], labels[order], weight_values[order], np.zeros(len(scores), np.int64)
    group_ids = groups.cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    if group_ids.dtype.kind not in "iu" or len(group_ids.ravel()) != len(scores):
        raise DataError(
            f"got {group_ids.size} groups of {group_ids.dtype}, wanted {len(scores)} integers"
        )
    group_ids = group_ids.ravel().astype(np.int64)
    order = np.lexsort((weight_values, labels, scores, group_ids))
    return scores[order], labels[order], weight_values[order], group_ids[order]


def _to_float64_array(values: Array) -> Float64s:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64).ravel()


def _weighted_mean(values: Float64s, weights: Float64s) -> float:
    total = weights.sum()
    return float((values * weights).sum() / total) if total > 0 else float("nan")


def _auc(scores: Float64s, labels: Float64s, weights: Float64s) -> float:
    positive = labels * weights
    negative = (1 - labels) * weights
    total = positive.sum() * negative.sum()
    if total == 0:
        return float("nan")
    starts = np.flatnonzero(np.diff(scores, prepend=-np.inf))  # each run of equal scores
    positive_by_run = np.add.reduceat(positive, starts)
    negative_by_run = np.add.reduceat(negative, starts)
    negative_below = np.cumsum(negative_by_run) - negative_by_run
    return float((positive_by_run * (negative_below + negative_by_run / 2)).sum() / total)


def _log_loss(probabilities: Float64s, labels: Float64s, weights: Float64s) -> float:
    """Compute the weighted mean of -log of the probability of the true label, in nats, clipped to [CLIP, 1 - CLIP]."""
    if len(probabilities) and not (probabilities[0] >= 0 and probabilities[-1] <= 1):
        raise DataError(
            f"got probabilities {probabilities[0]} .. {probabilities[-1]}, wanted 0 .. 1. "
            "Apply a sigmoid to the logits first"
        )
    return _weighted_mean(compute_log_losses(probabilities, labels), weights)


def compute_log_losses(probabilities: Float64s, labels: Float64s) -> Float64s:
    """Compute -log of the probability of each sample's label 0 or 1, (S,), in nats, clipped to [CLIP, 1 - CLIP]."""
    clipped = np.clip(probabilities, CLIP, 1 - CLIP)
    return -np.where(labels == 1, np.log(clipped), np.log1p(-clipped))


def _group_auc(
    scores: Float64s, labels: Float64s, weights: Float64s, groups: NDArray[np.int64]
) -> float:
    """Compute `group_auc` of columns (S,) that are sorted by group and then score."""
    if not len(scores):
        return float("nan")
    new_group = np.append(True, groups[1:] != groups[:-1])
    starts = np.flatnonzero(new_group | np.append(True, scores[1:] != scores[:-1]))  # (R,)
    positive = np.add.reduceat(labels * weights, starts)
    negative = np.add.reduceat((1 - labels) * weights, starts)
    firsts = np.flatnonzero(new_group[starts])  # (G,): each group's first run
    group_of_run = np.cumsum(new_group[starts]) - 1  # (R,): its group
    below = np.cumsum(negative) - negative
    below -= below[firsts][group_of_run]
    positives = np.add.reduceat(positive, firsts)
    negatives = np.add.reduceat(negative, firsts)
    correct_pairs = np.add.reduceat(positive * (below + negative / 2), firsts)
    has_both_classes = (positives > 0) & (negatives > 0)
    aucs = correct_pairs[has_both_classes] / (
        positives[has_both_classes] * negatives[has_both_classes]
    )
    return _weighted_mean(aucs, (positives + negatives)[has_both_classes])


def _normalized_entropy(probabilities: Float64s, labels: Float64s, weights: Float64s) -> float:
    """Compute log_loss divided by that of always predicting the mean label (He et al. 2014). Below 1 beats the mean."""
    rate = _weighted_mean(labels, weights)
    if not 0 < rate < 1:
        return float("nan")
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return _log_loss(probabilities, labels, weights) / float(entropy)


def _calibration(probabilities: Float64s, labels: Float64s, weights: Float64s) -> float:
    """Compute mean probability / mean label (He et al. 2014): above 1 overestimates; nan without positives."""
    actual = (labels * weights).sum()
    return float((probabilities * weights).sum() / actual) if actual > 0 else float("nan")


def _expected_calibration_error(
    probabilities: Float64s, labels: Float64s, weights: Float64s
) -> float:
    """Compute the weighted mean of |mean probability - mean label| over `BINS` equal ranges (Guo et al. 2017)."""
    if not weights.sum() > 0:
        return float("nan")
    bin_index = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bin_index, (probabilities - labels) * weights, minlength=BINS)
    return float(np.abs(gaps).sum() / weights.sum())
