"""Transports by tower (SPTT of DMT, Luo et al. 2024): inside a tower to one rank of it, and from there to its peers.

Rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its peers: the ranks l of all
towers (`TowerTransport`). Parts of rows that were split inside the tower are added there, in the order of the ranks.
What it then sends each peer is one message: those columns, or what an operator made of them (`PeerTransport`).
Gradients go the same way back. So a rank exchanges slow messages with as many others as there are other towers, each as
large as all of a tower's columns.

A rank serves its peers in two turns: those of the other towers first, itself last. So what it has for itself moves
inside the tower, and is computed, while the slow messages travel; on the way back the turns change places. This costs
a second message inside the tower, and none between towers.

Legend: T towers of S ranks, B samples of this rank, G of all ranks, M of its peers, m of those of a turn, P columns of
this rank, W of its tower, Y of what leaves the tower.
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
    PendingTransfer,
    add_runs,
    arriving,
    elements,
    take_runs,
    together,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """Towers whose peers a rank serves at once."""

    towers: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of these towers, local rank after local rank: the order of their samples inside this tower."""
    counts: tuple[int, ...]
    """By local rank: samples of the ranks of that number in these towers."""
    num_samples: int
    """m: samples of this rank's peers in these towers."""
    rows: slice | None
    """Rows of a block (G, ..) that are these ranks' samples, where they are side by side."""


@lru_cache(maxsize=64)
def turns_of(rank: int, size: int, sizes: tuple[int, ...]) -> tuple[Turn, ...]:
    """Return the turns of a rank of a tower of `size` ranks, its own tower's last. sizes: samples by rank. Batches of
    one run are mostly of the same sizes."""
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
    """Inner hop of fields whose rows are all in one tower, exact: what its ranks pooled comes together."""

    roundings = 0

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        messages: Sequence[Columns],
        inside: Columns,
        dtype: torch.dtype,
    ) -> None:
        """Collective. size: S. messages: by rank of the world, what it pools; inside: all columns of this tower."""
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
        """Send block (G, P): to each local rank the samples of its peers."""
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
                    [turn.num_samples * w for w in self.widths], scope=self.scope, wait=False, counts_as=tag,
                    into=empty(turn.num_samples * self.width, dtype=self.dtype),
                )  # fmt: skip
            parts.append(PendingTransfer(received, call, send))
        return together(parts)

    def receive(self, pending: PendingTransfer, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield (m, W), contiguous: all columns of the tower, peer after peer. That of the next turn may still be on
        its way when one is yielded."""
        turns = turns_of(self.mesh.rank, self.size, tuple(sizes))
        for turn, transfer in zip(turns, pending.parts, strict=True):
            transfer.wait()
            total = empty(turn.num_samples, self.inside.width, dtype=self.dtype)
            parts = transfer.received.split([turn.num_samples * width for width in self.widths])
            for part, width, runs in zip(parts, self.widths, self.runs, strict=True):
                add_runs(part.view(turn.num_samples, width), total, runs)
            yield total

    def send_back(self, gradients: Iterable[Tensor], sizes: Sequence[int]) -> PendingTransfer:
        """Send (m, W) of the tower's columns, the last turn first, to the ranks that pooled them."""
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
        """Yield one block (G, P): gradients of what this rank had pooled."""
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
    """Last hop of what leaves towers: from the rank that has all columns of a tower for a sample to the sample's rank.
    Codecs apply here."""

    roundings = 1

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        carried: Sequence[Columns],
        whole: Columns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        """Collective. size: S. carried: by tower, what leaves it; whole: all columns at the samples' ranks."""
        self.mesh, self.size, self.coding, self.dtype = mesh, size, coding, dtype
        self.tower = mesh.rank // size
        self.carried = carried
        self.widths = [columns.width for columns in carried]
        self.runs = runs_of([columns.starts.items() for columns in carried], whole)
        self.dims = [tuple(columns.dims.values()) for columns in carried]
        self.scope = Scope(size, is_across=True)
        open_scopes(mesh, size)

    def split(self, block: Tensor, sizes: Sequence[int]) -> Iterable[Tensor]:
        """Cut block (M, W), whose samples are in the order of `peers_of`; of a tower without fields it may have any
        rows, of no columns."""
        counts = [turn.num_samples for turn in self._turns(sizes)]
        return block[: sum(counts)].split(counts)

    def send(self, blocks: Iterable[Tensor], sizes: Sequence[int], tag: str) -> PendingTransfer:
        """Send (m, Y) for each turn, contiguous: what leaves the tower, for its peers' samples."""
        codec, parts = CODECS[self.coding.codecs.values], []
        for turn, block in zip(self._turns(sizes), blocks, strict=True):
            served, wanted = self._served(turn, sizes), self._wanted(turn, sizes)
            data = coded = encode(codec, block.view(-1), served)
            call = None
            if turn.towers != (self.tower,):
                data, call = self.mesh.all_to_all(
                    "fetch", coded, self._lengths(codec, turn, served),
                    self._lengths(codec, turn, wanted), scope=self.scope, wait=False, counts_as=tag,
                )  # fmt: skip
            received, decode = arriving(codec, data, wanted, self.dtype)
            parts.append(PendingTransfer(received, call, coded, decode))
        return together(parts)

    def add(self, pending: PendingTransfer, total: Tensor) -> None:
        size = len(total)
        # Turns are the same whatever the sizes: towers are told from the order of the parts.
        others = tuple(tower for tower in range(len(self.carried)) if tower != self.tower)
        every_turn = [towers for towers in (others, (self.tower,)) if towers]
        for towers, part in zip(every_turn, pending.parts, strict=True):
            blocks = part.received.split([size * self.widths[tower] for tower in towers])
            for tower, block in zip(towers, blocks, strict=True):
                add_runs(block.view(size, self.widths[tower]), total, self.runs[tower])

    def send_back_total(
        self, total: Tensor, sizes: Sequence[int], step: int, number: int
    ) -> PendingTransfer:
        """Send total (B, all columns): gradients."""
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
        """Yield (m, Y) of what left this tower, the last turn first. That of the one before may still be on its way
        when one is yielded."""
        width = self.widths[self.tower]
        for turn, part in zip(reversed(self._turns(sizes)), reversed(pending.parts), strict=True):
            part.wait()
            yield part.received.view(turn.num_samples, width)

    def _turns(self, sizes: Sequence[int]) -> tuple[Turn, ...]:
        return turns_of(self.mesh.rank, self.size, tuple(sizes))

    def _served(self, turn: Turn, sizes: Sequence[int]) -> list[Block]:
        """Return by peer in those towers: of its samples, what leaves this tower."""
        local_rank, dims = self.mesh.rank % self.size, self.dims[self.tower]
        return [Block(sizes[tower * self.size + local_rank], dims) for tower in turn.towers]

    def _wanted(self, turn: Turn, sizes: Sequence[int]) -> list[Block]:
        """Return by tower: of this rank's samples, what leaves it."""
        return [Block(sizes[self.mesh.rank], self.dims[tower]) for tower in turn.towers]

    def _lengths(self, codec: Codec, turn: Turn, blocks: Sequence[Block]) -> list[int]:
        """Return by peer of any tower: bytes of blocks that go to those towers' or come from there."""
        lengths = [0] * len(self.carried)
        for tower, block in zip(turn.towers, blocks, strict=True):
            lengths[tower] = block.bytes_of(codec, self.dtype)
        return lengths
