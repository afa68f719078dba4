"""Layout of records (weights, optimizer state, low halves, clock), and rows of one table as columns.

Legend: N rows, M of them, D width of the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from colonnade.ops.optimizers import IS_LOADED
from colonnade.table import CLOCK_BYTES, ITEM_BYTES, Part, Table


def weight_bytes(table: Table) -> slice:
    """Locate the weights in a record, of the table's dtype."""
    return slice(0, table.width * table.itemsize)


def state_bytes(table: Table, part: Part) -> slice:
    """Locate a part's optimizer state in a record, of the table's compute dtype."""
    item = ITEM_BYTES[table.compute_dtype]
    first = weight_bytes(table).stop + part.state * item
    return slice(first, first + part.optimizer.state_floats(part.dim) * item)


def low_bytes(table: Table) -> slice:
    """Locate the low halves of a bfloat16 master in a record, 16 bits each; empty without a master."""
    end = table.record_bytes - CLOCK_BYTES
    return slice(end - 2 * table.width * table.master, end)


def clock_bytes(table: Table) -> slice:
    """Locate the clock in a record, 64 bits."""
    return slice(table.record_bytes - CLOCK_BYTES, table.record_bytes)


def build_fresh_records(table: Table, weights: Tensor) -> Tensor:
    """Build records (N, record_bytes) uint8 of rows that load these weights (N, D), with first optimizer state."""
    num_rows, width = weights.shape
    compute = getattr(torch, table.compute_dtype)
    exact = weights.to(compute)
    state = torch.zeros(num_rows, table.state_floats, dtype=compute)
    for part in table.parts:
        value, count = part.optimizer.initial_state(part.dim)
        state[:, part.state : part.state + count] = value
        if part.optimizer.name == "ftrl":
            _solve_ftrl_state(part, exact[:, part.column : part.column + part.dim], state)
    stored = exact.to(getattr(torch, table.dtype))
    low = torch.empty(num_rows, 0, dtype=torch.uint8)
    if table.master:  # the bits are (high << 16) + low, low signed (native/kernels/rounding.h)
        bits = exact.contiguous().view(torch.int32).long() & 0xFFFFFFFF
        high = ((bits + 0x8000) >> 16 & 0xFFFF).to(torch.int32).to(torch.uint16)
        stored = high.view(torch.bfloat16)
        low = (bits & 0xFFFF).to(torch.int32).to(torch.uint16).view(torch.uint8)
    clocks = torch.full((num_rows, 1), IS_LOADED | 1)
    parts = [stored, state, low.reshape(num_rows, 2 * width * table.master), clocks]
    return torch.cat([byte_positions(part) for part in parts], dim=1)


def byte_positions(values: Tensor) -> Tensor:
    """View values as (N, bytes of a row) uint8."""
    if not values.numel():
        width = values.shape[1:].numel() * values.element_size()
        return torch.empty(len(values), width, dtype=torch.uint8)
    return values.contiguous().view(torch.uint8).reshape(len(values), -1)


def _solve_ftrl_state(part: Part, weights: Tensor, state: Tensor) -> None:
    """Set FTRL's state (n, z) to the z that gives these weights."""
    settings = part.optimizer.settings()
    dim = part.dim
    root = settings["initial_accumulator"] ** 0.5
    scale = (root + settings["beta"]) / settings["lr"] + settings["l2"]
    state[:, part.state + dim : part.state + 2 * dim] = (
        -weights.sign() * settings["l1"] - weights * scale
    )


class IdIndex:
    """Index from distinct ids to their positions in a list."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.order = ids.sort()

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position (M,) of each of these ids (M,), and whether it is in the list (M,) bool."""
        if not len(self.ids):
            return torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool)
        positions = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return self.order[positions], self.ids[positions] == ids


def build_records_from_columns(table: Table, columns: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Build records (M, record_bytes) of rows at these positions (M,), with first optimizer state."""
    weights = columns["weights"][rows]
    records = build_fresh_records(table, weights)
    records[:, weight_bytes(table)] = byte_positions(weights)
    if table.master:
        records[:, low_bytes(table)] = byte_positions(columns["low_halves"][rows])
    records[:, clock_bytes(table)] = byte_positions(columns["clocks"][rows][:, None])
    return records


def list_invalid_values(values: Mapping[str, object]) -> list[str]:
    """List the values of a state_dict's rows that are no tensors, or no counts; empty if all are right."""
    problems = []
    for key, value in values.items():
        if not isinstance(value, Tensor):
            problems.append(f"{key}: got {type(value).__name__}, wanted a tensor")
        elif key in ("step", "seed") and (value.dtype != torch.int64 or value.dim()):
            problems.append(
                f"{key}: got {tuple(value.shape)} {value.dtype}, wanted () torch.int64, one integer"
            )
        elif key == "step" and value < 0:
            problems.append(f"step: got {int(value)}, wanted 0 or more")
    return problems


def find_column_problems(table: Table, columns: Mapping[str, Tensor]) -> list[str]:
    """List what is wrong with the columns of a table's rows; empty if nothing is."""
    ids = columns["ids"]
    if problems := find_id_problems(table, ids):
        return problems
    wanted = {
        "weights": ((len(ids), table.width), getattr(torch, table.dtype)),
        "low_halves": ((len(ids), table.width), torch.int16),
        "clocks": ((len(ids),), torch.int64),
    }
    for name, (shape, dtype) in wanted.items():
        if name in columns:
            problems += find_shape_problem(table, name, columns[name], shape, dtype)
    if not problems and bool((columns["clocks"] < 1).any()):
        problems.append(f"table {table.name!r}: got a clock below 1; a trained row has at least 1")
    return problems


def find_id_problems(table: Table, ids: Tensor) -> list[str]:
    """List what is wrong with a list of a table's ids; empty if nothing is."""
    if problems := find_shape_problem(table, "ids", ids, (ids.numel(),), torch.int64):
        return problems
    if table.rows is not None and len(ids) and not (0 <= ids.min() and ids.max() < table.rows):
        return [
            f"table {table.name!r}: got ids {int(ids.min())} .. {int(ids.max())}, wanted 0 .. {table.rows - 1}"
        ]
    ordered = ids.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        return [f"table {table.name!r}: got an id more than once, wanted each once"]
    return []


def find_shape_problem(
    table: Table, name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """Describe how a column differs from this shape and dtype; empty if it does not."""
    if tuple(values.shape) == shape and values.dtype == dtype:
        return []
    return [
        f"table {table.name!r}: got {name} {tuple(values.shape)} {values.dtype}, wanted {shape} {dtype}; "
        "build the model with the same tables"
    ]
