"""From pooled tensors to what a model sees; on the way back, gradients are recorded on the ticket and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import DataError
from colonnade.lookup.contract import Consumer, Ticket
from colonnade.lookup.layout import Declaration, Output

CPU = torch.device("cpu")


class Pools(Protocol):
    """What pools a ticket's values: an exchange."""

    def pooled(self, ticket: Ticket) -> list[Tensor]: ...


class _Pool(torch.autograd.Function):
    """Forward pools; backward only records the gradients on the ticket: rows change in RowOptimizer.step."""

    @staticmethod
    def forward(ctx, exchange: Pools, ticket: Ticket, handle: Tensor):
        ctx.ticket = ticket
        return tuple(exchange.pooled(ticket))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        if ctx.ticket.is_done:
            raise RuntimeError(
                "backward reached a batch that RowOptimizer.step() has applied or dropped already; "
                "call backward before step"
            )
        ctx.ticket.record([gradient.contiguous() for gradient in gradients])
        return None, None, None


def recorded(exchange: Pools, ticket: Ticket, handle: Tensor) -> tuple[Tensor, ...]:
    """One tensor per output, in a graph whose backward records its gradients on the ticket."""
    return _Pool.apply(exchange, ticket, handle)


def found(
    declaration: Declaration,
    outputs: Sequence[Output],
    tensors: Sequence[Tensor],
    device: torch.device,
    dense: Tensor | None,
) -> dict[str, Tensor]:
    """What a model sees of the outputs, by name. dense: (B, n) of the batch."""
    seen = {}
    for output, pooled in zip(outputs, tensors, strict=True):
        tensor = pooled.to(device)  # once, before the consumers that share it
        for name in output.names:
            consumer = declaration.consumers.get(name)
            if output.is_partial:
                assert consumer is not None
                seen[name] = combine(name, consumer, tensor, dense)
            else:
                seen[name] = tensor if consumer is None else evaluate(name, consumer, tensor, dense)
    return {name: seen[name] for name in declaration.output_names if name in seen}


def combine(name: str, consumer: Consumer, stats: Tensor, dense: Tensor | None) -> Tensor:
    """stats (B, P): merged. Raises as `evaluate`."""
    return consumer.interaction.combine(stats, *_dense(name, consumer, dense, stats))


def evaluate(name: str, consumer: Consumer, pooled: Tensor, dense: Tensor | None) -> Tensor:
    """pooled (B, sum of dims): the consumer's fields side by side. Raises DataError for dense columns that are not as
    many as it takes."""
    interaction, num_fields = consumer.interaction, len(consumer.features)
    dim = pooled.shape[1] // max(1, num_fields)
    if interaction.width(dim) is None:
        return interaction.combine(pooled)
    if not interaction.one_width:
        return interaction(pooled, *_dense(name, consumer, dense, pooled))
    return interaction(
        pooled.unflatten(1, (num_fields, dim)), *_dense(name, consumer, dense, pooled)
    )


def _dense(name: str, consumer: Consumer, dense: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    """The batch's dense columns, of dtype and device of `like`, for an operator that takes some."""
    if not (wanted := consumer.interaction.num_dense):
        return ()
    shape = None if dense is None else tuple(dense.shape)
    if dense is None or shape != (len(like), wanted):
        raise DataError(
            f"consumer {name!r} takes {wanted} dense columns of a batch; got dense {shape}, wanted "
            f"{(len(like), wanted)}. The reader's schema and the model's operators must agree"
        )
    return (dense.to(like),)


def summed_backwards(ticket: Ticket, dtype: torch.dtype) -> list[Tensor] | None:
    """The ticket's gradients over its backwards, by output; several are added in `dtype`. None: there are none."""
    if len(ticket.gradients) < 2:
        return ticket.gradients[0] if ticket.gradients else None
    wide = [[part.to(dtype) for part in each] for each in ticket.gradients]
    return [sum(parts[1:], parts[0]) for parts in zip(*wide, strict=True)]


def all_finite(values: Tensor) -> bool:
    """Of a gradient, wherever it lies."""
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64") or values.device.type != "cpu":
        return bool(torch.isfinite(values).all())
    return _native.all_finite(values.data_ptr(), values.numel(), dtype)
