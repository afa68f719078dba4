"""Training from Python: a model and data of your own through the same trainer as `colonnade train`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.checkpoint.checkpoints import open_checkpoints
from colonnade.checkpoint.fingerprint import check_model, load_dense
from colonnade.checkpoint.header import read_header, resolve
from colonnade.checkpoint.states import load_state
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import open_mesh
from colonnade.config.plan import PlanConfig
from colonnade.config.run import DenseConfig, EmbeddingConfig, RunConfig, TrainConfig, override
from colonnade.data.batches import batches_of
from colonnade.data.contract import Source, Splits
from colonnade.errors import ConfigError, DataError
from colonnade.models.ranking import evaluation_mode
from colonnade.plan.plan import build_plan
from colonnade.run.cross_rank_check import agree_on_config
from colonnade.run.interrupt import stop_on_signals
from colonnade.run.run import (
    OWN,
    OptimizerMaker,
    ScheduleMaker,
    prepare,
    set_threads,
)
from colonnade.run.validation import find_collection
from colonnade.terminal import Terminal
from colonnade.train.objective import Objective, objective_of
from colonnade.train.trainer import Outcome

SampleLoss = Callable[[Any, Batch], Tensor]

# Of rows, what is said in no table.
ROW_SETTINGS = ("clip_norm", "clip_value")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What came of `fit`. The model is trained in place and can be used, evaluated or fitted again (without `run`).
    On a server (`plan.servers`) only the rows of its collection are trained."""

    metrics: dict[str, float]
    """Of the best evaluation by the validation part, else of the last: "validation_auc", "test_auc", ..."""
    outcome: Outcome
    run: Path | None
    resumed_at: int | None
    """The saved step this call went on from."""


def fit(
    model: nn.Module,
    data: Splits | Source,
    *,
    run: str | Path | None = None,
    objective: Objective | None = None,
    loss: SampleLoss | None = None,
    dense_optimizer: OptimizerMaker | str | None = None,
    dense_schedule: ScheduleMaker | Mapping[str, Any] | None = None,
    row_schedule: ScheduleMaker | Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
    mesh: Mesh | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Fitted:
    """Collective (under torchrun every rank calls it): train `model` on `data`, evaluating after every epoch.

        found = colonnade.fit(model, data, run="runs/mine", epochs=3, batch_size=4096, dram="2GiB")
        print(found.metrics["test_auc"])

    model            any nn.Module with one EmbeddingCollection inside; `model(batch)` gives logits (B, labels), or
                     what its objective takes
    data             a Source (colonnade.data), or Splits with validation and test parts
    run              folder for checkpoints, metrics and rows beyond memory; one with checkpoints is gone on with, to
    the
                     same bits. None: everything stays in this process
    objective        what is learned and scored (`Objective`); default: the model's `objective`, else binary cross
                     entropy, AUC, log loss
    loss             instead: `loss(model(batch), batch)` gives each sample's loss (B,), and the score is its mean
    dense_optimizer  parameters -> torch optimizer; or "adam", "sgd", "adagrad" with dense_lr, dense_weight_decay
    dense_schedule   optimizer -> torch learning rate scheduler, stepped once per step; or ScheduleConfig's settings,
                     e.g. {"name": "cosine", "warmup_steps": 100}
    row_schedule     the same for the rows: the RowOptimizer has a param group per table (or part)
    config           settings to start from
    settings         by name: those of TrainConfig and PlanConfig (epochs, batch_size, patience, memory ...; dram is
                     memory.dram), of DenseConfig with dense_ (dense_lr, dense_clip_norm) and, of rows,
                     embedding_clip_norm, embedding_clip_value; rows' optimizers are declared with the tables

    Ctrl-C checkpoints and ends (`outcome.stopped`); the same call goes on from there. A run that is finished is
    opened for
    reading: the model gets its weights, the result is what it recorded, and nothing is written.
    Raises ConfigError, DataError, CheckpointError before the first step, NonFiniteError, StorageError while training.
    """
    chosen = {"data.name": OWN, **_dotted(settings)}
    if isinstance(dense_optimizer, str):
        chosen["dense.optimizer"], dense_optimizer = dense_optimizer, None
    if isinstance(dense_schedule, Mapping):
        chosen["dense.schedule"], dense_schedule = dict(dense_schedule), None
    if isinstance(row_schedule, Mapping):
        chosen["embedding.schedule"], row_schedule = dict(row_schedule), None
    wanted = override(config or RunConfig(), chosen)
    mesh = mesh or open_mesh(timeout=timedelta(seconds=wanted.train.timeout))
    agree_on_config(wanted, mesh)
    set_threads(wanted.train.threads, mesh)
    if objective is not None and loss is not None:
        raise ConfigError("got both objective and loss, wanted one of them")
    prepared = prepare(
        model,
        data if isinstance(data, Splits) else Splits(train=data),
        wanted,
        mesh,
        None if run is None else Path(run),
        objective=MeanLoss(loss) if loss is not None else objective or objective_of(model),
        dense_optimizer=dense_optimizer,
        dense_schedule=dense_schedule,
        row_schedule=row_schedule,
        console=None if quiet or mesh.rank > 0 else Terminal(),
    )
    try:
        model.train()
        with stop_on_signals(prepared.trainer):
            outcome = prepared.train()
    finally:
        if prepared.checkpoints is not None:
            prepared.checkpoints.end_writing()
    return Fitted(dict(outcome.metrics), outcome, prepared.folder, prepared.resumed_at)


def load_run(
    model: nn.Module,
    run: str | Path,
    *,
    at: int | str | None = None,
    mesh: Mesh | None = None,
    dram: int | str | None = None,
) -> int:
    """Collective: give a model just built the dense weights and rows of a run's checkpoint; returns its step.

    `at`: a saved step, "best", "last", or None: the best where a validation part chose one, else the last. Rows
    are read from the run folder, which nothing here changes; the model is put in eval mode. Raises CheckpointError
    where the checkpoint is another model's.
    """
    folder, mesh = Path(run), mesh or open_mesh()
    collection, step = find_collection(model), resolve(folder, at)
    header = read_header(folder, step)
    check_model(folder, header, collection.declaration, model)
    checkpoints, _ = open_checkpoints(folder, collection.tables, mesh, read_only=True, at=step)
    config = PlanConfig.model_validate({"memory": {"dram": dram}})
    plan = build_plan(collection.tables, mesh.world, config)
    collection.open(plan, mesh, backings=checkpoints.backings, step=step)
    dense = load_state(folder / "checkpoints" / f"{step:012d}" / "dense", header["run"])
    load_dense(model, dense["model"])
    model.eval()
    return step


class MeanLoss:
    """A loss of one's own, sample by sample: trained for and scored by its weighted mean."""

    monitor = "loss"
    metrics = ("loss",)

    def __init__(self, sample_loss: SampleLoss) -> None:
        self.sample_loss = sample_loss

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        return self._sum(model, batch) / max(batch.world_weight, 1e-12)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        total = torch.zeros(3, dtype=torch.float64)  # loss, weight, samples
        with evaluation_mode(model):
            for batch in batches_of(source, batch_size, mesh, channel="evaluate"):
                weight = batch.sample_weight
                here = [
                    float(self._sum(model, batch)),
                    float(batch.size if weight is None else weight.sum()),
                    float(batch.size),
                ]
                total += torch.tensor(here, dtype=torch.float64)
        value, weights, samples = mesh.all_reduce("evaluate", total).tolist()
        mean = value / weights if weights else float("nan")
        return {"loss": mean, "num_samples": samples}

    def _sum(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = self.sample_loss(model(batch), batch)
        if losses.shape != (batch.size,):
            raise DataError(
                f"loss gave {tuple(losses.shape)}, wanted one number per sample ({batch.size},); "
                "do not average (reduction='none'): samples are weighed over all ranks"
            )
        if batch.sample_weight is not None:
            losses = losses * batch.sample_weight.to(losses)
        return losses.sum()


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"epochs": 3, "dense_lr": 0.1} -> {"train.epochs": 3, "dense.lr": 0.1}. ConfigError names the nearest."""
    known = {
        **{name: f"train.{name}" for name in TrainConfig.model_fields},
        **{name: f"plan.{name}" for name in PlanConfig.model_fields},
        "dram": "plan.memory.dram",
        **{
            f"dense_{name}": f"dense.{name}"
            for name in DenseConfig.model_fields
            if name not in ("optimizer", "schedule")  # fit's own arguments
        },
        **{f"embedding_{name}": f"embedding.{name}" for name in ROW_SETTINGS},
    }
    for name in settings:
        if name in known:
            continue
        if name.removeprefix("embedding_") in EmbeddingConfig.model_fields:
            raise ConfigError(
                f"fit: got {name}, which the model's tables hold; write Table(..., optimizer=Adagrad(lr=0.05))"
            )
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        raise ConfigError(f"fit: unknown setting {name!r}; {hint}")
    return {known[name]: value for name, value in settings.items()}
