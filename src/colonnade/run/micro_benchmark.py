"""What a step costs here: the model itself takes a few steps on a sample, with all rows in memory and with too few.

On copies of the model and in a folder of its own that is removed, so that the run to come knows nothing of it.
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
from colonnade.checkpoint.stores import open_stores
from colonnade.comm.mesh import Mesh
from colonnade.data.batches import open_batches
from colonnade.data.contract import Schema, Splits
from colonnade.embedding import EmbeddingCollection
from colonnade.lookup.stacking import stacked
from colonnade.plan.cost.prediction import StepCosts
from colonnade.plan.measure.device import missing_folders
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.store.budget import slot_bytes
from colonnade.store.disk import Disk
from colonnade.store.dram import RowSources
from colonnade.store.log import LogBacking
from colonnade.terminal import Terminal
from colonnade.train.dense import DenseGradients
from colonnade.train.objective import Objective
from colonnade.train.progress import Progress
from colonnade.train.trainer import Outcome, Schedule, Trainer

PASSES = 4
LEAST_STEPS = 4
"""Of a pass over a sample of a single batch, which is repeated."""
LOOKAHEAD = 2


@dataclass(frozen=True, slots=True)
class Pass:
    """Over the sample."""

    seconds: Sequence[float]
    """Of each step."""
    born: float
    moved: float
    """Rows, of a step on average."""


def rehearse(
    model: nn.Module,
    batches: Sequence[Batch],
    schema: Schema,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    batch_size: int,
    place: Path | None = None,
    reads: Mapping[str, float] | None = None,
) -> StepCosts:
    """On one rank. `model` is not open and stays as it is. `place`: a directory on the disk that rows would rest on;
    without, the cost of moving rows is not measured, and of a single batch it is none. `reads`: by table, the rows that
    a step of the run will read; without, memory is as tight as can be. Takes 2 x PASSES passes over `batches`, at
    least one, in turns with much memory and little: machines have slow seconds, and both should meet them.
    """
    with torch.random.fork_rng():  # a plan changes no bit of the run to come
        return _rehearse(
            model,
            _Rehearsal(batches, schema, objective, make_optimizer, batch_size),
            place,
            reads or {},
        )


def _rehearse(
    model: nn.Module, run: _Rehearsal, place: Path | None, reads: Mapping[str, float]
) -> StepCosts:
    collection = _collection(model)
    with ExitStack() as opened:
        ample = run.open(model, build_plan(collection.tables, lookahead=LOOKAHEAD), None)
        opened.callback(ample.close)
        tight = None
        if place is not None:
            folder = opened.enter_context(_folder_in(place))
            tight = run.open(model, _tight(collection, run.batches, reads), folder)
            opened.callback(tight.close)
        first = ample.next_pass()  # meets every row for the first time
        if tight is not None:
            tight.next_pass()
        with_all, with_few = [], []
        for _ in range(PASSES - 1):
            with_all.append(ample.next_pass())
            if tight is not None:
                with_few.append(tight.next_pass())
    base = _median(with_all)
    born = max(_median([first]) - base, 0.0) / first.born if first.born else 0.0
    moved = sum(each.moved for each in with_few) / (PASSES - 1)
    more = max(_median(with_few) - base, 0.0) / moved if moved else 0.0
    return StepCosts(step_seconds=base, born_seconds=born, moved_seconds=more)


def _median(passes: Sequence[Pass]) -> float:
    """Of all steps: a mean would be of this minute's disturbances."""
    return float(np.median([seconds for each in passes for seconds in each.seconds]))


@contextmanager
def _folder_in(place: Path) -> Iterator[Path]:
    """Removed afterwards, with what of `place` was not there before."""
    made = missing_folders(place)
    place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


class _Rehearsed:
    """A copy of the model that trains, pass by pass."""

    def __init__(self, trainer: Trainer, backings: Sequence[LogBacking], num_steps: int) -> None:
        self.trainer, self.backings, self.num_steps = trainer, backings, num_steps
        self.stream = trainer.collection.lookahead(trainer._stream())
        self.is_warm = False

    def next_pass(self) -> Pass:
        """The first one begins with a step that is not timed: torch and the allocator get ready."""
        steps, outcome, store = self.num_steps, Outcome(), self.trainer.collection.store
        if not self.is_warm:
            self.trainer.train_step(self.stream, outcome)
            self.is_warm, steps = True, steps - 1
        before, seconds = copy.copy(store.sources), []
        for _ in range(steps):
            began = time.perf_counter()
            self.trainer.train_step(self.stream, outcome)
            seconds.append(time.perf_counter() - began)
        now = store.sources
        return Pass(
            seconds,
            (now.born - before.born) / steps,
            (_moved(now) - _moved(before)) / steps,
        )

    def close(self) -> None:
        self.stream.close()
        for backing in self.backings:
            backing.close()


class _Rehearsal:
    def __init__(
        self,
        batches: Sequence[Batch],
        schema: Schema,
        objective: Objective,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        batch_size: int,
    ) -> None:
        # The first pass begins with a step that is not timed: one batch alone is met again.
        again = batches if len(batches) > 1 else [copy.copy(batches[0]) for _ in range(LEAST_STEPS)]
        self.batches = list(again)
        self.data = Splits(train=open_batches(self.batches, schema, name="sample"))
        self.num_steps, self.batch_size = len(self.batches), batch_size
        self.objective, self.make_optimizer = objective, make_optimizer

    def open(self, model: nn.Module, plan: Plan, folder: Path | None) -> _Rehearsed:
        """`folder`: for rows that memory does not hold."""
        trainer, backings = self._open(copy.deepcopy(model), plan, folder)
        trainer.model.train()
        return _Rehearsed(trainer, backings, self.num_steps)

    def _open(self, model: nn.Module, plan: Plan, folder: Path | None):
        collection, mesh = _collection(model), Mesh()
        backings = []
        if folder is not None:
            backings = open_stores(
                folder, collection.tables, [each.sharding for each in plan.tables], 0, Disk(), None
            )
        collection.open(plan, mesh, backings=backings)
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
        dense.attach()
        return trainer, backings


def _moved(sources: RowSources) -> int:
    """Rows that came from below or went there."""
    return sources.read + sources.copied + sources.evicted_dirty + sources.evicted_clean


def _tight(
    collection: EmbeddingCollection, batches: Sequence[Batch], reads: Mapping[str, float]
) -> Plan:
    """Tables that read about as many rows in a step as the run will: what a row costs depends on how many there are,
    for reads that training would wait for here may be hidden there."""
    declaration = collection.declaration
    batches = [stacked(batch, declaration) for batch in batches]
    own = {}
    for table in declaration.tables:
        of = [feature.name for feature in declaration.features if feature.table == table.name]
        ids = [
            np.unique(
                np.concatenate(
                    [batch.ids[name].values.numpy() for name in of] or [np.zeros(0, np.int64)]
                )
            )
            for batch in batches
        ]
        rows = rehearsed_rows(ids, LOOKAHEAD + 2, reads.get(table.name, math.inf))
        own[table.name] = int(rows * 1.05 + 16) * slot_bytes(table)
    return build_plan(
        collection.tables, dram_bytes=sum(own.values()), table_bytes=own, lookahead=LOOKAHEAD
    )


def rehearsed_rows(batches: Sequence[np.ndarray], window: int, reads: float) -> int:
    """Rows that memory must hold so that a step of these batches, different ids each, over and over again, reads about
    `reads` rows: those of any `window` batches in a row, and of the others those used most. Pure."""
    every, inverse, uses = np.unique(
        np.concatenate(batches), return_inverse=True, return_counts=True
    )
    order = np.argsort(-uses, kind="stable")
    # Rows kept -> uses of the others, in all steps.
    left = int(uses.sum()) - np.concatenate([[0], np.cumsum(uses[order])])
    num_kept = int(np.argmax(left <= reads * len(batches))) if reads < math.inf else 0
    is_kept = np.zeros(len(every), bool)
    is_kept[order[:num_kept]] = True
    rows, starts = num_kept, np.cumsum([0, *map(len, batches)])
    for first in range(len(batches)):
        last = min(first + window, len(batches))
        coming = np.unique(inverse.ravel()[starts[first] : starts[last]])
        rows = max(rows, num_kept + int((~is_kept[coming]).sum()))
    return max(rows, 1)


def _collection(model: nn.Module) -> EmbeddingCollection:
    return next(module for module in model.modules() if isinstance(module, EmbeddingCollection))
