"""Measure whether the advised number of servers is the one from which on more servers gain nothing.

Minutes: 14 (quick 2).

Ten drawn settings of two trainers and 1 to 4 servers, each on a host of its own (a network namespace). The servers'
uplinks are shaped so that one server would send the rows of a step in 0.06 to 0.2 s. Trainers sleep instead of
computing, so long that the links of 0.4 to 3.2 servers are busy meanwhile. The right number is the smallest whose step
is at most a tenth longer than the shortest.

    servers_within_1    settings in which the advised number differs from the right one by at most 1
    servers_equal       settings in which both are equal

Each setting is written to FILE when it ends, and a call with the same FILE adds the others.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from cluster.hosts import open_hosts
from harness import (
    BENCH,
    ArmFile,
    BenchError,
    Measured,
    open_parser,
    run_module,
    run_script,
    say,
)
from workers.advise_servers import TRAINERS, Setting, dump_setting

NUM_SETTINGS = 10
SERVERS = (1, 2, 3, 4)
STEPS = 40
PLATEAU = 1.1
"""Longest step of the right number of servers, in those of the fastest number."""
PORT = 29400
TIMEOUT = 200.0
ADVISED, UNIT = "advised", "s/step"


def draw_setting(number: int) -> Setting:
    """Draw a setting, the same for the same number."""
    rng = random.Random(f"setting {number}")
    fields, dim, batch_size = rng.choice((4, 8)), rng.choice((16, 32, 64)), rng.choice((1024, 2048))
    link_seconds = rng.uniform(0.06, 0.2)
    return Setting(
        fields=fields, dim=dim, batch_size=batch_size,
        gigabits=batch_size * fields * dim * 4 / link_seconds * 8e-9,
        sleep=link_seconds / rng.uniform(0.4, 3.2),
    )  # fmt: skip


def measure(setting: Setting, num_servers: int) -> float:
    """Train with servers; return the median seconds of a step."""
    num_ranks = TRAINERS + num_servers
    script = [sys.executable, "-m", "workers.advise_servers", "train", dump_setting(setting)]
    script += [str(num_servers), str(STEPS)]
    with tempfile.TemporaryDirectory() as folder, open_hosts(num_ranks) as hosts:
        hosts.shape(setting.gigabits, hosts.hosts[TRAINERS:])
        logs = [Path(folder) / str(rank) for rank in range(num_ranks)]
        world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1}
        world |= {"MASTER_ADDR": hosts.hosts[0].address, "MASTER_PORT": PORT}
        ranks = []
        for rank, path in enumerate(logs):
            env = {**world, "RANK": rank, "LOCAL_RANK": rank}
            with path.open("w") as log:
                ranks.append(
                    hosts.start(
                        rank, script, env={name: str(value) for name, value in env.items()},
                        stdout=log, stderr=subprocess.STDOUT, cwd=BENCH,
                    )
                )  # fmt: skip
        if any(rank.wait(TIMEOUT) for rank in ranks):
            raise BenchError("\n".join(path.read_text()[-2000:] for path in logs))
        (line,) = re.findall(r'^{"seconds": (.*)}', logs[0].read_text(), re.M)
    return float(line)


def choose_right_number(seconds: Sequence[float]) -> int:
    """Return the smallest number of servers on the plateau. seconds: of a step with `SERVERS`."""
    return next(n for n, s in zip(SERVERS, seconds, strict=True) if s <= PLATEAU * min(seconds))


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    """Compare advised and right numbers of servers, of the settings that were measured completely."""
    values = {(row.case, row.system): row.median for row in measured}
    differences = []
    for case in dict.fromkeys(row.case for row in measured):
        seconds = [values.get((case, f"{n} servers")) for n in SERVERS]
        if None not in seconds:
            differences.append(abs(values[case, ADVISED] - choose_right_number(seconds)))
    return {
        "servers_within_1": sum(d <= 1 for d in differences),
        "servers_equal": sum(d == 0 for d in differences),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "one setting: to try, not to quote")
    options = parser.parse_args(arguments)
    file = ArmFile(options.json, "advise_servers", compute_ratios, {"torch": torch.__version__})
    known = {row.case for row in file.measured}
    for number in range(1 if options.quick else NUM_SETTINGS):
        setting = draw_setting(number)
        case = f"setting {number}"
        if case in known:
            continue
        say(f"{case}: {setting}")
        words = ["workers.advise_servers", "predict", dump_setting(setting)]
        advice = json.loads(run_module(sys.executable, words, threads=1))
        seconds = [measure(setting, n) for n in SERVERS]
        rows = [
            Measured(case, f"{n} servers", UNIT, [s]) for n, s in zip(SERVERS, seconds, strict=True)
        ]
        units = {"servers": ADVISED, "link": "link", "processor": "processor"}
        rows += [Measured(case, units[name], "servers", [value]) for name, value in advice.items()]
        file.add(rows)
        steps = ", ".join(f"{1e3 * s:.0f}" for s in seconds)
        say(f"{case}: {steps} ms; right {choose_right_number(seconds)}; advised {advice}")
    for ratio, value in compute_ratios(file.measured).items():
        say(f"{ratio}: {value}")


if __name__ == "__main__":
    run_script(main)
