"""`bench train`, what stands around a step: the trainer's loop, readers, prediction.

trainer_overhead     seconds of a step in Trainer.train over those in a hand-written loop with the same calls
reader_vs_train      samples/s that one core reads, over samples/s trained; from Parquet and from Criteo's text
predict_vs_evaluate  samples/s of a Predictor over those of an evaluation of the same commit
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from harness import Measured, close_workers, interleave, open_worker
from workers.around import Around

from colonnade import Mesh
from colonnade.config.run import build_config
from colonnade.data import open_source
from colonnade.data.sets.criteo import CATEGORIES, NAMES
from colonnade.run.run import open_run

GROUPS = (("trainer", "bare loop"), ("parquet", "criteo text"), ("evaluate", "predict"))
STEPS = {"trainer": 50, "parquet": 96, "evaluate": 20}
"""Steps of a block, by the first of its group."""
RATIOS = ("trainer_overhead", "reader_vs_train", "reader_vs_train_criteo", "predict_vs_evaluate")
WARM_UP = 2
NUM_RUN_SAMPLES = 400_000
TEXT_LINES = 96 * 4096
"""A block of reading is the whole file: Parquet is decoded a row group at a time."""


def config_of(
    batch_size: int, bottom: list[int], top: list[int], max_cardinality: int
) -> dict[str, Any]:
    """The DLRM of the bench as a run's configuration."""
    return {
        "data": {
            "name": "synthetic",
            "options": {
                "num_train": NUM_RUN_SAMPLES,
                "num_test": 0,
                "max_cardinality": max_cardinality,
            },
        },
        "model": {"name": "dlrm", "dim": 16, "bottom": bottom, "top": top},
        "train": {"batch_size": batch_size},
    }


def measure(
    folder: Path, rows: list[int], config: dict[str, Any], *, rounds: int, num_threads: int
) -> list[Measured]:
    """Every kind of `workers.around`, interleaved in groups; needs what `write_data` wrote into `folder`."""
    batch_size = config["train"]["batch_size"]
    train_briefly(folder / "run", config)
    write_text(folder / "criteo.txt")
    write_parquet(folder / "criteo.txt", folder / "criteo.parquet")
    measured = []
    for group in GROUPS:
        workers = []
        try:
            for kind in group:
                worker = open_worker(kind, sys.executable, "workers.around")
                workers.append(worker)
                around = Around(kind, str(folder), str(folder / "run"), rows, config, num_threads)
                worker.send(asdict(around))
                worker.answer()
            blocks = interleave(
                workers, rounds=rounds, steps=STEPS[group[0]], warm_up_steps=WARM_UP
            )
        finally:
            close_workers(workers)
        for kind, done in blocks.items():
            rates = [batch_size / seconds for seconds in done.seconds]
            measured.append(Measured("around a step", kind, "samples/s", rates))
    return measured


def train_briefly(folder: Path, config: dict[str, Any]) -> None:
    """A run with one commit, to be evaluated and predicted with."""
    run = open_run(build_config(config), Mesh(), folder)
    try:
        run.train()
    finally:
        run.close()


def write_text(path: Path) -> None:
    """Criteo's format, with the skew of the generated stream."""
    source = open_source("synthetic", num_train=TEXT_LINES, num_test=0).train
    with path.open("w", encoding="ascii") as file:
        for batch in source.batches(20_000):
            dense = np.expm1(np.abs(batch.dense.numpy())).astype(int).astype(str)
            ids = [batch.ids[c.name].values.numpy() for c in source.schema.categorical]
            words = [
                [f"{(int(i) * 2654435761 + f) & 0xFFFFFFFF:08x}" for i in column]
                for f, column in enumerate(ids)
            ]
            label = batch.label.numpy().astype(int)[:, 0].astype(str)
            for row in zip(label, *dense.T, *words, strict=True):
                file.write("\t".join(row) + "\n")


def write_parquet(source: Path, target: Path) -> None:
    """The same columns, typed, in row groups as large as a reader's blocks of text."""
    table = pyarrow.csv.read_csv(
        source,
        pyarrow.csv.ReadOptions(column_names=NAMES),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(CATEGORIES, pa.string())),
    )
    pq.write_table(table, target, row_group_size=1 << 17, compression="zstd")


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    results = {m.system: m for m in measured if m.case == "around a step"}
    if not results:
        return {}
    rate = {system: m.median for system, m in results.items()}
    # Neighbouring blocks: a machine that slows down meanwhile slows both.
    pairs = zip(results["bare loop"].values, results["trainer"].values, strict=True)
    return {
        "trainer_overhead": median(bare / trainer for bare, trainer in pairs),
        "reader_vs_train": rate["parquet"] / rate["trainer"],
        "reader_vs_train_criteo": rate["criteo text"] / rate["trainer"],
        "predict_vs_evaluate": rate["predict"] / rate["evaluate"],
    }
