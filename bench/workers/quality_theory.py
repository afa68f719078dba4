"""Logistic regression whose weights are read late: what `docs/concepts/staleness.md` derives, and what a run measures.

A sample has ACTIVE of the ACTIVE / alpha weights, each times 1 or -1, and a label by the planted weights. Training by
SGD begins at the planted weights, so that what it loses in the end is the noise of its steps alone. `COPIES` runs go
side by side, with samples of their own.

Legend: C copies, A active weights of a sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.quality_case import Run

SHARES = (0.001, 0.01, 0.1, 1.0)
STEPS_LATE = (0, 1, 4, 16, 64)
COPIES, ACTIVE = 64, 4
RATE = 0.05
SIGNAL = 0.5
"""Standard deviation of the planted weights."""
USES = 20_000
"""Steps that use a weight, of a run; MOST_STEPS where that is less."""
MOST_STEPS = 200_000
CHUNK = 1000

Values = dict[str, list[float]]


def train_late(alpha: float, late: int, run: Run) -> Values:
    """Train with weights that miss the newest `late` updates. Return the loss above that of the planted weights, by
    copy, over the second half of the run, and what theory says of it."""
    steps = min(MOST_STEPS, round(USES / alpha)) // (50 if run.is_quick else 1)
    generator = torch.Generator().manual_seed(run.seed)
    num_weights = round(ACTIVE / alpha)
    planted = SIGNAL * torch.randn(COPIES, num_weights, generator=generator)
    read = planted.clone()  # the weights of `late` steps ago
    line: list[tuple[Tensor, Tensor]] = []
    excess, slope = torch.zeros(COPIES), 0.0
    for step in range(steps):
        if step % CHUNK == 0:
            shape = (min(CHUNK, steps - step), COPIES, ACTIVE)
            signs = 2.0 * torch.randint(2, shape, generator=generator) - 1
            # One weight of each of ACTIVE equal parts: no sample has a weight twice.
            part = num_weights // ACTIVE
            ids = torch.randint(part, shape, generator=generator) + part * torch.arange(ACTIVE)
            luck = torch.rand(shape[:2], generator=generator)
        used, sign = ids[step % CHUNK], signs[step % CHUNK]
        truth = (planted.gather(1, used) * sign).sum(1)
        logit = (read.gather(1, used) * sign).sum(1)
        label = (luck[step % CHUNK] < truth.sigmoid()).float()
        line.append((used, RATE * (label - logit.sigmoid())[:, None] * sign))
        if len(line) > late:
            read.scatter_add_(1, *line.pop(0))
        if step >= steps // 2:
            excess += truth.sigmoid() * (truth - logit) + (
                logit.exp().log1p() - truth.exp().log1p()
            )
            slope += float((truth.sigmoid() * (-truth).sigmoid()).mean())
    measured = steps - steps // 2
    predicted = predict_loss(slope / measured, late * alpha)
    return {"excess loss": (excess / measured).tolist(), "predicted loss": [predicted]}


def predict_loss(curvature: float, missed: float) -> float:
    """Return the stationary loss above the minimum, of steps that miss `missed` updates of each weight.

    curvature: mean p (1 - p), of the loss in a logit. The variance of a weight is that of a delayed Langevin equation,
    of delay `missed` steps and the half that a step itself is late."""
    angle = RATE * curvature * (missed + 0.5)
    if angle >= math.pi / 2:
        return math.inf
    return ACTIVE * curvature * RATE / 4 * (1 + math.sin(angle)) / math.cos(angle)
