"""Links: what is fitted is what was put in; every rank measures the same world; what people write of one is read."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from ranks import run_ranks

from colonnade import World
from colonnade.comm.process_groups import open_mesh
from colonnade.errors import ConfigError
from colonnade.planning.measure import (
    MESSAGE_SIZES,
    build_planned_world,
    fit_message_cost,
    measure_links,
)
from colonnade.sizes import parse_byte_rate


def measured(mesh):
    apart = World(num_hosts=2, ranks_per_host=mesh.num_ranks // 2)
    return measure_links(mesh), measure_links(replace(mesh, world=apart))


@pytest.mark.parametrize("rate", [1e7, 1.25e8, 4e9])
def test_a_link_that_keeps_to_its_law_is_found(rate):
    seconds = [3e-4 + size / rate for size in MESSAGE_SIZES]
    fixed, result = fit_message_cost(MESSAGE_SIZES, seconds)
    assert result == pytest.approx(rate, rel=1e-6)
    assert fixed == pytest.approx(3e-4, abs=MESSAGE_SIZES[0] / rate * 1.01)


def test_one_slow_exchange_of_a_small_size_does_not_move_the_rate():
    seconds = [3e-4 + size / 1e8 for size in MESSAGE_SIZES]
    seconds[1] *= 3
    assert fit_message_cost(MESSAGE_SIZES, seconds)[1] == pytest.approx(1e8, rel=0.02)


def test_ranks_agree_on_their_links():
    results = run_ranks(2, measured)
    assert results[0] == results[1]
    together, apart = results[0]
    assert together.origin == apart.origin == "measured"
    assert 1e6 < together.local_bytes_per_second < 1e12 and 0 < together.message_seconds < 1
    assert 1e6 < apart.remote_bytes_per_second < 1e12 and 0 < apart.remote_message_seconds < 1
    for world in (together, apart):
        assert 0 < world.message_processor_seconds < 1 and 0 < world.byte_processor_seconds < 1e-5
        assert world.crowding >= 1.0
    # There is no link of the other class.
    assert together.remote_bytes_per_second == World().remote_bytes_per_second
    assert apart.local_bytes_per_second == World().local_bytes_per_second


@pytest.mark.slow
def test_links_between_hosts_are_told_from_those_inside():
    results = run_ranks(4, measured)
    assert len({repr(link) for link in results}) == 1
    world = results[0][1]
    assert 1e6 < world.remote_bytes_per_second < 1e12 and 0 < world.remote_message_seconds < 1
    assert 1e6 < world.local_bytes_per_second < 1e12 and 0 < world.message_seconds < 1


def test_a_world_of_one_measures_nothing():
    assert "WORLD_SIZE" not in os.environ
    assert measure_links(open_mesh()) == World()


@pytest.mark.parametrize(
    "text, rate",
    [("1Gbit", 1.25e8), ("10 Gbit/s", 1.25e9), ("100mbit", 1.25e7), ("5GB/s", 5e9), ("125MB", 1.25e8),
     ("2GiB/s", 2**31), ("25gbits", 3.125e9)],
)  # fmt: skip
def test_rates_as_people_write_them(text, rate):
    assert parse_byte_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    ["", "fast", "0", "-1Gbit", "1Gbitter", "GB/s", "nan", "1e999", "100mbps", "5", "1e9", "5B/s"],
)
def test_no_rates(text):
    with pytest.raises(ValueError, match="wanted a rate such as 1Gbit"):
        parse_byte_rate(text)


def test_planned_worlds():
    world = build_planned_world("2x4", uplink_rate="10Gbit", local_rate="5GB/s")
    assert (world.num_hosts, world.ranks_per_host, world.origin) == (2, 4, "planned")
    assert world.remote_bytes_per_second == 1.25e9
    assert build_planned_world("3").num_ranks == 3 and build_planned_world("3").num_hosts == 1
    for wrong in ("", "0x2", "2x0", "2x", "a", "2x2x2", "-1"):
        with pytest.raises(ConfigError, match="HOSTSxRANKS"):
            build_planned_world(wrong)
    with pytest.raises(ConfigError, match="uplink: got"):
        build_planned_world("2x2", uplink_rate="quick")


def test_a_world_without_speed_is_refused():
    with pytest.raises(ConfigError, match="more than 0"):
        World(num_hosts=2, remote_bytes_per_second=0)


def test_a_world_in_words_fits_a_terminal():
    assert str(World()) == "1 rank: nothing is sent"
    assert "between hosts" not in str(World(ranks_per_host=2))
    assert "125 MB/s a host" in str(World(num_hosts=2, ranks_per_host=2))
