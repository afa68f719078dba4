"""Settings of the sparse optimizers: plain frozen values, named and defaulted as in torch.optim.

All are the *lazy* forms: a row changes only in steps that looked it up. A row trains exactly as it
would under the named reference as a parameter of its own, stepped only when touched; where the
reference counts steps (Adam's bias correction), the row's own clock counts. D: width of a part.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from colonnade.errors import ConfigError

LARGEST = sys.float_info.max
"""Largest number that a float holds; an integer may be larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizer:
    """What all have in common: a name, what they keep with each row, and settings for a param group."""

    name: ClassVar[str]
    kind: ClassVar[int]
    """Number of the rule in the native core (`_native.update`)."""
    is_of_rows: ClassVar[bool] = False
    """Whether a weight's update depends on other columns of its row."""
    counts_steps: ClassVar[bool] = False
    """Whether it depends on the row's clock."""

    lr: float

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            limit = 1.0 if setting.name in ("momentum", "betas") else math.inf
            numbers = value if isinstance(value, tuple) and setting.name == "betas" else (value,)
            if not all(
                isinstance(n, int | float) and 0 <= n < limit and n <= LARGEST for n in numbers
            ):
                raise ConfigError(
                    f"{type(self).__name__}: got {setting.name}={value!r}, wanted "
                    + (
                        "numbers of 0 or more, below 1"
                        if limit == 1
                        else "a finite number, 0 or more"
                    )
                )
        betas = getattr(self, "betas", (0.0, 0.0))
        if not isinstance(betas, tuple) or len(betas) != 2:
            raise ConfigError(f"{type(self).__name__}: got betas={betas!r}, wanted two, as a tuple")  # fmt: skip

    def state_floats(self, dim: int) -> int:
        """Scalars of optimizer state that lie with each row."""
        return 0

    def initial_state(self, dim: int) -> tuple[float, int]:
        """(value, how many): the first state scalars of a new row start there, the others at 0."""
        return 0.0, 0

    def settings(self) -> dict[str, Any]:
        """By name, as a param group holds them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(SparseOptimizer):
    """`g += weight_decay * w; w -= lr * g`: torch.optim.SGD. With `momentum`, `b = momentum * b + g` takes g's
    place, or `g + momentum * b` with `nesterov`."""

    name = "sgd"

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        SparseOptimizer.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ConfigError("SGD: got nesterov=True without momentum; set momentum, e.g. 0.9")

    @property
    def kind(self) -> int:  # type: ignore[override]
        return 2 if self.momentum else 0

    def state_floats(self, dim: int) -> int:
        return dim if self.momentum else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(SparseOptimizer):
    """`g += weight_decay * w; s += g**2; w -= lr * g / (sqrt(s) + eps)`: torch.optim.Adagrad (Duchi et al. 2011)."""

    name = "adagrad"
    kind = 3

    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        return dim

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(SparseOptimizer):
    """`g += weight_decay * w; s += mean(g**2); w -= lr * g / (sqrt(s) + eps)`; one `s` per row.

    The row-wise form of Duchi et al. (2011) that FBGEMM calls EXACT_ROWWISE_ADAGRAD.
    """

    name = "rowwise_adagrad"
    kind = 1
    is_of_rows = True

    eps: float = 1e-8
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        return 1

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(SparseOptimizer):
    """torch.optim.Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient."""

    name = "adam"
    kind = 4
    counts_steps = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        return 2 * dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdam(SparseOptimizer):
    """Adam with one second moment per row, of the mean of g**2 (FBGEMM: PARTIAL_ROWWISE_ADAM)."""

    name = "rowwise_adam"
    kind = 5
    counts_steps = True
    is_of_rows = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        return dim + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(SparseOptimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019): `w -= lr * weight_decay * w`, apart from the gradient."""

    name = "adamw"
    kind = 6
    counts_steps = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def state_floats(self, dim: int) -> int:
        return 2 * dim


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRL(SparseOptimizer):
    """FTRL-proximal with per-coordinate rates (McMahan et al. 2013, algorithm 1); `lr` is the paper's alpha."""

    name = "ftrl"
    kind = 7

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        SparseOptimizer.__post_init__(self)
        if not self.lr:
            raise ConfigError("FTRL: got lr=0, wanted more: the rule divides by it")

    def state_floats(self, dim: int) -> int:
        return 2 * dim

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMB(SparseOptimizer):
    """LAMB (You et al. 2020, algorithm 2) with each row as a layer; the trust ratio is |w| / |update|."""

    name = "lamb"
    kind = 8
    counts_steps = True
    is_of_rows = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        return 2 * dim


SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {
    kind.name: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam, AdamW, FTRL, LAMB)
}
