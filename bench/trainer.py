"""What does the trainer's own loop cost? Trainer.train beside a bare loop that makes the same calls.

DLRM on generated clicks, one process, the same source, model, optimizers and lookahead for both, in alternating
blocks of steps in one process. `trainer_overhead` is the trainer's time per step over the bare loop's, the median
over pairs of neighbouring blocks; the target is 1.03. The loop is written as a user would write it:

    for batch in collection.lookahead(source.batches(batch_size)):
        dense_optimizer.zero_grad()
        loss = objective.loss(model, batch, mesh); loss.backward()
        rows.step(); dense_optimizer.step()
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from harness import Measured, describe_machine, others_share, read_cpu_seconds, write_report
from rich.console import Console

from colonnade import Mesh
from colonnade.config import build_config
from colonnade.data import Splits
from colonnade.data.synthetic import open_synthetic
from colonnade.train.run import Run, open_run
from colonnade.train.trainer import Position

BATCH_SIZE = 4096
ROUNDS, STEPS = 20, 12
QUICK_ROUNDS, QUICK_STEPS = 4, 6
TARGET = 1.03


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to try, not to quote")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    options = parser.parse_args(arguments)
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    console = Console(highlight=False)
    since = read_cpu_seconds()
    pairs = measure(rounds, steps, options.batch_size)
    overhead = median(trainer / bare for trainer, bare in pairs)
    milliseconds = {
        "trainer": [1e3 * trainer for trainer, _ in pairs],
        "bare loop": [1e3 * bare for _, bare in pairs],
    }
    for name, values in milliseconds.items():
        console.print(f"{name:>10}: {median(values):.2f} ms per step of {options.batch_size}")
    console.print(f"trainer_overhead: {overhead:.3f} (target {TARGET})")
    others = others_share(since)
    console.print(f"others on this machine used {others:.0%} of its processors meanwhile")
    if options.json:
        cases = [Measured("DLRM", name, "ms", values) for name, values in milliseconds.items()]
        result = {
            "machine": describe_machine(others_share=others),
            "cases": [vars(case) for case in cases],
            "ratios": {"trainer_overhead": overhead},
        }
        write_report(options.json, result)


def measure(rounds: int, steps: int, batch_size: int) -> list[tuple[float, float]]:
    """Seconds per step (trainer, bare loop), by round; the first two rounds warm up and are left out."""
    data = open_synthetic(num_train=steps * batch_size, num_test=1)
    source = Remembered(data.train, batch_size)
    config = build_config(
        {"model": {"dim": 16, "bottom": [64, 32], "top": [128, 64]}, "train": {"batch_size": batch_size}}
    )  # fmt: skip
    run = open_run(config, Mesh(), None, data=Splits(train=source))
    blocks: list[Callable[[Run], None]] = [trainer_block, bare_block]
    pairs = []
    for number in range(rounds + 2):
        seconds = {}
        for block in blocks if number % 2 else reversed(blocks):
            start = time.perf_counter()
            block(run)
            seconds[block] = (time.perf_counter() - start) / steps
        pairs.append((seconds[trainer_block], seconds[bare_block]))
    return pairs[2:]


class Remembered:
    """Batches made beforehand, so that reading costs both loops nothing."""

    def __init__(self, source, batch_size: int) -> None:
        self.schema, self.num_samples = source.schema, source.num_samples
        self._batches = list(source.batches(batch_size))

    def batches(self, batch_size, *, rank=0, num_ranks=1, start=None):
        return iter(self._batches)


def trainer_block(run: Run) -> None:
    run.trainer.position = Position()
    run.trainer.train()


def bare_block(run: Run) -> None:
    trainer = run.trainer
    collection, objective, mesh = trainer.collection, trainer.objective, trainer.mesh
    batches = collection.lookahead(trainer.data.train.batches(trainer.schedule.batch_size))
    for batch in batches:
        trainer.dense_optimizer.zero_grad(set_to_none=False)
        loss = objective.loss(trainer.model, batch, mesh)
        loss.backward()
        trainer.rows.step()
        trainer.dense_optimizer.step()
    batches.close()


if __name__ == "__main__":
    torch.set_num_threads(torch.get_num_threads())
    main()
