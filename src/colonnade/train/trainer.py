"""Training loop: the phases of a step, and when a run evaluates, checkpoints and stops."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from colonnade.batch import Batch
from colonnade.checkpoint.checkpoints import Checkpoints
from colonnade.comm.collectives import notify_servers
from colonnade.comm.peer_status import report_errors_to_peers
from colonnade.config.run import RunConfig
from colonnade.data.batches import build_empty_batch, read_rank_batches
from colonnade.data.contract import Position, Source, Splits, has_samples
from colonnade.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from colonnade.exchange.cached_state import apply_planned_bounds
from colonnade.models.ranking import BlockedMetrics
from colonnade.pipeline.lookahead import Lookahead
from colonnade.pipeline.prepared_batches import PrefetchedBatch, PreparedBatch
from colonnade.row_optimizer import RowOptimizer
from colonnade.train.best import Best, check_monitor_metric
from colonnade.train.dense import DenseGradients
from colonnade.train.loss_scale import LossScale
from colonnade.train.objective import Objective
from colonnade.train.phases import WAITING, Phases
from colonnade.train.progress import Progress
from colonnade.train.schedules import restore_schedule


@dataclass(slots=True)
class Outcome:
    """Result of a call of `train`. `stopped`: a rank requested to stop before the end."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    skipped: int = 0
    stopped: bool = False
    stopped_early: bool = False  # by `patience` or a callback
    best_step: int | None = None  # of the best score, where the data has a validation part
    metrics: dict[str, float] = field(default_factory=dict)  # of the best step, else the last
    days: list[dict[str, float]] = field(default_factory=list)  # progressive validation, by day


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizers:
    """Optimizers of rows and of the dense parameters, with what scales and sums their gradients."""

    rows: RowOptimizer
    dense: Optimizer
    dense_gradients: DenseGradients
    lr_schedules: Sequence[LRScheduler | ReduceLROnPlateau] = ()
    loss_scale: LossScale = field(default_factory=LossScale)


class Trainer:
    """Training loop of one rank.

    Every rank builds one and calls the same methods in the same order. A server uses the model for its collection
    alone, and its batches have no samples.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Splits,
        config: RunConfig,
        objective: Objective,
        optimizers: Optimizers,
        progress: Progress,
        checkpoints: Checkpoints | None,
        *,
        can_reopen: bool,
    ) -> None:
        """can_reopen: weights of an earlier step can be opened at the end, for the test part."""
        self.model = model
        self.collection = optimizers.rows.collection
        self.data = data
        self.config = config
        self.can_reopen = can_reopen
        self.objective = objective
        self.rows = optimizers.rows
        self.dense_optimizer = optimizers.dense
        self.dense = optimizers.dense_gradients
        self.lr_schedules = tuple(optimizers.lr_schedules)
        self.progress = progress
        self.checkpoints = checkpoints
        self.loss_scale = optimizers.loss_scale
        self.mesh = self.collection.mesh
        self.phases = Phases()
        self.position = Position()  # of the next batch to train on, in steps of `batch_size`
        self.restored_reads: list[
            PrefetchedBatch
        ] = []  # reads that a resumed run must use unchanged
        # Outcome and start of the current call of `train`.
        self.outcome = Outcome()
        self.started = time.perf_counter()
        # `count_work` of each rank in the checkpoint that this run resumed from; empty: a new run.
        self.earlier_work: list[Mapping[str, Any]] = []
        train = config.train
        monitor = train.monitor or objective.monitor
        self.best = Best(f"validation_{monitor}", train.min_delta, train.monitor_mode)
        self.days: list[dict[str, float]] = []  # progressive validation: metrics by day
        self.stop_requested = False
        self.stopped_by_callback = False
        # Step after which weights that only one tower trains were last sent to all ranks.
        self.last_broadcast_step = -1
        self.last_checkpoint_time = time.monotonic()

    def train(self) -> Outcome:
        """Train from `position` to the end of the epochs. Collective.

        Returns earlier when scores no longer get better, or when a rank requested to stop.
        """
        self.outcome = outcome = Outcome()
        self.stopped_by_callback = False
        self.started = started = time.perf_counter()
        if self.collection.cached is not None:
            apply_planned_bounds(self.collection.cached)
        batches = self.collection.lookahead(
            self.read_remaining_batches(), prefetched=self.restored_reads
        )
        try:
            with report_errors_to_peers(self.mesh.peer_monitor):
                self._train_steps(batches, outcome)
                self.broadcast_tower_weights()
        finally:
            batches.close()
        if self.checkpoints is not None:
            with self.phases("checkpoint", include_waits=True):
                self.checkpoints.finish_checkpoint()
            self._report_saved_checkpoints(self.checkpoints)
        outcome.stopped_early = self._has_stopped_early() and not outcome.stopped
        outcome.best_step = self.best.step
        outcome.metrics = self.best.metrics | average_daily_metrics(self.days)
        outcome.days = list(self.days)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def restore_schedules(
        self, states: Sequence[Mapping[str, Any]], groups: Mapping[str, Any], step: int
    ) -> None:
        """Put the learning rate schedules back to `step`: see `restore_schedule`.

        `states`: as saved, in this order, empty where a checkpoint has none; `groups`: param groups by "rows" and
        "dense". Raises CheckpointError for another number of schedules.
        """
        states = states or [{}] * len(self.lr_schedules)
        if len(states) != len(self.lr_schedules):
            raise CheckpointError(
                f"got a checkpoint with {len(states)} learning rate schedules, wanted "
                f"{len(self.lr_schedules)}, as this "
                "run has; give as many"
            )
        for schedule, state in zip(self.lr_schedules, states, strict=True):
            optimizer = "rows" if schedule.optimizer is self.rows else "dense"
            restore_schedule(schedule, dict(state), groups[optimizer], step)

    def count_work(self) -> dict[str, Any]:
        """Return steps, samples and seconds of this rank in the current call of `train`, for a checkpoint."""
        counts = {name: getattr(self.outcome, name) for name in ("steps", "samples", "skipped")}
        seconds = time.perf_counter() - self.started
        return {**counts, "seconds": seconds, "phases": dict(self.phases.seconds)}

    def _train_steps(self, batches: Lookahead, outcome: Outcome) -> None:
        """Run steps, evaluations and checkpoints until training ends."""
        prepare_step = getattr(self.objective, "prepare_step", None)
        while not (self._has_stopped_early() or self._has_reached_max_steps()):
            is_read = self.position.epoch >= self.num_epochs
            if prepare_step is not None and not is_read and not prepare_step(self):
                outcome.stopped = True
                break
            result = self.train_step(batches, outcome)
            if result is None:
                if (
                    self.position == Position()
                    and not outcome.steps
                    and self.config.train.num_epochs
                ):
                    raise DataError(
                        "got no samples to train on, wanted a train part with some; give another data.path or other "
                        "data.options"
                    )
                break
            batch, stop = result
            self._advance_position(batch)
            step = self.collection.step
            train = self.config.train
            is_last = self._has_reached_max_steps()
            is_best = False
            if batch.ends_epoch or is_last or _is_due(step, train.evaluate_steps):
                is_best = self._evaluate_and_return_is_best(batch.ends_epoch)
            is_over = batch.ends_epoch or is_last or stop or self._has_stopped_early()
            is_due = _is_due(step, train.checkpoint_steps) or (
                train.codistill.peer is not None and _is_due(step, train.codistill.every_steps)
            )
            if is_over or is_best or is_due or self.dense.is_checkpoint_requested:
                self.begin_checkpoint(batches.fetched)
            if self.checkpoints is not None:
                self._report_saved_checkpoints(self.checkpoints)
            if stop:
                outcome.stopped = True
                break

    def train_step(self, batches: Iterator[Batch], outcome: Outcome) -> tuple[Batch, bool] | None:
        """Train one step on the next batch, or on its micro-batches.

        Returns the last batch, and whether a rank requested to stop; None at the end of `batches`. A step is applied
        on all ranks or on none.
        """
        num_parts = self.config.train.accumulate
        self.mesh.publish_step(self.collection.step)
        self.dense.zero_gradients()
        local_loss = torch.zeros(())
        weight = 0.0
        num_samples = 0
        batch: Batch
        for part in range(num_parts):
            with self.phases(WAITING):
                next_batch = next(batches, None)
            if next_batch is None:
                return None
            batch = next_batch
            is_last = part == num_parts - 1 or batch.ends_epoch
            loss = self._run_forward_backward(batch, is_last, weight)
            local_loss = local_loss + loss if num_parts > 1 else loss
            weight = weight + batch.world_weight
            num_samples = num_samples + batch.size
            if batch.ends_epoch:
                break
        with self.phases("check gradients"):
            finite = (
                bool(torch.isfinite(local_loss)) and self.collection.pipeline.gradients.are_finite()
            )
            gradient_scale = self.loss_scale.value * (max(weight, 1e-12) if num_parts > 1 else 1)
            if gradient_scale != 1:
                self.rows.scale_grad_(1 / gradient_scale)
            send = partial(
                self.dense.send_remaining_buckets,
                finite=finite,
                stop=self.stop_requested,
                checkpoint=self._is_checkpoint_due_by_time(),
                loss=local_loss,
            )
            has_pushed_gradients = bool(self.collection.exchange.pushed_parameters)
            if not has_pushed_gradients:
                send()
        with self.phases("push rows"):
            self.collection.pipeline.send_gradients()  # applied when all ranks agree
        with self.phases("check gradients"):
            if has_pushed_gradients:  # the push brings the gradients of weights that owners use
                send()
            finite, stop, global_loss = self.dense.wait_for_sums()
        if num_parts > 1:
            local_loss = local_loss / max(weight, 1e-12)
            global_loss = global_loss / max(weight, 1e-12)
        if gradient_scale != 1:
            self.dense.scale(1 / gradient_scale)
        if finite and self._clip_gradients(outcome):
            with self.phases("update rows"):
                self.rows.step(agreed=True)
            with self.phases("update dense"):
                self.dense_optimizer.step()
            self.loss_scale.record_good_step()
        elif not finite:
            self._reject_non_finite_step(
                batch, local_loss, outcome, may_rescale=math.isfinite(global_loss)
            )
        for schedule in self.lr_schedules:
            if not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()
        outcome.steps += 1
        outcome.samples += num_samples
        shown_batch = batch if num_samples == batch.size else replace(batch, size=num_samples)
        self.progress.report_step(
            self.collection.step,
            global_loss,
            shown_batch,
            self.mesh.trainers.num_ranks,
            getattr(self.objective, "step_metrics", {}),
        )
        return batch, stop

    def _run_forward_backward(self, batch: Batch, is_last: bool, loss_weight: float) -> Tensor:
        """Run forward and backward on one batch.

        is_last: the step has no further batch; loss_weight: total weight of the step's earlier batches. Returns this
        rank's part of the loss, or of the sum of losses where a step has several batches.
        """
        if self.mesh.is_server:
            return self._serve_rows(batch)
        loss_scale = gradient_scale = self.loss_scale.value
        with self.phases("forward"):
            try:
                loss = self.objective.loss(self.model, batch, self.mesh.trainers)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):  # BatchNorm's
                    raise
                raise ConfigError(
                    f"got a batch of {batch.size} sample on rank {self.mesh.rank}, wanted at least 2 for BatchNorm: "
                    "set data.last_batch to merge (or drop), or train.batch_size to another number; a data set "
                    "of your own must make no batch of one sample"
                ) from error
            if self.config.train.accumulate > 1:  # the weight of the whole step is known at its end
                loss = loss * batch.world_weight
                gradient_scale *= max(loss_weight + batch.world_weight, 1e-12)
        with self.phases("backward"):
            if is_last:
                # Buckets of dense gradients are sent while backward runs.
                self.dense.begin_last_backward(gradient_scale=gradient_scale)
            (loss if loss_scale == 1 else loss * loss_scale).backward()
        if not is_last and not loss_weight:
            self.dense.measure_first_part(self.config.train.accumulate)
        return loss.detach()

    def _serve_rows(self, batch: Batch) -> Tensor:
        """Serve one batch on a server: send the requested rows; their gradients arrive later."""
        with self.phases("forward"):
            self.collection(batch)
        return torch.zeros(())

    def begin_checkpoint(self, fetched_batches: tuple[PreparedBatch, ...]) -> None:
        """Snapshot this step and write the checkpoint in the background. Collective; resuming gives the same bits."""
        if self.checkpoints is None:
            return
        self.last_checkpoint_time = time.monotonic()
        with self.phases("checkpoint", include_waits=True):
            self.broadcast_tower_weights()
            self.checkpoints.begin_checkpoint(
                self,
                [
                    self.collection.exchange.export_prefetched(batch.unused)
                    for batch in fetched_batches
                ],
            )

    def _is_checkpoint_due_by_time(self) -> bool:
        """Return whether rank 0 requests a checkpoint; not while the previous one is being written."""
        seconds = self.config.train.checkpoint_seconds
        if not seconds or self.mesh.rank > 0 or self.checkpoints is None:
            return False
        elapsed = time.monotonic() - self.last_checkpoint_time
        return elapsed >= seconds and not self.checkpoints.is_writing

    def broadcast_tower_weights(self) -> None:
        """Send weights that one tower alone trains to all ranks, once per step. Collective."""
        if self.last_broadcast_step != self.collection.step:
            self.dense.broadcast_tower_weights(self.dense_optimizer)
            self.last_broadcast_step = self.collection.step

    def evaluate(self, source: Source) -> dict[str, float]:
        """Compute {"auc", "log_loss", ...} over all of `source`, with every update so far. Collective."""
        metrics: dict[str, float] = {}
        with self.phases("evaluate", include_waits=True):
            # On all ranks, before servers wait for requests: pending updates and gradients at cached rows may need
            # a reply from servers.
            with self.rows.synchronized_view():
                if self.mesh.is_server:
                    while notify_servers(self.mesh, False):
                        with torch.no_grad():
                            self.collection.read(build_empty_batch(source.schema))
                else:
                    size = self.config.train.samples_per_step
                    trainers = self.mesh.trainers
                    metrics = self.objective.evaluate(self.model, source, size, trainers)
                    notify_servers(self.mesh, False)
            return self._share_metrics(metrics)

    def test(self) -> dict[str, float]:
        """Compute the metrics of the test part, such as {"test_auc": 0.8}; {} if there is none. Collective."""
        if not has_samples(self.data.test):
            return {}
        metrics = self.evaluate(self.data.test)
        if isinstance(metrics, BlockedMetrics):
            self.progress.record_line(self.collection.step, "test_blocks", metrics.compute_blocks)
            self.progress.record_line(self.collection.step, "types", lambda: metrics.by_type)
        return add_prefix("test", metrics)

    def _share_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Send the metrics of the trainers to servers, because all ranks decide by them. Collective with servers."""
        if not self.mesh.world.has_servers:
            return metrics
        text = json.dumps({name: float(value) for name, value in metrics.items()})
        shared = json.loads(self.mesh.all_gather_bytes("evaluate", text.encode())[0])
        return metrics or shared

    @property
    def num_epochs(self) -> int:
        """Number of epochs; with progressive validation, of days."""
        return (
            len(self.data.days) if self.config.train.progressive else self.config.train.num_epochs
        )

    def read_remaining_batches(self) -> Iterator[Batch]:
        """Yield the (micro-)batches of all remaining epochs with their positions."""
        steps_left = self.config.train.max_steps
        if steps_left is not None:
            # Under bounded staleness also read the batches after the last step, as a longer run does: a checkpoint
            # saves prefetched rows. A cache needs the batches of its window, too.
            cached = self.collection.cached
            steps_left += self.collection.opened.reads_ahead - self.collection.step
            steps_left += 0 if cached is None else cached.window
        position = self.position
        num_parts = self.config.train.accumulate
        while position.epoch < self.num_epochs:
            source = self.data.train
            if self.config.train.progressive:
                source = self.data.days[position.epoch]
            first = position.step * num_parts
            batches = read_rank_batches(
                source,
                self.config.train.samples_per_step // num_parts,
                self.mesh,
                channel="route",
                start=Position(position.epoch, first, position.state),
                last_batch=self.config.data.last_batch,
            )
            for index, batch in enumerate(_mark_last_batch(batches), first):
                if index % num_parts == 0:
                    if steps_left is not None and steps_left <= 0:
                        return
                    steps_left = None if steps_left is None else steps_left - 1
                batch.position = Position(position.epoch, index // num_parts)
                yield batch
            position = Position(position.epoch + 1, 0)

    def _advance_position(self, last_batch: Batch) -> None:
        """Move the position past a step's last batch."""
        position = last_batch.position
        self.position = (
            Position(position.epoch + 1, 0)
            if last_batch.ends_epoch
            else Position(position.epoch, position.step + 1, last_batch.state)
        )

    def _has_reached_max_steps(self) -> bool:
        max_steps = self.config.train.max_steps
        return max_steps is not None and self.collection.step >= max_steps

    def _has_stopped_early(self) -> bool:
        return (
            self.stopped_by_callback or 0 < (self.config.train.patience or 0) <= self.best.num_since
        )

    def _report_saved_checkpoints(self, checkpoints: Checkpoints) -> None:
        """Report the checkpoints that were saved since the last call, oldest first."""
        while checkpoints.saved_steps:
            self.progress.report_checkpoint(checkpoints.saved_steps.popleft())

    def _evaluate_and_return_is_best(self, ends_epoch: bool) -> bool:
        """Evaluate, and record the scores. Returns whether this score is the best so far.

        The final test metrics are those at the best validation score; without a validation part, the newest.
        """
        metrics: dict[str, float] = {"epoch": self.position.epoch}
        if self.config.train.progressive and ends_epoch and self.position.epoch < self.num_epochs:
            day_metrics = self.evaluate(self.data.days[self.position.epoch])
            self.days.append({"day": self.position.epoch, **day_metrics})
            metrics |= add_prefix("day", day_metrics) | average_daily_metrics(self.days)
        if has_samples(self.data.validation):
            validated = self.evaluate(self.data.validation)
            if self.config.train.monitor not in (None, self.objective.monitor):
                check_monitor_metric(self.config.train.monitor, validated)
            metrics |= add_prefix("validation", validated)
        step = self.collection.step
        is_best = self.best.record_evaluation(metrics, step)
        if self.config.train.test_at == "evaluations" or (is_best and not self.can_reopen):
            metrics |= self.test()
            if self.best.step in (None, step):
                self.best.metrics |= metrics
        for schedule in self.lr_schedules:
            if isinstance(schedule, ReduceLROnPlateau) and self.best.monitor in metrics:
                schedule.step(metrics[self.best.monitor])
        shown = {name: value for name, value in metrics.items() if name != "epoch"}
        stops = self.progress.report_evaluation(step, self.position.epoch, shown)
        # Rank 0 alone has callbacks.
        self.stopped_by_callback = bool(self.mesh.broadcast("control", torch.tensor([stops])))
        return is_best

    def _clip_gradients(self, outcome: Outcome) -> bool:
        """Clip gradients by norm; return whether the step may be applied. Collective.

        A norm that is not finite rejects the step on every rank.
        """
        if self.config.embedding.clip_norm is not None:
            with self.phases("clip rows"):
                try:
                    self.rows.clip_grad_norm_(self.config.embedding.clip_norm, agreed=True)
                except NonFiniteError as error:
                    self._reject_step(str(error), outcome, may_rescale=True)
                    return False
        if self.config.dense.clip_norm is not None:
            with self.phases("clip dense"):
                self.dense.clip_norm(self.config.dense.clip_norm)
        return True

    def _reject_non_finite_step(
        self, batch: Batch, loss: Tensor, outcome: Outcome, *, may_rescale: bool
    ) -> None:
        """Drop the gradients of a step with NaN or inf, and skip it or raise NonFiniteError."""
        self.rows.zero_grad()
        self.collection.discard_batches()
        self._reject_step(
            f"step {self.collection.step} (epoch {batch.position.epoch}, batch {batch.position.step}): got "
            f"NaN or inf in the loss ({loss.item():g} here) or a gradient on some rank, wanted finite "
            "numbers; nothing of this step was applied on any rank",
            outcome,
            may_rescale=may_rescale,
        )

    def _reject_step(self, message: str, outcome: Outcome, *, may_rescale: bool) -> None:
        """Skip the step, or raise NonFiniteError. may_rescale: the loss is finite, so a lower loss scale may help."""
        self.dense.restore_residuals()
        is_lower = may_rescale and self.loss_scale.lower()
        if not (is_lower or self.config.train.on_non_finite == "skip"):
            self.broadcast_tower_weights()  # every rank gets here
            remedy = "train lr" if self.loss_scale.value == 1 else "train lr or train.loss_scale"
            raise NonFiniteError(f"{message}. Lower {remedy}, or set train.on_non_finite=skip")
        outcome.skipped += 1
        self.collection.step += 1
        note = f"; the loss is scaled by {self.loss_scale.value:g} from here on" if is_lower else ""
        self.progress.print_line(f"skipped {message}{note}")


def average_daily_metrics(metrics_by_day: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of progressive validation over all days so far, weighted by the days' samples.

    For log loss without sample weights this is the log loss of all days' samples. For AUC it is the mean of the
    daily AUCs, so that telling days apart earns nothing. A day without a value (NaN) is left out.
    """
    pooled: dict[str, float] = {}
    for name in dict.fromkeys(name for day in metrics_by_day for name in day):
        if name == "day" or name.startswith("num_"):
            continue
        pairs = [(day[name], day.get("num_samples", 1.0)) for day in metrics_by_day if name in day]
        pairs = [(value, count) for value, count in pairs if not math.isnan(value)]
        total = sum(count for _, count in pairs)
        if total:
            pooled[f"days_{name}"] = sum(value * count for value, count in pairs) / total
    if metrics_by_day:
        pooled["days_num_samples"] = sum(day.get("num_samples", 0.0) for day in metrics_by_day)
    return pooled


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mark_last_batch(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches with `ends_epoch` set on the last one. Reads one batch ahead."""
    next_batch = next(batches, None)
    while next_batch is not None:
        batch = next_batch
        next_batch = next(batches, None)
        batch.ends_epoch = next_batch is None
        yield batch


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics named part_metric."""
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
