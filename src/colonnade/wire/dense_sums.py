"""Buckets of dense gradients, and their all-reduce in fewer bits on the slow hop, with error feedback.

A rank encodes the values that it sends to be added (its gradients; `by host` the sum of its host), and the owner of a
share encodes the sum that it sends to all ranks. A codec rounds all elements; thresholds (wire/thresholded.py) select
the largest. What a message leaves out is a residual of its sender, who adds it to the values of the next step (error
feedback). So after any number of steps the applied sums differ from the true ones by the residuals of the last step
alone. Every rank decodes the messages, the sender too, so all ranks have the same bits.

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
from colonnade.plan.names import CodecName, DenseCodec, Thresholding
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, Codec, RowBlock, decode_elements, encode_elements
from colonnade.wire.thresholded import (
    AdamMoments,
    ThresholdedShares,
    density_of_step,
    split_into_blocks,
    thresholded_buffer_bytes,
)

SCALE_GROUP = 512
"""Number of elements that share a scale or an exponent. It is small, because a buffer has gradients of several
layers."""
MIN_THRESHOLDED = 256
"""Number of elements from which a tensor is thresholded."""
SIGNALS = 5  # not finite, stop requested, checkpoint requested, loss, squared norm of this rank's gradients
SIGNAL_BYTES = 8 * SIGNALS
"""Size of the ranks' step status, which is not encoded and so has a message of its own, of float64."""

State = dict[str, Any]
"""Residuals of one rank as stored in checkpoints: `DenseGradients.export_residuals`."""


@dataclass(slots=True)
class RoundedShares:
    """Shares of a buffer that one rank sends on one leg of a sum, rounded to nearest, with their rounding errors."""

    codec: Codec
    residual: Tensor  # (shares, n / N), in units of applied gradients: added in the next step
    residual_before: Tensor  # before the last step

    def encode_with_residuals(self, values: Tensor, gradient_scale: float, step: int) -> Tensor:
        """Encode values plus residuals to uint8, share by share, and store the new residuals.

        Elements that are not finite leave none."""
        self.residual, self.residual_before = self.residual_before, self.residual
        coded = []
        shares = zip(
            values.view(self.residual.shape), self.residual_before, self.residual, strict=True
        )
        for share in shares:
            for new, owed, error in zip(
                *(part.split(CHUNK_ELEMENTS) for part in share), strict=True
            ):
                wanted = torch.add(new, owed, alpha=gradient_scale)
                blocks = _blocks(len(new))
                coded.append(encode_elements(self.codec, wanted, blocks))
                decode_elements(self.codec, coded[-1], blocks, error)
                torch.sub(wanted, error, out=error)
                error.div_(gradient_scale).masked_fill_(~error.isfinite(), 0.0)
        return torch.cat(coded)

    def decode(self, coded: Tensor, values_out: Tensor, step: int) -> None:
        """Decode shares (shares x bytes,) into `values_out` (shares, n / N)."""
        piece_bytes = coded_share_bytes(self.codec, CHUNK_ELEMENTS)
        for data, share in zip(coded.view(len(values_out), -1), values_out, strict=True):
            for piece_data, piece in zip(
                data.split(piece_bytes), share.split(CHUNK_ELEMENTS), strict=True
            ):
                decode_elements(self.codec, piece_data, _blocks(len(piece)), piece)

    def undo_last_step(self) -> None:
        """Restore the residuals before the last step."""
        self.residual, self.residual_before = self.residual_before, self.residual


Shares = RoundedShares | ThresholdedShares


class CodedAllReduce:
    """Encoded all-reduce of one buffer of n elements."""

    def __init__(
        self,
        codec: CodecName | Thresholding,
        world: World,
        rank: int,
        way: SumAlgorithm,
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Begin with residuals of 0. way: not "whole"; sizes: elements of the tensors in the buffer."""
        self.way = way
        self.step = 0  # number of sums that were applied
        self.adam: AdamMoments | None = None
        self.share = -(-sum(sizes) // world.num_ranks)
        own_sent, own_summed = find_own_shares(
            rank, world.num_hosts, world.ranks_per_host, way == "by host"
        )
        if isinstance(codec, Thresholding):
            blocks = split_into_blocks(sizes, world.num_ranks)
            self.sent: Shares = ThresholdedShares(codec, blocks, own_sent)
            self.summed: Shares = ThresholdedShares(codec, blocks, own_summed)
            if codec.adam_weight_decay is not None:
                self.adam = AdamMoments(len(own_sent) * self.share)
        else:
            self.sent, self.summed = (
                RoundedShares(CODECS[codec], *torch.zeros(2, len(own), self.share, dtype=dtype))
                for own in (own_sent, own_summed)
            )

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
        self.step += 1

    def undo_last_step(self) -> None:
        """Restore the residuals before the last sum."""
        self.step -= 1
        self.sent.undo_last_step()
        self.summed.undo_last_step()
        if self.adam is not None:
            self.adam.undo_last_step()

    def export_state(self) -> dict[str, Any]:
        """Return copies of residuals (shares, n / N), and of thresholds (blocks,), by leg, and of Adam's moments."""
        legs = {"sent": self.sent, "summed": self.summed}
        thresholds = {
            leg: shares.thresholds.clone()
            for leg, shares in legs.items()
            if isinstance(shares, ThresholdedShares)
        }
        return {
            **{leg: shares.residual.clone() for leg, shares in legs.items()},
            "thresholds": thresholds,
            "step": self.step,
            "moments": None if self.adam is None else self.adam.moments.clone(),
            "moments_step": 0 if self.adam is None else self.adam.step,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `export_state` of the same rank in the same world."""
        self.step = state.get("step", 0)
        for leg, shares in (("sent", self.sent), ("summed", self.summed)):
            shares.residual.copy_(state[leg])
            if isinstance(shares, ThresholdedShares):
                shares.thresholds.copy_(state["thresholds"][leg])
        if self.adam is not None:
            self.adam.moments.copy_(state["moments"])
            self.adam.step = state["moments_step"]

    def add_owed_directions(self, owed: Tensor, mesh: Mesh) -> None:
        """Add directions (n,) that another world owes to the residuals of rank 0, or `by host` of the first host."""
        if mesh.rank >= (mesh.world.ranks_per_host if self.way == "by host" else 1):
            return
        shares = owed.new_zeros(mesh.num_ranks, self.share)
        shares.view(-1)[: len(owed)] = owed
        first = mesh.rank * len(self.sent.residual)
        self.sent.residual.add_(shares[first : first + len(self.sent.residual)])

    def _sum_over_scope(
        self,
        mesh: Mesh,
        scope: Scope,
        values: Tensor,
        hosts_and_ranks: tuple[int, int],
        unit: float,
    ) -> None:
        peers = hosts_and_ranks[0] * hosts_and_ranks[1]
        own = values
        if self.adam is not None:  # the mean of the senders' directions
            own = self.adam.compute_directions(values / unit).mul_(unit / peers)
        coded = exchange_shares(
            mesh, scope, self.sent.encode_with_residuals(own, unit, self.step), peers
        )
        parts = values.new_empty(peers, self.share)
        self.summed.decode(coded, parts, self.step)
        total = sum_blocks(parts.view(*hosts_and_ranks, -1))
        coded = all_gather_in_scope(
            mesh, scope, self.summed.encode_with_residuals(total, unit, self.step), peers
        )
        self.sent.decode(coded, values.view(peers, self.share), self.step)


def find_own_shares(rank: int, hosts: int, local: int, is_by_host: bool) -> tuple[range, range]:
    """Return the shares of a buffer that a rank sends to be added, and those whose sum it sends: of N shares. Pure."""
    if not is_by_host:
        return range(hosts * local), range(rank, rank + 1)
    first = rank % local * hosts  # those that this rank sums for its host
    return range(first, first + hosts), range(first + rank // local, first + rank // local + 1)


def is_coded(codec: DenseCodec, parameter: Tensor) -> bool:
    """Return True if gradients of a parameter are encoded.

    Those of 16 bits are not, because their sums are rounded anyway, and short ones are not thresholded: a bias has few
    elements, and each matters. Sums with thresholds are of float32."""
    if isinstance(codec, Thresholding):
        return parameter.dtype == torch.float32 and parameter.numel() >= MIN_THRESHOLDED
    return codec != "exact" and parameter.dtype in (torch.float32, torch.float64)


def coded_share_bytes(codec: Codec, elements: int) -> int:
    """Return the number of bytes of an encoded share of this many elements."""
    return sum(block.encoded_bytes(codec, torch.float32) for block in _blocks(elements))


def coded_buffer_bytes(
    codec: DenseCodec, sizes: Sequence[int], num_ranks: int, step: int | None = None
) -> int:
    """Return the number of bytes of an encoded buffer, as `comm.collectives.estimate_sum_traffic` takes it.

    Not for "exact". sizes: elements of the tensors in the buffer; step: None: after the warm-up of thresholded sums."""
    if isinstance(codec, Thresholding):
        density = density_of_step(codec, codec.keep_steps if step is None else step)
        return thresholded_buffer_bytes(sizes, num_ranks, density)
    return num_ranks * coded_share_bytes(CODECS[codec], -(-sum(sizes) // num_ranks))


def sum_residuals_by_parameter(
    states: Sequence[State | None], *, of_directions: bool = False
) -> dict[int, Tensor]:
    """Return the sum of all ranks' residuals in a checkpoint by index of the dense parameter, flat: those of gradients,
    or those of Adam's directions. states: by rank of the checkpoint's world; None: no residuals."""
    residuals: dict[int, Tensor] = {}
    for rank, state in enumerate(states):
        if state is None:
            continue
        for bucket in state["buckets"]:
            for total in _collect_residual_buffers(bucket, state, rank, of_directions):
                sizes = [state["sizes"][i] for i in bucket["numbers"]]
                parts = total[: sum(sizes)].split(sizes)
                for i, part in zip(bucket["numbers"], parts, strict=True):
                    residuals[i] = residuals[i] + part if i in residuals else part
    return residuals


def join_by_parameter(
    parts: Mapping[int, Tensor], indices: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Join the parts of these parameters to one buffer, with zeros where there is none. sizes: of all parameters."""
    return torch.cat([parts.get(index, torch.zeros(sizes[index])) for index in indices])


def describe_residual_layout(state: State | None) -> list[Any]:
    """Return the properties that must be equal for residuals of two checkpoints to belong to the same buckets."""
    if state is None:
        return []
    buckets = [
        (
            bucket["numbers"],
            bucket["sent"] is None,
            bool(bucket.get("thresholds")),
            _has_directions(bucket),
        )
        for bucket in state["buckets"]
        if not bucket.get("is_inside")
    ]
    return [state["hosts"], state["local"], state["sizes"], buckets]


def _has_directions(bucket_state: Mapping[str, Any]) -> bool:
    """Return True if the residuals of a bucket in a checkpoint are directions of Adam instead of gradients."""
    return bucket_state.get("moments") is not None


def _collect_residual_buffers(
    bucket_layout: Mapping[str, Any], rank_state: State, rank: int, of_directions: bool
) -> list[Tensor]:
    """Return the residuals of one rank in one bucket, as buffers of the whole bucket."""
    owed = bucket_layout["owed"]  # gradients
    buffers = [] if owed is None or of_directions else [owed]
    if bucket_layout["sent"] is None or _has_directions(bucket_layout) != of_directions:
        return buffers
    hosts = rank_state["hosts"]
    local = rank_state["local"]
    share = bucket_layout["sent"].shape[1]
    is_by_host = len(bucket_layout["sent"]) < hosts * local
    own = find_own_shares(rank, hosts, local, is_by_host)
    for shares, numbers in zip((bucket_layout["sent"], bucket_layout["summed"]), own, strict=True):
        whole = shares.new_zeros(hosts * local, share)
        whole[numbers.start : numbers.stop] = shares
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
