"""Reading in processes and threads of their own: any source, the same batches in the same order, made ahead of
training.

A tensor that crosses a process boundary costs a file descriptor and two system calls; a batch has some forty. A
block has one.

Process w of n makes runs w, w + n, ... of neighbouring steps, so a source is asked for nothing but to go on from a
position. torch's DataLoader underneath keeps the order, lets each process be `RUNS_AHEAD` runs ahead and no more,
and ends the processes with this one. A stopped process answers nobody, and a thread that waits for it would wait for
ever: `Readers` watches them and names it.

Processes are spawned: a script that trains must start its work under `if __name__ == "__main__":`, as for every
use of multiprocessing. They start with each epoch, which takes a second or two, so they are for epochs that are
longer than that, and for sources whose reading is slower than training. Several pay where a source begins anywhere
at no cost (text, the generator); a Parquet file is better read by one with threads of its own, because each run
begins inside a row group.
"""

from __future__ import annotations

import ctypes
import dataclasses
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colonnade.batch import Batch, Ids
from colonnade.comm.peer_status import process_state
from colonnade.data.batches import BatchSource
from colonnade.data.contract import START, Position, Schema, Source, Splits, spans
from colonnade.errors import ConfigError, ReaderLost

LOOK_SECONDS = 1.0
SAID_SECONDS = 5.0
"""Of waiting, before those that are stopped are named."""


class Readers:
    """Of one epoch, from their start until `end`."""

    def __init__(self, workers: Sequence[BaseProcess]) -> None:
        self.workers = workers
        self._waits: int | None = None
        self._since = 0.0  # it does
        # At the latest when this process ends, before multiprocessing waits for its children.
        self._end = Finalize(None, self.kill, exitpriority=0)
        _living.append(self)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """By this thread."""
        self._since, self._waits = time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._waits = None

    def are_waited_for(self, thread: threading.Thread) -> bool:
        return self._waits == thread.ident

    def watch(self, is_over: threading.Event) -> None:
        """Until then: where they are waited for long, and some are stopped, say so, once."""
        said = 0.0
        while not is_over.wait(LOOK_SECONDS):
            since, waited = self._since, time.monotonic() - self._since
            if self._waits is None or since == said or waited < SAID_SECONDS:
                continue
            pids = [str(w.pid) for w in self.workers if process_state(w.pid or 0) == "stopped"]
            if pids:
                said = since
                print(
                    f"waiting for {waited:.0f} s for a reader process that is stopped (SIGSTOP): pid "
                    f"{', '.join(pids)}; kill -CONT {' '.join(pids)} lets it go on",
                    file=sys.stderr,
                    flush=True,
                )

    def kill(self) -> None:
        """Who waits for them learns that they are lost."""
        for worker in self.workers:
            worker.kill()

    def end(self) -> None:
        """Kills them, too."""
        self._end()
        _living.remove(self)


_living: list[Readers] = []


def kill_readers(thread: threading.Thread) -> None:
    """Those that this thread waits for. For who has nothing to expect of it any more."""
    for each in tuple(_living):
        if each.are_waited_for(thread):
            each.kill()


ALIGNMENT = 64


class Place(NamedTuple):
    """Where a tensor lies in a block."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Block(NamedTuple):
    """`batches` hold a `Place` wherever they held a tensor."""

    data: Tensor  # (bytes,) uint8
    batches: list[Batch]


def pack(batches: Sequence[Batch], *, shared: bool) -> Block:
    """Copy. `shared`: into memory that another process can map."""
    tensors: list[tuple[Place, Tensor]] = []
    size = 0

    def place(tensor: Tensor) -> Place:
        nonlocal size
        taken = Place(size, tuple(tensor.shape), tensor.dtype)
        tensors.append((taken, tensor))
        size += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        return taken

    placed = [_replaced(batch, Tensor, place) for batch in batches]
    # The kind that torch's own collation makes: `share_memory_` would copy once more.
    storage = torch.UntypedStorage._new_shared(size) if shared else torch.UntypedStorage(size)
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    view = _views(data)
    for taken, tensor in tensors:
        view(taken).copy_(tensor)
    return Block(data, placed)


def unpack(block: Block) -> list[Batch]:
    """No copy: the batches keep the block."""
    view = _views(block.data)
    return [_replaced(batch, Place, view) for batch in block.batches]


def _views(data: Tensor) -> Callable[[Place], Tensor]:
    """A block's tensors by place: one call of torch each, since a batch has many."""
    as_dtype: dict[torch.dtype, Tensor] = {}

    def view(place: Place) -> Tensor:
        if place.dtype not in as_dtype:
            as_dtype[place.dtype] = data.view(place.dtype)
        strides, stride = [], 1
        for length in reversed(place.shape):
            strides.append(stride)
            stride *= max(1, length)
        first = place.offset // place.dtype.itemsize
        return as_dtype[place.dtype].as_strided(place.shape, strides[::-1], first)

    return view


def _replaced(batch: Batch, kind: type, by: Any) -> Batch:
    """The same batch with by(x) for every x of `kind`. What is neither stays."""

    def of(value: Any) -> Any:
        return by(value) if isinstance(value, kind) else value

    ids = {
        name: Ids(of(ids.values), of(ids.offsets), of(ids.weights))
        for name, ids in batch.ids.items()
    }
    plain = ("dense", "label", "sample_weight", "group", "key")
    changed = {name: of(getattr(batch, name)) for name in plain}
    if batch.next_use is not None:
        changed["next_use"] = {name: of(codes) for name, codes in batch.next_use.items()}
    return dataclasses.replace(batch, ids=ids, **changed)


RUN_SAMPLES = 1 << 15
"""About so many samples of a rank are one run: starting one costs a seek, and each process holds RUNS_AHEAD of them."""
RUNS_AHEAD = 2
STARTED_BY = "spawn"
"""Start method of readers: a process with threads is not safe to fork."""
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
            multiprocessing_context=STARTED_BY,
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
