"""Measure whether the advised number of ranks has the efficiency that was predicted (`colonnade plan --advise`).

Minutes: 6 (quick 2).

Hosts are network namespaces on this machine, one rank on each: 1, 2 and 4, with uplinks of 10, 1 and 0.1 Gbit/s. A
model sleeps for as long as a network would compute, the same for every sample, because two processors cannot compute
for four ranks: crowding is taken out, and links are real. Rows of 8 tables, D = 32, row-wise over all ranks.

    efficiency_error_median    absolute difference of predicted and measured efficiency, over 2 and 4 hosts and links
    efficiency_error_worst     the largest of them
    fastest_right              links for which the number of hosts with the shortest predicted step is within 5 % of the
                        shortest measured one, as a share

Not measured yet: the number of servers. The loss at the advised batch is measured by `advise_batch`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from cluster.hosts import open_hosts
from cluster.launch import torchrun
from harness import (
    BENCH,
    BenchError,
    Measured,
    describe_machine,
    open_grid,
    open_parser,
    others_share,
    print_machine,
    print_ratios,
    read_cpu_seconds,
    report,
    run_module,
    run_script,
    say,
)
from rich.console import Console
from workers.advise import HOSTS

import colonnade

LINKS = (10.0, 1.0, 0.1)
"""Gbit/s of each host's uplink."""
TIMEOUT = 200.0
UNIT = "s/step"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "one round of fewer steps: to try")
    parser.add_argument("--links", type=float, nargs="+", default=LINKS, help="Gbit/s of uplinks")
    options = parser.parse_args(arguments)
    links = options.links
    rounds, steps = (1, 30) if options.quick else (3, 60)
    before = read_cpu_seconds()
    values: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for gigabits in links:
            say(f"round {number + 1} of {rounds}, {gigabits:g} Gbit/s")
            words = ["workers.advise", "predict", gigabits]
            predicted = json.loads(run_module(sys.executable, words, threads=1))
            for hosts in HOSTS:
                case = f"{gigabits:g} Gbit/s, {hosts} hosts"
                values.setdefault((case, "predicted"), []).append(predicted[str(hosts)])
                values.setdefault((case, "measured"), []).append(measure(hosts, gigabits, steps))
    measured = [Measured(case, system, UNIT, times) for (case, system), times in values.items()]
    result = report(
        "advise",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=1, others_share=round(others_share(before), 2),
            versions={"colonnade": colonnade.__version__},
        ),
        measured=measured,
        ratios=compute_ratios(measured),
        path=options.json,
    )  # fmt: skip
    console = Console(highlight=False, width=120)
    grid = open_grid(("case", "predicted ms", "measured ms"), texts=1)
    for case in dict.fromkeys(row.case for row in measured):
        times = [
            f"{1e3 * median(values[case, system]):.1f}" for system in ("predicted", "measured")
        ]
        grid.add_row(case, *times)
    console.print(grid)
    print_ratios(console, result)
    print_machine(console, result)


def measure(num_hosts: int, gigabits: float, steps: int) -> float:
    """Train on hosts of one rank; return the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder, open_hosts(num_hosts, gigabits=gigabits) as hosts:
        script = ["-m", "workers.advise", "train", str(steps)]
        job = torchrun(hosts, 1, script, folder=Path(folder), cwd=BENCH)
        if any(job.wait(TIMEOUT)):
            raise BenchError(f"{num_hosts} hosts failed\n{job.tail()}")
        (line,) = re.findall(r'^{"seconds": (.*)}', job.logs[0].read_text(), re.M)
    return float(line)


def compute_ratios(measured: Sequence[Measured]) -> Mapping[str, float]:
    """Compare efficiencies, and the fastest numbers of hosts, link by link."""
    seconds = {(row.case, row.system): row.median for row in measured}
    errors, right = [], []
    links = list(dict.fromkeys(row.case.rsplit(", ", 1)[0] for row in measured))
    for link in links:
        steps = {
            system: {hosts: seconds[f"{link}, {hosts} hosts", system] for hosts in HOSTS}
            for system in ("predicted", "measured")
        }
        for hosts in HOSTS[1:]:
            predicted, actual = (by[1] / by[hosts] / hosts for by in steps.values())
            errors.append(abs(predicted - actual))
        fastest = min(HOSTS, key=lambda hosts: steps["predicted"][hosts])
        actual_steps = steps["measured"]
        right.append(actual_steps[fastest] <= 1.05 * min(actual_steps.values()))
    return {
        "efficiency_error_median": median(errors),
        "efficiency_error_worst": max(errors),
        "fastest_right": sum(right) / len(right),
    }


if __name__ == "__main__":
    run_script(main)
