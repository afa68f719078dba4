"""Sources over tabular files: streamed by blocks, shuffled in windows, read ahead by threads.

Shuffling puts the blocks in an order drawn by the epoch's key, combines them into windows of at
least `window` samples (a window ends with the block that fills it), and permutes the samples inside each window.
So a window has fewer samples than `window` plus the largest block, and any position of an epoch is computed from the
lengths alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, AllowInfNan, Strict
from pydantic import Field as Limits

from colonnade.config.validation import Expected, Fraction, validate_dataclass_fields
from colonnade.data.contract import Block, BlockSource, Schema, Splits
from colonnade.data.counter import random_permutation, stream_key
from colonnade.data.tabular.chunk import Chunk, concat_chunks
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.fields import Moment
from colonnade.data.tabular.files import TableFiles
from colonnade.data.tabular.times import parse_time
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.batch import Batch


READ_SAMPLES = 1 << 16
"""Minimal number of samples in a window if nothing is shuffled."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """Order of an epoch: W windows over P blocks."""

    blocks: NDArray[np.int64]  # (P,) indices of the blocks in the order in which they are read
    bounds: NDArray[np.int64]  # (W + 1,): window w is blocks[bounds[w]:bounds[w + 1]]
    starts: NDArray[
        np.int64
    ]  # (W + 1,): window w has samples starts[w] .. starts[w + 1] - 1 of the epoch
    key: int | None  # None: in the order of the file

    def permute_window(self, window: int) -> NDArray[np.int64] | None:
        """Return the permutation of a window's samples; None: unchanged."""
        if self.key is None:
            return None
        size = int(self.starts[window + 1] - self.starts[window])
        return random_permutation(size, stream_key(self.key, window))

    def find_window(self, sample: int) -> int:
        """Return the window that contains the `sample`-th sample of the epoch."""
        return int(np.searchsorted(self.starts, sample, side="right")) - 1


def plan_shuffle_windows(
    block_lengths: NDArray[np.int64], window_samples: int, shuffle_key: int | None
) -> WindowPlan:
    """Plan the windows of an epoch. `block_lengths` (P,): samples of each block, 1 or more. `shuffle_key` None: not
    shuffled."""
    if shuffle_key is None:
        blocks = np.arange(len(block_lengths))
        min_samples = READ_SAMPLES
    else:
        blocks = random_permutation(len(block_lengths), stream_key(shuffle_key))
        min_samples = window_samples
    ends = np.cumsum(block_lengths[blocks])
    bounds = [0]
    while bounds[-1] < len(blocks):
        start = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        last = int(np.searchsorted(ends, start + min_samples, side="left"))
        bounds.append(min(last, len(blocks) - 1) + 1)
    starts = np.concatenate([[0], ends])[bounds]
    return WindowPlan(blocks, np.array(bounds), starts.astype(np.int64), shuffle_key)


Cutoff = (
    Annotated[int, Strict()]
    | Annotated[float, Strict(), AllowInfNan(False)]
    | Annotated[Moment, AfterValidator(lambda text: (parse_time(text), text)[1])]
)
"""Number or ISO time from which on samples are held out."""
CUTOFF = Expected("a number, or a time such as '2024-05-31' or '2024-05-31T12:00:00'")


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Range [low, high) of split keys; selects the samples of a split."""

    low: float
    high: float

    def select_rows(self, keys: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the rows in the range, in order. `keys` (S,): `Chunk.split_key`."""
        return np.flatnonzero((keys >= self.low) & (keys < self.high))


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Samples of a part of the data."""

    pieces: NDArray[np.int64]  # (P, 3): block, first and last-plus-one sample of it
    key_range: KeyRange | None = None  # None: all samples; else pieces count only samples in it

    def read_selected(
        self, files: TableFiles, read_block: Callable[[int], NDArray]
    ) -> Iterator[NDArray]:
        """Yield what `read_block` returns of each block, (samples of the block, ...), for the selected samples."""
        for block, begin, end in self.pieces.tolist():
            values = read_block(block)
            if self.key_range is not None:
                values = values[self.key_range.select_rows(files.read_split_keys(block))]
            yield values[begin:end]


@dataclass(frozen=True, slots=True, eq=False)
class TableSource(BlockSource):
    """Source over samples of tabular files. Holds at most two windows in memory, and the blocks of one.

    Every rank reads all blocks of a window and yields its own samples of each batch.
    """

    files: TableFiles
    pieces: NDArray[np.int64]  # (P, 3): block, first and last-plus-one sample of it
    key_range: KeyRange | None = None  # None: all samples; else pieces count only samples in it
    shuffle_window: int = 0  # samples; 0: in the order of the files
    seed: int = 0
    threads: int = 1

    @property
    def file_schema(self) -> FileSchema:
        return self.files.file_schema

    @property
    def schema(self) -> Schema:
        return self.file_schema.schema

    @property
    def num_samples(self) -> int:
        return int((self.pieces[:, 2] - self.pieces[:, 1]).sum())

    def read_epoch(self, epoch: int, blocks: Iterator[Block]) -> Iterator[Batch]:
        first = next(blocks, None)
        if first is None:
            return
        names = [column.name for column in self.schema.categorical]
        plan = self.plan_epoch(epoch)
        with ThreadPoolExecutor(self.threads, "table") as threads:
            # The batches of `window` are yielded while the futures in `upcoming` read the next one.
            window = plan.find_window(min(first[0], self.num_samples - 1))
            chunk = self._wait_for_window(self._start_reading_window(threads, plan, window))
            order = plan.permute_window(window)
            upcoming = self._start_reading_window(threads, plan, window + 1)
            try:
                for begin, end in itertools.chain([first], blocks):
                    parts: list[Chunk] = []
                    while True:
                        low = int(plan.starts[window])
                        high = int(plan.starts[window + 1])
                        part = _select_samples(
                            chunk, order, max(begin, low) - low, min(end, high) - low
                        )
                        if part.size or (end <= high and not parts):
                            parts.append(part)
                        if end <= high:
                            break
                        window += 1
                        chunk = self._wait_for_window(upcoming)
                        order = plan.permute_window(window)
                        upcoming = self._start_reading_window(threads, plan, window + 1)
                    yield concat_chunks(parts).to_batch(names)
            finally:
                for future in upcoming:
                    future.cancel()

    def plan_epoch(self, epoch: int) -> WindowPlan:
        """Plan the order in which `epoch` reads the pieces."""
        lengths = self.pieces[:, 2] - self.pieces[:, 1]
        key = stream_key(self.seed, epoch) if self.shuffle_window else None
        return plan_shuffle_windows(lengths, self.shuffle_window, key)

    def _start_reading_window(
        self, threads: ThreadPoolExecutor, window_plan: WindowPlan, window_index: int
    ) -> list[Future[Chunk]]:
        """Start reading the pieces of a window; return no futures after the last window."""
        if window_index + 1 >= len(window_plan.bounds):
            return []
        pieces = window_plan.blocks[
            window_plan.bounds[window_index] : window_plan.bounds[window_index + 1]
        ]
        return [threads.submit(self._read_piece, int(piece)) for piece in pieces]

    def _wait_for_window(self, futures: list[Future[Chunk]]) -> Chunk:
        return concat_chunks([future.result() for future in futures])

    def _read_piece(self, piece_index: int) -> Chunk:
        block, begin, end = (int(number) for number in self.pieces[piece_index])
        chunk = self.files.read_chunk(block)
        if self.key_range is not None:
            assert chunk.split_key is not None
            return chunk.gather_rows(self.key_range.select_rows(chunk.split_key)[begin:end])
        return chunk.slice_rows(begin, end)


def _select_samples(chunk: Chunk, order: NDArray[np.int64] | None, begin: int, end: int) -> Chunk:
    begin = min(begin, end)
    if order is None:
        return chunk.slice_rows(begin, end)
    return chunk.gather_rows(order[begin:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """Options of readers of all formats: of the schema, of splitting samples and of reading them.

    `open_parquet` describes them."""

    schema: Any = None
    label: str | None = None
    validation: Any = None
    test: Any = None
    validation_fraction: Fraction = 0.0
    test_fraction: Fraction = 0.0
    split_by: Annotated[str | None, Expected("the name of a column")] = None
    order_by: Annotated[str | None, Expected("the name of a column")] = None
    validation_after: Annotated[Cutoff | None, CUTOFF] = None
    test_after: Annotated[Cutoff | None, CUTOFF] = None
    days: bool = False
    group_by: Annotated[str | None, Expected("the name of the field of users")] = None
    shuffle_window: Annotated[int, Limits(ge=0)] = 0
    seed: Annotated[int, Limits(ge=0)] = 0
    threads: Annotated[int, Limits(ge=1)] = 1
    join: Annotated[
        Mapping[str, Any] | None, Expected("tables by key column, e.g. {user_id: users.csv}")
    ] = None

    def __post_init__(self) -> None:
        validate_dataclass_fields(self, message_subject="")
        if self.schema is not None and self.label is not None:
            raise ConfigError(
                f"got both schema and label={self.label!r}; the schema says which field is the label"
            )
        if self.test_fraction + self.validation_fraction >= 1:
            raise ConfigError(
                f"got test_fraction={self.test_fraction} and validation_fraction={self.validation_fraction}, "
                "wanted less than 1 together: nothing is left to train on"
            )
        if self.days and (self.test_fraction + self.validation_fraction or self.order_by):
            raise ConfigError(
                "got days and a fraction or column to hold out by, wanted one of them: day by day, a model is tested "
                "on the next day before it trains on it"
            )
        if self.days and self.group_by is not None:
            raise ConfigError(
                f"got days and group_by={self.group_by!r}, wanted one of them: a user's ratings are trained on together"
            )
        if self.order_by is not None and self.split_by is not None:
            raise ConfigError(
                f"got split_by={self.split_by!r} and order_by={self.order_by!r}, wanted one of them: samples are "
                "assigned by the hash of a value, or by its order"
            )
        for part in ("test", "validation"):
            cutoff = getattr(self, f"{part}_after")
            if cutoff is None:
                continue
            if self.order_by is None:
                raise ConfigError(
                    f"got {part}_after={cutoff!r} without order_by, wanted the column of times or numbers that it is "
                    "about: order_by=COLUMN"
                )
            for other in (part, f"{part}_fraction"):
                if getattr(self, other):
                    raise ConfigError(
                        f"got both {part}_after={cutoff!r} and {other}={getattr(self, other)!r}, wanted one of them"
                    )

    @property
    def split_column(self) -> str | None:
        """Name of the column that assigns samples to parts; None: their place in the files does."""
        return self.split_by or self.order_by

    def select_parts(self, files: TableFiles) -> tuple[Selection, Selection, Selection]:
        """Select the samples for training, validation and testing. Reads the column of the split once, if any."""
        lengths = files.lengths
        if self.split_column is None:
            total = int(lengths.sum())
            stop = total - round(total * self.test_fraction)
            middle = stop - round(total * self.validation_fraction)
            bounds = ((0, middle), (middle, stop), (stop, total))
            pieces = [_list_block_pieces(lengths, *bound) for bound in bounds]
            return Selection(pieces[0]), Selection(pieces[1]), Selection(pieces[2])
        keys: Iterable[NDArray[np.float64]] = map(files.read_split_keys, range(len(lengths)))
        if self.order_by is None:
            high = 1 - self.test_fraction
            low = high - self.validation_fraction
        else:
            keys = list(keys)
            low, high = self._find_cutoffs(files, np.sort(np.concatenate(keys)))
        ranges = KeyRange(-math.inf, low), KeyRange(low, high), KeyRange(high, math.inf)
        selected: list[list[tuple[int, int, int]]] = [[] for _ in ranges]
        for block, block_keys in enumerate(keys):
            for key_range, range_pieces in zip(ranges, selected, strict=True):
                if count := len(key_range.select_rows(block_keys)):
                    range_pieces.append((block, 0, count))
        train, validation, test = (
            Selection(np.array(range_pieces, np.int64).reshape(-1, 3), key_range)
            for key_range, range_pieces in zip(ranges, selected, strict=True)
        )
        return train, validation, test

    def _find_cutoffs(
        self, files: TableFiles, sorted_keys: NDArray[np.float64]
    ) -> tuple[float, float]:
        """Return the keys from which on samples validate and test. Samples with equal keys are in one part."""
        total = len(sorted_keys)
        cutoffs: list[float] = [math.inf]
        for part in ("test", "validation"):
            cutoff = getattr(self, f"{part}_after")
            end = int(np.searchsorted(sorted_keys, cutoffs[-1]))
            if cutoff is None:
                count = round(total * getattr(self, f"{part}_fraction"))
                key = float(sorted_keys[max(end - count, 0)]) if count else cutoffs[-1]
            else:
                key = float(parse_time(cutoff) if isinstance(cutoff, str) else cutoff)
                if int(np.searchsorted(sorted_keys, key)) >= end:
                    raise ConfigError(
                        f"{files.files[0].path}: got {part}_after={cutoff!r}, wanted one with samples at or after it "
                        f"in {self.order_by}{' and before the test part' if end < total else ''}"
                    )
            cutoffs.append(key)
        return cutoffs[2], cutoffs[1]

    def split_files(
        self,
        files: TableFiles,
        parts: Sequence[Selection],
        days: Sequence[int],
        validation: TableFiles | None,
        test: TableFiles | None,
    ) -> Splits:
        """Split files into sources. `parts`: as select_parts returns them. `days`: the number of files of each day.
        `validation`, `test`: separate files, preferred over the fractions."""
        held_out = [
            None if part is None else self._select_range(part) for part in (validation, test)
        ]
        validation_source, test_source = held_out
        by_day: tuple[TableSource, ...] = ()
        if self.days:
            ends = np.concatenate([[0], np.cumsum(files.lengths)])[files.bounds]
            ends = ends[np.cumsum([0, *days])]
            by_day = tuple(
                self._select_range(files, int(begin), int(end), shuffled=True)
                for begin, end in itertools.pairwise(ends)
            )
        train, validation_part, test_part = (
            self._build_source(files, part, shuffled=i == 0) for i, part in enumerate(parts)
        )
        if train.num_samples == 0:
            raise ConfigError(
                f"{files.files[0].path}: the fractions leave no sample to train on, of {int(files.lengths.sum())}; "
                "hold out less"
            )
        return Splits(
            train,
            validation_source or (validation_part if validation_part.num_samples else None),
            test_source or (test_part if test_part.num_samples else None),
            by_day,
        )

    def _select_range(
        self, files: TableFiles, begin: int = 0, end: int | None = None, *, shuffled: bool = False
    ) -> TableSource:
        """Return a source over samples begin .. end-1 in the order of the files; `end` None: all after `begin`."""
        part = Selection(_list_block_pieces(files.lengths, begin, end))
        return self._build_source(files, part, shuffled)

    def _build_source(self, files: TableFiles, part: Selection, shuffled: bool) -> TableSource:
        window = self.shuffle_window if shuffled else 0
        return TableSource(files, part.pieces, part.key_range, window, self.seed, self.threads)


def _list_block_pieces(
    block_lengths: NDArray[np.int64], first_sample: int, end_sample: int | None
) -> NDArray[np.int64]:
    """Return the pieces of blocks (P, 3) that contain samples begin .. end-1; `end_sample` None: all."""
    ends = np.cumsum(block_lengths)
    starts = ends - block_lengths
    total = int(ends[-1]) if len(ends) else 0
    low = np.maximum(starts, first_sample) - starts
    high = np.minimum(ends, total if end_sample is None else end_sample) - starts
    blocks = np.flatnonzero(low < high)
    return np.stack([blocks, low[blocks], high[blocks]], axis=1).astype(np.int64)
