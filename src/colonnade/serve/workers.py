"""Processes of a server: one that serves by itself, or a supervisor with worker processes that share one socket.

`run_worker` runs in each worker; `python -m colonnade.serve.workers` starts one that a supervisor has launched.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colonnade.errors import ColonnadeError, ConfigError
from colonnade.serve.access_log import AccessLog
from colonnade.serve.control import ControlFolder
from colonnade.serve.metrics import MULTIPROCESS
from colonnade.serve.options import ServeOptions, parse_options

BACKLOG = 1024
POLL_SECONDS = 0.1
MAX_RESTART_SECONDS = 5.0
EXIT_CONFIG = 2
METRIC_FILES = (
    "counter",
    "histogram",
    "gauge_livesum",
    "gauge_livemin",
    "gauge_livemax",
    "gauge_livemostrecent",
)
"""Files of one process in the folder in which processes sum their metrics, by prometheus-client's names."""
METRIC_BYTES = 1 << 18
"""Size of each of these files: more than all series of this server take."""
SWITCH_SECONDS = 0.0005
"""Time after which the scoring thread lets the event loop go on: Python's 5 ms would delay every waiting request."""


def bind_socket(host: str, port: int, option_names: str = "--host, --port") -> socket.socket:
    """Bind the socket that all workers accept from. Raises ConfigError, which names the options, if the address is
    taken or another's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{option_names}: got {host}, {port}: {error.strerror or error}; give an address of this machine and a "
            "free port (0: any)"
        ) from None
    return listener


def run_worker(
    options: ServeOptions,
    listener: socket.socket,
    on_ready: Callable[[dict[str, Any]], None],
    is_orphan: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown by the control file; then answer what is in progress and return.

    on_ready: gets the step, and the port of gRPC, when requests are accepted. Raises ColonnadeError if the model cannot
    be opened.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    import torch

    from colonnade.serve.endpoints import serve_requests
    from colonnade.serve.service import Service

    torch.set_num_threads(options.threads)
    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(options)

    def should_stop() -> bool:
        return stop.is_set() or is_orphan() or service.model.control.read().is_stopped

    serve_requests(service, listener, should_stop, on_ready)


@dataclass(slots=True)
class WorkerProcess:
    """Worker process, with the pipes to it."""

    process: subprocess.Popen[bytes]
    status: int
    """Readable end: `ready`, then the end of the file when the worker ends."""
    is_ready: bool = False


class Supervisor:
    """Parent of worker processes: starts them, restarts those that end, and stops all of them."""

    def __init__(
        self,
        options: ServeOptions,
        listener: socket.socket,
        num_workers: int,
        on_ready: Callable[[dict[str, Any]], None],
    ) -> None:
        self.options = options
        self.listener = listener
        self.num_workers = num_workers
        self.on_ready = on_ready
        self.control = ControlFolder(Path(options.state_folder))
        self.log = AccessLog(options.access_log)
        self.workers: dict[int, WorkerProcess] = {}
        self.num_failed_starts: Counter[int] = Counter()
        """Consecutive starts of each worker that ended before it could serve."""
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._is_announced = False
        self._restart_at: dict[int, float] = {}

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or a shutdown by the control file. Return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        self.log.start()
        self.restarts = open_restart_counter(Path(self.options.state_folder))
        for index in range(self.num_workers):
            self._start(index)
        status = 0
        while not (self._stop.is_set() or self.control.read().is_stopped or status):
            for key, _ in self._selector.select(POLL_SECONDS):
                status = self._read_status(key.data) or status
            now = time.monotonic()
            for index in [index for index, at in self._restart_at.items() if at <= now]:
                del self._restart_at[index]
                self._start(index)
        self._stop_all()
        self.log.close()
        return status

    def _start(self, worker_index: int) -> None:
        """Start a worker. Its options, the token among them, go through its standard input."""
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "colonnade.serve.workers",
                str(self.listener.fileno()),
                str(writer),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(self.listener.fileno(), writer),
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor alone
        )
        os.close(writer)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its status pipe reports that
            process.stdin.write(self._worker_options(worker_index).to_json().encode() + b"\n")
            process.stdin.flush()
        self.workers[worker_index] = WorkerProcess(process, reader)
        self._selector.register(reader, selectors.EVENT_READ, worker_index)

    def _worker_options(self, index: int) -> ServeOptions:
        """Return a worker's options: one worker copies a publication from a URL, and the others follow the copy."""
        if index and self.options.copy is not None:
            return replace(self.options, path=self.options.copy, copy=None)
        return self.options

    def _read_status(self, worker_index: int) -> int:
        """Note that a worker is ready, or has ended. Return the exit status if the server cannot go on."""
        worker = self.workers[worker_index]
        content = os.read(worker.status, 4096)
        if content:
            worker.is_ready = True
            fields = json.loads(content.splitlines()[-1])
            if not self._is_announced and all(w.is_ready for w in self.workers.values()):
                self._is_announced = True
                self.on_ready(fields)
            return 0
        self._selector.unregister(worker.status)
        os.close(worker.status)
        code = worker.process.wait()
        if worker.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        del self.workers[worker_index]
        if code == EXIT_CONFIG and not worker.is_ready:
            return EXIT_CONFIG
        self.restarts.note_death(worker.process.pid)
        # A worker that has served was killed, or met a request that ends it: others wait for the next one.
        self.num_failed_starts[worker_index] = (
            0 if worker.is_ready else self.num_failed_starts[worker_index] + 1
        )
        delay = compute_restart_delay(self.num_failed_starts[worker_index])
        self.log.write("worker", {"index": worker_index, "exit": code, "restart_seconds": delay})
        print(
            f"worker {worker_index} ended with {code}; it is started again in {delay:g} s",
            file=sys.stderr,
            flush=True,
        )
        self._restart_at[worker_index] = time.monotonic() + delay
        return 0

    def _stop_all(self) -> None:
        """Let all workers drain, and kill those that take too long."""
        for worker in self.workers.values():
            worker.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.options.drain_seconds + 10
        for worker in self.workers.values():
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def compute_restart_delay(num_failed_starts: int) -> float:
    """Return the seconds before a worker is started again: none after one failed start, then longer and longer."""
    return (
        0.0
        if num_failed_starts <= 1
        else min(0.25 * 2.0 ** (num_failed_starts - 2), MAX_RESTART_SECONDS)
    )


class RestartCounter:
    """Counter of workers that were started again, in the metrics that all workers sum."""

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def note_death(self, pid: int) -> None:
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(pid)
        self.counter.inc()


def open_restart_counter(state_folder: Path) -> RestartCounter:
    """Create the folder in which processes sum their metrics, and the supervisor's counter."""
    folder = state_folder / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[MULTIPROCESS] = str(folder)
    reserve_metric_files(folder)
    from prometheus_client import CollectorRegistry, Counter

    counter = Counter(
        "colonnade_worker_restarts",
        "Worker processes that were started again.",
        registry=CollectorRegistry(),
    )
    return RestartCounter(counter)


def reserve_metric_files(folder: Path) -> None:
    """Create this process's files of metrics with all their space on disk. Raises OSError.

    prometheus-client maps files with holes. A disk that fills up would end the process when it writes to one.
    """
    for name in METRIC_FILES:
        with open(folder / f"{name}_{os.getpid()}.db", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, METRIC_BYTES)


def main() -> int:
    """Run a worker that a supervisor has started: arguments are the listening socket and the status pipe."""
    listener_fd, status_fd = (int(argument) for argument in sys.argv[1:3])
    text = sys.stdin.buffer.readline().decode()
    if not text:  # the supervisor has ended already
        return 0
    options = parse_options(text)
    orphaned = threading.Event()

    def wait_for_parent() -> None:
        # Not by the file object: Python could not end while a thread reads from it.
        while os.read(sys.stdin.fileno(), 1):
            pass
        orphaned.set()  # the supervisor has ended

    threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()

    def tell_ready(fields: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor has ended: so does this worker
            os.write(status_fd, json.dumps(fields).encode() + b"\n")

    try:
        reserve_metric_files(Path(os.environ[MULTIPROCESS]))
        run_worker(options, socket.socket(fileno=listener_fd), tell_ready, orphaned.is_set)
    except (ColonnadeError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
