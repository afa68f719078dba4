"""Run a function on several ranks: processes of their own, joined by gloo as under torchrun.

Most of a small test's time would be every rank's imports, so ranks are forked from a process that has made them and
has done nothing else: no thread of torch's runs there yet.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

from colonnade import close_mesh, open_mesh
from colonnade.comm.rendezvous import HEARTBEATS, STORE

HERE = Path(__file__).resolve().parent
ROOMS = ("", "laws", "contracts", "faults", "unit", "bench", "distributed")
# torch imports the last one when an optimizer is made: two seconds of every rank.
IMPORTED = [
    "torch", "torch.distributed", "pytest", "colonnade.run.run", "colonnade.run.fit", "torch._dynamo",
    "colonnade.cli.app", "pandas", "pyarrow.parquet",
]  # fmt: skip


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
) -> list[Any]:
    """`function(mesh, *arguments)` on every rank; what each returned, in rank order. `ranks_per_host`: as if they were
    on several hosts.

    The function lives at the top of a test module. Raises AssertionError with the ranks' output if one fails, or is
    not done after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        paths = [str(HERE / room) for room in ROOMS]
        paths.append(str(Path(sys.modules[function.__module__].__file__ or "").parent))
        call = function.__module__, function.__name__, arguments
        (place / "call.pkl").write_bytes(pickle.dumps(call))
        environment = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host or num_ranks),
            **store_in(place),
            "OMP_NUM_THREADS": "1",
        }
        context = preloaded_context()
        children = [
            context.Process(
                target=_rank,
                args=(
                    place,
                    rank,
                    {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    paths,
                ),
            )
            for rank in range(num_ranks)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout
        try:
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
        finally:  # of a call that hangs nobody is left to slow other tests down
            codes = [child.exitcode for child in children]
            for child in children:
                child.kill()
                child.join()
        output = "\n".join((place / f"output-{rank}").read_text() for rank in range(num_ranks))
        for rank, code in enumerate(codes):
            assert code == 0, f"rank {rank} failed ({code}; None: too late):\n{output}"
        return [pickle.loads((place / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


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
        """What it ended with; None: it runs. -9: killed."""
        return self.process.exitcode

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def kill(self) -> None:
        self.process.kill()


def start_child(
    output: Path, environment: Mapping[str, str], function: Callable, *arguments: Any
) -> Child:
    """A process that does `function(*arguments)`, of a test module's top, and ends. output: a file of its own."""
    call = function.__module__, function.__name__, arguments
    paths = [str(HERE / room) for room in ROOMS]
    process = preloaded_context().Process(
        target=_program, args=(output, dict(environment), paths, call)
    )
    process.start()
    return Child(process, output)


def _become(output: Path, environment: Mapping[str, str], paths: Sequence[str]) -> None:
    """The process that a program of this environment would be."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in paths if path not in sys.path]


def _program(
    output: Path, environment: Mapping[str, str], paths: Sequence[str], call: tuple[str, str, tuple]
) -> None:
    """It ends here, as a program would."""
    _become(output, environment, paths)
    module, name, arguments = call
    code = 0
    try:
        getattr(__import__(module), name)(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank(place: Path, rank: int, environment: dict[str, str], paths: list[str]) -> None:
    """What a rank's process does; it ends here, as a program would."""
    _become(place / f"output-{rank}", environment, paths)
    code = 0
    try:
        module, name, arguments = pickle.loads((place / "call.pkl").read_bytes())
        function = getattr(__import__(module), name)
        mesh = open_mesh()
        found = function(mesh, *arguments)
        (place / f"result-{rank}").write_bytes(pickle.dumps(found))
        close_mesh(mesh)
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)
