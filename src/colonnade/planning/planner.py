"""Planning from the data: profile a sample, time the disk and some steps, give memory to the tables it helps most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.stores import read_table_shardings
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import PlanConfig, TablePlanConfig
from colonnade.config.run import RunConfig
from colonnade.data.contract import Source, Splits, multi_id_columns
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ColonnadeError
from colonnade.lookup.stacking import hash_ids, hashed_tables_by_feature
from colonnade.plan.comparison import ComparedPlan, PlanComparison, order_plans_to_time
from colonnade.plan.constraints import is_settled, read_table_constraints, resolve_plan_config
from colonnade.plan.cost.memory import (
    MemoryDemand,
    TableMemory,
    Tier,
    average_over_ranks,
    divide_memory,
    divide_memory_on_ranks,
    fits_batches_in_flight,
    predict_demands,
)
from colonnade.plan.cost.prediction import (
    LinkCosts,
    Prediction,
    StepCosts,
    choose_lookahead_depth,
    predict_speed,
)
from colonnade.plan.cost.table_stats import TableLoad
from colonnade.plan.hot import profile_hot_and_cold, subtract_hot_row_bytes
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import Profile, profile_batches
from colonnade.plan.placement import is_memory_limited, place_rows_on_device
from colonnade.plan.plan import Plan, apply_placement, build_plan
from colonnade.plan.search.candidates import PlanDecision
from colonnade.planning.choices import (
    check_exchanges_of_features,
    choose_hot_ids,
    choose_shardings_and_exchanges,
    estimate_link_costs,
    estimate_table_loads,
)
from colonnade.planning.measure import measure_device, measure_links
from colonnade.planning.placement import (
    SAMPLE_LOOKUPS,
    Placement,
    broadcast_plan_message,
    list_row_folders,
    place_on_rank_0,
    predict_last_step,
    read_sample_batches,
)
from colonnade.planning.timing import run_micro_benchmark
from colonnade.store.budget import slot_bytes
from colonnade.store.table_shards import shard_tables
from colonnade.table import Table
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
from colonnade.train.objective import Objective

MAX_TIMED_BATCHES = 12
"""Maximum number of batches of the sample that the model is timed on."""
AUTO_DEPTHS = (8, 4, 2)
"""Candidates for an automatic lookahead, in batches; the first with a window that fits in memory is taken."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Plan with its prediction."""

    plan: Plan
    prediction: Prediction


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
    runners_up: tuple[PlannedStep, ...] = ()
    """Plans of other kinds, in the order in which they are timed (`order_plans_to_time`); none on one rank."""


def read_measured_device(folder: Path | None, paths: Sequence[str]) -> Device | None:
    """Read the recorded measurement of these paths from a run folder; None if there is none."""
    if folder is None or not (folder / "device.json").is_file():
        return None
    try:
        device = Device.from_json((folder / "device.json").read_text(encoding="utf-8"))
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError):
        return None  # it is measured again
    return device if [directory.path for directory in device.directories] == list(paths) else None


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


def _order_runners_up(best: PlannedStep, runners_up: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Return the runners-up in the order in which they are timed after `best`."""
    candidates = [best, *runners_up]
    exchanges = [[table.exchange for table in step.plan.tables] for step in candidates]
    seconds = [step.prediction.step_seconds for step in candidates]
    return [candidates[i] for i in order_plans_to_time(exchanges, seconds)[1:]]


def plan_from_sample(
    model: nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    config: RunConfig,
    *,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    world: World,
    rows_folder: Path,
    first_step: int = 0,
    folder: Path | None = None,
    device: Device | None = None,
    costs: StepCosts | None = None,
    lookups: int = SAMPLE_LOOKUPS,
) -> PlanningResult:
    """Plan from a sample, on one rank for all ranks. Memory is shared between tables by `plan.placement`.

    rows_folder: folder for rows without a configured directory. world: with measured links. device, costs: earlier
    measurements, which are not repeated. folder: run folder with a device.json that may have the device.
    Raises BudgetExceeded if a batch does not fit, ConfigError without a sample or with impossible shardings,
    StorageError if a directory cannot be measured.
    """
    tables = collection.tables
    declared = collection.declaration
    owners = len(world.owners)
    base_plan = build_plan(tables, world, resolve_plan_config(config.plan, tables, world))
    sample = read_sample_batches(data.train, config.train.samples_per_step, lookups)
    stacked_sample = [hash_ids(batch, declared) for batch in sample]
    sample_profile = profile_batches(collection.tables, declared.features, stacked_sample)
    recorded = _read_recorded_shardings(folder)
    hot_ids = choose_hot_ids(config.plan, declared, stacked_sample, world, recorded)
    dram_bytes = _dram_without_hot_rows(config.plan, collection.tables, world, hot_ids)
    last_step = predict_last_step(config, data, first_step, len(sample))
    mapped_bytes = 0 if base_plan.mapped is None else base_plan.mapped.bytes
    is_auto = config.plan.lookahead == "auto"
    batch_size = sample_profile.largest_batch  # all samples, if there are fewer than a batch
    batches_in_flight = 1 + base_plan.max_staleness_steps
    demands_of = partial(
        predict_demands,
        collection.tables,
        sample_profile,
        batch_size=batch_size,
        at_once=batches_in_flight,
        num_ranks=owners,
        num_samples=data.train.num_samples,
        first_batch=first_step,
        last_batch=last_step,
        fixed_bytes=config.plan.memory.tables,
    )
    depths = AUTO_DEPTHS if is_auto else (int(config.plan.lookahead),)
    depth, memory_demands = _find_fitting_window(depths, batches_in_flight, demands_of, dram_bytes)
    divide_memory(memory_demands, dram_bytes, mapped_bytes, at_once=batches_in_flight)
    # The disk is measured only after the checks of memory.
    paths = list_row_folders(base_plan, rows_folder)
    device = device or read_measured_device(folder, paths) or measure_device(paths)
    hot_and_cold = profile_hot_and_cold(declared, hot_ids, stacked_sample) if hot_ids else None
    sides, side_profile = hot_and_cold or (declared, sample_profile)
    loads = estimate_table_loads(
        sides,
        side_profile,
        world,
        last_batch=last_step,
        num_samples=data.train.num_samples,
        codecs=base_plan.codecs,
    )
    bags = multi_id_columns(data.train.schema) | set(hashed_tables_by_feature(declared))
    choice = choose_shardings_and_exchanges(
        collection, sides, loads, config, world, device, memory_demands, bags, hot_ids
    )

    inputs = _PlanInputs(
        collection,
        config,
        world,
        hot_ids,
        demands_of,
        depth,
        batches_in_flight,
        (dram_bytes, mapped_bytes),
        sample_profile,
        last_step - first_step,
    )
    placed = _place_rows(inputs, choice)
    if costs is None:
        batches = _select_timed_batches(
            sample, data.train, config.train.samples_per_step, world.num_trainers
        )
        costs = run_micro_benchmark(
            model,
            batches,
            data.train.schema,
            objective,
            make_optimizer,
            batch_size=config.train.samples_per_step,
            folder=Path(paths[0]) if paths else None,
            reads={table.name: table.reads for table in placed.memory},
        )
    estimate_links = partial(
        estimate_link_costs, loads=loads, device=device, model=model, world=world, declared=declared
    )
    best = _predict_plan(inputs, placed, costs, device, estimate_links(choice, plan=placed.plan))
    runners_up = []
    for decision in choice.runners_up:
        with suppress(ColonnadeError):  # its rows do not fit, or a bag would be split
            placed = _place_rows(inputs, decision)
            check_exchanges_of_features(placed.plan, collection, data)
            links = estimate_links(decision, plan=placed.plan)
            runners_up.append(_predict_plan(inputs, placed, costs, device, links))
    runners_up = _order_runners_up(best, runners_up)
    plan = best.plan
    if not is_settled(config.plan, tables, world):
        plan = replace(plan, comparison=compare_predictions([best, *runners_up]))
    return PlanningResult(
        plan,
        sample_profile,
        device,
        costs,
        best.prediction,
        choice,
        tuple(loads),
        world,
        runners_up=tuple(runners_up),
    )


@dataclass(frozen=True, slots=True)
class _PlanInputs:
    """Inputs of the plans of one sample, which differ only in shardings and exchanges."""

    collection: EmbeddingCollection
    config: RunConfig
    world: World
    hot_ids: Mapping[str, Sequence[int]]
    demands_of: Callable[..., list[MemoryDemand]]
    """Function from a window of batches and shardings to the memory that each table needs."""
    depth: int
    """Lookahead, in batches."""
    batches_in_flight: int
    budgets: tuple[int | None, int | None]
    """Bytes of main and of mapped memory on each rank; None: no limit."""
    profile: Profile
    num_batches: int
    """Number of batches that are still to train."""


@dataclass(frozen=True, slots=True)
class _PlacedRows:
    """Plan without a prediction, and the memory of its tables."""

    plan: Plan
    demands: list[MemoryDemand]
    memory: list[TableMemory]
    """Memory of each table, the mean over ranks."""
    capacities: dict[str, tuple[int, Tier]]
    """Rows in memory on the fullest rank, and their tier, by table."""


def _place_rows(inputs: _PlanInputs, decision: PlanDecision) -> _PlacedRows:
    """Divide memory among the tables under a decision."""
    tables = inputs.collection.tables
    world = inputs.world
    in_flight = inputs.batches_in_flight
    config = inputs.config.plan
    plan = build_plan(
        tables, world, resolve_plan_config(config, tables, world, decision, inputs.hot_ids)
    )
    demands = inputs.demands_of(window=inputs.depth + in_flight, shardings=plan.shardings)
    by_rank = _divide_memory_among_tables(
        tables, demands, plan, world, *inputs.budgets, in_flight, is_even=config.placement == "even"
    )
    owners = len(world.owners)
    demands, placements = average_over_ranks(demands, by_rank, plan.shardings, owners)
    capacities = {table.name: (table.rows, table.tier) for table in by_rank}
    return _PlacedRows(plan, demands, placements, capacities)


def _predict_plan(
    inputs: _PlanInputs, placed: _PlacedRows, costs: StepCosts, device: Device, links: LinkCosts
) -> PlannedStep:
    """Predict the speed of a plan, and complete it."""
    plan = placed.plan
    tables = inputs.collection.tables
    profile = inputs.profile
    config = inputs.config.plan
    depth = inputs.depth
    if config.placement == "even" and plan.lookahead != "auto":
        depth = plan.lookahead
    elif config.lookahead == "auto":
        depth = choose_lookahead_depth(placed.memory, costs, device, depth)
    prediction = predict_speed(
        tables,
        placed.demands,
        placed.memory,
        [profile.lookups_per_sample(t) for t in range(len(tables))],
        costs,
        device,
        batch_size=profile.largest_batch,
        num_batches=inputs.num_batches,
        num_ranks=len(inputs.world.owners),
        lookahead=depth,
        write_budget=config.write_budget,
        links=links,
    )
    plan = replace(plan, prediction=asdict(prediction))
    if config.placement != "even":
        plan = apply_placement(plan, tables, placed.capacities, lookahead=depth)
        if config.memory.hbm is not None:
            window = depth + inputs.batches_in_flight
            unfixed = inputs.demands_of(window=window, shardings=plan.shardings, fixed_bytes={})
            plan = place_rows_on_device(plan, tables, unfixed, config.memory.hbm)
    return PlannedStep(plan, prediction)


def compare_predictions(planned: Sequence[PlannedStep]) -> PlanComparison:
    """Return the comparison of plans that are only predicted; the first is chosen. Pure."""
    return PlanComparison(
        tuple(
            ComparedPlan(step.plan.describe_exchanges(), step.prediction.step_seconds)
            for step in planned
        )
    )


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
        sample = read_sample_batches(source, batch_size, 1, num_ranks=num_trainers)
    return [batch for batch in sample if batch.size == sample[0].size][:MAX_TIMED_BATCHES]


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


def complete_plan(
    plan: Plan,
    model: nn.Module,
    collection: EmbeddingCollection,
    data: Splits,
    config: RunConfig,
    mesh: Mesh,
    folder: Path | None,
    *,
    objective: Objective,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
) -> Placement:
    """Return a run's plan with what the data decides: open choices, and memory where not all rows fit. Collective.

    plan: with memory divided evenly; returned as it is if all rows fit and no choice is open, without reading a sample.
    Only choices and a depth of lookahead=auto need a prediction, for which the disk and the model are timed.
    """
    tables = collection.tables
    world = mesh.world
    first_step = 0 if folder is None else max(list_checkpoints(folder), default=0)
    is_placed = config.plan.placement == "profiled" and is_memory_limited(plan, tables)
    # Predictions do not cover device memory.
    is_depth_open = is_placed and config.plan.lookahead == "auto" and config.plan.memory.hbm is None
    if is_depth_open or not is_settled(config.plan, tables, world):
        plans, device = plan_on_rank_0(
            model,
            collection,
            data,
            config,
            mesh,
            folder,
            objective=objective,
            make_optimizer=make_optimizer,
            first_step=first_step,
        )
        return Placement(plans[0], device=device, runners_up=tuple(plans[1:]))
    if not is_placed:
        return Placement(plan)
    return place_on_rank_0(collection, data, config, plan, mesh, folder, first_step)


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
) -> tuple[list[Plan], Device]:
    """Measure links on all ranks, and plan on rank 0 for all. Collective. Nothing stays written.

    Returns the planner's choice, then its runners-up; a run whose folder has a choice that still fits keeps that one,
    without runners-up."""
    world = measure_links(mesh)

    def make_message() -> dict[str, Any]:
        recorded = read_recorded_plan(folder, collection.tables, world, config.plan)
        settings = config
        if recorded is not None:
            settings = config.model_copy(update={"plan": fix_choices(config.plan, recorded)})
        planned = plan_from_sample(
            model,
            collection,
            data,
            settings,
            objective=objective,
            make_optimizer=make_optimizer,
            world=world,
            rows_folder=folder or Path(),
            folder=folder,
            first_step=first_step,
        )
        plans = [planned.plan, *(runner_up.plan for runner_up in planned.runners_up)]
        if recorded is not None:
            plans = [replace(planned.plan, comparison=recorded.comparison)]
        return {"plans": [plan.to_json() for plan in plans], "device": planned.device.to_json()}

    received = broadcast_plan_message(mesh, make_message)
    plans = [Plan.from_json(text) for text in received["plans"]]
    return plans, Device.from_json(received["device"])


def read_recorded_plan(
    folder: Path | None, tables: Sequence[Table], world: World, config: PlanConfig
) -> Plan | None:
    """Read the plan that a run chose from its folder; None if there is none, or if it does not fit any more.

    It fits the same ranks and tables, settings that leave its choices open, and the shardings of the newest checkpoint,
    if there is one."""
    if folder is None or not (folder / "plan.json").is_file():
        return None
    try:
        plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
        plan.check_world(world.num_ranks, world.servers)
        plan.check_tables([table.name for table in tables])
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError):
        return None  # the run is planned anew
    saved = _read_recorded_shardings(folder)
    has_other_towers = isinstance(config.towers, int) and config.towers != plan.towers
    if plan.comparison is None or has_other_towers:
        return None
    for planned, constraint in zip(
        plan.tables, read_table_constraints(config, tables, world).values(), strict=True
    ):
        sharding = planned.sharding
        exchange = None if sharding.is_replicated else planned.exchange
        if (
            constraint.kind not in (None, sharding.kind)
            or constraint.exchange not in (None, exchange)
            or constraint.ranks not in (None, sharding.ranks)
            or saved.get(planned.name, sharding) != sharding
        ):
            return None
    return plan


def fix_choices(config: PlanConfig, plan: Plan) -> PlanConfig:
    """Return settings with the shardings and exchanges of a plan; hot rows stay as they are set. Pure."""
    own_settings = {}
    for planned in plan.tables:
        own = config.tables.get(planned.name, TablePlanConfig())
        is_copied = planned.sharding.is_replicated
        own_settings[planned.name] = own.model_copy(
            update={
                "sharding": replace(planned.sharding, hot=None),
                "ranks": None,
                "exchange": None if is_copied else planned.exchange,
            }
        )
    return config.model_copy(update={"tables": own_settings})
