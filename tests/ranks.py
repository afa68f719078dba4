"""Run a function on several ranks: processes of their own, joined by gloo as under torchrun.

Most of a small test's time would be every rank's imports, so ranks are forked from a process that has made them and
has done nothing else: no thread of torch's runs there yet. Most of what is left would be waiting for each other while
a mesh is opened and closed, so the ranks of a world stand by for the next function once they have returned from one
(`World`). A world is thrown away where a rank failed or did not end, or where a function left something behind that the
next one could notice (`traces_left`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import call_records
import numpy as np
import torch

from colonnade import Mesh, close_mesh, open_mesh
from colonnade.comm import process_groups
from colonnade.comm.rendezvous import HEARTBEATS, STORE
from colonnade.terminal import Terminal

HERE = Path(__file__).resolve().parent
ROOMS = ("", "laws", "contracts", "faults", "unit", "bench", "distributed")
# torch imports the last one when an optimizer is made: two seconds of every rank.
IMPORTED = [
    "torch", "torch.distributed", "pytest", "colonnade.run.run", "colonnade.run.fit", "torch._dynamo",
    "colonnade.cli.app", "pandas", "pyarrow.parquet",
    # A run's board imports these when it is opened.
    "tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
    "colonnade.serve.endpoints", "uvicorn",
]  # fmt: skip
MOST_WORLDS = 2
"""Worlds that stand by at once; the one that was used longest ago is closed for another."""
MOST_THREADS = 60
"""Threads of a rank beyond which its world is closed: one for each group that a function made, which gloo wakes 100
times a second, so that a rank of 110 threads took 5 % of a processor while it stood by."""
CLOSING_SECONDS = 60.0
FIRST_CHECK_SECONDS = 5.0
"""Time without news from any rank after which their calls are compared; then after twice as long."""
CALLS = "calls"
"""Folder of the records of a call's ranks (`call_records.py`)."""
WATCHED = ("colonnade", "test_", "torch.distributed.distributed_c10d")
"""Prefixes of modules that a function must not leave changed."""
GROUP_COUNT = "torch.distributed.distributed_c10d._group_count"
"""Attribute that may change: groups that a function makes are made by all ranks alike, and close with the mesh."""


def store_in(folder: Path) -> dict[str, str]:
    """Create the files in which ranks of one host meet; return the variables that name them. No port is opened."""
    files = {name: folder / name.lower() for name in (STORE, HEARTBEATS)}
    for file in files.values():
        file.write_bytes(b"")
    return {name: str(file) for name, file in files.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


def run_ranks(
    num_ranks: int,
    function: Callable,
    *arguments: Any,
    timeout: float = 240,
    ranks_per_host: int | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call `function(mesh, *arguments)` on every rank and return the results in rank order.

    `ranks_per_host`: pretend that the ranks are on several hosts. `fresh`: start a world for this call alone and close
    it, for functions that kill or stop ranks, or look at the state of a mesh that nobody has used.

    The function is at the top of a test module. Raises AssertionError with the ranks' output if one fails, or is
    not done after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if fresh:
        world = World(num_ranks, ranks_per_host)
        try:
            results, _ = world.call(function, arguments, deadline, is_last=True)
            world.close(deadline)
            return results
        finally:
            world.kill()
    key = num_ranks, ranks_per_host or num_ranks
    world = _standing.pop(key, None) or World(num_ranks, ranks_per_host)
    is_reusable = False
    try:
        results, traces = world.call(function, arguments, deadline)
        if traces:
            world.close(deadline)
        is_reusable = not traces
        return results
    finally:  # of a call that hangs nobody is left to slow other tests down
        if is_reusable:
            _standing[key] = world  # the last one now: dictionaries keep their order
            while len(_standing) > MOST_WORLDS:
                _standing.pop(next(iter(_standing))).close()
        else:
            world.kill()


def console_of(mesh: Mesh) -> Terminal | None:
    """Return the console of a rank as the command's launcher chooses it: rank 0 has one."""
    return Terminal() if mesh.rank == 0 else None


def close_worlds() -> None:
    """Close all worlds that stand by. Raises AssertionError where the ranks of one do not leave in order."""
    while _standing:
        _standing.popitem()[1].close()


class World:
    """Ranks that wait for functions to call. Their mesh is open from the first call until `close`."""

    def __init__(self, num_ranks: int, ranks_per_host: int | None = None) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory()
        self._place = Path(self._folder.name)
        self._environment = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host or num_ranks),
            **store_in(self._place),
            "OMP_NUM_THREADS": "1",
        }
        self._num_calls = 0
        self._ranks: list[Any] = []
        self._pipes: list[connection.Connection] = []
        context = preloaded_context()
        for rank in range(num_ranks):
            pipe, other_end = context.Pipe()
            process = context.Process(target=_stand_by, args=(other_end, str(self._place), rank))
            process.start()
            other_end.close()  # so that the rank's end is the only one: it closes when the rank ends
            self._ranks.append(process)
            self._pipes.append(pipe)

    def call(
        self,
        function: Callable,
        arguments: Sequence[Any],
        deadline: float,
        *,
        is_last: bool = False,
    ) -> tuple[list[Any], list[str]]:
        """Return every rank's result, and what the function left behind in any of them.

        `is_last`: each rank leaves the mesh and ends as soon as it has returned, for others may be waiting for that.
        """
        self._num_calls += 1
        place = self._place / str(self._num_calls)
        place.mkdir()
        paths = [str(HERE / room) for room in ROOMS]
        paths.append(str(Path(sys.modules[function.__module__].__file__ or "").parent))
        call = function.__module__, function.__name__, arguments
        (place / "call.pkl").write_bytes(pickle.dumps(call))
        for rank, pipe in enumerate(self._pipes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                environment = {**os.environ, **self._environment, **own}
                environment[call_records.FOLDER] = str(place / CALLS)
                pipe.send((str(place), environment, paths, is_last))
            except OSError:
                pass  # it ended between two calls, which its code says
        traces = self._wait_for_all(place, deadline, is_last)
        call_records.check_records(place / CALLS)
        shutil.rmtree(place / CALLS, ignore_errors=True)
        results = [
            pickle.loads((place / f"result-{rank}").read_bytes()) for rank in range(self.num_ranks)
        ]
        return results, traces

    def _wait_for_all(self, place: Path, deadline: float, is_last: bool) -> list[str]:
        """Wait until every rank has returned, or ended where it `is_last`; return the traces that they left."""
        traces: list[str] = []
        codes: dict[int, int | None] = dict.fromkeys(range(self.num_ranks))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        patience = FIRST_CHECK_SECONDS
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            ready = connection.wait(list(waiting), min(seconds, patience))
            if not ready:
                call_records.check_records(place / CALLS)  # those that differ wait in vain
                patience *= 2
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    traces += pipe.recv()  # type: ignore[union-attr]
                    codes[rank] = 0
                except (EOFError, OSError):
                    self._ranks[rank].join(max(0.0, deadline - time.monotonic()))
                    code = self._ranks[rank].exitcode
                    codes[rank] = 1 if code == 0 and not is_last else code
        self._check(place, [codes[rank] for rank in range(self.num_ranks)])
        return traces

    def close(self, deadline: float | None = None) -> None:
        """Have all ranks leave the mesh together and end. Raises AssertionError where one does not do so in order."""
        limit = time.monotonic() + CLOSING_SECONDS if deadline is None else deadline
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.join(max(0.0, limit - time.monotonic()))
        codes = [process.exitcode for process in self._ranks]
        try:
            if self._num_calls:
                self._check(self._place / str(self._num_calls), codes)
        finally:
            self.kill()

    def _check(self, place: Path, codes: Sequence[int | None]) -> None:
        files = [place / f"output-{rank}" for rank in range(self.num_ranks)]
        texts = [file.read_text() for file in files if file.exists()]
        if any(codes) or None in codes:
            texts += call_records.find_differences(place / CALLS, are_stuck=True)
        output = "\n".join(texts)
        for rank, code in enumerate(codes):
            assert code == 0, f"rank {rank} failed ({code}; None: too late):\n{output}"

    def kill(self) -> None:
        """End all ranks at once; does nothing to those that have ended."""
        for pipe, process in zip(self._pipes, self._ranks, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._folder.cleanup()


_standing: dict[tuple[int, int], World] = {}
"""Worlds that stand by, by their numbers of ranks and of ranks per host; the one used last is the last one."""


def preloaded_context() -> multiprocessing.context.ForkServerContext:
    """Return a context whose processes are forked with torch imported. Its server lives as long as this process.

    OpenMP reads its number of threads once, when torch is imported.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


@dataclass(frozen=True)
class Child:
    """A process that was forked as ranks are, and may be killed."""

    process: Any
    output: Path

    @property
    def code(self) -> int | None:
        """Exit code; None: still running. -9: killed."""
        return self.process.exitcode

    def read_output(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it ends, or so long; return `code`."""
        self.process.join(seconds)
        return self.code

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()


def start_child(
    output: Path, environment: Mapping[str, str], function: Callable, *arguments: Any
) -> Child:
    """A process that does `function(*arguments)`, of a test module's top, and ends. output: a file of its own."""
    call = function.__module__, function.__name__, arguments
    paths = [str(HERE / room) for room in ROOMS]
    environment = {**environment, call_records.FOLDER: str(call_records.children_folder())}
    process = preloaded_context().Process(target=_program, args=(output, environment, paths, call))
    process.start()
    return Child(process, output)


def _become(output: Path, environment: Mapping[str, str], paths: Sequence[str]) -> None:
    """The process that a program of this environment would be."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.clear()
    os.environ.update(environment)
    call_records.start_recording()
    tempfile.tempdir = None  # an import may have asked for it before TMPDIR was set
    sys.path[:0] = [path for path in paths if path not in sys.path]


def _program(
    output: Path, environment: Mapping[str, str], paths: Sequence[str], call: tuple[str, str, tuple]
) -> None:
    """End the process, as a program would."""
    _become(output, environment, paths)
    module, name, arguments = call
    code = 0
    try:
        getattr(__import__(module), name)(*arguments)
        call_records.end_record()
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stand_by(pipe: connection.Connection, folder: str, rank: int) -> None:
    """Make the calls that come through `pipe` until it is closed. Ends the process as a program would."""
    start = os.getcwd()
    randoms = torch.get_rng_state(), np.random.get_state(), random.getstate()
    output = Path(folder) / f"output-{rank}"
    mesh = None
    try:
        gc.freeze()  # what is collected after each call is then the call's own
        while True:
            try:
                place, environment, paths, is_last = pipe.recv()
            except EOFError:
                break
            output = Path(place) / f"output-{rank}"
            _become(output, environment, paths)
            os.chdir(start)
            _reset(*randoms)
            module, name, arguments = pickle.loads((Path(place) / "call.pkl").read_bytes())
            function = getattr(__import__(module), name)
            open_mesh()
            mesh = open_mesh()  # the same world with nothing counted, in a first call, too
            assert mesh.peer_monitor is not None or mesh.num_ranks == 1
            if mesh.peer_monitor is not None:
                mesh.peer_monitor.timeout = process_groups.TIMEOUT.total_seconds()
                mesh.publish_step(0)
            before = State.now()
            result = function(mesh, *arguments)
            call_records.end_record()
            (Path(place) / f"result-{rank}").write_bytes(pickle.dumps(result))
            del result, function, arguments
            sys.stdout.flush()
            sys.stderr.flush()
            if is_last:
                break
            pipe.send(before.traces_left())
        if mesh is not None:
            close_mesh(mesh)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _reset(torch_state: torch.Tensor, numpy_state: Any, python_state: Any) -> None:
    """Set what a function may have changed in this process to what a new one has."""
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


@dataclass(frozen=True)
class State:
    """State that a function can leave changed in a process: attributes of modules and classes, threads, files."""

    attributes: Mapping[str, Mapping[str, Any]]
    threads: frozenset[int | None]

    @staticmethod
    def now() -> State:
        return State(_watched_attributes(), _thread_ids())

    def traces_left(self) -> list[str]:
        """Return what is not as it was, in words; empty: the next function finds a process like a new one."""
        gc.collect()
        now = State.now()
        traces = [
            f"{owner}.{name}"
            for owner, values in self.attributes.items()
            for name, value in values.items()
            if f"{owner}.{name}" != GROUP_COUNT
            and not _is_same(value, now.attributes.get(owner, {}).get(name, self))
        ]
        deadline = time.monotonic() + 1
        while (threads := _thread_ids() - self.threads) and time.monotonic() < deadline:
            time.sleep(0.01)  # it is ending: nobody joins threads that are not waited for
        traces += [f"thread {thread}" for thread in threads]
        if (num_threads := len(os.listdir("/proc/self/task"))) > MOST_THREADS:
            traces.append(f"{num_threads} threads")
        return traces


def _is_same(before: Any, now: Any) -> bool:
    """Tell whether an attribute is as it was, but that torch wraps an optimizer's `step` when the first one is made."""
    return now is before or (
        getattr(now, "hooked", False) is True and getattr(now, "__wrapped__", None) is before
    )


def _thread_ids() -> frozenset[int | None]:
    return frozenset(thread.ident for thread in threading.enumerate())


def _watched_attributes() -> dict[str, dict[str, Any]]:
    """Return the attributes of watched modules, and of the classes that they define, by the owner's name."""
    attributes = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(WATCHED) or not isinstance(module, ModuleType):
            continue
        attributes[name] = dict(vars(module))
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                attributes[f"{name}.{value.__qualname__}"] = dict(vars(value))
    return attributes
