"""Operators of the model that an exchange evaluates on the way from the rows to the samples.

Weights of such an operator are dense parameters, the same on every rank that evaluates it. A rank evaluates it for
samples of other ranks, too, so the gradient that it computes is its part of the global batch's; it is added to the
weights' `.grad` on that rank when gradients are pushed. Summed over these ranks, or over all, it is then the gradient
that a world of one would compute, as for every other dense parameter.

Target attention leaves rows on their owners: queries are sent to the ranks that have rows of the sequence, and their
results are merged on the samples' ranks. None of them is rounded by a codec: a logarithm of sums in 16 bits would
change a row's weight by several percent.

Legend: B samples of this rank, G of all ranks, R samples that an operator is evaluated for or, in attention, ranks that
have rows of the sequence; W columns of fields, P columns that are sent; D dim, E rows of a sequence on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from colonnade.comm.collectives import sum_blocks_in_order
from colonnade.comm.mesh import Mesh
from colonnade.errors import ConfigError
from colonnade.exchange.operator_cut import get_result_width
from colonnade.interaction import TargetAttention
from colonnade.lookup.contract import TowerConsumers
from colonnade.lookup.fields import FieldColumns
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.wire.transport import ColumnStarts, assemble_columns

NUM_TRIED = 3
"""Samples that operators are tried on."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Partial result of one consumer for one batch."""

    fields: tuple[int, ...]
    """Fields that it was evaluated of."""
    values: Tensor  # (R, W) of them side by side, a leaf
    result: Tensor  # (R, P)


Partials = Mapping[str, Partial]
"""Partial results by consumer."""


class Operators:
    """Consumers that are evaluated before values reach the samples' ranks."""

    def __init__(
        self,
        declaration: EmbeddingDeclaration,
        consumers: Sequence[str],
        taken_by: Mapping[str, tuple[int, ...]],
        *,
        evaluators: str,
        inside: TowerConsumers | None = None,
    ) -> None:
        """Take consumers by name. taken_by: fields of the consumers of pooled values; the others attend to sequences
        (`RemoteAttention`). evaluators: the ranks that evaluate them, in words, for messages."""
        self.declaration = declaration
        self.taken_by = taken_by
        self.consumers = tuple(consumers)
        self.evaluators = evaluators
        self.inside = inside
        self.modules = [declaration.consumers[name].interaction for name in consumers]
        self._are_tried = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters that are trained, each once."""
        return tuple(
            dict.fromkeys(p for module in self.modules for p in _trained_parameters(module))
        )

    def versions(self) -> list[int]:
        """Return versions of the parameters, which change when the parameters do."""
        return [parameter._version for parameter in self.parameters]

    def check_output_shapes(self) -> None:
        """Evaluate all operators on a few samples of zeros, on every rank before anything is sent.

        Every rank has all weights, but only some ranks evaluate an operator, and its failure would look like a lost
        peer to the others. Raises ConfigError, on every rank, for an operator whose result does not have the declared
        shape."""
        if self._are_tried:
            return
        for name, fields in self.taken_by.items():
            interaction = self.declaration.consumers[name].interaction
            dims = [self.declaration.fields[i].dim for i in fields]
            values = torch.zeros(NUM_TRIED, sum(dims), dtype=self.declaration.compute_dtype)
            modes = [(module, module.training) for module in interaction.modules()]
            for module in interaction.modules():
                # Eval mode, so that no statistics change. Dropout may change its input in place, in training alone.
                module.training = isinstance(module, _DropoutNd)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    if interaction.needs_equal_dims:
                        values = values.unflatten(1, (len(fields), -1))
                    self._check_output_shape(
                        name, interaction.partial_of_fields(values, range(len(fields))), NUM_TRIED
                    )
            finally:
                for module, is_training in modes:
                    module.training = is_training
        self._are_tried = True

    def build_partial_messages(
        self,
        pooled_blocks: Iterable[Tensor],
        pooled_columns: FieldColumns,
        sent_columns: FieldColumns,
        recorded_partials: list[Partials] | None,
    ) -> Iterator[Tensor]:
        """Yield, for each block (R, all of `pooled_columns`), the message (R, P) to send instead: values and partials
        side by side; read only. recorded_partials: list that partials are appended to, for `backpropagate`; None:
        nothing is trained."""
        for block in pooled_blocks:
            partials = self.evaluate_partials(block, pooled_columns, recorded_partials is not None)
            if recorded_partials is not None:
                recorded_partials.append(partials)
            yield self.join_values_and_partials(block, pooled_columns, sent_columns, partials)

    def evaluate_partials(
        self, pooled_values: Tensor, pooled_columns: FieldColumns, is_trained: bool
    ) -> Partials:
        """Return partials of the consumers that take some of `pooled_columns`. pooled_values: (R, all of
        `pooled_columns`)."""
        partials = {}
        for name, fields in self.taken_by.items():
            if positions := tuple(n for n, i in enumerate(fields) if i in pooled_columns.dims):
                partials[name] = self._evaluate_consumer_partial(
                    name, positions, pooled_values, pooled_columns, is_trained
                )
        return partials

    def join_values_and_partials(
        self,
        pooled_values: Tensor,
        pooled_columns: FieldColumns,
        sent_columns: FieldColumns,
        partials: Partials,
    ) -> Tensor:
        """Return the message (R, P): values and partials side by side; read only."""
        values = tuple(
            (key, pooled_columns.starts[key]) for key in sent_columns.dims if isinstance(key, int)
        )
        results = [
            (partials[key].result.detach(), ((key, 0),))
            for key in sent_columns.dims
            if isinstance(key, str)
        ]
        return assemble_columns([(pooled_values, values), *results], sent_columns.dims)

    def backpropagate_messages(
        self,
        gradient_blocks: Iterable[Tensor],
        sent_columns: FieldColumns,
        pooled_columns: FieldColumns,
        recorded_partials: Sequence[Partials],
    ) -> Iterator[Tensor]:
        """Yield gradients (R, W) of pooled fields from gradients (R, P) of messages, the last chunk first; read only.
        Gradients of weights are added to their `.grad`."""
        for received, partials in zip(gradient_blocks, reversed(recorded_partials), strict=True):
            yield self._backpropagate_chunk(partials, received, sent_columns, pooled_columns)

    def check_weight_versions(self, recorded_versions: Sequence[list[int] | None]) -> None:
        """Check weights before gradients are pushed, and give each parameter a gradient. recorded_versions: versions
        that each batch used. Raises RuntimeError on the ranks where a weight has changed since; the others wait for
        these, as for any rank that raises."""
        now = self.versions()
        if any(used not in (None, now) for used in recorded_versions):
            raise RuntimeError(
                f"weights of {', '.join(map(repr, self.consumers))}, which {self.evaluators} evaluate, were changed "
                "between forward and RowOptimizer.step(), which completes their gradients; call it before the dense "
                "gradients are summed over ranks and before the dense optimizer's step"
            )
        for parameter in self.parameters:  # a rank may have none of its fields
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _evaluate_consumer_partial(
        self,
        consumer_name: str,
        field_indices: Sequence[int],
        pooled_values: Tensor,
        pooled_columns: FieldColumns,
        is_trained: bool,
    ) -> Partial:
        """Evaluate a consumer on some of its fields. field_indices: indices into its `taken_by`."""
        taken = tuple(self.taken_by[consumer_name][n] for n in field_indices)
        interaction = self.declaration.consumers[consumer_name].interaction
        starts = tuple((i, pooled_columns.starts[i]) for i in taken)
        values = assemble_columns(
            [(pooled_values, starts)], {i: pooled_columns.dims[i] for i in taken}
        ).detach()
        if not len(pooled_values):  # a module need not accept zero samples
            width = get_result_width(self.declaration, consumer_name) or 0
            return Partial(taken, values, pooled_values.new_zeros(0, width))
        with torch.set_grad_enabled(is_trained):
            values.requires_grad_(is_trained)
            shaped = (
                values.unflatten(1, (len(taken), -1)) if interaction.needs_equal_dims else values
            )
            result = interaction.partial_of_fields(shaped, field_indices)
        self._check_output_shape(consumer_name, result, len(pooled_values))
        return Partial(taken, values, result)

    def _backpropagate_chunk(
        self,
        partials: Partials,
        received_gradients: Tensor,
        sent_columns: FieldColumns,
        pooled_columns: FieldColumns,
    ) -> Tensor:
        values = tuple(
            (key, sent_columns.starts[key]) for key in sent_columns.dims if isinstance(key, int)
        )
        blocks: list[tuple[Tensor, ColumnStarts]] = [(received_gradients, values)]
        for key, partial in partials.items() if len(received_gradients) else ():
            # A result needs no gradient where neither its values nor its weights are trained.
            if key not in sent_columns.dims or not partial.result.requires_grad:
                continue
            parameters = _trained_parameters(self.declaration.consumers[key].interaction)
            gradient, *weight_gradients = torch.autograd.grad(
                partial.result,
                [partial.values, *parameters],
                received_gradients[:, sent_columns.slice_of(key)],
                retain_graph=True,
                allow_unused=True,
            )
            for parameter, weight_gradient in zip(parameters, weight_gradients, strict=True):
                if weight_gradient is not None:
                    _add_to_grad(parameter, weight_gradient)
            if gradient is not None:
                starts = accumulate((pooled_columns.dims[i] for i in partial.fields), initial=0)
                blocks.append((gradient, tuple(zip(partial.fields, starts, strict=False))))
        return assemble_columns(blocks, pooled_columns.dims)

    def _check_output_shape(
        self, consumer_name: str, operator_output: Tensor, num_samples: int
    ) -> None:
        wanted = (num_samples, get_result_width(self.declaration, consumer_name))
        if operator_output.shape != wanted:
            raise ConfigError(
                f"consumer {consumer_name!r}: its operator gave {tuple(operator_output.shape)} for "
                f"{num_samples} samples, "
                f"wanted {wanted}"
                ": a row for each sample, with `width` floats"
            )


def _trained_parameters(interaction: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in interaction.parameters() if parameter.requires_grad]


@torch.no_grad()
def _add_to_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(gradient)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention of one consumer for one batch, as this rank computed it."""

    queries: (
        Tensor  # (G, D), a leaf; without samples on ranks that cannot have rows of the sequence
    )
    rows: Tensor  # (E, D), a leaf
    result: Tensor  # (G, P)
    stats: Tensor  # (R, B, P), a leaf
    merged: Tensor  # (B, P)


@dataclass(frozen=True, slots=True)
class RemoteAttention:
    """Attention of one consumer."""

    interaction: TargetAttention
    mesh: Mesh
    ranks: tuple[int, ...]
    """Ranks that may have rows of its sequence."""
    query: int
    """Field of its query, an index into Declaration.fields; `sequence`: of its sequence."""
    sequence: int

    @property
    def has_rows(self) -> bool:
        """True if this rank may have rows of the sequence."""
        return self.mesh.rank in self.ranks

    def attend_to_remote_rows(
        self,
        query: Tensor,  # (B, D)
        sequence_rows: Tensor,  # (E, D), of all ranks' samples in rank order
        sequence_lengths: Tensor,  # (G,) int64: rows of each sample on this rank
        batch_sizes: Sequence[int],
        traffic_tag: str,
        is_trained: bool,
    ) -> Attended:
        """Attend to the rows of all ranks. Collective. batch_sizes: samples by rank; traffic_tag: traffic tag of the
        bytes."""
        size, dim = query.shape
        queries = self._send_to_row_owners(
            "fetch", query.repeat(len(self.ranks), 1, 1), batch_sizes, traffic_tag
        )
        with torch.set_grad_enabled(is_trained):
            queries.requires_grad_(is_trained)
            sequence_rows = sequence_rows.requires_grad_(is_trained)
            segments = torch.arange(len(queries)).repeat_interleave(sequence_lengths)
            result = self.interaction.partial(sequence_rows, segments, len(queries), None, queries)
            stats = self._send_to_sample_ranks("fetch", result.detach(), batch_sizes, traffic_tag)
            stats = stats.requires_grad_(is_trained)
            merged = self.interaction.merge_partials(stats)
        assert merged.shape == (size, self.interaction.width(dim))
        return Attended(queries, sequence_rows, result, stats, merged)

    def exchange_gradients(
        self, attended: Attended, output_gradient: Tensor, batch_sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of this rank's queries (B, D) and rows (E, D). Collective. output_gradient: (B, P)."""
        (stats_gradient,) = torch.autograd.grad(
            attended.merged, attended.stats, output_gradient, retain_graph=True
        )
        result_gradients = self._send_to_row_owners("push", stats_gradient, batch_sizes, "push")
        query_gradients, row_gradients = torch.autograd.grad(
            attended.result, [attended.queries, attended.rows], result_gradients, retain_graph=True
        )
        by_rank = self._send_to_sample_ranks("push", query_gradients, batch_sizes, "push")
        return sum_blocks_in_order(by_rank.flatten(1)[None]).view(by_rank.shape[1:]), row_gradients

    def _send_to_row_owners(
        self, channel: str, rank_blocks: Tensor, batch_sizes: Sequence[int], traffic_tag: str
    ) -> Tensor:
        """Send (R, B, n) of this rank's samples; return (G, n) of all samples, or (0, n) on ranks without rows."""
        _, size, width = rank_blocks.shape
        send = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        receive = [num_samples * width * self.has_rows for num_samples in batch_sizes]
        received, _ = self.mesh.all_to_all(
            channel, rank_blocks.reshape(-1), send, receive, traffic_tag=traffic_tag
        )
        return received.view(sum(batch_sizes) if self.has_rows else 0, width)

    def _send_to_sample_ranks(
        self, channel: str, sample_values: Tensor, batch_sizes: Sequence[int], traffic_tag: str
    ) -> Tensor:
        """Send sample_values (G, n), or (0, n) on ranks without rows; return (R, B, n) of this rank's samples."""
        width = sample_values.shape[1]
        size = batch_sizes[self.mesh.rank]
        send = [num_samples * width * self.has_rows for num_samples in batch_sizes]
        receive = [size * width * (rank in self.ranks) for rank in range(self.mesh.num_ranks)]
        received, _ = self.mesh.all_to_all(
            channel, sample_values.reshape(-1), send, receive, traffic_tag=traffic_tag
        )
        return received.view(len(self.ranks), size, width)


@dataclass(frozen=True, slots=True)
class RemoteEvaluation:
    """Evaluation of consumers before values reach the samples' ranks."""

    operators: Operators | None = None
    attention: Mapping[str, RemoteAttention] = field(default_factory=dict)
    """Attention by consumer of a sequence."""
    keeps_pooled: bool = False
    """True if checkpoints store the operators' inputs."""
    waits_in_tower: bool = False
    """True if values that were read ahead are stored before the last hop until they are used."""
