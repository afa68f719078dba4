"""Work around a step, one kind for each worker: loops over the same batches, readers, scoring.

The first line from the parent names the kind and its files (`Around`); then blocks as in `loop.py`.
Legend: N batches, B samples, F fields.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from colonnade import Batch, Ids, Mesh, Predictor, _native
from colonnade.config.run import RunConfig, build_config, override_settings
from colonnade.data import Column, Position, Schema, Source, Splits, open_source
from colonnade.data.contract import START
from colonnade.data.sets.criteo import CSV_OPTIONS
from colonnade.run.run import TrainingRun, open_run
from colonnade.train.objective import Probability, weighted_loss
from workers.loop import open_channel

Block = Callable[[int], None]
"""Does so many steps; `main` times it."""


@dataclass(frozen=True)
class Around:
    kind: str  # of BUILDERS
    data: str  # folder with dense.npy (N, B, n), ids.npy (N, F, B), label.npy (N, B, 1), criteo.txt, criteo.parquet
    run: str  # folder of a committed run of `config`
    rows: list[int]  # of each field
    config: dict  # of RunConfig
    num_threads: int


@dataclass(frozen=True)
class Made:
    """The batches of the files, from memory, again and again: reading costs nothing in any loop."""

    schema: Schema
    batch_list: list[Batch]

    @property
    def num_samples(self) -> int:
        return len(self.batch_list) * self.batch_list[0].size * 10**6

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        for step in range(start.step, 10**6 * len(self.batch_list)):
            yield replace(self.batch_list[step % len(self.batch_list)])


def held_batches(around: Around) -> Made:
    dense, ids, label = (
        torch.from_numpy(np.load(Path(around.data) / f"{name}.npy"))
        for name in ("dense", "ids", "label")
    )
    names = [f"C{f + 1}" for f in range(len(around.rows))]
    batches = [
        Batch(
            size=ids.shape[2],
            dense=dense[i],
            ids={name: Ids(ids[i, f]) for f, name in enumerate(names)},
            label=label[i],
        )
        for i in range(len(ids))
    ]
    columns = tuple(Column(n, rows) for n, rows in zip(names, around.rows, strict=True))
    numbers = tuple(f"I{i + 1}" for i in range(dense.shape[2]))
    return Made(Schema(dense=numbers, categorical=columns), batches)


def open_trainer(around: Around) -> TrainingRun:
    """A run without a folder, as `colonnade train` opens it."""
    source: Source = held_batches(around)
    return open_run(build_config(around.config), Mesh(), None, data=Splits(train=source))


def trainer_loop(around: Around) -> Block:
    trainer = open_trainer(around).trainer

    def block(num_steps: int) -> None:
        # The lookahead of the block before is over; the position goes on.
        until = trainer.collection.step + num_steps
        trainer.config = override_settings(trainer.config, {"train.max_steps": until})
        trainer.train()

    return block


def bare_loop(around: Around) -> Block:
    """Train by hand, with the calls that the trainer makes for a step."""
    run = open_trainer(around)
    trainer = run.trainer
    model, collection, dense, rows = trainer.model, trainer.collection, trainer.dense, trainer.rows
    source, batch_size = trainer.data.train, trainer.config.train.samples_per_step
    optimizer = trainer.dense_optimizer

    def block(num_steps: int) -> None:
        position = Position(0, collection.step)
        stream = source.batches(batch_size, start=position)
        # As many as are trained, and no read-ahead beyond: the trainer's stream ends there too.
        stream = (batch for _, batch in zip(range(num_steps), stream, strict=False))
        for batch in collection.lookahead(stream):
            dense.zero_gradients()
            loss = weighted_loss(model(batch), batch)
            loss.backward()
            finite = bool(torch.isfinite(loss)) and collection.pipeline.gradients.are_finite()
            finite, _, _ = dense.reduce(finite=finite, stop=False, loss=loss.detach())
            assert finite
            rows.step(agreed=True)
            optimizer.step()

    return block


def reader_of(name: str, file: str) -> Callable[[Around], Block]:
    def build(around: Around) -> Block:
        # One spare core: nothing this process starts may run on another.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
        _native.set_num_threads(1)
        config = build_config(around.config)
        options: dict = {"schema": CSV_OPTIONS["schema"], "test_fraction": 0.0}
        source = open_source(name, Path(around.data) / file, **options).train
        epoch = iter(())

        def block(num_steps: int) -> None:
            nonlocal epoch
            for _ in range(num_steps):
                batch = next(epoch, None)
                if batch is None:
                    epoch = source.batches(config.train.batch_size)
                    batch = next(epoch)
                if batch.size != config.train.batch_size:
                    raise AssertionError("the file is no whole number of batches")

        return block

    return build


def evaluate(around: Around) -> Block:
    config: RunConfig = build_config(around.config)
    made = held_batches(around)
    run = open_run(config, Mesh(), Path(around.run), data=Splits(train=made), read_only=True)
    objective = Probability()

    def block(num_steps: int) -> None:
        part = Made(made.schema, made.batch_list[:num_steps])
        subset = Some(part, num_steps)
        objective.evaluate(run.trainer.model, subset, config.train.batch_size, Mesh())

    return block


def predict(around: Around) -> Block:
    made = held_batches(around)
    predictor = Predictor.open(around.run)

    def block(num_steps: int) -> None:
        for batch in Some(made, num_steps).batches(made.batch_list[0].size):
            predictor(batch)

    return block


@dataclass(frozen=True)
class Some:
    """The first batches of a source."""

    source: Made
    count: int

    @property
    def schema(self) -> Schema:
        return self.source.schema

    @property
    def num_samples(self) -> int:
        return self.count * self.source.batch_list[0].size

    def batches(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, start: Position = START
    ) -> Iterator[Batch]:
        stored = self.source.batch_list
        return (replace(stored[i % len(stored)]) for i in range(self.count))


BUILDERS: dict[str, Callable[[Around], Block]] = {
    "trainer": trainer_loop,
    "bare loop": bare_loop,
    "parquet": reader_of("parquet", "criteo.parquet"),
    "criteo text": reader_of("criteo", "criteo.txt"),
    "evaluate": evaluate,
    "predict": predict,
}


def main() -> None:
    channel = open_channel()
    around = Around(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(around.num_threads)
    block = BUILDERS[around.kind](around)
    print(json.dumps({"ready": {}}), file=channel)
    for line in sys.stdin:
        num_steps = json.loads(line)["steps"]
        started = time.perf_counter()
        block(num_steps)
        seconds = (time.perf_counter() - started) / num_steps
        print(json.dumps({"seconds": [seconds], "phases": {}}), file=channel)


if __name__ == "__main__":
    main()
