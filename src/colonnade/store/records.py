"""Bytes of a row's record: which of them are weights, optimizer state, low halves and clock, and records of new rows.

Legend: N rows, D width of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def fresh_records(table: Table, weights: Tensor) -> Tensor:
    """(N, record_bytes) uint8 of rows with these weights (N, D), first optimizer state and clock 1."""
    num_rows, width = weights.shape
    compute = getattr(torch, table.compute_dtype)
    exact = weights.to(compute)
    state = torch.zeros(num_rows, table.state_floats, dtype=compute)
    for part in table.parts:
        value, count = part.optimizer.initial_state(part.dim)
        state[:, part.state : part.state + count] = value
        if part.optimizer.name == "ftrl":
            _solve_ftrl(part, exact[:, part.column : part.column + part.dim], state)
    stored, low = exact.to(getattr(torch, table.dtype)), torch.empty(num_rows, 0, dtype=torch.uint8)
    if table.master:  # the bits are (high << 16) + low, low signed (native/kernels/rounding.h)
        bits = exact.contiguous().view(torch.int32).long() & 0xFFFFFFFF
        high = ((bits + 0x8000) >> 16 & 0xFFFF).to(torch.int32).to(torch.uint16)
        stored = high.view(torch.bfloat16)
        low = (bits & 0xFFFF).to(torch.int32).to(torch.uint16).view(torch.uint8)
    clocks = torch.ones(num_rows, 1, dtype=torch.int64)
    parts = [stored, state, low.reshape(num_rows, 2 * width * table.master), clocks]
    return torch.cat([bytes_of(part) for part in parts], dim=1)


def bytes_of(values: Tensor) -> Tensor:
    """(N, bytes of a row) uint8."""
    if not values.numel():
        width = values.shape[1:].numel() * values.element_size()
        return torch.empty(len(values), width, dtype=torch.uint8)
    return values.contiguous().view(torch.uint8).reshape(len(values), -1)


def _solve_ftrl(part: Part, weights: Tensor, state: Tensor) -> None:
    """FTRL's weights follow from its state (n, z): the z that gives these weights."""
    settings = part.optimizer.settings()
    dim = part.dim
    root = settings["initial_accumulator"] ** 0.5
    scale = (root + settings["beta"]) / settings["lr"] + settings["l2"]
    state[:, part.state + dim : part.state + 2 * dim] = (
        -weights.sign() * settings["l1"] - weights * scale
    )
