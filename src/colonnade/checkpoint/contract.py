"""Contracts of checkpoints: the saved state of a trainer, and destinations that receive each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Position
from colonnade.pipeline.prepared_batches import PrefetchedBatch

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection
    from colonnade.row_optimizer import RowOptimizer


class TrainerState(Protocol):
    """State of a trainer that a checkpoint saves and `restore_trainer` restores, on each rank, and the record reads."""

    model: torch.nn.Module
    config: Any
    """Settings of the run (`config.run.RunConfig`)."""
    collection: EmbeddingCollection
    mesh: Mesh
    rows: RowOptimizer
    dense: Any
    """Dense gradients: `noise`, `export_residuals()` and `set_checkpoint_residuals(states)`."""
    dense_optimizer: torch.optim.Optimizer
    lr_schedules: tuple[Any, ...]
    data: Any
    position: Position
    best: Any
    """Best evaluation: `step`, `monitor`, `state()`, `restore(state)`."""
    days: Any
    loss_scale: Any
    phases: Any
    """Time by phase: `seconds`."""
    progress: Any
    restored_reads: list[PrefetchedBatch]
    earlier_work: Any

    def count_work(self) -> Mapping[str, Any]:
        """Return the counts of this rank's work so far."""
        ...

    def restore_schedules(
        self, states: Sequence[Mapping[str, Any]], groups: Mapping[str, Any], step: int
    ) -> None:
        """Restore the learning rate schedules to `step`. Raises CheckpointError for another number of them."""
        ...


class Destination(Protocol):
    """Receiver of each checkpoint, on rank 0.

    The checkpoint thread calls `send`; the training thread opens and closes it.
    """

    def send(
        self, newest_step: int, retained_steps: Sequence[int], print_line: Callable[[str], None]
    ) -> None:
        """Send the checkpoint of `newest_step`, the newest of those retained. Prints failures; raises nothing."""
        ...

    def close(self) -> None:
        """Raise StorageError if the newest checkpoint was not sent."""
        ...
