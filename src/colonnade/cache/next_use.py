"""Next use of each row: from the data, read twice, or from a window of batches that a lookahead has read.

From a lookahead: a rank's cached rows serve its own batches alone, so its own reader determines their next use. Nothing
is sent or pinned for it; every rank reads `window` batches ahead of the one whose ids it sends.

From the data (`add_next_use_codes`):

    source = add_next_use_codes(source, epochs=3)

An epoch is read once before it is trained on, and every lookup gets one byte. With these bytes eviction is close to
optimal (Belady's), which counts of past uses are not.

Memory: a byte for each lookup of an epoch, and some 46 bytes for each unique id. Time: the epoch is read twice; with
several ranks each reads all ranks' batches once, because the next use of an id may be on another rank.

Legend: N lookups, T tables, U unique rows of one table in this rank's batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.config.run import LastBatch
from colonnade.data.batches import BatchSource
from colonnade.data.contract import (
    START,
    Position,
    Schema,
    Source,
    Splits,
    build_batch_options,
)
from colonnade.errors import ConfigError
from colonnade.lookup.layout import Lookups


@dataclass(frozen=True, slots=True)
class RowNextUses:
    """Next uses of the rows of one batch, as `Directory.decide_batch` takes them."""

    next_uses: np.ndarray  # (U,) int32: batches until the row's next use; 0: not in the window
    coming: np.ndarray | None  # int64: rows of the last batch in the window, if it is new


class NextUseWindow:
    """Window of coming batches, which finds the next use of each row of one table.

    Call `add_batch_rows` for each batch of a lookahead in order, and `pop_next_uses` for each in order, once the
    `window` batches after it, or all remaining ones, were added. Results depend on the order of batches alone.

    Memory: some 24 bytes for each use in the window and 23 for each unique row.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._batches: deque[np.ndarray] = deque()  # rows of batches not popped yet
        self._newest = _native.RowIndex()  # by row in the window: number of its last use
        # Uses are numbered consecutively. By use in the window: number of the next batch that uses the row, 0: none.
        self._next_batch = np.zeros(0, np.int64)
        self._base = self._first = self._end = (
            0  # numbers of the first stored use, the first in the window, the next to add
        )
        self._num_added = self._num_popped = 0  # batches

    def add_batch_rows(self, batch_row_ids: np.ndarray) -> None:
        """Add the next batch: its rows, (U,) int64, ascending, each once."""
        self._num_added += 1
        before = np.empty(len(batch_row_ids), np.int64)
        self._newest.get(batch_row_ids, before)
        self._next_batch[before[before >= 0] - self._base] = self._num_added
        self._grow_use_buffer(len(batch_row_ids))
        numbers = np.arange(self._end, self._end + len(batch_row_ids))
        self._next_batch[numbers - self._base] = 0
        self._newest.put(batch_row_ids, numbers)
        self._end += len(batch_row_ids)
        self._batches.append(batch_row_ids)

    def pop_next_uses(self) -> RowNextUses:
        """Return the next uses of the rows of the oldest batch that was not popped yet."""
        ids = self._batches.popleft()
        self._num_popped += 1
        first = self._first - self._base
        next_batch = self._next_batch[first : first + len(ids)]
        is_last = next_batch == 0
        self._newest.erase(ids[is_last])
        self._first += len(ids)
        next_uses = np.where(is_last, 0, next_batch - self._num_popped).astype(np.int32)
        is_new = len(self._batches) == self.window
        return RowNextUses(next_uses, self._batches[-1] if is_new and self._batches else None)

    def _grow_use_buffer(self, num_uses: int) -> None:
        """Make room for `num_uses` more uses."""
        if self._end - self._base + num_uses <= len(self._next_batch):
            return
        window_uses = self._next_batch[self._first - self._base : self._end - self._base]
        self._next_batch = np.concatenate(
            [window_uses, np.zeros(len(window_uses) + 2 * num_uses, np.int64)]
        )
        self._base = self._first


PlannedBatch = tuple[Lookups, _native.Plan, Tensor | None]
"""Lookups of a batch, their plan and `Batch.next_use` by unique row."""
TableRows = tuple[np.ndarray, np.ndarray]
"""Rows of one table: their indices in the plan (U,), and their ids, ascending."""


@dataclass(slots=True)
class PreviewedBatch:
    """Batch that a lookahead has read and planned, before its ids are sent."""

    planned: PlannedBatch
    rows: Sequence[TableRows]  # by table
    next_uses: list[RowNextUses | None] = field(
        default_factory=list
    )  # by table, once the batch is returned


def sort_plan_rows_by_id(
    lookup_plan: _native.Plan, table_row_ends: Sequence[int]
) -> list[TableRows]:
    """Sort a plan's unique rows by id within each table. table_row_ends (T + 1,): of the tables' rows in the plan."""
    unique = np.asarray(lookup_plan.unique_ids)
    by_table = []
    for first, last in pairwise(table_row_ends):
        order = np.argsort(unique[first:last])
        by_table.append((order + first, unique[first:last][order]))
    return by_table


def yield_batch_previews(
    batches: Iterable[Batch],
    preview_batch: Callable[[Batch], PreviewedBatch],
    window_sizes: Sequence[int],
) -> Iterator[tuple[Batch, PreviewedBatch]]:
    """Yield batches with their previews, after the window of batches behind them was read. window_sizes: sizes by
    table, all
    equal or 0, for tables without next uses. An error of reading or `preview_batch` is raised that many batches
    early."""
    next_use_windows = [NextUseWindow(window) if window else None for window in window_sizes]
    waiting: deque[tuple[Batch, PreviewedBatch]] = deque()
    max_window = max(window_sizes)

    def pop_preview() -> tuple[Batch, PreviewedBatch]:
        batch, previewed = waiting.popleft()
        previewed.next_uses = [
            None if next_use_window is None else next_use_window.pop_next_uses()
            for next_use_window in next_use_windows
        ]
        return batch, previewed

    for batch in batches:
        own = copy.copy(batch)  # the reader may yield the same object twice
        previewed = preview_batch(own)
        for next_use_window, (_, ids) in zip(next_use_windows, previewed.rows, strict=True):
            if next_use_window is not None:
                next_use_window.add_batch_rows(ids)
        waiting.append((own, previewed))
        if len(waiting) > max_window:
            yield pop_preview()
    while waiting:
        yield pop_preview()


NEVER = 255
FARTHEST = 254
SEQUENCE = 2  # pooling of `_native.Lookups`: none


def encode_distance(distances: np.ndarray) -> np.ndarray:
    """Encode distances of 1 batch or more, (N,), as uint8: the smallest code c with 2^((c - 1) / 8) >= distance."""
    codes = 1 + np.ceil(8 * np.log2(distances) - 1e-9)
    return np.asarray(np.minimum(codes, FARTHEST), np.uint8)


class EpochCodes:
    """Next-use codes of one epoch: call `add_batch` for each batch in order, then `finish_epoch`. Of an id's lookups
    in all ranks' parts of a batch, the first has the code, the others have 0."""

    def __init__(self, schema: Schema, num_ranks: int = 1) -> None:
        self._names = [column.name for column in schema.categorical]
        self._num_ranks = num_ranks
        tables = list(dict.fromkeys(column.table for column in schema.categorical))
        self._tables = torch.tensor(
            [tables.index(column.table) for column in schema.categorical] * num_ranks,
            dtype=torch.int32,
        )
        self._kinds = torch.full((len(self._tables),), SEQUENCE, dtype=torch.uint8)
        self._any_id = torch.zeros(len(tables), dtype=torch.int64)
        self._one_owner = torch.ones(len(tables), dtype=torch.int64)
        # By table and id: the newest lookup, which has no code yet, and the first batch.
        self._newest = [_native.RowIndex() for _ in tables]
        self._first = [_native.RowIndex() for _ in tables]
        self._codes = np.zeros(1 << 20, np.uint8)  # of all lookups, then room to grow
        self._starts = [0]  # lookups before each rank's part of each batch

    def __len__(self) -> int:
        """Return the number of batches."""
        return (len(self._starts) - 1) // self._num_ranks

    def add_batch(self, *parts: Batch) -> None:
        """Add one batch: every rank's part of it, in rank order."""
        step = len(self)
        start = self._starts[-1]
        ids = [part.ids[name].values for part in parts for name in self._names]
        sizes = torch.tensor([0, *map(len, ids)]).cumsum(0)
        end = start + int(sizes[-1])
        self._starts += (start + sizes[len(self._names) :: len(self._names)]).tolist()
        if end > len(self._codes):
            grown = np.zeros(max(end, 2 * len(self._codes)), np.uint8)
            grown[:start] = self._codes[:start]
            self._codes = grown
        lookups = _native.Lookups(torch.cat(ids), sizes, self._tables, self._kinds, 1, None, None)
        plan = _native.make_plan(lookups, self._any_id, self._one_owner)
        unique = torch.as_tensor(plan.unique_ids)
        begins = np.asarray(plan.segment_offsets)[:-1]
        positions = torch.from_numpy(np.asarray(plan.entries)[begins].astype(np.int64) + start)
        bounds = np.asarray(plan.block_offsets).tolist()
        for t, (newest, first) in enumerate(zip(self._newest, self._first, strict=True)):
            table_ids = unique[bounds[t] : bounds[t + 1]].contiguous()
            before = torch.empty_like(table_ids)
            newest.get(table_ids, before)
            is_known = before >= 0
            self._set_codes(before[is_known].numpy(), step)
            newest.put(table_ids, positions[bounds[t] : bounds[t + 1]].contiguous())
            new = table_ids[~is_known]
            first.put(new, torch.full_like(new, step))

    def finish_epoch(self, *, is_last: bool) -> None:
        """Set the codes of ids that are not looked up again in this epoch. is_last: no epoch follows; else the next
        epoch is assumed to have the same order, and otherwise these codes are guesses."""
        for newest, first in zip(self._newest, self._first, strict=True):
            ids, positions = (torch.as_tensor(part) for part in newest.items())
            if is_last:
                self._codes[positions.numpy()] = NEVER
                continue
            steps = torch.empty_like(ids)
            first.get(ids, steps)
            self._set_codes(positions.numpy(), len(self) + steps.numpy())
        self._newest = []
        self._first = []

    def get_batch_codes(
        self, epoch_step: int, batch: Batch, rank: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return `Batch.next_use` of a rank's part of the epoch's batch `epoch_step`."""
        start = self._starts[epoch_step * self._num_ranks + rank]
        codes = {}
        for name in self._names:
            end = start + len(batch.ids[name].values)
            codes[name] = torch.from_numpy(self._codes[start:end])
            start = end
        return codes

    def _set_codes(self, positions: np.ndarray, steps: np.ndarray | int) -> None:
        """Set the codes of lookups `positions` of ids that are looked up next in batches `steps`."""
        batches = (np.searchsorted(self._starts, positions, "right") - 1) // self._num_ranks
        self._codes[positions] = encode_distance(steps - batches)


class NextUseSource:
    """`Source` whose batches have next-use codes of their ids. Built by `add_next_use_codes`."""

    def __init__(self, source: Source, epochs: int) -> None:
        self._source = source
        self._epochs = epochs
        # Of the epoch, batch size, number of ranks and treatment of the last batch.
        self._known: tuple[tuple[int, int, int, LastBatch], EpochCodes] | None = None

    @property
    def schema(self) -> Schema:
        return self._source.schema

    @property
    def num_samples(self) -> int | None:
        return self._source.num_samples

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = START,
        last_batch: LastBatch = "keep",
    ) -> Iterator[Batch]:
        options = build_batch_options(last_batch)
        read = partial(self._source.batches, batch_size, num_ranks=num_ranks, **options)
        return self._add_codes(read, rank, start)

    def _add_codes(
        self, read: partial[Iterator[Batch]], rank: int, start: Position
    ) -> Iterator[Batch]:
        codes = self._compute_epoch_codes(start.epoch, read)
        for step, batch in enumerate(read(rank=rank, start=start), start.step):
            yield dataclasses.replace(batch, next_use=codes.get_batch_codes(step, batch, rank))

    def _compute_epoch_codes(
        self, epoch: int, read_batches: partial[Iterator[Batch]]
    ) -> EpochCodes:
        key = (epoch, *read_batches.args, *read_batches.keywords.values())
        if self._known is None or self._known[0] != key:
            self._known = None  # frees its memory first
            num_ranks = read_batches.keywords["num_ranks"]
            codes = EpochCodes(self.schema, num_ranks)
            parts = [read_batches(rank=r, start=Position(epoch)) for r in range(num_ranks)]
            for batch in zip(*parts, strict=True):
                codes.add_batch(*batch)
            codes.finish_epoch(is_last=epoch >= self._epochs - 1)
            self._known = (key, codes)
        return self._known[1]


def add_next_use_codes(source: Source, *, epochs: int = 1) -> NextUseSource:
    """Add next-use codes to a source; samples and their order stay. epochs: number of epochs that the run will read,
    from 0. Raises ConfigError for a source whose order is unknown before it is read."""
    if epochs < 1:
        raise ConfigError(f"got epochs={epochs}, wanted 1 or more")
    if isinstance(source, BatchSource):
        raise ConfigError(
            "got next-use hints for a data set of your own that yields batches: they need an epoch to be read once "
            "before it is trained on, in the same order, which only files, tensors and generators promise. Leave "
            "data.next_use_hints out, or give each batch's next_use yourself"
        )
    return NextUseSource(source, epochs)


def add_next_use_to_splits(splits: Splits, epochs: int) -> Splits:
    """Add next-use codes to the training data. Each day is assumed to be followed by a similar one."""
    return dataclasses.replace(
        splits,
        train=add_next_use_codes(splits.train, epochs=max(1, epochs)),
        days=tuple(add_next_use_codes(day, epochs=len(splits.days)) for day in splits.days),
    )
