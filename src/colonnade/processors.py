"""Processors that this process may use, and how OpenMP's threads wait for work."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping

CGROUPS = "/sys/fs/cgroup"
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""Settings of idle threads. GNU's OpenMP, which torch's packages bring, looks that often for work before it sleeps:
0.2 ms on a Xeon at 2.8 GHz. Other OpenMPs sleep at once."""
WAIT_SETTINGS = (*WAITING, "KMP_BLOCKTIME")


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make OpenMP's idle threads sleep soon, unless a setting of the user's says how they wait.

    By default they look thirty times as often and take processors from other processes; without spinning at all, waking
    them costs a sixth of a small step. OpenMP reads the environment when torch is loaded: this counts for a process
    that loads torch later, and for every process that it starts.
    """
    if not any(name in environment for name in WAIT_SETTINGS):
        environment.update(WAITING)


def usable_processors() -> int:
    """Count the processors that this process may use: its affinity, bounded by the quota of its control groups.

    A quota of 1.5 counts as 2: two threads use it up, one cannot.
    """
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    quota = read_quota(_read("/proc/self/cgroup"))
    return processors if quota is None else max(1, min(processors, -int(-quota // 1)))


def read_quota(groups: str, root: str = CGROUPS) -> float | None:
    """Return the processors that control groups grant, the least of all levels; None without a quota.

    groups: lines of /proc/self/cgroup. root: where control groups of version 1 or 2 are mounted. In a container the
    groups' paths may be those of the host; the mounted root is then the container's own group.
    """
    quotas = []
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            quotas += [
                _quota(*_read(f"{folder}/cpu.max").split()) for folder in _levels(root, path)
            ]
        elif "cpu" in controllers.split(","):
            for folder in _levels(f"{root}/cpu", path):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quotas.append(_quota(*(_read(f"{folder}/{name}").strip() for name in names)))
    return min((quota for quota in quotas if quota is not None), default=None)


def _levels(root: str, path: str) -> Iterator[str]:
    """Yield the folder of a control group and of every group around it, up to the root."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        yield "/".join([root, *names[:depth]])


def _quota(quota: str = "max", period: str = "") -> float | None:
    """Divide microseconds by microseconds; None where there is no quota ("max", "-1", or no such file)."""
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
