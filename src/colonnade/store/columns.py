"""Rows of one table as columns, as a state_dict holds them: checked, found by id, made records again.

Legend: N rows, M of them, D width of the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from colonnade.store.records import bytes_of, clock_bytes, fresh_records, low_bytes, weight_bytes
from colonnade.table import Table


class Index:
    """Positions of ids in a list of distinct ones."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.order = ids.sort()

    def find(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Position (M,) of each of these ids (M,), and whether it is in the list (M,) bool."""
        if not len(self.ids):
            return torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.bool)
        place = torch.searchsorted(self.ids, wanted).clamp_(max=len(self.ids) - 1)
        return self.order[place], self.ids[place] == wanted


def records_of(table: Table, columns: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """(M, record_bytes) of rows at these positions (M,), with first optimizer state."""
    weights = columns["weights"][rows]
    records = fresh_records(table, weights)
    records[:, weight_bytes(table)] = bytes_of(weights)
    if table.master:
        records[:, low_bytes(table)] = bytes_of(columns["low_halves"][rows])
    records[:, clock_bytes(table)] = bytes_of(columns["clocks"][rows][:, None])
    return records


def find_misfits(given: Mapping[str, object]) -> list[str]:
    """Say which values of a state_dict's rows are no tensors, or no counts; empty if all are what they must be."""
    problems = []
    for key, value in given.items():
        if not isinstance(value, Tensor):
            problems.append(f"{key}: got {type(value).__name__}, wanted a tensor")
        elif key in ("step", "seed") and (value.dtype != torch.int64 or value.dim()):
            problems.append(
                f"{key}: got {tuple(value.shape)} {value.dtype}, wanted () torch.int64, one integer"
            )
        elif key == "step" and value < 0:
            problems.append(f"step: got {int(value)}, wanted 0 or more")
    return problems


def find_problems(table: Table, columns: Mapping[str, Tensor]) -> list[str]:
    """Say what is wrong with the columns of a table's rows; empty if nothing is."""
    ids = columns["ids"]
    if problems := check_ids(table, ids):
        return problems
    wanted = {
        "weights": ((len(ids), table.width), getattr(torch, table.dtype)),
        "low_halves": ((len(ids), table.width), torch.int16),
        "clocks": ((len(ids),), torch.int64),
    }
    for name, (shape, dtype) in wanted.items():
        if name in columns:
            problems += check_shape(table, name, columns[name], shape, dtype)
    if not problems and bool((columns["clocks"] < 1).any()):
        problems.append(f"table {table.name!r}: got a clock below 1; a trained row has at least 1")
    return problems


def check_ids(table: Table, ids: Tensor) -> list[str]:
    """Say what is wrong with a list of a table's ids; empty if nothing is."""
    if problems := check_shape(table, "ids", ids, (ids.numel(),), torch.int64):
        return problems
    if table.rows is not None and len(ids) and not (0 <= ids.min() and ids.max() < table.rows):
        return [
            f"table {table.name!r}: got ids {int(ids.min())} .. {int(ids.max())}, wanted 0 .. {table.rows - 1}"
        ]
    ordered = ids.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        return [f"table {table.name!r}: got an id more than once, wanted each once"]
    return []


def check_shape(
    table: Table, name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """Say how a column differs from this shape and dtype; empty if it does not."""
    if tuple(values.shape) == shape and values.dtype == dtype:
        return []
    return [
        f"table {table.name!r}: got {name} {tuple(values.shape)} {values.dtype}, wanted {shape} {dtype}; "
        "build the model with the same tables"
    ]
