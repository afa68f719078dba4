"""Affinities of a run's features on samples of its data, from which their partition into towers is computed.

The run is only read: it is opened as for an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from colonnade.batch import Batch, Ids
from colonnade.data.contract import Source
from colonnade.data.tensors import gather_ids
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.lookup.stacking import hash_ids
from colonnade.models.ranking import evaluation_mode
from colonnade.plan.towers.affinity import AffinityKind, Cosines, Floats, LogitInteractions
from colonnade.plan.towers.partition import FeatureLoad
from colonnade.table import Feature, Table
from colonnade.train.objective import Probability, get_objective
from colonnade.train.record import collect_table_sizes

INTERACTION_BATCH = 256
"""Largest number of samples of a batch for interactions, because the model computes it for each pair of features."""


@dataclass(frozen=True, slots=True)
class FeatureSample:
    """Affinities of a run's features over samples, and the load of each feature on its tower."""

    affinity: Floats
    """Affinities over all samples, (F, F)."""
    halves: tuple[Floats, Floats]
    """Affinities over the first and over the second half of every batch."""
    silent: tuple[str, ...]
    """Features without an affinity to any other."""
    loads: list[FeatureLoad]
    num_samples: int


def measure_affinity(
    model: nn.Module,
    collection: EmbeddingCollection,
    source: Source,
    batch_size: int,
    num_batches: int,
    *,
    kind: AffinityKind = "interactions",
) -> FeatureSample:
    """Measure the features' affinities, and each one's load on its tower, over the first `num_batches` batches.

    batch_size: samples of a batch, for interactions INTERACTION_BATCH at most. model: with rows in `collection`, all of
    them in this process. Raises DataError without two samples, and ConfigError for interactions of a model without
    logits.
    """
    if kind == "interactions":
        batch_size = min(batch_size, INTERACTION_BATCH)
        if not isinstance(get_objective(model), Probability):
            raise ConfigError(
                f"got --affinity interactions for {type(model).__name__}, wanted a model of logits (B, tasks), whose "
                "interactions can be measured; set --affinity cosine"
            )
    batches = list(islice(source.batches(batch_size), num_batches))
    num_samples = sum(batch.size for batch in batches)
    if num_samples < 2:
        raise DataError(
            f"got {num_samples} samples to probe with, wanted a part with two or more; choose another with --part"
        )
    sizes = _count_stored_bytes(collection)
    loads = [
        FeatureLoad(
            feature.name,
            feature.table,
            float(sizes[feature.table]),
            round(sum(len(b.ids[feature.name].values) for b in batches) / num_samples, 4),
        )
        for feature in collection.declaration.features
    ]
    if kind == "cosine":
        return _build_sample(*_measure_cosines(collection, batches), loads)
    names = [feature.name for feature in collection.declaration.features]
    return _build_sample(*_measure_interactions(model, names, batches), loads)


Accumulator = TypeVar("Accumulator", Cosines, LogitInteractions)


def _build_sample(
    first: Accumulator, second: Accumulator, loads: list[FeatureLoad]
) -> FeatureSample:
    """Return the affinities of two halves of the samples, and of both."""
    whole = first + second
    halves = first.matrix(), second.matrix()
    return FeatureSample(whole.matrix(), halves, whole.silent, loads, whole.num_samples)


def _measure_cosines(
    collection: EmbeddingCollection, batches: Sequence[Batch]
) -> tuple[Cosines, Cosines]:
    """Measure each half of every batch. For a table with parts the widest part is used; sequences are pooled."""
    features = collection.declaration.features
    tables = {table.name: table for table in collection.tables}
    first, second = (Cosines([feature.name for feature in features]) for _ in range(2))
    for batch in batches:
        hashed = hash_ids(batch, collection.declaration)
        vectors = [
            sum_rows_by_sample(collection, tables[feature.table], feature, hashed)
            for feature in features
        ]
        middle = batch.size // 2
        first.add_batch_vectors([vector[:middle] for vector in vectors])
        second.add_batch_vectors([vector[middle:] for vector in vectors])
    return first, second


def _measure_interactions(
    model: nn.Module, names: Sequence[str], batches: Sequence[Batch]
) -> tuple[LogitInteractions, LogitInteractions]:
    """Measure each half of every batch. A feature is changed to that of another sample of its half, the same sample for
    all features; sequences and bags are changed whole."""
    first, second = LogitInteractions(names), LogitInteractions(names)
    generator = torch.Generator().manual_seed(0)
    with evaluation_mode(model):
        for batch in batches:
            middle = batch.size // 2
            order = torch.cat(
                [
                    torch.randperm(middle, generator=generator),
                    middle + torch.randperm(batch.size - middle, generator=generator),
                ]
            )
            others = {name: gather_ids(batch.ids[name], order) for name in names}
            unchanged = _compute_logits(model, batch, {})
            single = [_compute_logits(model, batch, {name: others[name]}) for name in names]
            for (i, one), (j, other) in combinations(enumerate(names), 2):
                joint = _compute_logits(model, batch, {one: others[one], other: others[other]})
                mixed = joint - single[i] - single[j] + unchanged
                first.add_pair_differences(i, j, mixed[:middle])
                second.add_pair_differences(i, j, mixed[middle:])
            first.num_samples += middle
            second.num_samples += batch.size - middle
    return first, second


def _compute_logits(model: nn.Module, batch: Batch, changed: Mapping[str, Ids]) -> Floats:
    """Return the logits of the batch with these features changed, (B, tasks)."""
    logits: Tensor = model(replace(batch, ids={**batch.ids, **changed}))
    return logits.double().cpu().numpy()


def sum_rows_by_sample(
    collection: EmbeddingCollection, table: Table, feature: Feature, batch: Batch
) -> NDArray[np.float32]:
    """Sum the rows of each sample's ids, times their weights: (B, dim). A cosine is the same for sums and means."""
    ids = batch.ids[feature.name]
    part = max(table.parts, key=lambda candidate: candidate.dim)
    rows = collection.rows(table.name, ids.values)[:, part.column : part.column + part.dim].float()
    if ids.weights is not None:
        rows = rows * ids.weights[:, None].to(rows.dtype)
    if ids.offsets is None:
        return rows.numpy()
    samples = torch.repeat_interleave(torch.arange(batch.size), ids.offsets.diff())
    return torch.zeros(batch.size, part.dim).index_add_(0, samples, rows).numpy()


def _count_stored_bytes(collection: EmbeddingCollection) -> dict[str, int]:
    """Return the stored bytes by table: of all rows of a vocabulary table, of the existing rows of an open table."""
    sizes = collect_table_sizes(collection)
    return {
        table.name: max(sizes[table.name]["bytes_in_memory"], sizes[table.name]["bytes_in_files"])
        if table.rows is None
        else table.rows * table.record_bytes
        for table in collection.tables
    }
