"""Sums and gathers over ranks: one order of additions for each world, and three algorithms that send the bytes.

The order of additions depends on the world only, not on the algorithm: neighbouring ranks of a host are added in pairs,
then the pairs in pairs, and so on; then the hosts likewise. All algorithms give the same bits on every rank. So do all
layouts of N ranks with a power of two as `ranks_per_host`, including 1 and N: each host is then one node of the tree
over all ranks. (gloo's all_reduce adds each chunk along a ring with another start, so its bits depend on the buffer's
length.)

Every message is an all_to_all, which is one hop; gloo's all_gather is a ring with as many hops as ranks.

Legend: N ranks, H hosts, L ranks of a host, S bytes of the buffer, m rows of this rank, M rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from colonnade.comm.mesh import ALL, Mesh, Scope
from colonnade.topology.world import World


def notify_servers(mesh: Mesh, has_batch: bool) -> bool:
    """Return whether any trainer has another batch to evaluate. Collective if there are servers (channel "evaluate").

    Tells the servers whether to serve another read. A server passes False."""
    if not mesh.world.has_servers:
        return has_batch
    return bool(mesh.all_reduce("evaluate", torch.tensor(float(has_batch))))


def concatenate_over_ranks(mesh: Mesh, own_rows: Tensor, channel: str = "gather") -> Tensor:
    """Concatenate the rows (m, ...) of all ranks to (M, ...), in rank order; m may differ between ranks, and be 0.

    Differentiable; forward and backward are collective. A rank's rows receive the sum of all ranks' gradients, added in
    a fixed order. Every rank must take part in the backward: compute its loss from the result.
    """
    if mesh.num_ranks == 1:
        return own_rows
    counts = [int(n) for n in mesh.all_gather(channel, torch.tensor(len(own_rows)))]
    return _Gather.apply(own_rows, mesh, counts, channel)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh, counts: list[int], channel: str) -> Tensor:
        ctx.mesh = mesh
        ctx.counts = counts
        ctx.channel = channel
        # gloo gathers equal blocks only, on the CPU.
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
        own_rows = total[begin : begin + ctx.counts[ctx.mesh.rank]]
        return own_rows.to(gradient.device), None, None, None


SumAlgorithm = Literal["whole", "scattered", "by host"]
SUM_ALGORITHMS: tuple[SumAlgorithm, ...] = get_args(SumAlgorithm)
CHUNK_ELEMENTS = 16384
"""Elements per torch operation: torch would use several threads for more than 32768, and the thread that reduces must
not start a second team of threads."""


@dataclass(frozen=True, slots=True)
class SumTraffic:
    """Messages and bytes that one rank sends for the sum of one buffer."""

    local_messages: int  # to other ranks of its host
    remote_messages: int  # to other hosts
    local_bytes: float
    remote_bytes: float

    def predict_seconds(self, world: World) -> float:
        """Return the time that the world's links take for this traffic."""
        return (
            self.local_messages * world.message_seconds
            + self.remote_messages * world.remote_message_seconds
            + self.local_bytes / world.local_bytes_per_second
            + self.remote_bytes * world.ranks_per_host / world.remote_bytes_per_second
        )


def estimate_sum_traffic(
    algorithm: SumAlgorithm, world: World, buffer_bytes: float, coded_bytes: float | None = None
) -> SumTraffic:
    """Return what each rank sends to sum a buffer of `buffer_bytes` bytes with algorithm `algorithm`. Pure.

    coded_bytes: bytes of the whole buffer on coded hops; None without a codec. `by host` codes the hops between hosts,
    the other algorithms all hops. A host's uplink sends L x `remote_bytes` and receives as much: 2 (H - 1) L / H x S
    for `scattered`, 2 (H - 1) / H x S for `by host`. With `by host` and without a codec, two hosts send each other
    their whole sums: the same number of bytes in one message."""
    ranks = world.num_ranks
    hosts = world.num_hosts
    local = world.ranks_per_host
    num_local = local - 1
    num_remote = ranks - local
    coded_size = buffer_bytes if coded_bytes is None else coded_bytes
    if algorithm == "whole":
        return SumTraffic(num_local, num_remote, num_local * coded_size, num_remote * coded_size)
    if algorithm == "scattered":
        return SumTraffic(
            2 * num_local,
            2 * num_remote,
            2 * num_local * coded_size / ranks,
            2 * num_remote * coded_size / ranks,
        )
    num_remote = hosts - 1
    hops = 1 if hosts == 2 and coded_bytes is None else 2
    return SumTraffic(
        2 * num_local,
        hops * num_remote,
        2 * num_local * buffer_bytes / local,
        2 * num_remote * coded_size / ranks,
    )


def choose_sum_algorithm(world: World, buffer_bytes: float) -> SumAlgorithm:
    """Return the fastest algorithm for a buffer of `buffer_bytes` bytes, by the world's link speeds. Pure.

    All ranks must know the same link speeds, or they choose differently. Short buffers are sent whole, in one hop,
    because each further hop waits for another message. Long buffers cross an uplink once per host, instead of once per
    rank, if hosts have several ranks."""
    hops: dict[SumAlgorithm, int] = {"whole": 1, "scattered": 2}
    if world.num_hosts > 1 and world.ranks_per_host > 1:
        hops["by host"] = 3 if world.num_hosts == 2 else 4
    hop = world.remote_message_seconds if world.num_hosts > 1 else world.message_seconds
    return min(
        hops,
        key=lambda way: (
            estimate_sum_traffic(way, world, buffer_bytes).predict_seconds(world) + hops[way] * hop
        ),
    )


def sum_algorithm_of_layout(world: World) -> SumAlgorithm:
    """Return the algorithm for coded sums (wire/dense_sums.py) from the layout of hosts and ranks alone. Pure.

    Coded sums are rounded on each hop, so their bits depend on the algorithm, which therefore must not depend on
    measured speeds. `by host` for several hosts of several ranks, else `scattered`."""
    return "by host" if world.num_hosts > 1 and world.ranks_per_host > 1 else "scattered"


def sum_over_ranks(mesh: Mesh, own_values: Tensor, algorithm: SumAlgorithm) -> None:
    """Sum values over ranks in place. Collective, from one issuing thread.

    own_values: (n,) on the CPU, contiguous, n a multiple of N."""
    ranks = mesh.num_ranks
    hosts = mesh.world.num_hosts
    local = mesh.world.ranks_per_host
    if ranks == 1:
        return
    if algorithm == "whole":
        copies = all_gather_in_scope(mesh, ALL, own_values, ranks).view(hosts, local, -1)
        _add(copies, own_values)
    elif algorithm == "scattered":
        share = sum_blocks(exchange_shares(mesh, ALL, own_values, ranks).view(hosts, local, -1))
        copy_in_chunks(all_gather_in_scope(mesh, ALL, share, ranks), own_values)
    else:
        host_share = sum_blocks(
            exchange_shares(mesh, mesh.host_scope, own_values, local).view(1, local, -1)
        )
        if hosts == 2:  # as many bytes as by shares, in one hop
            _add(
                all_gather_in_scope(mesh, mesh.cross_host_scope, host_share, hosts).view(
                    hosts, 1, -1
                ),
                host_share,
            )
        else:
            share = sum_blocks(
                exchange_shares(mesh, mesh.cross_host_scope, host_share, hosts).view(hosts, 1, -1)
            )
            host_share = all_gather_in_scope(mesh, mesh.cross_host_scope, share, hosts)
        copy_in_chunks(all_gather_in_scope(mesh, mesh.host_scope, host_share, local), own_values)


def sum_blocks_in_order(rank_blocks: Tensor) -> Tensor:
    """Sum the blocks (H, L, n) of all ranks to (n,), in the order of additions that all algorithms share."""
    for _ in range(2):  # over the ranks of a host, then over hosts
        rank_blocks = rank_blocks.transpose(0, 1)
        while len(rank_blocks) > 1:
            pairs = rank_blocks[0 : len(rank_blocks) - 1 : 2] + rank_blocks[1::2]
            rank_blocks = torch.cat([pairs, rank_blocks[-1:]]) if len(rank_blocks) % 2 else pairs
    return rank_blocks[0, 0]


def exchange_shares(mesh: Mesh, scope: Scope, values: Tensor, size: int) -> Tensor:
    """Send each member its share of `values` (n,); return this rank's share of all members' values, in rank order.

    Returns (size x n / size,)."""
    share = [len(values) // size] * size
    return mesh.all_to_all("dense", values, share, share, scope=scope)[0]


def all_gather_in_scope(mesh: Mesh, scope: Scope, own_values: Tensor, num_members: int) -> Tensor:
    """Send `own_values` (n,) to all members; return all members' values (size x n,), in rank order."""
    send = mesh.allocate_send_buffer(num_members * len(own_values), own_values.dtype, scope)
    for block in send.view(num_members, -1):
        copy_in_chunks(own_values, block)
    share = [len(own_values)] * num_members
    return mesh.all_to_all("dense", send, share, share, scope=scope)[0]


def sum_blocks(parts: Tensor) -> Tensor:
    """Return the sum of blocks (H, L, n), as `sum_blocks_in_order`, a chunk of elements at a time."""
    out = parts.new_empty(parts.shape[-1])
    _add(parts, out)
    return out


def _add(parts: Tensor, out: Tensor) -> None:
    width = max(1, CHUNK_ELEMENTS // (parts.shape[0] * parts.shape[1]))
    for chunk, out_chunk in zip(parts.split(width, 2), out.split(width), strict=True):
        out_chunk.copy_(sum_blocks_in_order(chunk))


def copy_in_chunks(values: Tensor, out: Tensor) -> None:
    """Copy values to `out`, a chunk of elements at a time, so that torch uses one thread."""
    for chunk, out_chunk in zip(
        values.split(CHUNK_ELEMENTS), out.split(CHUNK_ELEMENTS), strict=True
    ):
        out_chunk.copy_(chunk)
