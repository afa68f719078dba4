"""The bench of shared machines: what its ratios mean, and quotas that processes follow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))  # benches are scripts

import crowded
from harness import Measured


def test_ratios_pair_the_rounds_and_take_the_worst_case() -> None:
    """Alone is twice as fast in the second round: no ratio sees it."""
    measured = []
    for system, beside, quota in (
        ("colonnade", 0.95, 0.9), ("colonnade spinning", 0.5, 1.0), ("torch", 0.25, 0.75), ("torch passive", 0.8, 1.0)
    ):  # fmt: skip
        speed = 100.0 if system == "colonnade" else 80.0
        for case, share in (("alone", 1.0), ("beside 2", beside), ("quota 1", quota)):
            for unit in crowded.RATES:
                measured.append(Measured(case, system, unit, [speed * share, 2 * speed * share]))
    ratios = crowded.find_ratios(measured)
    assert ratios["alone"] == pytest.approx(1.25)
    assert ratios["of_alone_per_processor_second"] == pytest.approx(0.9)
    assert ratios["of_alone_per_processor_second_beside_2"] == pytest.approx(0.95)
    assert ratios["torch_of_alone_per_processor_second"] == pytest.approx(0.25)


THREADS = """
from colonnade import Mesh
from colonnade.run.run import set_num_threads
import pyarrow as pa, torch
from colonnade import _native
set_num_threads(0, Mesh())
print(torch.get_num_threads(), _native.num_threads(), pa.cpu_count())
"""


def test_threads_of_a_run_follow_a_quota() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    try:
        with crowded.quota_group(1.0) as group:
            enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
            done = subprocess.run(
                ["sh", "-c", enter, "sh", sys.executable, "-c", THREADS],
                capture_output=True, text=True, timeout=60, env=environment,
            )  # fmt: skip
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    assert done.stdout.split() == ["1", "1", "1"], done.stderr
