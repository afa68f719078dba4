"""Speed of training on a shared machine, and the cost of waiting threads.

Minutes: 5 (quick 1).

DLRM on Criteo-shaped ids, one process, as many threads as there are processors; four systems in turns:

    colonnade           as every process that Colonnade starts: a thread that waits spins 0.2 ms
    colonnade spinning  OpenMP's default: a thread that waits spins for milliseconds
    torch               the same network on nn.EmbeddingBag, by default, which spins
    torch passive       the same with OMP_WAIT_POLICY=passive: a thread that waits sleeps at once

beside 0, 1, 2 and 4 processes that compute; and alone under quotas of 1 and 1.5 processors, where Colonnade takes as
many threads as the quota has processors, rounded up, and torch as many as the machine has.

Two rates: samples per second, and samples per processor second, which is user and system time of all threads of the
process. The second does not fall because others get their share of the processors: it falls when threads spin, or are
preempted while others wait for them. Every round measures every case; ratios are medians of those within one round.

    alone                         samples/s of colonnade alone over those of colonnade spinning alone
    of_alone_per_processor_second samples per processor second of colonnade over its own alone: the worst case
    torch_of_..., torch_passive_of_..., colonnade_spinning_of_...    the same of the other systems
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from harness import (
    Measured,
    Worker,
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
)
from rich.console import Console
from train import BATCH_SIZE, BOTTOM, DENSE_LR, ROWS_LR, TOP, write_data
from workers.loop import Case

import colonnade
from colonnade.processors import WAITING, count_usable_processors

SYSTEMS = {
    "colonnade": ("colonnade", WAITING),
    "colonnade spinning": ("colonnade", {}),
    "torch": ("torch", {}),
    "torch passive": ("torch", {"OMP_WAIT_POLICY": "passive"}),
}
"""Worker's module by name, and its settings of how threads wait."""
NEIGHBOURS = (0, 1, 2, 4)
QUOTAS = (1.0, 1.5)
QUOTA_SYSTEMS = ("colonnade", "torch")
ALONE = "alone"
MAX_CARDINALITY = 100_000
WARM_UP_STEPS = 6
ROUNDS, STEPS = 4, 6
QUICK_ROUNDS, QUICK_STEPS = 1, 2
BLOCK_SECONDS = 2.0
"""A block ends after so long, or after its steps: threads that spin take ten times as long beside others."""
RATES = ("samples/s", "samples/processor s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "one round: to try, not to quote")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    before = read_cpu_seconds()
    measured, versions = measure(rounds, steps, console)
    result = report(
        "crowded",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=count_usable_processors(), others_share=round(others_share(before), 2), versions=versions
        ),
        measured=measured,
        ratios=find_ratios(measured),
        path=options.json,
    )  # fmt: skip
    print_result(console, measured, result)


def measure(rounds: int, steps: int, console: Console) -> tuple[list[Measured], dict[str, str]]:
    """Return a pair of rates for each case and system, with one value per round; and the libraries' versions."""
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-bench-"))
        num_batches = WARM_UP_STEPS + rounds * steps * len(NEIGHBOURS)
        rows = write_data(Path(folder), num_batches=num_batches, max_cardinality=MAX_CARDINALITY)

        def start(system: str, num_threads: int, group: Path | None = None) -> Worker:
            module, waiting = SYSTEMS[system]
            worker = open_worker(
                system, sys.executable, f"workers.{module}", waiting=waiting, group=group
            )
            stack.callback(worker.close)
            case = Case(
                data=folder, rows=rows, dim=16, bottom=BOTTOM, top=TOP, embedding_lr=ROWS_LR,
                dense_lr=DENSE_LR, num_threads=num_threads, seed=0,
            )  # fmt: skip
            worker.send(asdict(case))
            versions.update(worker.answer()["ready"])
            run_block(worker, WARM_UP_STEPS)
            return worker

        processors = count_usable_processors()
        workers = [start(system, processors) for system in SYSTEMS]
        limited = []
        for quota in QUOTAS:
            try:
                group = stack.enter_context(quota_group(quota))
            except OSError as error:
                console.print(f"no quota of {quota:g}: {error}", style="yellow", markup=False)
                continue
            for system in QUOTA_SYSTEMS:
                num_threads = (
                    min(processors, -int(-quota // 1)) if system == "colonnade" else processors
                )
                limited.append((f"quota {quota:g}", start(system, num_threads, group)))
        for _ in range(rounds):
            for number in NEIGHBOURS:
                with busy_processes(number):
                    for worker in workers:
                        case = f"beside {number}" if number else ALONE
                        rates.setdefault((case, worker.name), []).append(run_block(worker, steps))
            for case, worker in limited:
                rates.setdefault((case, worker.name), []).append(run_block(worker, steps))
    measured = [
        Measured(case, system, unit, [pair[number] for pair in pairs])
        for (case, system), pairs in rates.items()
        for number, unit in enumerate(RATES)
    ]
    return measured, versions


def run_block(worker: Worker, steps: int) -> tuple[float, float]:
    """Return samples per second, and per processor second, of at most that many steps."""
    seconds, processor_seconds, num_samples = 0.0, 0.0, 0
    while num_samples < steps * BATCH_SIZE and seconds < BLOCK_SECONDS:
        worker.send({"steps": 1})
        answer = worker.answer()
        seconds += answer["seconds"][0]
        processor_seconds += answer["processor_seconds"]
        num_samples += BATCH_SIZE
    return num_samples / seconds, num_samples / processor_seconds


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run that many processes that compute, each on one thread."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def quota_group(processors: float) -> Iterator[Path]:
    """Make a control group, of version 2 or 1, that grants so many processors; OSError where that is not possible."""
    period = 100_000
    quota = round(processors * period)
    root = Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    group = (root if is_second else root / "cpu") / f"colonnade-bench-{os.getpid()}-{processors:g}"
    group.mkdir()
    try:
        if is_second:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield group
    finally:
        group.rmdir()


def find_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    """Compare the systems as the head of this file defines it."""
    values = {(m.case, m.system, m.unit): m.values for m in measured}
    per_second, per_processor_second = RATES

    def compare(above: tuple[str, str, str], below: tuple[str, str, str]) -> float:
        return median(a / b for a, b in zip(values[above], values[below], strict=True))

    alone = (ALONE, "colonnade", per_second), (ALONE, "colonnade spinning", per_second)
    ratios = {"alone": compare(*alone)}
    for system in SYSTEMS:
        cases = [m.case for m in measured if m.system == system and m.unit == per_second]
        by_case = {
            case: compare((case, system, per_processor_second), (ALONE, system, per_processor_second))
            for case in cases
            if case != ALONE
        }  # fmt: skip
        name = "" if system == "colonnade" else system.replace(" ", "_") + "_"
        ratios[f"{name}of_alone_per_processor_second"] = min(by_case.values())
        if not name:
            ratios |= {
                f"of_alone_per_processor_second_{case.replace(' ', '_')}": ratio
                for case, ratio in by_case.items()
            }
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: dict) -> None:
    """Print medians over rounds, then the ratios."""
    rates = {(m.case, m.system, m.unit): m.median for m in measured}
    table = open_grid(("case", "system", *RATES), texts=2)
    for case, system, unit in rates:
        if unit == RATES[0]:
            table.add_row(case, system, *(f"{rates[case, system, unit]:,.0f}" for unit in RATES))
    console.print(table)
    print_ratios(console, result)
    print_machine(console, result)


if __name__ == "__main__":
    run_script(main)
