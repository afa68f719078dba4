"""Run a function on several ranks: processes of their own, joined by gloo as under torchrun."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colonnade import close_mesh, open_mesh

HERE = Path(__file__).resolve().parent


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

    The function lives at the top of a test module. Raises AssertionError with the ranks' output if one fails.
    """
    with tempfile.TemporaryDirectory() as place:
        call = Path(place) / "call.pkl"
        call.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        module_file = sys.modules[function.__module__].__file__
        environment = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host or num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [
                    *(
                        str(HERE / room)
                        for room in ("", "laws", "contracts", "faults", "unit", "distributed")
                    ),
                    str(Path(module_file).parent),
                    *filter(None, [os.environ.get("PYTHONPATH")]),
                ]
            ),
        }
        children = [
            subprocess.Popen(
                [sys.executable, __file__, str(call), str(Path(place) / f"result-{rank}")],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            outputs = [child.communicate(timeout=timeout)[0] for child in children]
        finally:  # of a call that hangs nobody is left to slow other tests down
            for child in children:
                child.kill()
        for rank, child in enumerate(children):
            assert child.returncode == 0, f"rank {rank} failed:\n" + "\n".join(outputs)
        return [pickle.loads((Path(place) / f"result-{r}").read_bytes()) for r in range(num_ranks)]


def _main(call: str, result: str) -> None:
    module, name, arguments = pickle.loads(Path(call).read_bytes())
    function = getattr(__import__(module), name)
    mesh = open_mesh()
    found = function(mesh, *arguments)
    Path(result).write_bytes(pickle.dumps(found))
    close_mesh(mesh)


if __name__ == "__main__":
    _main(*sys.argv[1:])
