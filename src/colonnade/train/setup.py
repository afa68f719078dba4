"""Trainers of runs: what all steps of opening a run need, and the trainer of an open collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from colonnade.batch import Batch
from colonnade.cache.next_use import add_next_use_to_splits
from colonnade.checkpoint.checkpoints import Checkpoints
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig
from colonnade.data import SOURCES, Splits
from colonnade.data.batches import open_batches
from colonnade.embedding import EmbeddingCollection, find_collection
from colonnade.files.disk import Disk
from colonnade.models.tower_modules import describe_tower_modules
from colonnade.plan.names import DenseCodec, Thresholding
from colonnade.plan.plan import Plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.store.contract import Backing
from colonnade.terminal import Terminal
from colonnade.train.dense import DenseGradients
from colonnade.train.loss_scale import build_loss_scale
from colonnade.train.objective import Objective
from colonnade.train.progress import Progress
from colonnade.train.record import select_record_part
from colonnade.train.tower_weights import find_tower_weights
from colonnade.train.trainer import Optimizers, Trainer
from colonnade.wire.thresholded import ADAM_BETAS, ADAM_EPSILON

OptimizerFactory = Callable[[Sequence[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau | None]

MAX_EPOCHS = 1_000_000
"""Number of epochs over a few batches that no timed copy of a model ends."""
DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetup:
    """Arguments of a run: model, data, settings, ranks and folder. All steps of opening it read this value."""

    model: nn.Module
    data: Splits
    config: RunConfig
    mesh: Mesh
    folder: Path | None = None
    """Run folder; None: nothing is written, and every row must fit in memory."""
    objective: Objective
    dense_optimizer: OptimizerFactory | None = None
    """Factory of the dense optimizer; None: the configured one. Likewise both schedules."""
    dense_schedule: ScheduleFactory | None = None
    row_schedule: ScheduleFactory | None = None
    callbacks: Sequence[object] = ()
    """Callbacks of training (`colonnade.Callback`), which rank 0 calls."""
    console: Console | None = None
    disk: Disk = field(default_factory=Disk)
    read_only: bool = False
    at: int | str | None = None
    """Checkpoint to resume from: a step, "best" or "last"; None: the newest."""

    @property
    def collection(self) -> EmbeddingCollection:
        """Collection of the model. Raises ConfigError unless there is exactly one."""
        return find_collection(self.model)

    def for_reading(self) -> RunSetup:
        """Return the setup of a run that is opened for reading only."""
        return replace(self, read_only=True)

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Build the optimizer of dense parameters."""
        if self.dense_optimizer is not None:
            return self.dense_optimizer(parameters)
        return build_dense_optimizer(parameters, config=self.config)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained dense parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def trained_folder(self) -> Path | None:
        """Folder that the run writes to; None if it writes nothing."""
        return None if self.read_only else self.folder


def build_trainer(
    setup: RunSetup,
    rows: RowOptimizer,
    optimizer: Optimizer,
    schedules: Sequence[LRScheduler | ReduceLROnPlateau | None],
    run_steps: int | None,
    checkpoints: Checkpoints | None,
) -> Trainer:
    """Build the trainer of an open collection; print a description of the model's towers."""
    collection = setup.collection
    config = setup.config
    mesh = setup.mesh
    console = setup.console
    exchange = collection.exchange
    data = setup.data
    record_part = select_record_part(mesh)
    if config.data.next_use_hints and not setup.read_only:
        data = add_next_use_to_splits(data, config.train.num_epochs)
    gradients = DenseGradients(
        setup.parameters,
        mesh,
        choose_messages(collection.plan.codecs.dense, optimizer),
        late=exchange.pushed_parameters,
        towers=find_tower_weights(
            collection.declaration, exchange.inside, mesh.num_ranks, optimizer
        ),
    )
    if gradients.directed_parameters:
        apply_directions(optimizer, gradients.directed_parameters)
    trainer = Trainer(
        setup.model,
        data,
        config,
        setup.objective,
        Optimizers(
            rows=rows,
            dense=optimizer,
            dense_gradients=gradients,
            lr_schedules=[schedule for schedule in schedules if schedule is not None],
            loss_scale=build_loss_scale(config.train.loss_scale),
        ),
        Progress(
            total_steps=run_steps,
            console=console or Terminal(quiet=True),
            folder=None if record_part is None else setup.trained_folder,
            part=record_part or "all",
            callbacks=setup.callbacks if mesh.rank == 0 else (),
            is_quiet=console is None or mesh.rank > 0,
        ),
        checkpoints,
        # Neither a user's model nor one without a folder can be built again.
        can_reopen=setup.folder is not None and config.data.name in SOURCES,
    )
    if console is not None and (tower_text := describe_tower_modules(setup.model, collection)):
        console.print(tower_text, highlight=False)
    return trainer


def open_timed_trainer(
    setup: RunSetup,
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Batch],
    backings: Sequence[Backing],
) -> Trainer:
    """Open a copy of the model under a plan, and build a trainer that repeats these batches and writes nothing.

    Collective. model: the copy. batches: of this rank; (micro-)batches of the run's size."""
    collection = find_collection(model)
    data = Splits(train=open_batches(batches, setup.data.train.schema, name="sample"))
    train_update = {
        "epochs": MAX_EPOCHS, "max_steps": None, "progressive": False, "on_non_finite": "skip"
    }  # fmt: skip
    config = setup.config.model_copy(
        update={
            "data": setup.config.data.model_copy(
                update={"next_use_hints": False, "last_batch": "keep"}
            ),
            "train": setup.config.train.model_copy(update=train_update),
        }
    )
    copied = replace(
        setup,
        model=model,
        data=data,
        config=config,
        folder=None,
        callbacks=(),
        console=None,
    )
    collection.open(plan, setup.mesh, backings=backings)
    rows = RowOptimizer(collection, clip_value=config.embedding.clip_value)
    optimizer = copied.make_optimizer(copied.parameters or [nn.Parameter(torch.empty(0))])
    trainer = build_trainer(copied, rows, optimizer, [], None, None)
    trainer.dense.build_buckets()
    return trainer


def build_dense_optimizer(
    parameters: Sequence[nn.Parameter], *, config: RunConfig
) -> torch.optim.Optimizer:
    """Build the configured optimizer of the dense parameters."""
    optimizer_class = DENSE_OPTIMIZERS[config.dense.optimizer]
    return optimizer_class(
        parameters, lr=config.dense.learning_rate, weight_decay=config.dense.weight_decay or 0.0
    )


def choose_messages(codec: DenseCodec, optimizer: Optimizer) -> DenseCodec:
    """Return the codec of dense gradients: for torch.optim.Adam with default betas, thresholded sums are of directions.

    Each rank then sends the direction of its own step, and all apply the mean direction."""
    if not isinstance(codec, Thresholding) or type(optimizer) is not torch.optim.Adam:
        return codec
    names = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
    forms = {
        tuple(group.get(name, False) for name in names)  # torch 2.6 has no decoupled_weight_decay
        for group in optimizer.param_groups
    }
    weight_decay = optimizer.defaults["weight_decay"]
    is_default = forms == {(ADAM_BETAS, ADAM_EPSILON, weight_decay, False, False, False)}
    return replace(codec, adam_weight_decay=weight_decay) if is_default else codec


def apply_directions(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let `optimizer.step()` subtract the gradients of `parameters`, which are directions, times the learning rate."""
    directions: dict[nn.Parameter, Tensor | None] = {}

    @torch.no_grad()
    def apply(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in directed and parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    directions[parameter], parameter.grad = parameter.grad, None

    def restore(*_: Any) -> None:
        for parameter, direction in directions.items():
            parameter.grad = direction

    directed = set(parameters)
    optimizer.register_step_pre_hook(apply)
    optimizer.register_step_post_hook(restore)


def apply_late_directions(optimizer: Optimizer, directions: Mapping[nn.Parameter, Tensor]) -> None:
    """Let the next `step()` of an Adam also subtract these directions, (n,) each, times the learning rate.

    Another optimizer has learning rates of another size, so with it they are dropped."""
    if not directions or type(optimizer) is not torch.optim.Adam:
        return

    @torch.no_grad()
    def apply(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in directions:
                    late = directions[parameter].to(parameter).view_as(parameter)
                    parameter.add_(late, alpha=-group["lr"])
        hook.remove()

    hook = optimizer.register_step_post_hook(apply)
