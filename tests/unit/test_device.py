"""Measured speeds of this machine's tiers: measured, bounded, and nothing left behind."""

from __future__ import annotations

import errno
import os

import pytest

from colonnade.errors import StorageError
from colonnade.plan.measure.device import Device
from colonnade.planning import measure
from colonnade.planning.measure import measure_device


def test_rates_are_measured_printed_and_kept(tmp_path):
    place = tmp_path / "new" / "place"
    result = measure_device([place], scratch_bytes=8 << 20, seconds=0.01, widths=(16,))
    assert not place.exists() and not list(tmp_path.iterdir())
    (rates,) = result.directories
    assert rates.path == str(place) and rates.written > 1e6
    assert rates.processor_seconds > 0 and rates.pages > 100
    assert 0 < rates.latency < 1
    (rows,) = result.memory
    assert rows.width == 16 and rows.gathered > rows.updated > 1e4
    assert min(rows.planned, rows.packed) > 1e4
    assert Device.from_json(result.to_json()) == result
    assert "random pages/s" in str(result) and str(place) in str(result)


class StubLog:
    """Log whose reads end at once; records the rows of each, and how many reads were in flight."""

    def __init__(self):
        self.num_rows = set()
        self.num_jobs = 0
        self.max_jobs = 0

    def read(self, reader, ids, records_out, is_demand):
        self.num_rows.add(len(ids))
        self.num_jobs += 1
        self.max_jobs = max(self.max_jobs, self.num_jobs)
        return self

    def wait(self):
        self.num_jobs -= 1
        return True, None


@pytest.mark.parametrize(("rows_per_job", "num_jobs"), [(1, 1), (256, 4)])
def test_reads_are_timed_in_jobs_of_this_size(rows_per_job, num_jobs):
    log = StubLog()
    speed = measure._time_reads(log, None, 1000, rows_per_job, num_jobs, 0.01)
    assert log.num_rows == {rows_per_job}
    assert (log.num_jobs, log.max_jobs) == (0, num_jobs)
    assert speed.rows_per_second > 0 and 0 < speed.job_seconds < 1


def test_a_directory_that_is_there_stays(tmp_path):
    (tmp_path / "mine").write_text("x")
    measure.measure_directory_speed(tmp_path, scratch_bytes=8 << 20, seconds=0.005)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_fills_up_is_measured_as_far_as_it_goes(tmp_path, monkeypatch):
    real, calls = os.pwrite, []

    def full(fd, data, offset):
        calls.append(offset)
        if offset >= 5 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    rates = measure.measure_directory_speed(tmp_path, scratch_bytes=64 << 20, seconds=0.005)
    assert rates.written > 0 and max(calls) == 5 << 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_measured_is_said(number, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StorageError, match=r"place: could not measure") as caught:
        measure.measure_directory_speed(tmp_path / "place", seconds=0.005)
    assert caught.value.errno == number
    assert not list(tmp_path.iterdir())


def test_a_failing_read_is_raised(tmp_path, monkeypatch):
    real = measure._write_log

    def write_and_lose(fd, size, count):
        log = real(fd, size, count)
        os.ftruncate(fd, 0)
        return log

    monkeypatch.setattr(measure, "_write_log", write_and_lose)
    with pytest.raises(StorageError, match="reading rows failed"):
        measure.measure_directory_speed(tmp_path, scratch_bytes=8 << 20, seconds=0.005)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        measure.measure_directory_speed(tmp_path / "file", seconds=0.005)
