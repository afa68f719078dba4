"""Hot rows: a few of a table's, named by their ids, that lie on every rank whoever owns the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import ConfigError

Side = Literal["both", "hot", "cold"]


@dataclass(frozen=True, slots=True)
class HotRows:
    """Of one table. A lookup is of a hot row or of a cold one by this list alone, which all ranks have."""

    ids: tuple[int, ...] = field(repr=False)
    """Ascending, each once."""
    num_ranks: int
    """All of which have a copy."""
    side: Side = "both"
    """Of a sharding: a whole table's, or that of its hot or its cold rows alone."""

    def __post_init__(self) -> None:
        if not self.ids or list(self.ids) != sorted(set(self.ids)):
            raise ConfigError("hot rows: got ids that are none, or not ascending and each once")

    def __str__(self) -> str:
        return f"{len(self.ids):,} hot rows on each of {self.num_ranks} ranks"

    @property
    def tensor(self) -> Tensor:
        """(H,) int64, ascending."""
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def word(self) -> str:
        """Short, of this list and no other: folders of rows have it in their names."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:12]

    def owns(self, ids: Tensor) -> Tensor:
        """ids (N,) int64 -> (N,) bool: whether they are of this side."""
        if self.side == "both":
            return torch.ones(len(ids), dtype=torch.bool)
        return is_hot(ids, self.tensor) == (self.side == "hot")


def hot_rows(ids: Iterable[int] | Tensor, num_ranks: int) -> HotRows:
    """Of ids in any order, some more than once."""
    listed = ids.tolist() if isinstance(ids, Tensor) else ids
    return HotRows(tuple(sorted({int(each) for each in listed})), num_ranks)


def is_hot(ids: Tensor, hot: Tensor) -> Tensor:
    """ids (N,) int64, hot (H,) int64 ascending -> (N,) bool: which of them are in the list."""
    return hot[torch.searchsorted(hot, ids).clamp(max=len(hot) - 1)] == ids
