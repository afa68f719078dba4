"""roofline.cc, built when the bench runs, beside the tables of `kernels_colonnade`: same rows, same ids, same threads.

Legend: T tables, F features, E lookups, U unique rows.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch  # before the library: its OpenMP runtime is the one used
from torch import Tensor

SOURCE = Path(__file__).resolve().parents[1] / "roofline.cc"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
HINTS = {"none": 0, "t0": 1, "t1": 2, "t2": 3, "nta": 4, "write": 5}
DISTANCES = (8, 16, 32, 64)
SWEEPS = 2
"""Times that each setting is tried; its best counts."""

I64, I64_P, U32_P, F32_P = (
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_float),
)


class _Gather(ctypes.Structure):
    _fields_ = (
        ("bases", I64_P), ("stride_bytes", I64), ("index", U32_P),
        ("num_features", I64), ("num_bags", I64), ("bag", I64),
        ("out", F32_P), ("feature_floats", I64), ("bag_floats", I64), ("distance", I64),
    )  # fmt: skip


class _Update(ctypes.Structure):
    _fields_ = (
        ("bases", I64_P), ("stride_bytes", I64), ("state_bases", I64_P), ("state_stride_bytes", I64),
        ("slots", U32_P), ("offsets", I64_P), ("num_tables", I64),
        ("gradients", F32_P), ("gradient_lines", I64), ("one", ctypes.c_float), ("sums", F32_P),
        ("distance", I64),
    )  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Memory of rows and of their state."""

    dim: int
    bases: Tensor  # (T,) int64 addresses
    stride_bytes: int
    state_bases: Tensor  # (T,) int64 addresses
    state_stride_bytes: int


@dataclass(frozen=True)
class Lookup:
    """One batch, planned."""

    index: Tensor  # (E,) int32 (uint32 bits), feature-major
    slots: Tensor  # (U,) int32 (uint32 bits), in planned order
    offsets: Tensor  # (T + 1,) int64


@dataclass
class Task:
    """A workload's outputs and their gradients."""

    num_bags: int  # of a feature
    bag: int  # lookups summed into one output row
    out: Tensor
    feature_floats: int
    bag_floats: int
    gradients: Tensor
    sums: Tensor = field(default_factory=lambda: torch.empty(256, 16))


Setting = tuple[int, int]
"""hint, distance"""


class Roofline:
    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        with tempfile.TemporaryDirectory(prefix="colonnade-roofline-") as folder:
            self.library = ctypes.CDLL(str(build(Path(folder))))

    def gather(self, rows: Rows, batch: Lookup, o: Task, setting: Setting) -> None:
        hint, distance = setting
        work = _Gather(
            _at(rows.bases, I64_P), rows.stride_bytes, _at(batch.index, U32_P), len(rows.bases),
            o.num_bags, o.bag, _at(o.out, F32_P), o.feature_floats, o.bag_floats, distance,
        )  # fmt: skip
        self._call(self.library.gather, rows, hint, work)

    def update(self, rows: Rows, batch: Lookup, o: Task, setting: Setting) -> None:
        hint, distance = setting
        work = _Update(
            _at(rows.bases, I64_P), rows.stride_bytes,
            _at(rows.state_bases, I64_P), rows.state_stride_bytes,
            _at(batch.slots, U32_P), _at(batch.offsets, I64_P), len(batch.offsets) - 1,
            _at(o.gradients, F32_P), o.gradients.numel() // 16, 1.0, _at(o.sums, F32_P), distance,
        )  # fmt: skip
        self._call(self.library.update, rows, hint, work)

    def _call(
        self, function: Callable[..., int], rows: Rows, hint: int, work: ctypes.Structure
    ) -> None:
        lines, rest = divmod(rows.dim * 4, 64)
        if rest or function(lines, hint, self.num_threads, ctypes.byref(work)):
            raise ValueError(f"roofline.cc has no loop for dim {rows.dim}")


def settings(names: Sequence[str]) -> list[Setting]:
    return [(0, 0), *product([HINTS[name] for name in names], DISTANCES)]


GATHER_SETTINGS = settings(("t0", "t1", "t2", "nta"))
UPDATE_SETTINGS = settings(("t0", "t1", "nta", "write"))

Batch = TypeVar("Batch")


def sweep(
    run: Callable[[Batch, Setting], None], batches: Sequence[Batch], over: Sequence[Setting]
) -> Setting:
    """The fastest setting. Every try takes the next batch, so that none finds its rows in the cache."""
    best = {setting: float("inf") for setting in over}
    for i, setting in enumerate(list(over) * SWEEPS):
        start = time.perf_counter()
        run(batches[i % len(batches)], setting)
        best[setting] = min(best[setting], time.perf_counter() - start)
    return min(best, key=best.__getitem__)


def build(folder: Path) -> Path:
    """The library, for this processor. RuntimeError with the compiler's words.

    $CXX, else `c++`: what CMake takes for the core on the same machine.
    """
    library = folder / "roofline.so"
    command = [os.environ.get("CXX", "c++"), *FLAGS, str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr[-500:]}")
    return library


def _at(tensor: Tensor, kind: type) -> ctypes._Pointer:
    return ctypes.cast(tensor.data_ptr(), kind)
