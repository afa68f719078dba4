"""The sparse side's optimizer: an ordinary torch.optim.Optimizer with one param group per table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from colonnade.embedding import EmbeddingCollection
from colonnade.errors import NonFiniteError
from colonnade.table import RowWiseAdagrad, SparseOptimizer

KINDS = {"sgd": 0, "rowwise_adagrad": 1}


class RowOptimizer(Optimizer):
    """Applies what backward recorded on `collection`: per row, the sum of its gradients, once per `step()`.

    Each group carries `name`, `lr` and the other settings of its table's optimizer, so schedulers work
    as on any optimizer. Several backwards before a step accumulate. Only touched rows change (lazy).
    """

    def __init__(self, collection: EmbeddingCollection) -> None:
        self.collection = collection
        groups = [
            {"params": [handle], "name": table.name, **_settings(table.optimizer)}
            for table, handle in zip(collection.tables, collection.handles, strict=True)
        ]
        super().__init__(groups, {})
        self._kinds = torch.tensor(
            [KINDS[table.optimizer.name] for table in collection.tables], dtype=torch.int32
        )

    @torch.no_grad()
    def step(self, closure: Callable | None = None, *, agreed: bool = False):
        """Collective. Raises NonFiniteError, on every rank and with nothing applied, for a gradient that
        is NaN or inf on any of them. `agreed`: the ranks have already agreed that all is finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.collection.ensure_open()
        if not agreed:
            live = self.collection.live
            said = [float(not self.collection.finite()), *(float(bool(t.gradients)) for t in live)]
            heard = self.collection.mesh.all_reduce("push", torch.tensor(said)).tolist()
            self.collection.keep([t for t, used in zip(live, heard[1:], strict=True) if used])
            if heard[0]:
                self.collection.forget()
                raise NonFiniteError(
                    f"step {self.collection.step}: got NaN or inf in an embedding gradient, wanted finite "
                    "numbers; no row was changed on any rank. Lower the learning rate or clip the loss"
                )
        settings = torch.tensor(
            [
                [group["lr"], group["weight_decay"], group.get("eps", 0.0), 0, 0, 0, 0, 0]
                for group in self.param_groups
            ],
            dtype=torch.float64,
        )
        self.collection.push(self._kinds, settings)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients recorded since the last step."""
        for ticket in self.collection.live:
            ticket.gradients.clear()


def _settings(optimizer: SparseOptimizer) -> dict[str, float]:
    settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if isinstance(optimizer, RowWiseAdagrad):
        settings["eps"] = optimizer.eps
    return settings
