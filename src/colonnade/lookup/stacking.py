"""Hash-stacked tables: any number of ids share a bounded number of rows, and an id reads the sum of several rows.

An id of a table with `hashes=h` selects h rows by h hashes, and its vector is their sum (Serra and Karatzoglou 2017).
Two ids that share one row rarely share all, so few rows distinguish many ids. Exchanges, the store and the optimizer
treat such a table as a vocabulary table with bags that are h times as long. Ids are replaced before they are sent to
owners; for a sequence, the h vectors of each lookup are summed when outputs are merged.

Legend: E lookups of a feature, h hashes, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids, SharedIds
from colonnade.data.counter import mix_words, stream_key
from colonnade.errors import ConfigError
from colonnade.lookup.layout import EmbeddingDeclaration, get_checked_ids
from colonnade.table import Table


def stacked_rows(table: Table, ids: Tensor) -> Tensor:
    """Return the rows of a hash-stacked table that each id's vector is the sum of. ids (E,) int64, any -> (E, h) int64.
    The same in every run and process. Raises ConfigError for a table without `hashes`."""
    if table.hashes is None or table.rows is None:
        raise ConfigError(
            f"table {table.name!r}: its ids are its rows; only a table with hashes has others"
        )
    rows = np.empty((len(ids), table.hashes), np.uint64)
    words = ids.numpy().view(np.uint64)
    for number in range(table.hashes):
        rows[:, number] = mix_words(words ^ np.uint64(stream_key(number)))
    rows %= np.uint64(table.rows)
    return torch.from_numpy(rows.view(np.int64))


def hashed_tables_by_feature(declaration: EmbeddingDeclaration) -> Mapping[str, Table]:
    """Return the hash-stacked tables by name of the features that read them."""
    tables = {table.name: table for table in declaration.tables if table.hashes is not None}
    return {
        feature.name: tables[feature.table]
        for feature in declaration.features
        if feature.table in tables
    }


def hash_ids(batch: Batch, declaration: EmbeddingDeclaration) -> Batch:
    """Replace ids of hash-stacked tables in a batch by the rows that they select. Raises DataError and NonFiniteError
    that name the feature."""
    stacks = hashed_tables_by_feature(declaration)
    if not stacks:
        return batch
    shared = batch.ids if isinstance(batch.ids, SharedIds) else None
    ids = dict(batch.ids if shared is None else shared.compact)
    next_use = None if batch.next_use is None else dict(batch.next_use)
    for feature in declaration.features:
        if feature.name not in stacks:
            continue
        table = stacks[feature.name]
        is_shared = shared is not None and shared.has_one_sample(feature.name)
        size = 1 if is_shared else batch.size
        checked_batch = batch if shared is None else replace(batch, size=size, ids=ids)
        column = get_checked_ids(checked_batch, feature, declaration.compute_dtype)
        rows = stacked_rows(table, column.values)
        hashes = int(table.hashes or 1)
        starts = torch.arange(size + 1) if column.offsets is None else column.offsets
        weights = column.weights
        # Pooling divides by the number of rows, and must divide by the number of ids.
        factor = {"mean": float(hashes), "sqrtn": math.sqrt(hashes)}.get(feature.pooling, 1.0)
        if factor != 1.0 and weights is None:
            weights = torch.ones(len(column.values), dtype=declaration.compute_dtype)
        if weights is not None:
            weights = (weights.to(declaration.compute_dtype) * factor).repeat_interleave(hashes)
        ids[feature.name] = Ids(rows.flatten(), starts * hashes, weights)
        if next_use is not None and (codes := next_use.get(feature.name)) is not None:
            next_use[feature.name] = codes.repeat_interleave(hashes)
    hashed_ids = ids if shared is None else SharedIds(ids, batch.size)
    return replace(batch, ids=hashed_ids, next_use=next_use)


def sum_hashed_rows(outputs: Mapping[str, Tensor], hashes: Mapping[str, int]) -> dict[str, Tensor]:
    """Sum the rows of each lookup, (E * h, D) -> (E, D), in outputs that are sequences named in `hashes`; return all
    outputs."""
    return {
        name: value.view(-1, hashes[name], value.shape[1]).sum(1) if name in hashes else value
        for name, value in outputs.items()
    }
