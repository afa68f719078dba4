"""Facts about this machine, for a run's folder and `colonnade doctor`."""

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
from colonnade.errors import ConfigError
from colonnade.processors import count_usable_processors

FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")
LIBRARIES = ("colonnade", "torch", "numpy", "pyarrow")
IO_URING_SETUP = 425
ENOSYS = 38

MAX_WORKERS = 256
"""Limit on threads, or processes, of one setting, or 8 for each usable processor if that is more."""


def check_worker_count(setting_name: str, num_workers: int) -> int:
    """Return a number of threads or processes. Raises ConfigError for so many that starting them would bring down this
    process, or the machine."""
    processors = count_usable_processors()
    limit = max(MAX_WORKERS, 8 * processors)
    if num_workers > limit:
        raise ConfigError(
            f"{setting_name}: got {num_workers:,}, wanted at most {limit:,} on this machine of {processors} "
            "usable processors; "
            "give about one per processor"
        )
    return num_workers


def collect_machine_facts(path: Path) -> dict[str, Any]:
    """Collect processor, memory, huge pages, io_uring, the disk of `path`, GPUs and versions.

    An unknown fact is None. Sizes are in bytes.
    """
    processor = _read_processor_facts()
    disk = _read_disk_usage(path)
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor["name"],
        "features": processor["features"],
        "processors": os.cpu_count(),
        "usable_processors": count_usable_processors(),
        "threads": _native.num_threads(),
        "isa": _native.isa(),
        "isas": list(_native.available_isas()),
        "memory_bytes": _read_memory_info("MemTotal"),
        "available_memory_bytes": _read_memory_info("MemAvailable"),
        "memory_limit_bytes": _read_memory_limit(),
        "huge_pages": _read_bracketed_choice(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "io_uring": _check_io_uring(),
        "disk": str(path.resolve()),
        "disk_bytes": disk[0],
        "disk_free_bytes": disk[1],
        "disk_rotates": _is_hard_disk(path),
        "gpus": _list_gpus(),
        "python": sys.version.split()[0],
        "versions": {name: _package_version(name) for name in LIBRARIES},
    }


def _list_gpus() -> list[str]:
    """List the names of NVIDIA GPUs from their driver's files. Importing torch instead would take two seconds."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(
            line.partition(":")[::2] for line in (_read_text_or_none(path) or "").splitlines()
        )
        names.append(fields.get("Model", "unknown model").strip())
    return names


def _read_processor_facts() -> dict[str, Any]:
    """Read the processor's name and features; other systems than Linux give the name alone."""
    name = platform.processor() or platform.machine()
    flags = set()
    text = _read_text_or_none(Path("/proc/cpuinfo")) or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return {"name": name, "features": [feature for feature in FEATURES if feature in flags]}


def _read_memory_info(key: str) -> int | None:
    for line in (_read_text_or_none(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _read_memory_limit() -> int | None:
    """Read the memory limit of this container; None if it has none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (_read_text_or_none(Path(path)) or "").strip()
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _read_bracketed_choice(path: Path) -> str | None:
    """Read the word in brackets from a file, which is the current choice."""
    text = _read_text_or_none(path) or ""
    return text.split("[")[1].split("]")[0] if "[" in text else None


def _check_io_uring() -> str:
    """Call io_uring and return "yes" or why not. Containers often forbid what the kernel supports."""
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
    disabled = (_read_text_or_none(Path("/proc/sys/kernel/io_uring_disabled")) or "").strip()
    switched = f", kernel.io_uring_disabled is {disabled}" if disabled not in ("", "0") else ""
    return f"no: {os.strerror(number)}{switched}"


def _read_disk_usage(path: Path) -> tuple[int | None, int | None]:
    """Return total and free bytes of the file system of the nearest existing folder."""
    folder = path.resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.total, usage.free


def _is_hard_disk(path: Path) -> bool | None:
    """Return whether the disk of a path is a hard disk; None if unknown."""
    try:
        number = os.stat(path if path.exists() else path.parent).st_dev
    except OSError:
        return None
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for folder in (device, device / ".."):
        text = (_read_text_or_none(folder / "queue" / "rotational") or "").strip()
        if text:
            return text == "1"
    return None


@cache
def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read_text_or_none(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
