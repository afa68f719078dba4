"""Timing of steps: of a model on one rank, for predictions; and of candidate plans on all ranks and the real links.

Steps are timed on copies of the model and in a temporary folder, so they change nothing of the run: the copies, their
rows and their traffic counts are thrown away.
"""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from colonnade.batch import Batch
from colonnade.checkpoint.stores import RowFiles, open_stores
from colonnade.comm.mesh import Mesh
from colonnade.comm.peer_status import report_errors_to_peers
from colonnade.comm.traffic import Traffic
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.embedding import EmbeddingCollection
from colonnade.lookup.stacking import hash_ids
from colonnade.plan.build import build_plan
from colonnade.plan.comparison import MAX_PREDICTED_GAP, ComparedPlan, PlanComparison
from colonnade.plan.cost.prediction import StepCosts
from colonnade.plan.plan import Plan
from colonnade.planning.measure import list_missing_folders
from colonnade.planning.placement import list_row_folders, read_sample_batches
from colonnade.store.budget import slot_bytes
from colonnade.store.contract import Backing
from colonnade.train.setup import RunSetup, open_timed_trainer
from colonnade.train.trainer import Outcome, Trainer

PASSES = 4
MIN_STEPS = 4
"""Number of steps of a pass if the sample is a single batch, which is repeated."""
LOOKAHEAD = 2


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Timed pass over the sample."""

    seconds: Sequence[float]
    """Seconds of each step."""
    born_rows: float
    """Initialised rows of a step, on average."""
    moved_rows: float
    """Rows that a step reads or evicts, on average."""


def run_micro_benchmark(
    setup: RunSetup,
    batches: Sequence[Batch],
    *,
    folder: Path | None,
    reads: Mapping[str, float],
    small_batches: Sequence[Batch] = (),
) -> StepCosts:
    """Time steps of a model, with all rows in memory and with little memory. Runs on one rank.

    Takes 2 x PASSES passes over `batches`, at least one. Passes with much and with little memory, and those over
    `small_batches`, alternate, so that slow seconds of the machine affect all.
    setup: its model is not open, and does not change.
    folder: on the disk for rows. None: the cost of moving rows is not measured. With a single batch it is zero.
    reads: number of rows that a step of the run will read, by table.
    small_batches: of fewer samples, to measure what a sample costs; empty: not measured.
    """
    batches, small_batches = map(_repeat_single_batch, (batches, small_batches))
    train = setup.config.train.model_copy(update={"accumulate": 1})
    config = setup.config.model_copy(update={"train": train})
    single = replace(setup, mesh=Mesh(), config=config)
    in_memory = build_plan(setup.collection.tables, 1, PlanConfig(lookahead=LOOKAHEAD))
    timings = [(in_memory, batches)]
    if folder is not None:
        timings.append((_plan_with_little_memory(setup.collection, batches, reads), batches))
    if small_batches:
        timings.append((in_memory, small_batches))
    # Planning changes no random bit of the later run.
    with torch.random.fork_rng(), ExitStack() as stack:
        models = []
        for plan, timed_batches in timings:
            trainer = _open_copy(stack, single, plan, timed_batches, folder)
            models.append(_TimedModel(trainer, len(timed_batches)))
            stack.callback(models[-1].stream.close)
        passes = [[model.train_timed_pass() for model in models] for _ in range(PASSES)]
    step_seconds = _median_step_seconds([timed[0] for timed in passes[1:]])

    def divide_additional_seconds(timed: Sequence[TimedPass], num_rows: float) -> float:
        return max(_median_step_seconds(timed) - step_seconds, 0.0) / num_rows if num_rows else 0.0

    first_pass = passes[0][0]  # initialises every row
    # Without rows in files, nothing moves.
    tight = [timed[0 if folder is None else 1] for timed in passes[1:]]
    num_moved = sum(timed.moved_rows for timed in tight) / len(tight)
    sample_seconds = 0.0
    if small_batches:
        saved_seconds = step_seconds - _median_step_seconds([timed[-1] for timed in passes[1:]])
        sample_seconds = max(saved_seconds, 0.0) / (batches[0].size - small_batches[0].size)
    return StepCosts(
        step_seconds=step_seconds,
        first_use_seconds=divide_additional_seconds([first_pass], first_pass.born_rows),
        moved_seconds=divide_additional_seconds(tight, num_moved),
        sample_seconds=sample_seconds,
    )


def _repeat_single_batch(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Repeat a batch that is the only one, because the first pass begins with an untimed step."""
    return [copy.copy(batches[0]) for _ in range(MIN_STEPS)] if len(batches) == 1 else batches


def _median_step_seconds(passes: Sequence[TimedPass]) -> float:
    """Return the median over all steps, which disturbances of the machine change less than a mean."""
    return float(np.median([seconds for step_pass in passes for seconds in step_pass.seconds]))


@contextmanager
def create_temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a temporary folder in `parent`; remove it and missing parents that were created for it afterwards."""
    created = list_missing_folders(parent)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".timing-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for created_parent in created:
            with suppress(OSError):
                created_parent.rmdir()


class _TimedModel:
    """Copy of the model that trains pass by pass, with timed steps."""

    def __init__(self, trainer: Trainer, num_steps: int) -> None:
        self.trainer = trainer
        self.num_steps = num_steps
        self.stream = trainer.collection.lookahead(trainer.read_remaining_batches())
        self.is_warm = False

    def train_timed_pass(self) -> TimedPass:
        """Train one pass. The first pass begins with a step that is not timed, to warm up torch and the allocator."""
        steps = self.num_steps
        outcome = Outcome()
        store = self.trainer.collection.store
        if not self.is_warm:
            self.trainer.train_step(self.stream, outcome)
            self.is_warm = True
            steps = steps - 1
        before = copy.copy(store.sources)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.trainer.train_step(self.stream, outcome)
            seconds.append(time.perf_counter() - start)
        now = store.sources
        moved = [
            source.read + source.copied + source.evicted_dirty + source.evicted_clean
            for source in (before, now)
        ]
        return TimedPass(seconds, (now.born - before.born) / steps, (moved[1] - moved[0]) / steps)


def _plan_with_little_memory(
    collection: EmbeddingCollection, batches: Sequence[Batch], reads_by_table: Mapping[str, float]
) -> Plan:
    """Build a plan in which a step reads about as many rows of each table as it will in the run.

    The cost of a row depends on their number, because some reads are hidden behind computation.
    """
    declaration = collection.declaration
    batches = [hash_ids(batch, declaration) for batch in batches]
    budgets = {}
    for table in declaration.tables:
        features = [feature.name for feature in declaration.features if feature.table == table.name]
        ids = [
            np.unique(
                np.concatenate(
                    [batch.ids[name].values.numpy() for name in features] or [np.zeros(0, np.int64)]
                )
            )
            for batch in batches
        ]
        rows = choose_resident_rows(ids, LOOKAHEAD + 2, reads_by_table[table.name])
        budgets[table.name] = int(rows * 1.05 + 16) * slot_bytes(table)
    memory = MemoryConfig(dram=sum(budgets.values()), tables=budgets)
    return build_plan(collection.tables, 1, PlanConfig(memory=memory, lookahead=LOOKAHEAD))


def choose_resident_rows(
    batch_row_ids: Sequence[np.ndarray], window_batches: int, target_reads: float
) -> int:
    """Return how many rows must be in memory so that a step over these batches reads about `target_reads` rows. Pure.

    Memory holds the rows of any `window_batches` consecutive batches, and the most used of the others. batch_row_ids:
    unique ids of each batch; training repeats them.
    """
    unique_ids, inverse, uses = np.unique(
        np.concatenate(batch_row_ids), return_inverse=True, return_counts=True
    )
    order = np.argsort(-uses, kind="stable")
    # By number of cached rows: uses of all other rows, in all steps.
    uses_left = int(uses.sum()) - np.concatenate([[0], np.cumsum(uses[order])])
    num_cached = int(np.argmax(uses_left <= target_reads * len(batch_row_ids)))
    is_cached = np.zeros(len(unique_ids), bool)
    is_cached[order[:num_cached]] = True
    rows = num_cached
    starts = np.cumsum([0, *map(len, batch_row_ids)])
    for first in range(len(batch_row_ids)):
        last = min(first + window_batches, len(batch_row_ids))
        window_rows = np.unique(inverse.ravel()[starts[first] : starts[last]])
        rows = max(rows, num_cached + int((~is_cached[window_rows]).sum()))
    return max(rows, 1)


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


def time_in_turns(candidate_steps: Sequence[TrainSteps], mesh: Mesh) -> list[float]:
    """Return the seconds of a step of each candidate on the slowest rank, the same on every rank. Collective.

    The first turn initialises rows and buffers, and does not count: in a benchmark, the first candidate took twice as
    long in it. The second turn excludes hopeless candidates, and decides the number of steps of the others' turns, of
    which the median counts."""

    def take_turn(train: TrainSteps, steps: int) -> float:
        seconds = train(WARM_UP_STEPS, steps, mesh.barrier) / steps
        own_seconds = torch.tensor(seconds, dtype=torch.float64)
        return max(float(value) for value in mesh.all_gather("control", own_seconds))

    for train in candidate_steps:
        take_turn(train, MIN_TURN_STEPS)
    first = [take_turn(train, MIN_TURN_STEPS) for train in candidate_steps]
    hopeful = [i for i, seconds in enumerate(first) if seconds <= HOPELESS * min(first)]
    num_steps = MAX_SECONDS / (len(hopeful) * min(first))  # of each plan, in all turns
    num_turns = min(max(int(num_steps / FEWEST_STEPS), 1), NUM_TURNS)
    steps = int(num_steps / num_turns) - WARM_UP_STEPS
    steps = min(max(steps, MIN_TURN_STEPS), MAX_TURN_STEPS)
    turns: dict[int, list[float]] = {i: [] for i in hopeful}
    for _ in range(num_turns if len(hopeful) > 1 else 0):
        for i in hopeful:
            turns[i].append(take_turn(candidate_steps[i], steps))
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
        copies = [_TimedCopy(_open_copy(stack, setup, plan, batches)) for plan in plans]
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
    comparison: PlanComparison, measured_seconds: Iterable[float], chosen_index: int
) -> PlanComparison:
    """Return a comparison with the measured seconds of its first plans. Pure."""
    measured: list[ComparedPlan] = [
        replace(plan, measured_seconds=value)
        for plan, value in zip(comparison.plans, measured_seconds, strict=False)
    ]
    return PlanComparison((*measured, *comparison.plans[len(measured) :]), chosen_index)


class _TimedCopy:
    """Copy of the model under one plan."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.outcome = Outcome()

    def train_steps(self, num_warm_up: int, num_steps: int, on_warm: Callable[[], None]) -> float:
        """Train steps on the first batches; see `TrainSteps`. Collective."""
        trainer = self.trainer
        began = 0.0
        # One lookahead at a time: two would send ids of two plans in no common order.
        with trainer.collection.lookahead(trainer.read_remaining_batches()) as stream:
            for step in range(num_warm_up + num_steps):
                if step == num_warm_up:
                    on_warm()
                    began = time.perf_counter()
                trainer.train_step(stream, self.outcome)
            seconds = time.perf_counter() - began
        trainer.collection.pipeline.updates.apply_pending()
        return seconds


def _open_copy(
    stack: ExitStack,
    setup: RunSetup,
    plan: Plan,
    batches: Sequence[Batch],
    parent: Path | None = None,
) -> Trainer:
    """Open a copy of the model under a plan. stack: closes its stores and removes its files.

    parent: of the folder for rows that do not fit in memory; None: that of the plan.
    """
    backings: Sequence[Backing] = ()
    if plan.needs_backing:
        parent = parent or Path(list_row_folders(plan, setup.folder or Path())[0])
        folder = stack.enter_context(create_temporary_folder(parent))
        tables = setup.collection.tables
        stores = open_stores(RowFiles(folder), tables, plan.shardings, setup.mesh.rank, None)
        for store in stores:
            stack.callback(store.close)
        backings = stores
    copied = copy.deepcopy(setup.model)
    copied.train()
    return open_timed_trainer(setup, copied, plan, batches, backings)
