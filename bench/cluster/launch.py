"""Ranks on several hosts, started as on real ones: one torchrun on each, which meet at the first."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.hosts import Hosts

PORT = 29400
"""torchrun's own default, where the first job of some hosts meets; the next one takes the next."""
TAIL_LINES = 12


class Job:
    """One torchrun per host. `logs[h]` is what those of host h said."""

    def __init__(self, agents: Sequence[subprocess.Popen[Any]], logs: Sequence[Path]) -> None:
        self.agents = tuple(agents)
        self.logs = tuple(logs)

    def wait(self, timeout: float) -> list[int]:
        """Status by host. Raises TimeoutError with the logs' ends."""
        deadline = time.monotonic() + timeout
        try:
            return [agent.wait(max(0.0, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {timeout:.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        """The last words of every host."""
        ends = []
        for log in self.logs:
            output = log.read_text(encoding="utf-8", errors="replace")
            # What torchrun says of a rank that failed is long, and none of it is the rank's own reason.
            lines = re.split(r"^.*failed \(exitcode:", output, maxsplit=1, flags=re.MULTILINE)[
                0
            ].splitlines()
            errors = [line for line in lines[:-TAIL_LINES] if re.search(r"\b[A-Z]\w*Error: ", line)]
            ends.append("\n".join([f"-- {log.name}", *errors[-1:], *lines[-TAIL_LINES:]]))
        return "\n".join(ends)

    def stop(self) -> None:
        """SIGTERM to every torchrun, which ends its ranks."""
        for agent in self.agents:
            agent.terminate()


def torchrun(
    hosts: Hosts,
    ranks_per_host: int,
    script: Sequence[str],
    *,
    folder: Path,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    number: int = 0,
    **retained: Any,
) -> Job:
    """`script` and its arguments, after torchrun's own, on every host; logs go to `folder`, `kept` to Popen.

    `number`: of the job, where these hosts run several at once.
    """
    arguments = [
        *("--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks_per_host)),
        *("--rdzv-backend", "static", "--rdzv-endpoint", f"{hosts.hosts[0].name}:{PORT + number}"),
        *("--rdzv-id", str(number), "--max-restarts", str(max_restarts)),
    ]
    agents, logs = [], []
    for h, host in enumerate(hosts.hosts):
        logs.append(folder / f"{host.name}.log")
        with logs[-1].open("w", encoding="utf-8") as log:
            agents.append(
                hosts.start(
                    h,
                    [
                        python,
                        "-m",
                        "torch.distributed.run",
                        "--node-rank",
                        str(h),
                        *arguments,
                        *script,
                    ],
                    env={"OMP_NUM_THREADS": "1", **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    **retained,
                )
            )
    return Job(agents, logs)
