"""Transports by tower (SPTT of DMT, Luo et al. 2024): inside a tower to one of its ranks, and from it to its peers.

Rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its peers: the ranks l of all
towers (`TowerTransport`). Parts of rows that were split inside the tower are added there, in the order of the ranks.
It then sends each peer one message: those columns, or an operator's results on them (`PeerTransport`). Gradients take
the same way back. So a rank exchanges slow messages with one rank of every other tower, each as large as all of a
tower's columns.

A rank serves its peers in two chunks (class `Turn`): peers of the other towers first, itself last. So its own samples'
values are sent inside the tower, and computed on, while the slow messages are sent; gradients use the reverse order.
This costs a second message inside the tower, and none between towers.

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
from colonnade.comm.process_groups import open_scopes
from colonnade.lookup.fields import Columns, runs_of
from colonnade.ops.memory import empty
from colonnade.wire.codec import CODECS, Block, Codec, Draw, encode
from colonnade.wire.coding import Coding
from colonnade.wire.transport import (
    DirectRoute,
    HostRoute,
    PendingTransfer,
    add_runs,
    arriving,
    elements,
    take_runs,
    together,
)


@dataclass(frozen=True, slots=True)
class Turn:
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
def turns_of(rank: int, size: int, sizes: tuple[int, ...]) -> tuple[Turn, ...]:
    """Return the chunks of a rank of a tower of `size` ranks, its own tower's last. sizes: samples by rank. Cached,
    because batches of one run mostly have the same sizes."""
    own, local_rank = divmod(rank, size)
    others = tuple(tower for tower in range(len(sizes) // size) if tower != own)
    ends = [0, *accumulate(sizes)]
    turns = []
    for towers in (others, (own,)):
        if not towers:
            continue
        ranks = tuple(tower * size + number for number in range(size) for tower in towers)
        counts = tuple(sum(sizes[t * size + number] for t in towers) for number in range(size))
        is_run = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
        rows = slice(ends[ranks[0]], ends[ranks[-1] + 1]) if is_run else None
        turns.append(Turn(towers, ranks, counts, counts[local_rank], rows))
    return tuple(turns)


def peers_of(rank: int, size: int, num_ranks: int) -> list[int]:
    """Return the peers of a rank in the order in which it serves them, itself last."""
    return [r for r in range(rank % size, num_ranks, size) if r != rank] + [rank]


class TowerTransport:
    """Transport of the inner hop: sums of fields whose rows are all in one tower are gathered inside it, exactly."""

    roundings = 0

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        messages: Sequence[Columns],
        inside: Columns,
        dtype: torch.dtype,
    ) -> None:
        """Open the transport's groups. Collective. size: S. messages: columns that each rank of the world pools;
        inside: all columns of this tower."""
        self.mesh, self.size, self.inside, self.dtype = mesh, size, inside, dtype
        self.columns = messages[mesh.rank]
        first = mesh.rank // size * size
        members = messages[first : first + size]
        self.widths = [member.width for member in members]
        self.width = sum(self.widths)
        self.runs = runs_of([member.starts.items() for member in members], inside)
        self.scope = Scope(size)
        open_scopes(mesh, size)

    def send(self, blocks: Iterable[Tensor], sizes: Sequence[int], tag: str) -> PendingTransfer:
        """Send block (G, P): the samples of each local rank's peers to that rank."""
        (block,) = blocks
        width, rows, parts = self.columns.width, block.split(list(sizes)), []
        for turn in turns_of(self.mesh.rank, self.size, tuple(sizes)):
            if turn.rows is None:
                send = torch.cat([rows[rank] for rank in turn.ranks])
            else:
                send = block[turn.rows]
            received, call = send.view(-1), None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "fetch", received,
                    [n * width for n in turn.counts],
                    [turn.num_samples * w for w in self.widths], scope=self.scope, wait=False, traffic_tag=tag,
                    into=empty(turn.num_samples * self.width, dtype=self.dtype),
                )  # fmt: skip
            parts.append(PendingTransfer(received, call, send))
        return together(parts)

    def receive(self, pending: PendingTransfer, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield all columns of the tower by chunk, (m, W), contiguous, peer by peer. The next chunk may still be
        pending when one is yielded."""
        turns = turns_of(self.mesh.rank, self.size, tuple(sizes))
        for turn, transfer in zip(turns, pending.parts, strict=True):
            transfer.wait()
            total = empty(turn.num_samples, self.inside.width, dtype=self.dtype)
            parts = transfer.received.split([turn.num_samples * width for width in self.widths])
            for part, width, runs in zip(parts, self.widths, self.runs, strict=True):
                add_runs(part.view(turn.num_samples, width), total, runs)
            yield total

    def send_back(self, gradients: Iterable[Tensor], sizes: Sequence[int]) -> PendingTransfer:
        """Send gradients (m, W) of the tower's columns, the last chunk first, to the ranks that pooled them."""
        width, parts = self.columns.width, []
        total = empty(sum(sizes), width, dtype=self.dtype)
        turns = turns_of(self.mesh.rank, self.size, tuple(sizes))
        for turn, gradient in zip(reversed(turns), gradients, strict=True):
            send = empty(turn.num_samples * self.width, dtype=self.dtype)
            lengths = [turn.num_samples * member_width for member_width in self.widths]
            for part, member_width, runs in zip(
                send.split(lengths), self.widths, self.runs, strict=True
            ):
                take_runs(gradient, part.view(turn.num_samples, member_width), runs)
            received, call = send, None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "push", send, lengths,
                    [n * width for n in turn.counts], scope=self.scope, wait=False,
                    into=None if turn.rows is None else total[turn.rows].view(-1),
                )  # fmt: skip
            parts.append(PendingTransfer(received, call, send))
        return PendingTransfer(total, parts=parts)

    def receive_back(self, pending: PendingTransfer, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield gradients of the columns that this rank had pooled, as one block (G, P)."""
        total, width = pending.received, self.columns.width
        rows = total.split(list(sizes))
        turns = turns_of(self.mesh.rank, self.size, tuple(sizes))
        for turn, transfer in zip(reversed(turns), pending.parts, strict=True):
            transfer.wait()
            if turn.rows is None or self.size == 1:
                counts = [sizes[rank] for rank in turn.ranks]
                parts = transfer.received.view(sum(counts), width).split(counts)
                for rank, part in zip(turn.ranks, parts, strict=True):
                    rows[rank].copy_(part)
        yield total


class PeerTransport:
    """Transport of the last hop between towers: from the rank that has all of a tower's columns for a sample to the
    sample's rank. Codecs apply to this hop."""

    roundings = 1
    routes: tuple[DirectRoute | HostRoute, ...] = ()

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        carried: Sequence[Columns],
        whole: Columns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        """Open the transport's groups. Collective. size: S. carried: columns that each tower sends; whole: all columns
        at the samples' ranks."""
        self.mesh, self.size, self.coding, self.dtype = mesh, size, coding, dtype
        self.tower = mesh.rank // size
        self.carried = carried
        self.widths = [columns.width for columns in carried]
        self.runs = runs_of([columns.starts.items() for columns in carried], whole)
        self.dims = [tuple(columns.dims.values()) for columns in carried]
        self.scope = Scope(size, is_across=True)
        open_scopes(mesh, size)

    def split(self, block: Tensor, sizes: Sequence[int]) -> Iterable[Tensor]:
        """Split block (M, W), whose samples are in the order of `peers_of`, by chunk. A tower without fields may pass
        any number of rows without columns."""
        counts = [turn.num_samples for turn in self._turns(sizes)]
        return block[: sum(counts)].split(counts)

    def send(self, blocks: Iterable[Tensor], sizes: Sequence[int], tag: str) -> PendingTransfer:
        """Send the tower's columns for its peers' samples: (m, Y) for each chunk, contiguous."""
        codec, parts = CODECS[self.coding.codecs.values], []
        for turn, block in zip(self._turns(sizes), blocks, strict=True):
            served, wanted = self._served(turn, sizes), self._wanted(turn, sizes)
            data = coded = encode(codec, block.view(-1), served)
            call = None
            if turn.towers != (self.tower,):
                data, call = self.mesh.all_to_all(
                    "fetch", coded, self._lengths(codec, turn, served),
                    self._lengths(codec, turn, wanted), scope=self.scope, wait=False, traffic_tag=tag,
                )  # fmt: skip
            received, decode = arriving(codec, data, wanted, self.dtype)
            parts.append(PendingTransfer(received, call, coded, decode))
        return together(parts)

    def add(self, pending: PendingTransfer, total: Tensor) -> None:
        size = len(total)
        # Chunks have the same towers whatever the sizes, so the order of the parts gives their towers.
        others = tuple(tower for tower in range(len(self.carried)) if tower != self.tower)
        every_turn = [towers for towers in (others, (self.tower,)) if towers]
        for towers, part in zip(every_turn, pending.parts, strict=True):
            blocks = part.received.split([size * self.widths[tower] for tower in towers])
            for tower, block in zip(towers, blocks, strict=True):
                add_runs(block.view(size, self.widths[tower]), total, self.runs[tower])

    def send_back_total(
        self, total: Tensor, sizes: Sequence[int], step: int, number: int
    ) -> PendingTransfer:
        """Send gradients: total (B, all columns)."""
        codec, size = CODECS[self.coding.codecs.gradients], len(total)
        samples, rank, parts = torch.arange(size), self.mesh.rank, []
        for turn in self._turns(sizes):
            served, wanted = self._served(turn, sizes), self._wanted(turn, sizes)
            send = empty(sum(elements(wanted)), dtype=self.dtype)
            for tower, part in zip(turn.towers, send.split(elements(wanted)), strict=True):
                take_runs(total, part.view(size, self.widths[tower]), self.runs[tower])
            draws = [
                Draw(samples, self.coding.seed(f"tower {tower}", rank, number), step)
                for tower in turn.towers
            ]
            data = coded = encode(codec, send, wanted, draws)
            call = None
            if turn.towers != (self.tower,):
                data, call = self.mesh.all_to_all(
                    "push", coded, self._lengths(codec, turn, wanted),
                    self._lengths(codec, turn, served), scope=self.scope, wait=False,
                )  # fmt: skip
            received, decode = arriving(codec, data, served, self.dtype)
            parts.append(PendingTransfer(received, call, coded, decode))
        return together(parts)

    def receive_back(self, pending: PendingTransfer, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield gradients (m, Y) of the columns that this tower sent, the last chunk first. The chunk before may still
        be pending when one is yielded."""
        width = self.widths[self.tower]
        for turn, part in zip(reversed(self._turns(sizes)), reversed(pending.parts), strict=True):
            part.wait()
            yield part.received.view(turn.num_samples, width)

    def _turns(self, sizes: Sequence[int]) -> tuple[Turn, ...]:
        return turns_of(self.mesh.rank, self.size, tuple(sizes))

    def _served(self, turn: Turn, sizes: Sequence[int]) -> list[Block]:
        """Return by peer in the chunk's towers the block of its samples that this tower sends."""
        local_rank, dims = self.mesh.rank % self.size, self.dims[self.tower]
        return [Block(sizes[tower * self.size + local_rank], dims) for tower in turn.towers]

    def _wanted(self, turn: Turn, sizes: Sequence[int]) -> list[Block]:
        """Return by tower of the chunk the block of this rank's samples that it sends."""
        return [Block(sizes[self.mesh.rank], self.dims[tower]) for tower in turn.towers]

    def _lengths(self, codec: Codec, turn: Turn, blocks: Sequence[Block]) -> list[int]:
        """Return by peer of every tower the bytes of its block; 0 for peers outside the chunk."""
        lengths = [0] * len(self.carried)
        for tower, block in zip(turn.towers, blocks, strict=True):
            lengths[tower] = block.bytes_of(codec, self.dtype)
        return lengths
