"""Running a training on one process or, under torchrun, on several; and what torchrun runs on each rank."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed.run as torchrun
from rich.console import Console
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from colonnade.cli.table import show_plan
from colonnade.config import RunConfig, dump_config, load_config
from colonnade.errors import ColonnadeError, WorldError
from colonnade.topology.mesh import Mesh, close_mesh, open_mesh
from colonnade.train.run import Run, open_run

REPEAT_SECONDS = 2.0  # a terminal and torchrun may both deliver the same Ctrl-C


def train(config: RunConfig, folder: Path, ranks: int, console: Console) -> dict[str, Any]:
    """Train in this process, or in `ranks` of them; returns the summary of rank 0."""
    if ranks == 1:
        return _train_here(config, folder, Mesh(), console)
    with tempfile.TemporaryDirectory() as place:
        wanted = Path(place) / "config.yaml"
        wanted.write_text(dump_config(config), encoding="utf-8")
        _run_torchrun(["-m", "colonnade", "rank", str(wanted), str(folder)], ranks, folder)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def _train_here(
    config: RunConfig, folder: Path, mesh: Mesh, console: Console | None
) -> dict[str, Any]:
    run = open_run(config, mesh, folder, console=console)
    try:
        if console is not None:
            collection = run.trainer.collection
            show_plan(console, collection.plan, collection.tables)
            if run.resumed_at is not None:
                console.print(f"resuming {folder} at step {run.resumed_at}")
        _stop_on_signals(run)
        return run.summary(run.train())
    finally:
        run.close()


def _stop_on_signals(run: Run) -> None:
    """The first Ctrl-C or SIGTERM asks all ranks to commit and end; a later one is obeyed at once."""
    asked_at = 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at and now - asked_at > REPEAT_SECONDS:
            raise KeyboardInterrupt
        asked_at = asked_at or now
        run.trainer.stop_asked = True

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _run_torchrun(command: list[str], ranks: int, folder: Path) -> None:
    """Start the ranks and wait for them. Ctrl-C goes on to them: they commit and end."""
    arguments = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0", *command]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.main(arguments)
    except SignalException:
        return  # the ranks were told; what they committed is what counts
    except ChildFailedError as error:
        ended = ", ".join(f"rank {r} with status {f.exitcode}" for r, f in error.failures.items())
        raise WorldError(
            f"a rank failed ({ended}); its own words are above. The run goes on from its newest commit: "
            f"train again with --run {folder}"
        ) from None


def rank(config: Path, folder: Path) -> None:
    """What torchrun runs on every rank."""
    mesh = open_mesh()
    try:
        console = Console(highlight=False) if mesh.rank == 0 else None
        _train_here(load_config(config), folder, mesh, console)
    except ColonnadeError as error:
        print(f"error: rank {mesh.rank}: {error}", file=sys.stderr, flush=True)
        # Peers may wait for this rank in a collective; leaving at once is what tells them.
        os._exit(2)
    close_mesh(mesh)
