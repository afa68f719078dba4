"""A simulation says what its arithmetic says: hosts by bytes, seconds by the slowest of what works side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colonnade.plan.cost.prediction import (
    FRAME_BYTES,
    HEADER_BYTES,
    Machine,
    SampleCost,
    simulate_training,
)
from colonnade.store.compaction import MAX_RECORDS_PER_ROW

WORK = SampleCost(seconds=1e-5, moved_seconds=2e-6, rows=20.0, row_floats=100.0, record_bytes=412.0)
MACHINE = Machine(memory_bytes=400e9, ssd_bytes=8e12, ranks=16, uplink=1.25e9, pages=500_000)


def test_hosts_by_bytes_and_seconds_by_the_slowest():
    memory, disks = simulate_training(100e12, WORK, MACHINE, 65_536)
    assert memory.rows == disks.rows == 1e12
    assert memory.hosts == pytest.approx(1e12 * (412 + HEADER_BYTES) / 400e9, abs=1)
    spare = MAX_RECORDS_PER_ROW  # what stores do
    assert disks.hosts == pytest.approx(1e12 * (412 + FRAME_BYTES) * spare / 8e12, abs=1)
    assert memory.ranks == 16 * memory.hosts and memory.disk_seconds == 0
    for item in (memory, disks):
        slowest = max(item.compute_seconds, item.link_seconds, item.disk_seconds)
        assert item.samples_per_second == pytest.approx(65_536 / slowest)
        assert item.synchronous <= item.samples_per_second
    assert disks.disk_seconds == pytest.approx(65_536 / disks.hosts * 20 / 500_000)
    assert disks.compute_seconds == pytest.approx(65_536 / disks.ranks * (1e-5 + 20 * 2e-6))


def test_one_host_needs_no_link_and_no_disk_is_no_choice():
    (only,) = simulate_training(1e9, WORK, replace(MACHINE, ssd_bytes=0), 1024)
    assert (only.hosts, only.link_seconds) == (1, 0.0)
    assert only.samples_per_second == only.synchronous == pytest.approx(1024 / only.compute_seconds)
