"""Launcher and main functions of training ranks: one process, several on this machine, or one rank under torchrun.

Ranks find each other through nameless files in memory (memfd) that they inherit from the launcher. No port listens for
this, no other user can open the files, and they disappear however the processes end. Ranks communicate by gloo, on
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
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ColonnadeError, ConfigError, PeerLost, WorldError
from colonnade.processors import count_usable_processors
from colonnade.terminal import Terminal, escape_control_characters
from colonnade.train.interrupt import REPEAT_SECONDS, handle_stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from colonnade.comm.mesh import Mesh
    from colonnade.config.run import RunConfig


POLL_SECONDS = 0.1  # between two checks for ended ranks and signals
END_SECONDS = 30.0  # between SIGTERM and SIGKILL


@contextmanager
def create_memory_file(file_label: str) -> Iterator[str]:
    """Yield the path of a nameless file in memory, valid in this process and in those that inherit its descriptor."""
    number = os.memfd_create(file_label)
    try:
        os.fchmod(number, 0o600)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def descriptor_of(path: str) -> int:
    """Return the file descriptor of a memory file's path."""
    return int(path.rpartition("/")[2])


def run_ranks(
    command: Sequence[str], num_ranks: int, inherited_files: Sequence[str]
) -> Mapping[int, int] | None:
    """Run `command` as every rank, and return when all have ended.

    `inherited_files`: paths of memory files that the ranks inherit. Returns the exit status of the ranks that failed
    first, by
    rank; the others are then ended. Returns None after SIGINT or SIGTERM: the first signal is passed on to the ranks,
    which then checkpoint and end; the next one ends them at once.
    """
    from colonnade.comm.rendezvous import HEARTBEATS, STORE  # imports torch

    ranks: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    with (
        create_memory_file("colonnade-store") as store,
        create_memory_file("colonnade-heartbeats") as heartbeats,
        handle_stop_signals(lambda number, _: signals.append(number)),
    ):
        threads = str(max(1, count_usable_processors() // num_ranks))
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
                        pass_fds=[
                            descriptor_of(path) for path in (store, heartbeats, *inherited_files)
                        ],
                    )
                )
            return _wait_for_ranks(ranks, signals)
        finally:
            signals.clear()
            _terminate_ranks(ranks, signals)


def _wait_for_ranks(
    rank_processes: Sequence[subprocess.Popen[bytes]],
    received_signals: list[int],
    *,
    waits_for_all: bool = False,
) -> Mapping[int, int] | None:
    """Wait until all ranks have ended without failure, one has failed, or a second signal has come.

    waits_for_all: wait for the others, too, after one has failed."""
    stopped_at = 0.0
    while True:
        codes = [rank.poll() for rank in rank_processes]
        if (any(codes) and not waits_for_all) or None not in codes:
            failures = {rank: code for rank, code in enumerate(codes) if code}
            return None if stopped_at or received_signals else failures
        while received_signals:
            number = received_signals.pop(0)
            now = time.monotonic()
            if stopped_at and now - stopped_at > REPEAT_SECONDS:
                return None
            stopped_at = stopped_at or now
            for rank in rank_processes:
                rank.send_signal(number)
        time.sleep(POLL_SECONDS)


def _terminate_ranks(
    rank_processes: Sequence[subprocess.Popen[bytes]], received_signals: Sequence[int]
) -> None:
    """End the ranks that still run: by SIGTERM, then by SIGKILL after `END_SECONDS` or one more signal."""
    for rank in rank_processes:
        rank.terminate()
    deadline = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in rank_processes):
        if received_signals or time.monotonic() > deadline:
            for rank in rank_processes:
                rank.kill()
        time.sleep(POLL_SECONDS)


def train(
    config: RunConfig, folder: Path, ranks: int, console: Console, at: int | None = None
) -> dict[str, Any]:
    """Train in this process, in `ranks` new processes, or as a rank under torchrun. Return the summary on rank 0, {} on
    other ranks.

    Raises KeyboardInterrupt if stopped before the first step.
    """
    from colonnade.checkpoint.header import list_checkpoints
    from colonnade.comm.mesh import Mesh
    from colonnade.config.run import dump_config
    from colonnade.machine import check_worker_count

    if is_under_torchrun():
        if config.train.codistill.groups > 1:
            raise ConfigError(
                "got train.codistill.groups=2 under torchrun, which starts the ranks of one group; start one for "
                "each group, with its own --run and train.seed, and the other's folder as train.codistill.peer"
            )
        if ranks > 1:
            raise ConfigError("got --ranks under torchrun, which starts the ranks; leave it out")
        if at is not None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise ConfigError(
                "got --at with torchrun --max-restarts, which would go back to that step after every restart; go back "
                "without restarts first"
            )
        _end_with_launcher()
        return _train_as_rank(config, folder, at)
    if config.train.codistill.groups > 1:
        return train_groups(config, folder, ranks, console, at)
    if check_worker_count("--ranks", ranks) == 1:
        return _train_in_process(config, folder, Mesh(), console, at)
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"got --ranks {ranks} on {sys.platform}, wanted Linux; train on one rank, or start ranks with torchrun"
        )

    with (
        create_memory_file("colonnade-config") as settings,
        create_memory_file("colonnade-summary") as summary,
    ):
        Path(settings).write_text(dump_config(config), encoding="utf-8")
        arguments = [
            settings,
            str(folder),
            summary,
            str(-1 if at is None else at),
            str(os.getpid()),
        ]
        command = [sys.executable, "-u", "-m", "colonnade", "rank", "--", *arguments]
        failures = run_ranks(command, ranks, [settings, summary])
        if failures:
            failed = ", ".join(f"rank {r} with status {code}" for r, code in failures.items())
            remedy = (
                f"The run can continue from its newest checkpoint: train again with --run {folder} --ranks {ranks}"
                if list_checkpoints(folder)
                else "It has no checkpoint yet"
            )
            raise WorldError(f"a rank failed ({failed}); its error is above. {remedy}")
        text = Path(summary).read_text(encoding="utf-8")
    if not text:  # stopped before the first step
        raise KeyboardInterrupt
    return json.loads(text)


def train_groups(
    config: RunConfig, folder: Path, ranks: int, console: Console, at: int | None
) -> dict[str, Any]:
    """Train the groups of `train.codistill`, each by a `colonnade train` of its own. Group 0 prints here; the output of
    others goes to a file.

    Returns {}, because each group prints its outcome. After a failed group, the others are ended too, unless
    `on_lost` is alone. Raises WorldError that names the failed groups.
    """
    from colonnade.checkpoint.header import list_checkpoints
    from colonnade.config.run import dump_config
    from colonnade.machine import check_worker_count
    from colonnade.run.codistill import build_group_configs, name_group

    if at is not None:
        raise ConfigError(
            "got --at with train.codistill.groups, whose groups go back together only by luck; leave it out"
        )
    if list_checkpoints(folder):
        raise ConfigError(f"{folder} is a run, wanted a folder for two groups; give another --run")
    configs = build_group_configs(config)
    num_processes = check_worker_count("--ranks, in each of two groups", len(configs) * ranks)
    threads = str(max(1, count_usable_processors() // num_processes))
    folder.mkdir(parents=True, exist_ok=True)
    settings_file = folder / "config.yaml"
    if not settings_file.exists():
        settings_file.write_text(dump_config(config), encoding="utf-8")
    groups: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    with handle_stop_signals(lambda number, _: signals.append(number)):
        try:
            for group, group_config in enumerate(configs):
                run_folder = folder / name_group(group)
                with create_memory_file("colonnade-config") as settings:
                    Path(settings).write_text(dump_config(group_config), encoding="utf-8")
                    command = [sys.executable, "-u", "-m", "colonnade", "train", settings]
                    log_file = folder / f"{run_folder.name}.log"
                    with log_file.open("ab") if group else nullcontext() as output:
                        process = subprocess.Popen(
                            [*command, "--run", str(run_folder), "--ranks", str(ranks)],
                            env={"OMP_NUM_THREADS": threads, **os.environ},
                            pass_fds=[descriptor_of(settings)],
                            stdout=output,
                            preexec_fn=_end_with_launcher,
                        )
                    groups.append(process)
            is_alone = config.train.codistill.on_lost == "alone"
            failures = _wait_for_ranks(groups, signals, waits_for_all=is_alone)
        finally:
            signals.clear()
            _terminate_ranks(groups, signals)
    if failures:
        names = ", ".join(f"group {g} with status {code}" for g, code in failures.items())
        can_continue = any(list_checkpoints(folder / name_group(g)) for g in range(len(groups)))
        remedy = f"Both can continue from their newest checkpoints: train again with --run {folder}"
        raise WorldError(
            f"a group failed ({names}); its error is above. "
            f"{remedy if can_continue else 'There is no checkpoint yet'}"
        )
    # Only now: a group may have refused to go on with these settings.
    settings_file.write_text(dump_config(config), encoding="utf-8")
    for group in range(1, len(groups)):
        run_folder = folder / name_group(group)
        console.print(f"group {group}: {run_folder}, output in {run_folder}.log", soft_wrap=True)
    return {}


def _train_in_process(
    config: RunConfig, folder: Path, mesh: Mesh, console: Console | None, at: int | None
) -> dict[str, Any]:
    """Train in this process as one rank of `mesh`, and return the summary."""
    from colonnade.cli.table import show_plan
    from colonnade.run.run import open_run
    from colonnade.train.interrupt import stop_on_signals

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
            run.train()
            return run.summary
    finally:
        run.close()


def is_under_torchrun() -> bool:
    """Return whether torchrun, or another launcher, started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_rank(config: Path, folder: Path, summary: Path, at: int, launcher: int) -> None:
    """Train as one of the ranks that process `launcher` started; `at` -1: the newest checkpoint."""
    _end_with_launcher()
    if os.getppid() != launcher:  # the launcher was killed before that call
        os._exit(3)
    from colonnade.config.run import load_config

    values = _train_as_rank(load_config(config), folder, None if at < 0 else at)
    if values:
        summary.write_text(json.dumps(values), encoding="utf-8")


def _train_as_rank(config: RunConfig, folder: Path, at: int | None) -> dict[str, Any]:
    """Train as one rank. End the process if the run cannot continue; torchrun decides on a restart."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts there is nothing to save

    from colonnade.comm.peer_status import format_error
    from colonnade.comm.process_groups import close_mesh, open_mesh

    mesh = None
    try:
        mesh = open_mesh(timeout=timedelta(seconds=config.train.timeout), verb="train")
        console = Terminal() if mesh.rank == 0 else None
        summary = _train_in_process(config, folder, mesh, console, at)
        close_mesh(mesh)
    except PeerLost as error:
        print(escape_control_characters(f"error: {error}"), file=sys.stderr, flush=True)
        os._exit(3)
    except ColonnadeError as error:
        number = os.environ.get("RANK", "0") if mesh is None else mesh.rank
        print(
            escape_control_characters(f"error: rank {number}: {error}"), file=sys.stderr, flush=True
        )
        if mesh is not None and mesh.peer_monitor is not None:
            mesh.peer_monitor.report_stop(format_error(error))
        # Peers may wait for this rank in a collective; its exit ends their wait.
        os._exit(2)
    return summary if mesh.rank == 0 else {}


def _end_with_launcher() -> None:
    """Let the kernel end this rank when its launcher is killed, so that it does not train on unnoticed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, choose_death_signal(os.environ))


def choose_death_signal(environment: Mapping[str, str]) -> int:
    """Return the signal for a rank that has lost its launcher.

    On one host SIGTERM: the run checkpoints and ends, because nothing would restart it. On several hosts SIGKILL: a
    lost launcher means a lost host, and the other hosts' launchers restart their ranks and wait for it."""
    ranks = int(environment.get("WORLD_SIZE", "1"))
    is_alone = ranks == int(environment.get("LOCAL_WORLD_SIZE", ranks))
    return signal.SIGTERM if is_alone else signal.SIGKILL
