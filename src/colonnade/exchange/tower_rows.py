"""`tower_rows`: rows come together on a rank of a tower, which pools them for its peers (DMT, Luo et al. 2024).

A rank hands its lookups of a tower's fields to its peer there, the rank of its own number. Peers have the lookups of
all their peers' samples as one batch, and ask the owners inside the tower for its different rows, as ranks of a small
world under `rows`; they pool, evaluate the model's operators, and send what leaves the tower. Gradients come back to
the peer, are summed by row there, and go to the owners once. A row that many samples use travels once inside a tower
where `towers` brings a bag for each.

Legend: M samples of a rank's peers, W columns of its tower's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.comm.mesh import TRAINING, Mesh
from colonnade.comm.process_groups import tower_mesh
from colonnade.errors import ConfigError, WorldError
from colonnade.exchange.operator_cut import tower_of
from colonnade.exchange.owner import soonest
from colonnade.exchange.pooled import Wire
from colonnade.exchange.rows import RowsExchange
from colonnade.exchange.towers import TowersExchange
from colonnade.lookup.contract import Asked, RowGradients, RowSource, Ticket
from colonnade.lookup.fields import Columns
from colonnade.lookup.layout import Declaration
from colonnade.lookup.outputs import CPU
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.topology.sharding import Sharding, table_wise
from colonnade.topology.towers import tower_ranks
from colonnade.wire import bags
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.id_distribution import SAMPLES, exchanged
from colonnade.wire.tower_transport import ByTower
from colonnade.wire.transport import Route, only

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
