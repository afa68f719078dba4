"""Prefetched values in checkpoints. A run may continue with other exchanges if the values are rows, not sums.

Legend: T tables, U prefetched rows, D a table's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import CheckpointError

PrefetchedValues = Mapping[str, Tensor]
TABLES = "of_tables"
"""Key of the indices of the tables with prefetched values, where these are not all tables."""


def prefetched_tables(prefetched: Sequence[PrefetchedValues], num_tables: int) -> set[int]:
    """Return the indices of the tables with prefetched values; they are the same on every rank."""
    if not prefetched or TABLES not in prefetched[0]:
        return set(range(num_tables))
    return set(prefetched[0][TABLES].tolist())


def collect_prefetched_rows(prefetched: Sequence[PrefetchedValues]) -> list[PrefetchedValues]:
    """Collect the rows in all ranks' prefetched values, whichever exchanges read them, as dicts of ids (U,),
    table_offsets (T + 1,) and values, table by table."""
    parts: list[PrefetchedValues] = []
    for rank_values in prefetched:
        ends = [key for key in rank_values if key.rpartition(".")[2] == "table_offsets"]
        for prefix in (key.removesuffix("table_offsets") for key in ends):
            parts.append(
                {name: rank_values[prefix + name] for name in ("ids", "table_offsets", "values")}
            )
    return parts


def gather_prefetched_rows(
    parts: Sequence[PrefetchedValues], widths: np.ndarray, table_index: int, wanted: Tensor
) -> Tensor:
    """Gather prefetched rows of a table by id, (len(wanted), D). Raises CheckpointError for missing ones."""
    ids = []
    rows = []
    dim = int(widths[table_index])
    for part in parts:
        offsets = part["table_offsets"]
        first, last = offsets[table_index : table_index + 2].tolist()
        before = int((offsets.diff()[:table_index] * torch.from_numpy(widths[:table_index])).sum())
        ids.append(part["ids"][first:last])
        rows.append(part["values"][before : before + (last - first) * dim].view(-1, dim))
    all_ids, order = torch.cat(ids).sort(stable=True) if ids else (wanted[:0], wanted[:0])
    where = torch.searchsorted(all_ids, wanted)
    if bool((where >= len(all_ids)).any()) or not torch.equal(all_ids[where], wanted):
        raise build_other_exchange_error()
    if not len(wanted):
        return rows[0][:0] if rows else torch.empty(0, dim)
    return torch.cat(rows)[order[where]]


def build_other_exchange_error() -> CheckpointError:
    """Return the error for prefetched values that cannot be restored."""
    return CheckpointError(
        "the checkpoint has values that another exchange had read ahead, and rows cannot be restored from sums; "
        "continue with the exchanges of the checkpoint (plan.exchange and plan.tables as they were), or from a "
        "checkpoint of a run without staleness"
    )
