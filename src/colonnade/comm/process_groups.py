"""Process groups of a world: joined, made for hosts, towers and servers, and left.

torch gives every gloo group a thread that watches its sockets, which costs a process about 1 ms of processor a second.
So there is one group for each thread that issues calls (`mesh.THREADS`) and scope, not one for each channel.
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

import torch
import torch.distributed as dist

from colonnade.comm.heartbeat import FileHeartbeats, Heartbeats, StoreHeartbeats
from colonnade.comm.mesh import ALL, CHANNELS, THREADS, TRAINING, Mesh, Scope
from colonnade.comm.peer_status import PATIENCE, Presence, words_of
from colonnade.comm.rendezvous import HEARTBEATS, connect, meet, myself, serves_store
from colonnade.comm.shm import Mates, OthersRooms, Rooms, readable
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError, WorldError
from colonnade.topology.world import World

TIMEOUT = timedelta(minutes=5)
ISSUERS = (*THREADS.values(), TRAINING)
BY_HOST = ("dense", TRAINING)
"""Threads that issue calls among the ranks of a host, and among those of one number in their hosts."""
OF_TRAINERS = ("dense", TRAINING)
"""Threads that issue calls on `Mesh.trainers`."""


def make_groups(
    groups: dict[tuple[str, Scope], dist.ProcessGroup],
    threads: Sequence[str],
    scopes: Sequence[Scope],
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta,
) -> None:
    """Make the groups of these threads and scopes that `groups` has not, and keep this rank's in it.

    Collective over the world that was joined: every rank makes every group, in one order. `ranks`: those of the mesh,
    as the joined world counts them, and so `rank`, which may be none of them. A scope of one rank, or of all, has none:
    who would call it knows. gloo's, for nccl, which a caller's own world may speak, carries nothing that is on the CPU.
    """
    for thread in threads:
        for scope in scopes:
            if (thread, scope) in groups:
                continue
            for members in scope.all_members(len(ranks)):
                if scope != ALL and len(members) in (1, len(ranks)):
                    continue
                some = [ranks[member] for member in members]
                group = dist.new_group(some, timeout=timeout, backend="gloo")
                if rank in some:
                    groups[thread, scope] = group


def _host_scopes(world: World, within: int = 0) -> tuple[Scope, ...]:
    """Return the scopes in and over hosts; none where one of them is all ranks."""
    local = world.ranks_per_host
    if world.num_hosts == 1 or local == 1:
        return ()
    return Scope(local, within=within), Scope(local, is_across=True, within=within)


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
    world, every = World(num_hosts=num_ranks // local, ranks_per_host=local), range(num_ranks)
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    make_groups(groups, ISSUERS, [ALL], every, rank, longest)
    make_groups(groups, BY_HOST, _host_scopes(world), every, rank, longest)
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
    mates = [r for r in mesh.in_host.members(mesh.rank, mesh.num_ranks) if r != mesh.rank]
    can = all(
        readable(mesh.peers[mate].pid, int(heard[mate][0]), heard[mate][1:].numpy().tobytes())
        for mate in mates
    )
    if not mesh.least(int(can)):
        rooms.close()
        return None
    return Mates(mesh.rank, {mate: OthersRooms(mesh.peers[mate].pid) for mate in mates}, rooms)


def _timeout(mesh: Mesh) -> timedelta:
    """Return how long a call may take: longer than anybody waits, for whoever gives up can say whose fault it is."""
    assert mesh.presence is not None
    return timedelta(seconds=mesh.presence.timeout * (PATIENCE + 1))


def open_scopes(mesh: Mesh, size: int) -> None:
    """Open the scopes of towers of `size` neighbours for the training thread: the ranks of each tower, and those of one
    number in theirs. Collective, the first time.
    """
    scopes = [Scope(size), Scope(size, is_across=True)]
    small = [s for s in scopes if 1 < len(s.members(mesh.rank, mesh.num_ranks)) < mesh.num_ranks]
    if all((TRAINING, scope) in mesh.groups for scope in small):
        return
    assert mesh.presence is not None
    every = range(mesh.num_ranks)
    make_groups(mesh.groups, [TRAINING], scopes, every, mesh.rank, _timeout(mesh))
    for scope in small:
        members = frozenset(scope.members(mesh.rank, mesh.num_ranks))
        for channel in CHANNELS:
            mesh.presence.only[mesh.label(channel, scope)] = members


def tower_mesh(mesh: Mesh, size: int, threads: Sequence[str] = ("dense",)) -> Mesh:
    """Return the ranks of this rank's tower, of `size` neighbours, as a world of their own.

    Collective. It has the groups of these threads alone; of "dense", those by host, too.
    """
    if size == 1:
        return Mesh(traffic=mesh.traffic)
    assert mesh.presence is not None
    local = min(size, mesh.world.ranks_per_host)
    world = replace(mesh.world, num_hosts=size // local, ranks_per_host=local)
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    for thread in threads:
        inside = {ALL: Scope(size)}
        if thread == "dense":
            within = size if size < mesh.num_ranks else 0
            inside |= dict(zip(_host_scopes(world), _host_scopes(world, within), strict=True))
        make_groups(
            mesh.groups, [thread], list(inside.values()), range(mesh.num_ranks), mesh.rank, _timeout(mesh)
        )  # fmt: skip
        groups |= {(thread, own): mesh.group(thread, scope) for own, scope in inside.items()}
    first, called = mesh.rank // size * size, "tower "
    tower = Mesh(world, mesh.rank - first, groups, mesh.traffic, mesh.presence, called=called)
    _restrict(tower, range(first, first + size))
    return tower


def _restrict(mesh: Mesh, ranks: Sequence[int]) -> None:
    """Let no other rank be blamed for a call on this mesh."""
    assert mesh.presence is not None
    for channel in CHANNELS:
        for scope in (ALL, mesh.in_host, mesh.over_hosts):
            mesh.presence.only[mesh.called + mesh.label(channel, scope)] = frozenset(ranks)


def with_servers(mesh: Mesh, per_host: int) -> Mesh:
    """Collective: `mesh` with the last `per_host` ranks of each host as servers, which have rows and nothing else; 0:
    the mesh as it is. Raises ConfigError, on every rank, where none would be left to train."""
    if not per_host:
        return mesh
    world = mesh.world.with_servers(per_host)
    assert mesh.presence is not None  # a world of one has no servers
    ranks, own = world.trainers, world.of_trainers()
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    scopes = [ALL, *_host_scopes(own)]
    make_groups(groups, OF_TRAINERS, scopes, ranks, mesh.rank, _timeout(mesh))
    crew = Mesh(traffic=mesh.traffic)
    if mesh.rank in ranks:
        called = "trainers "
        crew = Mesh(own, ranks.index(mesh.rank), groups, mesh.traffic, mesh.presence, called=called)
        _restrict(crew, ranks)
    return replace(mesh, world=world, crew=crew)


@contextmanager
def host_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Collective over all of `mesh`, at both ends: the ranks of this rank's host as a world of their own, with the
    training thread's group alone."""
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
        yield Mesh(world, mesh.rank % size, {(TRAINING, ALL): mine}, presence=mesh.presence)
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
