"""Planning from the data: a sample is profiled, the disk and a few steps of the model are timed, memory goes where it
saves most.

Steps are timed on copies of the model and in a folder of its own that is removed, so that they leave no trace on the
run.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.stores import open_stores, shardings_of
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.config.run import RunConfig
from colonnade.data.batches import open_batches
from colonnade.data.contract import Schema, Source, Splits, bags_of, num_steps
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.lookup.stacking import stacked, stacks_of
from colonnade.plan.constraints import settle_plan
from colonnade.plan.cost.memory import (
    Demand,
    Placed,
    demands,
    mean_over_ranks,
    place,
    place_on_ranks,
    window_fits,
)
from colonnade.plan.cost.prediction import Prediction, StepCosts, depth_for, predict
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.hot import beside_hot, sides_of
from colonnade.plan.measure.device import Device, measure, missing_folders
from colonnade.plan.measure.links import measure_links
from colonnade.plan.measure.profile import Profile, profile
from colonnade.plan.plan import Plan, build_plan, placed_plan
from colonnade.plan.search.candidates import Choice
from colonnade.plan.towers.advice import Advice
from colonnade.row_optimizer import RowOptimizer
from colonnade.run.planner import choose_for, hot_of, link_costs, loads_of
from colonnade.store.budget import slot_bytes
from colonnade.store.disk import Disk
from colonnade.store.dram import RowSources
from colonnade.store.log import LogBacking
from colonnade.store.table_shards import lay_out
from colonnade.table import Table
from colonnade.terminal import Terminal
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
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
        ample = run.open(
            model, build_plan(collection.tables, 1, PlanConfig(lookahead=LOOKAHEAD)), None
        )
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
        self.stream = trainer.collection.lookahead(trainer._read_batches())
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
    memory = MemoryConfig(dram=sum(own.values()), tables=own)
    return build_plan(collection.tables, 1, PlanConfig(memory=memory, lookahead=LOOKAHEAD))


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


SAMPLE_LOOKUPS = 1 << 20
LEAST_BATCHES = 8
MOST_BATCHES = 256
REHEARSED = 12
"""Batches of the sample that the model is timed on."""
AUTO_DEPTHS = (8, 4, 2)
"""Batches of lookahead that memory is shared for where they are to be chosen: the first that fits."""
UNKNOWN_LENGTH = 16
"""A run of which nobody knows the length is taken to be so many samples long."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    profile: Profile
    device: Device
    costs: StepCosts
    prediction: Prediction
    choice: Choice
    loads: tuple[TableLoad, ...]
    world: World
    advice: tuple[Advice, ...] = ()
    """What tower modules would save, where they were asked about."""


def measured_before(folder: Path | None, places: Sequence[str]) -> Device | None:
    """What a run folder says of the disks of `places`; None: nothing."""
    if folder is None or not (folder / "device.json").is_file():
        return None
    try:
        device = Device.from_json((folder / "device.json").read_text(encoding="utf-8"))
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError):
        return None  # it is measured anew
    return device if [each.path for each in device.directories] == list(places) else None


def read_sample(
    source: Source, batch_size: int, lookups: int = SAMPLE_LOOKUPS, num_ranks: int = 1
) -> list[Batch]:
    """Rank 0's first batches of the first epoch, until they hold so many lookups."""
    found: list[Batch] = []
    count = 0
    batches = source.batches(batch_size, num_ranks=num_ranks)
    try:
        for batch in islice(batches, MOST_BATCHES):
            found.append(batch)
            count += sum(len(ids.values) for ids in batch.ids.values())
            if count >= lookups and len(found) >= LEAST_BATCHES:
                break
    finally:
        if hasattr(batches, "close"):
            batches.close()
    return found


def plan_from_sample(
    model: nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    config: RunConfig,
    *,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    world: World,
    place_of_rows: Path,
    first_step: int = 0,
    folder: Path | None = None,
    device: Device | None = None,
    costs: StepCosts | None = None,
    lookups: int = SAMPLE_LOOKUPS,
) -> Planned:
    """On one rank, for all. `place_of_rows`: where rows rest that have no other place. `device`, `costs`: measured
    before, not again; `folder`: whose device.json may say the same; `world`: with what is known of its links. Memory is
    shared as `plan.placement` says. Raises BudgetExceeded where a batch does not fit, ConfigError where there is no
    sample or what is said of shardings cannot be, StorageError where a directory cannot be measured."""
    tables, declared, owners = collection.tables, collection.declaration, len(world.owners)
    even = build_plan(tables, world, settle_plan(config.plan, tables, world))
    sample = read_sample(data.train, config.train.samples_per_step, lookups)
    lookups_of = [stacked(batch, declared) for batch in sample]
    profiled = profile(collection.tables, declared.features, lookups_of)
    hot = hot_of(config.plan, declared, lookups_of, world, _recorded(folder))
    dram = _dram_beside_hot(config.plan, collection.tables, world, hot)
    known_steps = _steps(config, data.train)
    steps = first_step + UNKNOWN_LENGTH * len(sample) if known_steps is None else known_steps
    mapped_bytes = 0 if even.mapped is None else even.mapped.bytes
    is_even, is_auto = config.plan.placement == "even", config.plan.lookahead == "auto"
    batch_size = profiled.largest_batch  # of data smaller than a batch: what there is
    at_once = 1 + even.latest
    demands_of = partial(
        demands, collection.tables, profiled, batch_size=batch_size, at_once=at_once, num_ranks=owners,
        num_samples=data.train.num_samples, first_batch=first_step,
        last_batch=max(steps, first_step + 1), fixed_bytes=config.plan.memory.tables,
    )  # fmt: skip
    depths = AUTO_DEPTHS if is_auto else (int(config.plan.lookahead),)
    depth, wanted = _fitting_window(depths, at_once, demands_of, dram)
    place(wanted, dram, mapped_bytes, at_once=at_once)
    # Only now is the disk touched: what does not fit has been said.
    places = _places(even, place_of_rows)
    device = device or measured_before(folder, places) or measure(places)
    sides, side_profile = sides_of(declared, hot, lookups_of) if hot else (declared, profiled)
    loads = loads_of(
        sides, side_profile, world, last_batch=steps, num_samples=data.train.num_samples, codecs=even.codecs,
    )  # fmt: skip
    bags = bags_of(data.train.schema) | set(stacks_of(declared))
    choice = choose_for(collection, sides, loads, config, world, device, wanted, bags, hot)
    even = build_plan(tables, world, settle_plan(config.plan, tables, world, choice, hot))
    shardings = [table.sharding for table in even.tables]
    wanted = demands_of(window=depth + at_once, shardings=shardings)
    placed = (
        as_planned(wanted, even) if is_even
        else place_on_ranks(wanted, shardings, world.num_ranks, dram, mapped_bytes, at_once=at_once)
    )  # fmt: skip
    capacities = {each.name: (each.rows, each.tier) for each in placed}
    wanted, placed = mean_over_ranks(wanted, placed, shardings, owners)
    if costs is None:
        costs = rehearse(
            model, _rehearsed(sample, data.train, config.train.samples_per_step, world.num_trainers),
            data.train.schema, objective, make_optimizer, batch_size=config.train.samples_per_step,
            place=Path(places[0]) if places else None, reads={each.name: each.reads for each in placed},
        )  # fmt: skip
    if is_even and even.lookahead != "auto":
        depth = even.lookahead
    elif is_auto:
        depth = depth_for(placed, costs, device, depth)
    prediction = predict(
        collection.tables, wanted, placed,
        [profiled.lookups_per_sample(t) for t in range(len(collection.tables))], costs, device,
        batch_size=batch_size, num_batches=max(steps - first_step, 1), num_ranks=owners, lookahead=depth,
        write_budget=config.plan.write_budget,
        links=link_costs(choice, loads, device, model, world, collection.declaration, even),
    )  # fmt: skip
    plan = replace(even, prediction=asdict(prediction))
    if not is_even:
        plan = placed_plan(plan, collection.tables, capacities, lookahead=depth)
    return Planned(plan, profiled, device, costs, prediction, choice, tuple(loads), world)


def _recorded(folder: Path | None) -> dict[str, Sharding]:
    """By table: of the newest checkpoint of a run."""
    steps = [] if folder is None else list_checkpoints(folder)
    if folder is None or not steps:
        return {}
    header = read_header(folder, steps[-1])
    return dict(zip(header["model"]["tables"], shardings_of(header), strict=True))


def as_planned(wanted: Sequence[Demand], plan: Plan) -> list[Placed]:
    """The rows that a plan gives each table, and what they leave to be read."""
    return [
        Placed(
            each.name,
            min(table.capacity_rows, each.most_rows),
            0.0 if table.fits or table.tier == "mapped" else each.reads_at(table.capacity_rows),
            table.tier,
        )
        for each, table in zip(wanted, plan.tables, strict=True)
    ]


def _dram_beside_hot(
    config: PlanConfig, tables: Sequence[Table], world: World, hot: Mapping[str, Sequence[int]]
) -> int | None:
    """Return the memory that copies of hot rows leave on each rank; None: there is no limit."""
    plan = build_plan(tables, world, settle_plan(config, tables, world, hot=hot))
    laid = lay_out(tables, plan.shardings)
    return beside_hot(laid, config.memory.dram, "plan.memory.dram", slot_bytes)


def _rehearsed(
    sample: Sequence[Batch], source: Source, batch_size: int, num_trainers: int
) -> list[Batch]:
    """Return the batches to time: of several ranks one rank's, for what travels between ranks is predicted apart."""
    if num_trainers > 1:
        sample = read_sample(source, batch_size, 1, num_trainers)
    return [batch for batch in sample if batch.size == sample[0].size][:REHEARSED]


def _places(plan: Plan, place_of_rows: Path) -> list[str]:
    """Return the directories that rows of this plan rest in; none where all fit in memory."""
    if not plan.needs_backing:
        return []
    return [each.path for each in plan.ssd] or [str(place_of_rows)]


def _fitting_window(
    depths: Iterable[int], at_once: int, demands_of: Callable[..., list[Demand]], dram: int | None
) -> tuple[int, list[Demand]]:
    """Return the first of these depths whose window of batches fits in memory, else the last; and what it demands."""
    for depth in depths:
        wanted = demands_of(window=depth + at_once)
        if window_fits(wanted, dram):
            break
    return depth, wanted


def plan_for_all(
    model: nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    config: RunConfig,
    mesh: Mesh,
    folder: Path | None,
    *,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    first_step: int,
) -> tuple[Plan, Device]:
    """Collective: links are measured by all, rank 0 plans for all. Writes nothing that stays."""
    world = measure_links(mesh)
    said: dict[str, str] = {}
    if mesh.rank == 0:
        try:
            found = plan_from_sample(
                model,
                collection,
                data,
                config,
                objective=objective,
                make_optimizer=make_optimizer,
                world=world,
                place_of_rows=folder or Path(),
                folder=folder,
                first_step=first_step,
            )
            said = {"plan": found.plan.to_json(), "device": found.device.to_json()}
        except ColonnadeError as error:
            if mesh.num_ranks == 1:
                raise
            said = {"error": str(error)}
    heard = json.loads(mesh.all_gather_bytes("control", json.dumps(said).encode())[0])
    if "error" in heard:
        raise ConfigError(f"rank 0 could not plan: {heard['error']}")
    return Plan.from_json(heard["plan"]), Device.from_json(heard["device"])


def _steps(config: RunConfig, source: Source) -> int | None:
    """Of the whole run; None: nobody knows."""
    train = config.train
    known = source.num_samples
    steps = (
        None
        if known is None
        else num_steps(known, train.samples_per_step) * max(train.num_epochs, 1)
    )
    if train.max_steps is not None:
        return train.max_steps if steps is None else min(steps, train.max_steps)
    return steps
