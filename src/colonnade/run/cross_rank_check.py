"""Checks that all ranks have equal settings, models and plans before anything is opened or written.

A difference raises on every rank. Facts are plain values by dotted name ("train.lr"). The message lists the value of
each rank, because no rank's value is more right than another's.
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
from colonnade.comm.differences import find_disagreements, format_differences
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig
from colonnade.data.contract import Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import WorldError
from colonnade.formats import flatten_to_dotted_names
from colonnade.plan.plan import Plan

Facts = Mapping[str, Any]


def check_equal_on_all_ranks(mesh: Mesh, own_facts: Facts, advice: str) -> None:
    """Raise WorldError on every rank if facts differ between ranks. Collective, on the channel `control`.

    advice: end of the message, which says what to do.
    """
    if mesh.num_ranks == 1:
        return
    text = json.dumps(flatten_to_dotted_names(own_facts), default=str).encode()
    digests = mesh.all_gather_bytes("control", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    facts_by_rank = [
        json.loads(text_of_rank) for text_of_rank in mesh.all_gather_bytes("control", text)
    ]
    if differences := find_disagreements(facts_by_rank):
        raise WorldError(f"{format_differences(differences)}; {advice}")


def check_config_on_all_ranks(config: RunConfig, mesh: Mesh) -> None:
    """Check that all ranks have the same configuration. Collective; the first call of a run.

    Versions are compared earlier, when ranks join the world.
    """
    check_equal_on_all_ranks(
        mesh, config.model_dump(), "start every rank with the same configuration"
    )


def check_model_on_all_ranks(
    model: torch.nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    mesh: Mesh,
    **choices: Any,
) -> None:
    """Check that all ranks have the same data, tables, features, dense network and `choices`. Collective.

    choices: further arguments of the caller, by name.
    """
    facts = {**collect_data_facts(data), **collect_model_facts(model, collection), **choices}
    check_equal_on_all_ranks(
        mesh, facts, "give every rank the same data, and build the same model on each"
    )


def check_plan_on_all_ranks(plan: Plan | None, optimizer: Optimizer, mesh: Mesh) -> None:
    """Check that all ranks have the same plan and dense optimizer. Collective.

    plan: None if the collection is open already.
    """
    facts: dict[str, Any] = {
        "dense_optimizer": type(optimizer).__name__,
        "dense_group": {
            str(number): {name: value for name, value in group.items() if name != "params"}
            for number, group in enumerate(optimizer.param_groups)
        },
    }
    if plan is not None:
        plan_facts = asdict(plan)
        plan_facts["table"] = {
            table_facts.pop("name"): table_facts for table_facts in plan_facts.pop("tables")
        }
        facts["plan"] = plan_facts
    check_equal_on_all_ranks(mesh, facts, "give every rank the same plan and optimizer")


def collect_model_facts(model: torch.nn.Module, collection: EmbeddingCollection) -> dict[str, Any]:
    """Return the facts of a model: all properties of tables, and names, shapes and dtypes of dense parameters.

    Dense values may differ, because rank 0's are sent to all ranks.
    """
    declaration = collection.declaration
    return {
        "model": type(model).__name__,
        "seed": collection.seed,
        "output": declaration.output,
        "tables": [table.name for table in declaration.tables],
        "features": [feature.name for feature in declaration.features],
        "table": {table.name: _list_dataclass_fields(table) for table in declaration.tables},
        "feature": {
            feature.name: _list_dataclass_fields(feature) for feature in declaration.features
        },
        "consumer": {
            name: [type(consumer.interaction).__name__, *consumer.features]
            for name, consumer in declaration.consumers.items()
        },
        "dense": {
            name: [str(value.dtype), list(value.shape)]
            for name, value in dense_weights(model).items()
        },
    }


def collect_data_facts(data: Splits) -> dict[str, Any]:
    """Return the columns and their kinds, and the sample count of each part ("unknown" if its source has none)."""
    schema = data.train.schema
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    parts |= {f"day {number}": day for number, day in enumerate(data.days)}
    return {
        "schema": {
            "dense": list(schema.dense),
            "labels": list(schema.labels),
            "categorical": [column.name for column in schema.categorical],
            "column": {
                column.name: _list_dataclass_fields(column) for column in schema.categorical
            },
        },
        "samples": {
            name: "unknown" if part.num_samples is None else part.num_samples
            for name, part in parts.items()
            if part is not None
        },
    }


def _list_dataclass_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; nested ones as repr, which keeps the class name that asdict drops."""
    return {
        name: repr(field_value) if hasattr(field_value, "__dataclass_fields__") else field_value
        for name, field_value in (
            (name, getattr(value, name)) for name in value.__dataclass_fields__
        )
        if name != "name"
    }
