"""Buckets of dense gradients: which parameters lie in which, and in what order they leave."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colonnade.topology.mesh import Mesh
from colonnade.topology.reduction import Way
from colonnade.train.coded_sum import CodedSum

BUCKET_BYTES = 1 << 20
"""A bucket takes parameters until it has as much: 8 ms on an uplink of 1 Gbit/s, where its hops take less than one."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device, neighbours in reverse order, and their gradients as one buffer."""

    numbers: list[int]  # of the parameters
    gradients: Tensor  # (n,) where the parameters are: each `.grad` is a view of it
    wire: Tensor  # (m,) on the CPU, m >= n a multiple of the ranks; `gradients` are its first n where they are there
    way: Way
    stream: torch.Stream | None  # on a device: of the copies to `wire` and back
    is_late: bool = False  # leaves at `send`
    inside: Mesh | None = None  # of a tower, whose ranks alone have it
    coded: CodedSum | None = None  # instead of `way`
    owed: Tensor | None = None
    """As `gradients`: what other ranks' residuals had kept, for the next step, on the first rank that has it."""
    owed_before: Tensor | None = None  # before the last step
    missing: int = 0  # gradients that backward has yet to add
    written: list[torch.Event] = field(default_factory=list)  # on a device: when they are
    ready: threading.Event = field(default_factory=threading.Event)
    total: float = 0.0  # after the reduction: NaN or inf where any gradient of any rank is


def bucket_layout(
    kinds: Sequence[tuple[torch.dtype, torch.device]],
    sizes: Sequence[int],
    late: Collection[int] = (),
    without: Collection[int] = (),
) -> list[list[int]]:
    """Numbers of the parameters of each bucket, in the order in which backward fills them if it goes through the model
    from its end to its beginning; `late` ones apart, behind all others. Pure. The last may carry signals: it has 32 or
    64 bits, or no parameters."""
    done = filled(kinds, sizes, [n for n in range(len(kinds)) if n not in without], late)
    if not done or kinds[done[-1][0]][0] not in (torch.float32, torch.float64):
        done.append([])
    return done


def filled(
    kinds: Sequence[tuple[torch.dtype, torch.device]],
    sizes: Sequence[int],
    numbers: Sequence[int],
    late: Collection[int] = (),
) -> list[list[int]]:
    """Pure. `bucket_layout` of these alone."""
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for number in reversed(numbers):
        kind = (*kinds[number], number in late)
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        if sum(sizes[n] for n in bucket) * kind[0].itemsize >= BUCKET_BYTES:
            done.append(filling.pop(kind))
    return sorted([*done, *filling.values()], key=lambda bucket: (bucket[-1] in late, -bucket[-1]))
