"""Reading in processes of their own: any source, the same batches in the same order, made ahead of training.

Process w of n makes runs w, w + n, ... of neighbouring steps, so a source is asked for nothing but to go on from a
position. torch's DataLoader underneath keeps the order, lets each process be `RUNS_AHEAD` runs ahead and no more,
and ends the processes with this one.

Processes are spawned: a script that trains must start its work under `if __name__ == "__main__":`, as for every
use of multiprocessing. They start with each epoch, which takes a second or two, so they are for epochs that are
longer than that, and for sources whose reading is slower than training. Several pay where a source begins anywhere
at no cost (text, the generator); a Parquet file is better read by one with threads of its own, because each run
begins inside a row group.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue

import pyarrow as pa
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colonnade.batch import Batch
from colonnade.data.batches import BatchSource
from colonnade.data.block import Block, pack, unpack
from colonnade.data.contract import START, Position, Schema, Source, Splits, spans
from colonnade.data.readers import Readers
from colonnade.errors import ConfigError, ReaderLost

RUN_SAMPLES = 1 << 15
"""About so many samples of a rank are one run: starting one costs a seek, and each process holds RUNS_AHEAD of them."""
RUNS_AHEAD = 2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, eq=False)
class ProcessSource:
    """`source`, read by `num_processes` processes per rank. It must be picklable, and cheap to start anywhere.

    An error of the source is raised here when its batch's turn comes: the same class and words. Raises ReaderLost
    where a process ended without a word (killed, out of memory).
    """

    source: Source
    num_processes: int

    @property
    def schema(self) -> Schema:
        return self.source.schema

    @property
    def num_samples(self) -> int | None:
        return self.source.num_samples

    def batches(
        self,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start: Position = START,
    ) -> Iterator[Batch]:
        if self.num_processes < 1:
            raise ConfigError(f"got num_processes={self.num_processes}, wanted at least 1")
        spans(0, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        steps = max(1, RUN_SAMPLES * num_ranks // batch_size)
        return self._read(_Runs(self.source, batch_size, rank, num_ranks, start, steps))

    def _read(self, runs: _Runs) -> Iterator[Batch]:
        loader: DataLoader = DataLoader(
            runs,
            batch_size=None,
            num_workers=self.num_processes,
            prefetch_factor=RUNS_AHEAD,
            multiprocessing_context="spawn",
            worker_init_fn=_settle,
        )
        # A thread of their own starts them, and stays for as long as they do: they end with it (`_settle`), while those
        # that wait for batches may come and go.
        is_over = threading.Event()
        with _interrupts_held():
            found, readers = _begun(loader, is_over)
        try:
            while True:
                with readers.waited_for():
                    block, error = next(found, (None, None))
                if block is not None:
                    yield from unpack(block)
                if error is not None:
                    raise error
                if block is None:
                    return
        except (RuntimeError, ConnectionError, EOFError) as lost:
            # The pipe may break before torch can tell that its process has ended.
            if isinstance(lost, RuntimeError) and not str(lost).startswith("DataLoader worker"):
                raise
            raise ReaderLost(
                f"a reader process ended without a word{_of_whom(readers)}: "
                f"{(str(lost) or type(lost).__name__).splitlines()[0]}. If it was killed for memory, "
                "use fewer readers or smaller batches; in a script, start training under "
                '`if __name__ == "__main__":`'
            ) from lost
        finally:
            del found  # ends the processes now, whoever keeps the error and with it this frame
            readers.end()  # one that is stopped heard nothing
            is_over.set()


def _begun(loader: DataLoader, is_over: threading.Event) -> tuple[Iterator, Readers]:
    """Its iterator, whose processes were started by a thread that lives, and watches them, until `is_over`, or this
    process ends: also where the main thread has returned, and one of another's training goes on."""
    answers: SimpleQueue[tuple[Iterator, Readers] | BaseException] = SimpleQueue()

    def begin() -> None:
        try:
            found = iter(loader)
            # torch keeps them to itself; without, nobody is named, and whoever is stopped stays.
            readers = Readers(getattr(found, "_workers", ()))
        except BaseException as error:
            answers.put(error)
            return
        answers.put((found, readers))
        del found  # its end is that of who reads
        readers.watch(is_over)

    threading.Thread(target=begin, name="readers", daemon=True).start()
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def read_ahead(splits: Splits, num_processes: int) -> Splits:
    """The parts to train on, read by processes; 0: as they are. Evaluation is too short to wait for new processes."""
    if num_processes == 0:
        return splits
    if isinstance(splits.train, BatchSource):
        raise ConfigError(
            f"got readers={num_processes} for a data set of your own, wanted 0: give its DataLoader num_workers"
        )
    return replace(
        splits,
        train=ProcessSource(splits.train, num_processes),
        days=tuple(ProcessSource(day, num_processes) for day in splits.days),
    )


@dataclass(frozen=True, eq=False)
class _Runs(IterableDataset):
    """In process w of n: runs w, w + n, ... of `steps` steps, each with the error that ended it."""

    source: Source
    batch_size: int
    rank: int
    num_ranks: int
    start: Position
    steps: int

    def __iter__(self) -> Iterator[tuple[Block, BaseException | None]]:
        process = get_worker_info()
        assert process is not None
        first, stride = self.start.step + process.id * self.steps, process.num_workers * self.steps
        read: Iterator[Batch] | None = None
        while True:
            batches: list[Batch] = []
            error = None
            try:
                if read is None or stride > self.steps:
                    read = self.source.batches(
                        self.batch_size,
                        rank=self.rank,
                        num_ranks=self.num_ranks,
                        start=Position(self.start.epoch, first),
                    )
                for batch in islice(read, self.steps):
                    batches.append(batch)
            except Exception as problem:
                error = _portable(problem)
            if batches or error is not None:
                yield pack(batches, shared=True), error
            if error is not None or len(batches) < self.steps:
                return
            first += stride


def _portable(error: Exception) -> Exception:
    """The error as it can travel: itself where it is made of its message, else a RuntimeError that quotes it."""
    words = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        plain = type(error)(*error.args)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.__cause__ = RuntimeError(f"in a reader process:\n{words}")
    return plain


def _settle(worker: int) -> None:
    """In a reader, first. A Ctrl-C is for the process that trains; it ends its readers. One process is one core.

    Who trains may be killed while this one is stopped, which then would live on with the pipes that it inherited: the
    kernel ends it with the thread that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pa.set_cpu_count(1)


def _of_whom(readers: Readers) -> str:
    """The pids of processes that ended otherwise than by their own."""
    for worker in readers.workers:
        worker.join(0.2)
    pids = [str(worker.pid) for worker in readers.workers if worker.exitcode not in (None, 0)]
    return f" (pid {', '.join(pids)})" if pids else ""


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started meanwhile do not die of a Ctrl-C before they can say that they ignore it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
