"""Process groups of a world: join it, create groups for hosts, towers and servers, and leave it.

torch creates a thread for each gloo group that watches its sockets and takes about 1 ms of processor time per second.
So there is one group for each scope and each thread that issues calls (`mesh.THREADS`), not one for each channel.
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
from colonnade.comm.peer_status import PATIENCE, PeerMonitor, format_error
from colonnade.comm.rendezvous import (
    HEARTBEATS,
    connect_store,
    describe_this_rank,
    join_rendezvous,
    serves_store,
)
from colonnade.comm.shm import BufferPool, PeerBuffers, SharedMemory, can_read_buffer
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError, WorldError
from colonnade.topology.world import World

TIMEOUT = timedelta(minutes=5)
ISSUING_THREADS = tuple(dict.fromkeys(THREADS.values()))
HOST_SCOPE_THREADS = ("dense", TRAINING)
"""Threads that issue calls inside hosts, and across hosts among the ranks with the same local rank."""
TRAINER_THREADS = ("dense", TRAINING)
"""Threads that issue calls on `Mesh.trainers`."""


def create_process_groups(
    process_groups: dict[tuple[str, Scope], dist.ProcessGroup],
    threads: Sequence[str],
    scopes: Sequence[Scope],
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta,
) -> None:
    """Create the missing groups of these threads and scopes, and store this rank's groups in `process_groups`.

    Collective over the joined world: every rank creates every group, in the same order. `ranks`: the mesh's ranks,
    numbered as in the joined world; `rank` is numbered likewise and need not be in the mesh. Scopes of one rank, or
    other than ALL with all ranks, get no group. Groups use gloo even if the caller's own world uses nccl, which cannot
    send CPU tensors.
    """
    for thread in threads:
        for scope in scopes:
            if (thread, scope) in process_groups:
                continue
            for members in scope.all_members(len(ranks)):
                if scope != ALL and len(members) in (1, len(ranks)):
                    continue
                group_ranks = [ranks[member] for member in members]
                group = dist.new_group(group_ranks, timeout=timeout, backend="gloo")
                if rank in group_ranks:
                    process_groups[thread, scope] = group


def _host_scopes(world: World, within: int = 0) -> tuple[Scope, ...]:
    """Return the scopes inside hosts and across hosts; none if one of them contains all ranks."""
    local = world.ranks_per_host
    if world.num_hosts == 1 or local == 1:
        return ()
    return Scope(local, within=within), Scope(local, is_across=True, within=within)


_joined_mesh: Mesh | None = None  # the world that this process has joined


def open_mesh(
    *, timeout: timedelta | None = None, ranks_per_host: int | None = None, verb: str = ""
) -> Mesh:
    """Join the world that `colonnade train --ranks` or torchrun describes in the environment; without one, return a
    world of one rank.

    Collective: every rank calls it first. `timeout` (default: 5 minutes): how long to wait for a rank, here and in
    every call, before it counts as lost. `verb`: command-line verb, to refuse ranks that run another verb. Further
    calls in a process return the same world. Raises WorldError if the ranks cannot work together, and PeerLost, which
    names them, if ranks are missing.
    """
    global _joined_mesh
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        return Mesh()
    if timeout is not None and timeout.total_seconds() <= 0:
        raise ConfigError(f"got timeout={timeout}, wanted more than 0 seconds")
    if _joined_mesh is not None and _joined_mesh.peer_monitor is not None:
        if timeout is not None:
            _joined_mesh.peer_monitor.timeout = timeout.total_seconds()
        return replace(_joined_mesh, traffic=Traffic())
    limit = timeout or TIMEOUT
    rank = int(os.environ["RANK"])
    local = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    server = connect_store(rank, num_ranks, limit)
    token, peers = join_rendezvous(server, rank, num_ranks, describe_this_rank(local, verb), limit)
    # `join_rendezvous` has already rejected hosts with different numbers of ranks.
    if num_ranks % local:
        raise ConfigError(
            f"got {num_ranks} ranks, {local} on each host, wanted the same number on every host; "
            "give torchrun the same --nproc-per-node everywhere"
        )
    heartbeats = _open_heartbeats(server, token)
    monitor = PeerMonitor(heartbeats, peers, rank, limit, serves=serves_store(rank))
    monitor.start()
    # Longer than any wait of Mesh, so that the rank gives up before gloo does, and can name the cause.
    longest = limit * (PATIENCE + 1)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(token, server),
            rank=rank,
            world_size=num_ranks,
            timeout=longest,
        )
    world = World(num_hosts=num_ranks // local, ranks_per_host=local)
    ranks = range(num_ranks)
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    create_process_groups(groups, ISSUING_THREADS, [ALL], ranks, rank, longest)
    create_process_groups(groups, HOST_SCOPE_THREADS, _host_scopes(world), ranks, rank, longest)
    _joined_mesh = Mesh(world, rank, groups, peer_monitor=monitor)
    _joined_mesh = replace(_joined_mesh, shared_memory=_open_shared_memory(_joined_mesh))
    atexit.register(_leave_world)  # without it gloo's threads abort the process at its end
    return _joined_mesh


def _open_heartbeats(store: dist.Store, token: str) -> Heartbeats:
    if not isinstance(store, dist.TCPStore):
        return FileHeartbeats(os.environ[HEARTBEATS])
    address = f"{store.host}:{store.port}"
    return StoreHeartbeats(dist.PrefixStore(token, store.clone()), address)  # type: ignore[attr-defined]


def _open_shared_memory(mesh: Mesh) -> SharedMemory | None:
    """Open shared memory with the ranks of this host. Collective.

    Returns None on all ranks if any rank cannot read a buffer of another rank of its host: for example because they run
    as different users or in separate containers, or the system has no memfd."""
    world = mesh.world
    if world.ranks_per_host == 1:
        return None
    pool = BufferPool()
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
    fd = -1
    with suppress(AttributeError, WorldError):
        buffer = pool.allocate_buffer(token.nbytes)
        buffer.view(torch.int64).copy_(token)
        fd = pool.fd_of(buffer) or -1
    probes = mesh.all_gather("control", torch.cat([torch.tensor([fd]), token]))
    peers = [r for r in mesh.host_scope.members(mesh.rank, mesh.num_ranks) if r != mesh.rank]
    can_read_all = all(
        can_read_buffer(mesh.peers[r].pid, int(probes[r][0]), probes[r][1:].numpy().tobytes())
        for r in peers
    )
    if not mesh.min_over_ranks(int(can_read_all)):
        pool.close()
        return None
    return SharedMemory(mesh.rank, {r: PeerBuffers(mesh.peers[r].pid) for r in peers}, pool)


def _call_timeout(mesh: Mesh) -> timedelta:
    """Return gloo's limit of a call: longer than any wait of Mesh, so that the rank gives up first and names the
    cause."""
    assert mesh.peer_monitor is not None
    return timedelta(seconds=mesh.peer_monitor.timeout * (PATIENCE + 1))


def open_tower_scopes(mesh: Mesh, tower_size: int) -> None:
    """Open two scopes for the training thread: each tower of `tower_size` neighbours, and the ranks with the same
    local rank in all towers. Collective, the first time.
    """
    scopes = [Scope(tower_size), Scope(tower_size, is_across=True)]
    proper = [s for s in scopes if 1 < len(s.members(mesh.rank, mesh.num_ranks)) < mesh.num_ranks]
    if all((TRAINING, scope) in mesh.groups for scope in proper):
        return
    assert mesh.peer_monitor is not None
    ranks = range(mesh.num_ranks)
    create_process_groups(mesh.groups, [TRAINING], scopes, ranks, mesh.rank, _call_timeout(mesh))
    for scope in proper:
        members = frozenset(scope.members(mesh.rank, mesh.num_ranks))
        for channel in CHANNELS:
            mesh.peer_monitor.participants[mesh.call_name(channel, scope)] = members


def open_tower_mesh(mesh: Mesh, tower_size: int, threads: Sequence[str] = ("dense",)) -> Mesh:
    """Return a mesh of the ranks of this rank's tower, which has `tower_size` neighbours. Collective.

    It has groups for these threads only; for "dense" also the groups inside and across hosts.
    """
    if tower_size == 1:
        return Mesh(traffic=mesh.traffic)
    assert mesh.peer_monitor is not None
    local = min(tower_size, mesh.world.ranks_per_host)
    world = replace(mesh.world, num_hosts=tower_size // local, ranks_per_host=local)
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    for thread in threads:
        outer_scopes = {ALL: Scope(tower_size)}
        if thread == "dense":
            within = tower_size if tower_size < mesh.num_ranks else 0
            outer_scopes |= dict(zip(_host_scopes(world), _host_scopes(world, within), strict=True))
        create_process_groups(
            mesh.groups,
            [thread],
            list(outer_scopes.values()),
            range(mesh.num_ranks),
            mesh.rank,
            _call_timeout(mesh),
        )
        groups |= {
            (thread, scope): mesh.group(thread, outer) for scope, outer in outer_scopes.items()
        }
    first = mesh.rank // tower_size * tower_size
    prefix = "tower "
    tower = Mesh(world, mesh.rank - first, groups, mesh.traffic, mesh.peer_monitor, prefix=prefix)
    _set_participants(tower, range(first, first + tower_size))
    return tower


def _set_participants(mesh: Mesh, ranks: Sequence[int]) -> None:
    """Register `ranks` as the participants of all calls on this mesh, so that no other rank is blamed for them."""
    assert mesh.peer_monitor is not None
    for channel in CHANNELS:
        for scope in (ALL, mesh.host_scope, mesh.cross_host_scope):
            mesh.peer_monitor.participants[mesh.prefix + mesh.call_name(channel, scope)] = (
                frozenset(ranks)
            )


def assign_server_ranks(mesh: Mesh, servers_per_host: int) -> Mesh:
    """Return `mesh` with the last `servers_per_host` ranks of each host as servers, which only serve rows. Collective.

    per_host=0 returns the mesh unchanged. Raises ConfigError, on every rank, if no rank would remain to train."""
    if not servers_per_host:
        return mesh
    world = mesh.world.with_servers(servers_per_host)
    assert mesh.peer_monitor is not None  # a world of one has no servers
    trainers = world.trainers
    trainer_world = world.trainer_world()
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = {}
    scopes = [ALL, *_host_scopes(trainer_world)]
    create_process_groups(groups, TRAINER_THREADS, scopes, trainers, mesh.rank, _call_timeout(mesh))
    trainer_mesh = Mesh(traffic=mesh.traffic)
    if mesh.rank in trainers:
        rank = trainers.index(mesh.rank)
        trainer_mesh = Mesh(
            trainer_world, rank, groups, mesh.traffic, mesh.peer_monitor, prefix="trainers "
        )
        _set_participants(trainer_mesh, trainers)
    return replace(mesh, world=world, trainer_mesh=trainer_mesh)


@contextmanager
def open_host_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Open a mesh of the ranks of this rank's host, for the training thread only. Entry and exit are collective over
    all ranks of `mesh`."""
    size = mesh.world.ranks_per_host
    world = replace(mesh.world, num_hosts=1)
    if mesh.num_ranks == size:
        yield replace(mesh, world=world)
        return
    host_groups = [
        dist.new_group(list(range(host * size, (host + 1) * size)), backend="gloo")
        for host in range(mesh.world.num_hosts)
    ]
    own_group = host_groups[mesh.world.host(mesh.rank)]
    try:
        yield Mesh(
            world, mesh.rank % size, {(TRAINING, ALL): own_group}, peer_monitor=mesh.peer_monitor
        )
    finally:
        dist.destroy_process_group(own_group)


def close_mesh(mesh: Mesh) -> None:
    """Leave the world together with all other ranks. Collective, except for ranks that have announced their end.

    Raises PeerLost, which names the rank, if one is missing: torchrun would wait forever for a rank that is stopped in
    its last instructions."""
    if mesh.num_ranks == 1 or _joined_mesh is None:
        return
    is_complete = mesh.peer_monitor is not None and not (
        mesh.peer_monitor.lost or mesh.peer_monitor.is_over
    )
    if is_complete:
        mesh.barrier()
    _leave_world()
    if is_complete and mesh.shared_memory is not None:  # all ranks have read their messages
        mesh.shared_memory.pool.close()


def _leave_world() -> None:
    global _joined_mesh
    mesh = _joined_mesh
    _joined_mesh = None
    if mesh is None or mesh.peer_monitor is None:
        return
    error = getattr(sys, "last_value", None)  # an exception that was not caught
    mesh.peer_monitor.announce_end("it ended" if error is None else format_error(error))
    if not mesh.peer_monitor.lost:
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    # Abandoned calls still wait in gloo's threads, and an orderly exit would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)
