"""Threads that run a server's jobs: the event loop's for short ones, the queue's own for all others."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from colonnade import Batch, Ids
from colonnade.serve.protocol import RequestError
from colonnade.serve.scheduler import (
    NUM_TRIALS,
    SHORT_SECONDS,
    Job,
    ScoreJob,
    ScoringQueue,
    group_batches,
)
from colonnade.serve.tensors import concatenate_batches


@pytest.fixture
def queue():
    queue = ScoringQueue(None, None, max_jobs=64)  # type: ignore[arg-type]
    queue.start()
    yield queue
    queue.close()


async def run_jobs(
    queue: ScoringQueue, runs, *, is_short: bool = True, is_shared: bool = False
) -> list[str]:
    """Submit jobs at once; return what each returned, in the order in which they ended.

    is_shared: others use the queue, so that it need not be empty then.
    """
    loop = asyncio.get_running_loop()
    results: list[str] = []
    is_done = asyncio.Event()

    def note(result, error) -> None:
        results.append(str(error or result))
        if len(results) == len(runs):
            is_done.set()

    for run in runs:
        job = Job(
            run, lambda *result: loop.call_soon_threadsafe(note, *result), time.monotonic() + 60
        )
        queue.submit(job, loop if is_short else None)
    await asyncio.wait_for(is_done.wait(), 20)
    while queue.num_waiting and not is_shared:
        await asyncio.sleep(0.001)  # the last job has ended, but is still counted
    return results


def name_thread() -> str:
    return threading.current_thread().name


def wait_long() -> str:
    time.sleep(10 * SHORT_SECONDS)
    return name_thread()


def test_short_jobs_move_to_the_loop_once_they_have_proved_short(queue):
    async def main():
        assert set(await run_jobs(queue, [name_thread] * NUM_TRIALS)) == {"scoring"}
        assert set(await run_jobs(queue, [name_thread] * 3)) == {name_thread()}
        assert await run_jobs(queue, [name_thread], is_short=False) == ["scoring"]
        assert await run_jobs(queue, [name_thread]) == [name_thread()]

    asyncio.run(main())


def test_a_long_job_in_the_loop_sends_the_next_ones_to_the_thread(queue):
    async def main():
        own = name_thread()
        await run_jobs(queue, [name_thread] * NUM_TRIALS)
        ran = await run_jobs(queue, [wait_long, name_thread, name_thread])
        assert ran == [own, "scoring", "scoring"]
        assert set(await run_jobs(queue, [name_thread] * NUM_TRIALS)) == {"scoring"}
        while queue._num_trials:
            await run_jobs(queue, [name_thread])
        assert await run_jobs(queue, [name_thread]) == [own]

    asyncio.run(main())


def test_jobs_that_are_always_long_never_run_in_the_loop(queue):
    async def main():
        ran = [await run_jobs(queue, [wait_long]) for _ in range(NUM_TRIALS + 5)]
        assert ran == [["scoring"]] * len(ran)

    asyncio.run(main())


def test_the_loop_looks_at_connections_between_two_jobs(queue):
    async def main():
        await run_jobs(queue, [name_thread] * NUM_TRIALS)
        order: list[str] = []
        loop = asyncio.get_running_loop()

        def run() -> str:
            order.append("job")
            loop.call_soon(order.append, "connection")
            return ""

        await run_jobs(queue, [run] * 4)
        assert order[:7] == ["job", "connection"] * 3 + ["job"]

    asyncio.run(main())


def test_short_jobs_move_to_the_loop_under_load(queue):
    """The thread need not be without jobs before."""

    async def run_many() -> str:
        for _ in range(10 * NUM_TRIALS):
            ran = await run_jobs(queue, [name_thread], is_shared=True)
        return ran[0]

    async def main():
        assert set(await asyncio.gather(*(run_many() for _ in range(8)))) == {name_thread()}

    asyncio.run(main())


def test_no_job_runs_in_the_loop_while_the_first_ones_hang(queue):
    async def main():
        release = threading.Event()
        runs = [lambda: (release.wait(20), name_thread())[1]] * (NUM_TRIALS + 5)
        jobs = asyncio.create_task(run_jobs(queue, runs))
        await asyncio.sleep(0.05)
        release.set()
        assert set(await jobs) == {"scoring"}

    asyncio.run(main())


def test_long_jobs_of_the_thread_are_not_overtaken(queue):
    """While the thread has long jobs, a short one waits behind them instead of for the model inside the loop."""

    async def main():
        await run_jobs(queue, [name_thread] * NUM_TRIALS)
        release = threading.Event()
        long = asyncio.create_task(run_jobs(queue, [lambda: str(release.wait(20))], is_short=False))
        await asyncio.sleep(0)
        short = asyncio.create_task(run_jobs(queue, [name_thread]))
        await asyncio.sleep(0.05)
        assert not short.done() and queue.num_waiting == 2
        release.set()
        assert await long == ["True"] and await short == ["scoring"]

    asyncio.run(main())


def test_waiting_jobs_of_the_loop_count_for_the_limit(queue):
    async def main():
        await run_jobs(queue, [name_thread] * NUM_TRIALS)
        loop = asyncio.get_running_loop()
        for _ in range(queue.max_jobs):
            queue.submit(Job(name_thread, lambda *_: None, time.monotonic() + 60), loop)
        with pytest.raises(RequestError, match="wanted at most 64") as refused:
            queue.submit(Job(name_thread, lambda *_: None, time.monotonic() + 60), loop)
        assert refused.value.status == 503
        while queue.num_waiting:
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_job_that_waited_too_long_in_the_loop_fails(queue):
    async def main():
        await run_jobs(queue, [name_thread] * NUM_TRIALS)
        loop = asyncio.get_running_loop()
        errors: list[BaseException] = []
        late = Job(name_thread, lambda result, error: errors.append(error), time.monotonic())
        queue.submit(Job(wait_long, lambda *_: None, time.monotonic() + 60), loop)
        queue.submit(late, loop)
        while queue.num_waiting:
            await asyncio.sleep(0.01)
        assert isinstance(errors[0], RequestError) and errors[0].status == 504

    asyncio.run(main())


def test_only_requests_of_one_step_with_weights_for_the_same_features_are_scored_together():
    weights = torch.ones(2)
    plain, weighted = Ids(torch.arange(2)), Ids(torch.arange(2), weights=weights)
    none, first, second = (
        Batch(2, torch.zeros(2, 0), {"a": a, "b": b})
        for a, b in ((plain, plain), (weighted, plain), (plain, weighted))
    )
    jobs = [
        (ScoreJob(lambda *_: None, 0.0, lambda: none, lambda scored: scored, step), batch)
        for step, batch in [(None, none), (None, first), (None, none), (None, second), (3, none), (None, first)]
    ]  # fmt: skip
    groups = [[jobs.index(pair) for pair in group] for group in group_batches(jobs, 8)]
    assert groups == [[0, 2], [1, 5], [3], [4]]
    for group in group_batches(jobs, 8):
        merged = concatenate_batches([batch for _, batch in group])
        for name, ids in group[0][1].ids.items():
            assert (merged.ids[name].weights is None) == (ids.weights is None)
    assert [len(group) for group in group_batches(jobs, 1)] == [1] * len(jobs)
