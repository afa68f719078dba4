"""What a run says while it goes: progress bars on the terminal, metrics in the run folder. Rank 0 only.

run/metrics.jsonl      one JSON object per line: {"step", "kind", ...}
run/tensorboard/       the same numbers for TensorBoard
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from torch.utils.tensorboard import SummaryWriter

from colonnade.batch import Batch


class Progress:
    """`step` costs microseconds: the loss is read from its tensor only every `every` steps."""

    def __init__(
        self,
        *,
        total_steps: int | None,
        console: Console,
        folder: Path | None = None,
        is_quiet: bool = False,
        every: int = 20,
    ) -> None:
        self.every, self.console = every, console
        self._folder = folder
        self._lines: Any = None
        self._board: SummaryWriter | None = None
        self._bars = Bars(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} samples/s"),
            TimeRemainingColumn(),
            console=console,
            disable=is_quiet,
        )
        self._task = self._bars.add_task("train", total=total_steps, epoch="0", loss="-", rate="-")
        self._samples, self._since = 0, 0.0

    def open(self, done_steps: int) -> None:
        """Start the bar at `done_steps` and append to the folder's files."""
        if self._folder is not None:
            _forget_after(self._folder / "metrics.jsonl", done_steps)
            self._lines = (self._folder / "metrics.jsonl").open("a", encoding="utf-8")
            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=done_steps)
        self._bars.start()
        self._bars.update(self._task, completed=done_steps)
        self._since = time.perf_counter()

    def step(self, step: int, loss: torch.Tensor, batch: Batch, num_ranks: int) -> None:
        self._samples += batch.size * num_ranks
        if step % self.every:
            return
        now = time.perf_counter()
        rate = self._samples / max(now - self._since, 1e-9)
        self._samples, self._since = 0, now
        value = loss.item() * num_ranks
        self._bars.update(
            self._task,
            completed=step,
            epoch=str(batch.position.epoch + 1),
            loss=f"{value:.4f}",
            rate=f"{rate:,.0f}",
        )
        self._write(step, "train", {"loss": value, "samples_per_second": rate})

    def epoch(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._bars.update(self._task, completed=step)
        self._write(step, "evaluate", {"epoch": epoch, **metrics})
        shown = "  ".join(
            f"{k} {v:.4f}" for k, v in metrics.items() if k.endswith(("auc", "loss", "@20"))
        )
        self.say(f"epoch {epoch}: {shown}")
        self._samples, self._since = 0, time.perf_counter()

    def say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def close(self) -> None:
        self._bars.stop()
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._lines.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)


def _forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that were not committed: they are about to happen again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        path.write_text("".join(kept), encoding="utf-8")
