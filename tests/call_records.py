"""Records of the collectives that each rank begins, and their comparison.

A rank appends a line for each call to a file of its own, so that the records of a rank that hangs or is killed can be
read, too. The ranks of a process group must begin the same operations of each channel in the same order. The caller is
printed with a difference, but not compared: two places may make the same call.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colonnade.comm import mesh as meshes
from colonnade.comm.mesh import ALL, THREADS, Mesh, Scope
from colonnade.comm.peer_status import PeerMonitor

FOLDER = "COLONNADE_CALL_RECORDS"
"""Variable that names the folder of the records; without it nothing is recorded."""
END = "end"
"""Line of a rank that has returned and lost no other: it will begin no further call."""
CONTEXT = 3
"""Calls before a difference that are printed with it."""

_begin_call = Mesh._begin_call
_lock = threading.Lock()
_files: dict[str, int] = {}
"""Files of this process in `_folder`, by name."""
_folder = ""
_monitor: PeerMonitor | None = None
"""Monitor of the newest call in `_folder`."""
_children_folder: Path | None = None


def start_recording() -> None:
    """Record the calls of this process, if the environment names a folder when they are made."""
    Mesh._begin_call = _record_and_begin  # type: ignore[method-assign]


def end_record() -> None:
    """Declare that this rank makes no further call: the others must have made as many."""
    folder = os.environ.get(FOLDER, "")
    if folder == _folder and _monitor is not None and not _monitor.lost:
        _append(folder, _monitor, END)


def _record_and_begin(
    mesh: Mesh, channel: str, start_call: Callable[..., Any], scope: Scope = ALL
) -> Any:
    folder, monitor = os.environ.get(FOLDER), mesh.peer_monitor
    if folder and monitor is not None and not monitor.lost:
        group = mesh.group(THREADS[channel], scope)
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        call = group.group_name, ranks, mesh.prefix + mesh.call_name(channel, scope)
        _append(folder, monitor, "\t".join((*call, _describe(start_call), _find_caller())))
    return _begin_call(mesh, channel, start_call, scope)


def _append(folder: str, monitor: PeerMonitor, line: str) -> None:
    global _folder, _monitor
    pids = monitor.peers[0].pid, monitor.peers[-1].pid  # others where ranks are started again
    name = f"{pids[0]}-{pids[1]} {monitor.rank}"
    with _lock:
        if folder != _folder:
            while _files:
                os.close(_files.popitem()[1])
            os.makedirs(folder, exist_ok=True)
        if name not in _files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            _files[name] = os.open(os.path.join(folder, name), flags, 0o600)
        _folder, _monitor = folder, monitor
        os.write(_files[name], (line + "\n").encode())


def _describe(start_call: Any) -> str:
    """Describe a collective: its name, and the tensor that all ranks must have of one size."""
    name, tensor = start_call.func.__name__, start_call.args[-1]
    if name == "all_to_all_single":
        return name
    return f"{name} {str(tensor.dtype).partition('.')[2]} x {tensor.numel()}"


def _find_caller() -> str:
    """Return the file and line outside `mesh.py` that makes the call."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == meshes.__file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def find_differences(folder: Path, *, are_stuck: bool = False) -> list[str]:
    """Compare the records of a folder; return a text for each channel of a group in which ranks differ.

    A rank may have begun fewer calls than another one, unless both have ended, or ranks `are_stuck`.
    """
    calls: dict[tuple[str, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    ended = set()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        world, rank = path.name.split()
        for line in path.read_text(encoding="utf-8").splitlines():
            *key, operation = line.split("\t", 3)
            if line == END:
                ended.add((world, int(rank)))
            elif operation.count("\t") == 1:  # not torn by the end of the process
                calls[(world, *key)][int(rank)].append(operation)
    texts = []
    for (world, _, members, channel), by_rank in calls.items():
        ranks = [int(rank) for rank in members.split(",")]
        are_complete = are_stuck or all((world, rank) in ended for rank in ranks)
        number = _find_difference([by_rank[rank] for rank in ranks], are_complete)
        if number is not None:
            texts.append(_describe_difference(channel, by_rank, ranks, number))
    return texts


def _find_difference(calls_by_rank: Sequence[Sequence[str]], are_complete: bool) -> int | None:
    """Return the first call in which ranks differ; None if there is none."""
    lengths = [len(calls) for calls in calls_by_rank]
    for number in range(min(lengths)):
        if len({calls[number].partition("\t")[0] for calls in calls_by_rank}) > 1:
            return number
    return min(lengths) if are_complete and min(lengths) < max(lengths) else None


def _describe_difference(
    channel: str, calls_by_rank: Mapping[int, Sequence[str]], ranks: Sequence[int], number: int
) -> str:
    lines = [f"ranks {ranks} differ in call {number + 1} of channel {channel!r}:"]
    for rank in ranks:
        calls = calls_by_rank[rank]
        lines.append(f"  rank {rank}:" + ("" if number < len(calls) else " made no such call"))
        for at in range(max(0, number - CONTEXT), min(number + 1, len(calls))):
            operation, _, caller = calls[at].partition("\t")
            lines.append(f"    {at + 1}. {operation} from {caller}")
    return "\n".join(lines)


def check_records(folder: Path, *, are_stuck: bool = False) -> None:
    """Raise AssertionError where ranks differ in their calls."""
    differences = find_differences(folder, are_stuck=are_stuck)
    assert not differences, "\n".join(differences)


def children_folder() -> Path:
    """Return the folder of the records of processes that the current test starts."""
    global _children_folder
    if _children_folder is None:
        _children_folder = Path(tempfile.mkdtemp(prefix="calls-"))
        atexit.register(shutil.rmtree, _children_folder, ignore_errors=True)
    return _children_folder


def check_children() -> None:
    """Compare the records of processes that the current test has started, and delete them."""
    if _children_folder is not None:
        try:
            check_records(_children_folder)
        finally:
            for path in _children_folder.iterdir():
                path.unlink()
