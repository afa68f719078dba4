"""Whatever instruction a crash hits: every commit that can be seen is whole, and none that returned is missing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from disks import (
    STORY,
    CrashDisk,
    KillingDisk,
    Telling,
    TracingDisk,
    UnsyncedDisk,
    check_commits,
    commit,
    content,
    make_records,
    open_store,
    stripes_beside,
    write,
)

from colonnade.files.disk import Change, Disk
from colonnade.store.log.manifest import committed_steps, list_commit_files, read_manifest_fields


def go_on(directory: Path, steps: list[int], telling: Telling) -> None:
    """A run that takes over: opens the newest commit for writing, writes, commits, comes back."""
    newest = max(steps, default=None)
    rows = telling.by_step[newest] if newest is not None else {}
    with open_store(directory, newest, disk=UnsyncedDisk()) as store:
        assert store.commits() == steps
        assert content(store) == rows
        for act in (write([1, 77], 9), commit(1000)):
            act.call(store)
            rows = act.rows(rows)
        store.prune([1000])
    with open_store(directory, 1000) as store:
        assert content(store) == rows


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_trace_of_writes_and_syncs_cut_at_every_point(tmp_path, stride):
    directory = tmp_path / "store"
    directory.mkdir()
    telling = Telling()
    disk = TracingDisk(telling)
    store = open_store(directory, None, disk=disk)
    for act in STORY:
        telling.begin(act)
        act.call(store)
        telling.end(act)
    store.close()
    verbs = {change.verb for change in disk.changes}
    assert verbs >= {"create", "append", "sync", "rename", "unlink", "sync_dir"}

    rng = np.random.default_rng(0)
    crashed = CrashDisk(directory)
    num_states = 0
    for number, (change, so_far) in enumerate(zip(disk.changes, disk.tellings, strict=True)):
        for num_bytes in cuts_of(change) if number % stride == 0 else ():
            torn = crashed.copy()
            if num_bytes:
                torn.apply(change, num_bytes=num_bytes)
            for state in torn.states(rng):
                where = tmp_path / f"crash-{num_states}"
                where.mkdir()
                for name, data in state.items():
                    (where / name).write_bytes(data)
                steps = committed_steps(where)
                check_commits(where, steps, so_far)
                if num_states % 5 == 0:
                    go_on(where, steps, so_far)
                shutil.rmtree(where)
                num_states += 1
        crashed.apply(change)
    for path in directory.iterdir():  # the model of the disk is the disk's
        assert (
            path.name == "LOCK"
            or path.read_bytes() == crashed.files[crashed.names[path.name]].content
        )
    assert num_states > 300 / stride


def cuts_of(change: Change) -> list[int]:
    """Return the cuts before an operation and, for a write, inside it."""
    if change.verb != "append":
        return [0]
    return sorted({0, 1, len(change.data) // 2, len(change.data) - 1})


def told_until_killed(directory: Path, number: int, **arguments) -> tuple[Telling, bool]:
    """Tell the story in a child that dies at its n-th change of the disk; did it die?"""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = open_store(directory, None, disk=KillingDisk(number), **arguments)
            for act in STORY:
                os.write(write_end, b"b")
                act.call(store)
                os.write(write_end, b"e")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        marks = pipe.read()
    _, status = os.waitpid(child, 0)
    telling = Telling()
    for i, mark in enumerate(marks):
        act = STORY[i // 2]
        (telling.begin if mark == ord("b") else telling.end)(act)
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or len(marks) == 2 * len(STORY)
    return telling, was_killed


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_change_of_the_disk(tmp_path, stride):
    number, was_killed = 1, True
    while was_killed:
        directory = tmp_path / str(number)
        telling, was_killed = told_until_killed(directory, number)
        steps = committed_steps(directory)
        check_commits(directory, steps, telling)
        go_on(directory, steps, telling)
        number += stride
    assert number > 60


@pytest.mark.slow
def test_killed_with_several_directories(tmp_path):
    number, was_killed = 3, True
    while was_killed:
        directory = tmp_path / str(number)
        stripes = stripes_beside(directory)
        telling, was_killed = told_until_killed(directory, number, stripes=stripes)
        steps = committed_steps(directory)
        check_commits(directory, steps, telling)
        newest = max(steps, default=None)
        with open_store(directory, newest, stripes=stripes) as store:
            rows = telling.by_step[newest] if newest is not None else {}
            assert content(store) == rows
            write([5, 71], 9).call(store)
            store.commit(1000)
            store.prune([1000])
            rows = content(store)
        with open_store(directory, 1000, stripes=stripes) as store:  # and leftovers are gone
            assert content(store) == rows
            residuals = {p for s in stripes for p in s.directory.glob("segment-*")}
            assert residuals == {
                f.path for f in list_commit_files(directory, read_manifest_fields(directory, 1000))
            }
        number += 9
    assert number > 60


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_a_random_moment(tmp_path, seed):
    """No seam: the child writes and commits as fast as it can until a signal from outside."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = open_store(tmp_path, None)
            for step in range(1, 100_000):
                ids = list(range(step % 7, 40 + step % 7))
                store.write(torch.tensor(ids), make_records(ids, step))
                store.commit(step)
                os.write(write_end, b".")
                store.prune([step])
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        pipe.read(1)
        time.sleep(float(np.random.default_rng(seed).uniform(0.0, 0.15)))
        os.kill(child, signal.SIGKILL)
        returned = 1 + len(pipe.read())
    os.waitpid(child, 0)
    steps = committed_steps(tmp_path)
    assert returned <= max(steps) <= returned + 1
    with open_store(tmp_path, max(steps)) as store:  # and the lock died with the child
        rows = content(store)
    expected = {}
    for step in range(1, max(steps) + 1):
        ids = list(range(step % 7, 40 + step % 7))
        expected.update(zip(ids, map(bytes, make_records(ids, step).numpy()), strict=True))
    assert rows == expected


def test_a_new_directory_is_durable_before_the_store_is(tmp_path):
    class Watching(Disk):
        made: list[Path] = []  # noqa: RUF012
        synced: list[Path] = []  # noqa: RUF012

        def perform(self, change, action):
            if change.verb == "make_dir":
                self.made.append(change.path)
            if change.verb == "sync_dir":
                self.synced.append(change.path)
            return action()

    open_store(tmp_path / "a" / "b", None, disk=Watching()).close()
    assert Watching.made == [tmp_path / "a", tmp_path / "a" / "b"]
    assert Watching.synced[:2] == [tmp_path, tmp_path / "a"]
