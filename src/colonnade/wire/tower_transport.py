"""Transports by tower (SPTT of DMT, Luo et al. 2024): inside a tower to one of its ranks, and from it to its peers.

Rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its peers: the ranks l of all
towers (`TowerTransport`). Parts of rows that were split inside the tower are added there, in the order of the ranks.
It then sends each peer one message: those columns, or an operator's results on them (`PeerTransport`). Gradients take
the same way back. So a rank exchanges slow messages with one rank of every other tower, each as large as all of a
tower's columns.

A rank serves its peers in two chunks (class `PeerChunk`): peers of the other towers first, itself last. So its own
samples' values are sent inside the tower, and computed on, while the slow messages are sent; gradients use the reverse
order. This costs a second message inside the tower, and none between towers.

Legend: T towers of S ranks, B samples of this rank, G of all ranks, M of its peers, m of the peers of a chunk, P
columns of this rank, W of its tower, Y sent by the tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from colonnade.comm.mesh import Mesh, Scope
from colonnade.comm.process_groups import open_tower_scopes
from colonnade.lookup.fields import FieldColumns, find_runs
from colonnade.ops.memory import empty
from colonnade.wire.codec import CODECS, Codec, RoundingKey, RowBlock, encode_elements
from colonnade.wire.coding import Coding
from colonnade.wire.transport import (
    DirectRoute,
    HostRoute,
    PendingTransfer,
    add_columns,
    block_elements,
    combine_transfers,
    extract_columns,
    prepare_decoding,
)


@dataclass(frozen=True, slots=True)
class PeerChunk:
    """Chunk of a rank's peers: those of some towers, which it serves at once."""

    towers: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of these towers, local rank after local rank: the order of their samples inside this tower."""
    counts: tuple[int, ...]
    """Samples of these towers' ranks by local rank."""
    num_samples: int
    """Number m of samples of this rank's peers in these towers."""
    rows: slice | None
    """Rows of a block (G, ..) that are these ranks' samples, where they are contiguous."""


@lru_cache(maxsize=64)
def plan_tower_chunks(
    rank: int, tower_size: int, batch_sizes: tuple[int, ...]
) -> tuple[PeerChunk, ...]:
    """Return the chunks of a rank of a tower of `tower_size` ranks, its own tower's last. batch_sizes: samples by
    rank. Cached, because batches of one run mostly have the same sizes."""
    own, local_rank = divmod(rank, tower_size)
    others = tuple(tower for tower in range(len(batch_sizes) // tower_size) if tower != own)
    ends = [0, *accumulate(batch_sizes)]
    chunks = []
    for towers in (others, (own,)):
        if not towers:
            continue
        ranks = tuple(
            tower * tower_size + number for number in range(tower_size) for tower in towers
        )
        counts = tuple(
            sum(batch_sizes[t * tower_size + number] for t in towers)
            for number in range(tower_size)
        )
        is_run = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
        rows = slice(ends[ranks[0]], ends[ranks[-1] + 1]) if is_run else None
        chunks.append(PeerChunk(towers, ranks, counts, counts[local_rank], rows))
    return tuple(chunks)


def order_peers(rank: int, size: int, num_ranks: int) -> list[int]:
    """Return the peers of a rank in the order in which it serves them, itself last."""
    return [r for r in range(rank % size, num_ranks, size) if r != rank] + [rank]


class TowerTransport:
    """Transport of the inner hop: sums of fields whose rows are all in one tower are gathered inside it, exactly."""

    num_roundings = 0

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        messages: Sequence[FieldColumns],
        inside: FieldColumns,
        dtype: torch.dtype,
    ) -> None:
        """Open the transport's groups. Collective. size: S. messages: columns that each rank of the world pools;
        inside: all columns of this tower."""
        self.mesh = mesh
        self.size = size
        self.inside = inside
        self.dtype = dtype
        self.columns = messages[mesh.rank]
        first = mesh.rank // size * size
        members = messages[first : first + size]
        self.widths = [member.width for member in members]
        self.width = sum(self.widths)
        self.runs = find_runs([member.starts.items() for member in members], inside)
        self.scope = Scope(size)
        open_tower_scopes(mesh, size)

    def send_values(
        self, value_blocks: Iterable[Tensor], batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        """Send block (G, P): the samples of each local rank's peers to that rank."""
        (block,) = value_blocks
        width = self.columns.width
        rows = block.split(list(batch_sizes))
        parts = []
        for chunk in plan_tower_chunks(self.mesh.rank, self.size, tuple(batch_sizes)):
            if chunk.rows is None:
                send = torch.cat([rows[rank] for rank in chunk.ranks])
            else:
                send = block[chunk.rows]
            received = send.view(-1)
            call = None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "fetch",
                    received,
                    [n * width for n in chunk.counts],
                    [chunk.num_samples * w for w in self.widths],
                    scope=self.scope,
                    wait=False,
                    traffic_tag=traffic_tag,
                    into=empty(chunk.num_samples * self.width, dtype=self.dtype),
                )
            parts.append(PendingTransfer(received, call, send))
        return combine_transfers(parts)

    def receive_values(
        self, pending: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield all columns of the tower by chunk, (m, W), contiguous, peer by peer. The next chunk may still be
        pending when one is yielded."""
        chunks = plan_tower_chunks(self.mesh.rank, self.size, tuple(batch_sizes))
        for chunk, transfer in zip(chunks, pending.parts, strict=True):
            transfer.wait()
            total = empty(chunk.num_samples, self.inside.width, dtype=self.dtype)
            parts = transfer.received.split([chunk.num_samples * width for width in self.widths])
            for part, width, runs in zip(parts, self.widths, self.runs, strict=True):
                add_columns(part.view(chunk.num_samples, width), total, runs)
            yield total

    def send_gradients(
        self, gradients: Iterable[Tensor], batch_sizes: Sequence[int]
    ) -> PendingTransfer:
        """Send gradients (m, W) of the tower's columns, the last chunk first, to the ranks that pooled them."""
        width = self.columns.width
        parts = []
        total = empty(sum(batch_sizes), width, dtype=self.dtype)
        chunks = plan_tower_chunks(self.mesh.rank, self.size, tuple(batch_sizes))
        for chunk, gradient in zip(reversed(chunks), gradients, strict=True):
            send = empty(chunk.num_samples * self.width, dtype=self.dtype)
            lengths = [chunk.num_samples * member_width for member_width in self.widths]
            for part, member_width, runs in zip(
                send.split(lengths), self.widths, self.runs, strict=True
            ):
                extract_columns(gradient, part.view(chunk.num_samples, member_width), runs)
            received = send
            call = None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "push",
                    send,
                    lengths,
                    [n * width for n in chunk.counts],
                    scope=self.scope,
                    wait=False,
                    into=None if chunk.rows is None else total[chunk.rows].view(-1),
                )
            parts.append(PendingTransfer(received, call, send))
        return PendingTransfer(total, parts=parts)

    def receive_gradients(
        self, pending_transfer: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield gradients of the columns that this rank had pooled, as one block (G, P)."""
        total = pending_transfer.received
        width = self.columns.width
        rows = total.split(list(batch_sizes))
        chunks = plan_tower_chunks(self.mesh.rank, self.size, tuple(batch_sizes))
        for chunk, transfer in zip(reversed(chunks), pending_transfer.parts, strict=True):
            transfer.wait()
            if chunk.rows is None or self.size == 1:
                counts = [batch_sizes[rank] for rank in chunk.ranks]
                parts = transfer.received.view(sum(counts), width).split(counts)
                for rank, part in zip(chunk.ranks, parts, strict=True):
                    rows[rank].copy_(part)
        yield total


class PeerTransport:
    """Transport of the last hop between towers: from the rank that has all of a tower's columns for a sample to the
    sample's rank. Codecs apply to this hop."""

    num_roundings = 1
    routes: tuple[DirectRoute | HostRoute, ...] = ()

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        carried: Sequence[FieldColumns],
        whole: FieldColumns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        """Open the transport's groups. Collective. size: S. carried: columns that each tower sends; whole: all columns
        at the samples' ranks."""
        self.mesh = mesh
        self.size = size
        self.coding = coding
        self.dtype = dtype
        self.tower = mesh.rank // size
        self.carried = carried
        self.widths = [columns.width for columns in carried]
        self.runs = find_runs([columns.starts.items() for columns in carried], whole)
        self.dims = [tuple(columns.dims.values()) for columns in carried]
        self.scope = Scope(size, is_across=True)
        open_tower_scopes(mesh, size)

    def split_by_chunk(self, block: Tensor, sizes: Sequence[int]) -> Iterable[Tensor]:
        """Split block (M, W), whose samples are in the order of `order_peers`, by chunk. A tower without fields may
        pass any number of rows without columns."""
        counts = [chunk.num_samples for chunk in self._chunks(sizes)]
        blocks: tuple[Tensor, ...] = block[: sum(counts)].split(counts)
        return blocks

    def send_values(
        self, value_blocks: Iterable[Tensor], batch_sizes: Sequence[int], traffic_tag: str
    ) -> PendingTransfer:
        """Send the tower's columns for its peers' samples: (m, Y) for each chunk, contiguous."""
        codec = CODECS[self.coding.codecs.values]
        parts = []
        for chunk, block in zip(self._chunks(batch_sizes), value_blocks, strict=True):
            served = self._served_blocks(chunk, batch_sizes)
            wanted = self._own_blocks(chunk, batch_sizes)
            data = coded = encode_elements(codec, block.view(-1), served)
            call = None
            if chunk.towers != (self.tower,):
                data, call = self.mesh.all_to_all(
                    "fetch",
                    coded,
                    self._lengths(codec, chunk, served),
                    self._lengths(codec, chunk, wanted),
                    scope=self.scope,
                    wait=False,
                    traffic_tag=traffic_tag,
                )
            received, decode = prepare_decoding(codec, data, wanted, self.dtype)
            parts.append(PendingTransfer(received, call, coded, decode))
        return combine_transfers(parts)

    def add_received_values(self, pending_transfer: PendingTransfer, sums_out: Tensor) -> None:
        size = len(sums_out)
        # Chunks have the same towers whatever the sizes, so the order of the parts gives their towers.
        others = tuple(tower for tower in range(len(self.carried)) if tower != self.tower)
        towers_by_chunk = [towers for towers in (others, (self.tower,)) if towers]
        for towers, part in zip(towers_by_chunk, pending_transfer.parts, strict=True):
            blocks = part.received.split([size * self.widths[tower] for tower in towers])
            for tower, block in zip(towers, blocks, strict=True):
                add_columns(block.view(size, self.widths[tower]), sums_out, self.runs[tower])

    def send_gradients(
        self, gradients: Tensor, batch_sizes: Sequence[int], step: int, batch_index: int
    ) -> PendingTransfer:
        """Send gradients: total (B, all columns)."""
        codec = CODECS[self.coding.codecs.gradients]
        size = len(gradients)
        samples = torch.arange(size)
        rank = self.mesh.rank
        parts = []
        for chunk in self._chunks(batch_sizes):
            served = self._served_blocks(chunk, batch_sizes)
            wanted = self._own_blocks(chunk, batch_sizes)
            send = empty(sum(block_elements(wanted)), dtype=self.dtype)
            for tower, part in zip(chunk.towers, send.split(block_elements(wanted)), strict=True):
                extract_columns(gradients, part.view(size, self.widths[tower]), self.runs[tower])
            rounding_keys = [
                RoundingKey(
                    samples, self.coding.gradient_seed(f"tower {tower}", rank, batch_index), step
                )
                for tower in chunk.towers
            ]
            data = coded = encode_elements(codec, send, wanted, rounding_keys)
            call = None
            if chunk.towers != (self.tower,):
                data, call = self.mesh.all_to_all(
                    "push",
                    coded,
                    self._lengths(codec, chunk, wanted),
                    self._lengths(codec, chunk, served),
                    scope=self.scope,
                    wait=False,
                )
            received, decode = prepare_decoding(codec, data, served, self.dtype)
            parts.append(PendingTransfer(received, call, coded, decode))
        return combine_transfers(parts)

    def receive_gradients(
        self, pending_transfer: PendingTransfer, batch_sizes: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield gradients (m, Y) of the columns that this tower sent, the last chunk first. The chunk before may still
        be pending when one is yielded."""
        width = self.widths[self.tower]
        for chunk, part in zip(
            reversed(self._chunks(batch_sizes)), reversed(pending_transfer.parts), strict=True
        ):
            part.wait()
            yield part.received.view(chunk.num_samples, width)

    def _chunks(self, sizes: Sequence[int]) -> tuple[PeerChunk, ...]:
        return plan_tower_chunks(self.mesh.rank, self.size, tuple(sizes))

    def _served_blocks(self, chunk: PeerChunk, sizes: Sequence[int]) -> list[RowBlock]:
        """Return by peer in the chunk's towers the block of its samples that this tower sends."""
        local_rank = self.mesh.rank % self.size
        dims = self.dims[self.tower]
        return [RowBlock(sizes[tower * self.size + local_rank], dims) for tower in chunk.towers]

    def _own_blocks(self, chunk: PeerChunk, sizes: Sequence[int]) -> list[RowBlock]:
        """Return by tower of the chunk the block of this rank's samples that it sends."""
        return [RowBlock(sizes[self.mesh.rank], self.dims[tower]) for tower in chunk.towers]

    def _lengths(self, codec: Codec, chunk: PeerChunk, blocks: Sequence[RowBlock]) -> list[int]:
        """Return by peer of every tower the bytes of its block; 0 for peers outside the chunk."""
        lengths = [0] * len(self.carried)
        for tower, block in zip(chunk.towers, blocks, strict=True):
            lengths[tower] = block.encoded_bytes(codec, self.dtype)
        return lengths
