"""`substitute`: owners evaluate the model's first operators on the rows they have, for the samples of all ranks;
partial results travel, and gradients of them travel back (DES, Rong et al. 2020).

It is `pooled` up to the message: owners pool their fields for the global batch, and send, for each consumer that is
cheaper so (`substitution.py`), its partial instead of its fields' values. Partials are added over owners in a fixed
order (`travel.py`) and combined. On the way back an owner takes the gradient of the merged partial, which is that of
its own, through its part of the operator; rows are updated with the sum over the global batch, and no gradient of a
row travels.

Weights of an operator are dense parameters, the same on every rank. An owner's part of their gradient is that of the
global batch, for the columns of its fields; it is added to their `.grad` there by `push`, so the sum over ranks is what
one rank would have, as it is for every other dense parameter.

Legend: G samples of all ranks, W_o columns of the fields on rank o, P of what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.exchange.attending import Attention
from colonnade.exchange.coding import AS_IT_IS, Coding
from colonnade.exchange.contract import RowGradients, RowSource, Ticket
from colonnade.exchange.fields import Columns, Fields, Key
from colonnade.exchange.layout import Declaration, Lookups, Output, outputs, weighed
from colonnade.exchange.pooled import Fetched, PooledExchange
from colonnade.exchange.routing import counted
from colonnade.exchange.substitution import barred, partial_width, substituted
from colonnade.interaction import TargetAttention
from colonnade.ops.memory import empty
from colonnade.topology.mesh import Mesh
from colonnade.topology.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Partial:
    """Of one consumer and one batch, as it was evaluated here."""

    fields: tuple[int, ...]
    """Those on this rank."""
    values: Tensor  # (G, W) of them side by side, a leaf
    result: Tensor  # (G, P)


class SubstituteExchange(PooledExchange):
    """One rank's end."""

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
        self.consumers = substituted(
            declaration, shardings, world=mesh.world, reads_ahead=reads_ahead
        )
        numbers = {field.name: i for i, field in enumerate(declaration.fields)}
        for name, consumer in declaration.consumers.items():
            if consumer.interaction.sequences and name not in self.consumers:
                why = barred(declaration, name, world=mesh.world, reads_ahead=reads_ahead)
                feature = declaration.features[
                    declaration.fields[numbers[consumer.features[-1]]].feature
                ]
                raise ConfigError(
                    f"feature {feature.name!r} of table {feature.table!r}: got exchange substitute for a sequence that "
                    f"consumer {name!r} takes, but {why}; give this table exchange rows"
                )
        self.taken_by = {
            name: tuple(numbers[field] for field in declaration.consumers[name].features)
            for name in self.consumers
        }
        self.attending: dict[str, Attention] = {}
        for name in self.consumers:
            interaction = declaration.consumers[name].interaction
            if isinstance(interaction, TargetAttention):
                query, sequence = self.taken_by.pop(name)
                of = declaration.features[declaration.fields[sequence].feature]
                ranks = shardings[declaration.table_of(of)].ranks
                self.attending[name] = Attention(interaction, mesh, ranks, query, sequence)
        self.queries = tuple(dict.fromkeys(each.query for each in self.attending.values()))
        features = {declaration.fields[i].feature for of in self.taken_by.values() for i in of}
        features |= {declaration.fields[i].feature for i in self.queries}
        whole = {
            f
            for f in features
            if shardings[declaration.table_of(declaration.features[f])].num_owners == 1
        }
        # A bag's owner divides where it has all of it; else every lookup of the bag weighs less.
        averaged = {f for f in features if declaration.features[f].pooling in ("mean", "sqrtn")}
        self.weighed = averaged - whole
        self.undivided, self.averaged_there = averaged, averaged & whole
        self.unsplit = {
            declaration.fields[i].feature
            for name, fields in self.taken_by.items()
            if declaration.consumers[name].interaction.needs() == "fields"
            for i in fields
        } - whole
        super().__init__(declaration, mesh, shardings, coding)
        taken = {key for output in self.outputs for key, _ in output.pieces}
        self.unseen = [self.whole.of(i) for i in self.queries if i not in taken]

    @property
    def pushed_parameters(self) -> tuple[nn.Parameter, ...]:
        every = (self.declaration.consumers[name].interaction for name in self.consumers)
        return tuple(dict.fromkeys(p for each in every for p in trained(each)))

    def _outputs(self) -> tuple[Output, ...]:
        found: list[Output] = []
        for output in outputs(self.declaration):
            if others := tuple(name for name in output.names if name not in self.consumers):
                found.append(replace(output, names=others))
            for name in output.names:
                if name in self.consumers:
                    width = partial_width(self.declaration, name)
                    assert width is not None
                    found.append(Output((name,), output.fields, (), width, False, True))
        return tuple(found)

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

    def _seen(self) -> Columns:
        widths = {each.names[0]: each.width for each in self.outputs if each.is_partial}
        return Columns({**super()._seen().dims, **{name: widths[name] for name in self.attending}})

    def _collected(self, batch: Batch) -> Lookups:
        """Raises DataError."""
        lookups = super()._collected(batch)
        weights = list(lookups.weights)
        for c, f in enumerate(self.asked.features):
            bags = lookups.bags[c]
            if bags is None:
                continue
            lengths = bags.diff()
            feature = self.declaration.features[f]
            if f in self.unsplit and len(lengths) and int(lengths.max()) > 1:
                raise DataError(
                    f"feature {feature.name!r}: got a sample with {int(lengths.max())} ids, wanted at most one: its "
                    "table's rows lie on several ranks and its consumer needs a sample's whole bag on one. Give table "
                    f"{feature.table!r} the sharding table_wise, or exchange pooled"
                )
            if f in self.weighed:
                dtype = self.declaration.compute_dtype
                each = lengths.clamp(min=1).to(dtype)
                each = (1 / (each if feature.pooling == "mean" else each.sqrt())).repeat_interleave(
                    lengths
                )
                given = weights[c]
                weights[c] = each if given is None else each * given.to(dtype)
        if not self.weighed:
            return lookups
        return weighed(lookups, weights, self.asked, self.declaration.compute_dtype)

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """As `pooled`; where there is attention, what is merged of it is here when it returns."""
        ticket.wire.versions = [each._version for each in self.pushed_parameters]
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
            numbers = tuple(n for n, i in enumerate(fields) if i in here.dims)
            if not numbers:
                continue
            mine = tuple(fields[n] for n in numbers)
            interaction = self.declaration.consumers[name].interaction
            values = torch.cat([pooled[:, here.of(i)] for i in mine], dim=1)
            with torch.set_grad_enabled(is_trained):
                values.requires_grad_(is_trained)
                given = values.unflatten(1, (len(mine), -1)) if interaction.one_width else values
                result = interaction.partial_of(given, numbers)
            found[name] = Partial(mine, values, result)
        return found

    def _sent(
        self, pooled: Tensor, here: Columns, carried: Columns, partials: Mapping[str, Partial]
    ) -> Tensor:
        """(G, P): values and partials side by side."""
        send = empty(len(pooled), carried.width, dtype=pooled.dtype)
        for key in carried.dims:
            is_field = isinstance(key, int)
            values = pooled[:, here.of(key)] if is_field else partials[str(key)].result.detach()
            send[:, carried.of(key)] = values
        return send

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

    def _gradients_here(self, ticket: Ticket, received: Tensor) -> list[Tensor]:
        here = self.here.columns
        found = torch.zeros(len(received), here.width, dtype=received.dtype)
        for key in self.sent.dims:
            given = received[:, self.sent.of(key)]
            if isinstance(key, int):
                found[:, here.of(key)] += given
                continue
            partial: Partial = ticket.wire.partials[key]
            parameters = trained(self.declaration.consumers[key].interaction)
            gradient, *of_weights = torch.autograd.grad(
                partial.result, [partial.values, *parameters], given, retain_graph=True,
                allow_unused=True,
            )  # fmt: skip
            for parameter, each in zip(parameters, of_weights, strict=True):
                if each is not None:
                    _add(parameter, each)
            first = 0
            for i in partial.fields if gradient is not None else ():
                there = found[:, here.of(i)]
                there += gradient[:, first : (first := first + there.shape[1])]
        of_rows = [ticket.wire.of_rows[i].contiguous() for i in self.here.sequences]
        return [found, *of_rows] if here.dims else of_rows

    def push(self, tickets: Sequence[Ticket], step: int = 0) -> RowGradients | None:
        """As `pooled`; and gradients of weights that were used here are added to them. RuntimeError, on every rank,
        where such a weight has changed since it was used."""
        now = [each._version for each in self.pushed_parameters]
        if any(ticket.wire.versions not in (None, now) for ticket in tickets):
            raise RuntimeError(
                f"weights of {', '.join(map(repr, self.consumers))}, which the rows' owners evaluate, were changed "
                "between forward and RowOptimizer.step(), which completes their gradients; call it before the dense "
                "gradients are summed over ranks and before the dense optimizer's step"
            )
        for parameter in self.pushed_parameters:  # a rank may have none of its fields
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().push(tickets, step)


def trained(interaction: nn.Module) -> list[nn.Parameter]:
    return [each for each in interaction.parameters() if each.requires_grad]


@torch.no_grad()
def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(gradient)
