"""Process groups of a world: joined, made for hosts, towers and servers, and left.

torch gives every group a device of its own, and a device is a thread that watches its sockets and moves what they have
to say. A world has 16 groups and more; the threads of those that wait took 18.5 ms of processor a second and rank, and
came between those that worked. Groups of one rank, whatever its calls, may share a device: it keeps no order between
them. What bounds it is one thread's rate of copying, so what is sent ahead of a step and what belongs to it have one
each (`AHEAD`).
"""

from __future__ import annotations

import atexit
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from colonnade.comm.heartbeat import FileHeartbeats, Heartbeats, StoreHeartbeats
from colonnade.comm.mesh import (
    AHEAD,
    BY_HOST,
    IN_HOST,
    IN_TOWER,
    OF_TRAINERS,
    OVER_HOSTS,
    OVER_TOWERS,
    PURPOSES,
    Mesh,
)
from colonnade.comm.peer_status import PATIENCE, Presence, words_of
from colonnade.comm.rendezvous import HEARTBEATS, connect, meet, myself, serves_store
from colonnade.comm.shm import Mates, OthersRooms, Rooms, readable
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError, WorldError
from colonnade.topology.world import World

BACKEND = "colonnade_gloo"
"""gloo as torch has it, but for its devices, which are those given as options of the group."""
_is_registered = False
TIMEOUT = timedelta(minutes=5)


def group_beside(
    other: dist.ProcessGroup, ranks: Sequence[int] | None, timeout: timedelta
) -> dist.ProcessGroup:
    """A new group of gloo's, on the loop of `other`, or on one of its own where `other` is none of gloo's (nccl) or
    this torch does not say what its loop is.

    Collective over the world, `ranks` (None: all) those of the group; elsewhere it is `GroupMember.NON_GROUP_MEMBER`.
    """
    some = None if ranks is None else list(ranks)
    devices = _devices_of(other)
    if devices is None:
        return dist.new_group(some, timeout=timeout, backend="gloo")
    _register()
    return dist.new_group(some, timeout=timeout, backend=BACKEND, pg_options=devices)


def _devices_of(group: dist.ProcessGroup) -> Any:
    try:
        return group._get_backend(torch.device("cpu")).options._devices or None  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def _register() -> None:
    global _is_registered
    if not _is_registered:
        dist.Backend.register_backend(BACKEND, _gloo, extended_api=True, devices=["cpu", "cuda"])
        _is_registered = True


def _gloo(asked: Any, devices: Any) -> Any:
    """asked: torch's `_DistributedBackendOptions`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = devices, 2 * len(devices)  # as many as torch takes
    options._timeout = asked.timeout
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)  # type: ignore[call-overload]


_mesh: Mesh | None = None  # the world of this process, once it was joined


def open_mesh(
    *, timeout: timedelta | None = None, ranks_per_host: int | None = None, verb: str = ""
) -> Mesh:
    """Join the world that `colonnade train --ranks` or torchrun describes in the environment; without one, a world of
    one rank.

    Collective: every rank calls it first. `timeout` (default: 5 minutes): how long a rank is waited for, here and in
    every call, before it is lost. `verb`: of the command line, whose ranks join no other verb's. Where this process
    has joined already, the same world. Raises WorldError where ranks cannot work together, PeerLost, naming them, where
    some do not come.
    """
    global _mesh
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        return Mesh()
    if timeout is not None and timeout.total_seconds() <= 0:
        raise ConfigError(f"got timeout={timeout}, wanted more than 0 seconds")
    if _mesh is not None and _mesh.presence is not None:
        if timeout is not None:
            _mesh.presence.timeout = timeout.total_seconds()
        return replace(_mesh, traffic=Traffic())
    limit, rank = timeout or TIMEOUT, int(os.environ["RANK"])
    local = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    server = connect(rank, num_ranks, limit)
    token, peers = meet(server, rank, num_ranks, myself(local, verb), limit)
    if num_ranks % local:  # where hosts have told different numbers, `meet` has refused them
        raise ConfigError(
            f"got {num_ranks} ranks, {local} on each host, wanted as many on every host; "
            "give torchrun the same --nproc-per-node everywhere"
        )
    heartbeats = _open_heartbeats(server, token)
    presence = Presence(heartbeats, peers, rank, limit, serves=serves_store(rank))
    presence.start()
    # Longer than anybody waits: a call that is given up is so by its rank, which can say whose fault it is.
    longest = limit * (PATIENCE + 1)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(token, server),
            rank=rank,
            world_size=num_ranks,
            timeout=longest,
        )
    # The world may be the caller's own and speak nccl, which carries nothing that is on the CPU.
    ahead, whole = dist.new_group(timeout=longest, backend="gloo"), dist.group.WORLD
    assert whole is not None
    groups = {
        purpose: group_beside(ahead if purpose in AHEAD else whole, None, longest)
        for purpose in PURPOSES
    }
    world = World(num_hosts=num_ranks // local, ranks_per_host=local)
    for purpose in BY_HOST:
        groups |= _host_groups(purpose, groups[purpose], world, range(num_ranks), rank, longest)
    _mesh = Mesh(world, rank, groups, presence=presence)
    _mesh = replace(_mesh, mates=_open_mates(_mesh))
    atexit.register(_leave)  # gloo's threads abort a process that ends without it
    return _mesh


def _open_heartbeats(store: dist.Store, token: str) -> Heartbeats:
    if not isinstance(store, dist.TCPStore):
        return FileHeartbeats(os.environ[HEARTBEATS])
    place = f"{store.host}:{store.port}"
    return StoreHeartbeats(dist.PrefixStore(token, store.clone()), place)  # type: ignore[attr-defined]


def _open_mates(mesh: Mesh) -> Mates | None:
    """Collective: None on all ranks, where one of them cannot read a room of another one of its host: they run as
    different users, in containers of their own, or on a system that has no such memory."""
    world = mesh.world
    if world.ranks_per_host == 1:
        return None
    rooms, word = Rooms(), torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
    file = -1
    with suppress(AttributeError, WorldError):
        room = rooms.empty(word.nbytes)
        room.view(torch.int64).copy_(word)
        file = rooms.file_of(room) or -1
    heard = mesh.all_gather("control", torch.cat([torch.tensor([file]), word]))
    mates = [r for r in mesh._members(f"dense{IN_HOST}") if r != mesh.rank]
    can = all(
        readable(mesh.peers[mate].pid, int(heard[mate][0]), heard[mate][1:].numpy().tobytes())
        for mate in mates
    )
    if not mesh.least(int(can)):
        rooms.close()
        return None
    return Mates(mesh.rank, {mate: OthersRooms(mesh.peers[mate].pid) for mate in mates}, rooms)


def _host_groups(
    purpose: str,
    beside: dist.ProcessGroup,
    world: World,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta,
) -> dict[str, dist.ProcessGroup]:
    """Collective: every rank makes every group, in one order, and keeps its own. `ranks`: those of `world`, as the
    world that was joined counts them, and so `rank`, which may be none of them."""
    hosts, local = world.num_hosts, world.ranks_per_host
    if hosts == 1 or local == 1:
        return {}
    found = {}
    for host in range(hosts):
        some = ranks[host * local : (host + 1) * local]
        group = group_beside(beside, some, timeout)
        if rank in some:
            found[purpose + IN_HOST] = group
    for number in range(local):
        some = ranks[number::local]
        group = group_beside(beside, some, timeout)
        if rank in some:
            found[purpose + OVER_HOSTS] = group
    return found


def open_towers(mesh: Mesh, size: int, purposes: Sequence[str]) -> None:
    """Collective, the first time: groups of the `size` neighbours of each tower, and of the ranks of one number in
    theirs, for each of `purposes`. A group of one rank, or of all, is none: who would call it knows."""
    wanted = [
        (purpose, kind)
        for purpose in purposes
        for kind in (IN_TOWER, OVER_TOWERS)
        if f"{purpose}{kind}{size}" not in mesh.groups
    ]
    if mesh.num_ranks == 1 or not wanted:
        return
    assert mesh.presence is not None
    longest = timedelta(seconds=mesh.presence.timeout * (PATIENCE + 1))
    every = range(mesh.num_ranks)
    members = {
        IN_TOWER: [list(every[first : first + size]) for first in every[::size]],
        OVER_TOWERS: [list(every[number::size]) for number in range(size)],
    }
    for purpose, kind in wanted:
        name = f"{purpose}{kind}{size}"
        mesh.groups[name] = mesh.groups[purpose]
        if len(members[kind]) == 1:
            continue
        for some in members[kind] if len(members[kind][0]) > 1 else ():
            group = group_beside(mesh.groups[purpose], some, longest)
            if mesh.rank in some:
                mesh.groups[name] = group
                mesh.presence.only[name] = frozenset(some)


def tower_mesh(mesh: Mesh, size: int, purposes: Sequence[str] = ("dense",)) -> Mesh:
    """Collective: the ranks of this rank's tower, of `size` neighbours, as a world of their own, with the groups of
    these purposes alone; of "dense", those by host, too."""
    if size == 1:
        return Mesh(traffic=mesh.traffic)
    assert mesh.presence is not None
    longest = timedelta(seconds=mesh.presence.timeout * (PATIENCE + 1))
    local = min(size, mesh.world.ranks_per_host)
    world = replace(mesh.world, num_hosts=size // local, ranks_per_host=local)
    suffix = f"{IN_TOWER}{size}"
    for purpose in purposes:
        if purpose + suffix in mesh.groups:
            continue
        for first in range(0, mesh.num_ranks, size):
            some = range(first, first + size)
            group = group_beside(mesh.groups[purpose], some, longest)
            if mesh.rank in some:
                mesh.groups[purpose + suffix] = group
            if purpose == "dense":
                others = _host_groups(
                    purpose, mesh.groups[purpose], world, some, mesh.rank, longest
                )
                mesh.groups.update({kind + suffix: group for kind, group in others.items()})
    kinds = [
        each for purpose in purposes for each in (purpose, purpose + IN_HOST, purpose + OVER_HOSTS)
    ]
    groups = {kind: mesh.groups[kind + suffix] for kind in kinds if kind + suffix in mesh.groups}
    first, called = mesh.rank // size * size, "tower "
    members = frozenset(range(first, first + size))
    mesh.presence.only.update({called + kind: members for kind in groups})
    return Mesh(world, mesh.rank - first, groups, mesh.traffic, mesh.presence, called=called)


def with_servers(mesh: Mesh, per_host: int) -> Mesh:
    """Collective: `mesh` with the last `per_host` ranks of each host as servers, which have rows and nothing else; 0:
    the mesh as it is. Raises ConfigError, on every rank, where none would be left to train."""
    if not per_host:
        return mesh
    world = mesh.world.with_servers(per_host)
    assert mesh.presence is not None  # a world of one has no servers
    longest = timedelta(seconds=mesh.presence.timeout * (PATIENCE + 1))
    ranks, own = world.trainers, world.of_trainers()
    groups = {
        purpose: group_beside(mesh.groups[purpose], ranks, longest) for purpose in OF_TRAINERS
    }
    groups |= _host_groups("dense", mesh.groups["dense"], own, ranks, mesh.rank, longest)
    crew = Mesh(traffic=mesh.traffic)
    if mesh.rank in ranks:
        called = "trainers "
        mesh.presence.only.update({called + purpose: frozenset(ranks) for purpose in groups})
        crew = Mesh(own, ranks.index(mesh.rank), groups, mesh.traffic, mesh.presence, called=called)
    return replace(mesh, world=world, crew=crew)


@contextmanager
def host_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Collective over all of `mesh`, at both ends: the ranks of this rank's host as a world of their own, with the
    group "control" alone."""
    size = mesh.world.ranks_per_host
    world = replace(mesh.world, num_hosts=1)
    if mesh.num_ranks == size:
        yield replace(mesh, world=world)
        return
    hosts = [
        dist.new_group(list(range(host * size, (host + 1) * size)), backend="gloo")
        for host in range(mesh.world.num_hosts)
    ]
    mine = hosts[mesh.world.host(mesh.rank)]
    try:
        yield Mesh(world, mesh.rank % size, {"control": mine}, presence=mesh.presence)
    finally:
        dist.destroy_process_group(mine)


def close_mesh(mesh: Mesh) -> None:
    """Collective, but for a rank that has said that it ends: leave the world, all together. Raises PeerLost, naming it,
    where a rank does not come: for one that is stopped, with nothing left to do, torchrun would wait for ever."""
    if mesh.num_ranks == 1 or _mesh is None:
        return
    is_whole = mesh.presence is not None and not (mesh.presence.lost or mesh.presence.is_over)
    if is_whole:
        mesh.barrier()
    _leave()
    if is_whole and mesh.mates is not None:  # all have read what was for them
        mesh.mates.rooms.close()


def _leave() -> None:
    global _mesh
    mesh, _mesh = _mesh, None
    if mesh is None or mesh.presence is None:
        return
    error = getattr(sys, "last_value", None)  # that nobody caught
    mesh.presence.stop("it ended" if error is None else words_of(error))
    if not mesh.presence.lost:
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    # Calls that were given up still wait in gloo's threads, and to leave in order is to wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)
