"""Speed of a whole training step next to nn.EmbeddingBag and TorchRec, and where its time goes.

Minutes: 25 (quick 3).

DLRM, DeepFM and DCN-v2 on Criteo-shaped ids (26 one-hot fields, skewed, 5.6 million rows), 13 dense columns,
fp32, one process. Dense network, dense optimizer, loss and batches are the same for all; each system brings its
embeddings:

    colonnade   row-wise Adagrad, batches looked up ahead as its default plan says
    torch       nn.EmbeddingBag(sparse=True) per table, torch.optim.Adagrad (one accumulator per weight, not per row)
    torchrec    DistributedModelParallel on one gloo rank, table-wise, fused row-wise Adagrad

Peers run as shipped, and helped: with Colonnade's settings of malloc and its linear layers, which do not need its
tables; torch also with row-wise Adagrad and one stacked table, TorchRec also with its planner free and its train
pipeline. Every batch is new, as in one epoch of training, and made in memory beforehand.

A step's time is split by measuring its parts alone with fixed gradients, all with the same settings of malloc: the
embeddings, the interaction (dots of all pairs), the dense products (both MLPs and their Adam). What malloc's settings
save is the difference of whole steps with and without them. TorchRec's network is torch's, and is measured there.

Each case is a piece: a later call with the same --json goes on where an earlier one stopped.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from harness import (
    PEER_INSTALLS,
    ROOT,
    BenchError,
    Blocks,
    Measured,
    PieceFile,
    Worker,
    close_workers,
    describe_machine,
    interleave,
    open_environment,
    open_grid,
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
from rich.table import Table
from tables import around
from tables.step_split import (
    INTERACTION,
    MALLOC,
    PARTS,
    PRODUCTS,
    SPARSE_ONLY,
    SPLIT,
    find_best,
    saved_by_part,
    split_rows,
    split_step,
)
from workers.loop import PHASES, Case

import colonnade
from colonnade.data.sets.synthetic import open_synthetic

DIMS = (16, 64)
OTHER_MODELS = {"deepfm": "DeepFM", "dcnv2": "DCN-v2"}
"""Models beside DLRM, at the smaller dim, against torch."""
BATCH_SIZE = 4096
MAX_CARDINALITY = 1_000_000
BOTTOM, TOP = [256, 128], [256, 128]
ROWS_LR, DENSE_LR = 0.02, 1e-3
WARM_UP_STEPS = 32
ROUNDS, STEPS = 12, 10
QUICK_ROUNDS, QUICK_STEPS = 3, 5
MAX_LOSS_GAP = 0.02
"""Systems whose log losses differ by more than this have not trained the same model."""
RATIOS = {"samples": "", "sparse_step": SPARSE_ONLY}
"""A ratio's name, and what follows `D=..` in the names of its cases."""
LEFT_OUT = "torchrec is left out, only the torch ratios follow"
AROUND = "around a step"


@dataclass(frozen=True)
class System:
    worker: str
    options: tuple[str, ...] = ()
    """See `Case`."""


SYSTEMS = {
    "colonnade": System("colonnade"),
    "colonnade, malloc as shipped": System("colonnade", ("shipped_malloc",)),
    "torch": System("torch"),
    "torch, our malloc": System("torch", ("malloc",)),
    "torch helped": System("torch", ("malloc", "linear", "rows")),
    "torchrec": System("torchrec"),
    "torchrec, our malloc": System("torchrec", ("malloc",)),
    "torchrec helped": System("torchrec", ("malloc", "linear")),
    "torchrec helped, planner": System("torchrec", ("malloc", "linear", "planner")),
    "torchrec helped, pipeline": System("torchrec", ("malloc", "linear", "pipeline")),
}
PEERS = ("torch", "torchrec", "torch helped", "torchrec helped*")
"""Peers as shipped, and helped; the fastest of the names that match counts."""
BOTH_MALLOCS = (
    "colonnade", "colonnade, malloc as shipped", "torch", "torch, our malloc", "torchrec", "torchrec, our malloc",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One case: systems that take turns."""

    name: str
    systems: tuple[str, ...]
    dim: int = DIMS[0]
    part: str = "step"
    model: str = "dlrm"


def list_pieces() -> list[Piece]:
    pieces = []
    helped = tuple(name for name in SYSTEMS if name.startswith("torchrec helped"))
    steps = ("colonnade", "torch", "torch helped", "torchrec", *helped)
    sparse = (
        "colonnade", "torch", "torch, our malloc", "torch helped", "torchrec", "torchrec helped",
        "torchrec helped, planner",
    )  # fmt: skip
    network = ("colonnade", "torch, our malloc", "torch helped")
    for dim in DIMS:
        pieces += [
            Piece(f"D={dim}", steps, dim),
            Piece(f"D={dim}{SPARSE_ONLY}", sparse, dim, "embeddings"),
            Piece(f"D={dim}{MALLOC}", BOTH_MALLOCS, dim),
            Piece(f"D={dim}{INTERACTION}", network, dim, "interaction"),
            Piece(f"D={dim}{PRODUCTS}", network, dim, "products"),
        ]
    for model, title in OTHER_MODELS.items():
        systems = ("colonnade", "torch", "torch helped")
        pieces.append(Piece(f"{title} D={DIMS[0]}", systems, model=model))
    return pieces


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "fewer rounds: to try, not to quote")
    parser.add_argument(
        "--only", default="", help='cases that this expression finds, e.g. "^D=64"; default: all'
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)

    pythons = {"colonnade": sys.executable, "torch": sys.executable}
    try:
        pythons["torchrec"] = open_environment(ROOT / "build" / "bench-env", PEER_INSTALLS)
    except BenchError as error:
        console.print(f"{LEFT_OUT}: {error}", style="yellow", markup=False)

    file = PieceFile(options.json, "train", rounds=rounds)

    def write() -> dict[str, Any]:
        measured = [m for m in file.measured if SPLIT not in m.case]
        file.measured = measured + [r for d in DIMS for r in split_rows(measured, d, BATCH_SIZE)]
        return report(
            "train",
            version=colonnade.__version__,
            machine=describe_machine(
                threads=os.cpu_count(), rounds=rounds, others_share=file.others_share, shares=file.shares,
                versions=file.versions,
            ),
            measured=file.measured,
            ratios=ratios_of(file.measured) | around.ratios_of(file.measured),
            path=options.json,
        )  # fmt: skip

    pieces = [p for p in list_pieces() if is_wanted(p.name, options.only, file)]
    wants_around = is_wanted(AROUND, options.only, file)
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        rows = []
        if pieces or wants_around:
            rows = write_data(Path(folder), num_batches=WARM_UP_STEPS + rounds * steps)
        for piece in pieces:
            before, start = read_cpu_seconds(), perf_counter()
            measured = measure_piece(piece, pythons, folder, rows, rounds, steps, file, console)
            file.add_piece(piece.name, measured, others_share(before))
            say(f"{piece.name}: {perf_counter() - start:.0f} s, others {file.shares[piece.name]}")
            write()
        if wants_around:
            before = read_cpu_seconds()
            config = around.config_of(BATCH_SIZE, BOTTOM, TOP, MAX_CARDINALITY)
            measured = around.measure(
                Path(folder), rows, config, rounds=rounds, num_threads=os.cpu_count() or 1
            )
            file.add_piece(AROUND, measured, others_share(before))
    print_result(console, file.measured, write())


def is_wanted(name: str, only: str, file: PieceFile) -> bool:
    return bool(re.search(only, name)) and not file.has_piece(name)


def measure_piece(
    piece: Piece,
    pythons: dict[str, str],
    folder: str,
    rows: list[int],
    rounds: int,
    steps: int,
    file: PieceFile,
    console: Console,
) -> list[Measured]:
    case = Case(
        data=folder, rows=rows, dim=piece.dim, bottom=BOTTOM, top=TOP, embedding_lr=ROWS_LR,
        dense_lr=DENSE_LR, num_threads=os.cpu_count() or 1, seed=0, model=piece.model, part=piece.part,
    )  # fmt: skip
    systems = {name: SYSTEMS[name] for name in piece.systems if SYSTEMS[name].worker in pythons}
    workers = open_workers(systems, pythons, case, file.versions, console)
    try:
        blocks = interleave(workers, rounds=rounds, steps=steps, warm_up_steps=WARM_UP_STEPS)
    finally:
        close_workers(workers)
    if piece.part == "step":
        check_same_model(blocks, piece.name)
    return [
        row
        for system, done in blocks.items()
        for row in cases_of(piece.name, system, done, has_loss=piece.part == "step")
    ]


def write_data(
    folder: Path, *, num_batches: int, max_cardinality: int = MAX_CARDINALITY
) -> list[int]:
    """Files that `Case.load` reads; returns the rows of each field."""
    num_samples = num_batches * BATCH_SIZE
    splits = open_synthetic(num_train=num_samples, num_test=0, max_cardinality=max_cardinality)
    source = splits.train
    batches = list(source.batches(BATCH_SIZE))
    np.save(folder / "dense.npy", np.stack([batch.dense.numpy() for batch in batches]))
    labels = [batch.label.numpy() for batch in batches if batch.label is not None]
    np.save(folder / "label.npy", np.stack(labels))
    names = [column.name for column in source.schema.categorical]
    ids = [[batch.ids[name].values.numpy() for name in names] for batch in batches]
    np.save(folder / "ids.npy", np.asarray(ids))
    return [column.cardinality or 0 for column in source.schema.categorical]  # none is open


def open_workers(
    systems: dict[str, System],
    pythons: dict[str, str],
    case: Case,
    versions: dict[str, str],
    console: Console,
) -> list[Worker]:
    """Start all, then wait for all. TorchRec may fail to start, and is then taken out of `pythons`; others may not."""
    started = [
        open_worker(name, pythons[system.worker], f"workers.{system.worker}")
        for name, system in systems.items()
    ]
    ready: list[Worker] = []
    try:
        for worker in started:
            system = systems[worker.name]
            try:
                worker.send(asdict(replace(case, options=system.options)))
                versions |= worker.answer()["ready"]
                ready.append(worker)
            except BenchError as error:
                if system.worker != "torchrec":
                    raise
                pythons.pop(system.worker, None)
                worker.close()
                console.print(f"{LEFT_OUT}: {error}", style="yellow", markup=False)
    except BaseException:
        close_workers(started)
        raise
    return ready


def check_same_model(blocks: dict[str, Blocks], case: str) -> None:
    """A speed of something else is worth nothing: all systems must have learnt alike."""
    losses = {system: sum(done.losses) / len(done.losses) for system, done in blocks.items()}
    if max(losses.values()) - min(losses.values()) > MAX_LOSS_GAP:
        raise BenchError(
            f"{case}: the systems' log losses differ by more than {MAX_LOSS_GAP}: {losses}"
        )


def cases_of(name: str, system: str, blocks: Blocks, *, has_loss: bool = True) -> list[Measured]:
    """The rows of one system in one case: throughput first, then where a step's time went, then its loss."""
    rates = [BATCH_SIZE / seconds for seconds in blocks.seconds]
    phases = [
        Measured(f"{name} {phase}", system, "ms/step", [1e3 * s for s in blocks.phases[phase]])
        for phase in PHASES
    ]
    rows = [Measured(name, system, "samples/s", rates), *phases]
    if has_loss:
        rows.append(Measured(f"{name} loss", system, "log loss", blocks.losses))
    return rows


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Medians of our samples/s over each peer's, of whole steps and of the embeddings' share, by dim and the worst;
    and by dim, ms that a step saves, as a whole and by part."""
    rates = {(m.case, m.system): m.median for m in measured if m.unit == "samples/s"}
    times = {key: 1 / rate for key, rate in rates.items()}
    ratios: dict[str, float] = {}
    for name, peer in product(RATIOS, PEERS):
        suffix = peer.replace(" ", "_").rstrip("*")
        by_dim = {}
        for dim in DIMS:
            case = f"D={dim}{RATIOS[name]}"
            time, fastest = find_best(times, case, peer)
            if fastest and (case, "colonnade") in times:
                by_dim[dim] = time / times[case, "colonnade"]
        if by_dim:
            ratios[f"{name}_vs_{suffix}"] = min(by_dim.values())
            ratios |= {f"{name}_vs_{suffix}_d{dim}": ratio for dim, ratio in by_dim.items()}
    for model, title in OTHER_MODELS.items():
        case = f"{title} D={DIMS[0]}"
        for peer in ("torch", "torch helped"):
            if (case, peer) in rates:
                ratio = rates[case, "colonnade"] / rates[case, peer]
                ratios[f"samples_vs_{peer.replace(' ', '_')}_{model}"] = ratio
    for dim in DIMS:
        ratios |= saved_by_part(split_step(measured, dim, BATCH_SIZE), dim)
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: dict) -> None:
    """The table a person reads: medians over blocks; phases in ms per step, as `PHASES` explains them."""
    by_case = {(m.case, m.system): m for m in measured}
    table = Table(
        box=None,
        title_justify="left",
        padding=(0, 1, 0, 0),
        title=f"DLRM and others, fp32, batch {BATCH_SIZE}; *: the embeddings alone, with a fixed gradient",
    )
    for heading in ("case", "system", "samples/s", "spread", "ms", *PHASES, "loss"):
        table.add_column(heading, justify="left" if heading == "system" else "right", no_wrap=True)
    for m in measured:
        if m.unit != "samples/s" or m.case == AROUND:
            continue
        spread = (max(m.values) - min(m.values)) / m.median
        phases = [by_case[f"{m.case} {phase}", m.system].median for phase in PHASES]
        loss = by_case.get((f"{m.case} loss", m.system))
        table.add_row(
            m.case.replace(SPARSE_ONLY, "*"), m.system, f"{m.median:,.0f}", f"{spread:.0%}",
            f"{1e3 * BATCH_SIZE / m.median:.1f}", *(f"{ms:.1f}" for ms in phases),
            f"{loss.median:.3f}" if loss else "",
        )  # fmt: skip
    console.print(table)
    for dim in DIMS:
        console.print(split_grid(split_step(measured, dim, BATCH_SIZE), dim))
    rates = [m for m in measured if m.case == AROUND]
    console.print("  ".join(f"{m.system}: {m.median:,.0f} samples/s" for m in rates))
    for name, ratio in result["ratios"].items():
        if "_ms_" not in name:
            console.print(f"{name}: {ratio:.3f}")
    print_machine(console, result)


def split_grid(splits: dict[str, dict[str, float]], dim: int) -> Table:
    title = f"where a step's time goes, ms, D={dim}; peers' parts: the network's as torch has them"
    grid = open_grid(("system", *PARTS), title=title)
    for system, parts in splits.items():
        grid.add_row(system, *(f"{parts[part]:.1f}" for part in PARTS))
    return grid


if __name__ == "__main__":
    run_script(main)
