"""Hash-stacked tables: any number of ids share a bounded number of rows, each reading the sum of several.

An id of a table with `hashes=h` names h of its rows, chosen by h hashes, and its vector is their sum (Serra and
Karatzoglou 2017): two ids that meet in one row hardly meet in all, so few rows tell many ids apart. To exchanges, the
store and the optimizer such a table is a vocabulary table whose bags are h times as long. A batch is rewritten before
it is routed, and of a sequence the h vectors of each lookup are added up where the model gets them.

Legend: E lookups of a feature, h hashes, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.data.counter import mix64, stream_key
from colonnade.errors import ConfigError
from colonnade.lookup.layout import Declaration, get_checked_ids
from colonnade.table import Table


def stacked_rows(table: Table, ids: Tensor) -> Tensor:
    """ids (E,) int64, any -> (E, h) int64: the rows of a table with `hashes` whose sum is each id's vector.
    The same in every run and process. Raises ConfigError for another table."""
    if table.hashes is None or table.rows is None:
        raise ConfigError(
            f"table {table.name!r}: its ids are its rows; only a table with hashes has others"
        )
    found = np.empty((len(ids), table.hashes), np.uint64)
    words = ids.numpy().view(np.uint64)
    for number in range(table.hashes):
        found[:, number] = mix64(words ^ np.uint64(stream_key(number)))
    found %= np.uint64(table.rows)
    return torch.from_numpy(found.view(np.int64))


def stacks_of(declaration: Declaration) -> Mapping[str, Table]:
    """By feature that reads one: hash-stacked tables."""
    tables = {table.name: table for table in declaration.tables if table.hashes is not None}
    return {each.name: tables[each.table] for each in declaration.features if each.table in tables}


def hash_ids(batch: Batch, declaration: Declaration) -> Batch:
    """The lookups of rows that a batch of ids stands for. Raises DataError, NonFiniteError naming the feature."""
    stacks = stacks_of(declaration)
    if not stacks:
        return batch
    ids, next_use = dict(batch.ids), None if batch.next_use is None else dict(batch.next_use)
    for feature in declaration.features:
        if feature.name not in stacks:
            continue
        table = stacks[feature.name]
        given = get_checked_ids(batch, feature, declaration.compute_dtype)
        rows, hashes = stacked_rows(table, given.values), int(table.hashes or 1)
        starts = torch.arange(batch.size + 1) if given.offsets is None else given.offsets
        weights = given.weights
        # A mean divides by the number of rows, and is to divide by that of ids.
        factor = {"mean": float(hashes), "sqrtn": math.sqrt(hashes)}.get(feature.pooling, 1.0)
        if factor != 1.0 and weights is None:
            weights = torch.ones(len(given.values), dtype=declaration.compute_dtype)
        if weights is not None:
            weights = (weights.to(declaration.compute_dtype) * factor).repeat_interleave(hashes)
        ids[feature.name] = Ids(rows.flatten(), starts * hashes, weights)
        if next_use is not None and (codes := next_use.get(feature.name)) is not None:
            next_use[feature.name] = codes.repeat_interleave(hashes)
    return replace(batch, ids=ids, next_use=next_use)


def sum_hashed_rows(found: Mapping[str, Tensor], hashes: Mapping[str, int]) -> dict[str, Tensor]:
    """found: what a model gets, of which fields of sequences in `hashes` are (E * h, D) -> (E, D)."""
    return {
        name: value.view(-1, hashes[name], value.shape[1]).sum(1) if name in hashes else value
        for name, value in found.items()
    }
