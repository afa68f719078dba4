"""Timing of candidate plans at the start of a run, on all ranks and the real links, on copies of the model.

The copies train on each rank's first batches, in turns, so that slow seconds of the machine affect all plans. Nothing
of the run changes: the copies, their rows and their traffic counts are thrown away.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from colonnade.batch import Batch
from colonnade.checkpoint.stores import open_stores
from colonnade.comm.mesh import Mesh
from colonnade.comm.peer_status import report_errors_to_peers
from colonnade.comm.traffic import Traffic
from colonnade.plan.comparison import MAX_PREDICTED_GAP, ComparedPlan, PlanComparison
from colonnade.plan.plan import Plan
from colonnade.run.micro_benchmark import create_temporary_folder
from colonnade.run.placement import read_sample_batches
from colonnade.run.planning import list_row_folders
from colonnade.run.trainers import RunSetup, open_timed_trainer
from colonnade.store.contract import Backing
from colonnade.store.disk import Disk
from colonnade.train.trainer import Outcome, Trainer

MIN_RUN_STEPS = 200
"""Number of steps of a run below which no plans are timed: timing takes up to a hundred steps of its own."""
MAX_SECONDS = 5.0
"""Seconds that the turns after the first take together, about; there is at least one, of MIN_TURN_STEPS."""
MAX_SLOW_SECONDS = 10.0
"""Predicted seconds of the fewest steps that time a plan, over all plans, above which fewer plans are timed."""
MAX_RUN_SHARE = 0.01
"""Part of the predicted time of a long run that these steps may take instead."""
NUM_TURNS = 5
"""Largest number of turns of each plan that count."""
WARM_UP_STEPS = 2
"""Number of steps at the start of a turn that are not timed, so that ids of coming batches are on their way."""
MIN_TURN_STEPS = 2
MAX_TURN_STEPS = 8
FEWEST_TURNS = 3
"""Smallest number of turns of a plan that is not hopeless."""
FEWEST_STEPS = WARM_UP_STEPS + MIN_TURN_STEPS
"""Number of steps of the shortest turn."""
HOPELESS = 1.5
"""Step of a plan in its second turn, relative to the fastest plan's, above which it gets no more turns."""

TrainSteps = Callable[[int, int, Callable[[], None]], float]
"""Function that trains steps with one plan: (warm-up steps, timed steps, function to call between them on every rank)
-> seconds of the timed steps on this rank."""


def count_plans_to_time(predicted_seconds: Sequence[float], run_steps: int | None) -> int:
    """Return how many of these plans a run times: 0, or the first two or more. Pure.

    predicted_seconds: of a step of each plan, in the order of `order_plans_to_time`. run_steps: steps of the run, if
    known."""
    if run_steps is not None and run_steps < MIN_RUN_STEPS:
        return 0
    run_seconds = 0.0 if run_steps is None else run_steps * predicted_seconds[0]
    max_seconds = max(MAX_SLOW_SECONDS, MAX_RUN_SHARE * run_seconds)
    count = 0
    total = 0.0
    for seconds in predicted_seconds:
        total += FEWEST_TURNS * FEWEST_STEPS * seconds
        if total > max_seconds or seconds > MAX_PREDICTED_GAP * predicted_seconds[0]:
            break
        count += 1
    return count if count > 1 else 0


def time_in_turns(candidates: Sequence[TrainSteps], mesh: Mesh) -> list[float]:
    """Return the seconds of a step of each candidate on the slowest rank, the same on every rank. Collective.

    The first turn initialises rows and buffers, and does not count: in a benchmark, the first candidate took twice as
    long in it. The second turn excludes hopeless candidates, and decides the number of steps of the others' turns, of
    which the median counts."""

    def take_turn(train: TrainSteps, steps: int) -> float:
        seconds = train(WARM_UP_STEPS, steps, mesh.barrier) / steps
        own_seconds = torch.tensor(seconds, dtype=torch.float64)
        return max(float(value) for value in mesh.all_gather("control", own_seconds))

    for train in candidates:
        take_turn(train, MIN_TURN_STEPS)
    first = [take_turn(train, MIN_TURN_STEPS) for train in candidates]
    hopeful = [i for i, seconds in enumerate(first) if seconds <= HOPELESS * min(first)]
    num_steps = MAX_SECONDS / (len(hopeful) * min(first))  # of each plan, in all turns
    num_turns = min(max(int(num_steps / FEWEST_STEPS), 1), NUM_TURNS)
    steps = int(num_steps / num_turns) - WARM_UP_STEPS
    steps = min(max(steps, MIN_TURN_STEPS), MAX_TURN_STEPS)
    turns: dict[int, list[float]] = {i: [] for i in hopeful}
    for _ in range(num_turns if len(hopeful) > 1 else 0):
        for i in hopeful:
            turns[i].append(take_turn(candidates[i], steps))
    medians = {i: median(part) for i, part in turns.items() if part}
    # An excluded plan stays as far behind as it was, should the machine be slower since.
    drift = max(1.0, min(medians.values()) / min(first)) if medians else 1.0
    return [medians.get(i, seconds * drift) for i, seconds in enumerate(first)]


def choose_plan(setup: RunSetup, plans: Sequence[Plan], run_steps: int | None) -> Plan:
    """Return the plan to train with: the first one, or the fastest if timing others is worthwhile. Collective.

    plans: the planner's choice, with a comparison, then its runners-up; see `plan_on_rank_0`. run_steps: steps of the
    run, if known."""
    plan = plans[0]
    comparison = plans[0].comparison
    if comparison is None:
        return plan
    count = 0
    # Device memory and mapped files, which are reserved whole, have no room for copies.
    if len(plans) > 1 and plan.hbm_bytes is None and plan.mapped is None:
        predicted_seconds = [compared.predicted_seconds for compared in comparison.plans]
        count = count_plans_to_time(predicted_seconds, run_steps)
    if count:
        plan = keep_fastest_plan(setup, plans[:count])
    if setup.console is not None and plan.comparison is not None:
        for line in plan.comparison.describe():
            setup.console.print(line, highlight=False, markup=False)
    return plan


def keep_fastest_plan(setup: RunSetup, plans: Sequence[Plan]) -> Plan:
    """Time the plans, and return the fastest one with the measured comparison. Collective.

    plans: the first has a comparison whose first plans are these. An exception on one rank ends the measurement, and
    the run, on all ranks: other ranks raise PeerLost.
    """
    mesh = setup.mesh
    trainers_mesh = setup.mesh.trainer_mesh
    traffic = Traffic()
    if trainers_mesh is not None:
        trainers_mesh = replace(trainers_mesh, traffic=traffic)
    # The run's own counts do not have these messages.
    setup = replace(setup, mesh=replace(mesh, traffic=traffic, trainer_mesh=trainers_mesh))
    with (
        torch.random.fork_rng(),
        report_errors_to_peers(mesh.peer_monitor),
        ExitStack() as stack,
    ):
        batches = _read_first_batches(setup)
        copies = [_open_copy(stack, setup, plan, batches) for plan in plans]
        seconds = time_in_turns([timed.train_steps for timed in copies], setup.mesh)
    del copies
    gc.collect()  # a copy's memory is in reference cycles, and the run is about to need as much
    comparison = plans[0].comparison
    assert comparison is not None
    chosen = seconds.index(min(seconds))
    return replace(plans[chosen], comparison=add_measured_seconds(comparison, seconds, chosen))


def _read_first_batches(setup: RunSetup) -> list[Batch]:
    """Read this rank's first (micro-)batches; a server has none."""
    train = setup.config.train
    mesh = setup.mesh
    if mesh.is_server:
        return []
    return read_sample_batches(
        setup.data.train,
        train.samples_per_step // train.accumulate,
        1,
        rank=mesh.trainers.rank,
        num_ranks=mesh.trainers.num_ranks,
    )


def add_measured_seconds(
    comparison: PlanComparison, seconds: Iterable[float], chosen: int
) -> PlanComparison:
    """Return a comparison with the measured seconds of its first plans. Pure."""
    measured: list[ComparedPlan] = [
        replace(plan, measured_seconds=value)
        for plan, value in zip(comparison.plans, seconds, strict=False)
    ]
    return PlanComparison((*measured, *comparison.plans[len(measured) :]), chosen)


class _TimedCopy:
    """Copy of the model under one plan."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.outcome = Outcome()

    def train_steps(self, warm_up: int, steps: int, start: Callable[[], None]) -> float:
        """Train steps on the first batches; see `TrainSteps`. Collective."""
        trainer = self.trainer
        began = 0.0
        # One lookahead at a time: two would send ids of two plans in no common order.
        with trainer.collection.lookahead(trainer.read_remaining_batches()) as stream:
            for step in range(warm_up + steps):
                if step == warm_up:
                    start()
                    began = time.perf_counter()
                trainer.train_step(stream, self.outcome)
            seconds = time.perf_counter() - began
        trainer.collection.pipeline.updates.apply_pending()
        return seconds


def _open_copy(
    stack: ExitStack, setup: RunSetup, plan: Plan, batches: Sequence[Batch]
) -> _TimedCopy:
    """Open a copy of the model under a plan. stack: closes its stores and removes its files."""
    backings: Sequence[Backing] = ()
    if plan.needs_backing:
        parent = Path(list_row_folders(plan, setup.folder or Path())[0])
        folder = stack.enter_context(create_temporary_folder(parent))
        tables = setup.collection.tables
        stores = open_stores(folder, tables, plan.shardings, setup.mesh.rank, Disk(), None)
        for store in stores:
            stack.callback(store.close)
        backings = stores
    copied = copy.deepcopy(setup.model)
    copied.train()
    return _TimedCopy(open_timed_trainer(setup, copied, plan, batches, backings))
