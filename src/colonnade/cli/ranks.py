"""Ranks of a training: one process, several of this machine, or one rank of torchrun's; their launcher and what each
runs.

Ranks find each other through nameless files in memory (memfd) that they inherit from the launcher: no port listens, no
other user can open them, and nothing of them is left however the processes end. Ranks talk to each other by gloo, on
127.0.0.1 only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ColonnadeError, ConfigError, PeerLost, WorldError
from colonnade.processors import usable_processors
from colonnade.run.interrupt import REPEAT_SECONDS
from colonnade.terminal import Terminal, printable

if TYPE_CHECKING:
    from rich.console import Console

    from colonnade.comm.mesh import Mesh
    from colonnade.config.run import RunConfig


LOOK_SECONDS = 0.1  # between two looks at whether a rank has ended or a signal has come
END_SECONDS = 30.0  # between SIGTERM and SIGKILL


@contextmanager
def memory_file(name: str) -> Iterator[str]:
    """Yield the path of a nameless file in memory, valid here and in processes that inherit `descriptor(path)`."""
    number = os.memfd_create(name)
    try:
        os.fchmod(number, 0o600)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def descriptor(path: str) -> int:
    return int(path.rpartition("/")[2])


def run_ranks(
    command: Sequence[str], num_ranks: int, files: Sequence[str]
) -> Mapping[int, int] | None:
    """Run `command` as every rank, and return when all have ended.

    `files`: paths of memory files that the ranks inherit. Returns the status of the ranks that failed first, by rank;
    the others are then ended. Returns None if SIGINT or SIGTERM came: the first is passed on to the ranks, which then
    checkpoint and end; the next one ends them at once.
    """
    from colonnade.comm.rendezvous import HEARTBEATS, STORE  # imports torch

    ranks: list[subprocess.Popen[bytes]] = []
    with (
        memory_file("colonnade-store") as store,
        memory_file("colonnade-heartbeats") as heartbeats,
        _record_signals() as signals,
    ):
        threads = str(max(1, usable_processors() // num_ranks))
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            STORE: store,
            HEARTBEATS: heartbeats,
        }
        try:
            for rank in range(num_ranks):
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        pass_fds=[descriptor(path) for path in (store, heartbeats, *files)],
                    )
                )
            return _watch(ranks, signals)
        finally:
            signals.clear()
            _end(ranks, signals)


@contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of obeying them."""
    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], signals: list[int]
) -> Mapping[int, int] | None:
    """Wait until all ranks have ended well, one has failed, or a second signal has come."""
    stopped_at = 0.0
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            failures = {rank: code for rank, code in enumerate(codes) if code}
            return None if stopped_at or signals else failures
        while signals:
            number, now = signals.pop(0), time.monotonic()
            if stopped_at and now - stopped_at > REPEAT_SECONDS:
                return None
            stopped_at = stopped_at or now
            for rank in ranks:
                rank.send_signal(number)
        time.sleep(LOOK_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> None:
    """End the ranks that still run: by SIGTERM, and by SIGKILL after `END_SECONDS` or at one more signal."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if signals or time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(LOOK_SECONDS)


def train(
    config: RunConfig, folder: Path, ranks: int, console: Console, at: int | None = None
) -> dict[str, Any]:
    """Train in this process, or in `ranks` of them, or as one of torchrun's; returns the summary of rank 0, and {} on
    the others.

    Raises KeyboardInterrupt if it was stopped before the first step.
    """
    from colonnade.comm.mesh import Mesh
    from colonnade.config.run import dump_config

    if is_under_torchrun():
        if ranks > 1:
            raise ConfigError("got --ranks under torchrun, which starts the ranks; leave it out")
        if at is not None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ConfigError(
                "got --at with torchrun --max-restarts, which would go back there again after every restart; go back "
                "without restarts first"
            )
        _die_with_parent()
        return _train_as_rank(config, folder, at)
    if ranks == 1:
        return _train_here(config, folder, Mesh(), console, at)
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"got --ranks {ranks} on {sys.platform}, wanted Linux; train on one rank, or start ranks with torchrun"
        )

    with memory_file("colonnade-config") as wanted, memory_file("colonnade-summary") as summary:
        Path(wanted).write_text(dump_config(config), encoding="utf-8")
        arguments = [wanted, str(folder), summary, str(-1 if at is None else at), str(os.getpid())]
        command = [sys.executable, "-u", "-m", "colonnade", "rank", "--", *arguments]
        failures = run_ranks(command, ranks, [wanted, summary])
        if failures:
            ended = ", ".join(f"rank {r} with status {code}" for r, code in failures.items())
            raise WorldError(
                f"a rank failed ({ended}); its own words are above. The run goes on from its newest checkpoint: "
                f"train again with --run {folder}"
            )
        text = Path(summary).read_text(encoding="utf-8")
    if not text:  # stopped before the first step
        raise KeyboardInterrupt
    return json.loads(text)


def _train_here(
    config: RunConfig, folder: Path, mesh: Mesh, console: Console | None, at: int | None
) -> dict[str, Any]:
    from colonnade.cli.table import show_plan
    from colonnade.run.interrupt import stop_on_signals
    from colonnade.run.run import open_run

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


def is_under_torchrun() -> bool:
    """Whether somebody has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank(config: Path, folder: Path, summary: Path, at: int, launcher: int) -> None:
    """Train as one of the ranks that process `launcher` started; `at` -1: the newest checkpoint."""
    _die_with_parent()
    if os.getppid() != launcher:  # it was killed before that call
        os._exit(3)
    from colonnade.config.run import load_config

    found = _train_as_rank(load_config(config), folder, None if at < 0 else at)
    if found:
        summary.write_text(json.dumps(found), encoding="utf-8")


def _train_as_rank(config: RunConfig, folder: Path, at: int | None) -> dict[str, Any]:
    """Ends the process where the run cannot go on: what comes then is up to torchrun."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts there is nothing to save

    from colonnade.comm.peer_status import words_of
    from colonnade.comm.process_groups import close_mesh, open_mesh

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
    """On one host SIGTERM: the run checkpoints and ends, for nothing would start it again. On several a launcher that
    is
    gone is a host that is lost: SIGKILL, so that the others' launchers start anew, and wait for it."""
    ranks = int(environment.get("WORLD_SIZE", "1"))
    is_alone = ranks == int(environment.get("LOCAL_WORLD_SIZE", ranks))
    return signal.SIGTERM if is_alone else signal.SIGKILL
