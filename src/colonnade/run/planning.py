"""Planning from the data: profile a sample, time the disk and a few steps, and give memory to the tables it helps most.

Steps are timed on copies of the model and in a temporary folder, so they change nothing of the run.
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
from colonnade.checkpoint.stores import open_stores, read_table_shardings
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import MemoryConfig, PlanConfig
from colonnade.config.run import RunConfig
from colonnade.data.batches import open_batches
from colonnade.data.contract import Schema, Source, Splits, multi_id_columns, num_steps
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.lookup.stacking import hash_ids, hashed_tables_by_feature
from colonnade.plan.constraints import resolve_plan_config
from colonnade.plan.cost.memory import (
    MemoryDemand,
    TableMemory,
    average_over_ranks,
    divide_memory,
    divide_memory_on_ranks,
    fits_batches_in_flight,
    predict_demands,
)
from colonnade.plan.cost.prediction import (
    Prediction,
    StepCosts,
    choose_lookahead_depth,
    predict_speed,
)
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.hot import profile_hot_and_cold, subtract_hot_row_bytes
from colonnade.plan.measure.device import Device, list_missing_folders, measure_device
from colonnade.plan.measure.links import measure_links
from colonnade.plan.measure.profile import Profile, profile_batches
from colonnade.plan.plan import Plan, apply_placement, build_plan
from colonnade.plan.search.candidates import PlanDecision
from colonnade.plan.towers.advice import Advice
from colonnade.row_optimizer import RowOptimizer
from colonnade.run.planner import (
    choose_hot_ids,
    choose_shardings_and_exchanges,
    estimate_link_costs,
    estimate_table_loads,
)
from colonnade.store.budget import slot_bytes
from colonnade.store.disk import Disk
from colonnade.store.dram import RowSources
from colonnade.store.log import LogBacking
from colonnade.store.table_shards import shard_tables
from colonnade.table import Table
from colonnade.terminal import Terminal
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
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
            model, build_plan(collection.tables, 1, PlanConfig(lookahead=LOOKAHEAD)), None
        )
        stack.callback(with_all_rows.close)
        with_little_memory = None
        if parent is not None:
            temporary = stack.enter_context(_create_temporary_folder(parent))
            with_little_memory = benchmark.open_model(
                model, _plan_with_little_memory(collection, benchmark.batches, reads), temporary
            )
            stack.callback(with_little_memory.close)
        first_pass = with_all_rows.train_timed_pass()  # initialises every row
        if with_little_memory is not None:
            with_little_memory.train_timed_pass()
        ample_passes, tight_passes = [], []
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
def _create_temporary_folder(parent: Path) -> Iterator[Path]:
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

    def __init__(self, trainer: Trainer, backings: Sequence[LogBacking], num_steps: int) -> None:
        self.trainer, self.backings, self.num_steps = trainer, backings, num_steps
        self.stream = trainer.collection.lookahead(trainer._read_remaining_batches())
        self.is_warm = False

    def train_timed_pass(self) -> TimedPass:
        """Train one pass. The first pass begins with a step that is not timed, to warm up torch and the allocator."""
        steps, outcome, store = self.num_steps, Outcome(), self.trainer.collection.store
        if not self.is_warm:
            self.trainer.train_step(self.stream, outcome)
            self.is_warm, steps = True, steps - 1
        before, seconds = copy.copy(store.sources), []
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
        """Stop the lookahead and close the stores."""
        self.stream.close()
        for backing in self.backings:
            backing.close()


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
        self.num_steps, self.batch_size = len(self.batches), batch_size
        self.objective, self.make_optimizer = objective, make_optimizer

    def open_model(self, model: nn.Module, plan: Plan, folder: Path | None) -> _TimedModel:
        """Open a copy of the model. folder: for rows that do not fit in memory."""
        trainer, backings = self._build_trainer(copy.deepcopy(model), plan, folder)
        trainer.model.train()
        return _TimedModel(trainer, backings, self.num_steps)

    def _build_trainer(self, model: nn.Module, plan: Plan, folder: Path | None):
        collection, mesh = _find_collection(model), Mesh()
        backings = []
        if folder is not None:
            backings = open_stores(
                folder,
                collection.tables,
                [table_plan.sharding for table_plan in plan.tables],
                0,
                Disk(),
                None,
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
        dense.build_buckets()
        return trainer, backings


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
    rows, starts = num_cached, np.cumsum([0, *map(len, batches)])
    for first in range(len(batches)):
        last = min(first + window, len(batches))
        window_rows = np.unique(inverse.ravel()[starts[first] : starts[last]])
        rows = max(rows, num_cached + int((~is_cached[window_rows]).sum()))
    return max(rows, 1)


def _find_collection(model: nn.Module) -> EmbeddingCollection:
    return next(module for module in model.modules() if isinstance(module, EmbeddingCollection))


SAMPLE_LOOKUPS = 1 << 20
MIN_BATCHES = 8
MAX_BATCHES = 256
MAX_TIMED_BATCHES = 12
"""Maximum number of batches of the sample that the model is timed on."""
AUTO_DEPTHS = (8, 4, 2)
"""Candidates for an automatic lookahead, in batches; the first with a window that fits in memory is taken."""
SAMPLES_OF_UNKNOWN_LENGTH = 16
"""Assumed length of a run of unknown length, as a multiple of the sample."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """Plan, and the measurements and choices that it is made from."""

    plan: Plan
    profile: Profile
    device: Device
    costs: StepCosts
    prediction: Prediction
    choice: PlanDecision
    loads: tuple[TableLoad, ...]
    world: World
    advice: tuple[Advice, ...] = ()
    """Estimated savings of tower modules; empty unless requested."""


def read_measured_device(folder: Path | None, paths: Sequence[str]) -> Device | None:
    """Read the recorded measurement of these paths from a run folder; None if there is none."""
    if folder is None or not (folder / "device.json").is_file():
        return None
    try:
        device = Device.from_json((folder / "device.json").read_text(encoding="utf-8"))
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError):
        return None  # it is measured again
    return device if [directory.path for directory in device.directories] == list(paths) else None


def read_sample_batches(
    source: Source, batch_size: int, lookups: int = SAMPLE_LOOKUPS, num_ranks: int = 1
) -> list[Batch]:
    """Read rank 0's first batches of the first epoch until they have `lookups` lookups."""
    sample: list[Batch] = []
    count = 0
    batches = source.batches(batch_size, num_ranks=num_ranks)
    try:
        for batch in islice(batches, MAX_BATCHES):
            sample.append(batch)
            count += sum(len(ids.values) for ids in batch.ids.values())
            if count >= lookups and len(sample) >= MIN_BATCHES:
                break
    finally:
        if hasattr(batches, "close"):
            batches.close()
    return sample


def _divide_memory_among_tables(
    tables: Sequence[Table],
    memory_demands: Sequence[MemoryDemand],
    plan: Plan,
    world: World,
    dram_bytes: int | None,
    mapped_bytes: int | None,
    at_once: int,
    *,
    is_even: bool,
) -> list[TableMemory]:
    """Return the memory of each table on its fullest rank: as planned, or by what it saves. at_once: batches in
    flight."""
    if is_even:
        return get_planned_memory(memory_demands, plan)
    shardings = [table.sharding for table in plan.tables]
    placed = divide_memory_on_ranks(
        memory_demands, shardings, world.num_ranks, dram_bytes, mapped_bytes, at_once=at_once
    )
    rows = {memory.name: (memory.rows, memory.tier) for memory in placed}
    return _subtract_mapped_hits(
        placed, memory_demands, apply_placement(plan, tables, rows, lookahead=0)
    )


def plan_from_sample(
    model: nn.Module, collection: EmbeddingCollection, data: Splits, config: RunConfig, *, objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer], world: World, rows_folder: Path, first_step: int = 0,
    folder: Path | None = None, device: Device | None = None, costs: StepCosts | None = None,
    lookups: int = SAMPLE_LOOKUPS,
) -> PlanningResult:  # fmt: skip
    """Plan from a sample, on one rank for all ranks. Memory is shared between tables by `plan.placement`.

    rows_folder: folder for rows without a configured directory. world: with measured links. device, costs: earlier
    measurements, which are not repeated. folder: run folder with a device.json that may have the device.
    Raises BudgetExceeded if a batch does not fit, ConfigError without a sample or with impossible shardings,
    StorageError if a directory cannot be measured.
    """
    tables, declared, owners = collection.tables, collection.declaration, len(world.owners)
    base_plan = build_plan(tables, world, resolve_plan_config(config.plan, tables, world))
    sample = read_sample_batches(data.train, config.train.samples_per_step, lookups)
    stacked_sample = [hash_ids(batch, declared) for batch in sample]
    sample_profile = profile_batches(collection.tables, declared.features, stacked_sample)
    recorded = _read_recorded_shardings(folder)
    hot_ids = choose_hot_ids(config.plan, declared, stacked_sample, world, recorded)
    dram_bytes = _dram_without_hot_rows(config.plan, collection.tables, world, hot_ids)
    unknown_steps = first_step + SAMPLES_OF_UNKNOWN_LENGTH * len(sample)
    known_steps = _count_steps_of_run(config, data.train)
    steps = unknown_steps if known_steps is None else known_steps
    mapped_bytes = 0 if base_plan.mapped is None else base_plan.mapped.bytes
    is_evenly_placed, is_auto = config.plan.placement == "even", config.plan.lookahead == "auto"
    batch_size = sample_profile.largest_batch  # all samples, if there are fewer than a batch
    batches_in_flight = 1 + base_plan.max_staleness_steps
    demands_of = partial(
        predict_demands, collection.tables, sample_profile, batch_size=batch_size, at_once=batches_in_flight,
        num_ranks=owners, num_samples=data.train.num_samples, first_batch=first_step,
        last_batch=max(steps, first_step + 1), fixed_bytes=config.plan.memory.tables,
    )  # fmt: skip
    depths = AUTO_DEPTHS if is_auto else (int(config.plan.lookahead),)
    depth, memory_demands = _find_fitting_window(depths, batches_in_flight, demands_of, dram_bytes)
    divide_memory(memory_demands, dram_bytes, mapped_bytes, at_once=batches_in_flight)
    # The disk is measured only after the checks of memory.
    paths = _folders_of_rows(base_plan, rows_folder)
    device = device or read_measured_device(folder, paths) or measure_device(paths)
    hot_and_cold = profile_hot_and_cold(declared, hot_ids, stacked_sample) if hot_ids else None
    sides, side_profile = hot_and_cold or (declared, sample_profile)
    loads = estimate_table_loads(
        sides, side_profile, world, last_batch=steps, num_samples=data.train.num_samples, codecs=base_plan.codecs,
    )  # fmt: skip
    bags = multi_id_columns(data.train.schema) | set(hashed_tables_by_feature(declared))
    choice = choose_shardings_and_exchanges(
        collection, sides, loads, config, world, device, memory_demands, bags, hot_ids
    )
    plan_config = resolve_plan_config(config.plan, tables, world, choice, hot_ids)
    base_plan = build_plan(tables, world, plan_config)
    shardings = [table.sharding for table in base_plan.tables]
    memory_demands = demands_of(window=depth + batches_in_flight, shardings=shardings)
    by_rank = _divide_memory_among_tables(
        tables, memory_demands, base_plan, world, dram_bytes, mapped_bytes, batches_in_flight, is_even=is_evenly_placed,
    )  # fmt: skip
    capacities = {table.name: (table.rows, table.tier) for table in by_rank}
    memory_demands, placements = average_over_ranks(memory_demands, by_rank, shardings, owners)
    if costs is None:
        batches = _select_timed_batches(
            sample, data.train, config.train.samples_per_step, world.num_trainers
        )
        costs = run_micro_benchmark(
            model, batches, data.train.schema, objective, make_optimizer, batch_size=config.train.samples_per_step,
            folder=Path(paths[0]) if paths else None, reads={table.name: table.reads for table in placements},
        )  # fmt: skip
    if is_evenly_placed and base_plan.lookahead != "auto":
        depth = base_plan.lookahead
    elif is_auto:
        depth = choose_lookahead_depth(placements, costs, device, depth)
    prediction = predict_speed(
        collection.tables, memory_demands, placements,
        [sample_profile.lookups_per_sample(t) for t in range(len(collection.tables))], costs, device,
        batch_size=batch_size, num_batches=max(steps - first_step, 1), num_ranks=owners, lookahead=depth,
        write_budget=config.plan.write_budget,
        links=estimate_link_costs(choice, loads, device, model, world, collection.declaration, base_plan),
    )  # fmt: skip
    plan = replace(base_plan, prediction=asdict(prediction))
    if not is_evenly_placed:
        plan = apply_placement(plan, collection.tables, capacities, lookahead=depth)
    return PlanningResult(plan, sample_profile, device, costs, prediction, choice, tuple(loads), world)  # fmt: skip


def _read_recorded_shardings(folder: Path | None) -> dict[str, Sharding]:
    """Read the shardings of the newest checkpoint of a run by table; {} if there is none."""
    steps = [] if folder is None else list_checkpoints(folder)
    if folder is None or not steps:
        return {}
    header = read_header(folder, steps[-1])
    return dict(zip(header["model"]["tables"], read_table_shardings(header), strict=True))


def _subtract_mapped_hits(
    placed: Sequence[TableMemory], memory_demands: Sequence[MemoryDemand], plan: Plan
) -> list[TableMemory]:
    """Return the memory with the reads that rows in mapped memory leave to the files."""
    return [
        replace(memory, reads=demand.reads_at(memory.rows + table_plan.mapped_rows))
        if table_plan.mapped_rows
        else memory
        for memory, demand, table_plan in zip(placed, memory_demands, plan.tables, strict=True)
    ]


def get_planned_memory(memory_demands: Sequence[MemoryDemand], plan: Plan) -> list[TableMemory]:
    """Return the memory that a plan gives each table, and the rows that a step then reads."""
    return [
        TableMemory(
            demand.name,
            min(table_plan.capacity_rows, demand.max_rows),
            0.0
            if table_plan.fits or table_plan.tier == "mapped"
            else demand.reads_at(table_plan.capacity_rows + table_plan.mapped_rows),
            table_plan.tier,
        )
        for demand, table_plan in zip(memory_demands, plan.tables, strict=True)
    ]


def _dram_without_hot_rows(
    config: PlanConfig, tables: Sequence[Table], world: World, hot: Mapping[str, Sequence[int]]
) -> int | None:
    """Return the memory of each rank without its copies of hot rows; None: no limit."""
    plan = build_plan(tables, world, resolve_plan_config(config, tables, world, hot=hot))
    shards = shard_tables(tables, plan.shardings)
    return subtract_hot_row_bytes(shards, config.memory.dram, "plan.memory.dram", slot_bytes)


def _select_timed_batches(
    sample: Sequence[Batch], source: Source, batch_size: int, num_trainers: int
) -> list[Batch]:
    """Return the batches to time: one rank's share, because communication is predicted separately."""
    if num_trainers > 1:
        sample = read_sample_batches(source, batch_size, 1, num_trainers)
    return [batch for batch in sample if batch.size == sample[0].size][:MAX_TIMED_BATCHES]


def _folders_of_rows(plan: Plan, rows_folder: Path) -> list[str]:
    """Return the directories for rows of this plan; [] if all rows fit in memory."""
    if not plan.needs_backing:
        return []
    return [directory.path for directory in plan.ssd] or [str(rows_folder)]


def _find_fitting_window(
    depths: Iterable[int],
    batches_in_flight: int,
    demands_of: Callable[..., list[MemoryDemand]],
    dram: int | None,
) -> tuple[int, list[MemoryDemand]]:
    """Return the first depth with a window of batches that fits in memory, else the last; and its memory demands."""
    for depth in depths:
        memory_demands = demands_of(window=depth + batches_in_flight)
        if fits_batches_in_flight(memory_demands, dram):
            break
    return depth, memory_demands


def plan_on_rank_0(
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
    """Measure links on all ranks, and plan on rank 0 for all. Collective. Nothing stays written."""
    world = measure_links(mesh)
    message: dict[str, str] = {}
    if mesh.rank == 0:
        try:
            planned = plan_from_sample(
                model,
                collection,
                data,
                config,
                objective=objective,
                make_optimizer=make_optimizer,
                world=world,
                rows_folder=folder or Path(),
                folder=folder,
                first_step=first_step,
            )
            message = {"plan": planned.plan.to_json(), "device": planned.device.to_json()}
        except ColonnadeError as error:
            if mesh.num_ranks == 1:
                raise
            message = {"error": str(error)}
    received = json.loads(mesh.all_gather_bytes("control", json.dumps(message).encode())[0])
    if "error" in received:
        raise ConfigError(f"rank 0 could not plan: {received['error']}")
    return Plan.from_json(received["plan"]), Device.from_json(received["device"])


def _count_steps_of_run(config: RunConfig, source: Source) -> int | None:
    """Count the steps of the whole run; None if the number of samples is unknown."""
    train = config.train
    num_samples = source.num_samples
    steps = (
        None
        if num_samples is None
        else num_steps(num_samples, train.samples_per_step) * max(train.num_epochs, 1)
    )
    if train.max_steps is not None:
        return train.max_steps if steps is None else min(steps, train.max_steps)
    return steps
