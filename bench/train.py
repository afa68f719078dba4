"""How fast does a whole training step run, beside nn.EmbeddingBag and TorchRec?

DLRM, DeepFM and DCN-v2 on Criteo-shaped ids (26 one-hot fields, skewed, 5.6 million rows), 13 dense columns,
fp32, one process.
Dense network, dense optimizer, loss and batches are the same for all; each system brings its embeddings:

    colonnade   row-wise Adagrad, batches looked up ahead as its default plan says
    torch       nn.EmbeddingBag(sparse=True) per table, torch.optim.Adagrad (one accumulator per weight, not per row)
    torchrec    DistributedModelParallel on one gloo rank, table-wise, fused row-wise Adagrad

Every batch is new, as in one epoch of training, and made in memory beforehand. A second measurement leaves the
dense network out, and sends a fixed gradient back into the looked-up fields: what the embeddings' share costs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
from harness import (
    PEER_INSTALLS,
    ROOT,
    BenchError,
    Blocks,
    Measured,
    Worker,
    close_workers,
    describe_machine,
    geometric_mean,
    interleave,
    open_environment,
    open_worker,
    others_share,
    print_machine,
    read_cpu_seconds,
    report,
    write_report,
)
from rich.console import Console
from rich.table import Table
from tables import around
from workers.loop import PHASES, Case

import colonnade
from colonnade.data.sets.synthetic import open_synthetic

DIMS = (16, 64)
OTHER_MODELS = {"deepfm": "DeepFM", "dcnv2": "DCN-v2"}
"""Beside DLRM, at the smaller dim, against plain torch."""
BATCH_SIZE = 4096
MAX_CARDINALITY = 1_000_000
BOTTOM, TOP = [256, 128], [256, 128]
ROWS_LR, DENSE_LR = 0.02, 1e-3
WARM_UP_STEPS = 32
ROUNDS, STEPS = 12, 10
QUICK_ROUNDS, QUICK_STEPS = 3, 5
MAX_LOSS_GAP = 0.02
"""Systems whose log losses differ by more than this have not trained the same model."""
SPARSE_ONLY = " sparse only"
"""Follows a case's name where there is no dense network."""
RATIOS = {"samples": "", "sparse_step": SPARSE_ONLY}
"""A ratio's name, and what follows `D=..` in the names of its cases."""
LEFT_OUT = "torchrec is left out, only the torch ratios follow"


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

    systems = {"colonnade": sys.executable, "torch": sys.executable}
    try:
        systems["torchrec"] = open_environment(ROOT / "build" / "bench-env", PEER_INSTALLS)
    except BenchError as error:
        console.print(f"{LEFT_OUT}: {error}", style="yellow", markup=False)

    measured: list[Measured] = []
    versions: dict[str, str] = {}
    before = read_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        rows = write_data(Path(folder), num_batches=WARM_UP_STEPS + rounds * steps)
        runs = [("dlrm", dim, sparse) for dim, sparse in product(DIMS, (False, True))]
        runs += [(model, DIMS[0], False) for model in OTHER_MODELS]
        for model, dim, sparse_only in runs:
            case = Case(
                data=folder, rows=rows, dim=dim, bottom=BOTTOM, top=TOP, embedding_lr=ROWS_LR,
                dense_lr=DENSE_LR, num_threads=os.cpu_count() or 1, seed=0, model=model,
                sparse_only=sparse_only,
            )  # fmt: skip
            known = systems if model == "dlrm" else {s: systems[s] for s in ("colonnade", "torch")}
            workers = open_workers(known, case, versions, console)
            try:
                blocks = interleave(
                    workers, rounds=rounds, steps=steps, warm_up_steps=WARM_UP_STEPS
                )
            finally:
                close_workers(workers)
            name = f"{OTHER_MODELS.get(model, '')} D={dim}".strip()
            if not sparse_only:
                check_same_model(blocks, name)
            for system, done in blocks.items():
                measured += cases_of(name + SPARSE_ONLY * sparse_only, system, done)

        config = around.config_of(BATCH_SIZE, BOTTOM, TOP, MAX_CARDINALITY)
        measured += around.measure(
            Path(folder), rows, config, rounds=rounds, num_threads=os.cpu_count() or 1
        )

    result = report(
        "train",
        version=colonnade.__version__,
        machine=describe_machine(
            threads=os.cpu_count(), others_share=round(others_share(before), 2), versions=versions
        ),
        measured=measured,
        ratios=ratios_of(measured) | around.ratios_of(measured),
    )
    if options.json:
        write_report(options.json, result)
    print_result(console, measured, result)


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
    systems: dict[str, str], case: Case, versions: dict[str, str], console: Console
) -> list[Worker]:
    """Start all, then wait for all. TorchRec may fail to start, and is then taken out of `systems`; others may not."""
    started = [open_worker(name, python, f"workers.{name}") for name, python in systems.items()]
    ready: list[Worker] = []
    try:
        for worker in started:
            try:
                worker.send(asdict(case))
                versions |= worker.answer()["ready"]
                ready.append(worker)
            except BenchError as error:
                if worker.name != "torchrec":
                    raise
                del systems[worker.name]
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


def cases_of(name: str, system: str, blocks: Blocks) -> list[Measured]:
    """The rows of one system in one case: throughput first, then where a step's time went, then its loss."""
    rates = [BATCH_SIZE / seconds for seconds in blocks.seconds]
    phases = [
        Measured(f"{name} {phase}", system, "ms/step", [1e3 * s for s in blocks.phases[phase]])
        for phase in PHASES
    ]
    rows = [Measured(name, system, "samples/s", rates), *phases]
    if SPARSE_ONLY not in name:
        rows.append(Measured(f"{name} loss", system, "log loss", blocks.losses))
    return rows


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Medians of our samples/s over each peer's, of whole steps and of the embeddings' share, by dim and the worst."""
    rates = {(m.case, m.system): m.median for m in measured if m.unit == "samples/s"}
    ratios: dict[str, float] = {}
    for name, peer in product(RATIOS, ("torch", "torchrec")):
        by_dim = {}
        for dim in DIMS:
            case = f"D={dim}{RATIOS[name]}"
            if (case, peer) in rates and (case, "colonnade") in rates:
                by_dim[dim] = rates[case, "colonnade"] / rates[case, peer]
        if by_dim:
            ratios[f"{name}_vs_{peer}"] = min(by_dim.values())
            ratios |= {f"{name}_vs_{peer}_d{dim}": ratio for dim, ratio in by_dim.items()}
    for model, title in OTHER_MODELS.items():
        case = f"{title} D={DIMS[0]}"
        if (case, "torch") in rates:
            ratios[f"samples_vs_torch_{model}"] = rates[case, "colonnade"] / rates[case, "torch"]
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: dict) -> None:
    """The table a person reads: medians over blocks; phases in ms per step, as `PHASES` explains them."""
    found = {(m.case, m.system): m for m in measured}
    table = Table(
        box=None,
        title_justify="left",
        padding=(0, 1, 0, 0),
        title=f"DLRM and others, fp32, batch {BATCH_SIZE}; *: the embeddings alone, with a fixed gradient",
    )
    for heading in ("case", "system", "samples/s", "spread", "ms", *PHASES, "loss"):
        table.add_column(heading, justify="left" if heading == "system" else "right", no_wrap=True)
    for m in measured:
        if m.unit != "samples/s" or m.case == "around a step":
            continue
        spread = (max(m.values) - min(m.values)) / m.median
        phases = [found[f"{m.case} {phase}", m.system].median for phase in PHASES]
        loss = found.get((f"{m.case} loss", m.system))
        table.add_row(
            m.case.replace(SPARSE_ONLY, "*"), m.system, f"{m.median:,.0f}", f"{spread:.0%}",
            f"{1e3 * BATCH_SIZE / m.median:.1f}", *(f"{ms:.1f}" for ms in phases),
            f"{loss.median:.3f}" if loss else "",
        )  # fmt: skip
    console.print(table)
    ratios = result["ratios"]
    for name, peer in product(RATIOS, ("torch", "torchrec")):
        names = [f"{name}_vs_{peer}_d{dim}" for dim in DIMS]
        by_dim = {n: ratios[n] for n in names if n in ratios}
        if by_dim:
            worst = ratios[f"{name}_vs_{peer}"]
            console.print(f"{name}_vs_{peer}: {worst:.2f} (the worst of these)")
            for dim_name, ratio in by_dim.items():
                console.print(f"  {dim_name}: {ratio:.2f}")
            console.print(f"  geometric mean: {geometric_mean(list(by_dim.values())):.2f}")
    for model in OTHER_MODELS:
        if f"samples_vs_torch_{model}" in ratios:
            console.print(f"samples_vs_torch_{model}: {ratios[f'samples_vs_torch_{model}']:.2f}")
    rates = [m for m in measured if m.case == "around a step"]
    console.print("  ".join(f"{m.system}: {m.median:,.0f} samples/s" for m in rates))
    for name in around.RATIOS:
        if name in ratios:
            console.print(f"{name}: {ratios[name]:.3f}")
    print_machine(console, result)


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"error: {error}")
