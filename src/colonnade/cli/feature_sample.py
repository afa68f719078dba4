"""Pooled vectors of a run's features on samples of its data: what a partition of its features is made from.

Reads only: the run is opened as for an evaluation.
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
from colonnade.lookup.stacking import stacked
from colonnade.plan.towers.affinity import Affinity
from colonnade.plan.towers.partition import FeatureLoad
from colonnade.table import Feature, Table
from colonnade.train.record import table_sizes


def probe(
    collection: EmbeddingCollection, source: Source, batch_size: int, num_batches: int
) -> tuple[Affinity, list[FeatureLoad]]:
    """Over the first `num_batches` batches: how alike the collection's features are, and what each asks of its tower.

    Of a table with parts the widest one counts; sequences are pooled by their mean. A process of its own, with all
    rows. Raises DataError where there are no samples.
    """
    features = collection.declaration.features
    tables = {table.name: table for table in collection.tables}
    found = Affinity([feature.name for feature in features])
    lookups = dict.fromkeys(found.names, 0)
    for ids in islice(source.batches(batch_size), num_batches):
        batch = stacked(ids, collection.declaration)
        found.add(
            [pooled(collection, tables[feature.table], feature, batch) for feature in features]
        )
        for name in found.names:
            lookups[name] += len(batch.ids[name].values)
    if not found.num_samples:
        raise DataError(
            "got no samples to probe with, wanted a part with some; choose another with --part"
        )
    sizes = _table_bytes(collection)
    return found, [
        FeatureLoad(
            feature.name,
            feature.table,
            float(sizes[feature.table]),
            round(lookups[feature.name] / found.num_samples, 4),
        )
        for feature in features
    ]


def pooled(
    collection: EmbeddingCollection, table: Table, feature: Feature, batch: Batch
) -> NDArray[np.float32]:
    """(B, dim): sums of the rows of each sample's ids, by their weights. Sums and means point the same way, and a
    cosine asks for no more."""
    ids = batch.ids[feature.name]
    part = max(table.parts, key=lambda each: each.dim)
    rows = collection.rows(table.name, ids.values)[:, part.column : part.column + part.dim].float()
    if ids.weights is not None:
        rows = rows * ids.weights[:, None].to(rows.dtype)
    if ids.offsets is None:
        return rows.numpy()
    samples = torch.repeat_interleave(torch.arange(batch.size), ids.offsets.diff())
    return torch.zeros(batch.size, part.dim).index_add_(0, samples, rows).numpy()


def _table_bytes(collection: EmbeddingCollection) -> dict[str, int]:
    """At rest: of a vocabulary table all its rows, of an open one those there are."""
    there = table_sizes(collection)
    return {
        table.name: max(there[table.name]["bytes_in_memory"], there[table.name]["bytes_in_files"])
        if table.rows is None
        else table.rows * table.record_bytes
        for table in collection.tables
    }
