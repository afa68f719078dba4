"""Predictions of towers for worlds that do not run: the formulas, and what must hold of them whatever the links."""

from __future__ import annotations

import pytest

from colonnade.errors import ConfigError
from colonnade.plan.towers.forecast import (
    flat_seconds,
    forecast_exchange_seconds,
    predict_tower_seconds,
)
from colonnade.topology.world import World


def world(hosts: int, ranks: int = 8, **links: float) -> World:
    link_settings = {
        "local_bytes_per_second": 4e11,
        "remote_bytes_per_second": 8 * 5e10,
        "message_seconds": 3e-6,
        "remote_message_seconds": 1e-5,
    }
    return World(num_hosts=hosts, ranks_per_host=ranks, **{**link_settings, **links})


def test_one_tower_a_host_is_the_formula_by_hand():
    """G ranks, L on each of T hosts, V bytes a rank: (G-L) a_x + V (1-1/T) / b_x, and (L-1) a_i + V (L-1) / (L b_i)
    + (T-1) a_x + V (1-1/T) / (CR b_x)."""
    local, size = world(8), 1e8
    assert flat_seconds(local, size) == pytest.approx(56 * 1e-5 + size * 7 / 8 / 5e10)
    for ratio in (1, 4):
        assert predict_tower_seconds(local, size, 8, ratio=ratio) == pytest.approx(
            7 * 3e-6 + size * 7 / 8 / 4e11 + 7 * 1e-5 + size * 7 / 8 / (ratio * 5e10)
        )


def test_without_latency_towers_alone_save_nothing_and_modules_save_what_they_compress():
    quick = {"message_seconds": 0.0, "remote_message_seconds": 0.0}
    text = forecast_exchange_seconds(
        world(8, **quick, local_bytes_per_second=1e18), num_tables=26, floats=26 * 128, samples=4096
    )
    assert text.num_towers == 8
    assert text.towers == pytest.approx(text.flat, rel=1e-6)
    for ratio, seconds in text.modules.items():
        assert text.flat / seconds == pytest.approx(ratio, rel=1e-6)


def test_more_latency_and_more_compression_favour_towers():
    def gain(**links: float) -> float:
        text = forecast_exchange_seconds(
            world(64, **links), num_tables=64, floats=64 * 128, samples=2048
        )
        assert text.towers > text.modules[2] > text.modules[4] > text.modules[8]
        return text.flat / text.towers

    assert gain(remote_message_seconds=1e-4) > gain(remote_message_seconds=1e-5) > 1


def test_fewer_tables_than_hosts_make_towers_of_several_hosts():
    text = forecast_exchange_seconds(world(64), num_tables=26, floats=26 * 128, samples=2048)
    assert text.num_towers == 16
    assert forecast_exchange_seconds(world(13), num_tables=5, floats=10, samples=1).num_towers == 1
    # One tower of the whole world sends what flat sends, but for what stays inside hosts.
    local = world(2, 1)
    assert predict_tower_seconds(local, 1e6, 1) == pytest.approx(flat_seconds(local, 1e6))


def test_worlds_of_which_nothing_can_be_said():
    with pytest.raises(ConfigError, match="world of 1 host"):
        forecast_exchange_seconds(world(1), num_tables=3, floats=3, samples=1)
    with pytest.raises(ConfigError, match="0 tables"):
        forecast_exchange_seconds(world(2), num_tables=0, floats=3, samples=1)
