"""How what a tower's ranks pooled travels: to one rank of the tower first, then from there to the samples' ranks (SPTT
of DMT, Luo et al. 2024).

Rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its peers: the ranks l of all
towers. Parts of rows that were split inside the tower are added there, in the order of the ranks. What it then sends
each peer is one message: those columns, or what an operator made of them. Gradients go the same way back. So a rank
exchanges slow messages with as many others as there are other towers, each as large as all of a tower's columns.

Legend: N ranks, T towers of S ranks, B samples of this rank, G of all, M of its peers, P columns of this rank, W of its
tower, Y of what leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from colonnade.exchange.codec import CODECS, Block, Codec, Draw, encode
from colonnade.exchange.coding import Coding
from colonnade.exchange.fields import Columns, runs_of
from colonnade.exchange.travel import Flight, add_runs, arrived, arriving, elements, take_runs
from colonnade.ops.memory import empty
from colonnade.topology.mesh import IN_TOWER, OVER_TOWERS, Mesh, open_towers


class ByTower:
    """For the columns of fields whose rows all lie in one tower. Codecs apply between towers; inside one, values and
    gradients are exact."""

    roundings = 1

    def __init__(
        self,
        mesh: Mesh,
        size: int,
        messages: Sequence[Columns],
        towers: Sequence[Columns],
        carried: Sequence[Columns],
        whole: Columns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        """size: S. By rank: `messages`, what it pools of them. By tower: `towers`, those of its ranks, and `carried`,
        what leaves it. Collective."""
        self.mesh, self.size, self.coding, self.dtype = mesh, size, coding, dtype
        every, (self.tower, number) = range(mesh.num_ranks), divmod(mesh.rank, size)
        self.columns = messages[mesh.rank]
        self.inside, self.carried = towers[self.tower], carried
        mates = messages[self.tower * size :][:size]
        self.widths = [mate.width for mate in mates]
        self.parts = runs_of([mate.starts.items() for mate in mates], self.inside)
        self.blocks = runs_of([columns.starts.items() for columns in carried], whole)
        self.dims = [tuple(columns.dims.values()) for columns in carried]
        self.alike = [every[n::size] for n in range(size)]
        self.peers = self.alike[number]
        open_towers(mesh, size, ("fetch", "push"))

    def fetch(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        """Inside the tower before it returns; between towers it may still travel."""
        return self.leave(self.gather(block, sizes, counts_as), sizes, counts_as)

    def push(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Flight:
        """Has come when it returns."""
        return Flight(self.scatter(self.come_back(total, sizes, step, number), sizes), None)

    def gather(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Tensor:
        """block (G, P) -> (M, W): all columns of the tower, peer after peer."""
        blocks, there = block.split(list(sizes)), self._samples(sizes)
        mine = sum(sizes[rank] for rank in self.peers)
        send = torch.cat([blocks[rank] for some in self.alike for rank in some]).view(-1)
        received = send
        if self.size > 1:
            received, _ = self.mesh.all_to_all(
                f"fetch{IN_TOWER}{self.size}", send, [n * self.columns.width for n in there],
                [mine * width for width in self.widths], counts_as=counts_as,
            )  # fmt: skip
        found = empty(mine, self.inside.width, dtype=self.dtype)
        parts = received.split([mine * width for width in self.widths])
        for part, width, runs in zip(parts, self.widths, self.parts, strict=True):
            add_runs(part.view(mine, width), found, runs)
        return found

    def leave(self, values: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        """values (M, Y), contiguous: what leaves the tower, for its peers' samples."""
        codec = CODECS[self.coding.codecs.values]
        theirs, ours = self._served(sizes), self._asked(sizes)
        coded = encode(codec, values.view(-1), theirs)
        data, call = coded, None
        if len(self.peers) > 1:
            data, call = self.mesh.all_to_all(
                f"fetch{OVER_TOWERS}{self.size}", coded, self._lengths(codec, theirs),
                self._lengths(codec, ours), wait=False, counts_as=counts_as,
            )  # fmt: skip
        received, finish = arriving(codec, data, ours, self.dtype)
        return Flight(received, call, coded, finish)

    def add(self, flight: Flight, total: Tensor) -> None:
        widths = [columns.width for columns in self.carried]
        parts = flight.received.split([len(total) * width for width in widths])
        for part, width, runs in zip(parts, widths, self.blocks, strict=True):
            add_runs(part.view(len(total), width), total, runs)

    def come_back(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Tensor:
        """total (B, all columns): gradients -> (M, Y), of what left this tower."""
        codec, size = CODECS[self.coding.codecs.gradients], len(total)
        theirs, ours = self._served(sizes), self._asked(sizes)
        send = empty(sum(elements(ours)), dtype=self.dtype)
        for part, columns, runs in zip(
            send.split(elements(ours)), self.carried, self.blocks, strict=True
        ):
            take_runs(total, part.view(size, columns.width), runs)
        samples, rank = torch.arange(size), self.mesh.rank
        draws = [
            Draw(samples, self.coding.seed(f"tower {tower}", rank, number), step)
            for tower in range(len(self.carried))
        ]
        data = encode(codec, send, ours, draws)
        if len(self.peers) > 1:
            data, _ = self.mesh.all_to_all(
                f"push{OVER_TOWERS}{self.size}", data, self._lengths(codec, ours),
                self._lengths(codec, theirs),
            )  # fmt: skip
        received = arrived(codec, data, theirs, self.dtype)
        rows = sum(sizes[rank] for rank in self.peers)
        return received.view(rows, self.carried[self.tower].width)

    def scatter(self, gradients: Tensor, sizes: Sequence[int]) -> Tensor:
        """gradients (M, W) of the tower's columns -> (G, P), of what this rank had pooled."""
        mine, width = len(gradients), self.columns.width
        send = empty(mine * sum(self.widths), dtype=self.dtype)
        lengths = [mine * each for each in self.widths]
        for part, each, runs in zip(send.split(lengths), self.widths, self.parts, strict=True):
            take_runs(gradients, part.view(mine, each), runs)
        received = send
        if self.size > 1:
            received, _ = self.mesh.all_to_all(
                f"push{IN_TOWER}{self.size}", send, lengths, [n * width for n in self._samples(sizes)],
            )  # fmt: skip
        # Of number after number in a tower, tower after tower: back into the order of ranks.
        order = [rank for some in self.alike for rank in some]
        ends = list(accumulate(sizes[rank] for rank in order))
        rows = received.view(sum(sizes), width)
        found = {rank: rows[end - sizes[rank] : end] for rank, end in zip(order, ends, strict=True)}
        return torch.cat([found[rank] for rank in range(self.mesh.num_ranks)])

    def _samples(self, sizes: Sequence[int]) -> list[int]:
        """By number in a tower: samples of all ranks of it."""
        return [sum(sizes[rank] for rank in some) for some in self.alike]

    def _served(self, sizes: Sequence[int]) -> list[Block]:
        """By peer: of its samples, what leaves this tower."""
        return [Block(sizes[rank], self.dims[self.tower]) for rank in self.peers]

    def _asked(self, sizes: Sequence[int]) -> list[Block]:
        """By tower: of this rank's samples, what leaves it."""
        return [Block(sizes[self.mesh.rank], dims) for dims in self.dims]

    def _lengths(self, codec: Codec, blocks: Sequence[Block]) -> list[int]:
        return [each.bytes_of(codec, self.dtype) for each in blocks]
