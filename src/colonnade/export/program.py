"""Programs of torch.export: a whole model, from ids to scores, and its dense part alone.

    program(**inputs) -> scores (B, tasks) float64

Inputs are tensors by name: `dense` (B, n) float32; a feature with one id per sample (B,) int64; a feature with several
ids per sample (E,) int64, and its `NAME.lengths` (B,) int64. The dense part takes `dense`, and instead of ids each
field's vectors (B, dim), or of a sequence the vectors of its ids (E, dim) and its lengths.

Legend: B samples, n dense columns, E ids of one feature, T tables.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Schema
from colonnade.embedding import EmbeddingCollection, find_collection
from colonnade.errors import ConfigError, CorruptionError
from colonnade.export.lookup import format_layout
from colonnade.export.tensors import (
    DENSE,
    LENGTHS,
    ProgramInput,
    list_dense_inputs,
    list_features_with_lengths,
    list_inputs,
)
from colonnade.files.checksums import open_checked
from colonnade.interaction.contract import SQUARES
from colonnade.lookup.layout import LookupField, list_lookup_outputs
from colonnade.lookup.outputs import build_outputs
from colonnade.lookup.views import slices_of
from colonnade.ops.interaction import plain_cross, plain_fm, plain_pairwise_dot
from colonnade.ops.linear import plain_linear
from colonnade.predict.predictor import Predictor
from colonnade.publish.model_files import REMEDY, Export, read_export
from colonnade.table import Feature
from colonnade.topology.sharding import row_wise
from colonnade.train.objective import check_scores_samples, get_objective

EXAMPLE_SIZE = 7
"""Samples of the batch that is traced: a number that no layer is likely to have as a width."""
EXAMPLE_IDS = 17


def export_program(predictor: Predictor, *, with_rows: bool = True) -> ExportedProgram:
    """Trace a predictor's whole model. Its bits are the predictor's; it needs `import colonnade.export` to run.

    with_rows: the rows are in the program; else `load_program` maps them from the export's folder. Raises ConfigError
    for a model without `predict`, such as a retrieval model, and for one that torch.export cannot trace.
    """
    schema = get_schema(predictor)
    collection = find_collection(predictor.model)
    inputs = list_inputs(schema, collection.declaration)
    export = read_export(predictor.folder)
    if export.step != predictor.step:
        raise ConfigError(
            f"got a predictor of step {predictor.step} with rows of step {export.step} in {predictor.folder}: it "
            "followed a publication; export the run, and open that export"
        )
    rows = map_rows(predictor.folder, export, verify=True)
    module = WholeModel(predictor.model, collection, schema, rows, with_rows=with_rows)
    with _lookups_replaced(predictor.model, collection, module.compute_outputs):
        return _export(module, inputs)


def export_dense_program(predictor: Predictor) -> ExportedProgram:
    """Trace a predictor's dense part, in torch's own operators alone. Equal to the predictor up to the order of sums.

    Raises ConfigError as `export_program`.
    """
    schema = get_schema(predictor)
    collection = find_collection(predictor.model)
    inputs = list_dense_inputs(schema, collection.declaration)
    module = DenseModel(predictor.model, collection, schema)
    with _lookups_replaced(predictor.model, collection, module.compute_outputs):
        return decompose(_export(module, inputs))


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Replace Colonnade's operators after the lookups by torch's own."""
    ops: Any = torch.ops.colonnade
    table: dict[Any, Callable[..., Any]] = {
        ops.linear.default: plain_linear,
        ops.pairwise_dot.default: plain_pairwise_dot,
        ops.fm.default: plain_fm,
        ops.cross.default: plain_cross,
    }
    with _quiet():
        return program.run_decompositions(table)


class _Call:
    """Inputs of the call that is traced. Not the module's: torch.export refuses modules that keep tensors."""

    inputs: Mapping[str, Tensor] = {}


class ExportedModel(nn.Module, ABC):
    """Module that a program is traced from: named tensors in, scores out."""

    def __init__(self, model: nn.Module, collection: EmbeddingCollection, schema: Schema) -> None:
        super().__init__()
        self.model = model
        self.declaration = collection.declaration
        self.features_with_lengths = list_features_with_lengths(schema, collection.declaration)
        # Fields are whole when they come here: nothing is hashed, and no table is cut.
        tables = tuple(replace(table, hashes=None) for table in collection.tables)
        whole = replace(collection.declaration, tables=tables)
        self.slices = slices_of(whole, [row_wise(1)] * len(tables))
        self._call = _Call()

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return self._call.inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self._call.inputs = inputs
        try:
            return get_objective(self.model).predict(self.model, self.build_batch(inputs))  # type: ignore[attr-defined]
        finally:
            self._call.inputs = {}

    def build_batch(self, inputs: Mapping[str, Tensor]) -> Batch:
        """Return a batch with the ids that the program has."""
        size = self.get_size(inputs)
        dense = inputs.get(DENSE)
        ids = {
            feature.name: Ids(self.get_ids(feature), self.get_offsets(feature))
            for feature in self.declaration.features
        }
        return Batch(size, torch.empty(size, 0) if dense is None else dense, ids)

    def get_size(self, inputs: Mapping[str, Tensor]) -> int:
        """Return B, a symbol while a program is traced."""
        names = [DENSE, *(f"{name}{LENGTHS}" for name in self.features_with_lengths)]
        names += [n for n in inputs if n not in self.features_with_lengths]
        return next(inputs[name].shape[0] for name in names if name in inputs)

    def get_offsets(self, feature: Feature) -> Tensor | None:
        """Return a feature's offsets (B + 1,), if the program has its lengths."""
        lengths = self.inputs.get(feature.name + LENGTHS)
        if lengths is None:
            return None
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def get_ids(self, feature: Feature) -> Any:
        """Return the ids of a feature; None: the program has none."""
        return self.inputs.get(feature.name)

    @abstractmethod
    def look_up(self, batch: Batch) -> Sequence[Tensor]:
        """Return one tensor per field."""

    def compute_outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the collection does: outputs of consumers, and of fields without one."""
        fields = self.look_up(batch)
        declaration = self.slices.declaration
        outputs = list_lookup_outputs(declaration)
        pooled = [
            torch.cat([fields[f] for f in output.fields], 1)
            if len(output.fields) > 1
            else fields[output.fields[0]]
            for output in outputs
        ]
        values = build_outputs(declaration, outputs, pooled, torch.device("cpu"), batch.dense)
        return self.slices.merge_outputs(values, self.slices.sequence_offsets(batch))


class WholeModel(ExportedModel):
    """Module of a whole model, with its tables as buffers."""

    def __init__(
        self,
        model: nn.Module,
        collection: EmbeddingCollection,
        schema: Schema,
        tables: Sequence[ExportedRows],
        *,
        with_rows: bool,
    ) -> None:
        super().__init__(model, collection, schema)
        counts = [len(table.weights) for table in tables]
        squared = {field.feature for field in self.declaration.fields if field.is_squared}
        # Features whose squares are read are looked up again, as sequences.
        self.looked_up = [*range(len(self.declaration.features)), *sorted(squared)]
        self.lookups = replace(self.declaration, features=self._list_features(), consumers={})
        has_lengths = [
            self.declaration.features[f].name in self.features_with_lengths for f in self.looked_up
        ]
        self.layout = format_layout(self.lookups, counts, collection.seed, has_lengths)
        for t, table in enumerate(tables):
            keys, weights = table if with_rows else (table.keys[:0], table.weights[:0])
            # Copies: both are views of one mapped file, which torch.export.save cannot cut.
            self.register_buffer(f"keys_{t}", keys.clone())
            self.register_buffer(f"rows_{t}", weights.clone())

    def _list_features(self) -> tuple[Feature, ...]:
        features = self.declaration.features
        again = [features[f] for f in self.looked_up[len(features) :]]
        return (
            *features,
            *(replace(f, name=f.name + SQUARES, pooling="sequence") for f in again),
        )

    def look_up(self, batch: Batch) -> Sequence[Tensor]:
        numbers = range(len(self.declaration.tables))
        features = [self.declaration.features[f] for f in self.looked_up]
        nothing = torch.empty(0, dtype=torch.int64)
        tensors = torch.ops.colonnade.lookup(
            self.layout,
            [self.get_buffer(f"rows_{t}") for t in numbers],
            [self.get_buffer(f"keys_{t}") for t in numbers],
            [self.inputs[feature.name] for feature in features],
            [self.inputs.get(feature.name + LENGTHS, nothing) for feature in features],
            batch.size,
        )
        by_read = {
            (field.feature, field.part): tensor
            for field, tensor in zip(self.lookups.fields, tensors, strict=True)
        }
        return [
            self._pool_squares(field, by_read)
            if field.is_squared
            else by_read[field.feature, field.part]
            for field in self.declaration.fields
        ]

    def _pool_squares(
        self, field: LookupField, tensors_by_read: Mapping[tuple[int, int], Tensor]
    ) -> Tensor:
        """Return the squares (B, dim) of a field. tensors_by_read: tensors by feature and part of the lookups."""
        feature = self.declaration.features[field.feature]
        again = self.looked_up.index(field.feature, len(self.declaration.features))
        rows = tensors_by_read[again, field.part]
        lengths = self.inputs.get(feature.name + LENGTHS)
        if lengths is None:
            return rows.square()
        size = lengths.shape[0]
        samples = torch.arange(size).repeat_interleave(lengths, output_size=rows.shape[0])
        if feature.pooling in ("mean", "sqrtn"):  # rounded as `lookup.reads` does
            divisors = lengths.double() if feature.pooling == "mean" else lengths.double().sqrt()
            rows = rows * (1 / divisors.to(rows.dtype))[samples][:, None]
        return rows.new_zeros(size, rows.shape[1]).index_add(0, samples, rows.square())


class DenseModel(ExportedModel):
    """Module of the dense part: its inputs are the fields' vectors."""

    def get_ids(self, feature: Feature) -> Any:
        return None

    def look_up(self, batch: Batch) -> Sequence[Tensor]:
        return [self.inputs[field.name] for field in self.declaration.fields]


class ExportedRows(NamedTuple):
    """Rows of one table."""

    keys: Tensor  # (N,) int64 ascending; (0,) if row i is that of id i
    weights: Tensor  # (N, width)


def map_rows(folder: Path, export: Export, *, verify: bool) -> list[ExportedRows]:
    """Map the rows of an export's tables from their files; processes share their pages. verify: check every byte.

    Raises CorruptionError, StorageError.
    """
    tables = []
    for table in export.tables:
        path = folder / table.file
        file = open_checked(folder, table.file, export.files[table.file])
        if verify:
            file.check_all()
        try:
            tensors = load_file(path)
            keys = tensors["ids"]
            weights = tensors["weights"]
        except Exception as error:  # safetensors raises its own kind
            raise CorruptionError(f"{path}: got {' '.join(str(error).split())}; {REMEDY}") from None
        tables.append(ExportedRows(keys[:0] if len(keys) == table.rows else keys, weights))
    return tables


def get_schema(predictor: Predictor) -> Schema:
    """Return the schema of the data that a predictor's model was trained on. Raises ConfigError if it has none."""
    if predictor.schema is None:
        raise ConfigError(
            f"{predictor.folder} has no schema of its data; open a run that `colonnade train` or `colonnade.fit` wrote"
        )
    return predictor.schema


@contextmanager
def _lookups_replaced(
    model: nn.Module,
    collection: EmbeddingCollection,
    compute_outputs: Callable[[Batch], dict[str, Tensor]],
) -> Iterator[None]:
    """Replace the collection's lookups inside the block, and leave `torch.compile` out."""
    if getattr(get_objective(model), "predict", None) is None:
        raise ConfigError(
            f"{type(model).__name__} has no scores to export: it retrieves items. Export its weights alone"
        )
    check_scores_samples(model)
    compiled = model.__dict__.get("_compiled")
    try:
        collection.forward = compute_outputs  # type: ignore[method-assign]
        if compiled is not None:
            model.__dict__["_compiled"] = None
        with torch.no_grad():
            yield
    finally:
        del collection.forward
        if compiled is not None:
            model.__dict__["_compiled"] = compiled


def _export(module: ExportedModel, inputs: Sequence[ProgramInput]) -> ExportedProgram:
    """Trace a module for batches of any size."""
    dims: dict[str, Any] = {}
    example = {}
    shapes = {}
    for program_input in inputs:
        first, *others = program_input.shape
        assert isinstance(first, str)
        dim = dims.setdefault(
            first, Dim("batch" if first == "batch" else f"ids_{len(dims)}", min=0)
        )
        count = EXAMPLE_SIZE if first == "batch" else EXAMPLE_IDS
        dtype = getattr(torch, program_input.dtype)
        example[program_input.name] = torch.zeros(count, *others, dtype=dtype)  # type: ignore[arg-type]
        shapes[program_input.name] = {0: dim}
    try:
        with _quiet():
            return torch.export.export(module, (example,), dynamic_shapes=(shapes,))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"torch.export cannot trace {type(module.model).__name__}: {first_line}. Its network must be "
            "torch code for batches of any size: x.shape[0] instead of len(x), and no Python numbers from tensors"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about its own deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
