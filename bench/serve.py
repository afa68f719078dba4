"""Serving: how many requests a second, how late, how fresh, and what beside it in plain torch behind FastAPI?

Minutes: 25 (quick 4).

The demo's DLRM (13 numbers, 26 fields of one id, dim 16), binary bodies of the Open Inference Protocol over HTTP, ids
Zipf 1.05. The server has one core, the open-loop client another one: workers/serve_client.py.

    rate            highest rate with a p99 of at most 10 ms (100 candidates), 5 ms (1); and the p99 at 60 % of it
    calls           cost of a Predictor call, and the served rate over that of bare calls, in turns on one core
    peer            the same beside the same model as nn.EmbeddingBag behind FastAPI, in turns
    memory          private memory of a worker beyond `import torch`; seconds from a cold start on 1 GiB of rows
    fresh           seconds from a step's publication to its first answer, while training uses the same cores
    beyond memory   p99 with rows of four times the memory over that with all in memory, at one rate, in turns; requests
                    that were not sent before
    topk            exact top-k beside faiss's flat index and implicit, one thread each, in turns
    user once       as rate, with half of the features sent once for 100 candidates

Each piece takes less than four minutes: a later call with the same --json goes on where an earlier one stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from harness import (
    BENCH,
    ROOT,
    BenchError,
    Measured,
    PieceFile,
    Worker,
    describe_machine,
    open_environment,
    open_parser,
    open_worker,
    others_share,
    read_cpu_seconds,
    report,
    run_script,
    say,
)
from rich.console import Console
from tables import serve as tables
from tables.rate_search import MIN_RATE, RateSearch
from workers.memory_group import NoMemoryGroup, open_group
from workers.serve_processes import (
    ServerProcess,
    count_read_bytes,
    drop_cached_pages,
    folder_bytes,
    pinned,
    read_anonymous_bytes,
    read_cached_pages,
    read_private_bytes,
    serve_command,
    start_process,
    torch_process,
)
from workers.serve_publication import PublicationWatch, find_delays
from workers.serve_requests import write_requests

import colonnade

EXPONENT = 1.05
LIMITS_MS = {100: 10.0, 1: 5.0}
"""Limit of the p99, by the number of candidates."""
SHARE_OF_RATE = 0.6
NUM_SHARED_FIELDS = 13
CLOSED_LOOP_CLIENTS = 8
MAX_WINDOWS = 12
"""Limit on the windows of one search."""
MAX_LATE_MS, WINDOW_TRIES = 1.0, 2
"""Limit on the client's own delay (p99), above which a window is tried once more."""
MAX_SCORE_GAP = 1e-5
MEMORY_FRACTION = 4
SHARE_OF_BEYOND = 0.5
"""Rate of both servers of `beyond memory`, as a share of what the limited one answers back to back."""
BEYOND_GIVE_UP_SECONDS = 10.0
BEYOND_WARM_UPS = 4
"""Windows in which the limited server fills its memory with rows."""
OTHER_MEMORY_BYTES = 16 << 20
"""Memory of the limited server beside its rows and what it holds at first: buffers, tables of pages."""
CHECK_SECONDS = 60.0
FRESH_RATE = 50.0
FRESH_CANDIDATES = 100
TOPK_DIM, TOPK_K, TOPK_QUERIES = 64, 10, 4096
TOPK_BATCHES = (1, 64)
MIN_TOPK_OVERLAP = 0.99
UNLIMITED_BYTES = 1 << 40
WIDTH = 120
PEER_INSTALLS = (
    ("torch==2.13.0", "numpy", "safetensors"),
    ("fastapi", "uvicorn[standard]"),
    ("faiss-cpu", "implicit"),
)


@dataclass(frozen=True)
class Extent:
    """Sizes and durations of what is measured."""

    window_seconds: float
    closed_loop_seconds: float
    tolerance: float
    """Ratio of the bounds of a rate, less 1, at which a search ends."""
    searches: int
    steady_windows: int
    """Windows at 60 % of the rate."""
    calls: int
    turns: int
    starts: int
    beyond_requests: int
    """Different requests of `beyond memory`: more than a server gets."""
    rows_of_large: int
    """Rows of each field of the larger model: 1 GiB together."""
    fresh_seconds: float
    topk_items: int
    topk_seconds: float


FULL = Extent(
    window_seconds=10.0, closed_loop_seconds=3.0, tolerance=0.03, searches=2, steady_windows=2, calls=5000, turns=5,
    starts=3, beyond_requests=16_384, rows_of_large=645_278, fresh_seconds=150.0, topk_items=100_000, topk_seconds=2.0,
)  # fmt: skip
QUICK = Extent(
    window_seconds=1.5, closed_loop_seconds=1.0, tolerance=0.15, searches=1, steady_windows=1, calls=300, turns=2,
    starts=1, beyond_requests=4096, rows_of_large=160_000, fresh_seconds=20.0, topk_items=20_000, topk_seconds=0.3,
)  # fmt: skip


@dataclass
class RateFigures:
    """Measurements of one server under rising rates."""

    closed_loop: float
    best: list[float] = field(default_factory=list)
    """Highest rate of each search."""
    steady: list[Mapping[str, Any]] = field(default_factory=list)
    """Windows at 60 % of the rate."""

    def list_cases(self, case: str, system: str) -> list[Measured]:
        rows = [
            Measured(case, system, tables.RATE, self.best),
            Measured(case, system, tables.CLOSED_LOOP, [self.closed_loop]),
        ]
        for unit, name in tables.STEADY.items():
            if self.steady:
                rows.append(Measured(case, system, unit, [window[name] for window in self.steady]))
        return rows


class Bench:
    """Pieces of a run, in a folder with the models and requests that they share."""

    def __init__(self, folder: Path, extent: Extent, file: PieceFile, console: Console) -> None:
        self.folder, self.extent, self.file, self.console = folder, extent, file, console
        self.left_out: list[str] = []
        self.client_core, self.server_core = choose_cores()
        self._peer_python = ""

    def list_pieces(self) -> dict[str, Callable[[ExitStack], list[Measured]]]:
        return {
            "rate 100": lambda stack: self.measure_served(stack, 100),
            "rate 1": lambda stack: self.measure_served(stack, 1),
            "calls": self.measure_calls,
            "peer 100": lambda stack: self.measure_peer(stack, 100),
            "peer 1": lambda stack: self.measure_peer(stack, 1),
            "memory": self.measure_memory,
            "fresh": self.measure_fresh,
            "beyond memory": self.measure_beyond,
            "topk": self.measure_topk,
            "user once": lambda stack: self.measure_served(stack, 100, num_shared=NUM_SHARED_FIELDS),
        }  # fmt: skip

    def run(self, only: str, write: Callable[[], object]) -> None:
        """Measure the pieces that `only` finds and the file lacks; `write` is called after each."""
        for name, measure in self.list_pieces().items():
            if not re.search(only, name) or self.file.has_piece(name):
                continue
            before, start = read_cpu_seconds(), perf_counter()
            try:
                with ExitStack() as stack:
                    measured = measure(stack)
            except LeftOut as error:
                self.left_out.append(f"{name}: {error}")
                self.console.print(f"left out: {name}: {error}", style="yellow", markup=False)
                continue
            self.file.add_piece(name, measured, others_share(before))
            write()
            say(f"{name}: {perf_counter() - start:.0f} s, others {self.file.shares[name]}")

    # What the pieces share.

    @property
    def peer_python(self) -> str:
        """Interpreter of the peers' environment. Raises LeftOut."""
        if not self._peer_python:
            try:
                folder = ROOT / "build" / "bench-env-serve"
                self._peer_python = open_environment(folder, PEER_INSTALLS)
            except BenchError as error:
                raise LeftOut(str(error)) from None
        return self._peer_python

    def export_model(self, name: str) -> tuple[Path, list[int]]:
        """Return the folder of a model, "demo" or "large", made at its first use, and the rows of its fields."""
        folder = self.folder / name
        if not folder.exists():
            words = [str(self.extent.rows_of_large)] if name == "large" else []
            run_module("workers.serve_model", str(folder), *words)
        return folder, tables.read_field_rows(folder)

    def make_requests(
        self, model: str, num_candidates: int, num_requests: int, num_shared: int = 0
    ) -> Path:
        """Return a file of requests for a model."""
        path = self.folder / f"{model}-{num_candidates}-{num_shared}-{num_requests}.npz"
        if not path.exists():
            write_requests(
                path, self.export_model(model)[1], num_candidates=num_candidates, num_requests=num_requests,
                exponent=EXPONENT, num_shared=num_shared,
            )  # fmt: skip
        return path

    def open_client(self, stack: ExitStack) -> Worker:
        with pinned([self.client_core]):
            client = open_worker("client", sys.executable, "workers.serve_client")
        stack.callback(client.close)
        client.answer()
        return client

    def start(self, name: str, command: Sequence[str], **options: Any) -> ServerProcess:
        return start_process(name, command, cores=[self.server_core], **options)

    def open_server(self, stack: ExitStack, name: str, model: Path, *words: str) -> ServerProcess:
        """Start a server of a system and wait until it is ready and has checked its rows."""
        if name == "colonnade":
            command = serve_command(sys.executable, model, *words)
        else:
            command = [self.peer_python, "-m", "workers.serve_fastapi", str(model), *words]
        server = self.start(name, command)
        stack.callback(server.stop)
        server.wait_until_ready()
        if name == "colonnade":
            wait_until_checked(server, model)
        return server

    def send_window(
        self,
        client: Worker,
        server: ServerProcess,
        requests: Path,
        rate: float,
        *,
        tries: int = WINDOW_TRIES,
        **settings: Any,
    ) -> dict[str, Any]:
        """Send requests at a rate for a window; return what the client measured.

        A window is tried again if the client itself was late, because others used its core.
        """
        message = {"port": server.port, "requests": str(requests), "rate": rate}
        window: dict[str, Any] = {}
        for _ in range(tries):
            client.send({**message, "seconds": self.extent.window_seconds, **settings})
            window = client.answer()
            say(
                f"{server.name}: {rate:.0f}/s p50 {window['p50']:.2f} p99 {window['p99']:.2f} ms, "
                f"failed {window['failed']}, client late {window['late_p99']:.2f} ms"
            )
            if window["late_p99"] <= MAX_LATE_MS:
                break
        return window

    def measure_rates(
        self,
        client: Worker,
        servers: Sequence[ServerProcess],
        requests: Path,
        limit_ms: float,
        searches: int,
        steady_windows: int,
    ) -> dict[str, RateFigures]:
        """Search each server's highest rate within a limit, window by window in turns, then measure 60 % of it."""
        figures = {}
        for server in servers:
            rate = measure_closed_loop(client, server, requests, self.extent.closed_loop_seconds)
            figures[server.name] = RateFigures(rate)
        for number in range(searches):
            progress = {}
            for name, figure in figures.items():
                last = figure.best[-1] if number else 0.0
                bounds = (
                    (0.9 * last, 1.1 * last)
                    if last
                    else (0.4 * figure.closed_loop, 1.05 * figure.closed_loop)
                )
                progress[name] = RateSearch(*bounds, self.extent.tolerance)  # fmt: skip
            for _ in range(MAX_WINDOWS):
                for server in servers:
                    search = progress[server.name]
                    if search.is_done:
                        continue
                    rate = search.rate
                    window = self.send_window(client, server, requests, rate)
                    search.add(rate, is_met=is_within(window, limit_ms))
            for name, search in progress.items():
                figures[name].best.append(search.best)
        for _ in range(steady_windows):
            for server in servers:
                if rate := SHARE_OF_RATE * median(figures[server.name].best):
                    window = self.send_window(client, server, requests, rate)
                    figures[server.name].steady.append(window)
        return figures

    # The pieces.

    def measure_served(
        self, stack: ExitStack, num_candidates: int, num_shared: int = 0
    ) -> list[Measured]:
        """Measure the rate of one server by itself."""
        model, _ = self.export_model("demo")
        requests = self.make_requests("demo", num_candidates, 512, num_shared)
        server = self.open_server(stack, "colonnade", model)
        client = self.open_client(stack)
        extent, limit = self.extent, LIMITS_MS[num_candidates]
        figures = self.measure_rates(
            client, [server], requests, limit, extent.searches, extent.steady_windows
        )
        case = tables.name_case(num_candidates) + (tables.USER_ONCE if num_shared else "")
        return figures["colonnade"].list_cases(case, "colonnade")

    def measure_peer(self, stack: ExitStack, num_candidates: int) -> list[Measured]:
        """Measure a server and the peer's, in turns. Only one of the two works at a time."""
        model, _ = self.export_model("demo")
        requests = self.make_requests("demo", num_candidates, 512)
        servers = [self.open_server(stack, name, model) for name in ("colonnade", "fastapi")]
        client = self.open_client(stack)
        check_same_scores(client, servers, requests)
        stacked = self.open_server(stack, "fastapi stacked", model, "stacked")
        check_same_scores(client, [servers[0], stacked], requests)
        figures = self.measure_rates(client, servers, requests, LIMITS_MS[num_candidates], 1, 1)
        rate = measure_closed_loop(client, stacked, requests, self.extent.closed_loop_seconds)
        figures["fastapi stacked"] = RateFigures(rate)
        case = tables.name_case(num_candidates) + tables.BESIDE
        rows = [row for name, figure in figures.items() for row in figure.list_cases(case, name)]
        return [row for row in rows if row.values]

    def measure_calls(self, stack: ExitStack) -> list[Measured]:
        """Measure bare calls and served requests in turns, on the same core."""
        model, _ = self.export_model("demo")
        requests = {count: self.make_requests("demo", count, 512) for count in LIMITS_MS}
        server = self.open_server(stack, "colonnade", model)
        client = self.open_client(stack)
        with pinned([self.server_core]):
            direct = open_worker("direct calls", sys.executable, "workers.serve_direct")
        stack.callback(direct.close)
        direct.send({"export": str(model)})
        self.file.versions |= direct.answer()["ready"]
        check_same_scores(client, [server], requests[100], direct)
        fixed: list[float] = []
        rates: dict[tuple[int, str], list[float]] = {}
        for _ in range(self.extent.turns):
            direct.send({"requests": str(requests[1]), "calls": self.extent.calls})
            fixed.append(direct.answer()["median"])
            for count, path in requests.items():
                seconds = self.extent.closed_loop_seconds
                served = measure_closed_loop(client, server, path, seconds)
                direct.send({"requests": str(path), "seconds": seconds})
                rates.setdefault((count, "colonnade"), []).append(served)
                rates.setdefault((count, "direct calls"), []).append(direct.answer()["rate"])
        rows = [Measured(tables.CALL, "colonnade", "ms", fixed)]
        for (count, system), values in rates.items():
            candidates = [count * value for value in values]
            rows.append(
                Measured(tables.name_case(count) + tables.TURNS, system, "candidates/s", candidates)
            )
        return rows

    def measure_memory(self, stack: ExitStack) -> list[Measured]:
        """Measure private memory of two workers that have answered, and seconds to readiness."""
        rows = []
        client = self.open_client(stack)
        for name in ("demo", "large"):
            model, _ = self.export_model(name)
            requests = self.make_requests(name, 100, 64)
            command = serve_command(sys.executable, model, "--workers", "2")
            with torch_process(sys.executable) as bare:
                server = start_process("colonnade", command, cores=None)
                try:
                    server.wait_until_ready()
                    measure_closed_loop(client, server, requests, 2.0)
                    workers = [read_private_bytes(pid) for pid in server.children]
                    torch_bytes = read_private_bytes(bare)
                finally:
                    server.stop()
            mib = [(private - torch_bytes) / 2**20 for private in workers]
            rows.append(Measured(f"{tables.PRIVATE} {name}", "colonnade", "MiB", mib))
        seconds = []
        model, _ = self.export_model("large")
        for _ in range(self.extent.starts):
            drop_cached_pages(model)
            server = self.start("colonnade", serve_command(sys.executable, model))
            try:
                seconds.append(server.wait_until_ready())
            finally:
                server.stop()
        return [*rows, Measured(tables.READY, "colonnade", "s", seconds)]

    def measure_fresh(self, stack: ExitStack) -> list[Measured]:
        """Measure how late each published step is first answered with, while the demo trains on all cores."""
        publication = self.folder / "published"
        requests = self.make_requests("demo", FRESH_CANDIDATES, 512)
        settings = {
            "train.publish": publication, "train.checkpoint_seconds": 1, "data.options.num_train": 400_000_000,
            "data.options.num_test": 10_000,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "colonnade", "train", "--data", "synthetic"]
        command += ["--run", str(self.folder / "run"), *words]
        trainer = start_process("training", command, cores=None)
        stack.callback(trainer.stop)
        watch = stack.enter_context(PublicationWatch(publication))
        if watch.wait_for_step(60.0) is None:
            raise BenchError(f"training published nothing; its last words:\n{trainer.read_tail()}")
        server = self.start("colonnade", serve_command(sys.executable, publication))
        stack.callback(server.stop)
        server.wait_until_ready()
        client = self.open_client(stack)
        self.send_window(
            client, server, requests, FRESH_RATE, tries=1, seconds=2.0, give_up_seconds=60.0
        )
        begin, seconds = time.time(), self.extent.fresh_seconds
        window = self.send_window(
            client, server, requests, FRESH_RATE, tries=1, seconds=seconds, give_up_seconds=60.0
        )
        answered = {int(step): when for step, when in window["steps"].items()}
        end = begin + seconds - tables.FRESH_TAIL_SECONDS
        delays = find_delays(watch.published, answered, begin, end)
        if not delays or trainer.process.poll() is not None:
            raise BenchError(
                f"training published {len(delays)} steps meanwhile; its last words:\n{trainer.read_tail()}"
            )
        return [
            Measured(tables.FRESH, "colonnade", "s", delays),
            Measured(tables.FRESH, "colonnade", "ms p99 of requests", [window["p99"]]),
        ]

    def measure_beyond(self, stack: ExitStack) -> list[Measured]:
        """Measure the p99 of a server with all rows in memory, and of one with a fourth of them, in turns."""
        model, _ = self.export_model("large")
        requests = self.make_requests("large", 100, self.extent.beyond_requests)
        row_bytes = tables.count_row_bytes(model) // MEMORY_FRACTION
        copy = self.folder / "large copy"  # files of its own: pages of a file are in memory once
        shutil.copytree(model, copy)
        drop_cached_pages(copy)
        try:
            group = open_group("serve", UNLIMITED_BYTES)
        except NoMemoryGroup as error:
            raise LeftOut(str(error)) from None
        stack.callback(group.close)
        whole = self.open_server(stack, "colonnade", model)
        read_cached_pages(model)
        command = serve_command(sys.executable, copy, "--row-memory", str(row_bytes))
        limited = self.start(tables.LIMITED, command)
        stack.callback(limited.stop)
        group.add(limited.process.pid)
        limited.wait_until_ready()
        wait_until_checked(limited, copy)
        client = self.open_client(stack)
        seconds = self.extent.window_seconds
        # First touches of pages do not count. What a server holds beside rows is read from the one that holds none.
        for server in (whole, limited):
            measure_closed_loop(client, server, requests, seconds)
        base_bytes = read_anonymous_bytes(whole.process.pid)
        group.tighten(base_bytes + OTHER_MEMORY_BYTES + row_bytes)
        for _ in range(BEYOND_WARM_UPS):
            measure_closed_loop(client, limited, requests, seconds)
        closed_loop = measure_closed_loop(client, limited, requests, seconds)
        rate = max(MIN_RATE, SHARE_OF_BEYOND * closed_loop)
        windows: dict[str, list[dict[str, Any]]] = {server.name: [] for server in (whole, limited)}
        for _ in range(self.extent.turns):
            for server in (whole, limited):
                windows[server.name].append(
                    self.send_window(
                        client, server, requests, rate, give_up_seconds=BEYOND_GIVE_UP_SECONDS
                    )
                )
        rows = [Measured(tables.BEYOND, "both", tables.RATE, [rate])]
        for name, measured in windows.items():
            rows += [
                Measured(tables.BEYOND, name, f"ms {key}", [window[key] for window in measured])
                for key in ("p50", "p99")
            ]
        return rows

    def measure_topk(self, stack: ExitStack) -> list[Measured]:
        """Measure searches of one query, and of many at a time, in turns."""
        generator = np.random.default_rng(0)
        files = {}
        for name, count in (("items", self.extent.topk_items), ("queries", TOPK_QUERIES)):
            files[name] = str(self.folder / f"{name}.npy")
            np.save(files[name], generator.standard_normal((count, TOPK_DIM), np.float32))
        pythons = {"colonnade": sys.executable, "faiss": self.peer_python}
        pythons["implicit"] = self.peer_python
        workers = {}
        for name, python in pythons.items():
            with pinned([self.server_core]):
                workers[name] = open_worker(name, python, "workers.serve_topk", arguments=(name,))
            stack.callback(workers[name].close)
            workers[name].send({**files, "k": TOPK_K})
            self.file.versions |= workers[name].answer()["ready"]
        check_same_items(workers)
        rates: dict[tuple[int, str], list[float]] = {}
        for _ in range(self.extent.turns):
            for batch_size in TOPK_BATCHES:
                for name, worker in workers.items():
                    worker.send({"batch": batch_size, "seconds": self.extent.topk_seconds})
                    rates.setdefault((batch_size, name), []).append(worker.answer()["rate"])
        return [
            Measured(tables.name_topk(size), name, "queries/s", values)
            for (size, name), values in rates.items()
        ]


class LeftOut(Exception):
    """Piece that cannot be measured on this machine; the message says why."""


def choose_cores() -> tuple[int, int]:
    """Return the cores of the client and the server. Raises BenchError on a machine with one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError(f"got {len(cores)} core, wanted two: client and server each have one")
    return cores[0], cores[1]


def run_module(module: str, *words: str) -> None:
    """Run a module of the bench in a process of its own. Raises BenchError with its last words."""
    command = [sys.executable, "-m", module, *words]
    result = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchError(f"{module} failed: {result.stderr.strip()[-500:]}")


def wait_until_checked(server: ServerProcess, model: Path) -> None:
    """Wait until a server has read all files of its model, which it checks in the background at first."""
    deadline = time.monotonic() + CHECK_SECONDS
    while count_read_bytes(server.process.pid) < folder_bytes(model):
        if time.monotonic() > deadline:
            raise BenchError(f"{server.name} has not checked its rows after {CHECK_SECONDS:g} s")
        time.sleep(0.05)
    time.sleep(0.2)


def is_within(window: Mapping[str, Any], limit_ms: float) -> bool:
    """Return whether a window met a limit of its p99, with each request answered well."""
    return not window["is_overloaded"] and not window["failed"] and window["p99"] <= limit_ms


def measure_closed_loop(
    client: Worker, server: ServerProcess, requests: Path, seconds: float
) -> float:
    """Return the answers per second to a few clients that always wait for one. Raises BenchError for other answers."""
    client.send({
        "port": server.port, "requests": str(requests), "clients": CLOSED_LOOP_CLIENTS, "seconds": seconds,
    })  # fmt: skip
    answer = client.answer()
    if answer["failed"]:
        raise BenchError(
            f"{server.name}: {answer['failed']} requests failed:\n{server.read_tail()}"
        )
    return answer["rate"]


def check_same_scores(
    client: Worker, servers: Sequence[ServerProcess], requests: Path, direct: Worker | None = None
) -> None:
    """Raise BenchError if answers differ: the speed of something else is worth nothing.

    Scores of bare calls have the same bits; those of another network differ by rounding.
    """
    scores = []
    for server in servers:
        client.send({"port": server.port, "requests": str(requests), "index": 0})
        scores.append((server.name, np.array(client.answer()["scores"])))
    limit = MAX_SCORE_GAP
    if direct is not None:
        direct.send({"requests": str(requests), "index": 0})
        scores.append((direct.name, np.array(direct.answer()["scores"])))
        limit = 0.0
    for name, values in scores[1:]:
        gap = float(np.abs(values - scores[0][1]).max())
        if not gap <= limit:
            raise BenchError(f"scores of {name} and {scores[0][0]} differ by {gap:g}")


def check_same_items(workers: Mapping[str, Worker]) -> None:
    """Raise BenchError if the best items of the systems differ by more than rounding explains."""
    best = {}
    for name, worker in workers.items():
        worker.send({"check": 64})
        best[name] = [set(items) for items in worker.answer()["items"]]
    for name, sets in best.items():
        pairs = zip(sets, best["colonnade"], strict=True)
        overlap = sum(len(a & b) for a, b in pairs) / (TOPK_K * len(sets))
        if overlap < MIN_TOPK_OVERLAP:
            raise BenchError(f"{name} and colonnade have {overlap:.0%} of the best items in common")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "short windows: to try, not to quote")
    parser.add_argument(
        "--only", default="", help='pieces that this expression finds, e.g. "^rate"; default: all'
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    extent = QUICK if options.quick else FULL
    file = PieceFile(options.json, "serve", window_seconds=extent.window_seconds)
    file.versions["colonnade"] = colonnade.__version__
    with tempfile.TemporaryDirectory(prefix="colonnade-bench-") as folder:
        bench = Bench(Path(folder), extent, file, console)

        def write() -> dict[str, Any]:
            return report(
                "serve",
                version=colonnade.__version__,
                machine=describe_machine(
                    threads=1, window_seconds=extent.window_seconds, others_share=file.others_share,
                    shares=file.shares, versions=file.versions, left_out=bench.left_out,
                ),
                measured=file.measured,
                ratios=tables.ratios_of(file.measured),
                path=options.json,
            )  # fmt: skip

        bench.run(options.only, write)
        tables.print_result(console, file.measured, write())


if __name__ == "__main__":
    run_script(main)
