"""What this machine has: plain facts, as a run's folder keeps them and `colonnade doctor` explains them."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from colonnade import _native
from colonnade.processors import usable_processors

FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")
LIBRARIES = ("colonnade", "torch", "numpy", "pyarrow")
IO_URING_SETUP = 425
ENOSYS = 38


def machine_facts(place: Path) -> dict[str, Any]:
    """Plain values: processor, memory, huge pages, io_uring, the disk that `place` lies on, GPU, versions.

    A fact that cannot be had is None. Sizes in bytes.
    """
    processor = _processor()
    disk = _disk(place)
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor["name"],
        "features": processor["features"],
        "processors": os.cpu_count(),
        "usable_processors": usable_processors(),
        "threads": _native.num_threads(),
        "isa": _native.isa(),
        "isas": list(_native.available_isas()),
        "memory_bytes": _memory("MemTotal"),
        "available_memory_bytes": _memory("MemAvailable"),
        "memory_limit_bytes": _memory_limit(),
        "huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "io_uring": _io_uring(),
        "disk": str(place.resolve()),
        "disk_bytes": disk[0],
        "disk_free_bytes": disk[1],
        "disk_rotates": _rotates(place),
        "gpus": _gpus(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def _gpus() -> list[str]:
    """Names of NVIDIA's GPUs, as their driver lists them. Asking torch would take two seconds to import it."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.partition(":")[::2] for line in (_read(path) or "").splitlines())
        names.append(fields.get("Model", "unknown model").strip())
    return names


def _processor() -> dict[str, Any]:
    """Linux says; elsewhere the name alone."""
    name, flags = platform.processor() or platform.machine(), set()
    text = _read(Path("/proc/cpuinfo")) or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return {"name": name, "features": [feature for feature in FEATURES if feature in flags]}


def _memory(key: str) -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _memory_limit() -> int | None:
    """Of this container, where it has one."""
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (_read(Path(place)) or "").strip()
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _chosen(path: Path) -> str | None:
    """The word in brackets."""
    text = _read(path) or ""
    return text.split("[")[1].split("]")[0] if "[" in text else None


def _io_uring() -> str:
    """ "yes", or why not: asked of the kernel itself, since containers often forbid it."""
    if sys.platform != "linux":
        return "no: Linux only"
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    fd = libc.syscall(IO_URING_SETUP, 1, parameters)
    if fd >= 0:
        os.close(fd)
        return "yes"
    number = ctypes.get_errno()
    if number == ENOSYS:
        return "no: this kernel or container does not know it"
    disabled = (_read(Path("/proc/sys/kernel/io_uring_disabled")) or "").strip()
    switched = f", kernel.io_uring_disabled is {disabled}" if disabled not in ("", "0") else ""
    return f"no: {os.strerror(number)}{switched}"


def _disk(place: Path) -> tuple[int | None, int | None]:
    """(all, free) bytes of the file system of the nearest folder that exists."""
    folder = place.resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.total, usage.free


def _rotates(place: Path) -> bool | None:
    """Whether it is a disk with a head to move."""
    try:
        number = os.stat(place if place.exists() else place.parent).st_dev
    except OSError:
        return None
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for where in (device, device / ".."):
        text = (_read(where / "queue" / "rotational") or "").strip()
        if text:
            return text == "1"
    return None


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
