"""Memory for tensors that every step allocates: outputs, messages, gradients."""

from __future__ import annotations

import ctypes
import math
import platform

import torch
from torch import Tensor

from colonnade import _native

SMALL_BYTES = 1 << 16  # below, torch's own allocator is as fast


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a CPU tensor like torch.empty(shape), from a block of the native core if it is large.

    The core reuses a block after the last tensor that views it is gone: fresh pages cost more than writing to them (54
    MB: 32 ms of page faults instead of 3).
    """
    num_elements = math.prod(shape)
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    block = torch.as_tensor(_native.empty_bytes(num_bytes))
    return block.view(dtype).view(shape)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next step: torch's fresh outputs cost up to 27 ms of page faults a step.

    For this process, and only with glibc: blocks up to 1 GiB (32 MiB if that is its limit) come from the heap, and up
    to 1 GiB of freed heap is not returned to the system.
    """
    trim_threshold = -1
    mmap_threshold = -3
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        if not library.mallopt(mmap_threshold, 2**30):
            library.mallopt(mmap_threshold, 2**25)
        library.mallopt(trim_threshold, 2**30)
