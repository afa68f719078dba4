"""Dense gradients: one flat buffer with a fixed layout, reduced in one call.

DDP rebuilds its buckets after the first step, which changes the order of sums at three or more ranks and
after a restart; a flat buffer in parameter order never does. The ranks' word that all is finite, and that
somebody asked to stop, and their parts of the loss, ride at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colonnade.topology.mesh import Mesh

SIGNALS = 3  # not finite, stop asked, loss


class DenseGradients:
    """The `.grad` of every parameter is a view of one buffer; call `zero` instead of `zero_grad`.

    Parameters on a GPU have their buffer there; gloo reduces it by way of the CPU.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.parameters = tuple(parameters)
        self.buffers: list[Tensor] = []  # one per dtype and device; the first carries the signals
        self._gradients: list[Tensor] = []  # the same without the signals
        self._signals = torch.zeros(SIGNALS)

    def attach(self) -> None:
        """Lay the buffers out and point every parameter's gradient into them."""
        members: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {
            (torch.float32, torch.device("cpu")): []
        }
        for parameter in self.parameters:
            members.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.buffers, self._gradients = [], []
        for (dtype, device), parameters in members.items():
            size = sum(p.numel() for p in parameters)
            extra = 0 if self.buffers else SIGNALS
            buffer = torch.zeros(size + extra, dtype=dtype, device=device)
            start = 0
            for parameter in parameters:
                parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
            self.buffers.append(buffer)
            self._gradients.append(buffer[:size])
        self._signals = self.buffers[0][-SIGNALS:]

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def reduce(
        self, *, finite: bool, stop: bool, loss: Tensor | float = 0.0
    ) -> tuple[bool, bool, float]:
        """Collective: sum the gradients over ranks, in place. `loss`: this rank's part of it. Returns (all finite
        everywhere, anybody stops, the whole loss)."""
        self._signals[0], self._signals[1] = float(not finite), float(stop)
        self._signals[2] = loss
        for buffer in self.buffers:
            self._sum_over_ranks(buffer)
        # A NaN or inf of any rank survives the sum, so every rank sees the same answer.
        sums = [float(buffer.sum(dtype=torch.float64)) for buffer in self.buffers]
        unhealthy, stops, whole = self._signals.tolist()
        return unhealthy == 0 and all(map(math.isfinite, sums)), stops > 0, whole

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for gradient in self._gradients:
            gradient.mul_(factor)

    def clip_norm(self, max_norm: float) -> float:
        """After `reduce`, which left the same gradients everywhere: scale them so that their 2-norm, of all
        together, is at most `max_norm`, as torch's clip_grad_norm_. Returns the norm they had."""
        norms = [float(torch.linalg.vector_norm(part)) for part in self._gradients if len(part)]
        norm = math.hypot(*norms)
        if max_norm < norm + 1e-6:
            self.scale(max_norm / (norm + 1e-6))
        return norm

    def synchronise(self, others: Sequence[Tensor] = ()) -> None:
        """Collective: every rank starts from rank 0's parameters, and its `others` (buffers, frozen parameters)."""
        with torch.no_grad():
            for tensor in (*self.parameters, *others):
                if not tensor.numel():
                    continue
                if tensor.device.type == "cpu":
                    self.mesh.broadcast("dense", tensor.data)
                elif self.mesh.num_ranks > 1:
                    tensor.data.copy_(self.mesh.broadcast("dense", tensor.data.cpu()))

    def _sum_over_ranks(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            self.mesh.all_reduce("dense", buffer)
        elif self.mesh.num_ranks > 1:
            buffer.copy_(self.mesh.all_reduce("dense", buffer.cpu()))
