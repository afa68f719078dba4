"""Exchanges `towers` and `tower_rows`: what owners pooled, or rows, go to one rank of their tower first, and from
there, once, to the samples' ranks; the model's first operators that take fields of one tower alone are evaluated in
between (DMT, Luo et al. 2024).

`towers` is `pooled` up to the message, which takes the route of `wire/transport.py`. Fields whose rows do not all lie
in one tower travel as they do under `pooled`. A consumer whose fields all lie in one tower is evaluated by the rank
that has all of them for a sample; what it gives travels instead of its fields' values, where that is less. Its
weights are those of `remote_operators.py`.

Where rows are read ahead, what is inside a tower is gathered early, and waits there: operators are evaluated, and
what they give leaves, in the step that uses it, with the weights of that step.

`tower_rows`: a rank hands its lookups of a tower's fields to its peer there, the rank of its own number. Peers have
the lookups of all their peers' samples as one batch, and ask the owners inside the tower for its different rows, as
ranks of a small world under `rows`; they pool, evaluate the model's operators, and send what leaves the tower.
Gradients come back to the peer, are summed by row there, and go to the owners once. A row that many samples use
travels once inside a tower where `towers` brings a bag for each.

Legend: G samples of all ranks, M of a rank's peers, m of those of a turn, W columns of its tower's fields, Y of what
leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import TRAINING, Mesh
from colonnade.comm.process_groups import tower_mesh
from colonnade.errors import ConfigError, WorldError
from colonnade.exchange.operator_cut import evaluated_in_towers, tower_of, towers_of_fields
from colonnade.exchange.owner import soonest
from colonnade.exchange.pooled import NOTHING, Fetched, Wire
from colonnade.exchange.prefetched import gathered_held, names_of, other_exchange
from colonnade.exchange.remote_operators import EvaluatingExchange, Partial
from colonnade.exchange.rows import RowsExchange
from colonnade.lookup.contract import Asked, Inside, RowGradients, RowSource, Ticket
from colonnade.lookup.fields import Columns, Key
from colonnade.lookup.layout import Declaration
from colonnade.lookup.outputs import CPU
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.topology.sharding import Sharding, table_wise
from colonnade.topology.towers import tower_ranks
from colonnade.wire import bags
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.id_distribution import SAMPLES, counted, exchanged
from colonnade.wire.transport import ByTower, Flight, Route, only, open_routes


class TowersExchange(EvaluatingExchange):
    """One rank's end."""

    has_whole_bags = True
    evaluators = "ranks of a tower"

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding],
        coding: Coding = AS_IT_IS,
        *,
        num_towers: int | None = None,
        reads_ahead: int = 0,
    ) -> None:
        """As `pooled`. num_towers: default one for each host. reads_ahead: steps between `fetch` and the use of what it
        read. Raises ConfigError for towers that this world has not."""
        if mesh.num_ranks == 1:
            num_towers = 1
        towers = tower_ranks(mesh.world, num_towers or mesh.world.num_hosts)
        self.num_towers, self.tower_size = len(towers), len(towers[0])
        self.tower_of = towers_of_fields(declaration, shardings, towers)
        consumers = evaluated_in_towers(
            declaration, shardings, mesh.world, num_towers=len(towers), reads_ahead=reads_ahead
        )
        self.is_late = bool(reads_ahead and consumers)
        super().__init__(declaration, mesh, shardings, coding, consumers)

    @property
    def inside(self) -> Inside | None:
        found = {name: self.tower_of[fields[0]] for name, fields in self.taken_by.items()}
        tower_of = {name: tower for name, tower in found.items() if tower is not None}
        return Inside(self.tower_size, tower_of) if tower_of else None

    def _arriving(self) -> Columns:
        dims: dict[Key, int] = {}
        for output in self.outputs:
            for key, _ in output.pieces:
                dims[key] = (
                    output.width if isinstance(key, str) else self.declaration.fields[key].dim
                )
        return Columns(dims)

    def _routes(self, messages: Sequence[Columns]) -> Sequence[Route]:
        if self.mesh.num_ranks == 1:
            return []
        inside = {i for i in self.fields.order if self.tower_of[i] is not None}
        dtype = self.declaration.compute_dtype
        others = [only(message, set(message.dims) - inside) for message in messages]
        routes: list[Route] = []
        if any(other.dims for other in others):
            routes += open_routes(self.mesh, others, self.whole, self.coding, dtype)
        if inside:
            every = range(self.num_towers)
            fields = [{i for i in inside if self.tower_of[i] == tower} for tower in every]
            carried = [
                only(self.whole, {key for key in self.whole.dims if self._leaves(key) == tower})
                for tower in every
            ]
            routes.append(
                ByTower(
                    self.mesh, self.tower_size, [only(each, inside) for each in messages],
                    [only(self.fields.columns, some) for some in fields], carried, self.whole,
                    self.coding, dtype,
                )
            )  # fmt: skip
        return routes

    def _leaves(self, key: Key) -> int | None:
        """The tower that a field, or what an operator gives, leaves as a whole."""
        return self.tower_of[self.taken_by[key][0] if isinstance(key, str) else key]

    def _fetched_by(self, route: Route, part: Tensor, ticket: Ticket) -> Flight:
        if not isinstance(route, ByTower) or not self.consumers:
            return super()._fetched_by(route, part, ticket)
        sizes, counts_as = ticket.wire.sizes, counted(ticket.purpose, "fetch")
        pooled = route.gather(part, sizes, counts_as)
        if self.is_late and ticket.purpose != "evaluate":
            ticket.wire.gathered = list(pooled)
            return Flight(part[:0], None)  # until it is used
        return self._leaving(route, pooled, ticket)

    def _leaving(self, route: ByTower, pooled: Iterable[Tensor], ticket: Ticket) -> Flight:
        """pooled: turn by turn (m, W) of the tower's fields."""
        counts_as, is_trained = counted(ticket.purpose, "fetch"), ticket.purpose != "evaluate"
        here, partials = route.inside, list[dict[str, Partial]]()
        if is_trained:
            ticket.wire.partials = partials

        def made(values: Tensor) -> Tensor:
            found = {
                name: self._evaluated(name, range(len(fields)), values, here, is_trained)
                for name, fields in self.taken_by.items()
                if fields[0] in here.dims
            }
            partials.append(found)
            return self._sent(values, here, route.carried[route.tower], found)

        return route.leave(map(made, pooled), ticket.wire.sizes, counts_as)

    def _total(self, ticket: Ticket) -> Tensor:
        """Collective, the first time, where rows are read ahead."""
        if ticket.wire.gathered is not None and ticket.wire.partials is None:
            ticket.wire.versions = [each._version for each in self.pushed_parameters]
            (route,) = self.routes  # nothing lies beside towers
            assert isinstance(route, ByTower)
            ticket.reads = Fetched([self._leaving(route, ticket.wire.gathered, ticket)])
        return super()._total(ticket)

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """Where rows are read ahead: what is gathered here (M, W), of which fields, and the places of its samples in
        the global batch."""
        if not self.is_late:
            return super().hold(ticket)
        (route,) = self.routes
        assert isinstance(route, ByTower) and ticket.wire.gathered is not None
        sizes = ticket.wire.sizes
        return {
            "gathered": torch.cat(list(ticket.wire.gathered)),
            "gathered fields": names_of(self._held(int(i)) for i in route.inside.dims),
            "samples": _samples(route, sizes),
            "of samples": torch.tensor(sum(sizes)),
        }

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """As `pooled`; what another exchange held must be such sums, too. Raises CheckpointError."""
        if not self.is_late:
            super().restore(ticket, held)
            return
        sizes, whole = ticket.wire.sizes, self.fields.columns
        if all(torch.equal(each.get("fields", NOTHING), self._names) for each in held):
            every = torch.cat([each["sums"] for each in held])
        elif all("gathered" in each for each in held):
            every = gathered_held(held, self._names, whole, sizes)
        else:
            raise other_exchange()
        if len(every) != sum(sizes):
            raise other_exchange()
        (route,) = self.routes
        assert isinstance(route, ByTower)
        mine = every[_samples(route, sizes)]
        gathered = torch.cat([mine[:, whole.of(i)] for i in route.inside.dims], dim=1)
        ticket.wire.gathered = gathered.split(route.samples(sizes))
        ticket.reads = Fetched([Flight(mine[:0], None)])

    def _held(self, i: int) -> str:
        name = super()._held(i)
        is_averaged = self.declaration.fields[i].feature in self.undivided
        return f"averaged {name}" if is_averaged else name

    def _pushed_by(
        self, route: Route, total: Tensor, ticket: Ticket, step: int, number: int
    ) -> Flight:
        if not isinstance(route, ByTower) or not self.consumers:
            return super()._pushed_by(route, total, ticket, step, number)
        sizes = ticket.wire.sizes
        given, carried = route.come_back(total, sizes, step, number), route.carried[route.tower]
        pooled = (
            self._through(partials, each, carried, route.inside)
            for partials, each in zip(reversed(ticket.wire.partials), given, strict=True)
        )
        return Flight(route.scatter(pooled, sizes), None)


def _samples(route: ByTower, sizes: Sequence[int]) -> Tensor:
    """(M,) int64: places in the global batch of those that a rank of a tower serves."""
    ends = list(accumulate(sizes))
    every = [torch.arange(ends[rank] - sizes[rank], ends[rank]) for rank in route.peers]
    return torch.cat(every)


INSIDE = ("lookahead", TRAINING)
"""Threads that issue the small world's calls."""
"""Of a rank's batch: all that others than peers are told."""


class ByPeer(ByTower):
    """Between towers alone: what a tower's fields are is on the peers already, of samples in the order of `peers`."""

    def gather(self, block: Tensor, sizes: Sequence[int], counts_as: str) -> Iterator[Tensor]:
        """block (M, W); of a tower without fields any rows, of no columns."""
        samples = self.samples(sizes)
        return iter(block[: sum(samples)].split(samples))

    def scatter(self, gradients: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
        """Returns (M, W)."""
        samples = self.samples(sizes)
        found = empty(sum(samples), self.inside.width, dtype=self.dtype)
        for place, gradient in zip(reversed(found.split(samples)), gradients, strict=True):
            place.copy_(gradient)
        return found


class TowerRowsExchange(TowersExchange):
    """One rank's end. Every field's rows lie in one tower."""

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding],
        coding: Coding = AS_IT_IS,
        *,
        num_towers: int | None = None,
        reads_ahead: int = 0,
    ) -> None:
        """As `towers`. Raises ConfigError for rows that are not all in one tower."""
        towers = tower_ranks(mesh.world, num_towers or mesh.world.num_hosts)
        size = len(towers[0])
        first, number = mesh.rank // size * size, mesh.rank % size
        homes = [tower_of(sharding, towers) for sharding in shardings]
        for feature in declaration.features:
            if homes[declaration.table_of(feature)] is None and feature.pooling != "sequence":
                sharding = shardings[declaration.table_of(feature)]
                raise ConfigError(
                    f"table {feature.table!r}: got exchange tower_rows and rows on ranks {list(sharding.ranks)}, "
                    f"wanted all of them in one of {len(towers)} towers, such as ranks {list(towers[0])}; give it "
                    "such a sharding, or exchange towers"
                )
        # As its samples see it: a table lies on the peer.
        peers = [table_wise((home or 0) * size + number) for home in homes]
        super().__init__(
            declaration, mesh, peers, coding, num_towers=num_towers, reads_ahead=reads_ahead
        )
        mine = [
            replace(sharding, ranks=tuple(rank - first for rank in sharding.ranks))
            if home == first // size
            else table_wise(0)
            for sharding, home in zip(shardings, homes, strict=True)
        ]
        (route,) = self.routes
        assert isinstance(route, ByPeer)
        self.peers = route.peers
        self.rows = RowsExchange(
            self.here.as_sums(but=self.averaged_there), tower_mesh(mesh, size, INSIDE), mine
        )

    def _routes(self, messages: Sequence[Columns]) -> Sequence[Route]:
        every, columns = range(self.num_towers), self.fields.columns
        fields = [
            only(columns, {i for i in columns.dims if self.tower_of[int(i)] == tower})
            for tower in every
        ]
        carried = [
            only(self.whole, {key for key in self.whole.dims if self._leaves(key) == tower})
            for tower in every
        ]
        return [
            ByPeer(
                self.mesh, self.tower_size, messages, fields, carried, self.whole, self.coding,
                self.declaration.compute_dtype,
            )
        ]  # fmt: skip

    def ask(self, batch: Batch, purpose: str = "route") -> Asked:
        """Raises IdRangeError, DataError."""
        asked = super().ask(batch, purpose)
        size = np.frombuffer(SAMPLES.pack(asked.size), np.uint8)
        letters = [
            message if rank in self.peers else size for rank, message in enumerate(asked.messages)
        ]
        return replace(asked, messages=letters)

    def answer(
        self, asked: Asked, heard: Sequence[np.ndarray], *, step: int, weight: float, purpose: str
    ) -> Ticket:
        """Collective inside the tower."""
        lookups, _, _ = asked.lookups
        rows = self.rows
        served = bags.join(
            [heard[rank] for rank in self.peers], self.owned, self.table_rows, self.deal,
            self.mesh.rank, self.declaration.compute_dtype,
        )  # fmt: skip
        of_peers = dict(zip(self.peers, served.sizes, strict=True))
        sizes = [
            of_peers[rank] if rank in of_peers else _size(rank, message)
            for rank, message in enumerate(heard)
        ]
        plan = _native.make_plan(served.lookups.native, self.table_rows, rows.deal.num_owners)
        codes = None if served.codes is None else soonest(served.codes, plan)
        letters: list[list[np.ndarray]] = [[]]
        if rows.mesh.num_ranks > 1:
            letters, _ = exchanged([rows.requests(plan, codes)], rows.mesh, 0.0, purpose)
        of_tower = Asked(sum(served.sizes), letters[0], (served.lookups, plan, codes))
        inside = rows.answer(of_tower, letters[0], step=step, weight=weight, purpose=purpose)
        ticket = Ticket(
            step, asked.size, served.lookups, plan, inside.owned_ids, inside.owned_offsets,
            inside.owner_plan, weight, inside.next_use, purpose=purpose,
        )  # fmt: skip
        ticket.wire = Wire(sizes, lookups, inside=inside)
        return ticket

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        inside = ticket.wire.inside
        inside.slots = ticket.slots
        self.rows.place(inside, views)

    def _pooled_here(self, ticket: Ticket, source: RowSource) -> list[Tensor]:
        inside = ticket.wire.inside
        inside.slots = ticket.slots
        self.rows.fetch(inside, source)
        return [each.to(CPU) for each in self.rows.pooled(inside)]

    def _begin_push(self, ticket: Ticket, step: int, number: int) -> Callable[[], RowGradients]:
        if not self.here.order:
            return super()._begin_push(ticket, step, number)
        total, inside = self._gradients(ticket), ticket.wire.inside
        (flight,) = [self._pushed_by(route, total, ticket, step, number) for route in self.routes]
        inside.slots = ticket.slots
        inside.forget()
        inside.record([flight.received])
        return self.rows._begin_push(inside, step, number)

    def drop(self, ticket: Ticket) -> None:
        super().drop(ticket)
        self.rows.drop(ticket.wire.inside)


def _size(rank: int, message: np.ndarray) -> int:
    """Of the batch of a rank that is no peer. Raises WorldError."""
    if len(message) != SAMPLES.size:
        raise WorldError(
            f"rank {rank} sent {len(message)} bytes, wanted {SAMPLES.size} that tell the size of its batch; all ranks "
            "must run one version of Colonnade on one model"
        )
    return int(SAMPLES.unpack(message.tobytes())[0])
