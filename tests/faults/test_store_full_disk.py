"""A disk that refuses: the call that met it changes nothing, the store stays usable, the last commit is intact."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch
from disks import (
    STORY,
    FailingDisk,
    Telling,
    UnsyncedDisk,
    check_commits,
    commit,
    content,
    make_records,
    open_store,
    stripes_beside,
    write,
)

from colonnade.errors import StorageError
from colonnade.files.disk import Disk
from colonnade.files.durable import read_verified, write_durably
from colonnade.store.log.manifest import committed_steps
from colonnade.store.log.writer import LogWriter


def tell(directory, disk: FailingDisk, **arguments) -> Telling:
    """The whole story on a bad disk; whatever is refused is tried again once the disk is mended."""
    telling = Telling()
    store = None
    while store is None:
        try:
            store = open_store(directory, None, disk=disk, **arguments)
        except StorageError as error:
            check_error(error, disk)
            disk.mended = True
    for act in [*STORY, commit(999)]:
        telling.begin(act)
        try:
            act.call(store)
        except StorageError as error:
            check_error(error, disk)
            if act.keeps is None:
                assert content(store) == telling.rows, act.name
                assert store.commits() == sorted(telling.must), act.name
                if telling.must:
                    check_commits(
                        directory, [max(telling.must)], telling_of(telling, max(telling.must))
                    )
            disk.mended = True
            try:
                if telling.frozen is not None and act.commits is not None and disk.number % 2:
                    raise StorageError("do not try again; Thaw")
                act.call(store)
            except StorageError as again:  # also where a sync failed: what was frozen is given up
                assert "Thaw" in str(again)
                store.thaw()
                telling.frozen = None
                telling.begin(act)
                act.call(store)
        telling.end(act)
        assert content(store) == telling.rows, act.name
    store.close()
    return telling


def telling_of(telling: Telling, step: int) -> Telling:
    return Telling(by_step=telling.by_step, may={step}, must={step})


def check_error(error: StorageError, disk: FailingDisk) -> None:
    assert error.errno == disk.error
    assert "could not" in str(error) and "/" in str(error) and "intact" in str(error)
    assert "steps committed, if there are any" in str(error) and "same --run" in str(error)


@pytest.mark.parametrize(
    "once",
    [pytest.param(True, id="once", marks=pytest.mark.slow), pytest.param(False, id="until mended")],
)
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_no_space_at_every_change_of_the_disk(tmp_path, once, stride):
    number, was_refused = 1 + int(once), True
    while was_refused:
        directory = tmp_path / str(number)
        disk = FailingDisk(number, once=once)
        telling = tell(directory, disk)
        was_refused = disk.num_refused > 0
        check_commits(directory, committed_steps(directory), telling)
        with open_store(directory, 999) as store:
            assert content(store) == telling.rows
        number += stride
    assert number > 60


def test_no_space_in_one_of_several_directories(tmp_path):
    number, was_refused = 3, True
    while was_refused:
        directory = tmp_path / str(number)
        disk = FailingDisk(number, once=number % 2 == 0)
        telling = tell(directory, disk, stripes=stripes_beside(directory))
        was_refused = disk.num_refused > 0
        check_commits(directory, committed_steps(directory), telling)  # found by the manifest
        with open_store(directory, 999) as store:
            assert content(store) == telling.rows
        number += 11
    assert number > 60


def test_a_full_disk_loses_nothing_that_was_written(tmp_path):
    """Rows wait in memory up to a limit; then writes say what the disk said, and go on when it does."""
    disk = FailingDisk(3, once=False, verbs={"append"})
    writer = LogWriter(pending_bytes=40_000)
    rows = {}
    with open_store(tmp_path, None, disk=disk, writer=writer, segment_bytes=20_000) as store:
        with pytest.raises(StorageError, match="could not append: No space") as caught:
            for salt in range(1000):
                act = write(list(range(80)), salt)
                act.call(store)
                rows = act.rows(rows)
        check_error(caught.value, disk)
        assert 40_000 <= writer.pending_bytes < 50_000
        assert content(store) == rows
        with pytest.raises(StorageError, match="No space"):
            store.commit(1)
        assert content(store) == rows and store.commits() == []
        disk.mended = True
        for salt in range(1000, 1100):
            act = write(list(range(80)), salt)
            act.call(store)
            rows = act.rows(rows)
        assert content(store) == rows
        store.commit(1)
        assert writer.pending_bytes == 0 and writer.stall_seconds > 0
    with open_store(tmp_path, 1) as store:
        assert content(store) == rows


def test_room_is_waited_for_no_longer_than_asked(tmp_path):
    class SlowDisk(UnsyncedDisk):
        gate = threading.Event()

        def perform(self, change, action):
            if change.verb == "append" and change.path.name.startswith("segment"):
                self.gate.wait()
            return super().perform(change, action)

    writer = LogWriter(pending_bytes=8192)
    with open_store(tmp_path, None, disk=SlowDisk(), writer=writer, segment_bytes=9000) as store:
        for salt in range(5):
            store.log.write(torch.arange(80), make_records(list(range(80)), salt), None, 0)
        assert writer.wait_for_room(timeout=0.05) is False
        SlowDisk.gate.set()
        assert writer.wait_for_room(timeout=30) is True
        assert writer.pending_bytes <= 8192


def test_a_disk_that_became_read_only(tmp_path):
    """EROFS at every change from some moment on, as after an error of the device."""
    with open_store(tmp_path, None) as store:
        write(list(range(40)), 1).call(store)
        store.commit(1)
        rows = content(store)
    with pytest.raises(
        StorageError, match=r"Read-only file system. Choose a directory on a writable"
    ):
        open_store(tmp_path, 1, disk=FailingDisk(1, once=False, error=errno.EROFS))
    with open_store(tmp_path, 1, read_only=True) as store:
        assert content(store) == rows
    disk = FailingDisk(2, once=False, error=errno.EROFS, verbs={"append"})
    with open_store(tmp_path, 1, disk=disk) as store:
        act = write(list(range(20)), 2)
        act.call(store)
        for _ in range(2):
            with pytest.raises(StorageError, match="Read-only file system"):
                store.commit(2)
        assert content(store) == act.rows(rows)
    with open_store(tmp_path, 1) as store:
        assert content(store) == rows


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="writable for this user"):
        open_store(tmp_path / "store", None)


def test_directories_that_are_refused(tmp_path):
    for error, words in (
        (errno.EACCES, "writable for this user"),
        (errno.EROFS, "writable file system"),
    ):
        for number in (1, 2, 3):
            disk = FailingDisk(number, once=False, error=error)
            with pytest.raises(StorageError, match=words):
                open_store(tmp_path / f"{error}-{number}" / "store", None, disk=disk)


@pytest.mark.slow
def test_a_segment_whose_sync_failed_is_never_committed(tmp_path):
    """System, after a failed fsync, may hold the pages for clean although the disk never got them."""
    number = 1
    while True:
        directory = tmp_path / str(number)

        class LosingDisk(FailingDisk):
            lost = None

            def perform(self, change, action):
                try:
                    return super().perform(change, action)
                except OSError:
                    self.lost = change.path.name
                    raise

        disk = LosingDisk(number, once=True, error=errno.EIO, verbs={"sync"})
        telling = tell(directory, disk)
        check_commits(directory, committed_steps(directory), telling)
        if disk.lost is None:
            break
        if disk.lost.startswith("segment"):
            for manifest in directory.glob("manifest-*.json"):
                assert disk.lost.replace(".keys", ".rows") not in manifest.read_text()
        number += 1
    assert number > 8


def test_a_durable_file_is_the_old_one_or_the_new_one(tmp_path):
    path = tmp_path / "commit.json"
    write_durably(Disk(), path, b"old")
    number = 1
    while True:
        disk = FailingDisk(number, once=False)
        try:
            write_durably(disk, path, b"new")
        except StorageError as error:
            assert error.errno == errno.ENOSPC
            assert read_verified(path) in (b"old", b"new")
            write_durably(Disk(), path, b"old")
        else:
            break
        number += 1
    assert number == 7  # unlink, create, append, sync, rename, sync_dir
    assert read_verified(path) == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["commit.json"]
