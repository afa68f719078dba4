"""Running world: this process's rank and its process groups.

torch gives every group a device of its own, and a device is a thread that watches its sockets and moves what they have
to say. A world has 16 groups and more; the threads of those that wait took 18.5 ms of processor a second and rank, and
came between those that worked. Groups of one rank, whatever its calls, may share a device: it keeps no order between
them. What bounds it is one thread's rate of copying, so what is sent ahead of a step and what belongs to it have one
each (`mesh.AHEAD`).

A gloo or NCCL group must see the same calls in the same order on every rank, so each purpose that
may run at its own pace has a group of its own: ids of later batches (`route`) travel while rows
(`fetch`), gradients (`push`) and dense gradients (`dense`) of
earlier ones do, and a `commit` is written.
Where there are several hosts of several ranks, `dense in host` joins those of one host, and `dense over hosts`
those that have the same number in theirs; `fetch` and `push` have such groups, too. Towers of other sizes have groups
like these where an exchange asks for them (`open_towers`), and a mesh of their own for sums of what only they use
(`tower_mesh`).

Between ranks of one host large messages lie in memory that both map (`mates.py`): on groups of this mesh that are of
one host whole, but not on those of meshes made of it (trainers, towers).

Where some ranks are servers (`with_servers`), the others have a mesh of their own, `trainers`, for what only they do.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.heartbeat import FileHeartbeats, Heartbeats, StoreHeartbeats
from colonnade.comm.peer_status import PATIENCE, Presence, words_of
from colonnade.comm.rendezvous import HEARTBEATS, Peer, connect, meet, myself, serves_store
from colonnade.comm.shm import Mates, OthersRooms, Post, Rooms, readable
from colonnade.comm.traffic import Traffic, ring_sum, tree_children, waiting
from colonnade.errors import ConfigError, WorldError
from colonnade.ops.memory import empty
from colonnade.topology.world import World

BACKEND = "colonnade_gloo"
"""gloo as torch has it, but for its devices, which are those given as options of the group."""
_is_registered = False


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


PURPOSES = ("route", "fetch", "push", "dense", "gather", "evaluate", "commit", "control")
AHEAD = ("route", "fetch")
"""Purposes of what a step's coming batches send, which have a loop of gloo's of their own."""
OF_TRAINERS = ("dense", "gather", "evaluate")
"""Purposes of `Mesh.trainers`."""
BY_HOST = ("dense", "fetch", "push")
"""Purposes with groups of the ranks of a host, and of those with one number."""
IN_HOST, OVER_HOSTS = " in host", " over hosts"
IN_TOWER, OVER_TOWERS = " in tower of ", " over towers of "
"""Followed by the ranks of a tower: `open_towers`."""
TIMEOUT = timedelta(minutes=5)


@dataclass(slots=True)
class Call:
    """A collective under way."""

    presence: Presence
    purpose: str
    work: dist.Work
    post: Post | None = None
    """What mates have for this rank in their memory, until it was read."""

    def wait(self) -> None:
        """Until it is done. One thread at a time. Raises PeerLost."""
        with waiting(self.purpose):
            self.presence.wait(self.purpose, self.work)
            post, self.post = self.post, None
            if post is not None:
                try:
                    post.arrive()
                except OSError:  # a mate's memory went with it
                    raise self.presence.lose(self.purpose, None) from None


@dataclass(frozen=True, slots=True)
class Mesh:
    """`groups` is empty in a world of one rank; every collective is then the identity.

    `purpose` names the group a call is made on; `counts_as`, where it is given, what its bytes are counted as.

    Every collective raises PeerLost, naming the rank, where one is lost or does not come within the timeout; after
    that none is made any more, on any thread.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    """Every payload byte this rank sent."""
    presence: Presence | None = None
    """What ranks know of each other while they run; None in a world of one."""
    crew: Mesh | None = None
    """`trainers`, where some ranks are servers."""
    called: str = ""
    """What its calls' purposes begin with, as others read of them: "trainers " of a `crew`."""
    mates: Mates | None = None
    """The ranks of this host, where they can read each other's memory; None: every message travels."""

    @property
    def trainers(self) -> Mesh:
        """The ranks that train, as a world of their own: who shares samples and dense gradients. Where there are no
        servers, this one; on a server, a world of one."""
        return self.crew or self

    @property
    def is_server(self) -> bool:
        """Whether this rank has rows only."""
        return self.world.is_server(self.rank)

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    @property
    def peers(self) -> Sequence[Peer]:
        """Who every rank is; () in a world of one."""
        return () if self.presence is None else self.presence.peers

    def at(self, step: int) -> None:
        """What step this rank is in, for others to read."""
        if self.presence is not None:
            self.presence.step = step

    def all_to_all(
        self,
        purpose: str,
        send: Tensor,  # (sum of send_rows, ...): block r goes to rank r
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        *,
        wait: bool = True,
        counts_as: str | None = None,
        into: Tensor | None = None,  # what is received
    ) -> tuple[Tensor, Call | None]:
        """Collective. Returns (received, call); with `wait=False` both buffers belong to the call until it is done. One
        of `room` is nobody's to write to again: others may read it later still."""
        if self.num_ranks == 1:
            return send, None
        width = send.element_size() * math.prod(send.shape[1:])
        counted, members = counts_as or purpose.partition(" ")[0], self._members(purpose)
        for peer, rows in zip(members, send_rows, strict=True):
            self._count(counted, peer, width * rows)
        received = into
        if received is None:
            received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        mates, post = self._mates(purpose), None
        if mates is not None:
            sent, got = ([width * rows for rows in each] for each in (send_rows, receive_rows))
            post = mates.post(purpose, members, send, sent, received, got)
        if post is None:
            call = self._all_to_all(purpose, send, send_rows, received, receive_rows)
        else:
            call = self._all_to_all(purpose, post.send, post.send_bytes, post.got, post.got_bytes)
            call.post = post
        if not wait:
            return received, call
        call.wait()
        return received, None

    def room(self, purpose: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements,), to be written to and sent on `purpose`: where mates can read it, if they will."""
        mates = self._mates(purpose)
        return (
            empty(num_elements, dtype=dtype) if mates is None else mates.room(num_elements, dtype)
        )

    def all_reduce(self, purpose: str, values: Tensor, *, counts_as: str | None = None) -> Tensor:
        """Collective, in place: the sum over ranks, the same bits on every rank."""
        if self.num_ranks > 1:
            if values.numel():
                sent = ring_sum(values.nbytes, values.element_size(), self.rank, self.num_ranks)
                self._count(counts_as or purpose, (self.rank - 1) % self.num_ranks, *sent)
            self._begin(
                purpose, lambda group: dist.all_reduce(values, group=group, async_op=True)
            ).wait()
        return values

    def all_gather(self, purpose: str, values: Tensor) -> list[Tensor]:
        """Collective: every rank's tensor, in rank order; shapes must agree."""
        if self.num_ranks == 1:
            return [values]
        others, after = self.num_ranks - 1, (self.rank + 1) % self.num_ranks
        self._count(purpose, after, others * values.nbytes, others)  # a ring: one block a round
        out = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._begin(
            purpose, lambda group: dist.all_gather(out, values, group=group, async_op=True)
        ).wait()
        return out

    def all_gather_bytes(self, purpose: str, data: bytes) -> list[bytes]:
        """Collective: every rank's byte string, in rank order; lengths may differ."""
        if self.num_ranks == 1:
            return [data]
        sizes = [int(n) for n in self.all_gather(purpose, torch.tensor(len(data)))]
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [
            bytes(block[:size].numpy())
            for block, size in zip(self.all_gather(purpose, padded), sizes, strict=True)
        ]

    def broadcast(self, purpose: str, values: Tensor, *, counts_as: str | None = None) -> Tensor:
        """Collective, in place: rank 0's tensor."""
        if self.num_ranks > 1:
            for peer in tree_children(self.rank, self.num_ranks):
                self._count(counts_as or purpose, peer, values.nbytes)
            self._begin(
                purpose,
                lambda group: dist.broadcast(values, group=group, group_src=0, async_op=True),
            ).wait()
        return values

    def least(self, count: int, purpose: str = "control") -> int:
        """Collective: the smallest of all ranks'."""
        return min(int(each) for each in self.all_gather(purpose, torch.tensor(count)))

    def barrier(self, purpose: str = "control") -> None:
        """Collective: every rank has come here."""
        self.all_gather(purpose, torch.zeros(1))

    def _members(self, purpose: str) -> Sequence[int]:
        """Ranks of a group, in its order."""
        local, every = self.world.ranks_per_host, range(self.num_ranks)
        if purpose.endswith(IN_HOST):
            return every[self.world.host(self.rank) * local :][:local]
        if IN_TOWER in purpose:
            size = int(purpose.rpartition(" ")[2])
            return every[self.rank // size * size :][:size]
        if OVER_TOWERS in purpose:
            local = int(purpose.rpartition(" ")[2])
            return every[self.rank % local :: local]
        return every[self.rank % local :: local] if purpose.endswith(OVER_HOSTS) else every

    def _mates(self, purpose: str) -> Mates | None:
        """Where a group's ranks are all of this host, and can read each other's memory."""
        if self.mates is None:
            return None
        members, host = self._members(purpose), self.world.host
        return self.mates if host(members[0]) == host(members[-1]) else None

    def _all_to_all(
        self,
        purpose: str,
        send: Tensor,
        send_rows: Sequence[int],
        received: Tensor,
        receive_rows: Sequence[int],
    ) -> Call:
        return self._begin(
            purpose,
            lambda group: dist.all_to_all_single(
                received, send, list(receive_rows), list(send_rows), group=group, async_op=True
            ),
        )

    def _count(self, purpose: str, peer: int, num_bytes: int, messages: int = 1) -> None:
        self.traffic.count(purpose, self.world, self.rank, peer, num_bytes, messages)

    def _begin(self, purpose: str, start: Callable[[dist.ProcessGroup], Any]) -> Call:
        assert self.presence is not None
        called = self.called + purpose
        self.presence.enter(called)
        try:
            return Call(self.presence, called, start(self.groups[purpose]))
        except RuntimeError as error:
            raise self.presence.lose(called, error) from error


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
