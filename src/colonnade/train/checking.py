"""What a plan foretold beside what was measured: samples per second, seconds of a step, bytes between ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from colonnade.plan.plan import Plan
from colonnade.topology.mesh import Mesh

PURPOSES = ("route", "fetch", "push")
"""Of what a plan foretells: ids, rows and their gradients."""


def mean_sent(mesh: Mesh, steps: int) -> dict[str, float]:
    """Collective: bytes that a rank sent per step, the mean over ranks, by purpose."""
    if mesh.num_ranks == 1 or not steps:
        return {}
    counted = [float(mesh.traffic.bytes_of(purpose)) for purpose in PURPOSES]  # before this sends
    told = mesh.all_gather("control", torch.tensor(counted, dtype=torch.float64))
    means = torch.stack(list(told)).mean(0) / steps
    return dict(zip(PURPOSES, means.tolist(), strict=True))


def checked(
    plan: Plan, rate: float, batch_size: int, sent: Mapping[str, float]
) -> dict[str, float]:
    """As a run's summary has it; nothing where the plan foretold nothing. `rate`: samples per second of all ranks;
    errors are relative to what was measured."""
    foretold = plan.prediction
    if foretold is None or not rate:
        return {}
    found = {
        "predicted_samples_per_second": foretold["samples_per_second"],
        "prediction_error": foretold["samples_per_second"] / rate - 1,
    }
    if foretold.get("step_seconds"):
        found["predicted_step_seconds"] = foretold["step_seconds"]
        found["step_seconds"] = batch_size / rate
    counted = sum(sent.values())
    if counted:
        said = sum(sum(links.values()) for links in foretold["sent"].values())
        found |= {
            "predicted_sent_bytes": said,
            "counted_sent_bytes": counted,
            "sent_error": said / counted - 1,
        }
    return found
