"""Next use of each row: from the data, read twice, or from a window of batches that a lookahead has read.

From a lookahead: a rank's copies serve its own batches alone, so its own reader says when they are used again:
nothing travels for it, nothing is pinned, and every rank reads as many batches before it routes one.

From the data (`with_next_use`):

    source = with_next_use(source, epochs=3)

An epoch is read once before it is trained on, and every lookup gets one byte. With it the rows that stay are
nearly those of the best choice there is (Belady's), which no count of past uses comes near.

Memory: a byte for each lookup of an epoch, and some 46 bytes for each different id. Time: the epoch is read twice; with
several ranks each reads all ranks' batches once, for an id's next use may be another's.

Legend: N lookups, T tables, U unique rows of one table in this rank's batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.batch import Batch
from colonnade.data.batches import BatchSource
from colonnade.data.contract import START, Position, Schema, Source, Splits
from colonnade.errors import ConfigError
from colonnade.lookup.layout import Lookups


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of one batch, as `Directory.step` takes it."""

    next_uses: (
        np.ndarray
    )  # (U,) int32: batches until each of its rows is used again; 0: not in sight
    coming: np.ndarray | None  # int64: rows of the last batch in sight, where that is new


class Foresight:
    """Of one table. `see` is called of each batch of a lookahead in order; `next` for each in order, too, when the
    `window` batches after it have been seen, or all that are left. A pure function of the order of batches.

    Memory: some 24 bytes for each use in sight and 23 for each different row.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._batches: deque[np.ndarray] = deque()  # rows of those that `next` is still to tell of
        self._newest = _native.RowIndex()  # of each row in sight: the number of its last use there
        # Uses are numbered through. Of those in sight: the number of the batch that uses the row next, 0: none yet.
        self._following = np.zeros(0, np.int64)
        self._base = self._first = self._end = (
            0  # number of the first here, the first in sight, the next one
        )
        self._seen = self._told = 0  # batches

    def see(self, ids: np.ndarray) -> None:
        """The next batch: its rows (U,) int64, ascending, each once."""
        self._seen += 1
        before = np.empty(len(ids), np.int64)
        self._newest.get(ids, before)
        self._following[before[before >= 0] - self._base] = self._seen
        self._make_room(len(ids))
        numbers = np.arange(self._end, self._end + len(ids))
        self._following[numbers - self._base] = 0
        self._newest.put(ids, numbers)
        self._end += len(ids)
        self._batches.append(ids)

    def next(self) -> Foreseen:
        """Of the oldest batch that was seen and not told of."""
        ids = self._batches.popleft()
        self._told += 1
        first = self._first - self._base
        following = self._following[first : first + len(ids)]
        is_last = following == 0
        self._newest.erase(ids[is_last])
        self._first += len(ids)
        next_uses = np.where(is_last, 0, following - self._told).astype(np.int32)
        is_new = len(self._batches) == self.window
        return Foreseen(next_uses, self._batches[-1] if is_new and self._batches else None)

    def _make_room(self, uses: int) -> None:
        """For so many more."""
        if self._end - self._base + uses <= len(self._following):
            return
        here = self._following[self._first - self._base : self._end - self._base]
        self._following = np.concatenate([here, np.zeros(len(here) + 2 * uses, np.int64)])
        self._base = self._first


Planned = tuple[Lookups, _native.Plan, Tensor | None]
"""Lookups of a batch, their plan and `Batch.next_use` by unique row."""
Rows = tuple[np.ndarray, np.ndarray]
"""Of one table: where they are in the plan (U,), and their ids, ascending."""


@dataclass(slots=True)
class Seen:
    """What is known of a batch before it is routed."""

    planned: Planned
    rows: Sequence[Rows]  # by table
    told: list[Foreseen | None] = field(default_factory=list)  # by table, once it is handed out


def rows_of(plan: _native.Plan, ends: Sequence[int]) -> list[Rows]:
    """By table. ends (T + 1,): where its rows are in the plan."""
    unique = np.asarray(plan.unique_ids)
    found = []
    for first, last in pairwise(ends):
        order = np.argsort(unique[first:last])
        found.append((order + first, unique[first:last][order]))
    return found


def in_sight(
    batches: Iterable[Batch],
    see: Callable[[Batch], Seen],
    windows: Sequence[int],
) -> Iterator[tuple[Batch, Seen]]:
    """Yield the same batches, and what is known of each. windows: by table, one number, or 0: nothing of it has to be
    known. An error of reading, or of `see`, is raised so many batches earlier."""
    sights = [Foresight(window) if window else None for window in windows]
    waiting: deque[tuple[Batch, Seen]] = deque()
    most = max(windows)

    def next_known() -> tuple[Batch, Seen]:
        batch, facts = waiting.popleft()
        facts.told = [None if sight is None else sight.next() for sight in sights]
        return batch, facts

    for batch in batches:
        own = copy.copy(batch)  # the caller may hand the same one twice
        facts = see(own)
        for sight, (_, ids) in zip(sights, facts.rows, strict=True):
            if sight is not None:
                sight.see(ids)
        waiting.append((own, facts))
        if len(waiting) > most:
            yield next_known()
    while waiting:
        yield next_known()


NEVER, FARTHEST = 255, 254
SEQUENCE = 2  # of `_native.Lookups`: lookups by themselves


def code_of(batches: np.ndarray) -> np.ndarray:
    """(N,) distances of 1 batch or more -> (N,) uint8 codes: the first c with 2^((c - 1) / 8) >= distance."""
    codes = 1 + np.ceil(8 * np.log2(batches) - 1e-9)
    return np.minimum(codes, FARTHEST).astype(np.uint8)


class EpochCodes:
    """The codes of one epoch, made by `add` of each batch in order, then `end`. Of the lookups of an id in a batch, all
    ranks' parts of it together, the first has the code, the others 0."""

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
        self._undealt = torch.ones(len(tables), dtype=torch.int64)
        # By table and id: the newest lookup, whose code is still to come, and the first batch.
        self._newest = [_native.RowIndex() for _ in tables]
        self._first = [_native.RowIndex() for _ in tables]
        self._codes = np.zeros(1 << 20, np.uint8)  # of all lookups, then room to grow
        self._starts = [0]  # lookups before each rank's part of each batch

    def __len__(self) -> int:
        """Batches."""
        return (len(self._starts) - 1) // self._num_ranks

    def add(self, *parts: Batch) -> None:
        """One batch: every rank's part of it, in their order."""
        step, start = len(self), self._starts[-1]
        ids = [part.ids[name].values for part in parts for name in self._names]
        sizes = torch.tensor([0, *map(len, ids)]).cumsum(0)
        end = start + int(sizes[-1])
        self._starts += (start + sizes[len(self._names) :: len(self._names)]).tolist()
        if end > len(self._codes):
            grown = np.zeros(max(end, 2 * len(self._codes)), np.uint8)
            grown[:start] = self._codes[:start]
            self._codes = grown
        lookups = _native.Lookups(torch.cat(ids), sizes, self._tables, self._kinds, 1, None, None)
        plan = _native.make_plan(lookups, self._any_id, self._undealt)
        unique = torch.as_tensor(plan.unique_ids)
        begins = np.asarray(plan.segment_offsets)[:-1]
        places = torch.from_numpy(np.asarray(plan.entries)[begins].astype(np.int64) + start)
        bounds = np.asarray(plan.block_offsets).tolist()
        for t, (newest, first) in enumerate(zip(self._newest, self._first, strict=True)):
            mine = unique[bounds[t] : bounds[t + 1]].contiguous()
            before = torch.empty_like(mine)
            newest.get(mine, before)
            is_known = before >= 0
            self._say(before[is_known].numpy(), step)
            newest.put(mine, places[bounds[t] : bounds[t + 1]].contiguous())
            new = mine[~is_known]
            first.put(new, torch.full_like(new, step))

    def end(self, *, is_last: bool) -> None:
        """No more batches. `is_last`: of the epochs; else the next one is taken to have the same order, and where it
        has not, codes of ids looked up for the last time in this one are guesses."""
        for newest, first in zip(self._newest, self._first, strict=True):
            ids, places = (torch.as_tensor(part) for part in newest.items())
            if is_last:
                self._codes[places.numpy()] = NEVER
                continue
            steps = torch.empty_like(ids)
            first.get(ids, steps)
            self._say(places.numpy(), len(self) + steps.numpy())
        self._newest, self._first = [], []

    def of(self, step: int, batch: Batch, rank: int = 0) -> dict[str, torch.Tensor]:
        """`Batch.next_use` of a rank's part of the epoch's batch `step`."""
        start, found = self._starts[step * self._num_ranks + rank], {}
        for name in self._names:
            end = start + len(batch.ids[name].values)
            found[name] = torch.from_numpy(self._codes[start:end])
            start = end
        return found

    def _say(self, places: np.ndarray, steps: np.ndarray | int) -> None:
        """The ids of the lookups at `places` are looked up next in batch `steps`."""
        here = (np.searchsorted(self._starts, places, "right") - 1) // self._num_ranks
        self._codes[places] = code_of(steps - here)


class NextUseSource:
    """A `Source` whose batches say when their ids are looked up next. Built by `with_next_use`."""

    def __init__(self, source: Source, epochs: int) -> None:
        self._source = source
        self._epochs = epochs
        self._known: tuple[int, int, int, EpochCodes] | None = None  # epoch, batch size, ranks

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
    ) -> Iterator[Batch]:
        batches = self._source.batches(batch_size, rank=rank, num_ranks=num_ranks, start=start)
        return self._told(batches, batch_size, rank, num_ranks, start)

    def _told(
        self, batches: Iterator[Batch], batch_size: int, rank: int, num_ranks: int, start: Position
    ) -> Iterator[Batch]:
        codes = self._codes_of(start.epoch, batch_size, num_ranks)
        for step, batch in enumerate(batches, start.step):
            yield dataclasses.replace(batch, next_use=codes.of(step, batch, rank))

    def _codes_of(self, epoch: int, batch_size: int, num_ranks: int) -> EpochCodes:
        if self._known is None or self._known[:3] != (epoch, batch_size, num_ranks):
            self._known = None  # its memory first
            codes = EpochCodes(self.schema, num_ranks)
            parts = [
                self._source.batches(batch_size, rank=r, num_ranks=num_ranks, start=Position(epoch))
                for r in range(num_ranks)
            ]
            for batch in zip(*parts, strict=True):
                codes.add(*batch)
            codes.end(is_last=epoch >= self._epochs - 1)
            self._known = (epoch, batch_size, num_ranks, codes)
        return self._known[3]


def with_next_use(source: Source, *, epochs: int = 1) -> NextUseSource:
    """The same samples in the same order. `epochs`: how many the run will read, from 0. Raises ConfigError for a source
    whose order nobody knows before it is read."""
    if epochs < 1:
        raise ConfigError(f"got epochs={epochs}, wanted 1 or more")
    if isinstance(source, BatchSource):
        raise ConfigError(
            "got next-use hints for a data set of your own that yields batches: they need an epoch to be read once "
            "before it is trained on, in the same order, which only files, tensors and generators promise. Leave "
            "data.next_use_hints out, or give each batch's next_use yourself"
        )
    return NextUseSource(source, epochs)


def splits_with_next_use(data: Splits, epochs: int) -> Splits:
    """What is trained on tells when ids are looked up next. A day is taken to be followed by one alike."""
    return dataclasses.replace(
        data,
        train=with_next_use(data.train, epochs=max(1, epochs)),
        days=tuple(with_next_use(day, epochs=len(data.days)) for day in data.days),
    )
