"""Number of batches that are prepared ahead: chosen by itself, and less where the window does not fit."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import warnings

import pytest
import torch
from scenario import open_backings

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    Table,
    build_plan,
)
from colonnade.errors import BudgetExceeded
from colonnade.pipeline.lookahead import BatchStages, Lookahead, LookaheadSettings
from colonnade.pipeline.prepared_batches import (
    DEEPEST,
    LOOKED_AT,
    PipelineSignals,
    _prepare_batches,
    choose_next_depth,
)


@pytest.mark.parametrize(
    ("depth", "stalled", "window", "wanted"),
    [
        (2, 0.0, 0.0, 2),  # nothing is waited for
        (2, 0.01, 0.0, 2),  # hardly anything
        (2, 0.3, 0.05, 4),
        (4, 0.03, 0.2, 8),
        (4, 0.9, 0.26, 4),  # twice the window would crowd out what is cached
        (48, 0.9, 0.01, DEEPEST),
        (DEEPEST, 0.9, 0.01, DEEPEST),
        (100, 0.9, 0.01, 100),  # as told
    ],
)
def test_depth_follows_what_training_waits_for(depth, stalled, window, wanted):
    assert choose_next_depth(depth, stalled_fraction=stalled, pinned_fraction=window) == wanted


class Context:
    reads = None


class Slow:
    """Reads that take `seconds` from when they are asked for; training takes `step`."""

    def __init__(self, seconds, depth, *, is_alone=True, batches=None):
        self.seconds, self.stall, self.ahead = seconds, 0.0, []
        self.prepared = 0
        events = [threading.Event() for _ in range(3)]
        self.window = PipelineSignals(lambda: self.stall, lambda: 0.001 * self.prepared, *events)
        self.lookahead = Lookahead(
            batches or (Batch(1, torch.zeros(1, 0), {}) for _ in range(400)),
            BatchStages(self.prepare, self.fetch, drop=lambda context: None),
            LookaheadSettings(depth=depth, is_alone=is_alone),
            self.window,
            updates=None,  # unused: no table is read early
        )

    def prepare(self, batch, stored):
        self.prepared += 1
        context = Context()
        context.ready_at = time.perf_counter() + self.seconds
        return context

    def fetch(self, context, steps_left):
        start = time.perf_counter()
        if context.ready_at > start:
            time.sleep(context.ready_at - start)
            self.stall += time.perf_counter() - start
        context.reads = ()

    def run(self, num_batches, step):
        with self.lookahead as batches:
            for number, batch in enumerate(batches):
                batch.context = None
                self.ahead.append(self.prepared - number)
                if number == num_batches:
                    break
                time.sleep(step)


def test_auto_goes_as_deep_as_reads_are_slow():
    slow = Slow(0.02, "auto")
    slow.run(300, 0.002)
    assert 8 <= slow.lookahead.depth <= DEEPEST  # 0.02 / 0.002 steps, in doublings
    assert max(slow.ahead) <= slow.lookahead.depth + 2
    quick = Slow(0.0, "auto")
    quick.run(4 * LOOKED_AT, 0.0005)
    assert quick.lookahead.depth == 2


def test_auto_does_not_change_among_several_ranks():
    slow = Slow(0.01, "auto", is_alone=False)
    slow.run(100, 0.001)
    assert slow.lookahead.depth == 2


def test_a_depth_given_stays():
    slow = Slow(0.01, 3)
    slow.run(100, 0.001)
    assert slow.lookahead.depth == 3


def collection(folder, *, lookahead, rows_in_memory):
    table = Table("item", 4)
    model = EmbeddingCollection([table], [Feature("item", "item")])
    plan = build_plan(
        [table], 1, PlanConfig(memory={"dram": rows_in_memory * (table.record_bytes + 20)})
    )
    model.open(
        dataclasses.replace(plan, lookahead=lookahead),
        Mesh(),
        backings=open_backings(folder, Mesh(), [table]),
    )
    return model


def batches(num, size, seed=0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(num):
        ids = torch.randint(0, 500, (size,), generator=random)
        yield Batch(size, torch.zeros(size, 0), {"item": Ids(ids)})


def run(model, steps):
    rows = RowOptimizer(model)
    for batch in model.lookahead(steps):
        model(batch)["item"].sum().backward()
        rows.step()
    return model.rows("item", torch.arange(500))


@pytest.mark.parametrize("lookahead", [8, "auto"])
def test_a_window_that_does_not_fit_is_made_smaller(tmp_path, lookahead):
    """Room for about three batches; the result is that of any depth."""
    one = collection(tmp_path / "one", lookahead=0, rows_in_memory=100)
    wanted = run(one, batches(60, 40))
    ahead = collection(tmp_path / "ahead", lookahead=lookahead, rows_in_memory=100)
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        result = run(ahead, batches(60, 40))
    assert torch.equal(result, wanted)
    message = [str(w.message) for w in message if "batches ahead needs more rows" in str(w.message)]
    assert len(message) == (
        lookahead == 8
    )  # once; not where the depth is the lookahead's own choice
    assert not message or "looking 8 batches" in message[0]


def test_who_has_a_batch_is_not_starved_of_it():
    """However long training takes to wake: the batch after it may wait for its rows."""
    window = PipelineSignals(lambda: 0.0, lambda: 0.0, *(threading.Event() for _ in range(3)))
    starved_then = []

    coming = batches(3, 2)

    def prepare_next():
        starved_then.append(window.starved.is_set())
        return next(coming)

    permits, ready = queue.Queue(), queue.Queue()
    for text in (True, True, False):
        permits.put(text)
    window.starved.set()  # training waits for the first, and is not heard again
    _prepare_batches(prepare_next, permits, ready, window)
    assert starved_then == [True, False] and ready.qsize() == 2


def test_a_batch_that_does_not_fit_is_refused_with_numbers(tmp_path):
    model = collection(tmp_path, lookahead=4, rows_in_memory=30)
    with pytest.raises(BudgetExceeded, match=r"table 'item': a batch needs \d+ rows .* holds \d+ "):
        run(model, batches(5, 300))


@pytest.mark.timeout(30)
def test_closing_does_not_wait_for_room_that_never_comes(tmp_path):
    """A run that ends before a batch that is larger than memory ends as any other, and its rows are free again."""
    model = collection(tmp_path, lookahead=3, rows_in_memory=60)
    rows = RowOptimizer(model)
    too_large = (batch for size in (20, 20, 400, 20) for batch in batches(1, size))
    ahead = model.lookahead(too_large)
    model(next(ahead))["item"].sum().backward()
    rows.step()
    ahead.close()
    assert run(model, batches(3, 40)).isfinite().all()


@pytest.mark.parametrize("at", ["acquire", "resolve_slots"])
def test_a_batch_that_cannot_be_prepared_leaves_nothing_pinned(tmp_path, monkeypatch, at):
    """Whatever goes wrong once its ids have come to the owners: all memory is free for the next batches."""
    model = collection(tmp_path, lookahead=0, rows_in_memory=60)
    model.ensure_open()
    dropped = []
    of, drop = (model.store if at == "acquire" else model.exchange), model.exchange.drop
    monkeypatch.setattr(model.exchange, "drop", lambda context: (dropped.append(context), drop(context)))  # fmt: skip
    with monkeypatch.context() as broken, pytest.raises(OSError, match="no such luck"):
        broken.setattr(of, at, fail)
        model.pipeline.prepare_batch(next(batches(1, 50)))
    assert [context.is_done for context in dropped] == [True]
    assert model.store.pinned_share() == 0
    assert run(model, batches(3, 50, seed=1)).isfinite().all()


def fail(*_):
    raise OSError("no such luck")
