"""Restarts under torchrun's static rendezvous: hosts agree on none, each starts its own ranks again, and they meet."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest
from hosts_here import PATHS, ROOT, interface_names, need_hosts, open_hosts, torchrun
from small_run import digest
from test_link_cut import wait_for
from test_restart import SETTINGS, undisturbed  # noqa: F401

from colonnade.checkpoint.header import list_checkpoints

SCRIPT = ROOT / "tests" / "faults" / "small_run.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_rank_costs_every_host_one_of_its_own_restarts(undisturbed, tmp_path):  # noqa: F811
    need_hosts()
    wanted, folder = undisturbed(2), tmp_path / "run"
    with open_hosts(2) as hosts:
        script = [str(SCRIPT), str(folder), json.dumps(SETTINGS)]
        env = {**PATHS, "FAULT": "rank 1 SIGKILL push 8"}
        job = torchrun(hosts, 1, script, folder=tmp_path, env=env, max_restarts=1)
        assert job.wait(100) == [0, 0], job.tail()
    assert digest(folder) == wanted
    for log in job.logs:
        started = re.findall(r"^started at (\w+)$", log.read_text(), re.MULTILINE)
        assert started[0] == "None" and int(started[-1]) >= 4


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("limit", [60, 2])
def test_a_lost_host_is_waited_for_as_long_as_ranks_wait(limit, undisturbed, tmp_path):  # noqa: F811
    """Lost host's command is started again within the timeout, or the other host's ranks give up, and its torchrun
    ends."""
    need_hosts()
    wanted, folder = undisturbed(2), tmp_path / "run"
    with open_hosts(2, gigabits=0.004) as hosts:
        script = [str(SCRIPT), str(folder), json.dumps(SETTINGS)]
        env = {**PATHS, "LIMIT": str(limit)}
        job = torchrun(hosts, 1, script, folder=tmp_path, env=env, max_restarts=1)
        wait_for(lambda: list_checkpoints(folder), job)
        lost = ["ip", "netns", "pids", hosts.hosts[1].namespace]
        for pid in subprocess.run(lost, capture_output=True, check=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        if limit == 2:
            assert job.agents[0].wait(100) == 1, job.tail()
            return
        environment = {**os.environ, **interface_names(), **env, "OMP_NUM_THREADS": "1"}
        again = subprocess.Popen(job.agents[1].args, env=environment)
        assert (again.wait(150), job.agents[0].wait(50)) == (0, 0), job.tail()
    assert digest(folder) == wanted
