"""Hosts for tests: `bench/cluster` is where they are made, and root is needed."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))  # benches are scripts, not part of the package

from cluster.hosts import ETC, interface_names, open_hosts, sweep, why_no_hosts  # noqa: E402
from cluster.launch import torchrun  # noqa: E402

__all__ = [
    "ETC",
    "PATHS",
    "call_on_host",
    "interface_names",
    "need_hosts",
    "open_hosts",
    "sweep",
    "torchrun",
]
NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
BIND, PRIVATE_BELOW = 0x1000, 0x44000
"""Flags of unshare, setns and mount."""

FOLDERS = [
    ROOT / "src",
    *(ROOT / "tests" / part for part in (".", "laws", "faults", "distributed")),
]
PATHS = {"PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])}
"""Environment of ranks: the package from its source, and the tests' modules."""


@cache
def reason() -> str | None:
    return why_no_hosts()


def need_hosts() -> None:
    if text := reason():
        pytest.skip(f"no hosts on this machine: {text}")


def call_on_host(namespace: str, name: str, function: Callable, *arguments: Any) -> None:
    """Move this process to a host, for good, as `ip netns exec` does it, and call `function(*arguments)` there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open(f"/var/run/netns/{namespace}", "rb") as file:
        check(libc.setns(file.fileno(), NEW_NETWORK))
    check(libc.unshare(NEW_MOUNTS | NEW_NAMES))
    check(libc.mount(b"none", b"/", None, PRIVATE_BELOW, None))
    check(libc.mount(str(ETC / namespace / "hosts").encode(), b"/etc/hosts", None, BIND, None))
    socket.sethostname(name)
    function(*arguments)
