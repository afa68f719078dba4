"""Split of a batch's lookups into those of hot rows and those of cold rows, and the merge of their outputs.

Exchanges see the hot rows and the cold rows of a table as two tables, and a feature that reads the table as two
features. Both sum their part of a bag; the sums are added, and divided by the bag's length where the feature pools a
mean.

Legend: B samples, E lookups of a feature, D elements of a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.lookup.layout import EmbeddingDeclaration, get_checked_ids, id_range_error
from colonnade.topology.sharding import is_hot

SIDES = ("cold", "hot")


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """Batch whose lookups are split into hot and cold ones, and the data that merges its outputs."""

    batch: Batch
    lengths: Mapping[str, Tensor]
    """Divisors of sums by feature that averages bags, (B, 1) of the compute dtype."""
    order: Mapping[str, Tensor]
    """Index of each lookup in the concatenation of cold and hot lookups, by feature of a sequence, (E,) int64."""


def split_hot_rows(
    batch: Batch, declared: EmbeddingDeclaration, table_hot_ids: Mapping[int, Tensor]
) -> SplitBatch:
    """Split a batch's lookups into those of hot rows and those of cold rows.

    table_hot_ids: ids of hot rows by table, (H,) int64 ascending. Raises IdRangeError, DataError and NonFiniteError,
    as exchanges do for other features."""
    ids = dict(batch.ids)
    next_use = None if batch.next_use is None else dict(batch.next_use)
    lengths = {}
    order = {}
    for feature in declared.features:
        t = declared.table_index_of(feature)
        if t not in table_hot_ids:
            continue
        column = get_checked_ids(batch, feature, declared.compute_dtype)
        rows = declared.tables[t].rows
        if rows is not None and bool(((column.values < 0) | (column.values >= rows)).any()):
            first = int(((column.values < 0) | (column.values >= rows)).nonzero()[0])
            raise id_range_error(
                feature.name, first, int(column.values[first]), rows, feature.table
            )
        mask = is_hot(column.values, table_hot_ids[t])
        for side, side_mask in zip(SIDES, (~mask, mask), strict=True):
            lookups_before = torch.cat([torch.zeros(1, dtype=torch.int64), side_mask.cumsum(0)])
            ids[f"{feature.name}[{side}]"] = Ids(
                column.values[side_mask],
                lookups_before if column.offsets is None else lookups_before[column.offsets],
                None if column.weights is None else column.weights[side_mask],
            )
            codes = None if next_use is None else next_use.get(feature.name)
            if next_use is not None and codes is not None:
                # Codes of another shape are refused later, with those of all features.
                fits = codes.shape == column.values.shape
                next_use[f"{feature.name}[{side}]"] = codes[side_mask] if fits else codes
        if feature.pooling == "sequence":
            order[feature.name] = torch.cat(
                [(~mask).nonzero()[:, 0], mask.nonzero()[:, 0]]
            ).argsort()
        elif feature.pooling in ("mean", "sqrtn") and column.offsets is not None:
            count = column.offsets.diff().clamp(min=1).to(declared.compute_dtype)[:, None]
            if feature.pooling == "sqrtn":  # because torch's root on a CPU is not correctly rounded
                count = torch.from_numpy(np.sqrt(count.numpy()))
            lengths[feature.name] = count
    return SplitBatch(replace(batch, ids=ids, next_use=next_use), lengths, order)
