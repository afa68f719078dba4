"""Four ranks on two hosts train for a long time while others use the processors: none of them grows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

import pytest
from hosts_here import PATHS, need_hosts, open_hosts, torchrun

SCRIPT = Path(__file__).with_name("soak_rank.py")
STEPS, EVERY = 1200, 50
SETTLED = 400
"""Steps until every buffer has met its largest batch."""
LEAST_LEAK_BYTES = 1024
"""Smallest growth in a step that is told from none: a leak of one small message."""
BUSY = "while True: pass"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow(tmp_path, capsys):
    need_hosts()
    with open_hosts(2, gigabits=1.0) as hosts:
        for host in range(os.cpu_count() or 1):
            hosts.start(host % 2, ["nice", "-n", "5", sys.executable, "-c", BUSY])
        script = [str(SCRIPT), str(tmp_path), str(STEPS), str(EVERY)]
        job = torchrun(hosts, 2, script, folder=tmp_path, env=PATHS)
        assert job.wait(800) == [0, 0], job.tail()
    for rank in range(4):
        result = json.loads((tmp_path / f"rank-{rank}.json").read_text())[SETTLED // EVERY :]
        third = len(result) // 3
        before, after = median(result[:third]), median(result[-third:])
        with capsys.disabled():
            print(
                f"\nrank {rank}: {before / 1e6:.1f} MB after {SETTLED} steps, {after / 1e6:.1f} MB after {STEPS}",
                end="",
            )
        apart = (len(result) - third) * EVERY
        assert after - before < LEAST_LEAK_BYTES * apart, result
