"""Contract of every sample reader: files, memory and generated streams.

The samples of an epoch have one order. Step t of an epoch reads the t-th run of `batch_size` samples, the
*global* batch; rank r of N reads the r-th contiguous block of it. So the blocks of all ranks, in rank order,
form the same global batch for any N; every rank has the same number of steps; and the only state of a reader is a
`Position`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeGuard,
    get_args,
    get_origin,
    get_type_hints,
)

from colonnade.config.run import LastBatch
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.batch import Batch


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Position of the next batch to read: `step` counts global batches from the start of `epoch`.

    `state`: further state of a user's data set (data/batches.py) on this rank: `Batch.state` of the previous batch.
    Plain values and tensors, or None.
    """

    epoch: int = 0
    step: int = 0
    state: Any = field(default=None, compare=False)


START = Position()
LABELS = ("label", "click", "clicked", "target", "y")
"""Names of the label where nothing else names it."""
Block = tuple[int, int]
"""Samples [begin, end), counted in the order of an epoch."""


@dataclass(frozen=True, slots=True)
class Column:
    """Categorical column. `cardinality` None: any 64-bit id (an open table); else ids are 0 .. cardinality-1.

    `kind`: "one" id per sample; a "bag" of any number of ids, in no order; or a "sequence" of ids, oldest first.
    `table`: columns of one table share rows; default: a separate table, named after the column.
    """

    name: str
    cardinality: int | None = None
    kind: Literal["one", "bag", "sequence"] = "one"
    table: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns of every batch of a source, in order."""

    dense: tuple[str, ...]
    categorical: tuple[Column, ...]
    labels: tuple[str, ...] = ("label",)  # one per task; a NaN in `Batch.label` is an unknown label


def multi_id_columns(schema: Schema) -> frozenset[str]:
    """Return the names of the columns that may have several ids per sample."""
    return frozenset(column.name for column in schema.categorical if column.kind != "one")


class Source(Protocol):
    """Reader of samples in an order that depends only on the source and the epoch."""

    @property
    def schema(self) -> Schema: ...

    @property
    def num_samples(self) -> int | None:
        """Number of samples in an epoch, over all ranks. None: unknown before the epoch ends."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = Position(),
        last_batch: LastBatch = "keep",
    ) -> Iterator[Batch]:
        """Return this rank's block of each global batch of epoch `start.epoch`, from step `start.step` on.

        `batch_size` counts samples over all ranks. The last global batch may be smaller, and a rank's
        block of it empty, but it is still yielded, unless `last_batch` says otherwise. Raises ConfigError at the call,
        DataError while reading.
        """
        ...


class BlockSource(ABC):
    """Base of sources with a known number of samples: each reads a rank's blocks of samples of an epoch."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_samples(self) -> int: ...

    @abstractmethod
    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        """Return one batch for each of `blocks`, with these samples in the order of `epoch`."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = Position(),
        last_batch: LastBatch = "keep",
    ) -> Iterator[Batch]:
        """Return this rank's batches, as `Source.batches` does."""
        blocks = iterate_rank_blocks(
            self.num_samples,
            batch_size,
            rank=rank,
            num_ranks=num_ranks,
            start=start,
            last_batch=last_batch,
        )
        return self.read_epoch(start.epoch, blocks)


def has_samples(source: Source | None) -> TypeGuard[Source]:
    """Return whether a part of a data set is there and may have samples; without any it has no metrics."""
    return source is not None and source.num_samples != 0


def build_batch_options(last_batch: LastBatch) -> dict[str, Any]:
    """Return the keyword arguments of `Source.batches` for the last batch: none for "keep", so that a user's source
    need not know of it."""
    return {} if last_batch == "keep" else {"last_batch": last_batch}


@dataclass(frozen=True, slots=True)
class Splits:
    """Training, validation and test parts of a data set. All parts share a schema.

    `days`: parts of `train` in the order of time, where the data set has them: for progressive validation.
    `notes`: lines about what was read, for the terminal. `options`: options that a run records in addition to its own,
    so that it opens the same data later, such as the names of entities in the order of their numbers.
    """

    train: Source
    validation: Source | None = None
    test: Source | None = None
    days: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def num_steps(num_samples: int, batch_size: int, last_batch: LastBatch = "keep") -> int:
    """Return the number of global batches in an epoch."""
    if last_batch == "keep" or (last_batch == "merge" and num_samples < batch_size):
        return -(-num_samples // batch_size)
    return num_samples // batch_size


def rank_block(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the contiguous block [begin, end) of `size` samples that `rank` reads.

    The blocks of two ranks differ in size by at most one sample.
    """
    return size * rank // num_ranks, size * (rank + 1) // num_ranks


def iterate_rank_blocks(
    num_samples: int,
    batch_size: int,
    *,
    rank: int,
    num_ranks: int,
    start: Position,
    last_batch: LastBatch = "keep",
) -> Iterator[Block]:
    """Return this rank's samples [begin, end) of each step from `start.step` on, counted in the epoch's order.

    Raises ConfigError at the call for arguments out of range.
    """
    if batch_size < 1:
        raise ConfigError(f"got batch_size={batch_size}, wanted at least 1 sample over all ranks")
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"got rank={rank} of num_ranks={num_ranks}, wanted 0 <= rank < num_ranks")
    if start.epoch < 0 or start.step < 0:
        raise ConfigError(f"got start={start}, wanted epoch and step of 0 or more")
    last = num_steps(num_samples, batch_size, last_batch) - 1
    if num_samples and last < 0:
        raise ConfigError(
            f"got data.last_batch=drop and {num_samples} samples, fewer than the {batch_size} of a batch, wanted at "
            "least one whole batch: make train.batch_size smaller, or set data.last_batch to merge"
        )

    def iterate_blocks() -> Iterator[Block]:
        for step in range(start.step, last + 1):
            first = step * batch_size
            size = num_samples - first if step == last and last_batch != "drop" else batch_size
            begin, end = rank_block(size, rank, num_ranks)
            yield first + begin, first + end

    return iterate_blocks()


def check_choices(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a text that is none of the Literal values that a function's parameter may have."""
    hints = get_type_hints(function)
    for name, value in options.items():
        kinds = (hints.get(name), *get_args(hints.get(name)))
        choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        if choices and isinstance(value, str) and value not in choices:
            nearest = get_close_matches(value, choices, n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else "Choose one of these"
            raise ConfigError(
                f"data.options.{name}: got {value!r}, wanted one of {', '.join(choices)}. {hint}"
            )
