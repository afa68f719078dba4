"""Running world: this process's rank and its process groups.

A gloo or NCCL group must see the same calls in the same order on every rank, so each purpose that
may run at its own pace has a group of its own: ids of later batches (`route`) travel while rows
(`fetch`), gradients (`push`) and dense gradients (`dense`) of
earlier ones do, and a `commit` is written.
Where there are several hosts of several ranks, `dense in host` joins those of one host, and `dense over hosts`
those that have the same number in theirs; `fetch` and `push` have such groups, too. Towers of other sizes have groups
like these where an exchange asks for them (`open_towers`), and a mesh of their own for sums of what only they use
(`tower_mesh`).

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
AHEAD = ("route", "fetch")
"""Purposes of what a step's coming batches send, which have a loop of gloo's of their own."""
OF_TRAINERS = ("dense", "gather", "evaluate")
"""Purposes of `Mesh.trainers`."""
BY_HOST = ("dense", "fetch", "push")
"""Purposes with groups of the ranks of a host, and of those with one number."""
IN_HOST, OVER_HOSTS = " in host", " over hosts"
IN_TOWER, OVER_TOWERS = " in tower of ", " over towers of "
"""Followed by the ranks of a tower: `open_towers`."""


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
