"""Measure whether tables of 100 trillion parameters train as fast as tables of 6.25 trillion.

Minutes: 12 (quick 1).

A table without a vocabulary has 128 floats for each id; parameters are ids x 128. At each size as many random ids are
trained (--rows), the same number of times: bags of 26 with skew 1.05, row-wise Adagrad, no network. Memory holds a
quarter of their rows, files the others. Sizes train in turns, each in a process of its own that stays open; then each
saves and is resumed by a new process, in turns too.

    speed_100T_of_6T    median over the rounds of the ratio within a round; beside it the least and the largest of them
    one_tiered_of_four_dram    speed of one node with a quarter of the rows in memory, the others in files, over that of
                        four nodes with a quarter of them each and no files; nodes are network namespaces with links of
                        10 Gbit/s and half a processor each, their jobs take turns
    nodes_at_rate_of_four      nodes with files that reach the rate of the four; at rates up to that of one of them, one
                        has room for the rows of four
    flat_within         part by which the slowest size's median is below the fastest's; PERSIA reports 7 %
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from cluster.hosts import open_hosts, why_no_hosts
from cluster.launch import torchrun
from crowded import quota_group
from harness import (
    BENCH,
    BenchError,
    Measured,
    Worker,
    close_workers,
    describe_machine,
    open_grid,
    open_parser,
    open_worker,
    others_share,
    print_machine,
    print_ratios,
    read_cpu_seconds,
    report,
    run_script,
    say,
)
from rich.console import Console
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
NODES_TIMEOUT = 280.0
DISK_FACTOR = 3
"""Bytes of files over those of rows: overwritten rows and two checkpoints are part of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "fewer rows and rounds, no nodes: to try")
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
        result = write_result(options.json, measured, num_rows, before)
        if not options.quick:
            measured += measure_nodes(Path(folder), restarts, num_rows // 4, steps)
            result = write_result(options.json, measured, num_rows, before)
    show(Console(highlight=False, width=120), measured, result)


def write_result(
    path: Path | None, measured: Sequence[Measured], num_rows: int, before: Any
) -> dict[str, Any]:
    """Write what is measured so far. before: processor seconds when the bench began."""
    return report(
        "capacity",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=os.cpu_count(), rows=num_rows, others_share=round(others_share(before), 2),
            versions={"colonnade": colonnade.__version__},
        ),
        measured=measured,
        ratios=compute_ratios(measured),
        path=path,
    )  # fmt: skip


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
        workers[size] = open_worker(
            size, sys.executable, "workers.capacity",
            arguments=[str(folder / size), str(SIZES[size]), str(num_rows)],
        )  # fmt: skip
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


def measure_nodes(folder: Path, turns: int, num_rows: int, steps: int) -> list[Measured]:
    """Measure one node with row files and four without, in turns; none where there are no network namespaces."""
    rates: dict[int, list[float]] = {1: [], 4: []}
    if reason := why_no_hosts():
        say(f"no nodes: {reason}")
        return []
    for turn, nodes in product(range(turns), rates):
        logs = folder / f"nodes-{nodes}-{turn}"
        logs.mkdir()
        words = [logs / "rows", SIZES["100 T"], num_rows, steps]
        with quota_group(nodes / 2) as group, open_hosts(nodes, gigabits=10.0) as hosts:
            script = ["-m", "workers.capacity", *map(str, words)]
            job = torchrun(hosts, 1, script, folder=logs, cwd=BENCH)
            for agent in job.agents:
                (group / "cgroup.procs").write_text(str(agent.pid))
            if any(job.wait(NODES_TIMEOUT)):
                raise BenchError(f"{nodes} nodes failed\n{job.tail()}")
        rates[nodes] += map(
            float, re.findall(r'^{"samples/s": (.*)}', job.logs[0].read_text(), re.M)
        )
    systems = {1: "one tiered", 4: "four in DRAM"}
    return [Measured("nodes", systems[n], "samples/s", values) for n, values in rates.items()]


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    rates = {r.case: r for r in measured if r.unit == "samples/s" and r.case != "nodes"}
    ends = (rates[size].values for size in ("100 T", "6.25 T"))
    ratios = [largest / smallest for largest, smallest in zip(*ends, strict=True)]
    medians = [row.median for row in rates.values()]
    nodes = [row.values for row in measured if row.case == "nodes"]
    of_four = [one / four for one, four in zip(*nodes, strict=True)]
    result = {
        "speed_100T_of_6T": median(ratios),
        "speed_100T_of_6T_least": min(ratios),
        "speed_100T_of_6T_largest": max(ratios),
        "flat_within": 1 - min(medians) / max(medians),
    }
    if of_four:
        share = median(of_four)
        result |= {"one_tiered_of_four_dram": share, "nodes_at_rate_of_four": ceil(1 / share)}
    return result


def show(console: Console, measured: Sequence[Measured], result: dict[str, Any]) -> None:
    values = {(row.case, row.unit): row.median for row in measured}
    grid = open_grid(("parameters", *UNITS.values()), texts=0)
    for size in dict.fromkeys(row.case for row in measured if row.case != "nodes"):
        cells = [values[size, unit] for unit in UNITS.values()]
        grid.add_row(size, *(f"{cell:,.{0 if cell >= 100 else 2}f}" for cell in cells))
    console.print(grid)
    for row in (row for row in measured if row.case == "nodes"):
        console.print(f"{row.system}: {row.median:,.0f} samples/s")
    print_ratios(console, result)
    print_machine(console, result)


if __name__ == "__main__":
    run_script(main)
