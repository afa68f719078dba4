"""Lookups of a table whose hot rows lie apart: each is one of hot rows or of cold ones, and what comes of both is put
together again.

To exchanges, hot and cold rows are two tables, and a feature that reads the table is two features, which add up what
they find: what a bag finds in both, its sum, is divided here where a mean is asked for.

Legend: B samples, E lookups of a feature, D elements of a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.lookup.layout import Declaration, get_checked_ids, id_range_error
from colonnade.topology.sharding import is_hot

SIDES = ("cold", "hot")


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """One batch as the exchanges take it, and what puts its outputs together."""

    batch: Batch
    lengths: Mapping[str, Tensor]
    """(B, 1) of the compute dtype, by feature that averages bags: what a sum is divided by."""
    order: Mapping[str, Tensor]
    """(E,) int64, by feature of a sequence: where each lookup is among cold ones and, behind them, hot ones."""


def split_hot_rows(batch: Batch, declared: Declaration, hot: Mapping[int, Tensor]) -> SplitBatch:
    """hot: by table that has some, ids (H,) int64 ascending. Raises IdRangeError, DataError, NonFiniteError as the
    exchanges do of other features."""
    ids, next_use = dict(batch.ids), None if batch.next_use is None else dict(batch.next_use)
    lengths, order = {}, {}
    for feature in declared.features:
        t = declared.table_of(feature)
        if t not in hot:
            continue
        given = get_checked_ids(batch, feature, declared.compute_dtype)
        rows = declared.tables[t].rows
        if rows is not None and bool(((given.values < 0) | (given.values >= rows)).any()):
            at = int(((given.values < 0) | (given.values >= rows)).nonzero()[0])
            raise id_range_error(feature.name, at, int(given.values[at]), rows, feature.table)
        mask = is_hot(given.values, hot[t])
        for side, mine in zip(SIDES, (~mask, mask), strict=True):
            before = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)])
            ids[f"{feature.name}[{side}]"] = Ids(
                given.values[mine],
                before if given.offsets is None else before[given.offsets],
                None if given.weights is None else given.weights[mine],
            )
            codes = None if next_use is None else next_use.get(feature.name)
            if next_use is not None and codes is not None:
                # Of another shape, they are refused where all features' are.
                fits = codes.shape == given.values.shape
                next_use[f"{feature.name}[{side}]"] = codes[mine] if fits else codes
        if feature.pooling == "sequence":
            order[feature.name] = torch.cat(
                [(~mask).nonzero()[:, 0], mask.nonzero()[:, 0]]
            ).argsort()
        elif feature.pooling in ("mean", "sqrtn") and given.offsets is not None:
            count = given.offsets.diff().clamp(min=1).to(declared.compute_dtype)[:, None]
            if feature.pooling == "sqrtn":  # correctly rounded; torch's own on a CPU is not
                count = torch.from_numpy(np.sqrt(count.numpy()))
            lengths[feature.name] = count
    return SplitBatch(replace(batch, ids=ids, next_use=next_use), lengths, order)
