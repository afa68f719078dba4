"""Sources over tabular files: streamed by blocks, shuffled in windows, read ahead by threads.

Shuffling puts the blocks in an order drawn by the epoch's key, combines them into windows of at
least `window` samples (a window ends with the block that fills it), and permutes the samples inside each window.
So a window has fewer samples than `window` plus the largest block, and any position of an epoch is computed from the
lengths alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field as Limits

from colonnade.config.validation import Expected, Fraction, validate_dataclass_fields
from colonnade.data.contract import Block, BlockSource, Schema, Splits
from colonnade.data.counter import mix_words, random_permutation, stream_key
from colonnade.data.tabular.chunk import Chunk, concat_chunks
from colonnade.data.tabular.declaration import FileSchema
from colonnade.data.tabular.files import TableFiles
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.batch import Batch


Opener = TypeVar("Opener", bound=Callable[..., Splits])
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


SPLIT_KEY = 0x53504C49
"""Constant key of the hash that assigns keys to splits, so that the split does not depend on the run's seed."""


@dataclass(frozen=True, slots=True)
class HashRange:
    """Range [low, high) of [0, 1) of hashed split keys; selects the samples of a split."""

    low: float
    high: float

    def select_rows(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows in the range, in order. `keys` (S,): `Chunk.split_key`."""
        random_words = mix_words(keys.astype(np.uint64) + np.uint64(stream_key(SPLIT_KEY)))
        hashed = (random_words >> np.uint64(11)) * 2.0**-53  # exact, so never 1: no sample is lost
        return np.flatnonzero((hashed >= self.low) & (hashed < self.high))


@dataclass(frozen=True, slots=True, eq=False)
class TableSource(BlockSource):
    """Source over samples of tabular files. Holds at most two windows in memory, and the blocks of one.

    Every rank reads all blocks of a window and yields its own samples of each batch.
    """

    files: TableFiles
    pieces: NDArray[np.int64]  # (P, 3): block, first and last-plus-one sample of it
    hash_range: HashRange | None = None  # None: all samples; else pieces count only samples in it
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
        if self.hash_range is not None:
            assert chunk.split_key is not None
            return chunk.gather_rows(self.hash_range.select_rows(chunk.split_key)[begin:end])
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
    validation: str | Path | None = None
    test: str | Path | None = None
    validation_fraction: Fraction = 0.0
    test_fraction: Fraction = 0.0
    split_by: Annotated[str | None, Expected("the name of a column")] = None
    days: bool = False
    shuffle_window: Annotated[int, Limits(ge=0)] = 0
    seed: Annotated[int, Limits(ge=0)] = 0
    threads: Annotated[int, Limits(ge=1)] = 1

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
        if self.days and self.test_fraction + self.validation_fraction:
            raise ConfigError(
                "got days and a fraction to hold out, wanted one of them: day by day, a model is tested on the "
                "next day before it trains on it"
            )

    def count_train_samples(self, total: int) -> int:
        """Return the number of first samples that may train: all except those held out at the end by a fraction."""
        if self.split_by is not None:
            return total
        stop = total - round(total * self.test_fraction)
        return stop - round(total * self.validation_fraction)

    def split_files(
        self,
        files: TableFiles,
        days: Sequence[Sequence[Path]],
        validation: TableFiles | None,
        test: TableFiles | None,
    ) -> Splits:
        """Split files into sources. `days`: the files grouped by day. `validation`, `test`: separate files, preferred
        over the fractions."""
        total = int(files.lengths.sum())
        held_out = [
            None if part is None else self._select_range(part) for part in (validation, test)
        ]
        validation_source, test_source = held_out
        by_day: tuple[TableSource, ...] = ()
        if self.days:
            ends = np.concatenate([[0], np.cumsum(files.lengths)])[files.bounds]
            ends = ends[np.cumsum([0, *map(len, days)])]
            by_day = tuple(
                self._select_range(files, int(begin), int(end), shuffled=True)
                for begin, end in itertools.pairwise(ends)
            )
        if self.split_by is not None:
            middle = 1 - self.test_fraction
            low = middle - self.validation_fraction
            ranges = HashRange(0.0, low), HashRange(low, middle), HashRange(middle, 1.0)
            train, validation_part, test_part = self._split_by_hash(files, ranges)
        else:
            stop = total - round(total * self.test_fraction)
            num_train = self.count_train_samples(total)
            train = self._select_range(files, 0, num_train, shuffled=True)
            validation_part = self._select_range(files, num_train, stop)
            test_part = self._select_range(files, stop)
        if train.num_samples == 0:
            raise ConfigError(
                f"{days[0][0]}: the fractions leave no sample to train on, of {total}; hold out less"
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
        pieces = _list_block_pieces(files.lengths, begin, end)
        return self._build_source(files, pieces, None, shuffled)

    def _split_by_hash(
        self, files: TableFiles, hash_ranges: tuple[HashRange, ...]
    ) -> list[TableSource]:
        """Return a source for each range of hashed split keys; only the first is shuffled.

        Reads every key once, to count the samples.
        """
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in hash_ranges]
        for block in range(len(files.lengths)):
            keys = files.read_split_keys(block)
            for hash_range, range_pieces in zip(hash_ranges, pieces, strict=True):
                if count := len(hash_range.select_rows(keys)):
                    range_pieces.append((block, 0, count))
        arrays = [np.array(range_pieces, np.int64).reshape(-1, 3) for range_pieces in pieces]
        return [
            self._build_source(files, array, hash_range, shuffled=i == 0)
            for i, (hash_range, array) in enumerate(zip(hash_ranges, arrays, strict=True))
        ]

    def _build_source(
        self,
        files: TableFiles,
        pieces: NDArray[np.int64],
        hash_range: HashRange | None,
        shuffled: bool,
    ) -> TableSource:
        window = self.shuffle_window if shuffled else 0
        return TableSource(files, pieces, hash_range, window, self.seed, self.threads)


def with_reader_options(opener: Opener) -> Opener:
    """Decorate a function whose `**options` are those of ReaderOptions: list them in its signature."""
    own = signature(opener)
    path, *others = own.parameters.values()
    shared = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(ReaderOptions)
    ]
    opener.__signature__ = own.replace(parameters=[path, *shared, *others[:-1]])  # type: ignore[attr-defined]
    return opener


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
