"""What a plan foretold beside what was measured: samples per second, seconds of a step, bytes between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from colonnade.embedding import EmbeddingCollection
from colonnade.plan.plan import Plan
from colonnade.store.tier_counts import tier_counts
from colonnade.topology.mesh import Mesh
from colonnade.train.record import table_sizes

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


def rows_of_first_owner(mesh: Mesh, collection: EmbeddingCollection) -> dict[str, Any]:
    """Collective where there are servers: as a run's summary has it, where rows came from, by tier and table. Rank 0's
    own where it has rows."""
    store = collection.store
    found = {
        "row_sources": asdict(store.sources),
        "tiers": {name: counts.plain() for name, counts in tier_counts(store).items()},
        "resident_bytes": store.resident_bytes(),
        "tables": table_sizes(collection),
    }
    if not mesh.world.has_servers:
        return found
    heard = mesh.all_gather_bytes("control", json.dumps(found).encode())
    return json.loads(heard[mesh.world.owners[0]])


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
