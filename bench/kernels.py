"""Speed of lookups and sparse updates alone, compared with FBGEMM, plain torch and what memory allows.

Minutes: 25 (quick 3).

26 tables of one width, 4 GiB together, fp32. Per width: one-hot, 20-hot and sequence lookups; uniform and skewed ids;

    colonnade   the native core, as one process calls it: workers/kernels_colonnade.py says what is timed
    fbgemm      SplitTableBatchedEmbeddingBagsCodegen on the CPU, as shipped
    torch       nn.EmbeddingBag(sparse=True) per table and torch.optim
    roofline    a bare gather + store, and a bare read-modify-write of rows: roofline.cc

Figures include Python's calls on all sides, and no reader. Every batch is made beforehand.
Systems are measured in turns, as many at a time as memory holds: see `SETS`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from harness import (
    PEER_INSTALLS,
    ROOT,
    BenchError,
    PieceFile,
    Worker,
    close_workers,
    describe_machine,
    interleave,
    open_environment,
    open_parser,
    open_worker,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
    run_script,
    say,
)
from rich.console import Console
from tables.kernels import (
    OURS,
    ROWWISE,
    Figures,
    Point,
    print_figures,
    print_ratios,
    ratios_of,
)
from workers.workload import NUM_FEATURES, SKEWS, Tables, Workload, write_ids

import colonnade

DIMS = (16, 32, 64, 128)
TABLES_GIB = 4.0
LR = 0.01
ONE_HOT = Workload("one-hot", batch_size=4096, lookups=1, pooled=True, steps=5)
WORKLOADS = (
    ONE_HOT,
    Workload("20-hot", batch_size=1024, lookups=20, pooled=True, steps=2),
    # All tables, so that they are as large as elsewhere: 208,000 lookups.
    Workload("sequence", batch_size=160, lookups=50, pooled=False, steps=1),
)
API_STEPS = 20
"""A block of the Python API's is longer: its lookahead works across steps."""
ROUNDS, QUICK_ROUNDS = 5, 2
QUICK_TABLES_GIB = 1.0
WARM_UP_STEPS = 30
"""Warm-up steps of each system, each time it has opened its tables, with `ONE_HOT`."""
CASE_WARM_UP_STEPS = 2
"""Warm-up steps of each case after that."""
LEFT_OUT = "fbgemm is left out, only the other ratios follow"
WIDTH = 132


@dataclass(frozen=True)
class Set:
    """Systems whose tables are in memory at the same time. Each peer's optimizer is the one named."""

    optimizer: str
    peers: tuple[str, ...]
    sequences: tuple[str, ...]
    """Peers that also look sequences up. FBGEMM's take most of a second a step: row-wise Adagrad stands for all."""
    also: tuple[str, ...] = ()
    """Our worker's other systems."""
    beside: str = ""

    def systems(self, workload: Workload) -> list[str]:
        peers = self.peers if workload.pooled else self.sequences
        also = self.also if workload.pooled else [name for name in self.also if name != "open"]
        return [OURS, *also, *peers] if workload.pooled or peers or also else []


SETS = (
    Set(ROWWISE, ("fbgemm",), ("fbgemm",), ("roofline", "open")),
    Set("sgd", ("fbgemm", "torch"), ("torch",)),
    Set("adagrad", ("fbgemm",), ()),
    # Adagrad doubles a table: three systems of 8 GiB would not fit in 24.
    Set("adagrad", ("torch",), ("torch",), beside="torch"),
)


@dataclass
class Facet:
    """One of several systems in a worker."""

    name: str
    worker: Worker

    def send(self, message: Mapping[str, Any]) -> None:
        self.worker.send({**message, "system": self.name})

    def answer(self) -> dict[str, Any]:
        return self.worker.answer()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "smaller tables, fewer rounds: to try")
    parser.add_argument("--gib", type=float, help=f"of tables per system, instead of {TABLES_GIB}")
    parser.add_argument("--rounds", type=int, help=f"blocks of a case, instead of {ROUNDS}")
    parser.add_argument(
        "--only", default="", help='pieces that this finds, e.g. "D=64 sgd"; default: all'
    )
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS, help="only these widths")
    options = parser.parse_args(arguments)
    gib = options.gib or (QUICK_TABLES_GIB if options.quick else TABLES_GIB)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    console = Console(highlight=False, width=max(WIDTH, Console().width))

    file = PieceFile(options.json, "kernels", tables_gib=gib)
    file.versions["colonnade"] = colonnade.__version__

    def write() -> dict[str, Any]:
        return report(
            "kernels",
            version=colonnade.__version__,
            machine=describe_machine(
                threads=os.cpu_count(), tables_gib=gib, others_share=file.others_share, shares=file.shares,
                versions=file.versions,
            ),
            measured=file.measured,
            ratios=ratios_of(Figures.of_measured(file.measured)),
            path=options.json,
        )  # fmt: skip

    for dim in options.dims:
        pieces = [
            piece for piece in list_pieces(dim, is_narrowest=dim == min(DIMS))
            if re.search(options.only, piece.name) and not file.has_piece(piece.name)
        ]  # fmt: skip
        if not pieces:
            continue
        tables = Tables(int(gib * 2**30) // (4 * dim * NUM_FEATURES), dim, ROWWISE, LR)
        with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
            files = write_batches(Path(folder), tables, rounds)
            for piece in pieces:
                before, figures = read_cpu_seconds(), Figures()
                workers = open_workers(file.versions, console)
                try:
                    if piece.set is None:
                        measure_api(tables, workers, files, rounds, figures)
                    else:
                        measure_set(piece.set, tables, workers, files, rounds, figures)
                finally:
                    close_workers(workers.values())
                file.add_piece(piece.name, figures.measured(), others_share(before))
                say(f"{piece.name}: {clock():.0f} s, others {file.shares[piece.name]}")
                write()
    result, figures = write(), Figures.of_measured(file.measured)
    print_figures(console, figures)
    print_ratios(console, figures)
    print_machine(console, result)


@dataclass(frozen=True)
class Piece:
    name: str
    set: Set | None
    """None: the Python API."""


def list_pieces(dim: int, *, is_narrowest: bool) -> list[Piece]:
    pieces = [Piece(f"D={dim} {one.optimizer} beside {' '.join(one.peers)}", one) for one in SETS]
    return pieces + [Piece(f"D={dim} api", None)] * is_narrowest


def open_workers(versions: dict[str, str], console: Console) -> dict[str, Worker]:
    """Start a worker for each system; return them by system. FBGEMM may be missing; others may not."""
    interpreters = {OURS: sys.executable, "torch": sys.executable}
    try:
        interpreters["fbgemm"] = open_environment(ROOT / "build" / "bench-env", PEER_INSTALLS)
    except BenchError as error:
        console.print(f"{LEFT_OUT}: {error}", style="yellow", markup=False)
    workers = {
        name: open_worker(name, python, f"workers.kernels_{name}")
        for name, python in interpreters.items()
    }
    for name, worker in list(workers.items()):
        try:
            worker.send({"num_threads": os.cpu_count() or 1, "seed": 0})
            versions |= worker.answer()["ready"]
        except BenchError as error:
            if name != "fbgemm":
                close_workers(workers.values())
                raise
            workers.pop(name).close()
            console.print(f"{LEFT_OUT}: {error}", style="yellow", markup=False)
    return workers


Files = dict[tuple[str, str], tuple[Workload, Path]]
"""Workload and its file of ids, by the names of workload and skew."""


def write_batches(folder: Path, tables: Tables, rounds: int) -> Files:
    """Write as many batches as a case takes, for each workload and skew; a warm-up uses them in a cycle."""
    files: Files = {}
    for seed, (workload, ids) in enumerate(product(WORKLOADS, SKEWS)):
        path = folder / f"{workload.name} {ids}.npy"
        num_batches = CASE_WARM_UP_STEPS + rounds * (workload.steps + 1)
        write_ids(path, workload, SKEWS[ids], tables.rows, num_batches, seed)
        files[workload.name, ids] = workload, path
    return files


def measure_set(
    system_set: Set,
    tables: Tables,
    workers: Mapping[str, Worker],
    files: Files,
    rounds: int,
    to: Figures,
) -> None:
    peers = [name for name in system_set.peers if name in workers]
    if not peers and not system_set.also:
        return
    used = [OURS, *peers]
    for name in workers.keys() - set(used):
        tell(workers[name], {"close": True})
    for name in used:
        also = system_set.also if name == OURS else ()
        settings = asdict(replace(tables, optimizer=system_set.optimizer))
        tell(workers[name], {"open": settings, "also": also})
    print(
        f"{clock():4.0f} s: D={tables.dim} {system_set.optimizer}, {', '.join(used)}",
        file=sys.stderr,
    )
    is_warm = False
    for (_, ids), (workload, path) in files.items():
        systems = [n for n in system_set.systems(workload) if n in workers or n in system_set.also]
        facets = [Facet(name, workers.get(name, workers[OURS])) for name in systems]
        if not facets:
            continue
        blocks = interleave(
            facets,
            rounds=rounds,
            steps=workload.steps,
            warm_up_steps=CASE_WARM_UP_STEPS if is_warm else WARM_UP_STEPS,
            message={"workload": asdict(workload), "ids": str(path)},
        )
        is_warm = True
        point = Point(tables.dim, workload.name, ids, system_set.optimizer, system_set.beside)
        for system, done in blocks.items():
            to.seconds[point, system] = done.phases


def measure_api(
    tables: Tables, workers: Mapping[str, Worker], files: Files, rounds: int, to: Figures
) -> None:
    """The whole sparse step of a user: open tables, Adagrad, one-hot."""
    for name in workers:
        tell(workers[name], {"close": True})
    settings = asdict(replace(tables, optimizer="adagrad"))
    tell(workers[OURS], {"open": settings, "also": ["api"]})
    for ids in SKEWS:
        workload, path = files[ONE_HOT.name, ids]
        blocks = interleave(
            [Facet("api", workers[OURS])],
            rounds=rounds,
            steps=API_STEPS,
            warm_up_steps=WARM_UP_STEPS,
            message={"workload": asdict(workload), "ids": str(path)},
        )
        to.seconds[Point(tables.dim, "api", ids, "adagrad"), "api"] = blocks["api"].phases


START = perf_counter()


def clock() -> float:
    return perf_counter() - START


def tell(worker: Worker, message: Mapping[str, Any]) -> None:
    worker.send(message)
    worker.answer()


if __name__ == "__main__":
    run_script(main)
