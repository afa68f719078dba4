"""Several exchanges in one plan: each has the features of its tables, one ticket stands for all.

Ids travel after one header, the owner's store acquires the rows of all tables at once, and outputs come as declared
whatever travels: of an output with fields of several exchanges, each writes its own, and reads their gradients there.

Legend: T tables, O rows this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.exchange.prefetched import TABLES, tables_held
from colonnade.lookup.contract import (
    Exactness,
    Exchange,
    Inside,
    RowGradients,
    RowSource,
    Ticket,
)
from colonnade.lookup.layout import Declaration, Output, outputs
from colonnade.lookup.outputs import CPU, found, recorded, summed_backwards
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.wire.id_distribution import Asks, route

KINDS = ("bitwise", "reassociated", "lossy")
"""Of exactness, best first."""


class End(Exchange, Asks, Protocol):
    """An exchange that can be one of several."""

    declaration: Declaration

    @property
    def outputs(self) -> Sequence[Output]: ...

    def pooled(self, ticket: Ticket, into: Mapping[int, Tensor] = ...) -> list[Tensor]:
        """By output, what `values` makes the model's inputs of. into: by output that others have fields of, too, where
        it writes its own."""
        ...


class SeveralExchanges:
    """One rank's end of all of them. `ends`: by name, each of `part_of` this declaration."""

    def __init__(
        self,
        declaration: Declaration,
        mesh: Mesh,
        ends: Mapping[str, End],
        reads_ahead: Sequence[int] = (),
    ) -> None:
        """reads_ahead: by exchange, steps between reading a row and its use; default 0."""
        self.declaration, self.mesh = declaration, mesh
        self.names, self.ends = tuple(ends), tuple(ends.values())
        self.reads_ahead = tuple(reads_ahead) or (0,) * len(ends)
        partials = {
            each.names[0]: each for end in self.ends for each in end.outputs if each.is_partial
        }
        self.outputs = tuple(_without_partials(outputs(declaration), partials))
        by_table = [0] * len(declaration.tables)
        for i, end in enumerate(self.ends):
            for feature in end.declaration.features:
                by_table[declaration.table_of(feature)] = i
        # Runs of tables of one exchange: (exchange, first table, last table + 1).
        self.runs: list[tuple[int, int, int]] = []
        for i, run in groupby(range(len(by_table)), lambda t: by_table[t]):
            tables = list(run)
            self.runs.append((i, tables[0], tables[-1] + 1))
        # By exchange, by output of it: which of these.
        self.places = [[self._place(each) for each in end.outputs] for end in self.ends]
        every = [i for places in self.places for i in places]
        self.shared = [i for i in range(len(self.outputs)) if every.count(i) > 1]

    def _place(self, theirs: Output) -> int:
        """Of an exchange's output."""
        return next(
            i
            for i, each in enumerate(self.outputs)
            if each.is_partial == theirs.is_partial and theirs.names[0] in each.names
        )

    @property
    def exactness(self) -> Exactness:
        """The weakest of them."""
        each = [end.exactness for end in self.ends]
        kind = max((one.kind for one in each), key=KINDS.index)
        return Exactness(kind, max(one.max_error for one in each))

    @property
    def pushed_parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(dict.fromkeys(p for end in self.ends for p in end.pushed_parameters))

    @property
    def inside(self) -> Inside | None:
        return next((end.inside for end in self.ends if end.inside is not None), None)

    def route(self, batch: Batch, step: int, *, purpose: str = "route") -> Ticket:
        """Collective on `purpose`'s group. Raises IdRangeError, DataError before anything travels."""
        parts = route(self.ends, self.mesh, batch, step, purpose)
        offsets = [part.owned_offsets for part in parts]
        codes = [part.next_use for part in parts if part.next_use is not None]
        for part, bound in zip(parts, self.reads_ahead, strict=True):
            part.bound = bound
        return Ticket(
            step, batch.size, None, None,
            self._joined([part.owned_ids for part in parts], offsets), _sum(offsets), None,
            parts[0].weight, self._joined(codes, offsets) if codes else None,
            purpose=purpose, parts=parts, dense=batch.dense,
        )  # fmt: skip

    def place(self, ticket: Ticket, views: Sequence[RowView]) -> None:
        self._hand_out(ticket)
        for end, part in zip(self.ends, ticket.parts, strict=True):
            end.place(part, views)

    def fetch(self, ticket: Ticket, source: RowSource) -> None:
        """Collective in a world of several. Of a batch that is used in `ticket.steps_left` steps: what is due by then
        and has not been read, the most urgent first."""
        if source.rows is ticket.slots:
            self._hand_out(ticket)
            rows = [part.pinned for part in ticket.parts]
        else:
            rows = self._split(ticket, source.rows)
        for i in sorted(self.due(ticket), key=lambda i: self.reads_ahead[i]):
            # Rows that may change before their use are copied.
            in_place = source.in_place or not self.reads_ahead[i]
            self.ends[i].fetch(ticket.parts[i], replace(source, rows=rows[i], in_place=in_place))

    def due(self, ticket: Ticket) -> list[int]:
        """Numbers of exchanges whose rows are to be read now."""
        return [
            i
            for i, part in enumerate(ticket.parts)
            if part.reads is None and self.reads_ahead[i] >= ticket.steps_left
        ]

    def values(
        self, ticket: Ticket, handle: Tensor, device: torch.device = CPU
    ) -> dict[str, Tensor]:
        """See the contract."""
        tensors = recorded(self, ticket, handle)
        return found(self.declaration, self.outputs, tensors, device, ticket.dense)

    def pooled(self, ticket: Ticket) -> list[Tensor]:
        """One tensor per output. Each exchange writes its fields where they belong, for to put tensors side by side,
        and to cut their gradients apart again, took longer than to exchange what they hold."""
        dtype = self.declaration.output_dtype
        tensors = {
            i: empty(ticket.batch_size, self.outputs[i].width, dtype=dtype) for i in self.shared
        }
        for end, part, places in zip(self.ends, ticket.parts, self.places, strict=True):
            into = {j: tensors[i] for j, i in enumerate(places) if i in tensors}
            tensors |= zip(places, end.pooled(part, into), strict=True)
        return [tensors[i] for i in range(len(self.outputs))]

    def begin_push(self, tickets: Sequence[Ticket], step: int) -> Callable[[], RowGradients | None]:
        """Collective in a world of several."""
        if not tickets:
            return lambda: None
        for ticket in tickets:
            self._hand_out(ticket)
            self._lend_gradients(ticket)
        # What one sends travels while the next one computes.
        begun = [
            end.begin_push([ticket.parts[i] for ticket in tickets], step)
            for i, end in enumerate(self.ends)
        ]

        def finish() -> RowGradients:
            pushed = [each() for each in begun]
            return self._all([one for one in pushed if one is not None])

        return finish

    def _all(self, pushed: Sequence[RowGradients]) -> RowGradients:
        offsets = [one.offsets for one in pushed]
        slots = self._joined([one.slots for one in pushed], offsets)
        return RowGradients(slots, _sum(offsets), None, None, list(pushed))

    def squared_norm(self, pushed: RowGradients) -> tuple[RowGradients, float]:
        each = [end.squared_norm(one) for end, one in zip(self.ends, pushed.source, strict=True)]
        return self._all([one for one, _ in each]), sum(square for _, square in each)

    def update(
        self, store: Any, pushed: RowGradients, optimizers: Tensor, settings: Tensor
    ) -> None:
        for end, one in zip(self.ends, pushed.source, strict=True):
            end.update(store, one, optimizers, settings)

    def drop(self, ticket: Ticket) -> None:
        for end, part in zip(self.ends, ticket.parts, strict=True):
            end.drop(part)
        ticket.forget()

    def hold(self, ticket: Ticket) -> dict[str, Tensor]:
        """What each holds, its name before the names of it; and of which tables that is."""
        there = [i for i, part in enumerate(ticket.parts) if part.reads is not None]
        tables = [t for i, first, last in self.runs if i in there for t in range(first, last)]
        return {
            TABLES: torch.tensor(tables, dtype=torch.int64),
            **{
                f"{self.names[i]}.{key}": value
                for i in there
                for key, value in self.ends[i].hold(ticket.parts[i]).items()
            },
        }

    def restore(self, ticket: Ticket, held: Sequence[dict[str, Tensor]]) -> None:
        known = tables_held(held, len(self.declaration.tables))
        for i, (name, end, part) in enumerate(
            zip(self.names, self.ends, ticket.parts, strict=True)
        ):
            mine = {t for j, first, last in self.runs if i == j for t in range(first, last)}
            if self.reads_ahead[i] <= ticket.steps_left or not mine <= known:
                continue  # to be read when it is due
            # What it held itself, and what others did: its tables may have had another exchange.
            prefix = f"{name}."
            found = [
                {**each, **{key.removeprefix(prefix): each[key] for key in each if key.startswith(prefix)}}
                for each in held
            ]  # fmt: skip
            end.restore(part, found)

    def squared_norms(self, rows: RowView, slots: Tensor) -> Tensor:
        return self.ends[0].squared_norms(rows, slots)

    def _hand_out(self, ticket: Ticket) -> None:
        """Slots of the parts."""
        if any(part.slots is None for part in ticket.parts):
            for part, slots in zip(ticket.parts, self._split(ticket, ticket.pinned), strict=True):
                part.slots = slots

    def _lend_gradients(self, ticket: Ticket) -> None:
        """To the parts: whole outputs', of which each reads the columns of its fields."""
        given = summed_backwards(ticket, self.declaration.compute_dtype)
        for part, places in zip(ticket.parts, self.places, strict=True):
            part.gradients = [] if given is None else [[given[i] for i in places]]

    def _split(self, ticket: Ticket, values: Tensor) -> list[Tensor]:
        """(O,) by row of all tables -> by row of each exchange's."""
        ends = ticket.owned_offsets.tolist()
        return [
            torch.cat(
                [values[ends[first] : ends[last]] for i, first, last in self.runs if i == number]
            )
            for number in range(len(self.ends))
        ]

    def _joined(self, values: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        """By row of each exchange's tables -> (O,) by row of all tables."""
        ends = [each.tolist() for each in offsets]
        return torch.cat(
            [values[i][ends[i][first] : ends[i][last]] for i, first, last in self.runs]
        )


def _without_partials(
    declared: Sequence[Output], partials: Mapping[str, Output]
) -> Iterator[Output]:
    """Outputs, those that some exchange has the partials of by themselves."""
    for output in declared:
        if others := tuple(name for name in output.names if name not in partials):
            yield replace(output, names=others)
        yield from (partials[name] for name in output.names if name in partials)


def _sum(offsets: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(offsets)).sum(0)
