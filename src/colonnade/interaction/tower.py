"""Tower modules: what a rank that has all fields of a tower makes of them, so that less leaves the tower (DMT, 2024).

Where no rank of a tower does so they are evaluated at the samples, like any operator.

Legend: B samples, F fields of a tower, D dim, W columns of its fields side by side, O columns that leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from colonnade.errors import ConfigError
from colonnade.interaction.contract import Interaction


class TowerModule(Interaction):
    """Any module of a tower's fields, as a consumer of them: (B, F, D) or, side by side, (B, W) -> (B, O).

    It must treat samples one by one (no batch normalisation), for ranks see other batches than one process does, and
    leave its fields as they are, for others may read them.
    """

    merge = "whole"

    def __init__(
        self, module: nn.Module, dims: Sequence[int], out: int, *, side_by_side: bool = False
    ) -> None:
        """dims: of the fields, in the order of the consumer's. out: O. side_by_side: the module takes (B, W), as it
        does anyway where dims differ. Raises ConfigError."""
        super().__init__()
        if not dims or out < 1:
            raise ConfigError(
                f"tower module {type(module).__name__}: got {len(dims)} fields and {out} columns out, wanted at least "
                "one of each"
            )
        for each in module.modules():
            if isinstance(each, _BatchNorm):
                raise ConfigError(
                    f"tower module {type(module).__name__}: got {type(each).__name__}, wanted modules that treat "
                    "samples one by one: ranks see other batches than one process does; LayerNorm does"
                )
        if any(is_lazy(each) for each in module.parameters()):
            raise ConfigError(
                f"tower module {type(module).__name__}: got weights without a shape (of a lazy layer), wanted "
                f"shapes that are known before the first batch: its fields are {sum(dims)} columns"
            )
        self.module = module
        self.dims, self.out = tuple(dims), out
        self.one_width = not side_by_side and len(set(dims)) == 1

    @property
    def ratio(self) -> float:
        """CR: floats of a sample that enter, by those that leave."""
        return sum(self.dims) / self.out

    def refusal(self, dims: Sequence[int]) -> str | None:
        if tuple(dims) != self.dims:
            return f"takes fields of dims {list(dims)}; its tower module was made for {list(self.dims)}"
        return None

    def width(self, dim: int) -> int:
        return self.out

    def needs(self) -> Literal["rows", "fields"]:
        return "fields"

    def partial_of(self, fields: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        """Of all fields. Raises ConfigError where the module gives something else than it said, or changes them."""
        weight = next(self.module.parameters(), fields)
        if not len(fields):  # a module need not know what to make of no samples
            return fields.flatten(1)[:, :1].expand(0, self.out)
        before = _version(fields)
        found = self.module(fields.to(weight.dtype))
        if _version(fields) != before:
            raise ConfigError(
                f"tower module {type(self.module).__name__}: got its fields changed in place, wanted them left as they "
                "are, for others may read them; of torch's layers take inplace=False"
            )
        wanted = (len(fields), self.out)
        if not isinstance(found, Tensor) or found.shape != wanted:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"tower module {type(self.module).__name__}: got {got} for {tuple(fields.shape)}, wanted {wanted}: a "
                f"row of {self.out} columns for each sample; correct the module, or the `out` of its TowerModule"
            )
        return found.to(fields.dtype)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats


def _version(values: Tensor) -> int:
    """Which grows with each change in place, where torch counts them."""
    return 0 if values.is_inference() else values._version
