"""Tower modules: networks that compress all fields of a tower before values leave the tower (DMT, Luo et al. 2024).

A rank that has all fields of a tower evaluates its module. Without such a rank the samples' ranks evaluate it, like any
operator.

Legend: B samples, F fields of a tower, D dim, W columns of its concatenated fields, O output columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from colonnade.errors import ConfigError
from colonnade.interaction.contract import Interaction


class TowerModule(Interaction):
    """Consumer of a tower's fields that applies a module: (B, F, D) or, concatenated, (B, W) -> (B, O).

    The module must treat samples one by one (no batch normalisation), because ranks see other batches than one process
    does. It must not change its fields in place, because other consumers may read them.
    """

    merge = "whole"

    def __init__(
        self, module: nn.Module, dims: Sequence[int], out: int, *, side_by_side: bool = False
    ) -> None:
        """Wrap a module. dims: of the consumer's fields, in their order. out: O. side_by_side: the module takes (B, W);
        it always does if dims differ. Raises ConfigError."""
        super().__init__()
        if not dims or out < 1:
            raise ConfigError(
                f"tower module {type(module).__name__}: got {len(dims)} fields and {out} columns out, wanted at least "
                "one of each"
            )
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                raise ConfigError(
                    f"tower module {type(module).__name__}: got {type(layer).__name__}, wanted modules that treat "
                    "samples one by one: ranks see other batches than one process does; LayerNorm does"
                )
        if any(is_lazy(weight) for weight in module.parameters()):
            raise ConfigError(
                f"tower module {type(module).__name__}: got weights without a shape (of a lazy layer), wanted "
                f"shapes that are known before the first batch: its fields are {sum(dims)} columns"
            )
        self.module = module
        self.dims = tuple(dims)
        self.out = out
        self.needs_equal_dims = not side_by_side and len(set(dims)) == 1

    @property
    def ratio(self) -> float:
        """Compression ratio (CR): input floats of a sample divided by output floats."""
        return sum(self.dims) / self.out

    def find_dims_problem(self, dims: Sequence[int]) -> str | None:
        if tuple(dims) != self.dims:
            return f"takes fields of dims {list(dims)}; its tower module was made for {list(self.dims)}"
        return None

    def width(self, dim: int) -> int:
        return self.out

    def needs_pooled_fields(self) -> bool:
        return True

    def partial_of_fields(
        self, fields: Tensor, field_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Evaluate the module on all fields. Raises ConfigError if its output has another shape than declared, or if it
        changes its fields."""
        weight = next(self.module.parameters(), fields)
        if fields.shape[0] == 0:  # a module need not accept empty batches
            return fields.flatten(1)[:, :1].expand(0, self.out)
        version = _tensor_version(fields)
        output = self.module(fields.to(weight.dtype))
        if _tensor_version(fields) != version:
            raise ConfigError(
                f"tower module {type(self.module).__name__}: got its fields changed in place, wanted them left as they "
                "are, for others may read them; of torch's layers take inplace=False"
            )
        wanted = (fields.shape[0], self.out)
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ConfigError(
                f"tower module {type(self.module).__name__}: got {got} for {tuple(fields.shape)}, wanted {wanted}: a "
                f"row of {self.out} columns for each sample; correct the module, or the `out` of its TowerModule"
            )
        return output.to(fields.dtype)

    def combine(self, stats: Tensor, dense: Tensor | None = None) -> Tensor:
        return stats


def _tensor_version(values: Tensor) -> int:
    """Return the tensor's version, which grows with each change in place; 0 for inference tensors."""
    return 0 if values.is_inference() else values._version
