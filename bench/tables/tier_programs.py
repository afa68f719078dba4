"""The C++ programs of `bench tiers`, built when it runs: the simulator of policies, the device alone, and a delay."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import BENCH, BenchError
from workers.tier_stream import Stream

FLAGS = ("-std=c++20", "-O3", "-pthread")
KNOWING = ("lru", "lfu", "static")
"""Policies that know what our store knows: which rows were used, when and how often. With those of `LOOKING`."""
LOOKING = "lookahead"
FOREKNOWING = ("oracle", "belady")
"""Policies that know more: the true frequencies, the whole future."""


@dataclass(frozen=True)
class Programs:
    policies: Path
    device: Path
    delay: Path
    """Shared library."""


def build(folder: Path) -> Programs:
    """Compile the programs. Raises BenchError with the compiler's output."""
    compiler = os.environ.get("CXX", "c++")
    built = []
    for name in ("tier_policies", "tier_device"):
        run([compiler, *FLAGS, str(BENCH / f"{name}.cc"), "-o", str(folder / name)])
        built.append(folder / name)
    built.append(folder / "tier_delay.so")
    run([compiler, *FLAGS, "-shared", "-fPIC", str(BENCH / "tier_delay.cc"), "-o", str(built[-1])])
    return Programs(*built)


def simulate(
    programs: Programs,
    stream: Stream,
    fractions: Sequence[int],
    lookahead: int,
    folder: Path,
) -> Mapping[tuple[str, int], list[int]]:
    """Rows that each policy misses in each batch, by (policy, denominator of the rows that it holds)."""
    requested = {}
    for n in fractions:
        capacity = stream.shape.num_rows // n
        for policy in (*KNOWING, *FOREKNOWING):
            requested[policy, n] = f"{policy}:{capacity}:0"
        requested[LOOKING, n] = f"lfu:{capacity}:{lookahead}"
    out = folder / "misses.jsonl"
    run([str(programs.policies), str(stream.folder), str(out), *requested.values()])
    by_run = read_misses(out)
    return {key: by_run[words] for key, words in requested.items()}


def read_misses(path: Path) -> dict[str, list[int]]:
    """Return the rows missed in each batch, by run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["run"]: line["misses"] for line in lines}


def write_hints(programs: Programs, stream: Stream) -> None:
    """The stream's next-use codes: see `Stream.hints`."""
    run([str(programs.policies), str(stream.folder), str(stream.folder / "hints.u8"), "hints"])


@dataclass(frozen=True)
class Reads:
    per_second: float
    cores: float


def measure_device(programs: Programs, files: Sequence[Path], seconds: float, depth: int) -> Reads:
    """Random 4 KiB reads of `files`."""
    words = run([str(programs.device), str(seconds), str(depth), *map(str, files)]).split()
    reads, spent, cpu = map(float, words)
    return Reads(reads / spent, cpu / spent)


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        name = Path(command[0]).name
        raise BenchError(f"`{name}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
