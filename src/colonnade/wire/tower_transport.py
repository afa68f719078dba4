"""How what a tower's ranks pooled travels: to one rank of the tower first, then from there to the samples' ranks (SPTT
of DMT, Luo et al. 2024).

Rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its peers: the ranks l of all
towers. Parts of rows that were split inside the tower are added there, in the order of the ranks. What it then sends
each peer is one message: those columns, or what an operator made of them. Gradients go the same way back. So a rank
exchanges slow messages with as many others as there are other towers, each as large as all of a tower's columns.

A rank serves its peers in two turns: those of the other towers first, itself last. So what it has for itself moves
inside the tower, and is computed, while the slow messages travel; on the way back the turns change places. This costs
a second message inside the tower, and none between towers.

Legend: N ranks, T towers of S ranks, B samples of this rank, G of all, M of its peers, m of those of a turn, P columns
of this rank, W of its tower, Y of what leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    Flight,
    add_runs,
    arriving,
    elements,
    take_runs,
    together,
)


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
        every, (self.tower, self.number) = range(mesh.num_ranks), divmod(mesh.rank, size)
        self.columns = messages[mesh.rank]
        self.inside, self.carried = towers[self.tower], carried
        mates = messages[self.tower * size :][:size]
        self.widths = [mate.width for mate in mates]
        self.parts = runs_of([mate.starts.items() for mate in mates], self.inside)
        self.blocks = runs_of([columns.starts.items() for columns in carried], whole)
        self.dims = [tuple(columns.dims.values()) for columns in carried]
        self.alike = [every[n::size] for n in range(size)]
        others = [tower for tower in range(len(carried)) if tower != self.tower]
        self.turns = [turn for turn in (others, [self.tower]) if turn]
        """Towers whose ranks are served, turn by turn."""
        self.in_tower, self.over_towers = Scope(size), Scope(size, is_across=True)
        open_scopes(mesh, size)

    @property
    def peers(self) -> list[int]:
        """In the order in which they are served."""
        return [self.alike[self.number][tower] for turn in self.turns for tower in turn]

    def samples(self, sizes: Sequence[int]) -> list[int]:
        """(turns,) m."""
        return [self._of_numbers(turn, sizes)[self.number] for turn in self.turns]

    def fetch(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        """Inside the tower before it returns; between towers it may still travel."""
        return self.leave(self.gather(block, sizes, counts_as), sizes, counts_as)

    def push(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Flight:
        """Has come when it returns."""
        return Flight(self.scatter(self.come_back(total, sizes, step, number), sizes), None)

    def gather(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Iterator[Tensor]:
        """block (G, P) -> turn by turn (m, W), contiguous: all columns of the tower, peer after peer. That of the next
        turn may still travel when one is given."""
        flights, width = [], self.columns.width
        for turn, mine in zip(self.turns, self.samples(sizes), strict=True):
            order = self._order(turn)
            send = _rows_of(block, order, sizes)
            if send is None:
                blocks = block.split(list(sizes))
                send = torch.cat([blocks[rank] for rank in order])
            received, call = send.view(-1), None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "fetch", received,
                    [n * width for n in self._of_numbers(turn, sizes)],
                    [mine * each for each in self.widths], scope=self.in_tower, wait=False, counts_as=counts_as,
                    into=empty(mine * sum(self.widths), dtype=self.dtype),
                )  # fmt: skip
            flights.append(Flight(received, call, send))
        for flight, mine in zip(flights, self.samples(sizes), strict=True):
            flight.wait()
            found = empty(mine, self.inside.width, dtype=self.dtype)
            parts = flight.received.split([mine * each for each in self.widths])
            for part, each, runs in zip(parts, self.widths, self.parts, strict=True):
                add_runs(part.view(mine, each), found, runs)
            yield found

    def leave(self, values: Iterable[Tensor], sizes: Sequence[int], counts_as: str) -> Flight:
        """values: turn by turn (m, Y), contiguous: what leaves the tower, for its peers' samples. One is taken when
        that before it has left."""
        codec, flights = CODECS[self.coding.codecs.values], []
        for turn, value in zip(self.turns, values, strict=True):
            theirs, ours = self._served(turn, sizes), self._asked(turn, sizes)
            data = coded = encode(codec, value.view(-1), theirs)
            call = None
            if turn != [self.tower]:
                data, call = self.mesh.all_to_all(
                    "fetch", coded, self._lengths(codec, turn, theirs),
                    self._lengths(codec, turn, ours), scope=self.over_towers, wait=False, counts_as=counts_as,
                )  # fmt: skip
            received, finish = arriving(codec, data, ours, self.dtype)
            flights.append(Flight(received, call, coded, finish))
        return together(flights)

    def add(self, flight: Flight, total: Tensor) -> None:
        for turn, part in zip(self.turns, flight.parts, strict=True):
            blocks = part.received.split([len(total) * self.carried[tower].width for tower in turn])
            for tower, block in zip(turn, blocks, strict=True):
                columns = self.carried[tower].width
                add_runs(block.view(len(total), columns), total, self.blocks[tower])

    def come_back(
        self, total: Tensor, sizes: Sequence[int], step: int, number: int
    ) -> Iterator[Tensor]:
        """total (B, all columns): gradients -> (m, Y), of what left this tower, the last turn first. That of the one
        before may still travel when one is given."""
        codec, size = CODECS[self.coding.codecs.gradients], len(total)
        samples, rank, flights = torch.arange(size), self.mesh.rank, []
        for turn in self.turns:
            theirs, ours = self._served(turn, sizes), self._asked(turn, sizes)
            send = empty(sum(elements(ours)), dtype=self.dtype)
            for tower, part in zip(turn, send.split(elements(ours)), strict=True):
                take_runs(total, part.view(size, self.carried[tower].width), self.blocks[tower])
            draws = [
                Draw(samples, self.coding.seed(f"tower {tower}", rank, number), step)
                for tower in turn
            ]
            data = coded = encode(codec, send, ours, draws)
            call = None
            if turn != [self.tower]:
                data, call = self.mesh.all_to_all(
                    "push", coded, self._lengths(codec, turn, ours),
                    self._lengths(codec, turn, theirs), scope=self.over_towers, wait=False,
                )  # fmt: skip
            received, finish = arriving(codec, data, theirs, self.dtype)
            flights.append(Flight(received, call, coded, finish))
        width = self.carried[self.tower].width
        for flight, mine in zip(reversed(flights), reversed(self.samples(sizes)), strict=True):
            flight.wait()
            yield flight.received.view(mine, width)

    def scatter(self, gradients: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
        """gradients: (m, W) of the tower's columns, the last turn first -> (G, P), of what this rank had pooled. One is
        taken when that before it has left."""
        width, flights = self.columns.width, []
        found = empty(sum(sizes), width, dtype=self.dtype)
        for turn, gradient in zip(reversed(self.turns), gradients, strict=True):
            mine, order = len(gradient), self._order(turn)
            send = empty(mine * sum(self.widths), dtype=self.dtype)
            lengths = [mine * each for each in self.widths]
            for part, each, runs in zip(send.split(lengths), self.widths, self.parts, strict=True):
                take_runs(gradient, part.view(mine, each), runs)
            place, received, call = _rows_of(found, order, sizes), send, None
            if self.size > 1:
                received, call = self.mesh.all_to_all(
                    "push", send, lengths,
                    [n * width for n in self._of_numbers(turn, sizes)], scope=self.in_tower, wait=False,
                    into=None if place is None else place.view(-1),
                )  # fmt: skip
            flights.append((Flight(received, call, send), order, place))
        rows = found.split(list(sizes))
        for flight, order, place in flights:
            flight.wait()
            if place is None or self.size == 1:
                counts = [sizes[rank] for rank in order]
                parts = flight.received.view(sum(counts), width).split(counts)
                for rank, part in zip(order, parts, strict=True):
                    rows[rank].copy_(part)
        return found

    def _order(self, turn: Sequence[int]) -> list[int]:
        """Ranks of those towers, of number after number: as their samples travel inside this one."""
        return [some[tower] for some in self.alike for tower in turn]

    def _of_numbers(self, turn: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """By number in a tower: samples of the ranks of it in those towers."""
        return [sum(sizes[some[tower]] for tower in turn) for some in self.alike]

    def _served(self, turn: Sequence[int], sizes: Sequence[int]) -> list[Block]:
        """By peer in those towers: of its samples, what leaves this tower."""
        peers = self.alike[self.number]
        return [Block(sizes[peers[tower]], self.dims[self.tower]) for tower in turn]

    def _asked(self, turn: Sequence[int], sizes: Sequence[int]) -> list[Block]:
        """By tower: of this rank's samples, what leaves it."""
        return [Block(sizes[self.mesh.rank], self.dims[tower]) for tower in turn]

    def _lengths(self, codec: Codec, turn: Sequence[int], blocks: Sequence[Block]) -> list[int]:
        """By peer of any tower: bytes of blocks that go to those towers' or come from there."""
        found = [0] * len(self.carried)
        for tower, block in zip(turn, blocks, strict=True):
            found[tower] = block.bytes_of(codec, self.dtype)
        return found


def _rows_of(block: Tensor, order: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
    """Of block (G, P), by rank: the rows of some ranks in that order, where they lie so; else None."""
    if list(order) != list(range(order[0], order[0] + len(order))):
        return None
    ends = [0, *accumulate(sizes)]
    return block[ends[order[0]] : ends[order[-1] + 1]]
