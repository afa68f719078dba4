"""Running world: this process's rank and its process groups.

A group must see the same calls in the same order on every rank, so each thread that issues calls has groups of its own
(`THREADS`): ids of later batches travel while rows, gradients and dense gradients of earlier ones do, and a commit is
written. A call is made among all ranks, or in a `Scope`: the ranks of a block of neighbours (a host, a tower), or those
of one number in each block. Scopes other than hosts' are opened by whoever calls in them (`open_scopes`).

Between ranks of one host large messages lie in memory that both map (`shm.py`): on groups of this mesh that are of
one host whole, but not on those of meshes made of it (trainers, towers).

Where some ranks are servers (`with_servers`), the others have a mesh of their own, `trainers`, for what only they do.
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

PURPOSES = ("route", "fetch", "push", "dense", "gather", "evaluate", "commit", "control")
THREADS = {"route": "lookahead", "dense": "dense", "commit": "commit"}
"""Threads that issue calls, by purpose; the training thread issues those of every other."""
TRAINING = "training"


def thread_of(purpose: str) -> str:
    """Return the name of the thread that issues the calls of a purpose."""
    return THREADS.get(purpose, TRAINING)


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that a call is made among: all, or those that `size` says. Pure."""

    size: int = 0
    """Ranks of a block of neighbours; 0: all."""
    is_across: bool = False
    """Ranks of one number in each block, instead of those of one block."""
    within: int = 0
    """Ranks of a larger block that the blocks are of; 0: all."""

    def members(self, rank: int, num_ranks: int) -> range:
        """Return the ranks that `rank` makes such a call with, itself included, ascending."""
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
    """A collective under way."""

    presence: Presence
    purpose: str
    work: dist.Work
    post: Post | None = None
    """What mates have for this rank in their memory, until it was read."""

    def wait(self) -> None:
        """Until it is done. One thread at a time. Raises PeerLost."""
        begin_waiting()
        try:
            self.presence.wait(self.purpose, self.work)
            post, self.post = self.post, None
            if post is not None:
                post.arrive()
        except OSError:  # a mate's memory went with it
            raise self.presence.lose(self.purpose, None) from None
        finally:
            end_waiting(self.purpose)


@dataclass(frozen=True, slots=True)
class Reach:
    """A rank's place in a scope."""

    members: range
    """Ranks that it makes calls with there, itself included."""
    links: tuple[Link | None, ...]
    """By member; None: itself."""
    is_one_host: bool
    suffix: str
    """Of a call's name: among whom it is made."""
    groups: Scope
    """Scope that the groups of its calls are of."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """`groups` is empty in a world of one rank; every collective is then the identity.

    `purpose` says what a call is for, and so which thread issues it; `counts_as`, where it is given, what its bytes are
    counted as; `scope`, among whom it is made.

    Every collective raises PeerLost, naming the rank, where one is lost or does not come within the timeout; after
    that none is made any more, on any thread.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = field(default_factory=dict)
    """By issuing thread and scope; none of a scope of one rank, or of all."""
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
    num_ranks: int = field(init=False)
    _reaches: dict[Scope, Reach] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", self.world.num_ranks)

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
    def peers(self) -> Sequence[Peer]:
        """Who every rank is; () in a world of one."""
        return () if self.presence is None else self.presence.peers

    @property
    def in_host(self) -> Scope:
        """Scope of the ranks of a host."""
        return Scope(self.world.ranks_per_host)

    @property
    def over_hosts(self) -> Scope:
        """Scope of the ranks of one number in their hosts."""
        return Scope(self.world.ranks_per_host, is_across=True)

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
        scope: Scope = ALL,
        wait: bool = True,
        counts_as: str | None = None,
        into: Tensor | None = None,  # what is received
    ) -> tuple[Tensor, Call | None]:
        """Collective. Returns (received, call); with `wait=False` both buffers belong to the call until it is done. One
        of `room` is nobody's to write to again: others may read it later still."""
        if self.num_ranks == 1:
            return send, None
        width = send.element_size() * math.prod(send.shape[1:])
        reach = self._reaches.get(scope) or self._reach(scope)
        sent, got = [width * rows for rows in send_rows], [width * rows for rows in receive_rows]
        self.traffic.count(counts_as or purpose, reach.links, sent)
        received = into
        if received is None:
            received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        post = None
        if self.mates is not None and reach.is_one_host:
            name = purpose + reach.suffix
            post = self.mates.post(name, reach.members, send, sent, received, got)
        arguments = (received, send, list(receive_rows), list(send_rows))
        if post is not None:
            arguments = (post.got, post.send, list(post.got_bytes), list(post.send_bytes))
        call = self._begin(purpose, partial(dist.all_to_all_single, *arguments), scope)
        call.post = post
        if not wait:
            return received, call
        call.wait()
        return received, None

    def room(self, num_elements: int, dtype: torch.dtype, scope: Scope = ALL) -> Tensor:
        """Allocate (num_elements,), to be written to and sent in `scope`: where ranks of one host can read it."""
        reach = self._reaches.get(scope) or self._reach(scope)
        if self.mates is None or not reach.is_one_host:
            return empty(num_elements, dtype=dtype)
        return self.mates.room(num_elements, dtype)

    def all_reduce(self, purpose: str, values: Tensor, *, counts_as: str | None = None) -> Tensor:
        """Collective, in place: the sum over ranks, the same bits on every rank."""
        if self.num_ranks > 1:
            if values.numel():
                sent = ring_sum(values.nbytes, values.element_size(), self.rank, self.num_ranks)
                self._count(counts_as or purpose, (self.rank - 1) % self.num_ranks, *sent)
            self._begin(purpose, partial(dist.all_reduce, values)).wait()
        return values

    def all_gather(self, purpose: str, values: Tensor) -> list[Tensor]:
        """Collective: every rank's tensor, in rank order; shapes must agree."""
        if self.num_ranks == 1:
            return [values]
        others, after = self.num_ranks - 1, (self.rank + 1) % self.num_ranks
        self._count(purpose, after, others * values.nbytes, others)  # a ring: one block a round
        out = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._begin(purpose, partial(dist.all_gather, out, values)).wait()
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
            self._begin(purpose, partial(dist.broadcast, values, group_src=0)).wait()
        return values

    def least(self, count: int, purpose: str = "control") -> int:
        """Collective: the smallest of all ranks'."""
        return min(int(value) for value in self.all_gather(purpose, torch.tensor(count)))

    def barrier(self, purpose: str = "control") -> None:
        """Collective: every rank has come here."""
        self.all_gather(purpose, torch.zeros(1))

    def label(self, purpose: str, scope: Scope = ALL) -> str:
        """Name a call for people: what it is for, and among whom."""
        return purpose + self._reach(scope).suffix

    def _reach(self, scope: Scope) -> Reach:
        """Return this rank's place in a scope, and keep it in `_reaches`."""
        return self._reaches.setdefault(scope, _find_reach(self.world, self.rank, scope))

    def _count(self, purpose: str, peer: int, num_bytes: int, messages: int = 1) -> None:
        links = [self._reach(ALL).links[peer]]
        self.traffic.count(purpose, links, [num_bytes], messages)

    def group(self, thread: str, scope: Scope = ALL) -> dist.ProcessGroup:
        """Return the group on which a thread makes its calls in a scope."""
        return self.groups[thread, self._reach(scope).groups]

    def _begin(self, purpose: str, start: Callable[..., Any], scope: Scope = ALL) -> Call:
        """Begin a call of torch.distributed. Raises PeerLost."""
        assert self.presence is not None
        reach = self._reaches.get(scope) or self._reach(scope)
        name = self.called + purpose + reach.suffix
        self.presence.enter(name)
        group = self.groups[THREADS.get(purpose, TRAINING), reach.groups]
        try:
            return Call(self.presence, name, start(group=group, async_op=True))
        except RuntimeError as error:
            raise self.presence.lose(name, error) from error


def _find_reach(world: World, rank: int, scope: Scope) -> Reach:
    """Return the place of a rank in a scope."""
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
