"""Training, on one screen: what happens in a step, and when a run evaluates, commits and stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.data.batches import until_all_end
from colonnade.data.contract import Position, Source, Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import NonFiniteError
from colonnade.row_optimizer import RowOptimizer
from colonnade.train.commits import Commits
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import Objective
from colonnade.train.phases import Phases
from colonnade.train.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When things happen. All counts are of global steps or epochs."""

    batch_size: int
    epochs: int = 1
    max_steps: int | None = None
    commit_steps: int = 0
    skip_non_finite: bool = False


@dataclass(slots=True)
class Outcome:
    """What a call of `train` did. `stopped`: somebody asked it to stop before the end."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    skipped: int = 0
    stopped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Every rank builds one and calls the same methods in the same order."""

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
        commits: Commits | None = None,
    ) -> None:
        self.model, self.collection, self.data, self.schedule = model, collection, data, schedule
        self.objective = objective
        self.dense_optimizer, self.rows, self.dense = dense_optimizer, rows, dense
        self.progress, self.commits = progress, commits
        self.mesh = collection.mesh
        self.phases = Phases()
        self.position = Position()  # of the next batch to train on
        self.held: list = []  # reads a resumed run must use as they were
        self.best: dict[str, float] = {}
        self.stop_asked = False

    def train(self) -> Outcome:
        """Collective. Goes on from `position`; returns at the end of the epochs, or when a rank asked to stop."""
        outcome, started = Outcome(metrics=dict(self.best)), time.perf_counter()
        batches = self.collection.lookahead(self._stream())
        committed = -1
        try:
            while True:
                with self.phases("wait for rows"):
                    batch = next(batches, None)
                if batch is None:
                    break
                stop = self.train_step(batch, outcome)
                epoch_over = self._advance(batch)
                step, every = self.collection.step, self.schedule.commit_steps
                if epoch_over:
                    self._end_epoch(outcome)
                if self.commits and (epoch_over or stop or (every and step % every == 0)):
                    self.commit(batches.fetched)
                    committed = step
                if stop:
                    outcome.stopped = True
                    break
        finally:
            batches.close()
        if self.position.step and not outcome.stopped:  # max_steps ended inside an epoch
            self._end_epoch(outcome)
        if self.commits and outcome.steps and committed != self.collection.step:
            self.commit(())
        outcome.seconds = time.perf_counter() - started
        return outcome

    def train_step(self, batch: Batch, outcome: Outcome) -> bool:
        """One step on one batch. Returns whether a rank asked to stop. Never half-applied."""
        self.dense.zero()
        with self.phases("forward"):
            loss = self.objective.loss(self.model, batch, self.mesh)
        with self.phases("backward"):
            loss.backward()
        with self.phases("agree and reduce dense"):
            finite = bool(torch.isfinite(loss)) and self.collection.finite()
            finite, stop = self.dense.reduce(finite=finite, stop=self.stop_asked)
        if finite:
            with self.phases("update rows"):
                self.rows.step(agreed=True)
            with self.phases("update dense"):
                self.dense_optimizer.step()
        else:
            self._not_finite(batch, loss, outcome)
        outcome.steps += 1
        outcome.samples += batch.size
        self.progress.step(self.collection.step, loss, batch, self.mesh.num_ranks)
        return stop

    def commit(self, fetched: tuple[Batch, ...]) -> None:
        """Collective. Afterwards, whatever happens, a run can go on from here to the same bits."""
        if self.commits is None:
            return
        with self.phases("commit"):
            self.commits.write(self, [self.collection.exchange.hold(b.ticket) for b in fetched])

    def evaluate(self, source: Source) -> dict[str, float]:
        """Collective: {"auc", "log_loss", ...} over all of `source`, with every update made so far."""
        with self.phases("evaluate"):
            return self.objective.evaluate(self.model, source, self.schedule.batch_size, self.mesh)

    def _stream(self) -> Iterator[Batch]:
        left = self.schedule.max_steps
        if left is not None:
            left -= self.collection.step
        held, position = list(self.held), self.position
        while position.epoch < self.schedule.epochs:
            read = self.data.train.batches(
                self.schedule.batch_size,
                rank=self.mesh.rank,
                num_ranks=self.mesh.num_ranks,
                start=position,
            )
            if self.data.train.num_samples is None:
                schema = self.data.train.schema
                read = until_all_end(read, schema, self.mesh, purpose="route")
            for offset, batch in enumerate(_with_end(read)):
                if left is not None and left <= 0:
                    return
                left = None if left is None else left - 1
                batch.position = Position(position.epoch, position.step + offset)
                batch.held = held.pop(0) if held else None
                yield batch
            position = Position(position.epoch + 1, 0)

    def _advance(self, done: Batch) -> bool:
        """Move past a batch; True at the end of its epoch."""
        at = done.position
        self.position = (
            Position(at.epoch + 1, 0)
            if done.ends_epoch
            else Position(at.epoch, at.step + 1, done.state)
        )
        return done.ends_epoch

    def _end_epoch(self, outcome: Outcome) -> None:
        """Evaluate; with a validation part, test metrics are those of its best epoch."""
        found: dict[str, float] = {}
        if self.data.validation is not None:
            found |= _prefixed("validation", self.evaluate(self.data.validation))
        monitor = f"validation_{self.objective.monitor}"
        score = found.get(monitor)
        if self.data.test is not None:
            found |= _prefixed("test", self.evaluate(self.data.test))
        if score is None or score > self.best.get(monitor, float("-inf")):
            self.best = {"epoch": self.position.epoch, **found}
        outcome.metrics = dict(self.best)
        self.progress.epoch(self.collection.step, self.position.epoch, found)

    def _not_finite(self, batch: Batch, loss: Tensor, outcome: Outcome) -> None:
        self.collection.forget()
        message = (
            f"step {self.collection.step} (epoch {batch.position.epoch}, batch {batch.position.step}): got "
            f"NaN or inf in the loss ({loss.item():g} here) or a gradient on some rank, wanted finite "
            "numbers; nothing of this step was applied on any rank"
        )
        if not self.schedule.skip_non_finite:
            raise NonFiniteError(f"{message}. Lower train lr, or set train.on_non_finite=skip")
        outcome.skipped += 1
        self.collection.step += 1
        self.progress.say(f"skipped {message}")


def _with_end(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the last one marked. One is read ahead."""
    waiting = next(batches, None)
    while waiting is not None:
        batch, waiting = waiting, next(batches, None)
        batch.ends_epoch = waiting is None
        yield batch


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
