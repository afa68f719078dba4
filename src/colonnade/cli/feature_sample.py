"""Affinities of a run's features on samples of its data, from which their partition into towers is computed.

The run is only read: it is opened as for an evaluation.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch
from colonnade.data.contract import Source
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import DataError
from colonnade.lookup.stacking import hash_ids
from colonnade.plan.towers.affinity import Affinity
from colonnade.plan.towers.partition import FeatureLoad
from colonnade.table import Feature, Table
from colonnade.train.record import collect_table_sizes


def measure_affinity(
    collection: EmbeddingCollection, source: Source, batch_size: int, num_batches: int
) -> tuple[Affinity, list[FeatureLoad]]:
    """Measure the features' affinities, and each one's load on its tower, over the first `num_batches` batches.

    For a table with parts the widest part is used; sequences are pooled by their mean. The process must have all rows.
    Raises DataError without samples.
    """
    features = collection.declaration.features
    tables = {table.name: table for table in collection.tables}
    affinity = Affinity([feature.name for feature in features])
    lookups = dict.fromkeys(affinity.names, 0)
    for ids in islice(source.batches(batch_size), num_batches):
        batch = hash_ids(ids, collection.declaration)
        affinity.add_batch_vectors(
            [
                sum_rows_by_sample(collection, tables[feature.table], feature, batch)
                for feature in features
            ]
        )
        for name in affinity.names:
            lookups[name] += len(batch.ids[name].values)
    if not affinity.num_samples:
        raise DataError(
            "got no samples to probe with, wanted a part with some; choose another with --part"
        )
    sizes = _count_stored_bytes(collection)
    return affinity, [
        FeatureLoad(
            feature.name,
            feature.table,
            float(sizes[feature.table]),
            round(lookups[feature.name] / affinity.num_samples, 4),
        )
        for feature in features
    ]


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
