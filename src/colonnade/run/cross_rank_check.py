"""What all ranks must agree on before anything is opened or written: a difference is refused on every rank, by name.

Facts are plain values by dotted name ("train.lr"). Nobody's are right: the message says who has what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.optim import Optimizer

from colonnade.checkpoint.fingerprint import dense_weights
from colonnade.comm.differences import disagreements, joined
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig
from colonnade.data.contract import Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import WorldError
from colonnade.plan.plan import Plan

Facts = Mapping[str, Any]


def agree(mesh: Mesh, facts: Facts, advice: str) -> None:
    """Collective, on the channel `control`. Raises WorldError on every rank where any has other facts; `advice` says
    what to do."""
    if mesh.num_ranks == 1:
        return
    text = json.dumps(flatten(facts), default=str).encode()
    digests = mesh.all_gather_bytes("control", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    told = [json.loads(each) for each in mesh.all_gather_bytes("control", text)]
    if found := disagreements(told):
        raise WorldError(f"{joined(found)}; {advice}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 0.1}} -> {"train.lr": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def agree_on_config(config: RunConfig, mesh: Mesh) -> None:
    """Collective, before anything else of a run; versions were agreed on when the world was joined."""
    agree(mesh, config.model_dump(), "start every rank with the same configuration")


def agree_on_model(
    model: torch.nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    mesh: Mesh,
    **choices: Any,
) -> None:
    """Collective: the same columns, samples, tables, features, dense network and `choices` (of the call) everywhere."""
    facts = {**data_facts(data), **model_facts(model, collection), **choices}
    agree(mesh, facts, "give every rank the same data, and build the same model on each")


def agree_on_plan(plan: Plan | None, optimizer: Optimizer, mesh: Mesh) -> None:
    """Collective. `optimizer`: the dense network's. None: the collection was opened by its maker."""
    facts: dict[str, Any] = {
        "dense_optimizer": type(optimizer).__name__,
        "dense_group": {
            str(number): {name: value for name, value in group.items() if name != "params"}
            for number, group in enumerate(optimizer.param_groups)
        },
    }
    if plan is not None:
        told = asdict(plan)
        told["table"] = {each.pop("name"): each for each in told.pop("tables")}
        facts["plan"] = told
    agree(mesh, facts, "give every rank the same plan and optimizer")


def model_facts(model: torch.nn.Module, collection: EmbeddingCollection) -> dict[str, Any]:
    """Of tables all that training goes by; of dense parameters names, shapes and dtypes, for rank 0's values count."""
    declared = collection.declaration
    return {
        "model": type(model).__name__,
        "seed": collection.seed,
        "output": declared.output,
        "tables": [table.name for table in declared.tables],
        "features": [feature.name for feature in declared.features],
        "table": {table.name: _plain(table) for table in declared.tables},
        "feature": {feature.name: _plain(feature) for feature in declared.features},
        "consumer": {
            name: [type(consumer.interaction).__name__, *consumer.features]
            for name, consumer in declared.consumers.items()
        },
        "dense": {
            name: [str(value.dtype), list(value.shape)]
            for name, value in dense_weights(model).items()
        },
    }


def data_facts(data: Splits) -> dict[str, Any]:
    """Columns with their kinds, and how many samples each part has ("unknown": its source does not say)."""
    schema = data.train.schema
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    parts |= {f"day {number}": day for number, day in enumerate(data.days)}
    return {
        "schema": {
            "dense": list(schema.dense),
            "labels": list(schema.labels),
            "categorical": [column.name for column in schema.categorical],
            "column": {column.name: _plain(column) for column in schema.categorical},
        },
        "samples": {
            name: "unknown" if part.num_samples is None else part.num_samples
            for name, part in parts.items()
            if part is not None
        },
    }


def _plain(value: Any) -> dict[str, Any]:
    """A declaration as facts: what a part of it is called first (asdict forgets)."""
    return {
        name: repr(each) if hasattr(each, "__dataclass_fields__") else each
        for name, each in ((name, getattr(value, name)) for name in value.__dataclass_fields__)
        if name != "name"
    }
