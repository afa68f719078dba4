"""Samples of files in batches: streamed by blocks, shuffled in windows, read ahead by threads.

Shuffled: the blocks are put in an order drawn by the epoch's key, put together into windows of at
least `window` samples (a window closes with the block that fills it), and permuted inside each window.
So a window holds fewer than `window` samples more than the largest block, and any position of an epoch is found by
arithmetic on lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field as Limits

from colonnade.config.validation import Expected, Fraction, validate_fields
from colonnade.data.contract import START, Position, Schema, Splits, rank_blocks
from colonnade.data.counter import mix64, permutation, stream_key
from colonnade.data.tabular.chunk import Chunk, join
from colonnade.data.tabular.declaration import Declaration
from colonnade.data.tabular.files import Files
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.batch import Batch


READ_SAMPLES = 1 << 16
"""Samples that are read together, at least, where nothing is shuffled."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """W windows over P blocks."""

    blocks: NDArray[np.int64]  # (P,) numbers of the blocks in the order in which they are read
    bounds: NDArray[np.int64]  # (W + 1,): window w is blocks[bounds[w]:bounds[w + 1]]
    starts: NDArray[
        np.int64
    ]  # (W + 1,): its samples are starts[w] .. starts[w + 1] - 1 of the epoch
    key: int | None  # None: in the order of the file

    def order(self, window: int) -> NDArray[np.int64] | None:
        """Which of the window's samples comes at each place; None: as they are."""
        if self.key is None:
            return None
        size = int(self.starts[window + 1] - self.starts[window])
        return permutation(size, stream_key(self.key, window))

    def at(self, sample: int) -> int:
        """The window that holds the `sample`-th sample of the epoch."""
        return int(np.searchsorted(self.starts, sample, side="right")) - 1


def windows(lengths: NDArray[np.int64], window: int, key: int | None) -> Windows:
    """Of one epoch. `lengths` (P,): samples of each block, 1 or more. `key` None: not shuffled."""
    if key is None:
        blocks, least = np.arange(len(lengths)), READ_SAMPLES
    else:
        blocks, least = permutation(len(lengths), stream_key(key)), window
    ends = np.cumsum(lengths[blocks])
    bounds = [0]
    while bounds[-1] < len(blocks):
        begun = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        last = int(np.searchsorted(ends, begun + least, side="left"))
        bounds.append(min(last, len(blocks) - 1) + 1)
    starts = np.concatenate([[0], ends])[bounds]
    return Windows(blocks, np.array(bounds), starts.astype(np.int64), key)


SPLIT_KEY = 0x53504C49
"""Which split a key goes to does not depend on the run's seed."""


@dataclass(frozen=True, slots=True)
class Share:
    """Samples whose `Chunk.part` falls, hashed, into [low, high) of [0, 1)."""

    low: float
    high: float

    def rows(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which samples, in order. `keys` (S,): `Chunk.part`."""
        words = mix64(keys.astype(np.uint64) + np.uint64(stream_key(SPLIT_KEY)))
        place = (words >> np.uint64(11)) * 2.0**-53  # exact, so never 1: no sample falls out
        return np.flatnonzero((place >= self.low) & (place < self.high))


@dataclass(frozen=True, slots=True, eq=False)
class TableSource:
    """Some samples of some files. Holds at most two windows at a time, and the blocks that make one.

    Every rank reads all of a window's blocks and takes its own samples of each batch.
    """

    files: Files
    pieces: NDArray[np.int64]  # (P, 3): block, first and last-plus-one sample of it
    share: Share | None = None  # None: all samples; else pieces count those of the share
    shuffle_window: int = 0  # samples; 0: in the order of the files
    seed: int = 0
    threads: int = 1

    @property
    def declaration(self) -> Declaration:
        return self.files.declaration

    @property
    def schema(self) -> Schema:
        return self.declaration.schema

    @property
    def num_samples(self) -> int:
        return int((self.pieces[:, 2] - self.pieces[:, 1]).sum())

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = START,
    ) -> Iterator[Batch]:
        blocks = rank_blocks(
            self.num_samples, batch_size, rank=rank, num_ranks=num_ranks, start=start
        )
        return self._batches(blocks, self.windows(start.epoch), start.step * batch_size)

    def windows(self, epoch: int) -> Windows:
        """The order in which `epoch` reads the pieces."""
        lengths = self.pieces[:, 2] - self.pieces[:, 1]
        key = stream_key(self.seed, epoch) if self.shuffle_window else None
        return windows(lengths, self.shuffle_window, key)

    def _batches(
        self, blocks: Iterator[tuple[int, int]], plan: Windows, first: int
    ) -> Iterator[Batch]:
        names = [column.name for column in self.schema.categorical]
        if first >= self.num_samples:
            return
        with ThreadPoolExecutor(self.threads, "table") as threads:
            # `held` is open, `coming` is read meanwhile.
            held = plan.at(first)
            chunk, order = self._arrived(self._ask(threads, plan, held)), plan.order(held)
            coming = self._ask(threads, plan, held + 1)
            try:
                for begin, end in blocks:
                    parts: list[Chunk] = []
                    while True:
                        low = int(plan.starts[held])
                        high = int(plan.starts[held + 1])
                        part = _part(chunk, order, max(begin, low) - low, min(end, high) - low)
                        if part.size or (end <= high and not parts):
                            parts.append(part)
                        if end <= high:
                            break
                        held += 1
                        chunk, order = self._arrived(coming), plan.order(held)
                        coming = self._ask(threads, plan, held + 1)
                    yield join(parts).to_batch(names)
            finally:
                for future in coming:
                    future.cancel()

    def _ask(self, threads: ThreadPoolExecutor, plan: Windows, window: int) -> list[Future[Chunk]]:
        """Start reading the pieces of a window; of one after the last, none."""
        if window + 1 >= len(plan.bounds):
            return []
        pieces = plan.blocks[plan.bounds[window] : plan.bounds[window + 1]]
        return [threads.submit(self._read, int(piece)) for piece in pieces]

    def _arrived(self, coming: list[Future[Chunk]]) -> Chunk:
        return join([future.result() for future in coming])

    def _read(self, piece: int) -> Chunk:
        block, begin, end = (int(number) for number in self.pieces[piece])
        chunk = self.files.read(block)
        if self.share is not None:
            assert chunk.part is not None
            return chunk.take(self.share.rows(chunk.part)[begin:end])
        return chunk.cut(begin, end)


def _part(chunk: Chunk, order: NDArray[np.int64] | None, begin: int, end: int) -> Chunk:
    begin = min(begin, end)
    return chunk.cut(begin, end) if order is None else chunk.take(order[begin:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How samples are parted into train, validation and test, and read."""

    test_fraction: Fraction = 0.0
    validation_fraction: Fraction = 0.0
    split_by: Annotated[str | None, Expected("the name of a column")] = None
    days: bool = False
    shuffle_window: Annotated[int, Limits(ge=0)] = 0
    seed: Annotated[int, Limits(ge=0)] = 0
    threads: Annotated[int, Limits(ge=1)] = 1

    def __post_init__(self) -> None:
        validate_fields(self, subject="")
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

    def num_train(self, total: int) -> int:
        """Return how many of the first samples may train: all but those that a fraction holds out at the end."""
        if self.split_by is not None:
            return total
        stop = total - round(total * self.test_fraction)
        return stop - round(total * self.validation_fraction)

    def whole(self, files: Files) -> TableSource:
        """All samples of files that are held out, in their order."""
        return TableSource(files, _pieces(files.lengths, 0, None), threads=self.threads)

    def split(
        self,
        files: Files,
        days: Sequence[Sequence[Path]],
        validation: Files | None,
        test: Files | None,
    ) -> Splits:
        """`days`: the files, day by day. `validation`, `test`: files of their own, beside the fractions."""
        source = _Parts(files, self)
        total = source.total
        held = None if validation is None else self.whole(validation)
        tested = None if test is None else self.whole(test)
        by_day: tuple[TableSource, ...] = ()
        if self.days:
            ends = np.concatenate([[0], np.cumsum(files.lengths)])[files.bounds]
            ends = ends[np.cumsum([0, *map(len, days)])]
            by_day = tuple(
                source.run(int(begin), int(end), shuffled=True)
                for begin, end in itertools.pairwise(ends)
            )
        if self.split_by is not None:
            middle = 1 - self.test_fraction
            low = middle - self.validation_fraction
            shares = Share(0.0, low), Share(low, middle), Share(middle, 1.0)
            train, validating, testing = source.deal(shares)
        else:
            stop = total - round(total * self.test_fraction)
            num_train = self.num_train(total)
            train = source.run(0, num_train, shuffled=True)
            validating = source.run(num_train, stop)
            testing = source.run(stop, total)
        if train.num_samples == 0:
            raise ConfigError(
                f"{days[0][0]}: the fractions leave no sample to train on, of {total}; hold out less"
            )
        return Splits(
            train,
            held or (validating if validating.num_samples else None),
            tested or (testing if testing.num_samples else None),
            by_day,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    files: Files
    how: Splitting

    @property
    def total(self) -> int:
        return int(self.files.lengths.sum())

    def run(self, begin: int, end: int, *, shuffled: bool = False) -> TableSource:
        """Samples begin .. end-1 in the order of the files."""
        return self._source(_pieces(self.files.lengths, begin, end), None, shuffled)

    def deal(self, shares: tuple[Share, ...]) -> list[TableSource]:
        """Samples by their keys; the first share is to be shuffled. Reads every key once, to count them."""
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in shares]
        for block in range(len(self.files.lengths)):
            keys = self.files.read_parts(block)
            for share, mine in zip(shares, pieces, strict=True):
                if count := len(share.rows(keys)):
                    mine.append((block, 0, count))
        return [
            self._source(np.array(mine, np.int64).reshape(-1, 3), share, i == 0)
            for i, (share, mine) in enumerate(zip(shares, pieces, strict=True))
        ]

    def _source(
        self, pieces: NDArray[np.int64], share: Share | None, shuffled: bool
    ) -> TableSource:
        window = self.how.shuffle_window if shuffled else 0
        return TableSource(self.files, pieces, share, window, self.how.seed, self.how.threads)


def _pieces(lengths: NDArray[np.int64], begin: int, end: int | None) -> NDArray[np.int64]:
    """(P, 3): the parts of blocks that hold samples begin .. end-1; `end` None: all."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    low = np.maximum(starts, begin) - starts
    high = np.minimum(ends, total if end is None else end) - starts
    kept = np.flatnonzero(low < high)
    return np.stack([kept, low[kept], high[kept]], axis=1).astype(np.int64)
