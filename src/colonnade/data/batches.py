"""A data set of the user's own: anything that yields `Batch`, as a source.

    open_batches(data, schema)      data: a torch DataLoader (batch_size=None) or IterableDataset, any iterable,
                                    a map-style data set whose items are batches, or a function of the epoch
                                    that returns one of these

Its batches are trained on as they come, each rank's own: the data set decides who reads what, in which order.
So it is only as repeatable as the data set is; what changes with the epoch is best said by a function of it.

Going on in the middle of an epoch:

    map-style                               batch t is data[t]: at no cost
    has state_dict and load_state_dict      its state is saved with each rank and given back (torchdata's
                                            StatefulDataLoader; a data set that counts what it has yielded)
    anything else                           the batches before are read again and dropped: as slow as reading them
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from colonnade.batch import Batch, Ids
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import START, Column, Position, Schema, Source, num_steps, spans
from colonnade.errors import ConfigError, DataError

ENDED = "ended"
"""Position.state of a rank that had no batches left while others had."""


@runtime_checkable
class Stateful(Protocol):
    """As in torchdata: iterating after `load_state_dict(state)` goes on behind the batch after which
    `state` was taken."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class Indexed(Protocol):
    """A map-style data set: item t is the batch of step t."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


Batches = Iterable[Batch] | Indexed
Data = Batches | Callable[[int], Batches]


def open_batches(data: Data, schema: Schema, *, name: str = "data set") -> BatchSource:
    """`data` as a source (see the top of this file). `name` is for messages.

    Every batch is checked when it is read: DataError names its epoch, its step, the column, and what was wanted.
    """
    if not isinstance(data, (Indexed, Iterable)) and not callable(data):
        raise ConfigError(
            f"{name}: got a {type(data).__name__}, wanted something that yields Batch: an iterable, a map-style "
            "data set, or a function of the epoch that returns one"
        )
    if isinstance(data, Iterator):
        raise ConfigError(
            f"{name}: got an iterator, which one epoch uses up; wanted an iterable, or a function of the epoch that "
            "returns a new iterator"
        )
    return BatchSource(data, schema, name)


@dataclass(frozen=True, slots=True, eq=False)
class BatchSource:
    """This rank's batches as its data set makes them. How many there are is known at the end of an epoch.

    `batch_size` of `batches` is a bound: a rank's batch holds at most its share of it. So `train.batch_size` keeps
    saying how many samples a step has, and a data set that was made for another number of ranks is found out.
    """

    data: Data
    schema: Schema
    name: str = "data set"

    @property
    def num_samples(self) -> None:
        return None

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = START,
    ) -> Iterator[Batch]:
        spans(0, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        return self._read(-(-batch_size // num_ranks), start)

    def _read(self, most: int, start: Position) -> Iterator[Batch]:
        if start.state == ENDED:
            return
        made = self._of_epoch(start.epoch)
        stateful = made if isinstance(made, Stateful) and not _is_indexed(made) else None
        found = _from(made, start.step, start.state, self.name)
        for step, batch in enumerate(found, start.step):
            where = f"{self.name}, epoch {start.epoch}, batch {step}"
            check_batch(batch, self.schema, where=where, most=most)
            state = None if stateful is None else _kept(stateful.state_dict(), where)
            yield replace(batch, state=state)

    def _of_epoch(self, epoch: int) -> Batches:
        if isinstance(self.data, (Indexed, Iterable)):
            return self.data
        made = self.data(epoch)
        if not isinstance(made, (Indexed, Iterable)):
            raise DataError(
                f"{self.name}: for epoch {epoch} its function returned a {type(made).__name__}, wanted an "
                "iterable of Batch or a map-style data set of them"
            )
        return made


def _is_indexed(made: Batches) -> TypeGuard[Indexed]:
    # torch gives every data set a __getitem__, which an IterableDataset's refuses.
    return isinstance(made, Indexed) and not isinstance(made, IterableDataset)


def _from(made: Batches, step: int, state: Any, name: str) -> Iterator[Batch]:
    """The batches of steps `step`, `step` + 1, ..."""
    if _is_indexed(made):
        return (made[i] for i in range(step, len(made)))
    if state is None:
        return _skipping(iter(made), step, name)
    if not isinstance(made, Stateful):
        raise DataError(
            f"{name}: the run was saved with a state of the data set, and a {type(made).__name__} has no "
            "load_state_dict to take it back; go on with the data set it was started with"
        )
    made.load_state_dict(copy.deepcopy(state))
    return iter(made)


def _skipping(batches: Iterator[Batch], count: int, name: str) -> Iterator[Batch]:
    skipped = sum(1 for _ in islice(batches, count))
    if skipped < count:
        raise DataError(
            f"{name}: it ended after {skipped} batches, and the run goes on from batch {count} of this epoch; "
            "go on with the data set it was started with"
        )
    yield from batches


def _kept(state: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy that a checkpoint can store and a resumed run read without running code from the file."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        raise DataError(
            f"{where}: got a state_dict() that cannot be saved ({str(error).splitlines()[0]}), wanted plain "
            "values and tensors in it"
        ) from None


def check_batch(batch: Batch, schema: Schema, *, where: str, most: int) -> None:
    """Raise DataError at the first thing that does not fit `schema`.

    Ids outside their table are found when the batch is looked up.
    """
    if not isinstance(batch, Batch):
        raise DataError(
            f"{where}: got a {type(batch).__name__}, wanted a colonnade.Batch. A DataLoader hands batches on "
            "as they are with batch_size=None"
        )
    size = batch.size
    if not 0 <= size <= most:
        raise DataError(
            f"{where}: got {size} samples, wanted 0 .. {most}: train.batch_size counts the samples of a step over "
            "all ranks. Raise it, or make smaller batches"
        )

    def tensor(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not isinstance(value, Tensor):
            raise DataError(
                f"{where}, {name}: got {type(value).__name__}, wanted a tensor {_words(shape, dtype)}"
            )
        if tuple(value.shape) != shape or value.dtype != dtype or value.device.type != "cpu":
            got = _words(tuple(value.shape), value.dtype)
            on = "" if value.device.type == "cpu" else f" on {value.device}"
            raise DataError(
                f"{where}, {name}: got {got}{on}, wanted {_words(shape, dtype)} on the CPU"
            )

    dense = ", ".join(schema.dense)
    tensor(f"dense ({dense})", batch.dense, (size, len(schema.dense)), torch.float32)
    if not batch.dense.isfinite().all():
        row, column = (~batch.dense.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"{where}, row {row}, column {schema.dense[column]}: got {float(batch.dense[row, column])}, wanted a "
            "finite number. Replace missing values (0 is common)"
        )
    for column in schema.categorical:
        _check_ids(batch, column, where, tensor)
    if batch.label is not None:
        tensor("label", batch.label, (size, len(schema.labels)), torch.float32)
    if batch.sample_weight is not None:
        tensor("sample_weight", batch.sample_weight, (size,), torch.float32)
    if batch.group is not None:
        tensor("group", batch.group, (size,), torch.int64)


def _check_ids(
    batch: Batch,
    column: Column,
    where: str,
    tensor: Callable[[str, Any, tuple[int, ...], torch.dtype], None],
) -> None:
    if column.name not in batch.ids:
        raise DataError(
            f"{where}: got ids of {', '.join(batch.ids) or 'no column'}, wanted {column.name!r} too: the schema "
            "has it"
        )
    ids = batch.ids[column.name]
    name = f"column {column.name}"
    if not isinstance(ids, Ids):
        raise DataError(f"{where}, {name}: got {type(ids).__name__}, wanted colonnade.Ids(values)")
    if (ids.offsets is None) != (column.kind == "one"):
        wanted = "without offsets: one id per sample" if column.kind == "one" else "with offsets"
        raise DataError(
            f"{where}, {name}: got ids {'without' if ids.offsets is None else 'with'} offsets, wanted them "
            f"{wanted}, as the schema's kind {column.kind!r} says"
        )
    if ids.offsets is None:
        tensor(f"{name}, values", ids.values, (batch.size,), torch.int64)
    else:
        tensor(f"{name}, offsets", ids.offsets, (batch.size + 1,), torch.int64)
        count = ids.values.numel() if isinstance(ids.values, Tensor) else 0
        tensor(f"{name}, values", ids.values, (count,), torch.int64)
        first, last = int(ids.offsets[0]), int(ids.offsets[-1])
        if first != 0 or last != count or bool((ids.offsets.diff() < 0).any()):
            raise DataError(
                f"{where}, {name}: got offsets that start at {first} and end at {last}, wanted 0 .. {count} (the "
                "number of ids), never decreasing"
            )
    if ids.weights is not None:
        tensor(f"{name}, weights", ids.weights, tuple(ids.values.shape), torch.float32)


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def batches_of(
    source: Source, batch_size: int, mesh: Mesh, *, channel: str, start: Position = START
) -> Iterator[Batch]:
    """This rank's batches, as many as every other rank's; a server's are empty. Collective, once a batch, on the mesh's
    group `channel`, where nobody knows how many samples the source has; to be read in the thread that uses that
    group."""
    known, trainers = source.num_samples, mesh.trainers
    if not mesh.is_server:
        read = source.batches(
            batch_size, rank=trainers.rank, num_ranks=trainers.num_ranks, start=start
        )
    else:
        left = 0 if known is None else num_steps(known, batch_size) - start.step
        read = (no_samples(source.schema) for _ in range(left))
    return read if known is not None else until_all_end(read, source.schema, mesh, channel=channel)


def until_all_end(
    batches: Iterator[Batch], schema: Schema, mesh: Mesh, *, channel: str
) -> Iterator[Batch]:
    """Collective, once a batch and in the thread that reads: a rank that has no batch left yields empty ones until no
    rank has any. In a world of one rank, the batches themselves."""
    if mesh.num_ranks == 1:
        yield from batches
        return
    last: Batch | None = None
    is_over = False
    while True:
        batch = None if is_over else next(batches, None)
        is_over = batch is None
        left = torch.tensor(0 if is_over else 1)
        if not int(mesh.all_reduce(channel, left)):
            return
        if batch is None:
            yield no_samples(schema, last)
        else:
            last = batch
            yield batch


def no_samples(schema: Schema, like: Batch | None = None) -> Batch:
    """No samples, with the columns of `like`."""
    nothing = torch.zeros(1, dtype=torch.int64)
    no_ids = torch.zeros(0, dtype=torch.int64)
    empty = Batch(
        0,
        torch.zeros(0, len(schema.dense)),
        {
            column.name: Ids(no_ids, None if column.kind == "one" else nothing.clone())
            for column in schema.categorical
        },
        label=torch.zeros(0, len(schema.labels)),
        state=ENDED,
    )
    if like is not None:
        empty.sample_weight = None if like.sample_weight is None else like.sample_weight[:0]
        empty.group = None if like.group is None else like.group[:0]
    return empty
