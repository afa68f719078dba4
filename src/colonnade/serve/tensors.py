"""Named tensors of a model's requests and answers: metadata, and their conversion to a `Batch` and from scores.

Input `dense` is FP32 (N, n). A feature F of one id is INT64 (N,) or (N, 1). A bag or sequence F is INT64 (E,), the ids
of all candidates one after another, with `F.lengths` INT64 (N,) and, for weighted features, `F.weights` FP32 (E,). F is
BYTES where the training file has texts; ids are taken there too. An id is 64 bits, and other integers of the same value
are the same id. An input with one sample among inputs of N is that of all N. Output `score` is FP64 (N,), or (N, T) for
T labels.

Legend: N candidates of a request, n dense columns, E lookups of one feature, T labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids, share_samples
from colonnade.data.contract import Schema
from colonnade.errors import ConfigError
from colonnade.serve.protocol import RequestError, Tensors, get_datatype, quote_value
from colonnade.serve.records import RecordEncoder

DENSE = "dense"
SCORE = "score"
LENGTHS = ".lengths"
WEIGHTS = ".weights"
FLOAT = np.dtype("<f4")
INT = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of a tensor; -1: any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class ModelSignature:
    """Inputs and outputs of a model."""

    num_dense: int
    features: tuple[tuple[str, bool], ...]
    """Names, each with whether it may have several ids per sample."""
    labels: tuple[str, ...]
    max_candidates: int
    encoder: RecordEncoder | None = None
    """Encoder of the features that texts can be sent for."""

    def accepts_texts(self, name: str) -> bool:
        """Return whether texts can be sent for a feature."""
        return self.encoder is not None and name in self.encoder.text_fields

    @property
    def inputs(self) -> list[TensorSpec]:
        specs = [TensorSpec(DENSE, "FP32", (-1, self.num_dense))] if self.num_dense else []
        for name, has_many in self.features:
            datatype = "BYTES" if self.accepts_texts(name) else "INT64"
            specs.append(TensorSpec(name, datatype, (-1,)))
            if has_many:
                specs.append(TensorSpec(name + LENGTHS, "INT64", (-1,)))
                specs.append(TensorSpec(name + WEIGHTS, "FP32", (-1,), is_optional=True))
        return specs

    @property
    def outputs(self) -> list[TensorSpec]:
        shape = (-1,) if len(self.labels) == 1 else (-1, len(self.labels))
        return [TensorSpec(SCORE, "FP64", shape)]


def build_signature(
    schema: Schema, max_candidates: int, encoder: RecordEncoder | None = None
) -> ModelSignature:
    """Return the inputs and outputs of a model of this schema. Raises ConfigError if two inputs have one name."""
    features = tuple((column.name, column.kind != "one") for column in schema.categorical)
    signature = ModelSignature(len(schema.dense), features, schema.labels, max_candidates, encoder)
    names = [spec.name for spec in signature.inputs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"got two inputs called {repeated!r}, wanted each name once; rename the column and train again"
        )
    return signature


def build_batch(signature: ModelSignature, tensors: Tensors) -> Batch:
    """Build a batch from the tensors of a request. Raises RequestError (400).

    Features of one sample are not repeated: `Predictor` looks them up once for all candidates.
    """
    readers = _Reader(signature, tensors)
    dense = readers.read_dense()
    ids = readers.read_alike()
    if ids is None:
        ids = {}
        for name, has_many in signature.features:
            ids[name] = readers.read_bag(name) if has_many else Ids(readers.read_ids(name))
    readers.check_all_used()
    size = readers.size
    if dense is None:
        dense = torch.empty((size, 0), dtype=torch.float32)
    return Batch(size, dense, ids)


class _Reader:
    """Reader of a request's tensors that tracks the number of candidates."""

    def __init__(self, signature: ModelSignature, tensors: Tensors) -> None:
        self.signature = signature
        self.tensors = tensors
        self.num_used = 0
        self.size = 1
        self.size_name = ""

    def read_dense(self) -> Tensor | None:
        if not self.signature.num_dense:
            return None
        tensor = self.get(DENSE, FLOAT)
        if tensor.ndim != 2 or tensor.shape[1] != self.signature.num_dense:
            raise RequestError(
                400,
                f"input {DENSE!r}: got shape {list(tensor.shape)}, wanted [N, {self.signature.num_dense}]: one row per "
                "candidate, or one for all",
            )
        self.count(DENSE, len(tensor))
        check_finite(DENSE, tensor)
        return torch.from_numpy(tensor)

    def read_alike(self) -> dict[str, Ids] | None:
        """Return the ids of all features if they are one id per sample in tensors of one form; None: they are not."""
        features = self.signature.features
        tensors = [self.tensors.get(name) for name, _ in features]
        first = tensors[0] if tensors else None
        if first is None or first.ndim != 1 or any(has_many for _, has_many in features):
            return None
        shape = first.shape
        if not all(t is not None and t.shape == shape and t.dtype == INT for t in tensors):
            return None
        self.count(features[0][0], shape[0])
        self.num_used += len(tensors)
        return {
            name: Ids(torch.from_numpy(tensor))
            for (name, _), tensor in zip(features, tensors, strict=True)
        }

    def read_ids(self, name: str) -> Tensor:
        tensor = self.get(name, INT)
        if tensor.ndim != 1:
            if tensor.ndim != 2 or tensor.shape[1] != 1:
                raise RequestError(
                    400,
                    f"input {name!r}: got shape {list(tensor.shape)}, wanted [N] or [N, 1]: one id per candidate",
                )
            tensor = tensor.reshape(-1)
        self.count(name, len(tensor))
        return torch.from_numpy(tensor)

    def read_bag(self, name: str) -> Ids:
        values = self.get(name, INT)
        lengths = self.get(name + LENGTHS, INT)
        weights = self.get(name + WEIGHTS, FLOAT) if name + WEIGHTS in self.tensors else None
        for label, tensor in ((name, values), (name + LENGTHS, lengths), (name + WEIGHTS, weights)):
            if tensor is not None and tensor.ndim != 1:
                raise RequestError(
                    400, f"input {label!r}: got shape {list(tensor.shape)}, wanted one dimension"
                )
        self.count(name + LENGTHS, len(lengths))
        if len(values) > self.signature.max_candidates * MAX_MEAN_LENGTH:
            raise RequestError(
                400, f"input {name!r}: got {len(values):,} ids; send fewer candidates a request"
            )
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > len(values):
            raise RequestError(
                400,
                f"input {name + LENGTHS!r}: got a length outside 0 .. {len(values)}, wanted the ids of each "
                "candidate",
            )
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if int(offsets[-1]) != len(values):
            raise RequestError(
                400,
                f"input {name + LENGTHS!r}: got lengths of {int(offsets[-1]):,} ids in all, wanted "
                f"{len(values):,}, as {name!r} has",
            )
        if weights is not None:
            if len(weights) != len(values):
                raise RequestError(
                    400,
                    f"input {name + WEIGHTS!r}: got {len(weights):,} weights, wanted one per id, {len(values):,}",
                )
            check_finite(name + WEIGHTS, weights)
        return Ids(
            torch.from_numpy(values),
            torch.from_numpy(offsets),
            None if weights is None else torch.from_numpy(weights),
        )

    def get(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Return a tensor of this type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RequestError(
                400,
                f"input {name!r}: got none, wanted {get_datatype(dtype)}; the model's metadata lists all inputs",
            )
        self.num_used += 1
        if tensor.dtype == dtype:
            return tensor
        has_texts = dtype is INT and self.signature.accepts_texts(name)
        if tensor.dtype.kind == "O" and has_texts:
            assert self.signature.encoder is not None
            return self.signature.encoder.encode_texts(name, tensor.ravel()).reshape(tensor.shape)
        if tensor.dtype.kind in "iu" and dtype is INT:
            return tensor.astype(INT)  # UINT64 from 2^63 on: the same 64 bits
        wanted = f"{'BYTES, or ' if has_texts else ''}{get_datatype(dtype)}"
        raise RequestError(
            400, f"input {name!r}: got datatype {get_datatype(tensor.dtype)}, wanted {wanted}"
        )

    def count(self, name: str, num_samples: int) -> None:
        """Note the number of samples of an input: the same in all, or 1."""
        if num_samples == self.size:
            return
        if not 0 < num_samples <= self.signature.max_candidates:
            raise RequestError(
                400 if num_samples == 0 else 413,
                f"input {name!r}: got {num_samples:,} candidates, wanted 1 to {self.signature.max_candidates:,}; send "
                "several requests, or raise --max-candidates",
            )
        if num_samples == 1:
            return
        if self.size not in (1, num_samples):
            raise RequestError(
                400,
                f"input {name!r}: got {num_samples:,} candidates, wanted {self.size:,} as in {self.size_name!r}, or 1 "
                "for all of them",
            )
        self.size = num_samples
        self.size_name = name

    def check_all_used(self) -> None:
        """Raise RequestError for an input that the model does not have."""
        if self.num_used == len(self.tensors):
            return
        input_names = {spec.name for spec in self.signature.inputs}
        unknown = next(name for name in self.tensors if name not in input_names)
        raise RequestError(
            400,
            f"input {quote_value(unknown)}: got an input that the model does not have; its metadata lists all",
        )


MAX_MEAN_LENGTH = 1000
"""Limit on the ids of a bag, as a mean over the most candidates that a request may have."""


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Raise RequestError for NaN or inf."""
    if not np.isfinite(tensor).all():
        raise RequestError(400, f"input {name!r}: got NaN or inf, wanted finite numbers")


def format_scores(scores: Tensor) -> Tensors:
    """Return the output tensors of a batch's scores (N, T)."""
    values = scores.numpy().astype(np.float64, copy=False)
    return {SCORE: values[:, 0] if values.shape[1] == 1 else values}


def format_labelled_scores(
    scores: Tensor, labels: Sequence[str]
) -> list[float] | dict[str, list[float]]:
    """Return scores (N, T) as JSON: one list, or one list per label."""
    if scores.shape[1] == 1:
        return scores[:, 0].tolist()
    return {label: scores[:, t].tolist() for t, label in enumerate(labels)}


def describe_model(
    signature: ModelSignature, *, name: str, steps: Sequence[int], run: str
) -> dict[str, Any]:
    """Return the metadata of a model as the protocol has it, with the run and the labels in `parameters`."""
    return {
        "name": name,
        "versions": [str(step) for step in steps],
        "platform": "colonnade",
        "inputs": [_describe_tensor(spec) for spec in signature.inputs],
        "outputs": [_describe_tensor(spec) for spec in signature.outputs],
        "parameters": {
            "run": run,
            "labels": list(signature.labels),
            "max_candidates": signature.max_candidates,
        },
    }


def build_triton_config(signature: ModelSignature, name: str) -> dict[str, Any]:
    """Return a model's configuration in the form of Triton's extension `model_configuration`.

    `max_batch_size` 0: the first dimension of the shapes is that of the batch.
    """

    def describe(spec: TensorSpec) -> dict[str, Any]:
        datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype  # Triton's name of it
        kind = {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape)}
        return {**kind, "optional": True} if spec.is_optional else kind

    return {
        "name": name,
        "platform": "colonnade",
        "max_batch_size": 0,
        "input": [describe(spec) for spec in signature.inputs],
        "output": [describe(spec) for spec in signature.outputs],
    }


def _describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": list(spec.shape),
    }
    return {**fields, "parameters": {"optional": True}} if spec.is_optional else fields


def expand_shared(batch: Batch) -> Batch:
    """Return a batch with a copy of each shared feature for each sample, as those that training reads."""
    shared = share_samples(batch)
    return replace(shared, ids=dict(shared.ids))


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch of the samples of several, in order. All have the same features, weighted or not."""
    full = [expand_shared(batch) for batch in batches]
    ids: dict[str, Ids] = {}
    for name, first in full[0].ids.items():
        parts = [batch.ids[name] for batch in full]
        offsets = None
        if first.offsets is not None:
            counts = torch.cat([part.counts for part in parts])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        weights = None if first.weights is None else torch.cat([p.weights for p in parts])  # type: ignore[misc]
        ids[name] = Ids(torch.cat([part.values for part in parts]), offsets, weights)
    return Batch(sum(b.size for b in full), torch.cat([b.dense for b in full]), ids)


def count_lookups(batch: Batch) -> int:
    """Return the number of ids that a batch looks up."""
    return sum(ids.values.numel() for ids in batch.ids.values())
