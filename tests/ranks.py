"""Run a function on several ranks: processes of their own, joined by gloo as under torchrun.

Most of a small test's time would be every rank's imports, so ranks are forked from a process that has made them and
has done nothing else: no thread of torch's runs there yet.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from colonnade import close_mesh, open_mesh

HERE = Path(__file__).resolve().parent
ROOMS = ("", "laws", "contracts", "faults", "unit", "distributed")
# torch imports the last one when an optimizer is made: two seconds of every rank.
IMPORTED = [
    "torch", "torch.distributed", "pytest", "colonnade.train.run", "colonnade.train.fit", "torch._dynamo",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        context = _imported_before()
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


def _imported_before() -> multiprocessing.context.ForkServerContext:
    """OpenMP reads its threads once, when torch is imported; the server lives as long as the tests' own process."""
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


def _rank(place: Path, rank: int, environment: dict[str, str], paths: list[str]) -> None:
    """What a rank's process does; it ends here, as a program would."""
    output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in paths if path not in sys.path]
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
