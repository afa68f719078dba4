"""How well probabilities rank and predict: exact, in float64, by sorting. The slow twins are in the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Batch
from colonnade.errors import DataError, NonFiniteError

CLIP = 1e-7
"""log_loss moves probabilities this far from 0 and 1: the resolution of a float32 near 1."""

Array = Tensor | NDArray
Float64s = NDArray[np.float64]


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float:
    """Area under the ROC curve: the chance that a positive sample scores above a negative one, ties half.

    All (S,) or (S, 1); labels 0 or 1; weights >= 0. nan where one class has no weight. Raises
    NonFiniteError for a score that is not finite, DataError for other labels, weights or lengths.
    """
    return _auc(*_columns(scores, labels, weights))


def log_loss(probabilities: Array, labels: Array, weights: Array | None = None) -> float:
    """Weighted mean of -log of the probability given to what happened, in nats; nan without samples.

    Arguments as for `auc`; probabilities in [0, 1], clipped to [CLIP, 1 - CLIP].
    """
    return _log_loss(*_columns(probabilities, labels, weights))


@dataclass(slots=True)
class Evaluation:
    """Collects predictions batch by batch, on the CPU: 12 bytes per sample (20 with float64).

    The result does not depend on the order in which samples came, to the last bit: ranks may pool
    theirs by adding one another's `columns()`.
    """

    _parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, probability: Tensor, label: Tensor, weight: Tensor | None = None) -> None:
        """One batch: (B,) or (B, 1) each, on any device; copied, so the caller may reuse its memory."""
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
        self._parts.append((probability, label, weight))

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything added: probability, label, weight, (S,) each."""
        if not self._parts:
            return torch.empty(0), torch.empty(0), torch.empty(0)
        probability, label, weight = (
            torch.cat(column) for column in zip(*self._parts, strict=True)
        )
        return probability, label, weight

    def result(self) -> dict[str, float]:
        """auc, log_loss, num_samples (a count, weights aside) and positive_rate (weighted)."""
        columns = _columns(*self.columns())
        _, labels, weights = columns
        return {
            "auc": _auc(*columns),
            "log_loss": _log_loss(*columns),
            "num_samples": float(len(labels)),
            "positive_rate": _mean(labels, weights),
        }


def ceiling(batches: Iterable[Batch], *, task: int = 0) -> dict[str, float]:
    """What a model that knew the truth would reach: the batches' `key` is the true probability (data/synthetic.py),
    (B,), or (B, tasks) of several tasks."""
    truth = Evaluation()
    for batch in batches:
        if not isinstance(batch.key, Tensor) or batch.label is None:
            raise DataError(
                "got a batch without labels or without true probabilities in its key; "
                "only synthetic streams have a ceiling that is known"
            )
        truth.add(
            batch.key.reshape(batch.size, -1)[:, task], batch.label[:, task], batch.sample_weight
        )
    return truth.result()


def _columns(
    scores: Array, labels: Array, weights: Array | None
) -> tuple[Float64s, Float64s, Float64s]:
    """Checked, (S,) float64 each, sorted by (score, label, weight) so that no sum depends on the order given."""
    scores, labels = _float64(scores), _float64(labels)
    ones = np.ones(len(labels)) if weights is None else _float64(weights)
    if not len(scores) == len(labels) == len(ones):
        raise DataError(
            f"got {len(scores)} scores, {len(labels)} labels, {len(ones)} weights, wanted as many of each"
        )
    if not np.isfinite(scores).all():
        at = int(np.argmin(np.isfinite(scores)))
        raise NonFiniteError(
            f"score {at} of {len(scores)} is {scores[at]}, wanted a finite number. "
            "The model diverged: lower its learning rate, or look at the loss before it"
        )
    if not ((labels == 0) | (labels == 1)).all():
        raise DataError(
            f"got labels such as {labels[(labels != 0) & (labels != 1)][0]}, wanted 0 or 1"
        )
    if not (np.isfinite(ones) & (ones >= 0)).all():
        raise DataError("got weights that are negative or not finite, wanted 0 or more")
    order = np.lexsort((ones, labels, scores))
    return scores[order], labels[order], ones[order]


def _float64(values: Array) -> Float64s:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64).ravel()


def _mean(values: Float64s, weights: Float64s) -> float:
    total = weights.sum()
    return float((values * weights).sum() / total) if total > 0 else float("nan")


def _auc(scores: Float64s, labels: Float64s, weights: Float64s) -> float:
    positive, negative = labels * weights, (1 - labels) * weights
    total = positive.sum() * negative.sum()
    if total == 0:
        return float("nan")
    starts = np.flatnonzero(np.diff(scores, prepend=-np.inf))  # each run of equal scores
    positive_by_run = np.add.reduceat(positive, starts)
    negative_by_run = np.add.reduceat(negative, starts)
    negative_below = np.cumsum(negative_by_run) - negative_by_run
    return float((positive_by_run * (negative_below + negative_by_run / 2)).sum() / total)


def _log_loss(probabilities: Float64s, labels: Float64s, weights: Float64s) -> float:
    if len(probabilities) and not (probabilities[0] >= 0 and probabilities[-1] <= 1):
        raise DataError(
            f"got probabilities {probabilities[0]} .. {probabilities[-1]}, wanted 0 .. 1. "
            "Apply a sigmoid to the logits first"
        )
    clipped = np.clip(probabilities, CLIP, 1 - CLIP)
    return _mean(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped)), weights)
