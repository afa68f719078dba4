"""Gradients of one step: recorded by backward, sent to the rows' owners, then applied or taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from colonnade.comm.mesh import Mesh
from colonnade.exchange.exchange import Exchange
from colonnade.lookup.contract import LookupContext, Pushed
from colonnade.lookup.outputs import all_finite


class StepGradients:
    """Batches since the last step, and what backward gave for them. Training thread."""

    def __init__(
        self,
        exchange: Exchange,
        mesh: Mesh,
        drop: Callable[[LookupContext], None],
        *,
        may_arrive_late: bool,
    ) -> None:
        """drop: gives a batch up. may_arrive_late: `collect` need not wait for gradients to arrive at owners."""
        self.exchange, self.mesh = exchange, mesh
        self.contexts: list[LookupContext] = []
        self.pushed: Pushed | None = None
        self._drop = drop
        self._may_arrive_late = may_arrive_late

    def are_finite(self) -> bool:
        """Return whether every gradient recorded on this rank is finite."""
        return all(
            all_finite(part)
            for context in self.contexts
            for gradients in context.gradients.backwards
            for part in gradients
        )

    def has_recorded(self) -> list[bool]:
        """Return by batch whether it has had a backward on this rank."""
        return [bool(context.gradients.backwards) for context in self.contexts]

    def collect(self, step: int) -> Pushed:
        """Collective: send what backward recorded since the last step to the rows' owners. It has arrived there, unless
        it may arrive late. Completes the gradients of `exchange.pushed_parameters`.

        Once per step: an update then applies it. step: updates made before. Raises RuntimeError if a backward came in
        between, or a gradient was changed in place.
        """
        num_backwards = 0
        for context in self.contexts:
            context.gradients.check()
            num_backwards += len(context.gradients.backwards)
        if self.pushed is None:
            self.pushed = Pushed(self.exchange.begin_push(self.contexts, step), num_backwards)
            if not self._may_arrive_late:
                self.pushed.arrive()
        elif self.pushed.num_backwards != num_backwards:
            raise RuntimeError(
                "backward was called after the gradients were clipped; clip between the last backward "
                "and step()"
            )
        return self.pushed

    def squared_norm(self, step: int) -> float:
        """Collective: return the sum of squares of all rows' summed gradients, over all ranks. step: as `collect`."""
        pushed, square = self.collect(step), 0.0
        if (gradients := pushed.arrive()) is not None:
            pushed.gradients, square = self.exchange.squared_norm(gradients)
        total = torch.tensor([square], dtype=torch.float64)
        return float(self.mesh.all_reduce("push", total, counts_as="control"))

    def hand_over(self, step: int) -> tuple[Pushed, list[LookupContext]]:
        """Collective: return what `collect` does, and the batches it is of; the next step begins without any."""
        pushed, contexts = self.collect(step), self.contexts
        self.contexts, self.pushed = [], None
        return pushed, contexts

    def take_back(self) -> None:
        """Collective: do not apply what `collect` sent since the last step."""
        pushed, self.pushed = self.pushed, None
        if pushed is not None:
            pushed.arrive()

    def clear(self) -> None:
        """Collective: forget recorded gradients; the batches stay."""
        self.take_back()
        for context in self.contexts:
            context.gradients.clear()

    def drop_unused(self, is_used: Sequence[float]) -> None:
        """Collective: drop the batches since the last step that no rank had a gradient for. is_used: by batch, how many
        ranks had."""
        self.take_back()
        used = []
        for context, count in zip(self.contexts, is_used, strict=True):
            if count:
                used.append(context)
            else:
                self._drop(context)
        self.contexts = used

    def forget(self) -> None:
        """Collective: drop every batch since the last step without applying it."""
        self.drop_unused([0.0] * len(self.contexts))
