"""Does reading ever starve training? Samples/s that one core reads, over samples/s that training takes.

The same Criteo-shaped samples as a text file and as the Parquet file that `colonnade convert` makes of it, each read
by a process on one core (seconds of its processor); training is bench train's DLRM at D=16, on all cores. Blocks take
turns in one run. Files are in the page cache: what is measured is parsing, not a disk.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from harness import (
    BenchError,
    Measured,
    Worker,
    close_workers,
    describe_machine,
    interleave,
    open_worker,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
    write_report,
)
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from train import BATCH_SIZE, BOTTOM, DENSE_LR, MAX_CARDINALITY, ROWS_LR, TOP, write_data
from workers.loop import Case

import colonnade
from colonnade.batch import Batch
from colonnade.data.convert import open_criteo_conversion, write_parquet
from colonnade.data.synthetic import open_synthetic

DIM = 16
WARM_UP_STEPS, ROUNDS, STEPS = 16, 12, 10
QUICK_ROUNDS, QUICK_STEPS = 3, 5
MISSING = 8
"""Every so many values of a column are missing, in turn."""
FILES = {"criteo": "train.txt", "parquet": "train.parquet"}
HEX = np.array([f"{i:02x}".encode() for i in range(256)], dtype="S2")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to try, not to quote")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(
            f"--json {options.json}: there is no folder {options.json.parent}; make it first"
        )
    console = Console(highlight=False)
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    num_batches = WARM_UP_STEPS + rounds * steps
    versions: dict[str, str] = {}
    before = read_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        rows = write_data(Path(folder), num_batches=num_batches)
        write_files(Path(folder), num_batches * BATCH_SIZE)
        case = Case(
            data=folder, rows=rows, dim=DIM, bottom=BOTTOM, top=TOP, rows_lr=ROWS_LR, dense_lr=DENSE_LR,
            num_threads=os.cpu_count() or 1, seed=0,
        )  # fmt: skip
        cases = {"training": case}
        for name, file in FILES.items():
            cases[name] = replace(case, data=str(Path(folder) / file), num_threads=1)
        workers = open_workers(cases, versions)
        try:
            blocks = interleave(workers, rounds=rounds, steps=steps, warm_up_steps=WARM_UP_STEPS)
        finally:
            close_workers(workers)
    measured = [
        Measured("training" if name == "training" else "reading", name, "samples/s",
                 [BATCH_SIZE / seconds for seconds in done.seconds])
        for name, done in blocks.items()
    ]  # fmt: skip
    result = report(
        "readers",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=os.cpu_count(), others_share=round(others_share(before), 2), versions=versions
        ),
        measured=measured,
        ratios=ratios_of(measured),
    )
    if options.json:
        write_report(options.json, result)
    table = Table(box=None, title=f"batch {BATCH_SIZE}", title_justify="left")
    for heading in ("what", "samples/s", "spread"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for m in measured:
        spread = (max(m.values) - min(m.values)) / m.median
        table.add_row(m.system, f"{m.median:,.0f}", f"{spread:.0%}")
    console.print(table)
    for name, ratio in result["ratios"].items():
        console.print(f"{name}: {ratio:.2f}")
    print_machine(console, result)


def write_files(folder: Path, num_samples: int) -> None:
    """The generator's samples as Criteo's text and, converted, as Parquet."""
    source = open_synthetic(num_train=num_samples, num_test=0, max_cardinality=MAX_CARDINALITY)
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with (folder / FILES["criteo"]).open("wb") as file:
        for batch in source.train.batches(1 << 16):
            pyarrow.csv.write_csv(text_columns(batch), file, options)
    write_parquet(open_criteo_conversion(folder / FILES["criteo"]), folder / FILES["parquet"])


def text_columns(batch: Batch) -> pa.Table:
    """As in the real files: counts, 8 hex digits, nulls for what is missing."""
    assert batch.label is not None
    index = np.arange(batch.size)
    columns = {"label": pa.array(batch.label.numpy()[:, 0].astype(np.int8))}
    counts = np.expm1(np.abs(batch.dense.numpy().astype(np.float64)) * 2).astype(np.int64)
    for i in range(counts.shape[1]):
        columns[f"I{i + 1}"] = pa.array(counts[:, i], mask=(index + i) % MISSING == 0)
    for i, (name, ids) in enumerate(batch.ids.items()):
        # An odd factor is a bijection of 32 bits: ids look like hashes, as the real ones do.
        hashed = (ids.values.numpy() * 0x9E3779B1 & 0xFFFFFFFF).astype(">u4")
        columns[name] = pa.array(spell(hashed), mask=(index + i) % MISSING == 0)
    return pa.table(columns)


def spell(numbers: NDArray[np.uint32]) -> NDArray[np.str_]:
    """(N,) big-endian -> 8 hex digits each."""
    digits = HEX[numbers.view(np.uint8).reshape(-1, 4)]
    return np.ascontiguousarray(digits).view("S8")[:, 0].astype("U8")


def open_workers(cases: dict[str, Case], versions: dict[str, str]) -> list[Worker]:
    """Start all, then wait for all."""
    started: list[Worker] = []
    try:
        for name, case in cases.items():
            module = "workers.colonnade" if name == "training" else "workers.reader"
            started.append(open_worker(name, sys.executable, module))
            started[-1].send(asdict(case))
        for worker in started:
            versions |= worker.answer()["ready"]
    except BaseException:
        close_workers(started)
        raise
    return started


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Medians: samples/s read by one core over samples/s trained, by kind of file."""
    rates = {m.system: m.median for m in measured}
    return {f"reader_vs_train_{name}": rates[name] / rates["training"] for name in FILES}


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")
