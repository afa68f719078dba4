"""Objectives: loss, evaluation metrics and predictions of a model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.errors import ConfigError, DataError
from colonnade.train.metrics import MetricFunction, evaluate


class Objective(Protocol):
    """Loss, evaluation and predictions of a model: its attribute `objective`, or `fit(objective=...)`.

    It has no state of its own: learned values are in the model. It may also have

        metrics                 allowed names for `train.monitor`; other names then raise before training
        check_source(source)    raises ConfigError, before training, for a validation or test part that `evaluate`
                                cannot use
        prepare_step(trainer)   called on every rank before each step; False ends training, as a request to stop does.
                                It may wait only at steps that have a checkpoint
        step_metrics            numbers of this rank's last step by name, for the record
        predict(model, batch)   result of `Predictor` for a batch; without it a predictor raises
        outputs                 names of the columns of this result that `colonnade predict` writes, instead of one
                                score per label
    """

    monitor: str
    """Metric that chooses the best step unless `train.monitor` names another. Without `train.monitor_mode`, of a metric
    that `train.best.DIRECTIONS` does not have, higher is better unless its name contains loss, entropy, error or mean
    rank."""

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute this rank's part of the mean over the global batch: the ranks' losses add up to it."""
        ...

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Compute the metrics of one pass over `source`, the same on every rank. Collective; changes nothing."""
        ...


class Probability:
    """Objective of models whose `model(batch)` gives one logit per label (B, tasks) of its being 1: cross entropy."""

    monitor = "auc"
    metrics: tuple[str, ...] = (
        "auc", "log_loss", "normalized_entropy", "expected_calibration_error", "group_auc"
    )  # fmt: skip
    user_metrics: Mapping[str, MetricFunction] = MappingProxyType({})

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute the cross entropy: `weighted_loss`."""
        return weighted_loss(model(batch), batch)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Compute all metrics of probabilities over `source`: `metrics.evaluate`."""
        return evaluate(model, source, batch_size, mesh, self.user_metrics)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the probabilities of label 1, (B, tasks) float64."""
        return torch.sigmoid(model(batch).double())


def get_objective(model: nn.Module) -> Objective:
    """Return the model's own `objective`, or Probability where it has none. Raises ConfigError."""
    objective = getattr(model, "objective", None)
    if objective is None:
        return Probability()
    if missing := [
        name for name in ("monitor", "loss", "evaluate") if not hasattr(objective, name)
    ]:
        raise ConfigError(
            f"{type(model).__name__}.objective: got a {type(objective).__name__} without {', '.join(missing)}, wanted "
            "a colonnade.Objective; add these, or rename the attribute"
        )
    return objective


def check_scores_samples(model: nn.Module) -> None:
    """Raise ConfigError for a model that does not score each sample by itself: its objective has `outputs`."""
    if hasattr(get_objective(model), "outputs"):
        raise ConfigError(
            f"got a {type(model).__name__}, whose predictions need the training ratings of each user, wanted a model "
            "that scores each sample by itself; predict files with colonnade predict"
        )


def add_metrics(objective: Any, functions: Mapping[str, MetricFunction]) -> Objective:
    """Return the objective with a user's metrics beside its own. Raises ConfigError if it cannot compute them."""
    if not isinstance(functions, Mapping):
        raise ConfigError(f"metrics: got {functions!r}, wanted a mapping from names to functions")
    if not functions:
        return objective
    if not hasattr(objective, "user_metrics"):
        raise ConfigError(
            f"got metrics with a {type(objective).__name__}, wanted an objective of probabilities, or loss=: compute "
            "them in the `evaluate` of this objective"
        )
    if names := {*functions} & {*objective.metrics}:
        raise ConfigError(
            f"got metrics[{min(names)!r}], which the objective has already; give it another name"
        )
    extended = copy(objective)
    extended.user_metrics = functions
    extended.metrics = (*objective.metrics, *functions)
    return extended


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Compute this rank's part of the binary cross entropy's mean over the global batch; the ranks' parts add up.

    logits (B, tasks), batch.label (B, tasks). A NaN label is unknown and adds nothing. The divisor, the batch's weight
    times its tasks, does not depend on the number of NaN labels. Raises ConfigError, DataError for wrong shapes or
    labels.
    """
    if batch.label is None:
        raise DataError("the batch has no label; training needs one column of labels per task")
    if logits.shape != batch.label.shape:
        raise ConfigError(
            f"got logits {tuple(logits.shape)} for labels {tuple(batch.label.shape)}; "
            "the model's tasks and the data's label columns must agree"
        )
    if bool(((batch.label < 0) | (batch.label > 1)).any()):  # NaN is neither
        raise DataError(
            f"got labels from {batch.label.nan_to_num().min():g} to {batch.label.nan_to_num().max():g}, wanted 0 to 1 "
            "for cross entropy; make labels of numbers with `at_least`, train gplvmf on ratings, or pass your own loss "
            "to colonnade.fit"
        )
    label = batch.label.to(logits)
    weight = None if batch.sample_weight is None else batch.sample_weight[:, None].to(logits)
    is_unlabelled = label.isnan()
    if bool(is_unlabelled.any()):
        is_labelled = ~is_unlabelled
        weight = None if weight is None else weight.expand_as(label)[is_labelled]
        labelled_logits = logits[is_labelled]
        label = label[is_labelled]
    else:
        labelled_logits = logits
    total = binary_cross_entropy_with_logits(labelled_logits, label, weight=weight, reduction="sum")
    return total / max(batch.world_weight * logits.shape[1], 1e-12)
