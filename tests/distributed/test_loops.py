"""A world's groups share two of gloo's loops, and calls on them that overlap keep to themselves."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import run_ranks

from colonnade.comm import process_groups as loops
from colonnade.comm.mesh import AHEAD, PURPOSES
from colonnade.comm.process_groups import with_servers


def loops_of(groups):
    return {id(loops._devices_of(group)[0]) for group in groups}


def groups_are_few_loops(mesh):
    late = [group for purpose, group in mesh.groups.items() if purpose.split()[0] not in AHEAD]
    soon = [group for purpose, group in mesh.groups.items() if purpose.split()[0] in AHEAD]
    held = [loops._devices_of(group) for group in (*late, *soon)]  # ids are of what is alive
    assert held and len(late) + len(soon) > len(PURPOSES)
    assert len(loops_of(late)) == len(loops_of(soon)) == 1 and loops_of(late) != loops_of(soon)
    crew = with_servers(mesh, 1).crew
    assert not crew.groups or loops_of(crew.groups.values()) == loops_of(late)


def calls_overlap(mesh):
    # In another order on each rank, and all under way at once: a thread that kept them in order would wait for ever.
    work, sums = [], {}
    for purpose in PURPOSES if mesh.rank % 2 else PURPOSES[::-1]:
        sums[purpose] = torch.full((100_003,), float(PURPOSES.index(purpose) + mesh.rank))
        work.append(dist.all_reduce(sums[purpose], group=mesh.groups[purpose], async_op=True))
    for each in work:
        each.wait()
    num = mesh.num_ranks
    for number, purpose in enumerate(PURPOSES):
        assert (sums[purpose] == number * num + num * (num - 1) / 2).all(), purpose


def groups_of_another_torch(mesh):
    # One that does not say what a group's devices are.
    loops._devices_of = lambda group: None
    group = loops.group_beside(mesh.groups["control"], None, timedelta(seconds=60))
    assert dist.get_backend(group) == "gloo"
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(mesh.num_ranks)] * 3


def test_beside_a_group_of_nccl(monkeypatch):
    """Whose world's default backend carries nothing that is on the CPU."""
    asked = {}
    monkeypatch.setattr(dist, "new_group", lambda ranks, **said: asked.update(said))
    loops.group_beside(object(), None, timedelta(seconds=60))
    assert asked["backend"] == "gloo"


def test_groups_share_loops():
    run_ranks(4, on_two_hosts, ranks_per_host=2)


def on_two_hosts(mesh):
    groups_are_few_loops(mesh)
    calls_overlap(mesh)
    groups_of_another_torch(mesh)
