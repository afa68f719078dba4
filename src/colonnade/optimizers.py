"""Settings of the sparse optimizers: frozen values with the names and defaults of torch.optim.

All optimizers are *lazy*: a row changes only in steps that look it up. A row trains exactly like a parameter of its
own under the reference optimizer, stepped only when touched. Where the reference counts steps (Adam's bias
correction), the row's own clock counts. D: width of a part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from pydantic import AllowInfNan
from pydantic import Field as Limits

from colonnade import _native
from colonnade.config.validation import Expected, Fraction, NonNegative, validate_dataclass_fields
from colonnade.errors import ConfigError

Betas = Annotated[
    tuple[Fraction, Fraction], Expected("two numbers of 0 or more, below 1, as a tuple")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizer:
    """Base of the sparse optimizers: a name, optimizer state of each row, and settings of a param group."""

    name: ClassVar[str]
    is_of_rows: ClassVar[bool] = False
    """True if the update of a weight depends on other columns of its row."""
    counts_steps: ClassVar[bool] = False
    """True if the update depends on the row's clock."""

    lr: NonNegative

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)

    @property
    def kernel(self) -> str:
        """Name of the native kernel, as in `_native.OPTIMIZERS`."""
        return self.name

    @property
    def kind(self) -> int:
        """Number of the native kernel in `_native.update`."""
        return _native.OPTIMIZERS.index(self.kernel)

    def state_floats(self, dim: int) -> int:
        """Return the number of scalars of optimizer state that are stored with each row of a part of width `dim`."""
        return _native.optimizer_state_elements(self.kind, dim)

    def initial_state(self, dim: int) -> tuple[float, int]:
        """Return (value, count): the first `count` state scalars of a new row start at `value`, the others at 0."""
        return 0.0, 0

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as a param group stores them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(SparseOptimizer):
    """SGD as torch.optim.SGD: `g += weight_decay * w; w -= lr * g`. With `momentum`, `b = momentum * b + g` replaces g;
    with `nesterov`, `g + momentum * b` does."""

    name = "sgd"

    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    def __post_init__(self) -> None:
        SparseOptimizer.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ConfigError("SGD: got nesterov=True without momentum; set momentum, e.g. 0.9")

    @property
    def kernel(self) -> str:
        return "momentum" if self.momentum else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(SparseOptimizer):
    """Adagrad as torch.optim.Adagrad (Duchi et al. 2011): `g += weight_decay * w; s += g**2;
    w -= lr * g / (sqrt(s) + eps)`."""

    name = "adagrad"

    eps: NonNegative = 1e-10
    initial_accumulator: NonNegative = 0.0
    weight_decay: NonNegative = 0.0

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(SparseOptimizer):
    """Adagrad with one accumulator `s` per row: `g += weight_decay * w; s += mean(g**2);
    w -= lr * g / (sqrt(s) + eps)`.

    Row-wise form of Duchi et al. (2011), called EXACT_ROWWISE_ADAGRAD in FBGEMM.
    """

    name = "rowwise_adagrad"
    is_of_rows = True

    eps: NonNegative = 1e-8
    initial_accumulator: NonNegative = 0.0
    weight_decay: NonNegative = 0.0

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(SparseOptimizer):
    """Adam as torch.optim.Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient."""

    name = "adam"
    counts_steps = True

    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdam(SparseOptimizer):
    """Adam with one second moment per row, of the mean of g**2 (FBGEMM: PARTIAL_ROWWISE_ADAM)."""

    name = "rowwise_adam"
    counts_steps = True
    is_of_rows = True

    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(SparseOptimizer):
    """AdamW as torch.optim.AdamW (Loshchilov and Hutter 2019): `w -= lr * weight_decay * w`, decoupled from the
    gradient."""

    name = "adamw"
    counts_steps = True

    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRL(SparseOptimizer):
    """FTRL-proximal with per-coordinate rates (McMahan et al. 2013, algorithm 1); `lr` is the paper's alpha."""

    name = "ftrl"

    lr: Annotated[
        float,
        AllowInfNan(False),
        Limits(gt=0),
        Expected("a finite number above 0, because FTRL divides by it"),
    ]
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    initial_accumulator: NonNegative = 0.0

    def initial_state(self, dim: int) -> tuple[float, int]:
        return self.initial_accumulator, dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMB(SparseOptimizer):
    """LAMB (You et al. 2020, algorithm 2) with each row as a layer; the trust ratio is |w| / |update|."""

    name = "lamb"
    counts_steps = True
    is_of_rows = True

    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-6
    weight_decay: NonNegative = 0.0


SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {
    kind.name: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam, AdamW, FTRL, LAMB)
}
"""Optimizers by the name that settings use (`embedding.optimizer`)."""
