"""Measure whether tables of 100 trillion parameters train as fast as tables of 6.25 trillion.

Minutes: 10 (quick 1).

A table without a vocabulary has 128 floats for each id; parameters are ids x 128. At each size as many random ids are
trained (--rows), the same number of times: bags of 26 with skew 1.05, row-wise Adagrad, no network. Memory holds a
quarter of their rows, files the others. Sizes train in turns, each in a process of its own that stays open; then each
saves and is resumed by a new process, in turns too.

    speed_100T_of_6T    median over the rounds of the ratio within a round; beside it the least and the largest of them
    flat_within         part by which the slowest size's median is below the fastest's; PERSIA reports 7 %
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import (
    BenchError,
    Measured,
    Worker,
    close_workers,
    describe_machine,
    json_path,
    open_worker,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
    say,
    write_report,
)
from rich.console import Console
from rich.table import Table
from workers.capacity import DIM, TABLE

import colonnade

SIZES = {
    f"{trillions:g} T": int(trillions * 1e12) // DIM for trillions in (6.25, 12.5, 25, 50, 100)
}
"""Number of ids by parameters."""
UNITS = {
    "samples/s": "samples/s", "memory": "bytes/row in memory", "files": "bytes/row in files",
    "save": "seconds to save", "resume": "seconds to resume",
}  # fmt: skip
DISK_FACTOR = 3
"""Bytes of files over those of rows: overwritten rows and two checkpoints are part of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=json_path, help="write cases, raw values and ratios here")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: to try")
    parser.add_argument("--rows", type=int, help="rows that are trained at each size")
    parser.add_argument(
        "--folder", type=Path, help="folder for row files; default: a temporary one"
    )
    options = parser.parse_args(arguments)
    num_rows = options.rows or (200_000 if options.quick else 2_000_000)
    rounds, restarts, steps = (2, 1, 4) if options.quick else (12, 4, 80)
    sizes = list(SIZES)[:: len(SIZES) - 1 if options.quick else 1]
    before = read_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="colonnade-capacity-", dir=options.folder) as folder:
        check_disk(Path(folder), sizes, num_rows)
        measured = measure(Path(folder), sizes, num_rows, rounds, restarts, steps)
    result = report(
        "capacity",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=os.cpu_count(), rows=num_rows, others_share=round(others_share(before), 2),
            versions={"colonnade": colonnade.__version__},
        ),
        measured=measured,
        ratios=compute_ratios(measured),
    )  # fmt: skip
    if options.json:
        write_report(options.json, result)
    show(Console(highlight=False, width=120), measured, result)


def check_disk(folder: Path, sizes: Sequence[str], num_rows: int) -> None:
    """Raise BenchError if the disk of `folder` cannot hold the row files of all sizes."""
    needed = DISK_FACTOR * len(sizes) * num_rows * TABLE.record_bytes
    if (free := shutil.disk_usage(folder).free) < needed:
        raise BenchError(
            f"{num_rows:,} rows at each of {len(sizes)} sizes need {needed / 1e9:,.0f} GB of files, "
            f"{folder} has {free / 1e9:,.0f} GB; give fewer --rows, or a --folder on a larger disk"
        )


def measure(
    folder: Path, sizes: Sequence[str], num_rows: int, rounds: int, restarts: int, steps: int
) -> list[Measured]:
    """Measure every size in turns; every other round begins with the largest."""
    values: dict[tuple[str, str], list[float]] = {}
    workers: dict[str, Worker] = {}

    def keep_answer(size: str, answer: dict[str, float]) -> None:
        for name, value in answer.items():
            values.setdefault((size, UNITS[name]), []).append(value)

    def start(size: str) -> None:
        words = [str(folder / size), str(SIZES[size]), str(num_rows)]
        workers[size] = open_worker(size, sys.executable, "workers.capacity", arguments=words)
        keep_answer(size, workers[size].answer())

    def ask(size: str, steps: int) -> dict[str, float]:
        workers[size].send({"steps": steps})
        return workers[size].answer()

    try:
        for size in sizes:
            start(size)
            ask(size, steps)  # a warm-up that is not kept
        for number in range(rounds + restarts):
            say(f"round {number + 1} of {rounds + restarts}")
            for size in sizes[:: -1 if number % 2 else 1]:
                answer = ask(size, steps)
                if number < rounds:
                    keep_answer(size, answer)
                    continue
                keep_answer(size, ask(size, 0))
                workers[size].close()
                start(size)
    finally:
        close_workers(workers.values())
    return [Measured(size, "colonnade", unit, numbers) for (size, unit), numbers in values.items()]


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    rates = {row.case: row for row in measured if row.unit == "samples/s"}
    pairs = zip(rates["100 T"].values, rates["6.25 T"].values, strict=True)
    ratios = [largest / smallest for largest, smallest in pairs]
    medians = [row.median for row in rates.values()]
    return {
        "speed_100T_of_6T": median(ratios),
        "speed_100T_of_6T_least": min(ratios),
        "speed_100T_of_6T_largest": max(ratios),
        "flat_within": 1 - min(medians) / max(medians),
    }


def show(console: Console, measured: Sequence[Measured], result: dict[str, Any]) -> None:
    values = {(row.case, row.unit): row.median for row in measured}
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("parameters", *UNITS.values()):
        grid.add_column(heading, justify="right")
    for size in dict.fromkeys(row.case for row in measured):
        cells = [values[size, unit] for unit in UNITS.values()]
        grid.add_row(size, *(f"{cell:,.{0 if cell >= 100 else 2}f}" for cell in cells))
    console.print(grid)
    for name, ratio in result["ratios"].items():
        console.print(f"{name}: {ratio:.3f}")
    print_machine(console, result)


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")
