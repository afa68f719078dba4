"""Server processes under test: started on cores of their own, watched, and stopped; and the memory of processes."""

from __future__ import annotations

import http.client
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness import BENCH, BenchError

START_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.005
TAIL_BYTES = 1000
ADDRESS = re.compile(r"on\s+http://127\.0\.0\.1:(\d+)")
ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)
PRIVATE = re.compile(r"^Private_(?:Clean|Dirty|Hugetlb): +(\d+) kB", re.MULTILINE)


@contextmanager
def pinned(cores: Sequence[int] | None) -> Iterator[None]:
    """Start what the block starts on these cores; None: on all of this process's."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own if cores is None else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class ServerProcess:
    """Server of one system, on a port of its own. `start_server` starts it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self.started = time.perf_counter()
        self.port = 0

    def wait_until_ready(self) -> float:
        """Wait for the address and for a good answer to the health check; return the seconds since the start.

        Raises BenchError with the end of what the process wrote.
        """
        deadline = self.started + START_SECONDS
        while time.perf_counter() < deadline and self.process.poll() is None:
            match = ADDRESS.search(self.log.read_text(errors="replace"))
            if match is not None:
                self.port = int(match[1])
                if fetch_status(self.port, "/v2/health/ready") == 200:
                    return time.perf_counter() - self.started
            time.sleep(POLL_SECONDS)
        raise BenchError(f"{self.name} is not ready; its last words:\n{self.read_tail()}")

    def read_tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL_BYTES:]

    @property
    def children(self) -> list[int]:
        """Processes that it has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def stop(self) -> None:
        """End it, and wait, so that its processor time is known to be ours."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.unlink(missing_ok=True)


def start_process(
    name: str,
    command: Sequence[str],
    *,
    cores: Sequence[int] | None,
    folder: Path = BENCH,
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Start a process on cores of its own; what it writes goes to a file."""
    descriptor, log = tempfile.mkstemp(prefix="colonnade-bench-")
    with pinned(cores), os.fdopen(descriptor, "wb") as file:
        process = subprocess.Popen(
            list(command), cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    return ServerProcess(name, process, Path(log))


def serve_command(python: str, model: Path, *options: str) -> list[str]:
    """Return the command of `colonnade serve` on a free port."""
    words = ["-m", "colonnade", "serve", str(model), "--port", "0", "--threads", "1"]
    return [python, *words, *options]


def fetch_status(port: int, path: str) -> int:
    """Return the status of an answer; 0 if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        return connection.getresponse().status
    return 0


def read_private_bytes(pid: int) -> int:
    """Return the bytes that a process alone has in memory (USS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(map(int, PRIVATE.findall(text)))


def read_anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process's memory that no file backs."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(ANONYMOUS.findall(text)[0])


@contextmanager
def torch_process(python: str) -> Iterator[int]:
    """Run a process that has imported torch and nothing else; yield its id."""
    words = "import sys, torch; print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [python, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None, "both are pipes"
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(START_SECONDS) or not process.stdout.readline():
                raise BenchError("torch could not be imported")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def drop_cached_pages(folder: Path) -> None:
    """Write a folder's files to disk, and give up their pages in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def read_cached_pages(folder: Path) -> None:
    """Read a folder's files, so that their pages are in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def count_read_bytes(pid: int) -> int:
    """Return the bytes that a process has read by calls, from memory or disks."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
