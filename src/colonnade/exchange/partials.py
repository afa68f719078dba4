"""Exchange `substitute`: owners evaluate the model's first operators on the rows they have, for the samples of all
ranks; partial results travel, and gradients of them travel back (DES, Rong et al. 2020).

It is `pooled` up to the message: owners pool their fields for the global batch, and send, for each consumer that is
cheaper so (`operator_cut.py`), its partial instead of its fields' values. Partials are added over owners in a fixed
order (`wire/transport.py`) and combined. On the way back an owner takes the gradient of the merged partial, which is
that of its own, through its part of the operator; rows are updated with the sum over the global batch, and no
gradient of a row travels. Weights are those of `remote_operators.py`.

Target attention: queries go to the ranks that have rows of the sequence, and what each makes of its rows is merged
where the samples are. Nothing of it is rounded: a logarithm of sums in 16 bits would change a row's weight by several
percent.

Legend: B samples of this rank, G of all ranks, D dim, H heads, R ranks that have rows of the sequence, E rows here,
W_o columns of the fields on rank o, P floats of what is sent (D + H of attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.comm.collectives import sum_in_order
from colonnade.comm.mesh import Mesh
from colonnade.errors import CheckpointError, ConfigError
from colonnade.exchange.operator_cut import barred, substituted
from colonnade.exchange.pooled import Fetched
from colonnade.exchange.remote_operators import EvaluatingExchange, Partial
from colonnade.interaction import TargetAttention
from colonnade.lookup.contract import RowSource, Ticket
from colonnade.lookup.fields import Columns, Fields, Key
from colonnade.lookup.layout import Declaration
from colonnade.topology.sharding import Sharding
from colonnade.wire.coding import AS_IT_IS, Coding
from colonnade.wire.id_distribution import counted
from colonnade.wire.transport import DirectRoute


@dataclass(frozen=True, slots=True)
class Attended:
    """One batch, as it was evaluated here."""

    queries: Tensor  # (G, D), a leaf; of no samples where no rows of the sequence can lie
    rows: Tensor  # (E, D), a leaf
    result: Tensor  # (G, P)
    stats: Tensor  # (R, B, P), a leaf
    merged: Tensor  # (B, P)


@dataclass(frozen=True, slots=True)
class Attention:
    """One consumer's."""

    interaction: TargetAttention
    mesh: Mesh
    ranks: tuple[int, ...]
    """That may have rows of its sequence."""
    query: int
    """Its fields: indices into Declaration.fields."""
    sequence: int

    @property
    def is_here(self) -> bool:
        return self.mesh.rank in self.ranks

    def fetch(
        self,
        query: Tensor,  # (B, D)
        rows: Tensor,  # (E, D) of this rank, of all ranks' samples in rank order
        lengths: Tensor,  # (G,) int64: rows of each sample here
        sizes: Sequence[int],
        counts_as: str,
        is_trained: bool,
    ) -> Attended:
        """Collective."""
        size, dim = query.shape
        queries = self._to_owners("fetch", query.repeat(len(self.ranks), 1, 1), sizes, counts_as)
        with torch.set_grad_enabled(is_trained):
            queries.requires_grad_(is_trained)
            rows = rows.requires_grad_(is_trained)
            segments = torch.arange(len(queries)).repeat_interleave(lengths)
            result = self.interaction.partial(rows, segments, len(queries), None, queries)
            stats = self._to_samples("fetch", result.detach(), sizes, counts_as)
            stats = stats.requires_grad_(is_trained)
            merged = self.interaction.merged(stats)
        assert merged.shape == (size, self.interaction.width(dim))
        return Attended(queries, rows, result, stats, merged)

    def push(
        self, attended: Attended, gradient: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Collective. gradient (B, P) -> of this rank's queries (B, D), and of the rows here (E, D)."""
        (of_stats,) = torch.autograd.grad(
            attended.merged, attended.stats, gradient, retain_graph=True
        )
        given = self._to_owners("push", of_stats, sizes, "push")
        of_queries, of_rows = torch.autograd.grad(
            attended.result, [attended.queries, attended.rows], given, retain_graph=True
        )
        back = self._to_samples("push", of_queries, sizes, "push")
        return sum_in_order(back.flatten(1)[None]).view(back.shape[1:]), of_rows

    def _to_owners(
        self, group: str, blocks: Tensor, sizes: Sequence[int], counts_as: str
    ) -> Tensor:
        """blocks (R, B, n) of this rank's samples -> (G, n) of all samples, or (0, n) where no rows can lie."""
        _, size, width = blocks.shape
        send = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        receive = [each * width * self.is_here for each in sizes]
        found, _ = self.mesh.all_to_all(
            group, blocks.reshape(-1), send, receive, counts_as=counts_as
        )
        return found.view(sum(sizes) if self.is_here else 0, width)

    def _to_samples(
        self, group: str, values: Tensor, sizes: Sequence[int], counts_as: str
    ) -> Tensor:
        """values (G, n), or (0, n) where no rows can lie -> (R, B, n) of this rank's samples."""
        width, size = values.shape[1], sizes[self.mesh.rank]
        send = [each * width * self.is_here for each in sizes]
        receive = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        found, _ = self.mesh.all_to_all(
            group, values.reshape(-1), send, receive, counts_as=counts_as
        )
        return found.view(len(self.ranks), size, width)


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
        numbers = {field.name: i for i, field in enumerate(declaration.fields)}
        self.attending: dict[str, Attention] = {}
        for name, consumer in declaration.consumers.items():
            if not consumer.interaction.sequences:
                continue
            query, sequence = (numbers[field] for field in consumer.features)
            feature = declaration.features[declaration.fields[sequence].feature]
            if name not in consumers:
                why = barred(declaration, name, world=mesh.world, reads_ahead=reads_ahead)
                raise ConfigError(
                    f"feature {feature.name!r} of table {feature.table!r}: got exchange substitute for a sequence that "
                    f"consumer {name!r} takes, but {why}; give this table exchange rows"
                )
            assert isinstance(consumer.interaction, TargetAttention)
            ranks = shardings[declaration.table_of(feature)].ranks
            self.attending[name] = Attention(consumer.interaction, mesh, ranks, query, sequence)
        self.queries = tuple(dict.fromkeys(each.query for each in self.attending.values()))
        apart = {name: (each.query,) for name, each in self.attending.items()}
        super().__init__(declaration, mesh, shardings, coding, consumers, apart)
        taken = {key for output in self.outputs for key, _ in output.pieces}
        self.unseen = [self.whole.of(i) for i in self.queries if i not in taken]

    def _carried(self, share: Fields) -> Columns:
        dims: dict[Key, int] = {}
        for output in self.outputs:
            for key, _ in output.pieces:
                if isinstance(key, str):
                    if set(self.taken_by.get(key, ())) & set(share.order):
                        dims[key] = output.width
                elif key in share.order:
                    dims[key] = self.declaration.fields[key].dim
        for i in self.queries:
            if i in share.order:
                dims[i] = self.declaration.fields[i].dim
        return Columns(dims)

    def _arriving(self) -> Columns:
        widths = {each.names[0]: each.width for each in self.outputs if each.is_partial}
        return Columns(
            {**super()._arriving().dims, **{name: widths[name] for name in self.attending}}
        )

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """As `pooled`; where there is attention, what is merged of it is here when it returns."""
        super().fetch(ticket, source)
        if self.attending:
            self._attend(ticket)

    def _attend(self, ticket: Ticket) -> None:
        """Collective. Queries have to be here before they can go out."""
        size, sizes = ticket.batch_size, ticket.wire.sizes
        counts_as, is_trained = counted(ticket.purpose, "fetch"), ticket.purpose != "evaluate"
        total = self._total(ticket)
        total = torch.cat([total, total.new_zeros(size, self.whole.width - total.shape[1])], dim=1)
        ticket.wire.attended = {}
        for name, each in self.attending.items():
            dim = self.declaration.fields[each.sequence].dim
            rows, lengths = total.new_zeros(0, dim), torch.zeros(0, dtype=torch.int64)
            if each.is_here:
                rows = ticket.wire.rows[self.here.sequences.index(each.sequence)].detach()
                feature = self.declaration.fields[each.sequence].feature
                bags = ticket.lookups.bags[self.here.features.index(feature)]
                lengths = torch.ones(sum(sizes), dtype=torch.int64) if bags is None else bags.diff()
            query = total[:, self.whole.of(each.query)].contiguous()
            attended = each.fetch(query, rows, lengths, sizes, counts_as, is_trained)
            total[:, self.whole.of(name)] = attended.merged.detach()
            if is_trained:
                ticket.wire.attended[name] = attended
        ticket.reads = Fetched((), total)

    def _gradients(self, ticket: Ticket) -> Tensor:
        """And of queries, once owners have said what they make of those of attention."""
        total = super()._gradients(ticket)
        for columns in self.unseen:
            total[:, columns] = 0.0
        ticket.wire.of_rows = {}
        for name, each in self.attending.items():
            given = total[:, self.whole.of(name)].contiguous()
            of_query, of_rows = each.push(ticket.wire.attended[name], given, ticket.wire.sizes)
            total[:, self.whole.of(each.query)] += of_query
            found = ticket.wire.of_rows
            before = found.get(each.sequence)
            found[each.sequence] = of_rows if before is None else before + of_rows
        return total

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
        pooled = pooled.clone()  # partials may look into it
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

    def _gradients_here(self, ticket: Ticket, received: Tensor) -> list[Tensor]:
        here = self.here.columns
        found = self._through(ticket.wire.partials, received, self.sent, here)
        of_rows = [ticket.wire.of_rows[i].contiguous() for i in self.here.sequences]
        return [found, *of_rows] if here.dims else of_rows
