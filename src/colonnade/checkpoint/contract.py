"""Contracts of checkpoints: what they keep of a trainer, and who takes each one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Position
from colonnade.pipeline.prepared_batches import Held

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection
    from colonnade.row_optimizer import RowOptimizer


class TrainerState(Protocol):
    """State of a trainer that a checkpoint keeps, and that `restore` puts back. One on each rank."""

    model: torch.nn.Module
    collection: EmbeddingCollection
    mesh: Mesh
    rows: RowOptimizer
    dense: Any
    """Dense gradients: `state()` and `restore(states)` of what rounding had kept."""
    dense_optimizer: torch.optim.Optimizer
    lr_schedules: tuple[Any, ...]
    data: Any
    position: Position
    best: Any
    """Best evaluation: `step`, `monitor`, `state()`, `restore(state)`."""
    days: Any
    loss_scale: Any
    progress: Any
    restored_reads: list[Held]
    earlier_work: Any

    def count_work(self) -> Mapping[str, Any]:
        """Return the counts of this rank's work so far."""
        ...

    def restore_schedules(
        self, states: Sequence[Mapping[str, Any]], groups: Mapping[str, Any], step: int
    ) -> None:
        """Put the learning rate schedules back to `step`. Raises CheckpointError for another number of them."""
        ...


class Destination(Protocol):
    """Rank 0 has it; its checkpoint thread calls it, training thread opens and closes it."""

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        """The checkpoint of `step`, the newest of those `kept`, is there: take it. Says what fails, raises nothing."""
        ...

    def close(self) -> None:
        """Raises StorageError if the newest checkpoint was not taken."""
        ...
