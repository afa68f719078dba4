"""Several batches as one block of bytes: what travels between processes.

A tensor that crosses a process boundary costs a file descriptor and two system calls; a batch has some forty. A
block has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.batch import Batch, Ids

ALIGNMENT = 64


class Place(NamedTuple):
    """Where a tensor lies in a block."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Block(NamedTuple):
    """`batches` hold a `Place` wherever they held a tensor."""

    data: Tensor  # (bytes,) uint8
    batches: list[Batch]


def pack(batches: Sequence[Batch], *, shared: bool) -> Block:
    """Copy. `shared`: into memory that another process can map."""
    tensors: list[tuple[Place, Tensor]] = []
    size = 0

    def place(tensor: Tensor) -> Place:
        nonlocal size
        taken = Place(size, tuple(tensor.shape), tensor.dtype)
        tensors.append((taken, tensor))
        size += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        return taken

    placed = [_replaced(batch, Tensor, place) for batch in batches]
    # The kind that torch's own collation makes: `share_memory_` would copy once more.
    storage = torch.UntypedStorage._new_shared(size) if shared else torch.UntypedStorage(size)
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    view = _views(data)
    for taken, tensor in tensors:
        view(taken).copy_(tensor)
    return Block(data, placed)


def unpack(block: Block) -> list[Batch]:
    """No copy: the batches keep the block."""
    view = _views(block.data)
    return [_replaced(batch, Place, view) for batch in block.batches]


def _views(data: Tensor) -> Callable[[Place], Tensor]:
    """A block's tensors by place: one call of torch each, since a batch has many."""
    as_dtype: dict[torch.dtype, Tensor] = {}

    def view(place: Place) -> Tensor:
        if place.dtype not in as_dtype:
            as_dtype[place.dtype] = data.view(place.dtype)
        strides, stride = [], 1
        for length in reversed(place.shape):
            strides.append(stride)
            stride *= max(1, length)
        first = place.offset // place.dtype.itemsize
        return as_dtype[place.dtype].as_strided(place.shape, strides[::-1], first)

    return view


def _replaced(batch: Batch, kind: type, by: Any) -> Batch:
    """The same batch with by(x) for every x of `kind`. What is neither stays."""

    def of(value: Any) -> Any:
        return by(value) if isinstance(value, kind) else value

    ids = {
        name: Ids(of(ids.values), of(ids.offsets), of(ids.weights))
        for name, ids in batch.ids.items()
    }
    plain = ("dense", "label", "sample_weight", "group", "key")
    changed = {name: of(getattr(batch, name)) for name in plain}
    if batch.next_use is not None:
        changed["next_use"] = {name: of(codes) for name, codes in batch.next_use.items()}
    return dataclasses.replace(batch, ids=ids, **changed)
