"""User data sets as sources: anything that yields `Batch`.

    open_batches(data, schema)      data: a torch DataLoader (batch_size=None) or IterableDataset, any iterable,
                                    a map-style data set with batches as items, or a function of the epoch
                                    that returns one of these

    open_loader(data, ...)          what `colonnade.fit` makes of these: the schema is that of the first batch

An item is a `Batch`, or a mapping of names to tensors: integers (B,) are ids, integers (B, L) bags of L ids, floats
(B,) or (B, n) dense columns; `Ids` are as they are; `label`, `click`, `clicked`, `target` or `y` is the label (B,) or
(B, tasks); `sample_weight` and `group` are those of `Batch`.

Each rank trains on the batches of its own copy of the data set, in the order in which it yields them. The data set
decides which rank reads which samples, and a run is as repeatable as its data set. If samples change with the epoch,
pass a function of the epoch. The sampler of a DataLoader is told the epoch (`set_epoch`), if it has one.

Resuming in the middle of an epoch:

    map-style                               batch t is data[t]: at no cost
    has state_dict and load_state_dict      each rank saves the state and restores it (torchdata's
                                            StatefulDataLoader; a data set that counts what it has yielded)
    anything else                           earlier batches are read again and dropped: as slow as reading them
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from colonnade.batch import Batch, Ids
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import (
    LABELS,
    START,
    Column,
    LastBatch,
    Position,
    Schema,
    Source,
    build_batch_options,
    iterate_rank_blocks,
    num_steps,
)
from colonnade.data.tensors import as_tensor, open_tensors
from colonnade.errors import ConfigError, DataError

ENDED = "ended"
"""Value of `Position.state` on a rank that ran out of batches before other ranks did."""


@runtime_checkable
class Stateful(Protocol):
    """Iterable that can save and restore its position, as in torchdata.

    After `load_state_dict(state)`, iteration continues behind the last batch yielded before `state` was saved.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class Indexed(Protocol):
    """Map-style data set: item t is the batch of step t."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


EpochBatches = Iterable[Batch] | Indexed
UserData = EpochBatches | Callable[[int], EpochBatches]


def open_batches(data: UserData, schema: Schema, *, name: str = "data set") -> BatchSource:
    """Return a source over the user's data set (see the top of this file). `name` is for messages.

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


def open_loader(data: Any, num_ranks: int, schema: Schema | None, *, name: str) -> BatchSource:
    """Return a source over a user's data set, by default with the schema of its first batch.

    Raises ConfigError for data that can be read once only, and on several ranks without a sampler that knows them;
    DataError for an empty data set, and a first batch that is none. `name` is for messages.
    """
    if num_ranks > 1 and not hasattr(_find_sampler(data), "num_replicas"):
        raise ConfigError(
            f"{name}: got a {type(data).__name__} on {num_ranks} ranks, wanted each rank to read its own samples: "
            "DataLoader(..., sampler=DistributedSampler(data_set)); if it does so already, say so with "
            "colonnade.data.open_batches(data, schema)"
        )
    source = open_batches(data, schema or Schema((), ()), name=name)
    generator = getattr(data, "generator", None)
    state = None if generator is None else generator.get_state()
    with torch.random.fork_rng(devices=[]):  # training draws the same orders as without this look
        first = next(iter(source._open_epoch_batches(0)), None)
    if generator is not None:
        generator.set_state(state)
    if first is None:
        raise DataError(f"{name}: got no batch, wanted one at least")
    inferred = infer_batch_schema(first, f"{name}, first batch")
    return replace(source, schema=schema or inferred)


def _find_sampler(data: Any) -> Any:
    """Return what orders the samples of a DataLoader; None of other data."""
    batch_sampler = getattr(data, "batch_sampler", None)
    return getattr(batch_sampler, "sampler", getattr(data, "sampler", None))


def infer_batch_schema(batch: Any, where: str) -> Schema:
    """Return the schema of a batch or a mapping of tensors: open columns, each of one id or a bag. Raises DataError."""
    if isinstance(batch, Mapping):
        return _convert_mapping(batch, where)[1]
    if not isinstance(batch, Batch):
        raise DataError(
            f"{where}: got a {type(batch).__name__}, wanted a mapping of names to tensors, or a colonnade.Batch (a "
            "DataLoader hands batches on as they are with batch_size=None)"
        )
    num_labels = 1 if batch.label is None else batch.label.shape[-1]
    labels = ["label"] if num_labels == 1 else [f"label{i}" for i in range(num_labels)]
    source = open_tensors(
        batch.ids, dense=batch.dense, label=batch.label, label_names=labels, name=where
    )
    return source.schema


def _convert_mapping(values: Mapping[str, Any], where: str) -> tuple[Batch, Schema]:
    """Convert tensors by name (see the top of this file) to a batch and its schema. Raises DataError."""
    label_name = next((name for name in LABELS if name in values), "label")
    special = {name: values.get(name) for name in (label_name, "sample_weight", "group")}
    dense: dict[str, Tensor] = {}
    ids: dict[str, Any] = {}
    for name, value in values.items():
        if name in special or isinstance(value, Ids):
            ids |= {} if name in special else {name: value}
            continue
        tensor = as_tensor(where, name, value)
        if tensor.dim() not in (1, 2):
            raise DataError(f"{where}, {name}: got {tuple(tensor.shape)}, wanted (B,) or (B, n)")
        if tensor.is_floating_point():
            names = [name] if tensor.dim() == 1 else [f"{name}{i}" for i in range(tensor.shape[-1])]
            dense |= zip(names, tensor.reshape(-1, len(names)).unbind(1), strict=True)
        elif tensor.dim() == 2:
            offsets = torch.arange(len(tensor) + 1) * tensor.shape[1]
            ids[name] = Ids(tensor.flatten(), offsets)
        else:
            ids[name] = tensor
    if len(set(map(len, dense.values()))) > 1:
        raise DataError(f"{where}: got dense columns of several lengths, wanted one of (B,) each")
    label = special.pop(label_name)
    tasks = [label_name]
    if label is not None and (label := as_tensor(where, label_name, label)).dim() == 2:
        tasks = [f"{label_name}{i}" for i in range(label.shape[1])]
    source = open_tensors(
        ids,
        dense=torch.stack(list(dense.values()), 1) if dense else None,
        dense_names=list(dense),
        label=label,
        label_names=tasks,
        name=where,
        **special,
    )
    return source.columns.gather_rows(torch.arange(source.num_samples)), source.schema


def _convert_batch(batch: Any, schema: Schema, where: str) -> Any:
    """Convert a mapping of tensors to a batch. Raises DataError if it has other columns than the schema."""
    if not isinstance(batch, Mapping):
        return batch
    converted, own = _convert_mapping(batch, where)
    got, wanted = (
        (sorted(column.name for column in part.categorical), part.dense, part.labels)
        for part in (own, schema)
    )
    if got != wanted:
        described = (
            f"ids {', '.join(ids) or 'none'}; numbers {', '.join(dense) or 'none'}; labels {', '.join(labels)}"
            for ids, dense, labels in (got, wanted)
        )
        raise DataError(
            f"{where}: got {next(described)}; wanted {next(described)}, as the schema has them (by default that of the "
            "first batch)"
        )
    return converted


@dataclass(frozen=True, slots=True, eq=False)
class BatchSource:
    """Batches of a user's data set on this rank. Their number is known only at the end of an epoch.

    `batch_size` of `batches` is a bound: a rank's batch holds at most its share of it. So `train.batch_size` still
    bounds the samples of a step, and a data set made for another number of ranks is detected.
    """

    data: UserData
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
        last_batch: LastBatch = "keep",
    ) -> Iterator[Batch]:
        iterate_rank_blocks(0, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        if last_batch != "keep":
            raise ConfigError(
                f"{self.name}: got data.last_batch={last_batch} for a data set that makes its own batches, wanted "
                "keep: leave out or add the last samples there, e.g. DataLoader(drop_last=True)"
            )
        return self._read_epoch(-(-batch_size // num_ranks), start)

    def _read_epoch(self, max_samples: int, start: Position) -> Iterator[Batch]:
        if start.state == ENDED:
            return
        data_set = self._open_epoch_batches(start.epoch)
        stateful = (
            data_set if isinstance(data_set, Stateful) and not _is_indexed(data_set) else None
        )
        batches = _iterate_from_step(data_set, start.step, start.state, self.name)
        for step, batch in enumerate(batches, start.step):
            where = f"{self.name}, epoch {start.epoch}, batch {step}"
            batch = _convert_batch(batch, self.schema, where)
            check_batch(batch, self.schema, where=where, max_samples=max_samples)
            state = None if stateful is None else _copy_storable_state(stateful.state_dict(), where)
            yield replace(batch, state=state)

    def _open_epoch_batches(self, epoch: int) -> EpochBatches:
        if isinstance(self.data, (Indexed, Iterable)):
            if (set_epoch := getattr(_find_sampler(self.data), "set_epoch", None)) is not None:
                set_epoch(epoch)
            return self.data
        data_set = self.data(epoch)
        if not isinstance(data_set, (Indexed, Iterable)):
            raise DataError(
                f"{self.name}: for epoch {epoch} its function returned a {type(data_set).__name__}, wanted an "
                "iterable of Batch or a map-style data set of them"
            )
        return data_set


def _is_indexed(data_set: EpochBatches) -> TypeGuard[Indexed]:
    # torch gives every data set a __getitem__; an IterableDataset's only raises.
    return isinstance(data_set, Indexed) and not isinstance(data_set, IterableDataset)


def _iterate_from_step(
    epoch_batches: EpochBatches, step: int, saved_state: Any, data_set_name: str
) -> Iterator[Batch]:
    """Return an iterator over the batches of steps `step`, `step` + 1, ..."""
    if _is_indexed(epoch_batches):
        return (epoch_batches[i] for i in range(step, len(epoch_batches)))
    if saved_state is None:
        return _skip_batches(iter(epoch_batches), step, data_set_name)
    if not isinstance(epoch_batches, Stateful):
        raise DataError(
            f"{data_set_name}: the run was saved with a state of the data set, and a "
            f"{type(epoch_batches).__name__} has no "
            "load_state_dict to restore it; resume with the data set it was started with"
        )
    epoch_batches.load_state_dict(copy.deepcopy(saved_state))
    return iter(epoch_batches)


def _skip_batches(
    batches: Iterator[Batch], num_batches: int, data_set_name: str
) -> Iterator[Batch]:
    skipped = sum(1 for _ in islice(batches, num_batches))
    if skipped < num_batches:
        raise DataError(
            f"{data_set_name}: it ended after {skipped} batches, and the run resumes from batch "
            f"{num_batches} of this epoch; "
            "resume with the data set it was started with"
        )
    yield from batches


def _copy_storable_state(iterator_state: dict[str, Any], state_name: str) -> dict[str, Any]:
    """Copy a state to values that a checkpoint can store and a resumed run can load without executing code."""
    buffer = io.BytesIO()
    try:
        torch.save(iterator_state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        raise DataError(
            f"{state_name}: got a state_dict() that cannot be saved ({str(error).splitlines()[0]}), wanted plain "
            "values and tensors in it"
        ) from None


def check_batch(batch: Batch, schema: Schema, *, where: str, max_samples: int) -> None:
    """Raise DataError for the first field of a batch that does not fit `schema`.

    Ids outside their table are detected later, when the batch is looked up.
    """
    if not isinstance(batch, Batch):
        raise DataError(
            f"{where}: got a {type(batch).__name__}, wanted a colonnade.Batch. A DataLoader hands batches on "
            "as they are with batch_size=None"
        )
    size = batch.size
    if not 0 <= size <= max_samples:
        raise DataError(
            f"{where}: got {size} samples, wanted 0 .. {max_samples}: train.batch_size counts the samples of a step "
            "over all ranks. Raise it, or make smaller batches"
        )

    def check_tensor(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not isinstance(value, Tensor):
            raise DataError(
                f"{where}, {name}: got {type(value).__name__}, wanted a tensor {_format_type(shape, dtype)}"
            )
        if tuple(value.shape) != shape or value.dtype != dtype or value.device.type != "cpu":
            got = _format_type(tuple(value.shape), value.dtype)
            on = "" if value.device.type == "cpu" else f" on {value.device}"
            raise DataError(
                f"{where}, {name}: got {got}{on}, wanted {_format_type(shape, dtype)} on the CPU"
            )

    dense = ", ".join(schema.dense)
    check_tensor(f"dense ({dense})", batch.dense, (size, len(schema.dense)), torch.float32)
    if not batch.dense.isfinite().all():
        row, column = (~batch.dense.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"{where}, row {row}, column {schema.dense[column]}: got {float(batch.dense[row, column])}, wanted a "
            "finite number. Replace missing values (0 is common)"
        )
    for column in schema.categorical:
        _check_batch_ids(batch, column, where, check_tensor)
    if batch.label is not None:
        check_tensor("label", batch.label, (size, len(schema.labels)), torch.float32)
    if batch.sample_weight is not None:
        check_tensor("sample_weight", batch.sample_weight, (size,), torch.float32)
    if batch.group is not None:
        check_tensor("group", batch.group, (size,), torch.int64)


def _check_batch_ids(
    batch: Batch,
    column: Column,
    batch_name: str,
    check_tensor: Callable[[str, Any, tuple[int, ...], torch.dtype], None],
) -> None:
    if column.name not in batch.ids:
        raise DataError(
            f"{batch_name}: got ids of {', '.join(batch.ids) or 'no column'}, wanted {column.name!r} too: the schema "
            "has it"
        )
    ids = batch.ids[column.name]
    name = f"column {column.name}"
    if not isinstance(ids, Ids):
        raise DataError(
            f"{batch_name}, {name}: got {type(ids).__name__}, wanted colonnade.Ids(values)"
        )
    if (ids.offsets is None) != (column.kind == "one"):
        wanted = "without offsets: one id per sample" if column.kind == "one" else "with offsets"
        raise DataError(
            f"{batch_name}, {name}: got ids {'without' if ids.offsets is None else 'with'} offsets, wanted them "
            f"{wanted}, as the schema's kind {column.kind!r} says"
        )
    if ids.offsets is None:
        check_tensor(f"{name}, values", ids.values, (batch.size,), torch.int64)
    else:
        check_tensor(f"{name}, offsets", ids.offsets, (batch.size + 1,), torch.int64)
        count = ids.values.numel() if isinstance(ids.values, Tensor) else 0
        check_tensor(f"{name}, values", ids.values, (count,), torch.int64)
        first = int(ids.offsets[0])
        last = int(ids.offsets[-1])
        if first != 0 or last != count or bool((ids.offsets.diff() < 0).any()):
            raise DataError(
                f"{batch_name}, {name}: got offsets that start at {first} and end at {last}, wanted 0 .. {count} (the "
                "number of ids), never decreasing"
            )
    if ids.weights is not None:
        check_tensor(f"{name}, weights", ids.weights, tuple(ids.values.shape), torch.float32)


def _format_type(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def read_rank_batches(
    source: Source,
    batch_size: int,
    mesh: Mesh,
    *,
    channel: str,
    start: Position = START,
    last_batch: LastBatch = "keep",
) -> Iterator[Batch]:
    """Return this rank's batches of a source; every rank gets the same number, and servers get empty ones.

    If the source does not know its number of samples, reading is collective: one all-reduce per batch on the mesh's
    group `channel`, in the thread that uses that group.
    """
    num_samples = source.num_samples
    trainers = mesh.trainers
    if not mesh.is_server:
        batches = source.batches(
            batch_size,
            rank=trainers.rank,
            num_ranks=trainers.num_ranks,
            start=start,
            **build_batch_options(last_batch),
        )
    else:
        num_all = 0 if num_samples is None else num_steps(num_samples, batch_size, last_batch)
        batches = (build_empty_batch(source.schema) for _ in range(start.step, num_all))
    if num_samples is not None:
        return batches
    return pad_with_empty_batches(batches, source.schema, mesh, channel=channel)


def pad_with_empty_batches(
    batches: Iterator[Batch], schema: Schema, mesh: Mesh, *, channel: str
) -> Iterator[Batch]:
    """Yield this rank's batches, then empty ones until every rank has run out.

    Collective: one all-reduce per batch, in the thread that reads. With one rank, yields the batches alone.
    """
    if mesh.num_ranks == 1:
        yield from batches
        return
    last: Batch | None = None
    is_over = False
    while True:
        batch = None if is_over else next(batches, None)
        is_over = batch is None
        has_batch = torch.tensor(0 if is_over else 1)
        if not int(mesh.all_reduce(channel, has_batch)):
            return
        if batch is None:
            yield build_empty_batch(schema, last)
        else:
            last = batch
            yield batch


def build_empty_batch(schema: Schema, optional_fields_like: Batch | None = None) -> Batch:
    """Return a batch without samples, with the columns of `schema` and the optional fields of
    `optional_fields_like`."""
    no_offsets = torch.zeros(1, dtype=torch.int64)
    no_ids = torch.zeros(0, dtype=torch.int64)
    empty = Batch(
        0,
        torch.zeros(0, len(schema.dense)),
        {
            column.name: Ids(no_ids, None if column.kind == "one" else no_offsets.clone())
            for column in schema.categorical
        },
        label=torch.zeros(0, len(schema.labels)),
        state=ENDED,
    )
    if optional_fields_like is not None:
        empty.sample_weight = (
            None
            if optional_fields_like.sample_weight is None
            else optional_fields_like.sample_weight[:0]
        )
        empty.group = None if optional_fields_like.group is None else optional_fields_like.group[:0]
    return empty
