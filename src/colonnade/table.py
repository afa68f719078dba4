"""Tables, features, and the settings of the sparse optimizers: plain frozen values, no memory behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from colonnade.errors import ConfigError


def _check_settings(optimizer: object, *names: str) -> None:
    for name in names:
        value = getattr(optimizer, name)
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{type(optimizer).__name__}: got {name}={value}, wanted a finite number, 0 or more"
            )


Pooling = Literal["sum", "mean", "sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """`w -= lr * (g + weight_decay * w)` on touched rows (torch.optim.SGD without momentum, lazy form)."""

    lr: float
    weight_decay: float = 0.0

    name = "sgd"
    initial_state = 0.0

    def __post_init__(self) -> None:
        _check_settings(self, "lr", "weight_decay")

    def state_floats(self, dim: int) -> int:
        """Scalars of optimizer state that lie with each row."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad:
    """`g += weight_decay * w; s += mean(g**2); w -= lr * g / (sqrt(s) + eps)` on touched rows; one `s` per row.

    The row-wise form of Duchi et al. (2011) that FBGEMM calls EXACT_ROWWISE_ADAGRAD.
    """

    lr: float
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0

    name = "rowwise_adagrad"

    def __post_init__(self) -> None:
        _check_settings(self, "lr", "eps", "initial_accumulator", "weight_decay")

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator

    def state_floats(self, dim: int) -> int:
        """Scalars of optimizer state that lie with each row."""
        return 1


SparseOptimizer = SGD | RowWiseAdagrad


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Each weight of a new row is drawn from `[-scale, scale)` by (seed, table, id, position)."""

    scale: float


@dataclass(frozen=True, slots=True)
class Table:
    """A named set of rows of one width.

    With `rows` a *vocabulary table*: ids 0 .. rows-1, anything else is an error. Without, an *open
    table*: any 64-bit id, rows appear when first trained. A row's first value depends only on
    (seed, table name, id), so a row never trained costs no storage.
    """

    name: str
    dim: int
    rows: int | None = field(default=None, kw_only=True)
    optimizer: SparseOptimizer = field(default=RowWiseAdagrad(lr=0.02), kw_only=True)
    initializer: Uniform | None = field(default=None, kw_only=True)
    """None: uniform in +-1/sqrt(dim)."""
    dtype: Literal["float32", "float64"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table needs a name; got ''. Write Table('item', dim=16)")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(
                f"table {self.name!r}: got dtype={self.dtype!r}; choose from float32, float64"
            )
        if not isinstance(self.optimizer, SGD | RowWiseAdagrad):
            raise ConfigError(
                f"table {self.name!r}: got optimizer={self.optimizer!r}, wanted SGD(lr=...) or "
                "RowWiseAdagrad(lr=...)"
            )
        if not isinstance(self.dim, int) or self.dim < 1:
            raise ConfigError(f"table {self.name!r}: got dim={self.dim}, wanted at least 1")
        if self.rows is not None and (not isinstance(self.rows, int) or self.rows < 1):
            raise ConfigError(
                f"table {self.name!r}: got rows={self.rows}, wanted 1 or more; "
                "leave rows out for an open table that takes any 64-bit id"
            )

    @property
    def init_scale(self) -> float:
        return self.initializer.scale if self.initializer else self.dim**-0.5

    @property
    def itemsize(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def state_floats(self) -> int:
        return self.optimizer.state_floats(self.dim)

    @property
    def record_bytes(self) -> int:
        """Bytes of one row at rest: weights, optimizer state, and a 64-bit clock."""
        return (self.dim + self.state_floats) * self.itemsize + 8


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of the input that looks ids up in a table; several features may share a table.

    `pooling`: "sum" and "mean" give one vector per sample (an empty bag gives zeros);
    "sequence" gives one vector per lookup.
    """

    name: str
    table: str
    pooling: Pooling = field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        if self.pooling not in ("sum", "mean", "sequence"):
            raise ConfigError(
                f"feature {self.name!r}: got pooling={self.pooling!r}; choose from mean, sequence, sum"
            )
