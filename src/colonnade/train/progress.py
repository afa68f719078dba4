"""Progress of a run: a progress bar on the terminal, metrics in the run folder, and callbacks. Rank 0 only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from colonnade.batch import Batch
from colonnade.checkpoint.contract import TrainerState
from colonnade.train.best import select_judged
from colonnade.train.record import Counters, Part, Record

PLAIN_SECONDS = 10.0
"""Minimum time between lines if the output is not a terminal."""
MIN_SECONDS = 0.5
"""Minimum time between metrics lines, which cost one to two milliseconds together."""
STUCK_ENTROPY, STUCK_AUC = 0.999, 0.55
"""Normalized entropy from which on, and AUC below which, a model has learnt nothing."""
TRAFFIC_LINES = 10
"""Number of lines per `traffic` line, which costs a millisecond or more."""


class Progress:
    """Progress bar and metrics of a run.

    `report_step` costs microseconds: it reports every `every` steps only, and at most once in MIN_SECONDS.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        console: Console,
        folder: Path | None = None,
        part: Part = "all",
        callbacks: Sequence[object] = (),
        is_quiet: bool = False,
        every: int = 20,
    ) -> None:
        self.every = every
        self.console = console
        self.total_steps = total_steps
        self.is_quiet = is_quiet
        self._record = Record(folder, part, callbacks)
        self._callbacks = self._record.callbacks
        self._counters: Counters | None = None
        self._has_bars = console.is_terminal or console.is_jupyter
        self._bars = _BarsWithText(
            *_choose_progress_columns(console.width),
            console=console,
            disable=not self._has_bars or is_quiet,
        )
        self._task = self._bars.add_task("train", total=total_steps, epoch="1", loss="-", rate="-")
        self._num_samples = 0
        self._interval_start = self._last_line_time = self._started = 0.0
        self._first_step = self._step = self._reported_step = self._num_lines = 0
        self._is_first = True
        self._last_step: tuple[int, float, Batch, float, Mapping[str, Any]] | None = None

    def start_reporting(self, done_steps: int, trainer: TrainerState | None = None) -> None:
        """Start at `done_steps` and append to the folder's files. trainer: the one to record the counters of."""
        if trainer is not None:
            self._callbacks.epoch = trainer.position.epoch
        self._record.open_files(done_steps)
        if trainer is not None and (self._record.has_readers or not self.is_quiet):
            self._counters = Counters(trainer)
        self._bars.start()
        self._bars.update(self._task, completed=done_steps)
        self._first_step = self._step = done_steps
        # A resumed run reports the steps that it would have reported without the stop.
        self._reported_step = done_steps - done_steps % self.every
        self._interval_start = self._last_line_time = self._started = time.perf_counter()

    def report_step(
        self,
        step: int,
        loss: float,
        batch: Batch,
        num_ranks: int,
        metrics: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Report a step. loss: mean over the global batch. metrics: other numbers to record, of this rank.

        Raises CallbackError."""
        self._step = step
        self._callbacks.epoch = batch.position.epoch + batch.ends_epoch
        self._callbacks.call("on_step", step, {"loss": loss})
        self._num_samples += batch.size * num_ranks
        now = time.perf_counter()
        self._last_step = (step, loss, batch, now, metrics)
        if step % self.every or step - self._reported_step < self.every // 2:
            return
        if self._is_first or now - self._interval_start >= MIN_SECONDS:
            self._is_first = False
            self._flush_last_step()

    def _flush_last_step(self) -> None:
        """Show and write the values of the last step, unless that is done."""
        if self._last_step is None:
            return
        step, loss, batch, now, metrics = self._last_step
        self._last_step = None
        self._reported_step = step
        rate = self._num_samples / max(now - self._interval_start, 1e-9)
        self._num_samples = 0
        self._interval_start = now
        tiers = None if self._counters is None else self._counters.collect_tiers()
        text = "" if tiers is None else tiers.format_activity()
        self._bars.text = text
        epoch = str(batch.position.epoch + 1)
        self._bars.update(
            self._task, completed=step, epoch=epoch, loss=f"{loss:.4f}", rate=f"{rate:,.0f}"
        )
        if not self._has_bars and now - self._last_line_time >= PLAIN_SECONDS:
            self._last_line_time = now
            total_text = f"/{self.total_steps}" if self.total_steps else ""
            self.print_line(
                f"step {step}{total_text}  epoch {epoch}  loss {loss:.4f}  {rate:,.0f} samples/s"
                f"{self._format_time_left(now, step)}{text and f'  {text}'}"
            )
        if self._record.has_readers:
            values = {"loss": loss, "samples_per_second": rate}
            values |= {name: float(value) for name, value in metrics.items()}
            self._write_step_metrics(step, values, batch)
            if tiers is not None:
                self._record.write_line(step, "tiers", tiers.to_dict())

    def record_line(self, step: int, kind: str, build: Callable[[], Mapping[str, Any]]) -> None:
        """Write a line of metrics, unless this rank writes none or there are none. build: returns the metrics."""
        if self._record.has_readers and (values := build()):
            self._record.write_line(step, kind, dict(values))

    def report_evaluation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> bool:
        """Report an evaluation; return whether a callback stops training.

        metrics: by part_metric, as "validation_auc"."""
        self._flush_last_step()
        self._bars.update(self._task, completed=step)
        if self._record.has_readers:
            self._record.write_line(step, "evaluate", {"epoch": epoch, **metrics})
            if self._counters is not None:
                self._record.write_line(step, "tables", {"tables": self._counters.collect_tables()})
        shown = [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in select_judged(metrics).items()
        ]
        self.print_line(f"epoch {epoch}: {'  '.join(shown)}" if shown else f"epoch {epoch} is over")
        if epoch == 1:
            for warning in (*describe_single_classes(metrics), *describe_stuck_loss(metrics)):
                self.print_line(warning)
        stops = self._callbacks.call("on_evaluate", step, metrics)
        self._num_samples = 0
        self._interval_start = time.perf_counter()
        return stops

    def report_checkpoint(self, step: int) -> None:
        """Report a saved checkpoint to callbacks."""
        self._callbacks.call("on_checkpoint", step, {})

    def print_line(self, text: str) -> None:
        """Print a line above the progress bar, unless output is off."""
        if not self.is_quiet:
            self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self, metrics: Mapping[str, float]) -> None:
        """Report the last step, write the final counters, end the callbacks and close the files.

        metrics: of the result, for callbacks."""
        try:
            self._flush_last_step()
            if self._record.has_readers and self._counters is not None:
                self._write_counters(self._reported_step)
                tiers = self._counters.collect_tiers()
                if tiers is not None:
                    self._record.write_line(self._reported_step, "tiers", tiers.to_dict())
        finally:
            self._bars.stop()
            self._record.close(self._step, metrics)

    def _write_step_metrics(self, step: int, values: dict, batch: Batch) -> None:
        if self._counters is None:
            self._record.write_line(step, "train", values)
            return
        counters = self._counters
        rates = {"lr": counters.collect_learning_rates(), **counters.collect_loss_scale()}
        self._record.write_line(step, "train", {**values, **rates})
        self._write_counters(step)
        if self._num_lines % TRAFFIC_LINES == 0:
            self._record.write_line(step, "traffic", self._counters.collect_traffic(batch))
        self._num_lines += 1

    def _write_counters(self, step: int) -> None:
        assert self._counters is not None
        for kind, values in self._counters.collect_increments().items():
            self._record.write_line(step, kind, values)

    def _format_time_left(self, now: float, step: int) -> str:
        done = step - self._first_step
        if not self.total_steps or done < 1:
            return ""
        seconds = (self.total_steps - step) * (now - self._started) / done
        return f"  {seconds / 60:.0f} min left" if seconds >= 90 else f"  {seconds:.0f} s left"


def describe_single_classes(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each part in which all labels are equal. metrics: by part_metric, as "validation_auc"."""
    for name, count in metrics.items():
        part, _, task = name.partition("_num_samples")
        rate = metrics.get(f"{part}_positive_rate{task}")
        if rate in (0, 1):
            yield (
                f"the label{task.replace('_', ' ', 1)} is {rate:g} in all {count:,.0f} samples of the {part} part: AUC "
                "and normalized entropy are not defined. Hold out samples of both classes"
            )


def describe_stuck_loss(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a line if a model predicts no better than the mean label, with what to try."""
    for part in ("validation", "test"):
        entropy = metrics.get(f"{part}_normalized_entropy", math.nan)
        # An overfitted model orders samples, although its loss is that of no model.
        if entropy >= STUCK_ENTROPY and metrics.get(f"{part}_auc", 0.0) < STUCK_AUC:
            yield (
                f"the loss has not moved: log loss on the {part} part is {entropy:.4f} of that of predicting the mean "
                "label. Look at the label and the columns (colonnade inspect); try other learning rates (embedding.lr, "
                "dense.lr), a smaller train.batch_size, or model.name=lr, which learns from single columns"
            )
        if not math.isnan(entropy):
            return


class _BarsWithText(Bars):
    """Progress bars with a line of text below."""

    text = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.text:
            yield Text(self.text, style="dim", overflow="ellipsis", no_wrap=True)


def _choose_progress_columns(width: int) -> list[ProgressColumn]:
    """Choose the columns that fit in `width`: numbers first, then the bar, then text."""
    steps = MofNCompleteColumn(separator="/")
    loss = TextColumn("loss {task.fields[loss]}")
    if width < 50:
        return [steps, loss, TimeRemainingColumn(compact=True)]
    columns = [BarColumn(bar_width=None if width < 100 else 30), steps, loss]
    if width >= 64:
        columns.append(
            TextColumn("{task.fields[rate]}/s" if width < 90 else "{task.fields[rate]} samples/s")
        )
    if width >= 90:
        columns = [TextColumn("epoch {task.fields[epoch]}"), *columns]
    return [*columns, TimeRemainingColumn(compact=True)]
