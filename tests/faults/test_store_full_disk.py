"""A disk that refuses: the call that met it changes nothing, the store stays usable, the last commit is intact."""

from __future__ import annotations

import errno

import pytest
from disks import STORY, FailingDisk, Telling, check_commits, commit, content, open_store, write

from colonnade.errors import StorageError
from colonnade.store.disk import Disk
from colonnade.store.durable import read_verified, write_durably
from colonnade.store.manifest import committed_steps


def tell(directory, disk: FailingDisk) -> Telling:
    """The whole story on a bad disk; whatever is refused is tried again once the disk is mended."""
    telling = Telling()
    store = None
    while store is None:
        try:
            store = open_store(directory, None, disk=disk)
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


@pytest.mark.parametrize("once", [True, False], ids=["once", "until mended"])
def test_no_space_at_every_change_of_the_disk(tmp_path, once):
    number, was_refused = 1, True
    while was_refused:
        directory = tmp_path / str(number)
        disk = FailingDisk(number, once=once)
        telling = tell(directory, disk)
        was_refused = disk.num_refused > 0
        check_commits(directory, committed_steps(directory), telling)
        with open_store(directory, 999) as store:
            assert content(store) == telling.rows
        number += 1
    assert number > 60


def test_what_a_failed_write_left_behind_is_cut_off(tmp_path):
    """Half of a large batch reaches the file; less than that is written after it, or nothing at all."""
    for later in ([], [1], [1, 2, 3]):
        directory = tmp_path / str(len(later))
        disk = FailingDisk(3, once=True, verbs={"append"})  # header, first rows, then this
        with open_store(directory, None, disk=disk) as store:
            write([7], 1).call(store)
            with pytest.raises(StorageError, match="append"):
                write(list(range(20)), 2).call(store)
            if later:
                write(later, 3).call(store)
            rows = content(store)
            assert sorted(rows) == sorted([7, *later])
            store.commit(1)
        with open_store(directory, 1) as store:
            assert content(store) == rows


def test_a_segment_whose_sync_failed_is_never_committed(tmp_path):
    """After a failed fsync the system may hold the pages for clean although the disk never got them."""
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
                assert disk.lost not in manifest.read_text()
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
