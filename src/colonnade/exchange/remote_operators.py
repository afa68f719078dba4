"""What exchanges share that evaluate the model's operators on the way from the rows to the samples.

Weights of such an operator are dense parameters, the same on every rank that evaluates it. What is evaluated on a rank
is of samples of other ranks, too, so its part of their gradient is that of the global batch; it is added to their
`.grad` there by `push`. The sum over these ranks, or over all, is then what one rank would have, as it is for every
other dense parameter.

Legend: R samples that something is evaluated for, W columns of their fields, P of what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.errors import ConfigError, DataError
from colonnade.exchange.operator_cut import result_width
from colonnade.exchange.pooled import PooledExchange
from colonnade.lookup.contract import RowGradients, RowSource, Ticket
from colonnade.lookup.fields import Columns
from colonnade.lookup.layout import Declaration, Lookups, Output, outputs, weighed
from colonnade.topology.sharding import Sharding
from colonnade.wire.coding import Coding
from colonnade.wire.transport import Places, placed

NONE: Mapping[str, Sequence[int]] = {}
TRIED = 3
"""Samples that operators are tried on."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Of one consumer and one batch, as it was evaluated here."""

    fields: tuple[int, ...]
    """Those that it was evaluated of."""
    values: Tensor  # (R, W) of them side by side, a leaf
    result: Tensor  # (R, P)


class EvaluatingExchange(PooledExchange):
    """One rank's end."""

    has_whole_bags = False
    """Whether bags whose rows are split are added up before they are evaluated."""
    evaluators = "the rows' owners"

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        shardings: Sequence[Sharding],
        coding: Coding,
        consumers: Sequence[str],
        apart: Mapping[str, Sequence[int]] = NONE,
    ) -> None:
        """As `pooled`. consumers: names of those that are evaluated before the samples' ranks; apart: of these, those
        that a subclass evaluates by itself, and the pooled fields that it needs."""
        self.consumers = tuple(consumers)
        numbers = {field.name: i for i, field in enumerate(declaration.fields)}
        self.taken_by = {
            name: tuple(numbers[field] for field in declaration.consumers[name].features)
            for name in self.consumers
            if name not in apart
        }
        taken = [*self.taken_by.values(), *apart.values()]
        features = {declaration.fields[i].feature for of in taken for i in of}
        whole = {
            f
            for f in features
            if shardings[declaration.table_of(declaration.features[f])].num_owners == 1
        }
        # A bag's owner divides where it has all of it; else every lookup of the bag weighs less.
        averaged = {f for f in features if declaration.features[f].pooling in ("mean", "sqrtn")}
        self.weighed = averaged - whole
        self.undivided, self.averaged_there = averaged, averaged & whole
        self.unsplit: Collection[int] = (
            ()
            if self.has_whole_bags
            else {
                declaration.fields[i].feature
                for name, fields in self.taken_by.items()
                if declaration.consumers[name].interaction.needs() == "fields"
                for i in fields
            }
            - whole
        )
        self.are_tried = False
        super().__init__(declaration, mesh, shardings, coding)

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
                    width = result_width(self.declaration, name)
                    assert width is not None
                    found.append(Output((name,), output.fields, (), width, False, True))
        return tuple(found)

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
        """As `pooled`. ConfigError, on every rank, for an operator that gives something else than it said."""
        if not self.are_tried:
            self._try_operators()
        ticket.wire.versions = [each._version for each in self.pushed_parameters]
        super().fetch(ticket, source)

    def _try_operators(self) -> None:
        """On a few samples of zeros, by every rank before anything travels: each has all weights, but the ranks that
        evaluate an operator are some of them, and of what fails there others would see a lost peer."""
        for name, fields in self.taken_by.items():
            interaction = self.declaration.consumers[name].interaction
            dims = [self.declaration.fields[i].dim for i in fields]
            given = torch.zeros(TRIED, sum(dims), dtype=self.declaration.compute_dtype)
            modes = [(each, each.training) for each in interaction.modules()]
            for each in interaction.modules():
                # Nothing is counted. Dropout may change what it is given in place, in training alone.
                each.training = isinstance(each, _DropoutNd)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    if interaction.one_width:
                        given = given.unflatten(1, (len(fields), -1))
                    self._check(name, interaction.partial_of(given, range(len(fields))), TRIED)
            finally:
                for each, is_training in modes:
                    each.training = is_training
        self.are_tried = True

    def _check(self, name: str, result: Tensor, num_samples: int) -> None:
        wanted = (num_samples, result_width(self.declaration, name))
        if result.shape != wanted:
            raise ConfigError(
                f"consumer {name!r}: its operator gave {tuple(result.shape)} for {num_samples} samples, wanted {wanted}"
                ": a row for each sample, of as many floats as its `width` says"
            )

    def _evaluated(
        self, name: str, numbers: Sequence[int], pooled: Tensor, here: Columns, is_trained: bool
    ) -> Partial:
        """A consumer, of those of its fields, whose columns of pooled (R, all of `here`) these are."""
        mine = tuple(self.taken_by[name][n] for n in numbers)
        interaction = self.declaration.consumers[name].interaction
        places = tuple((i, here.starts[i]) for i in mine)
        values = placed([(pooled, places)], {i: here.dims[i] for i in mine}).detach()
        if not len(pooled):  # a module need not know what to make of no samples
            width = result_width(self.declaration, name) or 0
            return Partial(mine, values, pooled.new_zeros(0, width))
        with torch.set_grad_enabled(is_trained):
            values.requires_grad_(is_trained)
            given = values.unflatten(1, (len(mine), -1)) if interaction.one_width else values
            result = interaction.partial_of(given, numbers)
        self._check(name, result, len(pooled))
        return Partial(mine, values, result)

    def _sent(
        self, pooled: Tensor, here: Columns, carried: Columns, partials: Mapping[str, Partial]
    ) -> Tensor:
        """(R, P): values and partials side by side; read only."""
        values = tuple((key, here.starts[key]) for key in carried.dims if isinstance(key, int))
        results = [
            (partials[key].result.detach(), ((key, 0),))
            for key in carried.dims
            if isinstance(key, str)
        ]
        return placed([(pooled, values), *results], carried.dims)

    def _through(
        self, partials: Mapping[str, Partial], received: Tensor, sent: Columns, here: Columns
    ) -> Tensor:
        """received (R, P): gradients of what was `sent` -> (R, W) of the pooled fields `here`, read only; those of
        weights are added to theirs."""
        values = tuple((key, sent.starts[key]) for key in sent.dims if isinstance(key, int))
        blocks: list[tuple[Tensor, Places]] = [(received, values)]
        for key, partial in partials.items() if len(received) else ():
            if key not in sent.dims:
                continue
            if (
                not partial.result.requires_grad
            ):  # made of neither the values nor weights that are trained
                continue
            parameters = trained(self.declaration.consumers[key].interaction)
            gradient, *of_weights = torch.autograd.grad(
                partial.result, [partial.values, *parameters], received[:, sent.of(key)],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for parameter, each in zip(parameters, of_weights, strict=True):
                if each is not None:
                    _add(parameter, each)
            if gradient is not None:
                starts = accumulate((here.dims[i] for i in partial.fields), initial=0)
                blocks.append((gradient, tuple(zip(partial.fields, starts, strict=False))))
        return placed(blocks, here.dims)

    def begin_push(self, tickets: Sequence[Ticket], step: int) -> Callable[[], RowGradients | None]:
        """As `pooled`; and gradients of weights that were used here are added to them. RuntimeError, on the ranks
        where such a weight has changed since it was used; the others wait for these, as for any rank that raises."""
        now = [each._version for each in self.pushed_parameters]
        if any(ticket.wire.versions not in (None, now) for ticket in tickets):
            raise RuntimeError(
                f"weights of {', '.join(map(repr, self.consumers))}, which {self.evaluators} evaluate, were changed "
                "between forward and RowOptimizer.step(), which completes their gradients; call it before the dense "
                "gradients are summed over ranks and before the dense optimizer's step"
            )
        for parameter in self.pushed_parameters:  # a rank may have none of its fields
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().begin_push(tickets, step)


def trained(interaction: nn.Module) -> list[nn.Parameter]:
    return [each for each in interaction.parameters() if each.requires_grad]


@torch.no_grad()
def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(gradient)
