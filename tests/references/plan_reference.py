"""Plans of lookups, slowly: the definition of `_native.make_plan` and `_native.owner_of`.

Legend: T tables, F features, E lookups, U unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.ops.reference import mix64


def owner_of(ids: Tensor, rows: int, num_owners: int) -> Tensor:
    """Return the owner rank of each id, (N,) int32. `rows` 0, an open table: floor(mix64(id) * num_owners / 2^64).

    Vocabulary table, with q, m = divmod(id, num_owners): (m + mix64(q)) mod num_owners, so each run of num_owners ids
    has one id for each owner, and q numbers the rows of an owner without gaps.
    """
    if rows == 0:
        owners = [word * num_owners >> 64 for word in _unsigned(mix64(ids))]
    else:
        blocks = _unsigned(mix64(ids // num_owners))
        owners = [
            (m + h) % num_owners for m, h in zip((ids % num_owners).tolist(), blocks, strict=True)
        ]
    return torch.tensor(owners, dtype=torch.int32)


class LookupGroups(NamedTuple):
    """Lookups grouped by row. Unique ids by table, then owner, then local row (vocabulary) or hash (open)."""

    unique_ids: Tensor  # (U,) int64
    block_offsets: Tensor  # (sum of num_owners + 1,) int64: a block for each table and owner
    inverse: Tensor  # (E,) int32
    segment_offsets: Tensor  # (U + 1,) int32
    entries: Tensor  # (E,) int32, ascending inside a row


def make_plan(
    ids: Tensor,  # (E,) int64
    feature_offsets: Sequence[int],  # (F + 1,)
    feature_tables: Sequence[int],  # (F,)
    table_rows: Sequence[int],  # (T,); 0 = open
    num_owners: Sequence[int],  # (T,)
) -> LookupGroups:
    """Group lookups by row. IndexError for an id outside its vocabulary table."""
    unique: list[int] = []
    counts: list[int] = []
    segments: list[list[int]] = []
    for t, (rows, num_table_owners) in enumerate(zip(table_rows, num_owners, strict=True)):
        lookups: dict[int, list[int]] = {}
        for f in range(len(feature_tables)):
            if feature_tables[f] != t:
                continue
            for e in range(feature_offsets[f], feature_offsets[f + 1]):
                row = int(ids[e])
                if rows and not 0 <= row < rows:
                    position = e - feature_offsets[f]
                    raise IndexError(
                        f"table {t} feature {f} position {position} id {row} rows {rows}"
                    )
                lookups.setdefault(row, []).append(e)
        table_ids = torch.tensor(list(lookups), dtype=torch.int64)
        owners = owner_of(table_ids, rows, num_table_owners).tolist()
        order = (table_ids // num_table_owners).tolist() if rows else _unsigned(mix64(table_ids))
        counts += [owners.count(owner) for owner in range(num_table_owners)]
        for _, _, row in sorted(zip(owners, order, lookups, strict=True)):
            unique.append(row)
            segments.append(lookups[row])
    inverse = torch.empty(len(ids), dtype=torch.int32)
    for u, segment in enumerate(segments):
        inverse[segment] = u
    return LookupGroups(
        torch.tensor(unique, dtype=torch.int64),
        torch.tensor([0, *counts], dtype=torch.int64).cumsum(0),
        inverse,
        torch.tensor([0, *map(len, segments)]).cumsum(0).int(),
        torch.tensor([e for segment in segments for e in segment], dtype=torch.int32),
    )


def _unsigned(words: Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]
