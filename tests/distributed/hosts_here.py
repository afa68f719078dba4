"""Hosts for tests: `bench/cluster` is where they are made, and root is needed."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))  # benches are scripts, not part of the package

from cluster.hosts import ETC, interface_names, open_hosts, sweep, why_no_hosts  # noqa: E402
from cluster.launch import torchrun  # noqa: E402

__all__ = ["ETC", "PATHS", "interface_names", "need_hosts", "open_hosts", "sweep", "torchrun"]

FOLDERS = [
    ROOT / "src",
    *(ROOT / "tests" / part for part in (".", "laws", "faults", "distributed")),
]
PATHS = {"PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])}
"""For ranks: the package from its source, and the tests' modules."""


@cache
def reason() -> str | None:
    return why_no_hosts()


def need_hosts() -> None:
    if said := reason():
        pytest.skip(f"no hosts on this machine: {said}")
