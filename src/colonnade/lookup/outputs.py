"""Outputs of a model from pooled tensors; their backward only records gradients on the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from colonnade import _native
from colonnade.errors import DataError
from colonnade.lookup.contract import LookupContext
from colonnade.lookup.layout import Consumer, EmbeddingDeclaration, Output

CPU = torch.device("cpu")


class OutputPooler(Protocol):
    """Part of an exchange's interface that forward uses."""

    def pooled(self, context: LookupContext) -> list[Tensor]:
        """Return one tensor per output."""
        ...


class _PoolNode(FunctionCtx):
    """Node of the graph between a batch's forward and its backward."""

    context: LookupContext


class _Pool(torch.autograd.Function):
    """Autograd function that pools; its backward only records gradients: rows change in RowOptimizer.step."""

    @staticmethod
    def forward(
        ctx: _PoolNode, exchange: OutputPooler, context: LookupContext, handle: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.context = context
        return tuple(exchange.pooled(context))

    @staticmethod
    def backward(ctx: _PoolNode, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.context.is_done:
            raise RuntimeError(
                "backward reached a batch that RowOptimizer.step() has applied or dropped already; "
                "call backward before step"
            )
        ctx.context.gradients.record([gradient.contiguous() for gradient in gradients])
        return None, None, None


def record_backward(
    exchange: OutputPooler, context: LookupContext, handle: Tensor
) -> tuple[Tensor, ...]:
    """Return one tensor per output, in a graph whose backward records their gradients on the context."""
    outputs: tuple[Tensor, ...] = _Pool.apply(exchange, context, handle)
    return outputs


def build_outputs(
    declaration: EmbeddingDeclaration,
    outputs: Sequence[Output],
    out_tensors: Sequence[Tensor],
    device: torch.device,
    dense_columns: Tensor | None,
) -> dict[str, Tensor]:
    """Return the model's outputs by name, from one tensor per output. dense_columns: (B, n) of the batch."""
    by_name = {}
    for output, pooled in zip(outputs, out_tensors, strict=True):
        tensor = pooled.to(device)  # once, before the consumers that share it
        for name in output.names:
            consumer = declaration.consumers.get(name)
            if output.is_partial:
                assert consumer is not None
                by_name[name] = combine(name, consumer, tensor, dense_columns)
            elif consumer is None:
                by_name[name] = tensor
            else:
                by_name[name] = evaluate_consumer(name, consumer, tensor, dense_columns)
    return {name: by_name[name] for name in declaration.output_names if name in by_name}


def combine(name: str, consumer: Consumer, stats: Tensor, dense: Tensor | None) -> Tensor:
    """Compute a consumer's output from its merged partials, stats (B, P). Raises as `evaluate`."""
    return consumer.interaction.combine(stats, *_check_dense_input(name, consumer, dense, stats))


def evaluate_consumer(
    consumer_name: str, consumer: Consumer, pooled_fields: Tensor, dense_columns: Tensor | None
) -> Tensor:
    """Compute a consumer's output from its fields side by side, pooled_fields (B, sum of dims). Raises DataError for
    another number of dense columns than it takes."""
    interaction = consumer.interaction
    num_fields = len(consumer.features)
    dim = pooled_fields.shape[1] // max(1, num_fields)
    if interaction.width(dim) is None:
        return interaction.combine(pooled_fields)
    fields = (
        pooled_fields.unflatten(1, (num_fields, dim))
        if interaction.needs_equal_dims
        else pooled_fields
    )
    output: Tensor = interaction(
        fields, *_check_dense_input(consumer_name, consumer, dense_columns, pooled_fields)
    )
    return output


def _check_dense_input(
    consumer_name: str, consumer: Consumer, dense_columns: Tensor | None, input_like: Tensor
) -> tuple[Tensor, ...]:
    """Return the batch's dense columns, of dtype and device of `input_like`, for an operator that takes them; else
    ()."""
    if not (wanted := consumer.interaction.num_dense):
        return ()
    shape = None if dense_columns is None else tuple(dense_columns.shape)
    if dense_columns is None or shape != (input_like.shape[0], wanted):
        raise DataError(
            f"consumer {consumer_name!r} takes {wanted} dense columns of a batch; got dense {shape}, wanted "
            f"{(input_like.shape[0], wanted)}. The reader's schema and the model's operators must agree"
        )
    return (dense_columns.to(input_like),)


def all_finite(values: Tensor) -> bool:
    """Return whether all values of a gradient are finite, on any device."""
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64") or values.device.type != "cpu":
        return bool(torch.isfinite(values).all())
    return _native.all_finite(values.data_ptr(), values.numel(), dtype)
