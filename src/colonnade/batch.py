"""Mini-batch of samples on the CPU, as a reader yields it.

Frameworks that move batches with `to`, `pin_memory` or torch's pytrees can use it directly.

Legend: B samples, n dense columns, E lookups of one feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from colonnade.errors import DataError


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of one feature for a whole batch.

    One-hot: `offsets` is None and `values` is (B,). Otherwise sample i owns
    `values[offsets[i]:offsets[i + 1]]`; `offsets` starts at 0, never decreases and ends at E.
    """

    values: Tensor  # (E,) int64
    offsets: Tensor | None = None  # (B + 1,) int64
    weights: Tensor | None = None  # (E,) float: multiplies each looked-up row before pooling

    @property
    def counts(self) -> Tensor:
        """Number of ids of each sample, (B,) int64."""
        return torch.ones_like(self.values) if self.offsets is None else self.offsets.diff()

    @property
    def samples(self) -> Tensor:
        """Sample that each id belongs to, (E,) int64."""
        counts = self.counts
        return torch.repeat_interleave(torch.arange(len(counts)), counts)


class SharedIds(Mapping[str, Ids]):
    """Ids of a batch by feature, where a feature may have one sample that all samples share.

    `compact` has the ids as they came. Items have copies for all samples, made when they are read.
    """

    def __init__(self, compact: Mapping[str, Ids], size: int) -> None:
        self.compact = compact
        self.size = size
        self._copies: dict[str, Ids] = {}

    def has_one_sample(self, feature: str) -> bool:
        """Return whether all samples share the ids of a feature."""
        return has_one_sample(self.compact.get(feature))

    def __getitem__(self, feature: str) -> Ids:
        ids = self.compact[feature]
        if not has_one_sample(ids):
            return ids
        if feature not in self._copies:
            self._copies[feature] = repeat_sample(ids, self.size)
        return self._copies[feature]

    def __iter__(self) -> Iterator[str]:
        return iter(self.compact)

    def __len__(self) -> int:
        return len(self.compact)


def has_one_sample(ids: object) -> bool:
    """Return whether these are valid ids of a single sample, apart from their weights."""
    if not isinstance(ids, Ids) or not isinstance(ids.values, Tensor) or ids.values.dim() != 1:
        return False
    if ids.offsets is None:
        return ids.values.numel() == 1
    return (
        isinstance(ids.offsets, Tensor)
        and ids.offsets.dtype == torch.int64
        and tuple(ids.offsets.shape) == (2,)
        and ids.offsets.data_ptr() != 0
        and ids.offsets.tolist() == [0, ids.values.numel()]
    )


def repeat_sample(sample_ids: Ids, num_copies: int) -> Ids:
    """Return `num_copies` copies of the ids of one sample."""
    offsets = (
        None
        if sample_ids.offsets is None
        else torch.arange(num_copies + 1) * sample_ids.values.numel()
    )
    weights = sample_ids.weights
    if isinstance(weights, Tensor) and not weights.requires_grad:  # others are refused as they are
        weights = weights.repeat(num_copies)
    return Ids(sample_ids.values.repeat(num_copies), offsets, weights)


def share_samples(batch: Batch) -> Batch:
    """Return a batch whose features and dense columns with one sample, if any, are shared by all its samples."""
    if batch.size == 1:
        return batch
    dense = batch.dense
    if dense.dim() == 2 and len(dense) == 1:
        dense = dense.repeat(batch.size, 1)
    ids = batch.ids
    if any(has_one_sample(feature_ids) for feature_ids in ids.values()):
        ids = SharedIds(ids, batch.size)
    if dense is batch.dense and ids is batch.ids:
        return batch
    return replace(batch, dense=dense, ids=ids)


@dataclass(slots=True)
class Batch:
    """Mini-batch of samples. `sample_weight` (B,) scales each sample's loss; `key` identifies samples for metrics and
    never enters the model."""

    size: int  # B
    dense: Tensor  # (B, n) float32; n may be 0
    ids: Mapping[str, Ids]  # by feature name
    label: Tensor | None = None  # (B, tasks) float32
    sample_weight: Tensor | None = None  # (B,) float32
    group: Tensor | None = None  # (B,) int64: for per-group metrics
    key: Any = None
    position: Any = None  # data.contract.Position of this batch in its source
    state: Any = None  # of its source after this batch, if the source has one: Position.state
    # By feature name, (E,) uint8 by lookup: how many batches from now the id is next looked up. 0: unknown; 255: never
    # again; else code c: 2^((c - 1) / 8) batches at most. Computed by `data.next_use_hints`, used by eviction from
    # memory in a world of one rank.
    next_use: Mapping[str, Tensor] | None = None
    ends_epoch: bool = False  # the last one of its epoch
    world_weight: float = 0.0
    """Sum of sample weights over all ranks' batches of this step, once its rows are looked up."""

    def __post_init__(self) -> None:
        if not isinstance(self.size, Integral | torch.SymInt):  # torch.export counts in symbols
            raise DataError(
                f"got a batch of size {self.size!r}, wanted its number of samples, an integer: Batch(len(labels), ...)"
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move dense, label and sample_weight to a device. Ids remain on the CPU, where rows are looked up.

        Returns this batch if nothing has to move; otherwise the copy replaces it in a lookahead.
        """
        return self._move_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy dense, label and sample_weight to page-locked memory; this batch where there is no GPU."""
        if not torch.cuda.is_available():
            return self
        return self._move_tensors(Tensor.pin_memory)

    def _move_tensors(self, move_tensor: Callable[[Tensor], Tensor]) -> Batch:
        before = {name: getattr(self, name) for name in MOVED}
        after: dict[str, Any] = {
            name: None if tensor is None else move_tensor(tensor) for name, tensor in before.items()
        }
        if all(after[name] is tensor for name, tensor in before.items()):
            return self
        return replace(self, **after)


MOVED = ("dense", "label", "sample_weight")
LEAVES = (*MOVED, "ids", "group", "next_use")
"""Fields of a batch that hold tensors: children of its pytree node."""


class _Others(tuple):
    """Fields of a batch that are no children. All compare equal, because a tree's structure must not depend on the
    batch."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Others)

    __hash__ = None  # type: ignore[assignment]


def register_batch_class(batch_class: type[Batch]) -> None:
    """Register a class of batches with torch's pytrees."""
    others = tuple(field.name for field in fields(batch_class) if field.name not in LEAVES)

    def flatten(batch: Batch) -> tuple[list[Any], _Others]:
        leaves = [getattr(batch, name) for name in LEAVES]
        return leaves, _Others(getattr(batch, name) for name in others)

    def unflatten(leaves: Any, values: _Others) -> Batch:
        return batch_class(
            **dict(zip(LEAVES, leaves, strict=True)), **dict(zip(others, values, strict=True))
        )

    name = f"colonnade.{batch_class.__name__}"
    pytree.register_pytree_node(batch_class, flatten, unflatten, serialized_type_name=name)


pytree.register_pytree_node(
    Ids,
    lambda ids: ([ids.values, ids.offsets, ids.weights], None),
    lambda leaves, _: Ids(*leaves),
    serialized_type_name="colonnade.Ids",
)
register_batch_class(Batch)
