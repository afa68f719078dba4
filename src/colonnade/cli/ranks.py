"""Running a training on one process or, under torchrun, on several; and what torchrun runs on each rank."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ColonnadeError, ConfigError, PeerLost, WorldError
from colonnade.terminal import Terminal, printable

if TYPE_CHECKING:
    from rich.console import Console

    from colonnade.config import RunConfig
    from colonnade.topology.mesh import Mesh


def train(
    config: RunConfig, folder: Path, ranks: int, console: Console, at: int | None = None
) -> dict[str, Any]:
    """Train in this process, or in `ranks` of them, or as one of torchrun's; returns the summary of rank 0, and {} on
    the others.

    Raises KeyboardInterrupt if it was stopped before the first step.
    """
    from colonnade.config import dump_config
    from colonnade.topology.mesh import Mesh

    if is_under_torchrun():
        if ranks > 1:
            raise ConfigError("got --ranks under torchrun, which starts the ranks; leave it out")
        if at is not None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ConfigError(
                "got --at with torchrun --max-restarts, which would go back there again after every restart; go back "
                "without restarts first"
            )
        return _train_as_rank(config, folder, at)
    if ranks == 1:
        return _train_here(config, folder, Mesh(), console, at)
    with tempfile.TemporaryDirectory() as place:
        wanted, summary = Path(place) / "config.yaml", Path(place) / "summary.json"
        wanted.write_text(dump_config(config), encoding="utf-8")
        arguments = [str(wanted), str(folder), str(summary), str(-1 if at is None else at)]
        _run_torchrun(["-m", "colonnade", "rank", "--", *arguments], ranks, folder)
        if not summary.exists():
            raise KeyboardInterrupt
        return json.loads(summary.read_text(encoding="utf-8"))


def _train_here(
    config: RunConfig, folder: Path, mesh: Mesh, console: Console | None, at: int | None
) -> dict[str, Any]:
    from colonnade.cli.table import show_plan
    from colonnade.train.interrupt import stop_on_signals
    from colonnade.train.run import open_run

    run = open_run(config, mesh, folder, console=console, at=at)
    try:
        if run.final_summary is not None:
            return {**run.final_summary, "ended_before": True}
        if console is not None:
            collection = run.trainer.collection
            show_plan(console, collection.plan, collection.tables)
            if run.resumed_at is not None:
                console.print(f"resuming {folder} at step {run.resumed_at}")
        with stop_on_signals(run.trainer):
            return run.summary(run.train())
    finally:
        run.close()


def _run_torchrun(command: list[str], ranks: int, folder: Path) -> None:
    """Start the ranks and wait for them. Ctrl-C goes on to them: they commit and end."""
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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


def is_under_torchrun() -> bool:
    """Whether somebody has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank(config: Path, folder: Path, summary: Path, at: int) -> None:
    """What torchrun runs on every rank; `at` -1: the newest commit."""
    from colonnade.config import load_config

    found = _train_as_rank(load_config(config), folder, None if at < 0 else at)
    if found:
        summary.write_text(json.dumps(found), encoding="utf-8")


def _train_as_rank(config: RunConfig, folder: Path, at: int | None) -> dict[str, Any]:
    """Ends the process where the run cannot go on: what comes then is up to torchrun."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts there is nothing to save

    from colonnade.topology.mesh import close_mesh, open_mesh
    from colonnade.topology.presence import words_of

    _die_with_parent()
    mesh = None
    try:
        mesh = open_mesh(timeout=timedelta(seconds=config.train.timeout), verb="train")
        console = Terminal() if mesh.rank == 0 else None
        found = _train_here(config, folder, mesh, console, at)
        close_mesh(mesh)
    except PeerLost as lost:
        print(printable(f"error: {lost}"), file=sys.stderr, flush=True)
        os._exit(3)
    except ColonnadeError as error:
        number = os.environ.get("RANK", "0") if mesh is None else mesh.rank
        print(printable(f"error: rank {number}: {error}"), file=sys.stderr, flush=True)
        if mesh is not None and mesh.presence is not None:
            mesh.presence.tell(words_of(error))
        # Peers may wait for this rank in a collective; leaving at once is what tells them.
        os._exit(2)
    return found if mesh.rank == 0 else {}


def _die_with_parent() -> None:
    """A rank whose launcher was killed ends too, instead of training on unseen."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, death_signal(os.environ))


def death_signal(environment: Mapping[str, str]) -> int:
    """On one host SIGTERM: the run commits and ends, for nothing would start it again. On several a launcher that is
    gone is a host that is lost: SIGKILL, so that the others' launchers start anew, and wait for it."""
    ranks = int(environment.get("WORLD_SIZE", "1"))
    is_alone = ranks == int(environment.get("LOCAL_WORLD_SIZE", ranks))
    return signal.SIGTERM if is_alone else signal.SIGKILL
