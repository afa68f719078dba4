"""What a model is trained for and how it is scored."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from colonnade.batch import Batch
from colonnade.data.contract import Source
from colonnade.errors import ConfigError, DataError
from colonnade.topology.mesh import Mesh
from colonnade.train.evaluate import evaluate


class Objective(Protocol):
    """Stateless: what is learned lives in the model."""

    monitor: str
    """The metric that says which epoch is best; more is better unless its name ends in "loss"."""

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """This rank's part of the mean over the global batch: the ranks' losses add up to it."""
        ...

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Collective: metrics of one pass over `source`, the same on every rank; no trace on the run."""
        ...


class Probability:
    """`model(batch)` gives one logit per label, (B, tasks), of its being 1: binary cross entropy."""

    monitor = "auc"

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        return weighted_loss(model(batch), batch)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        return evaluate(model, source, batch_size, mesh)


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy; this rank's part of the mean over the global batch: the ranks' losses add up to it.

    logits (B, tasks), batch.label (B, tasks). A NaN label is one nobody knows: it adds nothing, and the divisor, the
    batch's weight times its tasks, does not depend on how many there are. Raises ConfigError, DataError where they
    do not fit.
    """
    if batch.label is None:
        raise DataError("the batch has no label; training needs one column of labels per task")
    if logits.shape != batch.label.shape:
        raise ConfigError(
            f"got logits {tuple(logits.shape)} for labels {tuple(batch.label.shape)}; "
            "the model's tasks and the data's label columns must agree"
        )
    label = batch.label.to(logits)
    weight = None if batch.sample_weight is None else batch.sample_weight[:, None].to(logits)
    unknown = label.isnan()
    if bool(unknown.any()):
        known = ~unknown
        weight = None if weight is None else weight.expand_as(label)[known]
        logits_known, label = logits[known], label[known]
    else:
        logits_known = logits
    total = binary_cross_entropy_with_logits(logits_known, label, weight=weight, reduction="sum")
    return total / max(batch.world_weight * logits.shape[1], 1e-12)
