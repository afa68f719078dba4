"""torchrun starts a run again whose rank was lost: it goes on from the newest checkpoint, to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_run import finish, run_to_end
from hosts_here import PATHS
from ranks import start_child
from small_run import digest, main
from torch.distributed import TCPStore

SCRIPT = Path(__file__).with_name("small_run.py")
SETTINGS = {
    "plan.staleness_steps": 2,
    "plan.memory.dram": 90_000,
    "train.epochs": 1,
    "train.evaluate_steps": 6,
}
PHASES = [
    "start 0",
    "control 5",
    "route 9",
    "fetch 7",
    "push 8",
    "dense 12",
    "evaluate 4",
    "checkpoint 6",
    "end 0",
]


def torchrun(
    folder: Path, ranks: int, fault: str = "", settings=SETTINGS, limit: float = 60
) -> str:
    """Return the output of torchrun and its ranks, which all ended well."""
    environment = {
        **os.environ, **PATHS, "FAULT": fault, "LIMIT": str(limit), "OMP_NUM_THREADS": "1", "RICH_WIDTH": "200",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", "2", str(SCRIPT), str(folder), json.dumps(settings),
    ]  # fmt: skip
    child = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout
    assert not fault or folder.with_name(f"{folder.name}.fault").exists(), "nothing failed"
    return child.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digest of an undisturbed run, by number of ranks."""
    results: dict[int, str] = {}

    def of(ranks: int) -> str:
        if ranks not in results:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            run_to_end(folder, SETTINGS, ranks)
            results[ranks] = digest(folder)
        return results[ranks]

    return of


def restarted(folder: Path, ranks: int, fault: str, settings=SETTINGS) -> str:
    """Return the output of ranks that are forked, and started again as torchrun does it: all at once when one has
    failed, with the store that it has served since the first start, where keys of ranks that are gone lie."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ, "FAULT": fault, "LIMIT": "60", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    output = []
    for restart in range(2):
        children = [
            start_child(
                folder.parent / f"{folder.name}-said-{restart}-{rank}",
                {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                main, str(folder), json.dumps(settings),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        output.append(finish(children))
        assert any(child.code for child in children) == (restart == 0), output[-1]
    return "\n".join(output)


def test_ranks_that_are_started_again_meet_in_the_same_store(undisturbed, tmp_path):
    output = restarted(tmp_path / "run", 2, "rank 1 SIGKILL push 8")
    assert digest(tmp_path / "run") == undisturbed(2)
    assert "started at None" in output and "started at 4" in output


@pytest.mark.slow
def test_a_rank_killed_in_a_push(undisturbed, tmp_path):
    for attempt in range(3):  # on a busy machine torchrun may end rank 0 before it has spoken
        output = torchrun(tmp_path / f"run-{attempt}", 2, "rank 1 SIGKILL push 8")
        assert digest(tmp_path / f"run-{attempt}") == undisturbed(2)
        assert "started at None" in output and "started at 4" in output
        if "rank 0 of 2 lost rank 1 in" in output:
            break
    assert "rank 0 of 2 lost rank 1 in" in output and "is gone, as if killed" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
def test_in_each_phase(undisturbed, sent, phase, rank, tmp_path):
    torchrun(
        tmp_path / "run", 3, f"rank {rank} {sent} {phase}", limit=6 if sent == "SIGSTOP" else 60
    )
    assert digest(tmp_path / "run") == undisturbed(3)
