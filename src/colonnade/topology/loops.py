"""gloo's loop threads: groups that share one, for each costs a process 100 wakeups a second, busy or not.

torch gives every group a device of its own, and a device is a thread that watches its sockets and moves what they have
to say. A world has 16 groups and more; the threads of those that wait took 18.5 ms of processor a second and rank, and
came between those that worked. Groups of one rank, whatever its calls, may share a device: it keeps no order between
them. What bounds it is one thread's rate of copying, so what is sent ahead of a step and what belongs to it have one
each (`mesh.AHEAD`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "colonnade_gloo"
"""gloo as torch has it, but for its devices, which are those given as options of the group."""
_is_registered = False


def group_beside(
    other: dist.ProcessGroup, ranks: Sequence[int] | None, timeout: timedelta
) -> dist.ProcessGroup:
    """A new group of gloo's, on the loop of `other`, or on one of its own where `other` is none of gloo's (nccl) or
    this torch does not say what its loop is.

    Collective over the world, `ranks` (None: all) those of the group; elsewhere it is `GroupMember.NON_GROUP_MEMBER`.
    """
    some = None if ranks is None else list(ranks)
    devices = _devices_of(other)
    if devices is None:
        return dist.new_group(some, timeout=timeout, backend="gloo")
    _register()
    return dist.new_group(some, timeout=timeout, backend=BACKEND, pg_options=devices)


def _devices_of(group: dist.ProcessGroup) -> Any:
    try:
        return group._get_backend(torch.device("cpu")).options._devices or None  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def _register() -> None:
    global _is_registered
    if not _is_registered:
        dist.Backend.register_backend(BACKEND, _gloo, extended_api=True, devices=["cpu", "cuda"])
        _is_registered = True


def _gloo(asked: Any, devices: Any) -> Any:
    """asked: torch's `_DistributedBackendOptions`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = devices, 2 * len(devices)  # as many as torch takes
    options._timeout = asked.timeout
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)  # type: ignore[call-overload]
