"""Buckets of dense gradients, and their all-reduce in fewer bits on the slow hop, with error feedback.

A rank encodes the values that it sends to be added (its gradients; `by host` the sum of its host), and the owner of a
share encodes the sum that it sends to all ranks. The rounding error of both is a residual of that rank, which it adds
to the values of the next step (error feedback). So after any number of steps the applied sums differ from the true ones
by the residuals of the last step alone. Every rank decodes the messages, the sender too, so all ranks have the same
bits.

`scattered`: both legs are among all ranks. `by host`: messages inside a host are exact, and both legs are among
hosts.

Legend: N ranks, H hosts, L ranks of a host, n elements of the buffer, a multiple of N.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colonnade.comm.collectives import (
    CHUNK_ELEMENTS,
    SumAlgorithm,
    all_gather_in_scope,
    copy_in_chunks,
    exchange_shares,
    sum_blocks,
    sum_over_ranks,
)
from colonnade.comm.mesh import ALL, Mesh, Scope
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, Codec, RowBlock, decode_elements, encode_elements

SCALE_GROUP = 512
"""Number of elements that share a scale or an exponent. It is small, because a buffer has gradients of several
layers."""
CODED_DTYPES = (torch.float32, torch.float64)
"""Types of gradients that are encoded. Those of 16 bits are sent as they are, because their sums are rounded anyway."""
SIGNAL_BYTES = 24
"""Size of the ranks' step status, which is not encoded and so has a message of its own."""

State = dict[str, Any]
"""Residuals of one rank as stored in checkpoints: `DenseGradients.export_residuals`."""


@dataclass(slots=True)
class RoundingResidual:
    """Rounding errors of the values that this rank sent on one leg, in units of applied gradients."""

    residual: Tensor  # (shares, n / N): added in the next step
    before: Tensor  # before the last step

    def encode_with_residuals(self, codec: Codec, values: Tensor, gradient_scale: float) -> Tensor:
        """Encode values plus residuals to uint8, share by share, rounded to nearest, and store the new residuals.
        Elements that are not finite leave none."""
        self.residual, self.before = self.before, self.residual
        coded = []
        shares = zip(values.view(self.residual.shape), self.before, self.residual, strict=True)
        for share in shares:
            for new, owed, error in zip(
                *(part.split(CHUNK_ELEMENTS) for part in share), strict=True
            ):
                wanted = torch.add(new, owed, alpha=gradient_scale)
                blocks = _blocks(len(new))
                coded.append(encode_elements(codec, wanted, blocks))
                decode_elements(codec, coded[-1], blocks, error)
                torch.sub(wanted, error, out=error)
                error.div_(gradient_scale).masked_fill_(~error.isfinite(), 0.0)
        return torch.cat(coded)

    def undo_last_step(self) -> None:
        """Restore the residuals before the last step."""
        self.residual, self.before = self.before, self.residual


class CodedAllReduce:
    """Encoded all-reduce of one buffer of n elements."""

    def __init__(
        self, codec: Codec, world: World, way: SumAlgorithm, size: int, dtype: torch.dtype
    ) -> None:
        """Begin with residuals of 0. way: not "whole"."""
        self.codec = codec
        self.way = way
        self.dtype = dtype
        self.share = size // world.num_ranks
        peers = world.num_hosts if way == "by host" else world.num_ranks
        self.sent = self._zero_residual(peers)
        self.summed = self._zero_residual(1)

    def sum_over_ranks(self, mesh: Mesh, values: Tensor, unit: float) -> None:
        """Sum values (n,) on the CPU over ranks, in place, as `sum_over_ranks`. Collective, one issuing thread. unit:
        the divisor of gradients before they are applied."""
        hosts = mesh.world.num_hosts
        local = mesh.world.ranks_per_host
        if self.way == "by host":
            host_sum = sum_blocks(
                exchange_shares(mesh, mesh.host_scope, values, local).view(1, local, -1)
            )
            self._sum_over_scope(mesh, mesh.cross_host_scope, host_sum, (hosts, 1), unit)
            copy_in_chunks(all_gather_in_scope(mesh, mesh.host_scope, host_sum, local), values)
        else:
            self._sum_over_scope(mesh, ALL, values, (hosts, local), unit)

    def undo_last_step(self) -> None:
        """Restore the residuals before the last sum."""
        self.sent.undo_last_step()
        self.summed.undo_last_step()

    def _sum_over_scope(
        self,
        mesh: Mesh,
        scope: Scope,
        values: Tensor,
        hosts_and_ranks: tuple[int, int],
        unit: float,
    ) -> None:
        peers = hosts_and_ranks[0] * hosts_and_ranks[1]
        coded = exchange_shares(
            mesh, scope, self.sent.encode_with_residuals(self.codec, values, unit), peers
        )
        parts = values.new_empty(peers, self.share)
        self._decode_shares(coded, parts)
        total = sum_blocks(parts.view(*hosts_and_ranks, -1))
        coded = all_gather_in_scope(
            mesh, scope, self.summed.encode_with_residuals(self.codec, total, unit), peers
        )
        self._decode_shares(coded, values.view(peers, self.share))

    def _decode_shares(self, coded_shares: Tensor, values_out: Tensor) -> None:
        """Decode received shares (shares x bytes,) into `values_out` (shares, n / N)."""
        step = coded_share_bytes(self.codec, CHUNK_ELEMENTS)
        for data, share in zip(coded_shares.view(len(values_out), -1), values_out, strict=True):
            for piece_data, piece in zip(
                data.split(step), share.split(CHUNK_ELEMENTS), strict=True
            ):
                decode_elements(self.codec, piece_data, _blocks(len(piece)), piece)

    def _zero_residual(self, shares: int) -> RoundingResidual:
        zeros = torch.zeros(shares, self.share, dtype=self.dtype)
        return RoundingResidual(zeros, zeros.clone())


def coded_share_bytes(codec: Codec, elements: int) -> int:
    """Return the number of bytes of an encoded share of this many elements."""
    return sum(block.encoded_bytes(codec, torch.float32) for block in _blocks(elements))


def coded_buffer_bytes(name: str, elements: int, num_ranks: int) -> int:
    """Return the number of bytes of an encoded buffer, as `comm.collectives.estimate_sum_traffic` takes it. elements:
    a multiple of N.
    Not for "exact"."""
    return num_ranks * coded_share_bytes(CODECS[name], elements // num_ranks)


def sum_residuals_by_parameter(states: Sequence[State | None]) -> dict[int, Tensor]:
    """Return the sum of all ranks' residuals in a checkpoint by index of the dense parameter, flat. states: by rank of
    the checkpoint's world; None: no residuals."""
    residuals: dict[int, Tensor] = {}
    for rank, state in enumerate(states):
        if state is None:
            continue
        for bucket in state["buckets"]:
            for total in _collect_residual_buffers(bucket, state, rank):
                sizes = [state["sizes"][i] for i in bucket["numbers"]]
                parts = total[: sum(sizes)].split(sizes)
                for i, part in zip(bucket["numbers"], parts, strict=True):
                    residuals[i] = residuals[i] + part if i in residuals else part
    return residuals


def _collect_residual_buffers(
    bucket_layout: Mapping[str, Any], rank_state: State, rank: int
) -> list[Tensor]:
    """Return the residuals of one rank in one bucket, as buffers of the whole bucket."""
    buffers = [] if bucket_layout["owed"] is None else [bucket_layout["owed"]]
    if bucket_layout["sent"] is None:
        return buffers
    hosts = rank_state["hosts"]
    local = rank_state["local"]
    share = bucket_layout["sent"].shape[1]
    first_sent = first_summed = rank
    if len(bucket_layout["sent"]) == hosts * local:  # of all ranks' shares
        first_sent = 0
    else:  # of the shares that this rank sums for its host
        first_sent = rank % local * hosts
        first_summed = first_sent + rank // local
    for shares, first in (
        (bucket_layout["sent"], first_sent),
        (bucket_layout["summed"], first_summed),
    ):
        whole = shares.new_zeros(hosts * local, share)
        whole[first : first + len(shares)] = shares
        buffers.append(whole.view(-1))
    return buffers


def _blocks(elements: int) -> list[RowBlock]:
    full, rest = divmod(elements, SCALE_GROUP)
    return [RowBlock(full, (SCALE_GROUP,))] + [RowBlock(1, (rest,))] * (rest > 0)


@dataclass(slots=True)
class GradientBucket:
    """Parameters of one dtype and device, in reverse order, with one contiguous buffer for their gradients."""

    indices: list[int]  # of the parameters
    gradients: Tensor  # (n,) on the parameters' device: each `.grad` is a view of it
    send_buffer: (
        Tensor  # (m,) on the CPU, m >= n a multiple of the ranks; CPU `gradients` are its first n
    )
    algorithm: SumAlgorithm
    stream: torch.Stream | None  # on a device: runs the copies to and from `send_buffer`
    is_late: bool = False  # is sent by `send`, not during backward
    tower_mesh: Mesh | None = None  # set where the ranks of one tower alone have the bucket
    coded: CodedAllReduce | None = None  # compressed sum, instead of `algorithm`
    residual: Tensor | None = None
    """Residuals restored from other ranks, added to the next step's `gradients`; on the first rank of the bucket."""
    previous_residual: Tensor | None = None  # `residual` before the last step
    num_missing: int = 0  # gradients that backward still has to add
    gradient_events: list[torch.Event] = field(default_factory=list)
    """Events after the last writes of gradients, on a device."""
    ready: threading.Event = field(default_factory=threading.Event)
    square: float = 0.0  # squared norm of the summed gradients
    is_finite: bool = True  # all summed gradients are

    @property
    def send_pieces(self) -> tuple[Tensor, ...]:
        """Gradients in `send_buffer`, in chunks, so that torch uses one thread."""
        return torch.split(self.send_buffer[: len(self.gradients)], CHUNK_ELEMENTS)

    def fill_send_buffer(self, mesh: Mesh, gradient_scale: float) -> None:
        """Add the residual, and copy gradients of a device to `send_buffer`; runs on the thread "dense"."""
        for event in self.gradient_events:
            event.synchronize()
        self.gradient_events = []
        if self.residual is not None:
            self.gradients.add_(self.residual, alpha=gradient_scale)
        if self.stream is not None and mesh.num_ranks > 1:
            with self.stream:
                self.send_buffer[: len(self.gradients)].copy_(self.gradients)

    def sum_over_ranks(self, mesh: Mesh, gradient_scale: float) -> None:
        """Sum the gradients over ranks after `fill_send_buffer`. Collective; runs on the thread "dense"."""
        pieces = self.send_pieces if mesh.num_ranks > 1 else (self.gradients,)
        if self.coded is None:
            sum_over_ranks(mesh, self.send_buffer, self.algorithm)
        else:
            # Else NaN of the last step would change the scales of the codec, which include the padding.
            self.send_buffer[len(self.gradients) :].zero_()
            self.coded.sum_over_ranks(mesh, self.send_buffer, gradient_scale)
        self.square = sum_gradient_squares(pieces)
        # Squares of finite gradients may overflow.
        is_each_finite = (bool(piece.isfinite().all()) for piece in pieces)
        self.is_finite = math.isfinite(self.square) or all(is_each_finite)
        if self.stream is not None and mesh.num_ranks > 1:
            with self.stream:
                self.gradients.copy_(self.send_buffer[: len(self.gradients)])
            self.stream.synchronize()


def sum_gradient_squares(pieces: Sequence[Tensor]) -> float:
    """Return the sum of squares of all elements; NaN or inf if any is, or if it is too large for a float32."""
    dtype = torch.promote_types(pieces[0].dtype, torch.float32)
    norms = (torch.linalg.vector_norm(piece, dtype=dtype) for piece in pieces)
    return sum(float(norm) ** 2 for norm in norms)
