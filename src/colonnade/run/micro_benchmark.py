"""Micro-benchmark of a model: some steps with all rows in memory, and with little memory, on one rank.

Steps are timed on copies of the model and in a temporary folder, so they change nothing of the run.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.checkpoint.stores import RankStores, open_stores
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.data.batches import open_batches
from colonnade.data.contract import Schema, Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.lookup.stacking import hash_ids
from colonnade.plan.cost.prediction import (
    StepCosts,
)
from colonnade.plan.measure.device import list_missing_folders
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.store.budget import slot_bytes
from colonnade.store.disk import Disk
from colonnade.store.dram import RowSources
from colonnade.terminal import Terminal
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import Objective
from colonnade.train.progress import Progress
from colonnade.train.trainer import Outcome, Schedule, Trainer

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
    model: nn.Module,
    batches: Sequence[Batch],
    schema: Schema,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    batch_size: int,
    folder: Path | None = None,
    reads: Mapping[str, float] | None = None,
) -> StepCosts:
    """Time steps of a model, with all rows in memory and with little memory. Runs on one rank.

    Takes 2 x PASSES passes over `batches`, at least one. Passes with much and with little memory alternate, so that
    slow seconds of the machine affect both.
    model: not open; does not change.
    folder: on the disk for rows. None: the cost of moving rows is not measured. With a single batch it is zero.
    reads: number of rows that a step of the run will read, by table. None: memory is as small as possible.
    """
    with torch.random.fork_rng():  # so that planning changes no bit of the later run
        return _measure_step_costs(
            model,
            _MicroBenchmark(batches, schema, objective, make_optimizer, batch_size),
            folder,
            reads or {},
        )


def _measure_step_costs(
    model: nn.Module, benchmark: _MicroBenchmark, parent: Path | None, reads: Mapping[str, float]
) -> StepCosts:
    """Time passes with and without memory for all rows, and compute the costs per step and row."""
    collection = _find_collection(model)
    with ExitStack() as stack:
        with_all_rows = benchmark.open_model(
            stack, model, build_plan(collection.tables, 1, PlanConfig(lookahead=LOOKAHEAD)), None
        )
        with_little_memory = None
        if parent is not None:
            temporary = stack.enter_context(create_temporary_folder(parent))
            with_little_memory = benchmark.open_model(
                stack,
                model,
                _plan_with_little_memory(collection, benchmark.batches, reads),
                temporary,
            )
        first_pass = with_all_rows.train_timed_pass()  # initialises every row
        if with_little_memory is not None:
            with_little_memory.train_timed_pass()
        ample_passes = []
        tight_passes = []
        for _ in range(PASSES - 1):
            ample_passes.append(with_all_rows.train_timed_pass())
            if with_little_memory is not None:
                tight_passes.append(with_little_memory.train_timed_pass())
    step_seconds = _median_step_seconds(ample_passes)
    first_use_seconds = (
        max(_median_step_seconds([first_pass]) - step_seconds, 0.0) / first_pass.born_rows
        if first_pass.born_rows
        else 0.0
    )
    num_moved = sum(step_pass.moved_rows for step_pass in tight_passes) / (PASSES - 1)
    moved_seconds = (
        max(_median_step_seconds(tight_passes) - step_seconds, 0.0) / num_moved
        if num_moved
        else 0.0
    )
    return StepCosts(
        step_seconds=step_seconds, first_use_seconds=first_use_seconds, moved_seconds=moved_seconds
    )


def _median_step_seconds(passes: Sequence[TimedPass]) -> float:
    """Return the median over all steps, which disturbances of the machine change less than a mean."""
    return float(np.median([seconds for step_pass in passes for seconds in step_pass.seconds]))


@contextmanager
def create_temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a temporary folder in `parent`; remove it and missing parents that were created for it afterwards."""
    created = list_missing_folders(parent)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=parent))
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
        return TimedPass(
            seconds,
            (now.born - before.born) / steps,
            (_count_moved_rows(now) - _count_moved_rows(before)) / steps,
        )

    def close(self) -> None:
        """Stop the lookahead."""
        self.stream.close()


class _MicroBenchmark:
    """Repeated sample batches, and what is needed to train copies of a model on them."""

    def __init__(
        self,
        batches: Sequence[Batch],
        schema: Schema,
        objective: Objective,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        batch_size: int,
    ) -> None:
        # The first pass begins with an untimed step, so a single batch must be repeated.
        repeated = (
            batches if len(batches) > 1 else [copy.copy(batches[0]) for _ in range(MIN_STEPS)]
        )
        self.batches = list(repeated)
        self.data = Splits(train=open_batches(self.batches, schema, name="sample"))
        self.num_steps = len(self.batches)
        self.batch_size = batch_size
        self.objective = objective
        self.make_optimizer = make_optimizer

    def open_model(
        self, stack: ExitStack, model: nn.Module, plan: Plan, folder: Path | None
    ) -> _TimedModel:
        """Open a copy of the model. folder: for rows that do not fit in memory. stack: stops and closes the copy."""
        stores: RankStores = []
        if folder is not None:
            tables = _find_collection(model).tables
            stores = open_stores(folder, tables, plan.shardings, 0, Disk(), None)
            for store in stores:
                stack.callback(store.close)
        trainer = self._build_trainer(copy.deepcopy(model), plan, stores)
        trainer.model.train()
        timed = _TimedModel(trainer, self.num_steps)
        stack.callback(timed.close)
        return timed

    def _build_trainer(self, model: nn.Module, plan: Plan, stores: RankStores) -> Trainer:
        collection = _find_collection(model)
        mesh = Mesh()
        collection.open(plan, mesh, backings=stores)
        parameters = [p for p in model.parameters() if p.requires_grad]
        dense = DenseGradients(parameters, mesh)
        trainer = Trainer(
            model,
            collection,
            self.data,
            Schedule(batch_size=self.batch_size, epochs=PASSES + 2),
            objective=self.objective,
            dense_optimizer=self.make_optimizer(parameters),
            rows=RowOptimizer(collection),
            dense=dense,
            progress=Progress(total_steps=None, console=Terminal(quiet=True), is_quiet=True),
        )
        dense.build_buckets()
        return trainer


def _count_moved_rows(sources: RowSources) -> int:
    """Count rows that were read from or evicted to the tier below."""
    return sources.read + sources.copied + sources.evicted_dirty + sources.evicted_clean


def _plan_with_little_memory(
    collection: EmbeddingCollection, batches: Sequence[Batch], reads: Mapping[str, float]
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
        rows = choose_resident_rows(ids, LOOKAHEAD + 2, reads.get(table.name, math.inf))
        budgets[table.name] = int(rows * 1.05 + 16) * slot_bytes(table)
    memory = MemoryConfig(dram=sum(budgets.values()), tables=budgets)
    return build_plan(collection.tables, 1, PlanConfig(memory=memory, lookahead=LOOKAHEAD))


def choose_resident_rows(batches: Sequence[np.ndarray], window: int, reads: float) -> int:
    """Return how many rows must be in memory so that a step over these batches reads about `reads` rows. Pure.

    Memory holds the rows of any `window` consecutive batches, and the most used of the others. batches: unique ids of
    each batch; training repeats them.
    """
    unique_ids, inverse, uses = np.unique(
        np.concatenate(batches), return_inverse=True, return_counts=True
    )
    order = np.argsort(-uses, kind="stable")
    # By number of cached rows: uses of all other rows, in all steps.
    uses_left = int(uses.sum()) - np.concatenate([[0], np.cumsum(uses[order])])
    num_cached = int(np.argmax(uses_left <= reads * len(batches))) if reads < math.inf else 0
    is_cached = np.zeros(len(unique_ids), bool)
    is_cached[order[:num_cached]] = True
    rows = num_cached
    starts = np.cumsum([0, *map(len, batches)])
    for first in range(len(batches)):
        last = min(first + window, len(batches))
        window_rows = np.unique(inverse.ravel()[starts[first] : starts[last]])
        rows = max(rows, num_cached + int((~is_cached[window_rows]).sum()))
    return max(rows, 1)


def _find_collection(model: nn.Module) -> EmbeddingCollection:
    return next(module for module in model.modules() if isinstance(module, EmbeddingCollection))
