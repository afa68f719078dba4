"""Disks that misbehave, a story for them to interrupt, and what must be true afterwards."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from logs import open_test_log

from colonnade.files.disk import Change, Disk
from colonnade.store.log.backing import LogBacking
from colonnade.store.log.stripes import Stripe

RECORD_BYTES = 24
Rows = dict[int, bytes]


def open_store(directory: Path, step: int | None, **arguments) -> LogBacking:
    """The story's store: small segments, so that it rolls over and collects garbage."""
    return open_test_log(
        directory,
        step=step,
        **dict(
            table_name="t",
            record_bytes=RECORD_BYTES,
            identity="i",
            segment_bytes=700,
            chunk_bytes=4096,
        )
        | arguments,
    )


def stripes_beside(directory: Path) -> tuple[Stripe, ...]:
    """Two directories that take the segments of the story's store."""
    return tuple(Stripe(directory.with_name(f"{directory.name}-{n}"), n) for n in (1, 2))


def make_records(ids: list[int], salt: int) -> torch.Tensor:
    """Make records (N, RECORD_BYTES) uint8 that depend on id and salt only."""
    mixed = np.array(ids, np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed + np.arange(RECORD_BYTES, dtype=np.uint64)) * np.uint64(2 * salt + 1)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint8))


def content(store: LogBacking) -> Rows:
    """Every row of the story's ids, read; a scan must agree."""
    ids = list(range(80))
    out = torch.zeros(len(ids), RECORD_BYTES, dtype=torch.uint8)
    result = store.read(torch.tensor(ids), out).wait().tolist()
    rows = {i: bytes(r) for i, ok, r in zip(ids, result, out.numpy(), strict=True) if ok}
    scanned = {
        i: bytes(r)
        for batch in store.scan()
        for i, r in zip(batch.ids.tolist(), batch.records.numpy(), strict=True)
    }
    assert scanned == rows
    return rows


# ---- the story


@dataclass
class Act:
    """One call to the store, and what it does to a dict of rows and to the set of commits."""

    name: str
    call: Callable[[LogBacking], object]
    rows: Callable[[Rows], Rows] = dict
    commits: int | None = None
    keeps: list[int] | None = None  # prune
    freezes: bool = False


def write(ids: list[int], salt: int) -> Act:
    records = make_records(ids, salt)
    news = dict(zip(ids, map(bytes, records.numpy()), strict=True))
    return Act(
        f"write {ids} {salt}",
        lambda store: store.write(torch.tensor(ids), records).wait(),
        lambda rows: rows | news,
    )


def delete(ids: list[int]) -> Act:
    return Act(
        f"delete {ids}",
        lambda store: store.delete(torch.tensor(ids)),
        lambda rows: {i: r for i, r in rows.items() if i not in ids},
    )


def commit(step: int) -> Act:
    return Act(f"commit {step}", lambda store: store.commit(step), commits=step)


def collect() -> Act:
    """All there is to do, whatever the collector's thread has done meanwhile."""
    return Act("collect", lambda store: store.collect_garbage())


def freeze() -> Act:
    """The next commit is of the rows as they are now."""
    return Act("freeze", lambda store: store.freeze(), freezes=True)


def prune(keeps: list[int]) -> Act:
    return Act(f"prune {keeps}", lambda store: store.prune(keeps), keeps=keeps)


STORY = [
    write(list(range(40)), 1),
    delete([3, 4, 5]),
    commit(10),
    write([1, 3, 50], 2),
    commit(20),
    prune([20]),
    write(list(range(30)), 3),  # more than half of the first segment dies
    write(list(range(60, 70)), 3),
    collect(),
    commit(30),
    delete(list(range(10, 40))),
    commit(40),
    prune([30, 40]),
    commit(50),
    collect(),
    write([2, 69, 70], 4),
    freeze(),
    write([2, 3, 71], 6),
    delete([1]),
    commit(55),
    delete([0]),
    commit(60),
    prune([60]),
    write([7], 5),
]


@dataclass
class Telling:
    """The story as far as it was told: rows now, rows by commit, and which commits may or must be there."""

    rows: Rows = field(default_factory=dict)
    by_step: dict[int, Rows] = field(default_factory=dict)
    may: set[int] = field(default_factory=set)
    must: set[int] = field(default_factory=set)
    frozen: Rows | None = None

    def copy(self) -> Telling:
        """Copy the state as of now; `by_step` is shared."""
        return Telling(dict(self.rows), self.by_step, set(self.may), set(self.must))

    def begin(self, act: Act) -> None:
        if act.commits is not None:
            self.may.add(act.commits)
            self.by_step[act.commits] = dict(self.rows if self.frozen is None else self.frozen)
        if act.keeps is not None:
            self.must &= set(act.keeps)

    def end(self, act: Act) -> None:
        self.rows = act.rows(self.rows)
        if act.commits is not None:
            self.must.add(act.commits)
            self.frozen = None
        if act.freezes:
            self.frozen = dict(self.rows)
        if act.keeps is not None:
            self.may &= set(act.keeps)


def check_commits(directory: Path, steps: list[int], telling: Telling) -> None:
    """Every commit that can be seen is whole; those that must be there are."""
    assert telling.must <= set(steps) <= telling.may, (steps, telling.must, telling.may)
    for step in steps:
        with open_store(directory, step, read_only=True) as store:
            assert content(store) == telling.by_step[step], step


# ---- the disks


class UnsyncedDisk(Disk):
    """Does not wait for the platter: what the system knows survives the death of a process."""

    def perform(self, change, action):
        return None if change.verb in ("sync", "sync_dir") else action()


class TracingDisk(UnsyncedDisk):
    """Writes down every change, and how far the story was told when it happened."""

    def __init__(self, telling: Telling) -> None:
        self.telling = telling
        self.changes: list[Change] = []
        self.tellings: list[Telling] = []
        self._lock = threading.Lock()

    def perform(self, change, action):
        # One at a time: the writer and the collector change the disk beside the story.
        with self._lock:
            return self._perform(change, action)

    def _perform(self, change, action):
        result = super().perform(change, action)
        self.tellings.append(self.telling.copy())
        self.changes.append(
            Change(
                change.verb,
                change.path,
                offset=change.offset,
                data=memoryview(bytes(change.data)),
                target=change.target,
            )
        )
        return result


def write_half(change: Change) -> None:
    """The file may be open for whole pages only; half of one arrives all the same."""
    if change.verb == "append":
        fd = os.open(f"/proc/self/fd/{change.file.fd}", os.O_WRONLY)
        os.pwrite(fd, change.data[: len(change.data) // 2], change.offset)
        os.close(fd)


class FailingDisk(UnsyncedDisk):
    """Refuses the n-th change and, unless `once`, all after it, until `mended`. Half of an append arrives."""

    def __init__(self, number: int, *, once: bool, error: int = errno.ENOSPC, verbs=None) -> None:
        self.number = number
        self.once = once
        self.error = error
        self.verbs = verbs
        self.count = 0
        self.num_refused = 0
        self.mended = False

    def perform(self, change, action):
        if self.verbs is None or change.verb in self.verbs:
            self.count += 1
            is_due = self.count == self.number or (not self.once and self.count > self.number)
            if is_due and not self.mended:
                self.num_refused += 1
                write_half(change)
                raise OSError(self.error, os.strerror(self.error))
        return super().perform(change, action)


class KillingDisk(UnsyncedDisk):
    """Kills this process at the n-th change; half of an append arrives."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    def perform(self, change, action):
        self.count += 1
        if self.count == self.number:
            write_half(change)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perform(change, action)


# ---- what a crash leaves behind


@dataclass
class File:
    content: bytes = b""
    synced: bytes = b""


class CrashDisk:
    """A directory as a trace builds it, and the states a crash may leave it in.

    Content that was not synced may be there, be lost, be zeros, or be torn inside the last write;
    names created, renamed or removed since the directory was synced may each be there or not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: list[File] = []
        self.names: dict[str, int] = {}  # name -> index of the file: what the running system sees
        self.synced_names: dict[str, int] = {}
        self.pending: list[Callable[[dict[str, int]], None]] = []

    def copy(self) -> CrashDisk:
        other = CrashDisk(self.directory)
        other.files = [File(file.content, file.synced) for file in self.files]
        other.names, other.synced_names = dict(self.names), dict(self.synced_names)
        other.pending = list(self.pending)
        return other

    def apply(self, change: Change, *, num_bytes: int | None = None) -> None:
        """`num_bytes`: only that much of an append."""
        name = change.path.name
        match change.verb:
            case "create":
                index = len(self.files)
                self.files.append(File())
                self._rename(lambda names: names.__setitem__(name, index))
            case "append":
                file = self.files[self.names[name]]
                data = bytes(change.data[:num_bytes])
                before = file.content.ljust(change.offset, b"\0")
                rest = before[change.offset + len(data) :]
                file.content = before[: change.offset] + data + rest
            case "truncate":
                file = self.files[self.names[name]]
                file.content = file.content[: change.offset].ljust(change.offset, b"\0")
            case "sync":
                file = self.files[self.names[name]]
                file.synced = file.content
            case "rename":
                index = self.names[name]

                def rename(names: dict[str, int]) -> None:
                    names.pop(name, None)
                    names[change.target.name] = index

                self._rename(rename)
            case "unlink":
                self._rename(lambda names: names.pop(name, None))
            case "sync_dir":
                assert change.path == self.directory
                self.synced_names = dict(self.names)
                self.pending = []
            case "lock":
                pass
            case other:
                raise AssertionError(other)

    def _rename(self, effect: Callable[[dict[str, int]], None]) -> None:
        effect(self.names)
        self.pending.append(effect)

    def states(self, rng: np.random.Generator) -> Iterator[dict[str, bytes]]:
        """Name -> content of each state worth looking at."""
        retained = [[True] * len(self.pending), [False] * len(self.pending)]
        if len(self.pending) > 1:
            retained += [(rng.random(len(self.pending)) < 0.5).tolist() for _ in range(2)]
        contents = [
            lambda file: file.content,
            lambda file: file.synced,
            lambda file: file.synced.ljust(len(file.content), b"\0"),
        ]
        if all(file.content == file.synced for file in self.files):
            contents = contents[:1]
        visited = set()
        for keep in retained:
            names = dict(self.synced_names)
            for effect, is_kept in zip(self.pending, keep, strict=True):
                if is_kept:
                    effect(names)
            for content_of in contents:
                state = {name: content_of(self.files[i]) for name, i in names.items()}
                key = tuple(sorted(state.items()))
                if key not in visited:
                    visited.add(key)
                    yield state
