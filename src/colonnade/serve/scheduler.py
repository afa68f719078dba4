"""Bounded queue in front of scoring: back-pressure, deadlines, optional micro-batches, and drain.

Jobs run one after another in the queue's thread. Jobs that have proved short run in the event loop unless that thread
has long ones, one batch between two looks at the connections: threads that take turns with the interpreter are slower.

Nothing is dropped silently: a job that is refused raises, and each job that was accepted gets a result or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.batch import Batch
from colonnade.serve.metrics import Metrics
from colonnade.serve.protocol import RequestError
from colonnade.serve.tensors import concatenate_batches, count_lookups
from colonnade.serve.versions import Scored, ServedModel, check_finite_scores

SHORT_SECONDS = 0.01
"""Limit on the mean time of the last short jobs, above which they run in the thread: connections must not wait."""
NEWEST_WEIGHT = 0.2
"""Weight of the newest one in that mean."""
NUM_TRIALS = 20
"""Number of short jobs that the thread has to end at first, and each time that the limit was exceeded."""


@dataclass(slots=True)
class Job:
    """Work of a request. `resolve` gets its result or its error, in the thread that ran it."""

    run: Callable[[], Any]
    resolve: Callable[[Any, BaseException | None], None]
    deadline: float
    """Time by `time.monotonic`; a job that begins later fails with 504."""
    is_short: bool = field(init=False, default=False)
    """True if it may run in an event loop. Set by `submit`."""


@dataclass(slots=True)
class ScoreJob(Job):
    """Job that scores a batch. `prepare` builds it, and `finish` turns scores into the result."""

    run: Callable[[], Any] = field(init=False, repr=False, default=lambda: None)
    prepare: Callable[[], Batch]
    finish: Callable[[Scored], Any]
    step: int | None = None


class ScoringQueue:
    """Queue of jobs, with a thread. Any thread may submit; a job with a loop, only that loop's."""

    def __init__(
        self, model: ServedModel, metrics: Metrics, *, max_jobs: int, micro_batch: int = 1
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.max_jobs = max_jobs
        self.micro_batch = micro_batch
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_jobs = 0  # of the thread: waiting there, or running
        self._num_long_jobs = 0  # of these, the ones that may not run in an event loop
        self._loop_jobs: deque[Job] = deque()  # of the event loop: waiting there, or running
        self._short_seconds = 0.0  # mean of the last short jobs
        self._num_trials = NUM_TRIALS  # short jobs that the thread has to end yet
        self._is_closed = False
        self._lock = threading.Lock()  # protects the numbers of jobs
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs accepted and not finished."""
        return self._num_jobs + len(self._loop_jobs)

    def submit(self, job: Job, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Add a job. Raises RequestError (503) if the queue is full or closed.

        loop: the running event loop, if the job seems short enough to run there.
        """
        with self._lock:
            if self._is_closed:
                raise RequestError(
                    503, "got a request while the server stops; send it again", retry_seconds=1
                )
            if self.num_waiting >= self.max_jobs:
                raise RequestError(
                    503,
                    f"got {self.num_waiting} requests waiting, wanted at most {self.max_jobs}; send this one again "
                    "later, fewer at a time",
                    retry_seconds=1,
                )
            job.is_short = loop is not None
            if loop is None or self._num_trials or self._num_long_jobs:
                self._num_jobs += 1
                self._num_long_jobs += not job.is_short
                self._jobs.put(job)
            else:
                self._loop_jobs.append(job)
                if len(self._loop_jobs) == 1:
                    loop.call_soon(self._work_in_loop, loop)

    def close(self) -> None:
        """Finish the accepted jobs and stop the thread."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _work_in_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the next jobs of one batch, or give all to the thread if it has long ones or these do not seem short."""
        waiting = self._loop_jobs
        with self._lock:
            if self._num_long_jobs or self._num_trials:
                self._num_jobs += len(waiting)
                while waiting:
                    self._jobs.put(waiting.popleft())
                return
            jobs = list(itertools.islice(waiting, self.micro_batch))
        self._run(jobs)
        with self._lock:
            for _ in jobs:
                waiting.popleft()
            if waiting:
                loop.call_soon(self._work_in_loop, loop)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs, is_last = self._collect_batch_jobs(job)
            try:
                self._run(jobs)
            finally:
                with self._lock:
                    self._num_jobs -= len(jobs)
                    self._num_long_jobs -= sum(not job.is_short for job in jobs)
            if is_last:
                return

    def _collect_batch_jobs(self, first_job: Job) -> tuple[list[Job], bool]:
        """Return a job with the waiting ones that may be scored together with it, and whether the queue has ended."""
        jobs = [first_job]
        while len(jobs) < self.micro_batch:
            try:
                waiting = self._jobs.get_nowait()
            except queue.Empty:
                break
            if waiting is None:
                return jobs, True
            jobs.append(waiting)
        return jobs, False

    def _run(self, jobs: list[Job]) -> None:
        """Run jobs, and note the time of short ones."""
        started = time.perf_counter()
        self._run_and_resolve(jobs)
        if not all(job.is_short for job in jobs):
            return
        seconds = time.perf_counter() - started
        with self._lock:
            self._short_seconds += NEWEST_WEIGHT * (seconds - self._short_seconds)
            is_long = self._short_seconds > SHORT_SECONDS
            self._num_trials = NUM_TRIALS if is_long else max(0, self._num_trials - len(jobs))

    def _run_and_resolve(self, jobs: list[Job]) -> None:
        """Run jobs, and resolve each of them exactly once."""
        batches: list[tuple[ScoreJob, Batch]] = []
        now = time.monotonic()
        for job in jobs:
            try:
                if now > job.deadline:
                    raise RequestError(
                        504,
                        "got no result before the time-out, wanted it while the request waits; send it again, "
                        "fewer at a time",
                        retry_seconds=1,
                    )
                if isinstance(job, ScoreJob):
                    batches.append((job, job.prepare()))
                else:
                    resolve(job, job.run())
            except BaseException as error:  # any error: the client waits for it
                resolve(job, None, error)
        for group in group_batches(batches, self.micro_batch):
            self._score(group)

    def _score(self, jobs_and_batches: list[tuple[ScoreJob, Batch]]) -> None:
        jobs = [job for job, _ in jobs_and_batches]
        batches = [batch for _, batch in jobs_and_batches]
        try:
            started = time.perf_counter()
            merged = batches[0] if len(jobs_and_batches) == 1 else concatenate_batches(batches)
            scored = self.model.score(merged, jobs[0].step)
            self.metrics.observe_batch(
                merged.size, count_lookups(merged), time.perf_counter() - started
            )
        except BaseException as error:
            if len(jobs_and_batches) > 1:  # one bad request must not fail the others
                for pair in jobs_and_batches:
                    self._score([pair])
            else:
                resolve(jobs[0], None, error)
            return
        first = 0
        for job, batch in jobs_and_batches:
            part = scored
            if len(jobs_and_batches) > 1:
                part = Scored(scored.scores[first : first + batch.size], scored.step, scored.run)
            first += batch.size
            try:
                check_finite_scores(part.scores, part.step, self.model.options.name)
                result = job.finish(part)
            except BaseException as error:
                resolve(job, None, error)
            else:
                resolve(job, result)


def resolve(job: Job, result: Any, error: BaseException | None = None) -> None:
    """Give a job its result or its error. A client that is gone must not end the thread."""
    try:
        job.resolve(result, error)
    except Exception:
        traceback.print_exc()


def group_batches(
    jobs_and_batches: Sequence[tuple[ScoreJob, Batch]], max_samples: int
) -> list[list[tuple[ScoreJob, Batch]]]:
    """Group jobs that can be scored as one batch: the same step, weights for the same features; in order."""
    if max_samples == 1 or len(jobs_and_batches) == 1:
        return [[pair] for pair in jobs_and_batches]
    groups: dict[Any, list[tuple[ScoreJob, Batch]]] = {}
    for job, batch in jobs_and_batches:
        weighted = tuple(name for name, ids in batch.ids.items() if ids.weights is not None)
        groups.setdefault((job.step, weighted), []).append((job, batch))
    return list(groups.values())
