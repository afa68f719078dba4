"""`substitute`: owners evaluate the model's first operators on the rows they have, for the samples of all ranks;
partial results travel, and gradients of them travel back (DES, Rong et al. 2020).

It is `pooled` up to the message: owners pool their fields for the global batch, and send, for each consumer that is
cheaper so (`substitution.py`), its partial instead of its fields' values. Partials are added over owners in a fixed
order (`travel.py`) and combined. On the way back an owner takes the gradient of the merged partial, which is that of
its own, through its part of the operator; rows are updated with the sum over the global batch, and no gradient of a
row travels. Weights are those of `evaluating.py`.

Legend: G samples of all ranks, W_o columns of the fields on rank o, P of what it sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.errors import CheckpointError
from colonnade.exchange.coding import AS_IT_IS, Coding
from colonnade.exchange.contract import Ticket
from colonnade.exchange.evaluating import EvaluatingExchange, Partial
from colonnade.exchange.fields import Columns, Fields, Key
from colonnade.exchange.layout import Declaration
from colonnade.exchange.pooled import Fetched
from colonnade.exchange.substitution import substituted
from colonnade.exchange.travel import DirectRoute
from colonnade.topology.mesh import Mesh
from colonnade.topology.sharding import Sharding


class SubstituteExchange(EvaluatingExchange):
    """One rank's end."""

    routes: Sequence[DirectRoute]

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding],
        coding: Coding = AS_IT_IS,
        *,
        reads_ahead: int = 0,
    ) -> None:
        """As `pooled`. reads_ahead: steps between `fetch` and the use of what it read."""
        consumers = substituted(declaration, shardings, world=mesh.world, reads_ahead=reads_ahead)
        super().__init__(declaration, mesh, shardings, coding, consumers)

    def _carried(self, share: Fields) -> Columns:
        dims: dict[Key, int] = {}
        for output in self.outputs:
            for key, _ in output.pieces:
                if isinstance(key, str):
                    if set(self.taken_by[key]) & set(share.order):
                        dims[key] = output.width
                elif key in share.order:
                    dims[key] = self.declaration.fields[key].dim
        return Columns(dims)

    def _message(self, ticket: Ticket, pooled: Tensor) -> Tensor:
        is_trained = ticket.purpose != "evaluate"
        partials = self._partials(pooled, self.here.columns, is_trained)
        if is_trained:
            ticket.wire.pooled, ticket.wire.partials = pooled, partials
        return self._sent(pooled, self.here.columns, self.sent, partials)

    def _partials(self, pooled: Tensor, here: Columns, is_trained: bool) -> dict[str, Partial]:
        """By consumer: of those of its fields whose columns are here."""
        found = {}
        for name, fields in self.taken_by.items():
            if numbers := tuple(n for n, i in enumerate(fields) if i in here.dims):
                found[name] = self._evaluated(name, numbers, pooled, here, is_trained)
        return found

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What partials were evaluated of here, (G, dim) by field: rows may be others when their gradients come."""
        here = self.here.columns
        return {self._held(i): ticket.wire.pooled[:, here.of(i)].clone() for i in self.here.order}

    def _held(self, i: int) -> str:
        field = self.declaration.fields[i]
        return f"{'averaged' if field.feature in self.undivided else 'pooled'} {field.name}"

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        """As the contract says. Each field is added over the ranks that had rows of it. Raises CheckpointError for what
        another exchange held, or another cut."""
        sizes, whole = ticket.wire.sizes, self.fields.columns
        shares = [self.fields.share(rank, self.shardings) for rank in range(self.mesh.num_ranks)]
        is_alike = [set(each) for each in held] == [
            {self._held(i) for i in of.order} for of in shares
        ]
        if is_alike and self.routes:  # on one rank nothing was added up: below are the same bits
            self._restore_here(ticket, held, shares)
            return
        every = torch.zeros(sum(sizes), whole.width, dtype=self.declaration.compute_dtype)
        for i in self.fields.order:
            name = self._held(i)
            if not (parts := [each[name] for each in held if name in each]):
                raise CheckpointError(
                    "the commit holds what another exchange had read ahead, or owners that evaluated other consumers; "
                    "go on with the exchanges and the number of ranks of the commit, or from a commit without staleness"
                )
            every[:, whole.of(i)] = sum(parts[1:], parts[0])
        first = sum(sizes[: self.mesh.rank])
        mine = every[first : first + sizes[self.mesh.rank]]
        seen = self._sent(mine, whole, self.whole, self._partials(mine, whole, False))
        ticket.reads = Fetched((), seen)
        # A sample's bag of a field lies on one rank, or the operator is linear: whole fields give the same gradients.
        here = self.here.columns
        pooled = torch.cat([every[:, whole.of(i)] for i in here.dims] or [every[:, :0]], dim=1)
        ticket.wire.partials = self._partials(pooled, here, True)
        for i in self.here.order:
            if self._first_owner(i) != self.mesh.rank:
                pooled[:, here.of(i)] = 0.0  # held once
        ticket.wire.pooled = pooled

    def _restore_here(
        self, ticket: Ticket, held: Sequence[dict[str, Tensor]], shares: Sequence[Fields]
    ) -> None:
        """In the world that held it: every owner's message as it was, to the bit."""
        sizes, rank = ticket.wire.sizes, self.mesh.rank
        first = sum(sizes[:rank])
        blocks: list[list[Tensor]] = [[] for _ in self.routes]
        for owner, (each, share) in enumerate(zip(held, shares, strict=True)):
            parts = [each[self._held(i)] for i in share.order]
            none = torch.zeros(sum(sizes), 0, dtype=self.declaration.compute_dtype)
            pooled, columns = torch.cat([none, *parts], dim=1), share.columns
            is_mine = owner == rank
            partials = self._partials(pooled, columns, is_mine)
            if is_mine:
                ticket.wire.pooled, ticket.wire.partials = pooled, partials
            for route, landed in zip(self.routes, blocks, strict=True):
                sent = self._sent(pooled, columns, route.columns_of(owner), partials)
                landed.append(sent[first : first + sizes[rank]])
        ticket.reads = Fetched(
            [route.landed(landed) for route, landed in zip(self.routes, blocks, strict=True)]
        )

    def _first_owner(self, i: int) -> int:
        field = self.declaration.fields[i]
        return self.shardings[self.declaration.parts[field.part][0]].ranks[0]

    def _gradients_here(self, ticket: Ticket, received: Tensor) -> Tensor:
        return self._through(ticket.wire.partials, received, self.sent, self.here.columns)
