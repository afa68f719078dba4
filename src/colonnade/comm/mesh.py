"""Mesh of ranks, as one process sees it: its rank, its process groups and the collectives.

A process group needs the same calls in the same order on every rank. So each thread that issues calls has its own
groups (`THREADS`): one thread sends ids of later batches while others send rows, gradients and dense gradients of
earlier batches, or write a checkpoint. A call is among all ranks or in a `Scope`: the ranks of a block of neighbours (a
host, a tower), or the ranks with the same local rank in each block. `open_tower_scopes` opens those of towers.

Large messages between ranks of one host go through shared memory (`shm.py`), in calls of this mesh with all ranks on
one host. Derived meshes (trainers, towers) do not use shared memory.

If some ranks are servers (`with_servers`), the other ranks have a second mesh, `trainers`, for their own calls.
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

from colonnade.comm.peer_status import PeerMonitor
from colonnade.comm.rendezvous import Peer
from colonnade.comm.shm import SharedMemory, SharedMessages
from colonnade.comm.traffic import (
    Link,
    Traffic,
    begin_waiting,
    count_ring_sum_traffic,
    end_waiting,
    find_broadcast_children,
    link_between,
)
from colonnade.ops.memory import empty
from colonnade.topology.world import World

CHANNELS = ("route", "fetch", "push", "dense", "gather", "evaluate", "checkpoint", "control")
TRAINING = "training"
THREADS = dict.fromkeys(CHANNELS, TRAINING) | {
    "route": "lookahead",
    "dense": "dense",
    "checkpoint": "checkpoint",
}
"""Thread that issues the calls of a channel."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Group of ranks that take part in a call: all, or blocks of `size`. Pure."""

    size: int = 0
    """Number of ranks in a block of neighbours; 0: all."""
    is_across: bool = False
    """True for calls among the ranks with the same local rank in each block, False for calls inside a block."""
    within: int = 0
    """Number of ranks in a larger block that contains the blocks; 0: all."""

    def members(self, rank: int, num_ranks: int) -> range:
        """Return the ranks in the same group of this scope as `rank`, including itself, ascending."""
        ranks = range(num_ranks)
        if self.within:
            ranks = ranks[rank // self.within * self.within :][: self.within]
        if not self.size:
            return ranks
        rank -= ranks.start
        if self.is_across:
            return ranks[rank % self.size :: self.size]
        return ranks[rank // self.size * self.size :][: self.size]

    def all_members(self, num_ranks: int) -> list[range]:
        """Return the members of every group of this scope, each group once, in the same order on all ranks."""
        return list(dict.fromkeys(self.members(rank, num_ranks) for rank in range(num_ranks)))


ALL = Scope()


@dataclass(slots=True)
class PendingCall:
    """Pending collective."""

    monitor: PeerMonitor
    channel: str
    work: dist.Work
    shared_messages: SharedMessages | None = None
    """Messages to this rank in other ranks' shared memory, until they are copied."""

    def wait(self) -> None:
        """Wait until the call is done. Call it from one thread at a time. Raises PeerLost."""
        begin_waiting()
        try:
            self.monitor.wait_for_call(self.channel, self.work)
            messages = self.shared_messages
            self.shared_messages = None
            if messages is not None:
                messages.copy_received_messages()
        except OSError:  # the shared memory of a lost rank is gone
            raise self.monitor.diagnose_loss(self.channel, None) from None
        finally:
            end_waiting(self.channel)


@dataclass(frozen=True, slots=True)
class ScopeLinks:
    """Members of a rank's group in a scope, and its links to them."""

    members: range
    """Ranks of the group, including this rank."""
    links: tuple[Link | None, ...]
    """Link to each member; None: itself."""
    is_one_host: bool
    suffix: str
    """Suffix of a call's name that describes the scope."""
    groups: Scope
    """Scope under which the process groups of its calls are stored."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Mesh of a world's ranks, as one rank sees it: collectives among all ranks or in a scope.

    `groups` is empty in a world of one rank; every collective is then the identity. The `channel` of a call is its
    purpose, which determines the issuing thread. Its bytes are counted under `traffic_tag`, by default the channel.
    `scope` selects the ranks that take part.

    Every collective raises PeerLost, which names the rank, if a rank is lost or does not join within the timeout. After
    that no thread can make a call.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    groups: dict[tuple[str, Scope], dist.ProcessGroup] = field(default_factory=dict)
    """Process groups by issuing thread and scope; scopes of one rank have none, scopes of all ranks use ALL."""
    traffic: Traffic = field(default_factory=Traffic)
    """Counts of the payload bytes that this rank sent."""
    peer_monitor: PeerMonitor | None = None
    """Monitor of the other ranks; None in a world of one."""
    trainer_mesh: Mesh | None = None
    """Mesh of the trainers if some ranks are servers; else None."""
    prefix: str = ""
    """Prefix of channels in messages: "trainers " in a `trainer_mesh`."""
    shared_memory: SharedMemory | None = None
    """Shared memory of the ranks of this host; None: torch.distributed sends all messages."""
    num_ranks: int = field(init=False)
    _links: dict[Scope, ScopeLinks] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", self.world.num_ranks)

    @property
    def trainers(self) -> Mesh:
        """Mesh of the ranks that train, which share samples and dense gradients.

        Without servers it is this mesh; on a server it is a world of one."""
        return self.trainer_mesh or self

    @property
    def is_server(self) -> bool:
        """True if this rank only serves rows."""
        return self.world.is_server(self.rank)

    @property
    def peers(self) -> Sequence[Peer]:
        """Host, process and versions of each rank; () in a world of one."""
        return () if self.peer_monitor is None else self.peer_monitor.peers

    @property
    def host_scope(self) -> Scope:
        """Scope of the ranks of a host."""
        return Scope(self.world.ranks_per_host)

    @property
    def cross_host_scope(self) -> Scope:
        """Scope of the ranks with the same local rank on their hosts."""
        return Scope(self.world.ranks_per_host, is_across=True)

    def publish_step(self, step: int) -> None:
        """Publish the step that this rank is in to the other ranks."""
        if self.peer_monitor is not None:
            self.peer_monitor.step = step

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
    ) -> tuple[Tensor, PendingCall | None]:
        """Send a block of variable size to each rank, and receive one from each. Collective.

        Returns (received, call). With `wait=False`, do not touch either buffer until the call is done. Never write
        again to a buffer of `allocate_send_buffer` that was sent, because other ranks may read it even later."""
        if self.num_ranks == 1:
            return send, None
        width = send.element_size() * math.prod(send.shape[1:])
        links = self._links.get(scope) or self._links_in(scope)
        sent_bytes = [width * rows for rows in send_rows]
        received_bytes = [width * rows for rows in receive_rows]
        self.traffic.count_sent_bytes(traffic_tag or channel, links.links, sent_bytes)
        received = into
        if received is None:
            received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        messages = None
        if self.shared_memory is not None and links.is_one_host:
            messages = self.shared_memory.prepare_messages(
                channel + links.suffix, links.members, send, sent_bytes, received, received_bytes
            )
        arguments = (received, send, list(receive_rows), list(send_rows))
        if messages is not None:
            arguments = (
                messages.gloo_received,
                messages.gloo_send,
                list(messages.gloo_received_bytes),
                list(messages.gloo_send_bytes),
            )
        call = self._begin_call(channel, partial(dist.all_to_all_single, *arguments), scope)
        call.shared_messages = messages
        if not wait:
            return received, call
        call.wait()
        return received, None

    def allocate_send_buffer(
        self, num_elements: int, dtype: torch.dtype, scope: Scope = ALL
    ) -> Tensor:
        """Allocate a buffer (num_elements,) to write once and send in `scope`; in shared memory if the ranks of the
        scope are on one host."""
        links = self._links.get(scope) or self._links_in(scope)
        if self.shared_memory is None or not links.is_one_host:
            return empty(num_elements, dtype=dtype)
        return self.shared_memory.allocate_buffer(num_elements, dtype)

    def all_reduce(self, channel: str, values: Tensor, *, traffic_tag: str | None = None) -> Tensor:
        """Sum a tensor over ranks in place, with the same bits on every rank. Collective."""
        if self.num_ranks > 1:
            if values.numel():
                bytes_and_messages = count_ring_sum_traffic(
                    values.nbytes, values.element_size(), self.rank, self.num_ranks
                )
                previous = (self.rank - 1) % self.num_ranks
                self._count_traffic(traffic_tag or channel, previous, *bytes_and_messages)
            self._begin_call(channel, partial(dist.all_reduce, values)).wait()
        return values

    def all_gather(self, channel: str, values: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes must agree. Collective."""
        if self.num_ranks == 1:
            return [values]
        others = self.num_ranks - 1
        next_rank = (self.rank + 1) % self.num_ranks
        self._count_traffic(
            channel, next_rank, others * values.nbytes, others
        )  # a ring: one block per round
        out = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._begin_call(channel, partial(dist.all_gather, out, values)).wait()
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
            for peer in find_broadcast_children(self.rank, self.num_ranks):
                self._count_traffic(traffic_tag or channel, peer, values.nbytes)
            self._begin_call(channel, partial(dist.broadcast, values, group_src=0)).wait()
        return values

    def min_over_ranks(self, count: int, channel: str = "control") -> int:
        """Return the minimum of all ranks' counts. Collective."""
        return min(int(value) for value in self.all_gather(channel, torch.tensor(count)))

    def barrier(self, channel: str = "control") -> None:
        """Wait until every rank has called this. Collective."""
        self.all_gather(channel, torch.zeros(1))

    def call_name(self, channel: str, scope: Scope = ALL) -> str:
        """Return the name of a call for messages: its channel and scope."""
        return channel + self._links_in(scope).suffix

    def _links_in(self, scope: Scope) -> ScopeLinks:
        """Return this rank's members and links in a scope, cached in `_links`."""
        return self._links.setdefault(scope, _find_scope_links(self.world, self.rank, scope))

    def _count_traffic(self, channel: str, peer: int, num_bytes: int, messages: int = 1) -> None:
        links = [self._links_in(ALL).links[peer]]
        self.traffic.count_sent_bytes(channel, links, [num_bytes], messages)

    def group(self, thread: str, scope: Scope = ALL) -> dist.ProcessGroup:
        """Return the process group that a thread uses for its calls in a scope."""
        return self.groups[thread, self._links_in(scope).groups]

    def _begin_call(
        self, channel: str, start_torch_call: Callable[..., Any], scope: Scope = ALL
    ) -> PendingCall:
        """Begin a call of torch.distributed. Raises PeerLost."""
        assert self.peer_monitor is not None
        links = self._links.get(scope) or self._links_in(scope)
        name = self.prefix + channel + links.suffix
        self.peer_monitor.begin_call(name)
        group = self.groups[THREADS[channel], links.groups]
        try:
            return PendingCall(
                self.peer_monitor, name, start_torch_call(group=group, async_op=True)
            )
        except RuntimeError as error:
            raise self.peer_monitor.diagnose_loss(name, error) from error


def _find_scope_links(world: World, rank: int, scope: Scope) -> ScopeLinks:
    """Return a rank's members and links in a scope."""
    num_ranks = world.num_ranks
    members = scope.members(rank, num_ranks)
    suffix = ""
    if scope.size:
        is_host = scope.size == world.ranks_per_host
        blocks = "host" if is_host else "tower"
        of_size = "" if is_host else f" of {scope.size}"
        suffix = f" over {blocks}s{of_size}" if scope.is_across else f" in {blocks}{of_size}"
    return ScopeLinks(
        members,
        tuple(None if peer == rank else link_between(world, rank, peer) for peer in members),
        world.host(members[0]) == world.host(members[-1]),
        suffix,
        ALL if len(members) == num_ranks else scope,
    )
