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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.peer_status import Presence
from colonnade.comm.rendezvous import Peer
from colonnade.comm.shm import Mates, Post
from colonnade.comm.traffic import Traffic, ring_sum, tree_children, waiting
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
        counted, members = counts_as or purpose, scope.members(self.rank, self.num_ranks)
        for peer, rows in zip(members, send_rows, strict=True):
            self._count(counted, peer, width * rows)
        received = into
        if received is None:
            received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        mates, post = self._mates(members), None
        if mates is not None:
            sent, got = ([width * rows for rows in each] for each in (send_rows, receive_rows))
            post = mates.post(self.label(purpose, scope), members, send, sent, received, got)
        if post is None:
            call = self._all_to_all(purpose, scope, send, send_rows, received, receive_rows)
        else:
            sizes = post.send_bytes, post.got_bytes
            call = self._all_to_all(purpose, scope, post.send, sizes[0], post.got, sizes[1])
            call.post = post
        if not wait:
            return received, call
        call.wait()
        return received, None

    def room(self, num_elements: int, dtype: torch.dtype, scope: Scope = ALL) -> Tensor:
        """Allocate (num_elements,), to be written to and sent in `scope`: where ranks of one host can read it."""
        mates = self._mates(scope.members(self.rank, self.num_ranks))
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

    def label(self, purpose: str, scope: Scope = ALL) -> str:
        """Name a call for people: what it is for, and among whom."""
        if not scope.size:
            return purpose
        is_host = scope.size == self.world.ranks_per_host
        kind = "over" if scope.is_across else "in"
        blocks = ("hosts" if scope.is_across else "host") if is_host else (
            f"towers of {scope.size}" if scope.is_across else f"tower of {scope.size}"
        )  # fmt: skip
        return f"{purpose} {kind} {blocks}"

    def _mates(self, members: Sequence[int]) -> Mates | None:
        """Return the host's shared memory where these ranks are all of this host, and can read each other's."""
        if self.mates is None:
            return None
        host = self.world.host
        return self.mates if host(members[0]) == host(members[-1]) else None

    def _all_to_all(
        self,
        purpose: str,
        scope: Scope,
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
            scope,
        )

    def _count(self, purpose: str, peer: int, num_bytes: int, messages: int = 1) -> None:
        self.traffic.count(purpose, self.world, self.rank, peer, num_bytes, messages)

    def group(self, thread: str, scope: Scope = ALL) -> dist.ProcessGroup:
        """Return the group on which a thread makes its calls in a scope."""
        if len(scope.members(self.rank, self.num_ranks)) == self.num_ranks:
            scope = ALL
        return self.groups[thread, scope]

    def _begin(
        self, purpose: str, start: Callable[[dist.ProcessGroup], Any], scope: Scope = ALL
    ) -> Call:
        assert self.presence is not None
        label = self.called + self.label(purpose, scope)
        self.presence.enter(label)
        try:
            return Call(self.presence, label, start(self.group(thread_of(purpose), scope)))
        except RuntimeError as error:
            raise self.presence.lose(label, error) from error
