"""Speed of lookups and updates of open tables alone, and bytes of a row, compared with PERSIA's worker and server.

Minutes: 3 (quick 1).

26 one-hot fields of open tables, D=16, Adagrad, 4,096 samples a step, ids of a Zipf law with exponent 1.1:

    api         EmbeddingCollection with lookahead, one fixed gradient through backward, RowOptimizer.step; with as many
                threads as processors, and with one fewer, which is the lookahead's: the faster of the two counts
    open        the native core alone, phase by phase, as one process calls it (workers/kernels_colonnade.py)
    roofline    a bare gather and a bare read-modify-write of the same rows of direct tables, with the state of row-wise
                Adagrad, an eighth of what is updated here: roofline.cc
    ranks       `api` on 2 and 4 processes over loopback, the batch shared between them; and with servers

PERSIA's figures are of its published binaries on a machine of two such processors (embedding worker, parameter server
and client on one box): 33.7 thousand samples/s, and 306 bytes for a row of 128 bytes of payload.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import (
    Measured,
    close_workers,
    describe_machine,
    interleave,
    open_grid,
    open_parser,
    open_worker,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
    run_module,
    run_ranks,
    run_script,
)
from kernels import Facet, tell
from rich.console import Console
from workers.workload import Tables, Workload, write_ids

import colonnade

SKEW = 1.1
LR = 0.01
DIM = 16
WANTED, WANTED_ACROSS, WANTED_BEYOND = 900_000, 5 * 34_000, 16
PERSIA_RATE, PERSIA_BYTES = 33_700, 306
WORLDS = ((2, 0), (4, 0), (4, 2))
"""Numbers of ranks, and of servers among them."""
ROWS = ((32, "SGD"), (16, "Adagrad"))
"""Whose memory is measured: 128 bytes of payload either way."""
NUM_BORN = 4_000_000
"""Rows whose memory is measured: of a million, huge pages that are not full are 7 bytes each."""
WIDTH = 110


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "smaller tables, fewer rounds: to try")
    options = parser.parse_args(arguments)
    rounds, steps = (2, 20) if options.quick else (7, 50)
    num_rows = 100_000 if options.quick else 1_000_000  # of each table
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    before = read_cpu_seconds()
    workload = Workload("one-hot", batch_size=4096, lookups=1, pooled=True, steps=steps)
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        ids = Path(folder) / "ids.npy"
        write_ids(ids, workload, SKEW, num_rows, 64, seed=0)
        measured = one_process(workload, ids, num_rows, rounds, steps)
        for ranks, servers in WORLDS:
            measured.append(several(ids, ranks, servers, workload.batch_size, rounds, steps))
    of_rows = {f"D={dim} {name}": row_bytes(dim, name, NUM_BORN) for dim, name in ROWS}
    result = report(
        "sparse",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=os.cpu_count(), rows=num_rows, others_share=round(others_share(before), 2),
            versions={"colonnade": colonnade.__version__}, row_bytes=of_rows,
        ),
        measured=measured,
        ratios=ratios_of(measured, of_rows, workload.batch_size),
        path=options.json,
    )  # fmt: skip
    show(console, measured, of_rows, result["ratios"])
    print_machine(console, result)


def one_process(
    workload: Workload, ids: Path, num_rows: int, rounds: int, steps: int
) -> list[Measured]:
    """Seconds of a step by phase: the API's, and beside it the native core's and the bare loops'."""
    results = []
    all_threads = os.cpu_count() or 1
    few = [(["api"], all_threads - 1)] if all_threads > 1 else []
    for also, threads in ((["api"], all_threads), *few, (["open", "roofline"], all_threads)):
        worker = open_worker("colonnade", sys.executable, "workers.kernels_colonnade")
        try:
            tell(worker, {"num_threads": threads, "seed": 0})
            tables = asdict(Tables(num_rows, DIM, "adagrad", LR))
            tell(worker, {"open": tables, "also": also})
            blocks = interleave(
                [Facet(name, worker) for name in also],
                rounds=rounds,
                steps=steps,
                warm_up_steps=steps,
                message={"workload": asdict(workload), "ids": str(ids)},
            )
        finally:
            close_workers([worker])
        for system, done in blocks.items():
            name = f"{system}, {threads} threads" if system == "api" else system
            results.append(Measured(name, "colonnade", "ms/step", [1e3 * s for s in done.seconds]))
            for phase, seconds in done.phases.items():
                values = [round(1e3 * s, 3) for s in seconds]
                results.append(Measured(f"{name} {phase}", "colonnade", "ms/step", values))
    return results


def several(
    ids: Path, ranks: int, servers: int, batch_size: int, rounds: int, steps: int
) -> Measured:
    """Samples a second of all ranks together."""
    words = ["workers.sparse_ranks", ids, DIM, servers, rounds, steps]
    printed = run_ranks(sys.executable, ranks, words)
    line = next(line for line in printed.splitlines() if line.startswith('{"seconds"'))
    rates = [batch_size / seconds for seconds in json.loads(line)["seconds"]]
    return Measured(f"{ranks} ranks, {servers} servers", "colonnade", "samples/s", rates)


def row_bytes(dim: int, optimizer: str, num_rows: int) -> dict[str, float]:
    words = ["workers.sparse_rows", dim, optimizer, num_rows]
    return json.loads(run_module(sys.executable, words, name="bytes of a row"))


def ratios_of(
    measured: Sequence[Measured], of_rows: dict[str, dict[str, float]], batch_size: int
) -> dict[str, float]:
    by_case = {row.case: row.median for row in measured}
    fastest = min(
        ms for case, ms in by_case.items() if case.startswith("api") and case.endswith(" threads")
    )
    rate = batch_size / fastest * 1e3
    across = {case: rate for case, rate in by_case.items() if "ranks" in case}
    bare = sum(ms for case, ms in by_case.items() if case.startswith("roofline "))
    return {
        "sparse_samples_per_second": rate,
        "sparse_vs_persia": rate / PERSIA_RATE,
        "sparse_across_processes_min": min(across.values()),
        "sparse_across_processes_vs_persia_min": min(across.values()) / PERSIA_RATE,
        "sparse_of_roofline": bare / fastest,
        "row_bytes_beyond_payload_and_clock_max": max(row["beyond"] for row in of_rows.values()),
        "row_bytes_beyond_payload_max": max(
            row["beyond"] + row["clock"] for row in of_rows.values()
        ),
    }


def show(
    console: Console,
    measured: Sequence[Measured],
    of_rows: dict[str, dict[str, float]],
    ratios: dict[str, float],
) -> None:
    headings = "what", "median", "unit", "least", "most"
    table = open_grid(headings, texts=("what", "unit"), title="Of a step, medians")
    for item in measured:
        digits = 0 if item.unit == "samples/s" else 2
        words = [
            f"{v:,.{digits}f}" for v in (median(item.values), min(item.values), max(item.values))
        ]
        table.add_row(item.case, words[0], item.unit, *words[1:])
    console.print(table)
    for name, text in of_rows.items():
        console.print(
            f"a row of {name}: {text['total']:.1f} bytes = {text['payload']:.0f} payload + {text['clock']:.0f} clock + "
            f"{text['beyond']:.1f} id, pins and index (PERSIA: {PERSIA_BYTES} for 128)", soft_wrap=True
        )  # fmt: skip
    wanted: dict[str, Any] = {
        "sparse_samples_per_second": f"wanted >= {WANTED:,}; PERSIA {PERSIA_RATE:,}",
        "sparse_across_processes_min": f"wanted >= {WANTED_ACROSS:,}",
        "row_bytes_beyond_payload_max": f"wanted <= {WANTED_BEYOND}",
    }
    for name, value in ratios.items():
        word = f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
        console.print(f"{name}: {word}" + (f" ({wanted[name]})" if name in wanted else ""))


if __name__ == "__main__":
    run_script(main)
