"""Training, on one screen: what happens in a step, and when a run evaluates, checkpoints and stops."""

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
from colonnade.comm.collectives import announced
from colonnade.comm.mesh import Mesh
from colonnade.comm.peer_status import telling
from colonnade.data.batches import batches_of, no_samples
from colonnade.data.contract import Position, Source, Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, DataError, NonFiniteError
from colonnade.exchange.cached_state import apply_planned_bounds
from colonnade.pipeline.lookahead import Lookahead
from colonnade.pipeline.prepared_batches import Held, PreparedBatch
from colonnade.row_optimizer import RowOptimizer
from colonnade.train.best import Best, check_monitor
from colonnade.train.dense import DenseGradients
from colonnade.train.loss_scale import LossScale
from colonnade.train.objective import Objective
from colonnade.train.phases import WAITING, Phases
from colonnade.train.progress import Progress
from colonnade.train.schedules import restore_schedule


class CheckpointClock:
    """Every rank has one and asks it after each step. A word between ranks costs a hop, so rank 0 also says after how
    many steps it is to be asked again: half of those that it expects until the checkpoint is due."""

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        """seconds: between checkpoints; 0: never due."""
        self.mesh, self.seconds = mesh, seconds
        self._began = time.monotonic()
        self._asked = self._began
        self._left = self._every = 1  # steps until the next word; between the last two words

    def is_due(self, is_busy: bool) -> bool:
        """Collective, once a step, but for most steps without a word. `is_busy`: the checkpoint before is being
        written, so
        another one would make training wait."""
        if not self.seconds:
            return False
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        pace = (now - self._asked) / self._every
        due, steps = word(now - self._began, pace, self.seconds, is_busy)
        said = self.mesh.broadcast("control", torch.tensor([due, steps])).tolist()
        self._asked, self._left, self._every = now, said[1], said[1]
        if said[0]:
            self._began = now
        return bool(said[0])

    def restart(self) -> None:
        """A checkpoint begins, for whatever reason."""
        self._began = time.monotonic()


def word(since: float, pace: float, seconds: float, is_busy: bool = False) -> tuple[int, int]:
    """Whether a checkpoint is due, `since` seconds after the one before, and in how many steps to ask again, at `pace`
    seconds a step. Pure."""
    is_due = since >= seconds and not is_busy
    left = seconds if is_due else max(seconds - since, seconds / 8)
    return int(is_due), max(1, min(1 << 20, int(left / 2 / max(pace, 1e-6))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When things happen, and the limits of a step. All counts are of global steps or epochs."""

    batch_size: int
    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    evaluate_steps: int = 0
    monitor: str | None = None  # None: the objective's
    patience: int = 0
    min_delta: float = 0.0
    progressive: bool = False
    checkpoint_steps: int = 0
    checkpoint_seconds: float = 0.0
    skip_non_finite: bool = False
    embedding_clip_norm: float | None = None
    dense_clip_norm: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a call of `train` did. `stopped`: somebody asked it to stop before the end."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    skipped: int = 0
    stopped: bool = False
    stopped_early: bool = False  # the score had not been better for `patience` evaluations
    best_step: int | None = None  # of the best score, where the data has a validation part
    metrics: dict[str, float] = field(default_factory=dict)  # of the best step, else the last
    days: list[dict[str, float]] = field(default_factory=list)  # progressive validation, by day


class Trainer:
    """Every rank builds one and calls the same methods in the same order; a server's has the model for its collection
    alone, and batches without samples."""

    def __init__(
        self,
        model: nn.Module,
        collection: EmbeddingCollection,
        data: Splits,
        schedule: Schedule,
        *,
        objective: Objective,
        dense_optimizer: Optimizer,
        rows: RowOptimizer,
        dense: DenseGradients,
        progress: Progress,
        lr_schedules: Sequence[LRScheduler | ReduceLROnPlateau] = (),
        checkpoints: Checkpoints | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model, self.collection, self.data, self.schedule = model, collection, data, schedule
        self.objective = objective
        self.dense_optimizer, self.rows, self.dense = dense_optimizer, rows, dense
        self.lr_schedules = tuple(lr_schedules)
        self.progress, self.checkpoints = progress, checkpoints
        self.loss_scale = loss_scale or LossScale()
        self.mesh = collection.mesh
        self.phases = Phases()
        self.position = Position()  # of the next batch to train on, in steps of `batch_size`
        self.held: list[Held] = []  # reads a resumed run must use as they were
        # Outcome and start of the call of `train` under way.
        self.outcome, self.started = Outcome(), time.perf_counter()
        # `count_work` of each rank when the checkpoint was made that this run resumed from; empty: a new run.
        self.earlier_work: list[Mapping[str, Any]] = []
        monitor = schedule.monitor or objective.monitor
        self.best = Best(f"validation_{monitor}", schedule.min_delta)
        self.days: list[dict[str, float]] = []  # progressive validation: what each day gave
        self.stop_asked = False
        # The step after which weights that some ranks alone train last went to all.
        self.handed_out = -1
        self.clock = CheckpointClock(self.mesh, schedule.checkpoint_seconds)

    def train(self) -> Outcome:
        """Collective. Goes on from `position`; returns at the end of the epochs, when scores no longer get
        better, or when a rank asked to stop."""
        self.outcome = outcome = Outcome()
        self.started = started = time.perf_counter()
        self.limit = -1
        if self.collection.cached is not None:
            apply_planned_bounds(self.collection.cached)
        batches = self.collection.lookahead(self._stream(), held=self.held)
        try:
            with telling(self.mesh.presence):
                self._train(batches, outcome)
                self._hand_out()
        finally:
            batches.close()
        if self.checkpoints is not None:
            with self.phases("checkpoint", whole=True):
                self.checkpoints.finish()
        outcome.stopped_early = self._is_patience_over() and not outcome.stopped
        outcome.best_step = self.best.step
        outcome.metrics = self.best.metrics | pooled_days(self.days)
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
        """Return steps, samples and seconds of this rank in the call of `train` under way, as a checkpoint keeps
        them."""
        counts = {name: getattr(self.outcome, name) for name in ("steps", "samples", "skipped")}
        seconds = time.perf_counter() - self.started
        return {**counts, "seconds": seconds, "phases": dict(self.phases.seconds)}

    def _train(self, batches: Lookahead, outcome: Outcome) -> None:
        """Steps, until it is over."""
        while not (self._is_patience_over() or self._is_at_its_end()):
            done = self.train_step(batches, outcome)
            if done is None:
                if self.position == Position() and not outcome.steps and self.schedule.epochs:
                    raise DataError(
                        "got no samples to train on, wanted a train part with some; give another data.path or other "
                        "data.options"
                    )
                break
            batch, stop = done
            self._advance(batch)
            step, plan = self.collection.step, self.schedule
            is_last = self._is_at_its_end()
            is_best = False
            if batch.ends_epoch or is_last or _is_due(step, plan.evaluate_steps):
                is_best = self._evaluate(batch.ends_epoch)
            is_over = batch.ends_epoch or is_last or stop or self._is_patience_over()
            by_clock = self.clock.is_due(
                self.checkpoints is not None and self.checkpoints.is_writing
            )
            is_due = by_clock or _is_due(step, plan.checkpoint_steps)
            if is_over or is_best or is_due:
                self.checkpoint(batches.fetched)
            if stop:
                outcome.stopped = True
                break

    def train_step(self, batches: Iterator[Batch], outcome: Outcome) -> tuple[Batch, bool] | None:
        """One step on the next batch, or micro-batches. Returns the last of them and whether a rank asked to stop;
        None at the end of `batches`. Never half-applied."""
        parts = self.schedule.accumulate
        self.mesh.at(self.collection.step)
        self.dense.zero()
        total, weight, size = torch.zeros(()), 0.0, 0
        batch: Batch
        for number in range(parts):
            with self.phases(WAITING):
                coming = next(batches, None)
            if coming is None:
                return None
            batch = coming
            is_last = number == parts - 1 or batch.ends_epoch
            loss = self._learn(batch, is_last, weight)
            total = total + loss if parts > 1 else loss
            weight, size = weight + batch.world_weight, size + batch.size
            if batch.ends_epoch:
                break
        with self.phases("check gradients"):
            finite = bool(torch.isfinite(total)) and self.collection.pipeline.gradients.are_finite()
            send = partial(self.dense.send, finite=finite, stop=self.stop_asked, loss=total)
            waits = bool(self.collection.exchange.pushed_parameters)
            if not waits:
                send()
        with self.phases("push rows"):
            self.collection.pipeline.collect()  # travels beside the dense gradients; applied when all ranks agree
        with self.phases("check gradients"):
            if waits:  # for the gradients of weights that are used where rows are
                send()
            finite, stop, whole = self.dense.wait()
        unit = self.loss_scale.value
        if parts > 1:
            total, whole = total / max(weight, 1e-12), whole / max(weight, 1e-12)
            unit *= max(weight, 1e-12)
        if unit != 1:
            self._scale(1 / unit)
        if finite and self._clip(outcome):
            with self.phases("update rows"):
                self.rows.step(agreed=True)
            with self.phases("update dense"):
                self.dense_optimizer.step()
            self.loss_scale.applied()
        elif not finite:
            self._not_finite(batch, total, outcome, may_rescale=math.isfinite(whole))
        for schedule in self.lr_schedules:
            if not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()
        outcome.steps += 1
        outcome.samples += size
        shown = batch if size == batch.size else replace(batch, size=size)
        self.progress.step(self.collection.step, whole, shown, self.mesh.trainers.num_ranks)
        return batch, stop

    def _learn(self, batch: Batch, is_last: bool, weight: float) -> Tensor:
        """Forward and backward; `is_last` of the step, after batches of so much `weight`. Returns this rank's part of
        the loss, or of the loss' sum where a step has several batches."""
        if self.mesh.is_server:
            return self._serve(batch)
        scale = unit = self.loss_scale.value
        with self.phases("forward"):
            loss = self.objective.loss(self.model, batch, self.mesh.trainers)
            if self.schedule.accumulate > 1:  # the weight of the whole step is known at its end
                loss = loss * batch.world_weight
                unit *= max(weight + batch.world_weight, 1e-12)
        with self.phases("backward"):
            if is_last:
                self.dense.begin(unit=unit)  # buckets of dense gradients leave while it runs
            (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def _serve(self, batch: Batch) -> Tensor:
        """What a server does instead: rows have left for those that asked, and their gradients will come."""
        with self.phases("forward"):
            self.collection(batch)
        return torch.zeros(())

    def checkpoint(self, fetched: tuple[PreparedBatch, ...]) -> None:
        """Collective. Once this is written, in the background, a run can go on from here to the same bits."""
        if self.checkpoints is None:
            return
        self.clock.restart()
        with self.phases("checkpoint", whole=True):
            self._hand_out()
            self.checkpoints.begin(
                self, [self.collection.exchange.prefetched(batch.unused) for batch in fetched]
            )

    def _hand_out(self) -> None:
        """Collective: every rank has all weights as they are after this step."""
        if self.handed_out != self.collection.step:
            self.dense.hand_out(self.dense_optimizer)
            self.handed_out = self.collection.step

    def evaluate(self, source: Source) -> dict[str, float]:
        """Collective: {"auc", "log_loss", ...} over all of `source`, with every update made so far."""
        found: dict[str, float] = {}
        with self.phases("evaluate", whole=True):
            # On all ranks alike, before servers listen: what is under way may need an answer of theirs.
            self.collection.pipeline.updates.settle()
            if self.mesh.is_server:
                while announced(self.mesh, False):
                    with torch.no_grad():
                        self.collection.read(no_samples(source.schema))
            else:
                size, trainers = self.schedule.batch_size, self.mesh.trainers
                with self.rows.settled():
                    found = self.objective.evaluate(self.model, source, size, trainers)
                announced(self.mesh, False)
            return self._told(found)

    def _told(self, found: dict[str, float]) -> dict[str, float]:
        """Collective where there are servers: what the trainers found, for all ranks decide by it."""
        if not self.mesh.world.has_servers:
            return found
        text = json.dumps({name: float(value) for name, value in found.items()})
        return json.loads(self.mesh.all_gather_bytes("evaluate", text.encode())[0])

    @property
    def num_epochs(self) -> int:
        return len(self.data.days) if self.schedule.progressive else self.schedule.epochs

    def _stream(self) -> Iterator[Batch]:
        left = self.schedule.max_steps
        if left is not None:
            # Under bounded staleness the last steps' successors are read meanwhile, as they are in a longer run: a
            # checkpoint holds what was read. So are those by which a cache decides.
            cached = self.collection.cached
            left += self.collection.opened.reads_ahead - self.collection.step
            left += 0 if cached is None else cached.window
        position, parts = self.position, self.schedule.accumulate
        while position.epoch < self.num_epochs:
            source = self.data.train
            if self.schedule.progressive:
                source = self.data.days[position.epoch]
            first = position.step * parts
            read = batches_of(
                source,
                self.schedule.batch_size // parts,
                self.mesh,
                channel="route",
                start=Position(position.epoch, first, position.state),
            )
            for number, batch in enumerate(_with_end(read), first):
                if number % parts == 0:
                    if left is not None and left <= 0:
                        return
                    left = None if left is None else left - 1
                batch.position = Position(position.epoch, number // parts)
                yield batch
            position = Position(position.epoch + 1, 0)

    def _advance(self, done: Batch) -> None:
        """Move past a step's last batch."""
        at = done.position
        self.position = (
            Position(at.epoch + 1, 0)
            if done.ends_epoch
            else Position(at.epoch, at.step + 1, done.state)
        )

    def _is_at_its_end(self) -> bool:
        most = self.schedule.max_steps
        return most is not None and self.collection.step >= most

    def _is_patience_over(self) -> bool:
        return 0 < self.schedule.patience <= self.best.num_since

    def _evaluate(self, ends_epoch: bool) -> bool:
        """Test metrics are those of the best score of the validation part; without one, the newest.
        Returns whether this score is the best so far."""
        found: dict[str, float] = {"epoch": self.position.epoch}
        if self.schedule.progressive and ends_epoch and self.position.epoch < self.num_epochs:
            day = self.evaluate(self.data.days[self.position.epoch])
            self.days.append({"day": self.position.epoch, **day})
            found |= _prefixed("day", day) | pooled_days(self.days)
        if self.data.validation is not None:
            validated = self.evaluate(self.data.validation)
            if self.schedule.monitor not in (None, self.objective.monitor):
                check_monitor(self.schedule.monitor, validated)
            found |= _prefixed("validation", validated)
        if self.data.test is not None:
            found |= _prefixed("test", self.evaluate(self.data.test))
        step = self.collection.step
        is_best = self.best.hear(found, step)
        for schedule in self.lr_schedules:
            if isinstance(schedule, ReduceLROnPlateau) and self.best.monitor in found:
                schedule.step(found[self.best.monitor])
        shown = {name: value for name, value in found.items() if name != "epoch"}
        self.progress.epoch(step, self.position.epoch, shown)
        return is_best

    def _scale(self, factor: float) -> None:
        self.dense.scale(factor)
        self.rows.scale_grad_(factor)

    def _clip(self, outcome: Outcome) -> bool:
        """Collective. Whether the step may be applied: norms that are no number end it on every rank alike."""
        if self.schedule.embedding_clip_norm is not None:
            with self.phases("clip rows"):
                try:
                    self.rows.clip_grad_norm_(self.schedule.embedding_clip_norm, agreed=True)
                except NonFiniteError as error:
                    self._refuse(str(error), outcome, may_rescale=True)
                    return False
        if self.schedule.dense_clip_norm is not None:
            with self.phases("clip dense"):
                self.dense.clip_norm(self.schedule.dense_clip_norm)
        return True

    def _not_finite(
        self, batch: Batch, loss: Tensor, outcome: Outcome, *, may_rescale: bool
    ) -> None:
        self.rows.zero_grad()
        self.collection.forget()
        self._refuse(
            f"step {self.collection.step} (epoch {batch.position.epoch}, batch {batch.position.step}): got "
            f"NaN or inf in the loss ({loss.item():g} here) or a gradient on some rank, wanted finite "
            "numbers; nothing of this step was applied on any rank",
            outcome,
            may_rescale=may_rescale,
        )

    def _refuse(self, message: str, outcome: Outcome, *, may_rescale: bool) -> None:
        """may_rescale: the loss itself is finite, so it may have been its scale."""
        self.dense.take_back()
        is_lower = may_rescale and self.loss_scale.fall()
        if not (is_lower or self.schedule.skip_non_finite):
            self._hand_out()  # every rank refuses
            less = "train lr" if self.loss_scale.value == 1 else "train lr or train.loss_scale"
            raise NonFiniteError(f"{message}. Lower {less}, or set train.on_non_finite=skip")
        outcome.skipped += 1
        self.collection.step += 1
        now = f"; the loss is scaled by {self.loss_scale.value:g} from here on" if is_lower else ""
        self.progress.say(f"skipped {message}{now}")


def pooled_days(days: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Progressive validation over all days so far: each metric's mean, weighted with the days' samples.

    For log loss without sample weights that is the log loss of all days' samples; for AUC it is the mean of the
    days' own, so that a model is not praised for telling days apart. A day without a value (NaN) is left out.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for day in days for name in day):
        if name == "day" or name.startswith("num_"):
            continue
        pairs = [(day[name], day.get("num_samples", 1.0)) for day in days if name in day]
        pairs = [(value, count) for value, count in pairs if not math.isnan(value)]
        total = sum(count for _, count in pairs)
        if total:
            found[f"days_{name}"] = sum(value * count for value, count in pairs) / total
    if days:
        found["days_num_samples"] = sum(day.get("num_samples", 0.0) for day in days)
    return found


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _with_end(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the last one marked. One is read ahead."""
    waiting = next(batches, None)
    while waiting is not None:
        batch, waiting = waiting, next(batches, None)
        batch.ends_epoch = waiting is None
        yield batch


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
