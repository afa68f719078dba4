"""Check whether a checkpoint belongs to a model, by fingerprints in plain JSON that show the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import CheckpointError
from colonnade.interaction import TowerModule
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.row_state import dense_state_dict, load_dense_state_dict
from colonnade.store.policies import describe_retention
from colonnade.table import Table, TableSide


def check_model_matches_checkpoint(
    folder: Path,
    header: Mapping[str, Any],
    declaration: EmbeddingDeclaration,
    model: torch.nn.Module,
) -> None:
    """Raise CheckpointError that names the first difference unless the checkpoint belongs to this model."""
    own_fingerprint = build_model_fingerprint(declaration, model)
    saved_towers, own_towers = (
        model_facts.get("towers", {}) for model_facts in (header["model"], own_fingerprint)
    )
    if saved_towers != own_towers:
        raise CheckpointError(
            f"{folder} was saved with other towers: {find_first_difference(saved_towers, own_towers)}. "
            "A tower's module belongs to its features, so another partition or module starts it anew: "
            "go on with the same, or take rows and whatever else agrees to a new run with "
            f"train.warm_start={folder}"
        )
    if header["model"] != own_fingerprint:
        raise CheckpointError(
            f"{folder} was saved by another model: {find_first_difference(header['model'], own_fingerprint)}. "
            "Train the same model, or give this run another folder"
        )


def build_model_fingerprint(
    declaration: EmbeddingDeclaration, model: torch.nn.Module
) -> dict[str, Any]:
    """Return the facts that a checkpoint and a model must share, as plain JSON."""
    towers = describe_declared_towers(declaration)
    return {
        **({"towers": towers} if towers else {}),
        "tables": {
            table.name: {
                "dim": dict(table.dim) if isinstance(table.dim, Mapping) else table.dim,
                "rows": table.rows,
                "optimizer": "+".join(part.optimizer.name for part in table.parts),
                "dtype": describe_dtype(table),
                **describe_retention(table.admission, table.eviction),
                **({} if table.hashes is None else {"hashes": table.hashes}),
            }
            for table in declaration.tables
        },
        "features": {f.name: [f.table, f.pooling] for f in declaration.features},
        "dense": {name: list(value.shape) for name, value in dense_weights(model).items()},
    }


def describe_declared_towers(declaration: EmbeddingDeclaration) -> dict[str, Any]:
    """Describe tower modules by name: their fields, module, and floats per sample in and out."""
    dims = {field.name: field.dim for field in declaration.fields}
    descriptions = {}
    for name, consumer in declaration.consumers.items():
        interaction = consumer.interaction
        field_dims = [dims[field] for field in consumer.features]
        if interaction.merge == "whole":
            kind = interaction.module if isinstance(interaction, TowerModule) else interaction
            descriptions[name] = {
                "features": list(consumer.features),
                "module": type(kind).__name__,
                "floats": [sum(field_dims), interaction.width(max(field_dims))],
            }
    return descriptions


def dense_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dense network's tensors by name, without rows and without extra state of modules."""
    state = dense_state_dict(model).items()
    return {name: value for name, value in state if not name.endswith("_extra_state")}


def load_dense(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights as returned by `dense_weights`."""
    extra = {k: v for k, v in dense_state_dict(model).items() if k.endswith("_extra_state")}
    load_dense_state_dict(model, {**extra, **weights})


def get_record_identity(table: Table) -> str:
    """Return the identity of a table's records: name, dims, optimizers and dtype."""
    dims = {part.name: part.dim for part in table.parts}
    optimizers = "+".join(part.optimizer.name for part in table.parts)
    # Hot and cold rows have records of all columns; slices of columns do not.
    name = table.origin[0] if isinstance(table, TableSide) else table.name
    return build_record_identity(name, dims, optimizers, describe_dtype(table))


def build_record_identity(table: str, dims: Mapping[str, int], optimizers: str, dtype: str) -> str:
    """Build the identity of records from the values in a checkpoint's header. dims: by part."""
    dims_text = "+".join(f"{part}:{dim}" if part else f"{dim}" for part, dim in dims.items())
    return f"{table}/{dims_text}/{optimizers}/{dtype}"


def describe_dtype(table: Table) -> str:
    """Describe the dtype of a table: "bfloat16 with master", "float32", ..."""
    return f"{table.dtype} with master" if table.master else table.dtype


def find_first_difference(saved_value: Any, current_value: Any, value_path: str = "") -> str:
    """Describe the first difference between two plain values."""
    if isinstance(saved_value, dict) and isinstance(current_value, dict):
        for key in [*saved_value, *current_value]:
            key_path = f"{value_path}.{key}" if value_path else str(key)
            if key not in saved_value:
                return f"it has no {key_path}"
            if key not in current_value:
                return f"it has {key_path}, this model does not"
            if saved_value[key] != current_value[key]:
                return find_first_difference(saved_value[key], current_value[key], key_path)
    return f"{value_path} was {saved_value}, is {current_value}"
