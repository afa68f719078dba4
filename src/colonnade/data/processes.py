"""Reader processes: they read any source ahead of training and yield the same batches in the same order.

A tensor that crosses a process boundary costs a file descriptor and two system calls, and a batch has about forty
tensors. So the tensors of several batches are packed into one block, which has one file descriptor.

Process w of n reads runs w, w + n, ... of neighbouring steps, so a source only has to start at a position. torch's
DataLoader keeps the order, lets each process be at most `RUNS_AHEAD` runs ahead, and ends the processes with this
one. A stopped process (SIGSTOP) does not answer, and a thread that waits for it would wait forever:
`ReaderProcesses` watches the processes and reports it.

Processes are spawned: a script that trains must start its work under `if __name__ == "__main__":`, as for every
use of multiprocessing. They start with each epoch, which takes a second or two, so use them for epochs that are
longer than that, and for sources that are slower than training. Several processes pay off if a source starts anywhere
at no cost (text, synthetic data). A Parquet file is better read by one process with several threads, because each run
starts inside a row group.
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
from colonnade.comm.peer_status import read_process_state
from colonnade.data.batches import BatchSource
from colonnade.data.contract import (
    START,
    LastBatch,
    Position,
    Schema,
    Source,
    Splits,
    build_batch_options,
    iterate_rank_blocks,
)
from colonnade.errors import ConfigError, ReaderLost
from colonnade.machine import check_worker_count

CHECK_SECONDS = 1.0
"""Interval at which reader processes are checked."""
REPORT_SECONDS = 5.0
"""Waiting time after which stopped reader processes are reported."""


class ReaderProcesses:
    """Reader processes of one epoch, from their start until `close`."""

    def __init__(self, workers: Sequence[BaseProcess]) -> None:
        self.workers = workers
        self._waiting_thread: int | None = None
        self._waiting_since = 0.0
        # At the latest when this process ends, before multiprocessing waits for its children.
        self._finalize = Finalize(None, self.kill, exitpriority=0)
        _open_readers.append(self)

    @contextmanager
    def mark_thread_waiting(self) -> Iterator[None]:
        """Record that this thread waits for the processes until the context ends."""
        self._waiting_since = time.monotonic()
        self._waiting_thread = threading.get_ident()
        try:
            yield
        finally:
            self._waiting_thread = None

    def is_awaited_by(self, thread: threading.Thread) -> bool:
        return self._waiting_thread == thread.ident

    def report_stopped_processes(self, epoch_over: threading.Event) -> None:
        """Watch the processes until `epoch_over`, and print the stopped ones, once per long wait."""
        reported = 0.0
        while not epoch_over.wait(CHECK_SECONDS):
            since = self._waiting_since
            waited = time.monotonic() - self._waiting_since
            if self._waiting_thread is None or since == reported or waited < REPORT_SECONDS:
                continue
            pids = [str(w.pid) for w in self.workers if read_process_state(w.pid or 0) == "stopped"]
            if pids:
                reported = since
                print(
                    f"waiting for {waited:.0f} s for a reader process that is stopped (SIGSTOP): pid "
                    f"{', '.join(pids)}; kill -CONT {' '.join(pids)} lets it go on",
                    file=sys.stderr,
                    flush=True,
                )

    def kill(self) -> None:
        """Kill the processes. A thread that waits for them gets ReaderLost."""
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        """Kill the processes and stop tracking them."""
        self._finalize()
        _open_readers.remove(self)


_open_readers: list[ReaderProcesses] = []


def kill_readers(thread: threading.Thread) -> None:
    """Kill the reader processes that `thread` waits for, so that it ends. Call it when its batches are not needed."""
    for readers in tuple(_open_readers):
        if readers.is_awaited_by(thread):
            readers.kill()


ALIGNMENT = 64


class PackedTensor(NamedTuple):
    """Position, shape and dtype of a tensor in a block's bytes."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class PackedBatches(NamedTuple):
    """Batches with all their tensors in one buffer: `batches` have a `PackedTensor` in place of each tensor."""

    data: Tensor  # (bytes,) uint8
    batches: list[Batch]


def pack_batches(batches: Sequence[Batch], *, shared: bool) -> PackedBatches:
    """Copy batches into one buffer. `shared`: in memory that another process can map."""
    tensors: list[tuple[PackedTensor, Tensor]] = []
    size = 0

    def reserve(tensor: Tensor) -> PackedTensor:
        nonlocal size
        packed = PackedTensor(size, tuple(tensor.shape), tensor.dtype)
        tensors.append((packed, tensor))
        size += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        return packed

    packed_batches = [_convert_batch_fields(batch, Tensor, reserve) for batch in batches]
    # The same kind of storage as in torch's collation: `share_memory_` would copy once more.
    storage = torch.UntypedStorage._new_shared(size) if shared else torch.UntypedStorage(size)
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    view = _build_tensor_viewer(data)
    for packed, tensor in tensors:
        view(packed).copy_(tensor)
    return PackedBatches(data, packed_batches)


def unpack_batches(block: PackedBatches) -> list[Batch]:
    """Return the batches of a block as views of its buffer, which they keep alive."""
    view = _build_tensor_viewer(block.data)
    return [_convert_batch_fields(batch, PackedTensor, view) for batch in block.batches]


def _build_tensor_viewer(packed_bytes: Tensor) -> Callable[[PackedTensor], Tensor]:
    """Return a function that views a packed tensor: one torch call per tensor, since a batch has many."""
    as_dtype: dict[torch.dtype, Tensor] = {}

    def view(packed: PackedTensor) -> Tensor:
        if packed.dtype not in as_dtype:
            as_dtype[packed.dtype] = packed_bytes.view(packed.dtype)
        strides = []
        stride = 1
        for length in reversed(packed.shape):
            strides.append(stride)
            stride *= max(1, length)
        first = packed.offset // packed.dtype.itemsize
        return as_dtype[packed.dtype].as_strided(packed.shape, strides[::-1], first)

    return view


def _convert_batch_fields(batch: Batch, field_type: type, convert_field: Any) -> Batch:
    """Return the batch with convert(x) for every field x that is a `field_type`. Other fields stay."""

    def replace_value(value: Any) -> Any:
        return convert_field(value) if isinstance(value, field_type) else value

    ids = {
        name: Ids(replace_value(ids.values), replace_value(ids.offsets), replace_value(ids.weights))
        for name, ids in batch.ids.items()
    }
    plain = ("dense", "label", "sample_weight", "group", "key")
    changed = {name: replace_value(getattr(batch, name)) for name in plain}
    if batch.next_use is not None:
        changed["next_use"] = {name: replace_value(codes) for name, codes in batch.next_use.items()}
    return dataclasses.replace(batch, ids=ids, **changed)


RUN_SAMPLES = 1 << 15
"""Approximate samples of a rank in one run. Starting a run costs a seek; each process holds RUNS_AHEAD runs."""
RUNS_AHEAD = 2
"""Number of runs that a process reads before they are used."""
START_METHOD = "spawn"
"""Start method of reader processes: a process with threads is not safe to fork."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, eq=False)
class ProcessSource:
    """Source that reads `source` in `num_processes` processes per rank.

    `source` must be picklable, and cheap to start anywhere. Its errors are raised here, in the order of the batches,
    with the same class and message. Raises ReaderLost if a process ends without an error (killed, out of memory).
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
        last_batch: LastBatch = "keep",
    ) -> Iterator[Batch]:
        if self.num_processes < 1:
            raise ConfigError(f"got num_processes={self.num_processes}, wanted at least 1")
        iterate_rank_blocks(0, batch_size, rank=rank, num_ranks=num_ranks, start=start)
        steps = max(1, RUN_SAMPLES * num_ranks // batch_size)
        runs = _RunReader(self.source, batch_size, rank, num_ranks, start, steps, last_batch)
        return self._read_runs(runs)

    def _read_runs(self, runs: _RunReader) -> Iterator[Batch]:
        loader: DataLoader = DataLoader(
            runs,
            batch_size=None,
            num_workers=self.num_processes,
            prefetch_factor=RUNS_AHEAD,
            multiprocessing_context=START_METHOD,
            worker_init_fn=_init_reader_process,
        )
        # A separate thread starts the processes and lives as long as they do: they end with it
        # (`_init_reader_process`), while
        # the threads that wait for batches may change.
        is_over = threading.Event()
        with _block_interrupts():
            blocks, readers = _start_reader_processes(loader, is_over)
        try:
            while True:
                with readers.mark_thread_waiting():
                    block, error = next(blocks, (None, None))
                if block is not None:
                    yield from unpack_batches(block)
                if error is not None:
                    raise error
                if block is None:
                    return
        except (RuntimeError, ConnectionError, EOFError) as lost:
            # The pipe may break before torch detects that the process has ended.
            if isinstance(lost, RuntimeError) and not str(lost).startswith("DataLoader worker"):
                raise
            raise ReaderLost(
                f"a reader process ended without an error{_describe_dead_processes(readers)}: "
                f"{(str(lost) or type(lost).__name__).splitlines()[0]}. If it was killed for memory, "
                "use fewer readers or smaller batches; in a script, start training under "
                '`if __name__ == "__main__":`'
            ) from lost
        finally:
            # Ends the processes now, even if a caller keeps the error and with it this frame.
            del blocks
            # Kills stopped processes, which do not react to the end of the iterator.
            readers.close()
            is_over.set()


def _start_reader_processes(
    loader: DataLoader, epoch_over: threading.Event
) -> tuple[Iterator, ReaderProcesses]:
    """Start reader processes in a new thread; return the loader's iterator and the processes.

    The thread watches the processes until `epoch_over` or the end of this process. It may outlive the main thread,
    when another thread trains.
    """
    results: SimpleQueue[tuple[Iterator, ReaderProcesses] | BaseException] = SimpleQueue()

    def start_and_watch() -> None:
        try:
            blocks = iter(loader)
            # `_workers` is private to torch. Without it, stopped processes are neither reported nor killed.
            readers = ReaderProcesses(getattr(blocks, "_workers", ()))
        except BaseException as error:
            results.put(error)
            return
        results.put((blocks, readers))
        del blocks  # so that only the reading thread keeps the iterator alive
        readers.report_stopped_processes(epoch_over)

    threading.Thread(target=start_and_watch, name="readers", daemon=True).start()
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result


def read_in_processes(splits: Splits, num_processes: int) -> Splits:
    """Return the splits with training parts read by `num_processes` processes; 0: unchanged.

    Evaluation stays in this process: it is too short to wait for new processes.
    """
    if num_processes == 0:
        return splits
    if isinstance(splits.train, BatchSource):
        raise ConfigError(
            f"got readers={num_processes} for a data set of your own, wanted 0: give its DataLoader num_workers"
        )
    check_worker_count("data.readers", num_processes)
    return replace(
        splits,
        train=ProcessSource(splits.train, num_processes),
        days=tuple(ProcessSource(day, num_processes) for day in splits.days),
    )


@dataclass(frozen=True, eq=False)
class _RunReader(IterableDataset):
    """Data set that yields runs w, w + n, ... of `steps` steps in process w of n, with the error that ended a run."""

    source: Source
    batch_size: int
    rank: int
    num_ranks: int
    start: Position
    steps: int
    last_batch: LastBatch

    def __iter__(self) -> Iterator[tuple[PackedBatches, BaseException | None]]:
        process = get_worker_info()
        assert process is not None
        first = self.start.step + process.id * self.steps
        stride = process.num_workers * self.steps
        source_batches: Iterator[Batch] | None = None
        while True:
            batches: list[Batch] = []
            error = None
            try:
                if source_batches is None or stride > self.steps:
                    source_batches = self.source.batches(
                        self.batch_size,
                        rank=self.rank,
                        num_ranks=self.num_ranks,
                        start=Position(self.start.epoch, first),
                        **build_batch_options(self.last_batch),
                    )
                for batch in islice(source_batches, self.steps):
                    batches.append(batch)
            except Exception as problem:
                error = _make_error_picklable(problem)
            if batches or error is not None:
                yield pack_batches(batches, shared=True), error
            if error is not None or len(batches) < self.steps:
                return
            first += stride


def _make_error_picklable(error: Exception) -> Exception:
    """Return a copy of the error if its arguments can rebuild it, else a RuntimeError that quotes it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        plain = type(error)(*error.args)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.__cause__ = RuntimeError(f"in a reader process:\n{text}")
    return plain


def _init_reader_process(worker_index: int) -> None:
    """Set up a reader process: ignore Ctrl-C, end with the parent thread, use one core.

    The training process reacts to Ctrl-C and ends its readers. If it is killed while a reader is stopped, the reader
    would stay alive with the pipes that it inherited, so the kernel kills it with the thread that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pa.set_cpu_count(1)


def _describe_dead_processes(readers: ReaderProcesses) -> str:
    """Return " (pid ...)" with the pids of processes that failed or were killed, or an empty text."""
    for worker in readers.workers:
        worker.join(0.2)
    pids = [str(worker.pid) for worker in readers.workers if worker.exitcode not in (None, 0)]
    return f" (pid {', '.join(pids)})" if pids else ""


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT, so that a process started meanwhile does not die of a Ctrl-C before it ignores the signal."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
