"""Dense gradients: one flat buffer with a fixed layout, reduced in one call.

DDP rebuilds its buckets after the first step, which changes the order of sums at three or more ranks and
after a restart; a flat buffer in parameter order never does. The ranks' word that all is finite, and that
somebody asked to stop, ride at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colonnade.topology.mesh import Mesh

SIGNALS = 2  # not finite, stop asked


class DenseGradients:
    """The `.grad` of every parameter is a view of one buffer; call `zero` instead of `zero_grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.parameters = tuple(parameters)
        self.buffers: list[Tensor] = []  # one per dtype; the first carries the signals
        self._signals = torch.zeros(SIGNALS)

    def attach(self) -> None:
        """Lay the buffers out and point every parameter's gradient into them."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {torch.float32: []}
        for parameter in self.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.buffers = []
        for dtype, members in by_dtype.items():
            extra = 0 if self.buffers else SIGNALS
            buffer = torch.zeros(sum(p.numel() for p in members) + extra, dtype=dtype)
            start = 0
            for parameter in members:
                parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
            self.buffers.append(buffer)
        self._signals = self.buffers[0][-SIGNALS:]

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def reduce(self, *, finite: bool, stop: bool) -> tuple[bool, bool]:
        """Collective: sum the gradients over ranks, in place. Returns (all finite everywhere, anybody stops)."""
        self._signals[0], self._signals[1] = float(not finite), float(stop)
        for buffer in self.buffers:
            self.mesh.all_reduce("dense", buffer)
        # A NaN or inf of any rank survives the sum, so every rank sees the same answer.
        sums = [buffer.sum(dtype=torch.float64) for buffer in self.buffers]
        healthy = bool(self._signals[0] == 0) and all(bool(torch.isfinite(s)) for s in sums)
        return healthy, bool(self._signals[1] > 0)

    def synchronise(self) -> None:
        """Collective: every rank starts from rank 0's parameters."""
        with torch.no_grad():
            for parameter in self.parameters:
                self.mesh.broadcast("dense", parameter.data)
