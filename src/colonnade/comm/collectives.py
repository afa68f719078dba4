"""Sums and gathers over ranks: one order of additions for every world, and three ways for the bytes to travel.

The order belongs to the world and never to the way: the ranks of a host are added as neighbours in pairs, the pairs in
pairs, and so on, then the hosts likewise. All ways give the same bits on every rank, and so do all layouts of N ranks
whose `ranks_per_host` is a power of two, 1 and N among them: a host is then one node of the tree of all ranks. (gloo's
all_reduce adds along a ring that begins elsewhere for every chunk, so its bits follow the length of the buffer.)

Every message is an all_to_all, which is one hop; gloo's all_gather is a ring of as many hops as ranks.

Legend: N ranks, H hosts, L ranks of a host, S bytes of the buffer, m rows of this rank, M of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from colonnade.comm.mesh import ALL, Mesh, Scope
from colonnade.topology.world import World


def announced(mesh: Mesh, mine: bool) -> bool:
    """Collective where there are servers, on the channel "evaluate": whether the trainers read once more, or (all of
    them `mine` False) have read all. A server, which only listens, says False."""
    if not mesh.world.has_servers:
        return mine
    return bool(mesh.all_reduce("evaluate", torch.tensor(float(mine))))


def gather(mesh: Mesh, values: Tensor, channel: str = "gather") -> Tensor:
    """Collective, and its backward too: (m, ...) of every rank -> (M, ...) in rank order; m may differ, and be 0.

    A rank's rows receive the sum of all ranks' gradients, whose order is fixed. Every rank must take part in the
    backward, which it does when its loss is made of the result.
    """
    if mesh.num_ranks == 1:
        return values
    counts = [int(n) for n in mesh.all_gather(channel, torch.tensor(len(values)))]
    return _Gather.apply(values, mesh, counts, channel)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh, counts: list[int], channel: str) -> Tensor:
        ctx.mesh, ctx.counts, ctx.channel = mesh, counts, channel
        # gloo gathers blocks of one size, and on the CPU.
        padded = torch.zeros(max(counts), *values.shape[1:], dtype=values.dtype)
        padded[: len(values)] = values
        blocks = mesh.all_gather(channel, padded)
        rows = [block[:count] for block, count in zip(blocks, counts, strict=True)]
        return torch.cat(rows).to(values.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):  # type: ignore[override]
        (gradient,) = gradients
        total = gradient.to("cpu", copy=True).contiguous()
        ctx.mesh.all_reduce(ctx.channel, total)
        begin = sum(ctx.counts[: ctx.mesh.rank])
        mine = total[begin : begin + ctx.counts[ctx.mesh.rank]]
        return mine.to(gradient.device), None, None, None


Way = Literal["whole", "scattered", "by host"]
WAYS: tuple[Way, ...] = get_args(Way)
PIECE = 16384
"""Elements that one operation of torch takes at a time: it would share more than 32768 among threads, and the thread
that reduces is not to begin a second team of them."""


@dataclass(frozen=True, slots=True)
class Sent:
    """By one rank, for the sum of one buffer."""

    local_messages: int  # to other ranks of its host
    remote_messages: int  # to other hosts
    local_bytes: float
    remote_bytes: float

    def seconds(self, world: World) -> float:
        return (
            self.local_messages * world.message_seconds
            + self.remote_messages * world.remote_message_seconds
            + self.local_bytes / world.local_bytes_per_second
            + self.remote_bytes * world.ranks_per_host / world.remote_bytes_per_second
        )


def sent(way: Way, world: World, size: float, coded: float | None = None) -> Sent:
    """Pure. `size` bytes of buffer; the same for every rank. `coded`: bytes that stand for the whole buffer where
    they are fewer, which is on the slow hop: between hosts `by host`, everywhere else. A host's uplink carries
    L x `remote_bytes` out, and as much in: 2 (H - 1) L / H x S `scattered`, and 2 (H - 1) / H x S `by host`. `by host`
    two hosts send each other their sums whole, which is as many bytes in one message, unless it is coded."""
    ranks, hosts, local = world.num_ranks, world.num_hosts, world.ranks_per_host
    near, far = local - 1, ranks - local
    slow = size if coded is None else coded
    if way == "whole":
        return Sent(near, far, near * slow, far * slow)
    if way == "scattered":
        return Sent(2 * near, 2 * far, 2 * near * slow / ranks, 2 * far * slow / ranks)
    far, hops = hosts - 1, 1 if hosts == 2 and coded is None else 2
    return Sent(2 * near, hops * far, 2 * near * size / local, 2 * far * slow / ranks)


def choose_way(world: World, size: float) -> Way:
    """Pure: the fewest seconds by the world's links; a rank that knows them otherwise chooses otherwise. Short buffers
    go whole, in one hop, for every other hop waits for one more message; long ones cross an uplink once per host, not
    once per rank, where a host has several."""
    hops: dict[Way, int] = {"whole": 1, "scattered": 2}
    if world.num_hosts > 1 and world.ranks_per_host > 1:
        hops["by host"] = 3 if world.num_hosts == 2 else 4
    hop = world.remote_message_seconds if world.num_hosts > 1 else world.message_seconds
    return min(hops, key=lambda way: sent(way, world, size).seconds(world) + hops[way] * hop)


def way_of_layout(world: World) -> Way:
    """Pure: of sums that are rounded on their way (wire/coded_sums.py), whose bits follow the way and so may follow
    nothing that was measured. `by host` where there are several hosts of several ranks."""
    return "by host" if world.num_hosts > 1 and world.ranks_per_host > 1 else "scattered"


def sum_over_ranks(mesh: Mesh, values: Tensor, way: Way) -> None:
    """Collective, one issuing thread, in place. values (n,) on the CPU, contiguous, n a multiple of N."""
    ranks, hosts, local = mesh.num_ranks, mesh.world.num_hosts, mesh.world.ranks_per_host
    if ranks == 1:
        return
    if way == "whole":
        every = gathered(mesh, ALL, values, ranks).view(hosts, local, -1)
        _add(every, values)
    elif way == "scattered":
        part = added(scattered(mesh, ALL, values, ranks).view(hosts, local, -1))
        copy_in_pieces(gathered(mesh, ALL, part, ranks), values)
    else:
        of_host = added(scattered(mesh, mesh.in_host, values, local).view(1, local, -1))
        if hosts == 2:  # as many bytes as by shares, in one hop
            _add(gathered(mesh, mesh.over_hosts, of_host, hosts).view(hosts, 1, -1), of_host)
        else:
            part = added(scattered(mesh, mesh.over_hosts, of_host, hosts).view(hosts, 1, -1))
            of_host = gathered(mesh, mesh.over_hosts, part, hosts)
        copy_in_pieces(gathered(mesh, mesh.in_host, of_host, local), values)


def sum_in_order(parts: Tensor) -> Tensor:
    """(H, L, n) of all ranks -> (n,): the order that all ways keep."""
    for _ in range(2):  # over the ranks of a host, then over hosts
        parts = parts.transpose(0, 1)
        while len(parts) > 1:
            pairs = parts[0 : len(parts) - 1 : 2] + parts[1::2]
            parts = torch.cat([pairs, parts[-1:]]) if len(parts) % 2 else pairs
    return parts[0, 0]


def scattered(mesh: Mesh, scope: Scope, values: Tensor, size: int) -> Tensor:
    """(n,) -> (size x n / size,): this rank's share of every member's values, in rank order."""
    share = [len(values) // size] * size
    return mesh.all_to_all("dense", values, share, share, scope=scope)[0]


def gathered(mesh: Mesh, scope: Scope, values: Tensor, size: int) -> Tensor:
    """(n,) -> (size x n,): every member's values, in rank order."""
    send = mesh.room(size * len(values), values.dtype, scope)
    for block in send.view(size, -1):
        copy_in_pieces(values, block)
    share = [len(values)] * size
    return mesh.all_to_all("dense", send, share, share, scope=scope)[0]


def added(parts: Tensor) -> Tensor:
    out = parts.new_empty(parts.shape[-1])
    _add(parts, out)
    return out


def _add(parts: Tensor, out: Tensor) -> None:
    width = max(1, PIECE // (parts.shape[0] * parts.shape[1]))
    for piece, here in zip(parts.split(width, 2), out.split(width), strict=True):
        here.copy_(sum_in_order(piece))


def copy_in_pieces(values: Tensor, out: Tensor) -> None:
    for piece, here in zip(values.split(PIECE), out.split(PIECE), strict=True):
        here.copy_(piece)
