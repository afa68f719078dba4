"""Two hosts, each with a torchrun of its own, as the page on several machines has it; both are this machine."""

from __future__ import annotations

import os
import signal

import pytest
from click_files import LAST_STEP, write_shop
from shell import Process, Shell, pick_port


def start_hosts(
    shell: Shell, run: str, ranks_per_host: int = 1, options: str = ""
) -> list[Process]:
    """Start the same command on both hosts."""
    port = pick_port()
    return [
        shell.start(
            f"torchrun --nnodes 2 --node-rank {node} --nproc-per-node {ranks_per_host} "
            f"--rdzv-backend static --rdzv-endpoint 127.0.0.1:{port} {options} "
            f"-m -- colonnade train clicks.yaml --run {run}",
            GLOO_SOCKET_IFNAME="lo",
        )
        for node in range(2)
    ]


def wait_for_hosts(hosts: list[Process]) -> str:
    """Wait until both hosts have ended and return the output of the first, which has rank 0."""
    first, second = hosts
    output = first.wait()
    second.wait()
    return output


@pytest.mark.slow
@pytest.mark.budget(120)
def test_lost_rank_and_lost_host(shell):
    """Nobody has to do anything with --max-restarts; without it, the same commands resume. The bits are the same."""
    write_shop(shell)
    wait_for_hosts(start_hosts(shell, "whole"))

    hosts = start_hosts(shell, "restarted", options="--max-restarts 2")
    shell.wait_for_checkpoint("restarted", 100, hosts[0])
    os.kill(hosts[1].list_workers()[-1], signal.SIGKILL)
    assert "resuming restarted at step" in wait_for_hosts(hosts)
    shell.check_same_metrics("whole", "restarted")

    hosts = start_hosts(shell, "lost")
    shell.wait_for_checkpoint("lost", 100, hosts[0])
    hosts[1].kill()
    assert "lost rank 1" in hosts[0].wait(status=None)
    newest = shell.list_checkpoints("lost")[-1]
    assert newest < LAST_STEP
    assert f"resuming lost at step {newest}" in wait_for_hosts(start_hosts(shell, "lost"))
    shell.check_same_metrics("whole", "lost")


@pytest.mark.slow
@pytest.mark.budget(100)
def test_interrupted_hosts_resume_as_one_host_of_three_ranks(shell):
    """Ctrl-C on one of two hosts of two ranks saves a checkpoint of all. One host then trains to the end."""
    write_shop(shell)
    shell.run("colonnade train clicks.yaml --run whole")
    hosts = start_hosts(shell, "moved", ranks_per_host=2)
    shell.wait_for_checkpoint("moved", 100, hosts[0])
    hosts[1].press_ctrl_c()
    hosts[0].wait_for_text("run folder: moved")  # all is saved; torchrun waits for the other one
    hosts[1].wait(status=None)
    hosts[0].kill()
    assert shell.list_checkpoints("moved")[-1] < LAST_STEP
    shell.resume("colonnade train clicks.yaml --run moved --ranks 3", "moved")
    shell.check_equal_losses("whole", "moved")
