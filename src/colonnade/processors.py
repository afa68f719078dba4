"""Number of processors that this process may use, and settings of OpenMP's idle threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping

CGROUPS = "/sys/fs/cgroup"
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""Settings of idle threads. A thread of GNU's OpenMP, which torch's packages include, checks for work this many times
before it sleeps: 0.2 ms on a Xeon at 2.8 GHz. Threads of other OpenMPs sleep at once."""
WAIT_SETTINGS = (*WAITING, "KMP_BLOCKTIME")


def limit_openmp_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make OpenMP's idle threads sleep soon, unless the user has set how they wait.

    By default they check thirty times as often and take processor time from other processes. Without any spinning,
    waking them takes a sixth of a small step. OpenMP reads the environment when torch is loaded, so this affects a
    process that loads torch later, and every process that it starts.
    """
    if not any(name in environment for name in WAIT_SETTINGS):
        environment.update(WAITING)


def count_usable_processors() -> int:
    """Count the processors that this process may use: its affinity, limited by the quota of its control groups.

    A quota of 1.5 counts as 2, because one thread cannot use it up.
    """
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    quota = read_processor_quota(_read_if_exists("/proc/self/cgroup"))
    return processors if quota is None else max(1, min(processors, -int(-quota // 1)))


def read_processor_quota(groups: str, root: str = CGROUPS) -> float | None:
    """Return the processor quota of control groups, the smallest of all levels; None without a quota.

    groups: lines of /proc/self/cgroup. root: mount point of control groups, version 1 or 2. In a container the groups'
    paths may be paths of the host; the mounted root is then the container's own group.
    """
    quotas = []
    for line in groups.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            quotas += [
                _divide_quota(*_read_if_exists(f"{folder}/cpu.max").split())
                for folder in _group_folders(root, path)
            ]
        elif "cpu" in controllers.split(","):
            for folder in _group_folders(f"{root}/cpu", path):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quotas.append(
                    _divide_quota(*(_read_if_exists(f"{folder}/{name}").strip() for name in names))
                )
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_folders(root: str, path: str) -> Iterator[str]:
    """Yield the folders of a control group and of its parent groups, up to the root."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        yield "/".join([root, *names[:depth]])


def _divide_quota(quota: str = "max", period: str = "") -> float | None:
    """Return quota / period, both in microseconds; None if there is no quota ("max", "-1", or no such file)."""
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _read_if_exists(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
