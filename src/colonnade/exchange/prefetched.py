"""What ranks had read ahead, as commits hold it: a run may go on with other exchanges, for rows say what sums will be.

Legend: T tables, U rows held, D a table's width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import CheckpointError
from colonnade.lookup.fields import Columns

Held = Mapping[str, Tensor]
TABLES = "of_tables"
"""Key of what was held of some tables only: their numbers."""


def tables_held(held: Sequence[Held], num_tables: int) -> set[int]:
    """Numbers of the tables whose rows were read; every rank reads those of the same ones."""
    if not held or TABLES not in held[0]:
        return set(range(num_tables))
    return set(held[0][TABLES].tolist())


def rows_held(held: Sequence[Held]) -> list[Held]:
    """Of all ranks' reads, those that are rows, whichever exchanges read them: each ids (U,), table_offsets (T + 1,)
    and values, table by table."""
    found: list[Held] = []
    for each in held:
        ends = [key for key in each if key.rpartition(".")[2] == "table_offsets"]
        for prefix in (key.removesuffix("table_offsets") for key in ends):
            found.append({name: each[prefix + name] for name in ("ids", "table_offsets", "values")})
    return found


def values_of(parts: Sequence[Held], widths: np.ndarray, t: int, wanted: Tensor) -> Tensor:
    """(len(wanted), D) of rows of table t, by id. Raises CheckpointError where they are not held."""
    ids, rows, dim = [], [], int(widths[t])
    for part in parts:
        offsets = part["table_offsets"]
        first, last = offsets[t : t + 2].tolist()
        before = int((offsets.diff()[:t] * torch.from_numpy(widths[:t])).sum())
        ids.append(part["ids"][first:last])
        rows.append(part["values"][before : before + (last - first) * dim].view(-1, dim))
    all_ids, order = torch.cat(ids).sort(stable=True) if ids else (wanted[:0], wanted[:0])
    where = torch.searchsorted(all_ids, wanted)
    if bool((where >= len(all_ids)).any()) or not torch.equal(all_ids[where], wanted):
        raise other_exchange()
    if not len(wanted):
        return rows[0][:0] if rows else torch.empty(0, dim)
    return torch.cat(rows)[order[where]]


def names_of(fields: Iterable[str]) -> Tensor:
    """uint8: of fields side by side."""
    return torch.tensor(list(", ".join(fields).encode()), dtype=torch.uint8)


def gathered_held(
    held: Sequence[Held], names: Tensor, columns: Columns, sizes: Sequence[int]
) -> Tensor:
    """(G, W) of all ranks' samples and these `columns`, called `names`: of what ranks of towers had gathered, each of
    some samples and its tower's fields. sizes: samples by rank. Raises CheckpointError where something is missing."""
    wanted = bytes(names.numpy()).decode().split(", ")
    places = dict(zip(wanted, columns.dims, strict=True))
    found = torch.full((sum(sizes), columns.width), float("nan"), dtype=held[0]["gathered"].dtype)
    for each in held:
        first = 0
        theirs = bytes(each["gathered fields"].numpy()).decode().split(", ")
        if not set(theirs) <= set(wanted) or len(found) != int(each["of samples"]):
            raise other_exchange()
        for name in theirs:
            there = columns.of(places[name])
            width = there.stop - there.start
            found[each["samples"], there] = each["gathered"][:, first : first + width]
            first += width
    if sum(each["gathered"].numel() for each in held) != found.numel():
        raise other_exchange()
    return found


def other_exchange() -> CheckpointError:
    return CheckpointError(
        "the commit holds what another exchange had read ahead, and sums do not say what rows were; go on with the "
        "exchanges of the commit (plan.exchange and plan.tables as they were), or from a commit of a run without "
        "staleness"
    )
