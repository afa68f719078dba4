"""Transport of pooled values to the samples' ranks, and of gradients back: direct, added up inside a host, or by way
of one rank of a tower (SPTT of DMT, Luo et al. 2024).

Columns that every rank sends (those of tables whose rows lie on all of them, and partials of operators whose fields do)
are sums over ranks. Where there are several hosts of several ranks, the ranks of a host add them up first, so that a
host sends another one block for each of its ranks' samples, not as many as it has ranks; the bytes over an uplink fall
by the ranks of a host, and what travels inside a host grows by as much.

By tower (`ByTower`): rank l of a tower gets, from every rank of it, all columns of the tower for the samples of its
peers: the ranks l of all towers. Parts of rows that were split inside the tower are added there, in the order of the
ranks. What it then sends each peer is one message: those columns, or what an operator made of them. Gradients go the
same way back. So a rank exchanges slow messages with as many others as there are other towers, each as large as all
of a tower's columns.

A rank serves its peers in two turns: those of the other towers first, itself last. So what it has for itself moves
inside the tower, and is computed, while the slow messages travel; on the way back the turns change places. This costs
a second message inside the tower, and none between towers.

Legend: N ranks, H hosts, L ranks of a host, T towers of S ranks, B samples of this rank, G of all, M of its peers, m of
those of a turn, P columns of this rank or route, W of all or of its tower, Y of what leaves the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from colonnade.comm.collectives import sum_in_order
from colonnade.comm.mesh import Call, Mesh, Scope
from colonnade.comm.process_groups import open_scopes
from colonnade.lookup.fields import Columns, Key, Run, runs_of
from colonnade.ops.memory import empty
from colonnade.wire.codec import CODECS, Block, Codec, Draw, decode, encode
from colonnade.wire.coding import Coding

NOTHING = torch.empty(0)


@dataclass(slots=True)
class Flight:
    """A message to this rank, or several side by side, under way."""

    received: Tensor  # flat, sender after sender
    call: Call | None
    keep: Any = None  # what must live until it has arrived
    decode: Callable[[], None] | None = None  # once it has
    parts: Sequence[Flight] = ()  # of one that is several

    def wait(self) -> None:
        for part in self.parts:
            part.wait()
        if self.call is not None:
            self.call.wait()
            self.call = self.keep = None
        if self.decode is not None:
            self.decode()
            self.decode = None


class Route(Protocol):
    """For the columns of one kind. Methods but `add` are collective, in one order on all ranks."""

    columns: Columns
    """What this rank sends; maybe none."""
    roundings: int
    """By a codec, of a value on its way."""

    def fetch(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        """block (G, P), contiguous: sums for all ranks' samples. sizes: those, by rank."""
        ...

    def add(self, flight: Flight, total: Tensor) -> None:
        """Its columns of total (B, W), which hold nothing yet, become the sums over owners, in a fixed order."""
        ...

    def push(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Flight:
        """total (B, W): gradients of sums -> (G, P), of what this rank had sent. step, number: what random bits depend
        on: updates before this one, and which batch of it this is."""
        ...


class DirectRoute(Route, Protocol):
    """Whose messages are what owners sent, or sums of it."""

    def columns_of(self, rank: int) -> Columns:
        """What that rank sends."""
        ...

    def landed(self, blocks: Sequence[Tensor]) -> Flight:
        """As if it had been fetched. blocks (B, P of the rank) by rank: what they had for this rank's samples."""
        ...


def arriving(
    codec: Codec, data: Tensor, blocks: Sequence[Block], dtype: torch.dtype
) -> tuple[Tensor, Callable[[], None] | None]:
    """data: a message of these blocks, maybe under way -> (its elements, flat; what to do once it has come, before they
    are read). What is not coded is read where it lies."""
    if codec.name == "exact":
        return data.view(dtype), None
    found = empty(sum(elements(blocks)), dtype=dtype)
    return found, partial(decode, codec, data, blocks, found)


def arrived(codec: Codec, data: Tensor, blocks: Sequence[Block], dtype: torch.dtype) -> Tensor:
    """The same of one that has come."""
    found, finish = arriving(codec, data, blocks, dtype)
    if finish is not None:
        finish()
    return found


def open_routes(
    mesh: Mesh, messages: Sequence[Columns], whole: Columns, coding: Coding, dtype: torch.dtype
) -> list[DirectRoute]:
    """messages: what each rank sends; whole: all columns. The same routes on every rank. In a world of one: none."""
    if mesh.num_ranks == 1:
        return []
    world, common = mesh.world, set[Any]()
    if world.num_hosts > 1 and world.ranks_per_host > 1:
        common = set.intersection(*(set(message.dims) for message in messages))
    routes: list[DirectRoute] = []
    if any(set(message.dims) - common for message in messages):
        some = [only(message, set(message.dims) - common) for message in messages]
        routes.append(Straight(mesh, some, whole, coding, dtype))
    if common:
        routes.append(ByHost(mesh, only(messages[0], common), whole, coding, dtype))
    return routes


class Straight:
    """Every rank's columns to every other rank."""

    roundings = 1

    def __init__(
        self,
        mesh: Mesh,
        messages: Sequence[Columns],
        whole: Columns,
        coding: Coding,
        dtype: torch.dtype,
    ) -> None:
        self.mesh, self.coding, self.dtype = mesh, coding, dtype
        self.messages, self.columns = messages, messages[mesh.rank]
        self.widths = [message.width for message in messages]
        self.dims = [tuple(message.dims.values()) for message in messages]
        self.blocks = runs_of([message.starts.items() for message in messages], whole)

    def columns_of(self, rank: int) -> Columns:
        return self.messages[rank]

    def landed(self, blocks: Sequence[Tensor]) -> Flight:
        return Flight(torch.cat([block.reshape(-1) for block in blocks]), None)

    def fetch(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        codec = CODECS[self.coding.codecs.values]
        theirs, mine = self._served(sizes), self._asked(sizes)
        coded = encode(codec, block.view(-1), theirs)
        data, call = self.mesh.all_to_all(
            "fetch", coded, [each.bytes_of(codec, self.dtype) for each in theirs],
            [each.bytes_of(codec, self.dtype) for each in mine], wait=False, counts_as=counts_as,
        )  # fmt: skip
        received, finish = arriving(codec, data, mine, self.dtype)
        return Flight(received, call, coded, finish)

    def add(self, flight: Flight, total: Tensor) -> None:
        parts = flight.received.split([len(total) * width for width in self.widths])
        for part, width, runs in zip(parts, self.widths, self.blocks, strict=True):
            add_runs(part.view(len(total), width), total, runs)

    def push(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Flight:
        codec, size = CODECS[self.coding.codecs.gradients], len(total)
        theirs, mine = self._served(sizes), self._asked(sizes)
        send = self.mesh.room(sum(elements(mine)), self.dtype)
        for part, width, runs in zip(
            send.split(elements(mine)), self.widths, self.blocks, strict=True
        ):
            take_runs(total, part.view(size, width), runs)
        samples, rank = torch.arange(size), self.mesh.rank
        draws = [
            Draw(samples, self.coding.seed(f"pooled by {owner}", rank, number), step)
            for owner in range(self.mesh.num_ranks)
        ]
        coded = encode(codec, send, mine, draws)
        data, call = self.mesh.all_to_all(
            "push", coded, [each.bytes_of(codec, self.dtype) for each in mine],
            [each.bytes_of(codec, self.dtype) for each in theirs], wait=False,
        )  # fmt: skip
        received, finish = arriving(codec, data, theirs, self.dtype)
        return Flight(received, call, coded, finish)

    def _served(self, sizes: Sequence[int]) -> list[Block]:
        """By rank: of its samples, what lies here."""
        return [Block(size, self.dims[self.mesh.rank]) for size in sizes]

    def _asked(self, sizes: Sequence[int]) -> list[Block]:
        """By rank: of this rank's samples, what lies there."""
        return [Block(sizes[self.mesh.rank], dims) for dims in self.dims]


class ByHost:
    """Columns that all ranks send. Rank l of a host adds up what its host has for the samples of the ranks l of all
    hosts, and sends it to them; gradients go the same way back. Codecs apply to shares, and to a host's sum of what
    was decoded: values are rounded twice."""

    roundings = 2

    def __init__(
        self, mesh: Mesh, columns: Columns, whole: Columns, coding: Coding, dtype: torch.dtype
    ) -> None:
        self.mesh, self.coding, self.columns, self.dtype = mesh, coding, columns, dtype
        self.dims = tuple(columns.dims.values())
        hosts = mesh.world.num_hosts
        self.blocks = runs_of([columns.starts.items() for _ in range(hosts)], whole)

    @property
    def alike(self) -> list[list[int]]:
        """(L, H): ranks of the same number in their hosts, who add up for each other."""
        local, every = self.mesh.world.ranks_per_host, range(self.mesh.num_ranks)
        return [list(every[number::local]) for number in range(local)]

    def columns_of(self, rank: int) -> Columns:
        return self.columns

    def landed(self, blocks: Sequence[Tensor]) -> Flight:
        world = self.mesh.world
        every = torch.stack([block.reshape(-1) for block in blocks])
        hosts = every.view(world.num_hosts, 1, world.ranks_per_host, -1)
        return Flight(torch.cat([sum_in_order(of_host) for of_host in hosts]), None)

    def fetch(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Flight:
        """Inside the host before it returns; between hosts sums may still travel."""
        codec, local = CODECS[self.coding.codecs.values], self.mesh.world.ranks_per_host
        blocks = block.split(list(sizes))
        send = torch.cat([blocks[rank] for some in self.alike for rank in some])
        mine = [sizes[rank] for rank in self.alike[self.mesh.rank % local]]
        there = [Block(sum(sizes[rank] for rank in some), self.dims) for some in self.alike]
        here = [Block(sum(mine), self.dims)] * local
        data, _ = self.mesh.all_to_all(
            "fetch", encode(codec, send.view(-1), there), self._lengths(codec, there),
            self._lengths(codec, here), scope=self.mesh.in_host, counts_as=counts_as,
        )  # fmt: skip
        received = arrived(codec, data, here, self.dtype)
        of_host = sum_in_order(received.view(1, local, -1))
        theirs, ours = [Block(n, self.dims) for n in mine], self._asked(sizes)
        coded = encode(codec, of_host, theirs)
        data, call = self.mesh.all_to_all(
            "fetch", coded, self._lengths(codec, theirs), self._lengths(codec, ours),
            scope=self.mesh.over_hosts, wait=False, counts_as=counts_as,
        )  # fmt: skip
        received, finish = arriving(codec, data, ours, self.dtype)
        return Flight(received, call, coded, finish)

    def add(self, flight: Flight, total: Tensor) -> None:
        parts = flight.received.view(len(self.blocks), len(total), self.columns.width)
        for part, runs in zip(parts, self.blocks, strict=True):
            add_runs(part, total, runs)

    def push(self, total: Tensor, sizes: Sequence[int], step: int, number: int) -> Flight:
        """Has come when it returns."""
        codec, world, rank = CODECS[self.coding.codecs.gradients], self.mesh.world, self.mesh.rank
        block = empty(len(total), self.columns.width, dtype=self.dtype)
        take_runs(total, block, self.blocks[0])
        every = [Block(size, self.dims) for size in sizes]
        seed = self.coding.seed("pooled by hosts", rank, number)
        draws = [Draw(torch.arange(len(total)), seed, step)]
        data = encode(codec, block.view(-1), [every[rank]], draws)
        lengths = self._lengths(codec, every)
        local, hosts = world.ranks_per_host, world.num_hosts
        of_alike = [[lengths[r] for r in some] for some in self.alike]
        received, _ = self.mesh.all_to_all(
            "push", data.repeat(hosts), [len(data)] * hosts, of_alike[rank % local],
            scope=self.mesh.over_hosts,
        )  # fmt: skip
        received, _ = self.mesh.all_to_all(
            "push",
            received.repeat(local),
            [len(received)] * local,
            list(map(sum, of_alike)),
            scope=self.mesh.in_host,
        )
        # Rank l of the host after the other, of each what it got from host after host: back into rank order.
        starts = dict(
            zip([r for some in self.alike for r in some],
                accumulate((n for some in of_alike for n in some), initial=0), strict=False)
        )  # fmt: skip
        data = torch.cat([received[starts[r] : starts[r] + n] for r, n in enumerate(lengths)])
        return Flight(arrived(codec, data, every, self.dtype), None)

    def _lengths(self, codec: Codec, blocks: Iterable[Block]) -> list[int]:
        return [each.bytes_of(codec, self.dtype) for each in blocks]

    def _asked(self, sizes: Sequence[int]) -> list[Block]:
        """By host: of this rank's samples."""
        return [Block(sizes[self.mesh.rank], self.dims)] * len(self.blocks)


def together(flights: Sequence[Flight]) -> Flight:
    """As one; what has come is told by its parts."""
    return Flight(NOTHING, None, parts=flights)


def only(columns: Columns, keys: Iterable[Any]) -> Columns:
    """Those of them, in order."""
    wanted = set(keys)
    return Columns({key: dim for key, dim in columns.dims.items() if key in wanted})


def elements(blocks: Iterable[Block]) -> list[int]:
    """Of each."""
    return [block.rows * sum(block.dims) for block in blocks]


Places = tuple[tuple[Key, int], ...]
"""Of what lies in a block: its first column there."""


@lru_cache(maxsize=256)
def _placing(blocks: tuple[Places, ...], dims: Places) -> tuple[list[list[Run]], int]:
    """Of `placed`: by block its runs, and how many columns of the whole they fill. Known from one step to the next, for
    to find it takes as long as a copy of a megabyte."""
    every = runs_of(blocks, Columns(dict(dims)))
    return every, sum(run.width for runs in every for run in runs if run.is_first)


def placed(blocks: Sequence[tuple[Tensor, Places]], dims: Mapping[Key, int]) -> Tensor:
    """(R, W), contiguous, of columns of these dims: what lies in blocks (R, any) of one dtype; the sum of what lies in
    several, in their order, and 0 of what lies in none. Read only: it is a block itself where that is the whole."""
    every, filled = _placing(tuple(places for _, places in blocks), tuple(dims.items()))
    width, num_rows = sum(dims.values()), len(blocks[0][0])
    taken = [(block, runs) for (block, _), runs in zip(blocks, every, strict=True) if runs]
    if len(taken) == 1 and len(taken[0][1]) == 1 and filled == width == taken[0][0].shape[1]:
        return taken[0][0].contiguous()
    found = empty(num_rows, width, dtype=blocks[0][0].dtype)
    if filled < width:
        found.zero_()
    for block, runs in taken:
        add_runs(block, found, runs)
    return found


def add_runs(block: Tensor, total: Tensor, runs: Sequence[Run]) -> None:
    """Columns of the block, to where they lie in the total; what comes first there is copied."""
    for run in runs:
        there, here = total[:, run.columns_there], block[:, run.columns_here]
        there.copy_(here) if run.is_first else there.add_(here)


def take_runs(total: Tensor, block: Tensor, runs: Sequence[Run]) -> None:
    """The other way."""
    for run in runs:
        block[:, run.columns_here] = total[:, run.columns_there]


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
