"""Whether a checkpoint belongs to a model: what must agree, as plain JSON, so that a difference can be named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import CheckpointError
from colonnade.interaction import TowerModule
from colonnade.lookup.layout import Declaration
from colonnade.row_state import dense_state_dict, load_dense_state_dict
from colonnade.store.policies import retention_words
from colonnade.table import Table, TableSide


def check_model(
    folder: Path, header: Mapping[str, Any], declaration: Declaration, model: torch.nn.Module
) -> None:
    """Raises CheckpointError, naming the first difference, unless the checkpoint is of such a model."""
    wanted = fingerprint(declaration, model)
    theirs, ours = (each.get("towers", {}) for each in (header["model"], wanted))
    if theirs != ours:
        raise CheckpointError(
            f"{folder} was saved with other towers: {difference(theirs, ours)}. A tower's module belongs to its "
            "features, so another partition or module starts it anew: go on with the same, or take rows and whatever "
            f"else agrees to a new run with train.warm_start={folder}"
        )
    if header["model"] != wanted:
        raise CheckpointError(
            f"{folder} was saved by another model: {difference(header['model'], wanted)}. "
            "Train the same model, or give this run another folder"
        )


def fingerprint(declaration: Declaration, model: torch.nn.Module) -> dict[str, Any]:
    """What must agree for a checkpoint to belong to a model; plain JSON, so that a difference can be named."""
    towers = tower_words(declaration)
    return {
        **({"towers": towers} if towers else {}),
        "tables": {
            table.name: {
                "dim": dict(table.dim) if isinstance(table.dim, Mapping) else table.dim,
                "rows": table.rows,
                "optimizer": "+".join(part.optimizer.name for part in table.parts),
                "dtype": dtype_words(table),
                **retention_words(table.admission, table.eviction),
                **({} if table.hashes is None else {"hashes": table.hashes}),
            }
            for table in declaration.tables
        },
        "features": {f.name: [f.table, f.pooling] for f in declaration.features},
        "dense": {name: list(value.shape) for name, value in dense_weights(model).items()},
    }


def tower_words(declaration: Declaration) -> dict[str, Any]:
    """By name, consumers that are evaluated whole (tower modules): fields, module, floats of a sample in and out."""
    dims = {field.name: field.dim for field in declaration.fields}
    found = {}
    for name, consumer in declaration.consumers.items():
        interaction, each = consumer.interaction, [dims[field] for field in consumer.features]
        if interaction.merge == "whole":
            kind = interaction.module if isinstance(interaction, TowerModule) else interaction
            found[name] = {
                "features": list(consumer.features),
                "module": type(kind).__name__,
                "floats": [sum(each), interaction.width(max(each))],
            }
    return found


def dense_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dense network's tensors by name: no rows, no extra state of modules."""
    state = dense_state_dict(model).items()
    return {name: value for name, value in state if not name.endswith("_extra_state")}


def load_dense(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put `dense_weights` back."""
    extra = {k: v for k, v in dense_state_dict(model).items() if k.endswith("_extra_state")}
    load_dense_state_dict(model, {**extra, **weights})


def identity_of(table: Table) -> str:
    """What the bytes of a table's records mean."""
    dims = {part.name: part.dim for part in table.parts}
    optimizers = "+".join(part.optimizer.name for part in table.parts)
    # Hot and cold rows have the records of whole tables; slices of columns do not.
    name = table.origin[0] if isinstance(table, TableSide) else table.name
    return identity_words(name, dims, optimizers, dtype_words(table))


def identity_words(table: str, dims: Mapping[str, int], optimizers: str, dtype: str) -> str:
    """`identity_of`, as a checkpoint's word has it; dims by part."""
    words = "+".join(f"{part}:{dim}" if part else f"{dim}" for part, dim in dims.items())
    return f"{table}/{words}/{optimizers}/{dtype}"


def dtype_words(table: Table) -> str:
    return f"{table.dtype} with master" if table.master else table.dtype


def difference(saved: Any, wanted: Any, path: str = "") -> str:
    """The first place where two plain values differ, in words."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in [*saved, *wanted]:
            here = f"{path}.{key}" if path else str(key)
            if key not in saved:
                return f"it has no {here}"
            if key not in wanted:
                return f"it has {here}, this model has not"
            if saved[key] != wanted[key]:
                return difference(saved[key], wanted[key], here)
    return f"{path} was {saved}, is {wanted}"
