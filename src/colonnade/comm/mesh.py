"""Running world: this process's rank and its process groups.

A group must see the same calls in the same order on every rank, so each thread that issues calls has its own groups
(`THREADS`): ids of later batches are sent while rows, gradients and dense gradients of earlier ones are, and while a
checkpoint is written. A call is made among all ranks, or in a `Scope`: the ranks of a block of neighbours (a host, a
tower), or those of the same number in each block. Scopes other than hosts' are opened by their users (`open_scopes`).

Between ranks of one host large messages are passed in shared memory (`shm.py`), in calls of this mesh whose ranks are
all on one host, but not in those of meshes derived from it (trainers, towers).

Where some ranks are servers (`with_servers`), the others have their own mesh, `trainers`, for calls that only they
make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.peer_status import Presence
from colonnade.comm.rendezvous import Peer
from colonnade.comm.shm import Mates, Post
from colonnade.comm.traffic import (
    Link,
    Traffic,
    begin_waiting,
    end_waiting,
    link,
    ring_sum,
    tree_children,
)
from colonnade.ops.memory import empty
from colonnade.topology.world import World

CHANNELS = ("route", "fetch", "push", "dense", "gather", "evaluate", "checkpoint", "control")
THREADS = {"route": "lookahead", "dense": "dense", "checkpoint": "checkpoint"}
"""Threads that issue calls, by channel; the training thread issues those of all other channels."""
TRAINING = "training"


def thread_of(channel: str) -> str:
    """Return the name of the thread that issues the calls of a channel."""
    return THREADS.get(channel, TRAINING)


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that a call is made among: all, or blocks of `size`. Pure."""

    size: int = 0
    """Number of ranks of a block of neighbours; 0: all."""
    is_across: bool = False
    """Whether calls are among ranks of the same number in each block, instead of those of one block."""
    within: int = 0
    """Number of ranks of a larger block that contains the blocks; 0: all."""

    def members(self, rank: int, num_ranks: int) -> range:
        """Return the ranks that `rank` makes a call of this scope with, itself included, ascending."""
        every = range(num_ranks)
        if self.within:
            every = every[rank // self.within * self.within :][: self.within]
        if not self.size:
            return every
        rank -= every.start
        if self.is_across:
            return every[rank % self.size :: self.size]
        return every[rank // self.size * self.size :][: self.size]

    def all_members(self, num_ranks: int) -> list[range]:
        """Return the members of every group of this scope, each once, in one order."""
        return list(dict.fromkeys(self.members(rank, num_ranks) for rank in range(num_ranks)))


ALL = Scope()


@dataclass(slots=True)
class Call:
    """Pending collective."""

    presence: Presence
    channel: str
    work: dist.Work
    post: Post | None = None
    """Messages to this rank in the shared memory of other ranks of its host, until they were read."""

    def wait(self) -> None:
        """Wait until the call is done. One thread at a time. Raises PeerLost."""
        begin_waiting()
        try:
            self.presence.wait(self.channel, self.work)
            post, self.post = self.post, None
            if post is not None:
                post.arrive()
        except OSError:  # a rank of this host was lost with its shared memory
            raise self.presence.lose(self.channel, None) from None
        finally:
            end_waiting(self.channel)


@dataclass(frozen=True, slots=True)
class Reach:
    """Members and links of a rank's calls in a scope."""

    members: range
    """Ranks that it makes calls with, itself included."""
    links: tuple[Link | None, ...]
    """Link to each member; None: itself."""
    is_one_host: bool
    suffix: str
    """Suffix of a call's name: the ranks that it is made among."""
    groups: Scope
    """Scope whose groups its calls use."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Mesh of a world's ranks, as one rank sees it: collectives among all ranks or in a scope.

    `groups` is empty in a world of one rank; every collective is then the identity. `channel` says what a call is for,
    and so which thread issues it; `traffic_tag` what its bytes are counted as, by default its channel; `scope` the
    ranks
    that it is made among.

    Every collective raises PeerLost, naming the rank, if one is lost or does not join the call within the timeout;
    after that no call can be made, on any thread.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = field(default_factory=dict)
    """Process groups by issuing thread and scope; without scopes of one rank, or of all ranks."""
    traffic: Traffic = field(default_factory=Traffic)
    """Counts of every payload byte this rank sent."""
    presence: Presence | None = None
    """Status of the other ranks while they run; None in a world of one."""
    crew: Mesh | None = None
    """Mesh `trainers`, where some ranks are servers; else None."""
    called: str = ""
    """Prefix of its calls' channels in messages: "trainers " for a `crew`."""
    mates: Mates | None = None
    """Shared memory of the ranks of this host; None: every message is sent by torch.distributed."""
    num_ranks: int = field(init=False)
    _reaches: dict[Scope, Reach] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", self.world.num_ranks)

    @property
    def trainers(self) -> Mesh:
        """Mesh of the ranks that train, which share samples and dense gradients. Without servers, this mesh; on a
        server, a world of one."""
        return self.crew or self

    @property
    def is_server(self) -> bool:
        """Whether this rank only serves rows."""
        return self.world.is_server(self.rank)

    @property
    def peers(self) -> Sequence[Peer]:
        """Host, process and versions of every rank; () in a world of one."""
        return () if self.presence is None else self.presence.peers

    @property
    def in_host(self) -> Scope:
        """Scope of the ranks of a host."""
        return Scope(self.world.ranks_per_host)

    @property
    def over_hosts(self) -> Scope:
        """Scope of the ranks with the same number in their hosts."""
        return Scope(self.world.ranks_per_host, is_across=True)

    def at(self, step: int) -> None:
        """Set the step that this rank is in, for others to read."""
        if self.presence is not None:
            self.presence.step = step

    def all_to_all(
        self,
        channel: str,
        send: Tensor,  # (sum of send_rows, ...): block r goes to rank r
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        *,
        scope: Scope = ALL,
        wait: bool = True,
        traffic_tag: str | None = None,
        into: Tensor | None = None,  # what is received
    ) -> tuple[Tensor, Call | None]:
        """Send blocks of variable size to every rank, and receive one from each. Collective.

        Returns (received, call); with `wait=False` both buffers belong to the call until it is done. A buffer of `room`
        must not be written to again, because other ranks may read it even later."""
        if self.num_ranks == 1:
            return send, None
        width = send.element_size() * math.prod(send.shape[1:])
        reach = self._reaches.get(scope) or self._reach(scope)
        sent, got = [width * rows for rows in send_rows], [width * rows for rows in receive_rows]
        self.traffic.count(traffic_tag or channel, reach.links, sent)
        received = into
        if received is None:
            received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        post = None
        if self.mates is not None and reach.is_one_host:
            name = channel + reach.suffix
            post = self.mates.post(name, reach.members, send, sent, received, got)
        arguments = (received, send, list(receive_rows), list(send_rows))
        if post is not None:
            arguments = (post.got, post.send, list(post.got_bytes), list(post.send_bytes))
        call = self._begin(channel, partial(dist.all_to_all_single, *arguments), scope)
        call.post = post
        if not wait:
            return received, call
        call.wait()
        return received, None

    def room(self, num_elements: int, dtype: torch.dtype, scope: Scope = ALL) -> Tensor:
        """Allocate a buffer (num_elements,) to write once and send in `scope`: in shared memory if all its ranks are on
        one host."""
        reach = self._reaches.get(scope) or self._reach(scope)
        if self.mates is None or not reach.is_one_host:
            return empty(num_elements, dtype=dtype)
        return self.mates.room(num_elements, dtype)

    def all_reduce(self, channel: str, values: Tensor, *, traffic_tag: str | None = None) -> Tensor:
        """Sum over ranks in place, to the same bits on every rank. Collective."""
        if self.num_ranks > 1:
            if values.numel():
                sent = ring_sum(values.nbytes, values.element_size(), self.rank, self.num_ranks)
                self._count(traffic_tag or channel, (self.rank - 1) % self.num_ranks, *sent)
            self._begin(channel, partial(dist.all_reduce, values)).wait()
        return values

    def all_gather(self, channel: str, values: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes must agree. Collective."""
        if self.num_ranks == 1:
            return [values]
        others, after = self.num_ranks - 1, (self.rank + 1) % self.num_ranks
        self._count(channel, after, others * values.nbytes, others)  # a ring: one block a round
        out = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._begin(channel, partial(dist.all_gather, out, values)).wait()
        return out

    def all_gather_bytes(self, channel: str, data: bytes) -> list[bytes]:
        """Return every rank's byte string, in rank order; lengths may differ. Collective."""
        if self.num_ranks == 1:
            return [data]
        sizes = [int(n) for n in self.all_gather(channel, torch.tensor(len(data)))]
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [
            bytes(block[:size].numpy())
            for block, size in zip(self.all_gather(channel, padded), sizes, strict=True)
        ]

    def broadcast(self, channel: str, values: Tensor, *, traffic_tag: str | None = None) -> Tensor:
        """Copy rank 0's tensor to every rank, in place. Collective."""
        if self.num_ranks > 1:
            for peer in tree_children(self.rank, self.num_ranks):
                self._count(traffic_tag or channel, peer, values.nbytes)
            self._begin(channel, partial(dist.broadcast, values, group_src=0)).wait()
        return values

    def least(self, count: int, channel: str = "control") -> int:
        """Return the smallest count of all ranks. Collective."""
        return min(int(value) for value in self.all_gather(channel, torch.tensor(count)))

    def barrier(self, channel: str = "control") -> None:
        """Wait until every rank has called this. Collective."""
        self.all_gather(channel, torch.zeros(1))

    def label(self, channel: str, scope: Scope = ALL) -> str:
        """Return the name of a call for messages: its channel, and the ranks that it is made among."""
        return channel + self._reach(scope).suffix

    def _reach(self, scope: Scope) -> Reach:
        """Return this rank's members and links in a scope, cached in `_reaches`."""
        return self._reaches.setdefault(scope, _find_reach(self.world, self.rank, scope))

    def _count(self, channel: str, peer: int, num_bytes: int, messages: int = 1) -> None:
        links = [self._reach(ALL).links[peer]]
        self.traffic.count(channel, links, [num_bytes], messages)

    def group(self, thread: str, scope: Scope = ALL) -> dist.ProcessGroup:
        """Return the group on which a thread makes its calls in a scope."""
        return self.groups[thread, self._reach(scope).groups]

    def _begin(self, channel: str, start: Callable[..., Any], scope: Scope = ALL) -> Call:
        """Begin a call of torch.distributed. Raises PeerLost."""
        assert self.presence is not None
        reach = self._reaches.get(scope) or self._reach(scope)
        name = self.called + channel + reach.suffix
        self.presence.enter(name)
        group = self.groups[THREADS.get(channel, TRAINING), reach.groups]
        try:
            return Call(self.presence, name, start(group=group, async_op=True))
        except RuntimeError as error:
            raise self.presence.lose(name, error) from error


def _find_reach(world: World, rank: int, scope: Scope) -> Reach:
    """Return a rank's members and links in a scope."""
    num_ranks = world.num_ranks
    members = scope.members(rank, num_ranks)
    suffix = ""
    if scope.size:
        is_host = scope.size == world.ranks_per_host
        blocks = "host" if is_host else "tower"
        of_size = "" if is_host else f" of {scope.size}"
        suffix = f" over {blocks}s{of_size}" if scope.is_across else f" in {blocks}{of_size}"
    return Reach(
        members,
        tuple(None if peer == rank else link(world, rank, peer) for peer in members),
        world.host(members[0]) == world.host(members[-1]),
        suffix,
        ALL if len(members) == num_ranks else scope,
    )
