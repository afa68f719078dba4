"""Sums over ranks: one order for every way and layout of hosts, bytes as foretold, uneven hosts refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from colonnade import World, open_mesh
from colonnade.comm import process_groups
from colonnade.comm.collectives import (
    choose_sum_algorithm,
    estimate_sum_traffic,
    sum_blocks_in_order,
)
from colonnade.errors import ConfigError
from colonnade.planning.choices import estimate_reduction_seconds

WAYS = ("whole", "scattered", "by host")


def tree(parts):
    """The slow twin: neighbours in pairs, one by one."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


@pytest.mark.parametrize("hosts, local", [*itertools.product((1, 2, 3, 5), (1, 2, 3, 4, 6))])
def test_the_order_of_additions(hosts, local):
    parts = torch.randn(hosts, local, 7) * 10 ** torch.randn(hosts, local, 7)
    wanted = tree([tree(of_host) for of_host in parts])
    assert torch.equal(sum_blocks_in_order(parts), wanted)
    if local in (1, 2, 4) or hosts == 1:  # whatever the layout of so many ranks
        assert torch.equal(wanted, tree(parts.flatten(0, 1)))


def test_the_way_follows_the_links():
    world = World(num_hosts=4, ranks_per_host=2)
    # Signals alone: messages are all that counts.
    assert choose_sum_algorithm(World(num_hosts=2, ranks_per_host=2), 12) == "whole"
    assert choose_sum_algorithm(World(num_hosts=8, ranks_per_host=8), 12) == "by host"
    assert choose_sum_algorithm(world, 1 << 20) == "by host"
    assert choose_sum_algorithm(World(ranks_per_host=8), 1 << 20) == "scattered"
    assert choose_sum_algorithm(World(num_hosts=8), 1 << 20) == "scattered"
    # Hosts joined as fast as their ranks are: nothing to save on the uplink, and more to do inside.
    fast = replace(world, num_hosts=2, remote_bytes_per_second=1e12, local_bytes_per_second=1e8)
    assert choose_sum_algorithm(fast, 1 << 20) == "scattered"


@pytest.mark.parametrize("hosts, local", [(2, 2), (4, 2), (8, 8), (125, 8)])
def test_by_host_a_byte_crosses_an_uplink_once_per_host(hosts, local):
    world, size = World(num_hosts=hosts, ranks_per_host=local), 1 << 20
    uplink = {way: local * estimate_sum_traffic(way, world, size).remote_bytes for way in WAYS}
    assert uplink["by host"] == pytest.approx(2 * size * (hosts - 1) / hosts)
    assert uplink["scattered"] == pytest.approx(local * uplink["by host"])


def test_seconds_of_coded_gradients_follow_their_bytes():
    world = World(num_hosts=2, ranks_per_host=2, remote_message_seconds=0, message_seconds=0)
    model = nn.Linear(1023, 1000)  # about a million weights
    exact = estimate_sum_traffic("by host", world, 4_096_000)
    assert estimate_reduction_seconds(model, world, "exact") == pytest.approx(
        exact.predict_seconds(world), rel=0.01
    )
    for name, part in (("bf16", 1 / 2), ("fp16", 1 / 2), ("int8", 1 / 4)):
        inside = exact.local_bytes / world.local_bytes_per_second
        between = part * 2 * exact.remote_bytes / world.remote_bytes_per_second
        result = estimate_reduction_seconds(model, world, name)
        assert result == pytest.approx(inside + between, rel=0.02)
    halves = model.bfloat16()  # as they are
    assert estimate_reduction_seconds(halves, world, "int8") == estimate_reduction_seconds(
        halves, world, "exact"
    )
    assert estimate_reduction_seconds(model, World(), "int8") == 0


def test_weights_inside_towers_cost_the_uplink_nothing():
    world = World(num_hosts=2, ranks_per_host=2, remote_message_seconds=0, message_seconds=0)
    model = nn.Sequential(nn.Linear(999, 1000), nn.Linear(999, 1000))
    one, every = estimate_reduction_seconds(model[0], world, "exact"), list(model[1].parameters())
    tower = World(ranks_per_host=2, message_seconds=0)
    share = estimate_reduction_seconds(model[1], tower, "exact") / 2
    assert estimate_reduction_seconds(model, world, "exact", every, 2) == pytest.approx(one + share)
    assert estimate_reduction_seconds(model, world, "exact", every, 4) == pytest.approx(one)
    assert estimate_reduction_seconds(model, world, "exact", every, 1) == pytest.approx(2 * one)


def test_ranks_that_do_not_fill_their_hosts_are_refused(monkeypatch):
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_groups, "connect_store", lambda *place: None)
    monkeypatch.setattr(process_groups, "join_rendezvous", lambda *ranks: ("met", []))
    with pytest.raises(ConfigError, match=r"got 3 ranks, 2 on each host.*nproc-per-node"):
        open_mesh()
