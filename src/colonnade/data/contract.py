"""What a reader of samples promises: the same law for files, memory and generated streams.

The samples of an epoch have one order. Step t of an epoch is its t-th run of `batch_size` samples, the
*global* batch; rank r of N takes the r-th contiguous block of it. So the ranks' blocks, in rank order,
are the batch of one rank, whatever N; every rank sees the same number of steps; and a reader has
no state but a `Position`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.batch import Batch


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The next batch to read: `step` counts global batches from the start of `epoch`.

    `state`: what a source of the user's own (data/batches.py) needs besides, on this rank: `Batch.state` of the
    batch before. Plain values and tensors; None where there is nothing.
    """

    epoch: int = 0
    step: int = 0
    state: Any = field(default=None, compare=False)


START = Position()


@dataclass(frozen=True, slots=True)
class Column:
    """A categorical column. `cardinality` None: any 64-bit id (an open table); else ids are 0 .. cardinality-1.

    `kind`: "one" id per sample; a "bag" of any number of them, in no order; or a "sequence" of them, oldest first.
    `table`: columns of one table share rows; default: a table of the column's own, named after it.
    """

    name: str
    cardinality: int | None = None
    kind: Literal["one", "bag", "sequence"] = "one"
    table: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of every batch of a source, in order."""

    dense: tuple[str, ...]
    categorical: tuple[Column, ...]
    labels: tuple[str, ...] = (
        "label",
    )  # one per task; a NaN in `Batch.label` is a label nobody knows


def bags_of(schema: Schema) -> frozenset[str]:
    """Columns whose samples may have several ids."""
    return frozenset(column.name for column in schema.categorical if column.kind != "one")


class Source(Protocol):
    """Samples in an order that depends only on the source and the epoch."""

    @property
    def schema(self) -> Schema: ...

    @property
    def num_samples(self) -> int | None:
        """Of an epoch, over all ranks. None: nobody knows before its end."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = Position(),
    ) -> Iterator[Batch]:
        """The rest of epoch `start.epoch` from step `start.step`, this rank's block of each global batch.

        `batch_size` counts samples over all ranks. The last global batch may be smaller, and a rank's
        block of it empty, but it is still yielded. Raises ConfigError at the call, DataError while reading.
        """
        ...


@dataclass(frozen=True, slots=True)
class Splits:
    """One data set, parted. All parts share a schema.

    `days`: parts of `train` in the order of time, where the data set has them: for progressive validation.
    """

    train: Source
    validation: Source | None = None
    test: Source | None = None
    days: tuple[Source, ...] = ()


def num_steps(num_samples: int, batch_size: int) -> int:
    """Global batches in an epoch, a smaller last one included."""
    return -(-num_samples // batch_size)


def share(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The contiguous block [begin, end) of `size` samples that `rank` takes; blocks differ by at most one sample."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks


def spans(
    num_samples: int, batch_size: int, *, rank: int, num_ranks: int, start: Position
) -> Iterator[tuple[int, int]]:
    """For each step from `start.step` on, this rank's samples [begin, end), counted in the epoch's order."""
    if batch_size < 1:
        raise ConfigError(f"got batch_size={batch_size}, wanted at least 1 sample over all ranks")
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"got rank={rank} of num_ranks={num_ranks}, wanted 0 <= rank < num_ranks")
    if start.epoch < 0 or start.step < 0:
        raise ConfigError(f"got start={start}, wanted epoch and step of 0 or more")

    def walk() -> Iterator[tuple[int, int]]:
        for first in range(start.step * batch_size, num_samples, batch_size):
            begin, end = share(min(batch_size, num_samples - first), rank, num_ranks)
            yield first + begin, first + end

    return walk()
