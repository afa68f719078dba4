"""Exchange of a plan: runs all its parts, each with the tables that chose its hops.

The ids of all parts are sent in one message, the owner's store acquires the rows of all tables at once, and outputs
have the declared layout: where an output has fields of several parts, each part writes its own columns and reads their
gradients from them.

Legend: T tables, O rows this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.exchange.contract import ExchangePart
from colonnade.exchange.prefetched import TABLES, prefetched_tables
from colonnade.lookup.contract import (
    ID_CHANNELS,
    BatchInfo,
    Caller,
    Exactness,
    LookupContext,
    OwnedRows,
    PartLookup,
    PinnedRows,
    RowGradients,
    RowSource,
    TowerConsumers,
)
from colonnade.lookup.layout import EmbeddingDeclaration, Output, list_lookup_outputs
from colonnade.lookup.outputs import CPU, build_outputs, record_backward
from colonnade.ops.memory import empty
from colonnade.store.contract import RowView
from colonnade.wire.id_distribution import exchange_messages

KINDS = ("bitwise", "reassociated", "lossy")
"""Kinds of exactness, best first."""


class Exchange:
    """Exchange of all lookups of a plan, on one rank.

    Methods are collective in a world of several, but for `resolve_slots` and `squared_norms`; each is called by one
    thread (`lookup.contract`).
    """

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        mesh: Mesh,
        parts: Mapping[str, ExchangePart[Any]],
        reads_ahead: Sequence[int],
    ) -> None:
        """Take the parts by name, each of some tables of this declaration (`restrict_declaration_to_tables`).
        reads_ahead: by part, steps between reading a row and its use."""
        self.declaration = declaration
        self.mesh = mesh
        self.names = tuple(parts)
        self.parts = tuple(parts.values())
        self.reads_ahead = tuple(reads_ahead)
        # Most urgent first.
        self._order = sorted(range(len(self.parts)), key=lambda i: self.reads_ahead[i])
        partials = {
            output.names[0]: output
            for part in self.parts
            for output in part.outputs
            if output.is_partial
        }
        self.outputs = _separate_partial_outputs(list_lookup_outputs(declaration), partials)
        by_table = [0] * len(declaration.tables)
        for i, part in enumerate(self.parts):
            for feature in part.declaration.features:
                by_table[declaration.table_index_of(feature)] = i
        # Runs of tables of one part: (part, first table, last table + 1).
        self.runs: list[tuple[int, int, int]] = []
        for i, run in groupby(range(len(by_table)), lambda t: by_table[t]):
            tables = list(run)
            self.runs.append((i, tables[0], tables[-1] + 1))
        # By part and output: index among all outputs.
        self.output_indices = [
            [self._find_output_index(output) for output in part.outputs] for part in self.parts
        ]
        all_indices = [i for output_indices in self.output_indices for i in output_indices]
        self.shared = [i for i in range(len(self.outputs)) if all_indices.count(i) > 1]
        self.operators = [part.operators for part in self.parts if part.operators is not None]
        self.dtype = declaration.compute_dtype

    def _find_output_index(self, part_output: Output) -> int:
        """Return the number of a part's output."""
        return next(
            i
            for i, candidate in enumerate(self.outputs)
            if candidate.is_partial == part_output.is_partial
            and part_output.names[0] in candidate.names
        )

    # ---- facts

    @property
    def exactness(self) -> Exactness:
        """Exactness of the least exact part."""
        exactness_by_part = [part.exactness for part in self.parts]
        kind = max((exactness.kind for exactness in exactness_by_part), key=KINDS.index)
        return Exactness(kind, max(exactness.max_error for exactness in exactness_by_part))

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers that are evaluated before values reach the samples' ranks."""
        return tuple(name for operators in self.operators for name in operators.consumers)

    @property
    def pushed_parameters(self) -> tuple[nn.Parameter, ...]:
        """Dense parameters whose gradients `begin_push` completes, the same on every rank. It adds the global batch's
        gradient to `.grad` on the rank that has the rows, so sum `.grad` over ranks after it."""
        return tuple(dict.fromkeys(p for operators in self.operators for p in operators.parameters))

    @property
    def inside(self) -> TowerConsumers | None:
        """Consumers that only the ranks of one tower evaluate, so that gradients of their weights are summed over these
        ranks only; None if there are none."""
        tower_consumers = (operators.inside for operators in self.operators)
        return next((inside for inside in tower_consumers if inside is not None), None)

    # ---- ids

    def send_ids(self, batch: Batch, caller: Caller = "lookahead") -> LookupContext:
        """Send a batch's ids to the owners of their rows. Collective. Raises IdRangeError and
        DataError before anything is sent; after any error, no request of this rank remains."""
        requests = []
        try:
            for part in self.parts:
                requests.append(part.build_requests(batch, caller))
            weight = float(batch.size if batch.sample_weight is None else batch.sample_weight.sum())
            received: list[list[np.ndarray]] = [[]] * len(requests)
            if self.mesh.num_ranks > 1:
                messages = [request.messages for request in requests]
                received, weight = exchange_messages(
                    messages, self.mesh, weight, ID_CHANNELS[caller]
                )
            info = BatchInfo(batch.size, weight, caller, batch.dense)
            lookups = [
                part.serve_requests(request, answers, info)
                for part, request, answers in zip(self.parts, requests, received, strict=True)
            ]
        except BaseException:
            for part, request in zip(self.parts, requests, strict=False):
                part.cancel(request)
            raise
        owned = lookups[0].owned if len(lookups) == 1 else self._join_owned_rows(lookups)
        return LookupContext(info, lookups, owned)

    def resolve_slots(self, context: LookupContext, views: Sequence[RowView]) -> None:
        """Find the slots that fetches and the update use, once `context.pinned` is set. Any thread."""
        self._share_slots_with_parts(context)
        for part, lookup in zip(self.parts, context.parts, strict=True):
            part.resolve_slots(lookup, views)

    # ---- values

    def find_parts_to_fetch(self, context: LookupContext) -> list[int]:
        """Return the numbers of the parts to fetch now for use in `context.steps_left` steps and not fetched yet, most
        urgent first."""
        return [
            i
            for i in self._order
            if self.reads_ahead[i] >= context.steps_left
            and not self.parts[i].has_values(context.parts[i])
        ]

    def fetch(
        self,
        context: LookupContext,
        part_numbers: Sequence[int],
        row_source: RowSource,
        num_applied_updates: int,
    ) -> None:
        """Begin to send values of these parts. num_applied_updates: updates applied to the rows so far."""
        rows = [row_source.rows]
        if len(self.parts) > 1:
            is_pinned = context.pinned is not None and row_source.rows is context.pinned.slots
            rows = (
                [lookup.slots for lookup in context.parts]
                if is_pinned
                else self._split_by_part(context, row_source.rows)
            )
        for i in part_numbers:
            # Rows that may change before their use are copied.
            in_place = row_source.in_place or not self.reads_ahead[i]
            own = (
                replace(row_source, rows=rows[i], in_place=in_place)
                if len(rows) > 1
                else row_source
            )
            self.parts[i].fetch(context.parts[i], own)
            context.updates_seen[self.reads_ahead[i]] = num_applied_updates

    def compute_outputs(
        self, context: LookupContext, autograd_handle: Tensor, device: torch.device = CPU
    ) -> dict[str, Tensor]:
        """Return by consumer (B, P) combined; by feature without a consumer (B, D) pooled or (E_f, D) sequence.
        Values are pooled where they are and moved to `device`, where consumers are evaluated. Collective where a
        tower sends values that it gathered early.

        Differentiable: backward records gradients on the context. `autograd_handle` requires a gradient, so that torch
        runs that backward.
        """
        tensors = record_backward(self, context, autograd_handle)
        return build_outputs(self.declaration, self.outputs, tensors, device, context.batch.dense)

    def pooled(self, context: LookupContext) -> list[Tensor]:
        """Return one tensor per output. Each part writes its fields into its own columns, because to concatenate
        tensors and split their gradients took longer than to exchange them."""
        if len(self.parts) == 1:
            return self.parts[0].pooled(context.parts[0])
        dtype = self.declaration.output_dtype
        tensors = {
            i: empty(context.batch.size, self.outputs[i].width, dtype=dtype) for i in self.shared
        }
        for part, lookup, output_indices in zip(
            self.parts, context.parts, self.output_indices, strict=True
        ):
            into = {j: tensors[i] for j, i in enumerate(output_indices) if i in tensors}
            tensors |= zip(output_indices, part.pooled(lookup, into), strict=True)
        return [tensors[i] for i in range(len(self.outputs))]

    # ---- gradients

    def begin_push(
        self, contexts: Sequence[LookupContext], step: int
    ) -> Callable[[], RowGradients | None]:
        """Begin to send recorded gradients to the rows' owners, as one application. Collective: every rank pushes the
        same batches, with or without gradients. Call the result, which is collective too, to wait for the gradients,
        even after the next push has begun; it returns None if nothing is to be applied. step: updates made before."""
        if not contexts:
            return lambda: None
        gradient_sums = [context.gradients.sum(self.dtype) for context in contexts]
        for context in contexts:
            if context.parts[0].pinned is None:
                self._share_slots_with_parts(context)
        for i, part in enumerate(self.parts):
            if part.operators is not None:
                part.operators.check_weight_versions(
                    [context.parts[i].weight_versions for context in contexts]
                )
        # The messages of one part are sent while the next part computes.
        begun = []
        for i, (part, output_indices) in enumerate(
            zip(self.parts, self.output_indices, strict=True)
        ):
            for number, (context, gradients) in enumerate(
                zip(contexts, gradient_sums, strict=True)
            ):
                own = None if gradients is None else [gradients[index] for index in output_indices]
                begun.append(part.begin_push(context.parts[i], own, step, number))
        return partial(self._wait_for_gradients, contexts, begun)

    def _wait_for_gradients(
        self, contexts: Sequence[LookupContext], part_waits: Sequence[Callable[[], RowGradients]]
    ) -> RowGradients:
        """Wait for gradients, part by part, and return them as one application."""
        arrived = [end() for end in part_waits]
        count = len(contexts)
        if len(arrived) == 1:
            return arrived[0]
        return self._merge_part_gradients(
            [
                part.owner.merge_gradients(
                    [context.parts[i] for context in contexts], arrived[i * count : (i + 1) * count]
                )
                for i, part in enumerate(self.parts)
            ]
        )

    def compute_squared_norm(self, row_gradients: RowGradients) -> tuple[RowGradients, float]:
        """Return gradients that need not be summed again, and the sum of squares of all rows' sums that count towards
        the norm on this rank. Local."""
        gradient_sums = []
        total = 0.0
        for part, own in zip(self.parts, self._split_gradients(row_gradients), strict=True):
            gradients, square = part.owner.kernels_of_gradients(own).squared_norm(own)
            gradient_sums.append(gradients)
            total += square if part.counts_norm else 0.0
        return self._merge_part_gradients(gradient_sums), total

    def apply_gradients(
        self,
        row_store: Any,
        row_gradients: RowGradients,
        optimizer_kinds: Tensor,
        settings_by_part: Tensor,
    ) -> None:
        """Apply gradients to pinned rows of this rank's store: see `_native.update`. Local."""
        for part, own in zip(self.parts, self._split_gradients(row_gradients), strict=True):
            part.owner.update(row_store, own, optimizer_kinds, settings_by_part)
            part.after_update(optimizer_kinds, settings_by_part)

    def squared_norms(self, rows: RowView, slots: Tensor) -> Tensor:
        """Return sums of squares of the weights of these rows, (len(slots),). Local."""
        return self.parts[0].owner.select_kernels([rows]).squared_norms(rows, slots)

    def drop(self, context: LookupContext) -> None:
        """Drop a batch that will not be pushed: an evaluated or cancelled one."""
        for part, lookup in zip(self.parts, context.parts, strict=True):
            part.drop(lookup)
        context.gradients.clear()

    # ---- checkpoints

    def export_prefetched(self, context: LookupContext) -> dict[str, Tensor]:
        """Return the values that a batch has fetched, for a checkpoint. With several parts, keys begin with the part's
        name, and `TABLES` lists the tables that were fetched."""
        if len(self.parts) == 1:
            return self.parts[0].prefetched(context.parts[0])
        fetched = [i for i, lookup in enumerate(context.parts) if self.parts[i].has_values(lookup)]
        tables = [t for i, first, last in self.runs if i in fetched for t in range(first, last)]
        return {
            TABLES: torch.tensor(tables, dtype=torch.int64),
            **{
                f"{self.names[i]}.{key}": value
                for i in fetched
                for key, value in self.parts[i].prefetched(context.parts[i]).items()
            },
        }

    def restore_prefetched(
        self, context: LookupContext, rank_prefetched_values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Restore, instead of a fetch, the values that all ranks of some world had prefetched for this step's global
        batch. Raises CheckpointError."""
        if len(self.parts) == 1:
            self.parts[0].restore(context.parts[0], rank_prefetched_values)
            return
        prefetched = prefetched_tables(rank_prefetched_values, len(self.declaration.tables))
        for i, name in enumerate(self.names):
            tables = {t for j, first, last in self.runs if i == j for t in range(first, last)}
            if self.reads_ahead[i] <= context.steps_left or not tables <= prefetched:
                continue  # fetched later, when its bound is reached
            # Values of this part and of others, because its tables may have had another exchange.
            prefix = f"{name}."
            own = [
                {
                    **values,
                    **{
                        key.removeprefix(prefix): values[key]
                        for key in values
                        if key.startswith(prefix)
                    },
                }
                for values in rank_prefetched_values
            ]
            self.parts[i].restore(context.parts[i], own)

    # ---- rows of all parts and of one part

    def _share_slots_with_parts(self, context: LookupContext) -> None:
        """Give each part the slots of its rows."""
        pinned = context.pinned
        assert pinned is not None
        if len(self.parts) == 1:
            context.parts[0].pinned = pinned
            return
        for lookup, slots in zip(
            context.parts, self._split_by_part(context, pinned.slots), strict=True
        ):
            lookup.pinned = PinnedRows(slots)

    def _split_by_part(self, context: LookupContext, row_values: Tensor) -> list[Tensor]:
        """Split row_values (O,) by row of all tables into those of each part."""
        if len(self.parts) == 1:
            return [row_values]
        ends = context.owned.offsets.tolist()
        return [
            torch.cat(
                [
                    row_values[ends[first] : ends[last]]
                    for i, first, last in self.runs
                    if i == number
                ]
            )
            for number in range(len(self.parts))
        ]

    def _join(self, values: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        """Join values by row of each part into (O,) by row of all tables; offsets: of each part's rows, (T + 1,)."""
        ends = [part_offsets.tolist() for part_offsets in offsets]
        return torch.cat(
            [values[i][ends[i][first] : ends[i][last]] for i, first, last in self.runs]
        )

    def _join_owned_rows(self, part_lookups: Sequence[PartLookup]) -> OwnedRows:
        """Join the owned rows of all parts."""
        owned = [lookup.owned for lookup in part_lookups]
        offsets = [rows.offsets for rows in owned]
        ids = self._join([rows.ids for rows in owned], offsets)
        next_use = None
        if any(rows.next_use is not None for rows in owned):
            # Where a part has no codes, because no rank sent any or it has no rows: 0, unknown.
            codes = [
                torch.zeros(len(rows.ids), dtype=torch.uint8)
                if rows.next_use is None
                else rows.next_use
                for rows in owned
            ]
            next_use = self._join(codes, offsets)
        return OwnedRows(ids, torch.stack(offsets).sum(0), next_use)

    def _merge_part_gradients(self, part_gradients: Sequence[RowGradients]) -> RowGradients:
        """Join gradients of all parts; `_split_gradients` is the inverse."""
        if len(part_gradients) == 1:
            return part_gradients[0]
        offsets = [gradients.offsets for gradients in part_gradients]
        slots = self._join([gradients.slots for gradients in part_gradients], offsets)
        return RowGradients(slots, torch.stack(offsets).sum(0), None, None, list(part_gradients))

    def _split_gradients(self, row_gradients: RowGradients) -> Sequence[RowGradients]:
        return [row_gradients] if len(self.parts) == 1 else row_gradients.source


def _separate_partial_outputs(
    declared_outputs: Sequence[Output], partial_outputs: Mapping[str, Output]
) -> tuple[Output, ...]:
    """Return outputs, with those that some part has partials of as separate ones."""
    separate: list[Output] = []
    for output in declared_outputs:
        if others := tuple(name for name in output.names if name not in partial_outputs):
            separate.append(replace(output, names=others))
        separate += (partial_outputs[name] for name in output.names if name in partial_outputs)
    return tuple(separate)
