"""`small_run` on ranks that are forked, not started: most of so small a run would be its imports."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import small_run
from call_records import check_records, children_folder
from ranks import FIRST_CHECK_SECONDS, Child, start_child, store_in


def start(folder: Path, settings: dict, kill_at: int = 0, num_ranks: int = 1) -> list[Child]:
    """The run's processes, one per rank; `kill_at` is rank 0's."""
    beside = folder.parent
    beside.mkdir(parents=True, exist_ok=True)
    number = len(list(beside.glob(f"{folder.name}-said-*")))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **store_in(Path(tempfile.mkdtemp(dir=beside))),
        "OMP_NUM_THREADS": "1",
    }
    return [
        start_child(
            beside / f"{folder.name}-said-{number + rank}",
            {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            small_run.main,
            str(folder),
            json.dumps(settings),
            str(kill_at * (rank == 0)),
        )
        for rank in range(num_ranks)
    ]


def finish(children: list[Child], timeout: float = 240) -> str:
    """Wait; kill what waits for a dead peer, as torchrun does. Raises AssertionError where ranks that differ in their
    calls wait for each other."""
    began, patience = time.monotonic(), FIRST_CHECK_SECONDS
    try:
        while any(child.code is None for child in children):
            if any(child.code not in (None, 0) for child in children):
                break
            waited = time.monotonic() - began
            if waited > patience:
                check_records(children_folder(), are_stuck=waited > timeout)
                assert waited < timeout, f"not done after {timeout:g} s"
                patience *= 2
            time.sleep(0.02)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return "\n".join(child.read_output() for child in children)


def run_to_end(folder: Path, settings: dict, num_ranks: int = 1) -> None:
    children = start(folder, settings, num_ranks=num_ranks)
    output = finish(children)
    assert all(child.code == 0 for child in children), output
