"""Counts of sent bytes: who receives it, how much, over which link."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from colonnade.comm.traffic import (
    Traffic,
    count_ring_sum_traffic,
    find_broadcast_children,
    link_between,
)
from colonnade.topology.world import World


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("elements", [1, 2, 5, 63, 64, 1000])
@pytest.mark.parametrize("itemsize", [1, 4, 8])
def test_a_sum_moves_each_chunk_around_the_ring_twice(size, elements, itemsize):
    sent = [
        count_ring_sum_traffic(elements * itemsize, itemsize, place, size)[0]
        for place in range(size)
    ]
    # Everything but one member's chunk passes each link, once summed and once spread.
    assert sum(sent) == 2 * (size - 1) * elements * itemsize
    assert all(item % itemsize == 0 for item in sent)


@pytest.mark.parametrize("size", range(1, 20))
def test_a_broadcast_reaches_everybody_once(size):
    reached, waiting = [0], [0]
    while waiting:
        children = find_broadcast_children(waiting.pop(), size)
        reached += children
        waiting += children
    assert sorted(reached) == list(range(size))


def test_links_follow_hosts():
    world = World(num_hosts=2, ranks_per_host=2)
    assert [link_between(world, 1, peer) for peer in range(4)] == [
        "local",
        "local",
        "remote",
        "remote",
    ]
    traffic = Traffic()
    links = [None if peer == 1 else link_between(world, 1, peer) for peer in range(4)]
    traffic.count_sent_bytes("push", links, [10 * (peer + 1) for peer in range(4)])
    traffic.count_sent_bytes("push", links[:1], [0])
    assert traffic.sent_bytes == {("push", "local"): 10, ("push", "remote"): 70}
    assert traffic.messages == {("push", "local"): 1, ("push", "remote"): 2}
    assert traffic.bytes_of("push") == 80
    assert traffic.to_dict()["bytes"] == {"push": {"local": 10, "remote": 70}}


def all_calls(mesh):
    # Two hosts, as far as the count knows.
    mesh = replace(mesh, world=World(num_hosts=3, ranks_per_host=1), traffic=Traffic())
    rows = torch.zeros(6, 5, dtype=torch.float32)
    mesh.all_to_all("fetch", rows, [1, 2, 3], [mesh.rank + 1] * 3)
    mesh.all_reduce("dense", torch.zeros(100))
    mesh.all_reduce("push", torch.zeros(3, dtype=torch.float64), traffic_tag="control")
    mesh.all_gather_bytes("checkpoint", bytes(10 * mesh.rank))
    mesh.broadcast("control", torch.zeros(4, dtype=torch.uint8))
    return dict(mesh.traffic.sent_bytes)


@pytest.mark.slow
def test_every_call_is_counted_as_what_it_is_for():
    everyone = run_ranks(3, all_calls)
    for rank, sent in enumerate(everyone):
        assert sent["fetch", "remote"] == 20 * (6 - rank - 1)
        assert sent["checkpoint", "remote"] == 2 * 8 + 2 * 20  # lengths, then padded texts
        assert ("push", "remote") not in sent
    assert sum(sent["dense", "remote"] for sent in everyone) == 2 * 2 * 400
    assert sum(sent["control", "remote"] for sent in everyone) == 2 * 2 * 24 + 2 * 4
