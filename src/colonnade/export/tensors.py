"""Names and shapes of a model's inputs, and batches from and to tensors of these names.

`dense` is (B, n) float32. A feature with one id per sample is (B,) int64. A feature F with any number of ids per sample
is (E,) int64, the ids of all samples one after another, with `F.lengths` (B,) int64. The names are those of
`colonnade serve`.

Legend: B samples, n dense columns, E ids of one feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Schema
from colonnade.errors import ConfigError, DataError
from colonnade.lookup.layout import EmbeddingDeclaration

DENSE = "dense"
LENGTHS = ".lengths"


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """Input of a model. shape: numbers, "batch", or "ids of NAME": the number of a feature's ids in the batch."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def list_inputs(schema: Schema, declaration: EmbeddingDeclaration) -> list[ProgramInput]:
    """List the inputs of a whole model, in order. Raises ConfigError if two have one name."""
    several = list_features_with_lengths(schema, declaration)
    inputs = _list_dense_columns(schema)
    for feature in declaration.features:
        if feature.name in several:
            inputs.append(ProgramInput(feature.name, "int64", (f"ids of {feature.name}",)))
            inputs.append(ProgramInput(feature.name + LENGTHS, "int64", ("batch",)))
        else:
            inputs.append(ProgramInput(feature.name, "int64", ("batch",)))
    return _check_names(inputs)


def list_dense_inputs(schema: Schema, declaration: EmbeddingDeclaration) -> list[ProgramInput]:
    """List the inputs of a model's dense part, in order. Raises ConfigError if two have one name."""
    inputs = _list_dense_columns(schema)
    for field in declaration.fields:
        feature = declaration.features[field.feature]
        is_sequence = feature.pooling == "sequence"
        first = f"ids of {feature.name}" if is_sequence else "batch"
        inputs.append(ProgramInput(field.name, declaration.output, (first, field.dim)))
        lengths = ProgramInput(feature.name + LENGTHS, "int64", ("batch",))
        if is_sequence and lengths not in inputs:
            inputs.append(lengths)
    return _check_names(inputs)


def list_features_with_lengths(schema: Schema, declaration: EmbeddingDeclaration) -> list[str]:
    """List the features that have any number of ids per sample."""
    kinds = {column.name: column.kind for column in schema.categorical}
    return [
        feature.name
        for feature in declaration.features
        if kinds.get(feature.name) != "one" or feature.pooling == "sequence"
    ]


def to_tensors(batch: Batch, inputs: Iterable[ProgramInput]) -> dict[str, Tensor]:
    """Return a batch as tensors of these inputs. Raises DataError for a feature that it lacks, and for ids that they
    cannot represent."""
    program_inputs = list(inputs)
    names = {program_input.name for program_input in program_inputs}
    tensors = {}
    for program_input in program_inputs:
        if program_input.name == DENSE:
            tensors[DENSE] = batch.dense
            continue
        is_lengths = (
            program_input.name.endswith(LENGTHS)
            and program_input.name.removesuffix(LENGTHS) in names
        )
        feature = program_input.name.removesuffix(LENGTHS) if is_lengths else program_input.name
        ids = batch.ids.get(feature)
        if ids is None:
            raise DataError(
                f"the batch has no feature {feature!r}; it has {', '.join(sorted(batch.ids))}"
            )
        if ids.weights is not None:
            raise DataError(
                f"feature {feature!r}: got weights of its ids, which programs do not take; score it with `Predictor`"
            )
        if feature + LENGTHS not in names and not bool((ids.counts == 1).all()):
            raise DataError(
                f"feature {feature!r}: got {len(ids.values)} ids for {batch.size} samples, wanted one each"
            )
        tensors[program_input.name] = ids.counts if is_lengths else ids.values
    return tensors


def build_input_batch(inputs: Iterable[ProgramInput], tensors: Mapping[str, np.ndarray]) -> Batch:
    """Build a batch from arrays of these inputs. A feature of one id may also be (B, 1). Raises DataError.

    Only names, types and dimensions are checked here; a `Predictor` checks sizes and ids.
    """
    declared_inputs = list(inputs)
    names = [declared.name for declared in declared_inputs]
    if unknown := sorted(set(tensors) - set(names)):
        raise DataError(f"got an input {unknown[0]!r}, wanted {', '.join(names)}")
    arrays = {
        declared.name: _convert_checked_input(declared, tensors.get(declared.name))
        for declared in declared_inputs
    }
    size = max(len(arrays[k.name]) for k in declared_inputs if k.shape[0] == "batch")
    ids = {}
    for declared in declared_inputs:
        is_lengths = (
            declared.name.endswith(LENGTHS) and declared.name.removesuffix(LENGTHS) in arrays
        )
        if declared.name == DENSE or is_lengths:
            continue
        lengths = arrays.get(declared.name + LENGTHS)
        offsets = None
        if lengths is not None:
            if len(lengths) and int(lengths.min()) < 0:
                raise DataError(
                    f"input {declared.name + LENGTHS!r}: got {int(lengths.min())}, wanted 0 or more ids"
                )
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids[declared.name] = Ids(arrays[declared.name], offsets)
    dense = arrays.get(DENSE)
    return Batch(size, torch.empty(size, 0) if dense is None else dense, ids)


def _convert_checked_input(program_input: ProgramInput, input_array: np.ndarray | None) -> Tensor:
    if input_array is None:
        raise DataError(
            f"got no input {program_input.name!r}, wanted {program_input.dtype} of shape {program_input.shape}"
        )
    if input_array.ndim == 2 and input_array.shape[1:] == (1,) and len(program_input.shape) == 1:
        input_array = input_array[:, 0]
    others = tuple(input_array.shape[1:])
    if (
        str(input_array.dtype) != program_input.dtype
        or others != program_input.shape[1:]
        or input_array.ndim < 1
    ):
        raise DataError(
            f"input {program_input.name!r}: got {input_array.dtype} of shape {input_array.shape}, wanted "
            f"{program_input.dtype} of shape "
            f"{program_input.shape}"
        )
    if program_input.dtype == "float32" and not bool(np.isfinite(input_array).all()):
        raise DataError(f"input {program_input.name!r}: got NaN or inf, wanted finite numbers")
    return torch.from_numpy(np.require(input_array, requirements=["C", "W"]))


def _list_dense_columns(schema: Schema) -> list[ProgramInput]:
    return [ProgramInput(DENSE, "float32", ("batch", len(schema.dense)))] if schema.dense else []


def _check_names(inputs: list[ProgramInput]) -> list[ProgramInput]:
    names = [program_input.name for program_input in inputs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"got two inputs named {repeated[0]!r}, wanted each name once; rename the column and train again"
        )
    return inputs
