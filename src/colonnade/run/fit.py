"""Training from Python: `fit` trains your own model and data with the trainer of `colonnade train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.checkpoint.checkpoints import open_checkpoints
from colonnade.checkpoint.fingerprint import check_model_matches_checkpoint, load_dense
from colonnade.checkpoint.header import read_header, resolve_step
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import RowFiles
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import open_mesh
from colonnade.config.plan import PlanConfig
from colonnade.config.problems import explain_unknown_setting
from colonnade.config.run import (
    OWN,
    DenseConfig,
    EmbeddingConfig,
    RunConfig,
    TrainConfig,
    override_settings,
)
from colonnade.data.batches import open_loader, read_rank_batches
from colonnade.data.contract import Source, Splits
from colonnade.embedding import find_collection
from colonnade.errors import ConfigError, DataError
from colonnade.models.ranking import evaluation_mode
from colonnade.plan.build import build_plan
from colonnade.run.cross_rank_check import check_config_on_all_ranks
from colonnade.run.run import prepare_run, set_num_threads
from colonnade.terminal import Terminal
from colonnade.train.interrupt import stop_on_signals
from colonnade.train.metrics import MetricFunction, compute_user_metrics, gather_columns
from colonnade.train.objective import Objective, add_metrics, get_objective
from colonnade.train.setup import OptimizerFactory, RunSetup, ScheduleFactory
from colonnade.train.trainer import Outcome

SampleLoss = Callable[[Any, Batch], Tensor]

# Settings of rows that no table declares.
ROW_SETTINGS = ("clip_norm", "clip_value")


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of `fit`.

    The model is trained in place and can be used, evaluated or fitted again (without `run`). On a server
    (`plan.servers`) only the rows of its collection are trained.
    """

    metrics: dict[str, float]
    """Metrics of the best evaluation by the validation part, else of the last: "validation_auc", "test_auc", ..."""
    outcome: Outcome
    run: Path | None
    resumed_at: int | None
    """Saved step that this call resumed from; None for a new run."""


def fit(
    model: nn.Module,
    data: Splits | Source | Iterable[Any],
    *,
    run: str | Path | None = None,
    objective: Objective | None = None,
    loss: SampleLoss | None = None,
    dense_optimizer: OptimizerFactory | str | None = None,
    dense_schedule: ScheduleFactory | Mapping[str, Any] | None = None,
    row_schedule: ScheduleFactory | Mapping[str, Any] | None = None,
    callbacks: Sequence[object] = (),
    metrics: Mapping[str, MetricFunction] = MappingProxyType({}),
    config: RunConfig | None = None,
    mesh: Mesh | None = None,
    quiet: bool = False,
    **settings: Any,
) -> FitResult:
    """Train `model` on `data`, and evaluate it after every epoch. Collective: under torchrun every rank calls it.

        result = colonnade.fit(model, data, run="runs/mine", epochs=3, batch_size=4096, dram="2GiB")
        print(result.metrics["test_auc"])

    model            any nn.Module with one EmbeddingCollection inside; `model(batch)` gives logits (B, labels), or
                     what its objective takes
    data             a Source (colonnade.data), or Splits with validation and test parts; or a DataLoader, or another
                     iterable that can be read again, of batches: `Batch`, or tensors by name, with the columns of the
                     first one. On several ranks it needs a DistributedSampler
    run              folder for checkpoints, metrics and rows that do not fit in memory; a folder with checkpoints is
                     resumed, to the same bits. None: everything stays in this process
    objective        loss and metrics (`Objective`); default: the model's `objective`, else binary cross entropy, AUC,
                     log loss
    loss             instead of objective: `loss(model(batch), batch)` gives each sample's loss (B,); the score is the
                     mean loss
    dense_optimizer  parameters -> torch optimizer; or "adam", "sgd", "adagrad" with dense_lr, dense_weight_decay
    dense_schedule   optimizer -> torch learning rate scheduler, stepped once per step; or ScheduleConfig's settings,
                     e.g. {"name": "cosine", "warmup_steps": 100}
    row_schedule     the same for the rows: the RowOptimizer has a param group per table (or part)
    callbacks        objects that are called while training (`Callback`), on rank 0
    metrics          name -> function(scores, labels), called on rank 0 with tensors (S,) float64 of all ranks' samples;
                     scores are probabilities, or with `loss` what the model gives
    config           settings to start from
    settings         by name: fields of TrainConfig and PlanConfig (epochs, batch_size, patience, memory ...; dram is
                     memory.dram), of DenseConfig with prefix dense_ (dense_lr, dense_clip_norm), and last_batch,
                     embedding_clip_norm, embedding_clip_value; optimizers of rows are declared with the tables

    Ctrl-C saves a checkpoint and stops (`outcome.stopped`); the same call resumes from there. A finished run is opened
    for reading: the model gets its weights, the result is the recorded one, and nothing is written.
    Raises ConfigError, DataError, CheckpointError before the first step; NonFiniteError, StorageError, CallbackError.
    """
    overrides = {"data.name": OWN, **_expand_setting_names(settings)}
    dense_optimizer = _select_factory(dense_optimizer, "dense.optimizer", overrides)
    dense_schedule = _select_factory(dense_schedule, "dense.schedule", overrides)
    row_schedule = _select_factory(row_schedule, "embedding.schedule", overrides)
    full_config = override_settings(config or RunConfig(), overrides)
    mesh = mesh or open_mesh(timeout=timedelta(seconds=full_config.train.timeout))
    check_config_on_all_ranks(full_config, mesh)
    set_num_threads(full_config.train.threads, mesh)
    splits = data if isinstance(data, Splits) else Splits(train=data)  # type: ignore[arg-type]
    setup = RunSetup(
        model=model,
        data=_open_parts(splits, mesh.num_ranks),
        config=full_config,
        mesh=mesh,
        folder=None if run is None else Path(run),
        objective=add_metrics(_choose_objective(model, objective, loss), metrics),
        dense_optimizer=dense_optimizer,
        dense_schedule=dense_schedule,
        row_schedule=row_schedule,
        callbacks=callbacks,
        console=None if quiet or mesh.rank > 0 else Terminal(),
    )
    opened_run = prepare_run(setup)
    try:
        model.train()
        with stop_on_signals(opened_run.trainer):
            outcome = opened_run.train()
    finally:
        if opened_run.checkpoints is not None:
            opened_run.checkpoints.stop_writing()
    return FitResult(dict(outcome.metrics), outcome, opened_run.folder, opened_run.resumed_at)


def load_checkpoint(
    model: nn.Module,
    run: str | Path,
    *,
    at: int | str | None = None,
    mesh: Mesh | None = None,
    dram: int | str | None = None,
) -> int:
    """Load dense weights and rows of a run's checkpoint into a newly built model; return its step. Collective.

    at: a saved step, "best", "last", or None: the best by the validation part if there is one, else the last. Rows are
    read from the run folder, which does not change. The model is put in eval mode. Raises CheckpointError if the
    checkpoint is another model's.
    """
    folder = Path(run)
    mesh = mesh or open_mesh()
    collection = find_collection(model)
    step = resolve_step(folder, at)
    header = read_header(folder, step)
    check_model_matches_checkpoint(folder, header, collection.declaration, model)
    checkpoints, _ = open_checkpoints(
        RowFiles(folder), collection.tables, mesh, read_only=True, at=step
    )
    config = PlanConfig.model_validate({"memory": {"dram": dram}})
    plan = build_plan(collection.tables, mesh.world, config)
    collection.open(plan, mesh, backings=checkpoints.backings, step=step)
    dense = load_state(folder / "checkpoints" / f"{step:012d}" / "dense", header["run"])
    load_dense(model, dense["model"])
    model.eval()
    return step


class MeanLoss:
    """Objective of a user's per-sample loss, scored by its weighted mean."""

    monitor = "loss"
    metrics = ("loss",)
    user_metrics: Mapping[str, MetricFunction] = MappingProxyType({})

    def __init__(self, sample_loss: SampleLoss) -> None:
        self.sample_loss = sample_loss

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute this rank's part of the global batch's mean loss."""
        return self._sum_losses(model(batch), batch) / max(batch.world_weight, 1e-12)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Compute the mean loss over `source`, its number of samples, and the user's metrics. Collective."""
        total = torch.zeros(3, dtype=torch.float64)  # loss, weight, samples
        predictions = []
        with evaluation_mode(model):
            for batch in read_rank_batches(source, batch_size, mesh, channel="evaluate"):
                weight = batch.sample_weight
                outputs = model(batch)
                if self.user_metrics:
                    predictions.append(_join_predictions(outputs, batch))
                sums = [
                    float(self._sum_losses(outputs, batch)),
                    float(batch.size if weight is None else weight.sum()),
                    float(batch.size),
                ]
                total += torch.tensor(sums, dtype=torch.float64)
        value, weights, samples = mesh.all_reduce("evaluate", total).tolist()
        mean = value / weights if weights else float("nan")
        metrics = {"loss": mean, "num_samples": samples}
        if self.user_metrics:
            pooled = gather_columns(torch.cat(predictions), mesh)
            labels = source.schema.labels
            metrics |= compute_user_metrics(self.user_metrics, pooled, labels, mesh)
        return metrics

    def _sum_losses(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the weighted sum of the losses of a batch. Raises DataError for a wrong shape."""
        losses = self.sample_loss(outputs, batch)
        if losses.shape != (batch.size,):
            raise DataError(
                f"loss gave {tuple(losses.shape)}, wanted one number per sample ({batch.size},); "
                "do not average (reduction='none'): samples are weighed over all ranks"
            )
        if batch.sample_weight is not None:
            losses = losses * batch.sample_weight.to(losses)
        return losses.sum()


def _join_predictions(outputs: Any, batch: Batch) -> Tensor:
    """Return outputs and labels of a batch, (B, 2 T) float64 on the CPU. Raises ConfigError for other shapes."""
    labels = batch.label
    if not isinstance(outputs, Tensor) or labels is None or outputs.numel() != labels.numel():
        raise ConfigError(
            f"metrics: got {tuple(getattr(outputs, 'shape', ()))} of the model for labels "
            f"{tuple(getattr(labels, 'shape', ()))}, wanted as many; leave metrics out, or pass your own objective"
        )
    parts = [outputs.reshape(labels.shape), labels]
    return torch.cat([part.cpu().double() for part in parts], dim=1)


def _choose_objective(
    model: nn.Module, objective: Objective | None, loss: SampleLoss | None
) -> Objective:
    """Return the objective of the arguments, or the model's. Raises ConfigError for both an objective and a loss."""
    if loss is None:
        return objective or get_objective(model)
    if objective is not None:
        raise ConfigError("got both objective and loss, wanted one of them")
    return MeanLoss(loss)


def _select_factory(
    argument: Callable[..., Any] | Mapping[str, Any] | str | None,
    setting_name: str,
    overrides: dict[str, Any],
) -> Callable[..., Any] | None:
    """Return a factory of an optimizer or a schedule; None for settings, which are added to `overrides`."""
    if isinstance(argument, Mapping | str):
        overrides[setting_name] = argument if isinstance(argument, str) else dict(argument)
        return None
    return argument


def _open_parts(data: Splits, num_ranks: int) -> Splits:
    """Open the parts that are no Source: iterables of batches. Raises ConfigError for those that are neither."""
    sources: dict[str, Any] = {}
    for part in ("train", "validation", "test"):
        source = getattr(data, part)
        is_source = hasattr(source, "batches") and hasattr(source, "schema")
        if source is not None and not is_source:
            is_table = isinstance(source, str | Path | Mapping) or hasattr(
                source, "__arrow_c_stream__"
            )
            if is_table or not isinstance(source, Iterable):
                raise ConfigError(
                    f"fit: got a {type(source).__name__} as the {part} data, wanted a Source, or a DataLoader, a list "
                    "or another iterable of batches. Open tensors and arrays with colonnade.data.open_tensors, files "
                    "with open_csv or open_parquet, tables with open_arrow"
                )
            schema = sources["train"].schema if sources else None
            source = open_loader(source, num_ranks, schema, name=f"fit, {part} data")
        sources[part] = source
    return replace(data, **sources)


def _expand_setting_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Expand names of settings: {"epochs": 3, "dense_lr": 0.1} -> {"train.epochs": 3, "dense.lr": 0.1}.

    Raises ConfigError that names the closest setting.
    """
    setting_paths = {
        **{name: f"train.{name}" for name in TrainConfig.model_fields},
        **{name: f"plan.{name}" for name in PlanConfig.model_fields},
        "dram": "plan.memory.dram",
        "last_batch": "data.last_batch",
        **{
            f"dense_{name}": f"dense.{name}"
            for name in DenseConfig.model_fields
            if name not in ("optimizer", "schedule")  # fit's own arguments
        },
        **{f"embedding_{name}": f"embedding.{name}" for name in ROW_SETTINGS},
    }
    for name in settings:
        if name in setting_paths:
            continue
        if name.removeprefix("embedding_") in EmbeddingConfig.model_fields:
            raise ConfigError(
                f"fit: got {name}, which the model's tables hold; write Table(..., optimizer=Adagrad(lr=0.05))"
            )
        raise ConfigError(f"fit: {explain_unknown_setting(name, setting_paths, name)}")
    return {setting_paths[name]: value for name, value in settings.items()}
