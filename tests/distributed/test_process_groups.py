"""Process groups: one for each issuing thread and scope, and calls of several threads that overlap."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from colonnade.comm.mesh import ALL, CHANNELS, THREADS, TRAINING, Scope
from colonnade.comm.process_groups import assign_server_ranks, open_tower_scopes


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 7, 12])
@pytest.mark.parametrize("scope", [ALL, Scope(2), Scope(2, True), Scope(3), Scope(3, True)])
def test_members_of_a_scope_are_the_same_for_each_of_them(scope, num_ranks):
    groups = scope.all_members(num_ranks)
    assert sorted(rank for members in groups for rank in members) == list(range(num_ranks))
    for members in groups:
        for rank in members:
            assert scope.members(rank, num_ranks) == members


def test_blocks_within_blocks():
    """Over the hosts of a tower: 8 ranks, towers of 4, hosts of 2."""
    scope = Scope(2, is_across=True, within=4)
    assert [list(member) for member in scope.all_members(8)] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_threads_have_groups_of_their_own():
    run_ranks(4, on_two_hosts, ranks_per_host=2)


def on_two_hosts(mesh):
    threads = set(THREADS.values())
    assert {thread for thread, scope in mesh.groups if scope == ALL} == threads
    assert len(mesh.groups) == len(threads) + 4  # two threads call in hosts and over them
    assert len({id(group) for group in mesh.groups.values()}) == len(mesh.groups)
    open_tower_scopes(mesh, 2)  # towers that are hosts: nothing new
    assert len(mesh.groups) == len(threads) + 4
    assert all(dist.get_backend(group) == "gloo" for group in mesh.groups.values())
    crew = assign_server_ranks(mesh, 1).trainer_mesh
    assert mesh.rank % 2 or {thread for thread, _ in crew.groups} == {"dense", TRAINING}
    calls_overlap(mesh)


def calls_overlap(mesh):
    """Threads begin in another order on each rank; each keeps its own order."""
    by_thread = defaultdict(list)
    for number, channel in enumerate(CHANNELS):
        by_thread[THREADS[channel]].append((number, channel))
    errors = []

    def call(channels):
        try:
            for _ in range(3):
                for number, channel in channels:
                    values = torch.full((100_003,), float(number + mesh.rank))
                    mesh.all_reduce(channel, values)
                    num = mesh.num_ranks
                    assert (values == number * num + num * (num - 1) / 2).all(), channel
        except BaseException as error:
            errors.append(error)

    orders = list(by_thread.values())
    order = orders[mesh.rank % len(orders) :] + orders[: mesh.rank % len(orders)]
    workers = [threading.Thread(target=call, args=(channels,)) for channels in order]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
