"""Planning from the data: profile a sample, time the disk and some steps, give memory to the tables it helps most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from colonnade.batch import Batch
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.checkpoint.stores import read_table_shardings
from colonnade.config.plan import PlanConfig, TablePlanConfig
from colonnade.config.run import override_settings
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.hops.kinds import CHANNELS, EXCHANGES, Split, get_exchange_setting
from colonnade.hops.load import TableLoad
from colonnade.lookup.stacking import hash_ids
from colonnade.plan.advice import (
    Advice,
    ScalingPoint,
    ServerDemand,
    average_noise,
    choose_num_servers,
    choose_scaling_point,
    fit_batch_cost,
)
from colonnade.plan.build import apply_placement, build_plan
from colonnade.plan.comparison import ComparedPlan, PlanComparison, order_plans_to_time
from colonnade.plan.constraints import (
    drop_unchosen_caches,
    is_settled,
    read_table_constraints,
    resolve_plan_config,
)
from colonnade.plan.cost.demands import predict_demands
from colonnade.plan.cost.memory import (
    MemoryDemand,
    TableMemory,
    average_over_ranks,
    check_batches_fit,
    count_window_bytes,
)
from colonnade.plan.cost.prediction import (
    MeasuredCosts,
    PredictedRun,
    Prediction,
    StepCosts,
    choose_lookahead_depth,
    predict_speed,
)
from colonnade.plan.cost.step_time import predict_processor_seconds, predict_single_rank_seconds
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import Profile, profile_batches
from colonnade.plan.placement import (
    divide_planned_memory,
    forecast_batches,
    is_memory_limited,
    place_rows_on_device,
    read_budgets,
)
from colonnade.plan.plan import Plan
from colonnade.plan.search.candidates import PlanDecision
from colonnade.planning.choices import (
    apply_tower_partition,
    check_exchanges_of_features,
    choose_hot_ids,
    choose_shardings_and_exchanges,
    estimate_link_costs,
    estimate_sampled_loads,
    estimate_seconds_by_codec,
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
from colonnade.table import Table
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
from colonnade.train.metrics_file import FILE_NAME, read_metrics_lines
from colonnade.train.setup import RunSetup

MAX_TIMED_BATCHES = 12
"""Maximum number of batches of the sample that the model is timed on."""
SMALL_SHARES = 16
"""Part of a rank's batch that is timed beside it, to measure what a sample costs."""
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
    dense_seconds: Mapping[str, float]
    """Seconds that a step waits for the sums of dense gradients, by their codec; none on one rank."""
    runners_up: tuple[PlannedStep, ...] = ()
    """Plans of other kinds, in the order in which they are timed (`order_plans_to_time`); none on one rank."""

    @property
    def trainer_samples(self) -> float:
        """Number of samples of a trainer in a step."""
        return self.profile.largest_batch / self.world.num_trainers


@dataclass(frozen=True, kw_only=True, slots=True)
class _SampledRun:
    """Sample of a run's data, and what all plans that are made from it share."""

    setup: RunSetup
    world: World
    base_plan: Plan
    """Plan with memory divided evenly and default choices."""
    sample: list[Batch]
    hashed_sample: list[Batch]
    """Sample with the ids of stacked tables."""
    profile: Profile
    hot_ids: Mapping[str, Sequence[int]]
    first_step: int
    last_step: int

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables of the model."""
        return self.setup.collection.tables

    def predict_demands(
        self,
        lookahead_depth: int,
        shardings: Sequence[Sharding] | None = None,
        fixed_bytes: Mapping[str, int] | None = None,
    ) -> list[MemoryDemand]:
        """Predict the memory that each table needs. lookahead_depth: lookahead. fixed_bytes: default, those of the
        settings."""
        batches = forecast_batches(
            self.base_plan,
            batch_size=self.profile.largest_batch,  # all samples, if there are fewer than a batch
            num_samples=self.setup.data.train.num_samples,
            first_batch=self.first_step,
            last_batch=self.last_step,
            lookahead_depth=lookahead_depth,
        )
        if fixed_bytes is None:
            fixed_bytes = self.setup.config.plan.memory.tables
        return predict_demands(
            self.tables,
            self.profile,
            batches,
            num_ranks=len(self.world.owners),
            fixed_bytes=fixed_bytes,
            shardings=shardings,
        )


@dataclass(frozen=True, slots=True)
class _PlacedRows:
    """Plan without a prediction, and the memory of its tables."""

    plan: Plan
    demands: list[MemoryDemand]
    memory: list[TableMemory]
    """Memory of each table, the mean over ranks."""
    depth: int
    """Largest lookahead, in batches."""


def plan_from_sample(
    setup: RunSetup,
    world: World,
    *,
    rows_folder: Path,
    first_step: int = 0,
    lookups: int = SAMPLE_LOOKUPS,
    measured: PlanningResult | None = None,
    times_small_batches: bool = False,
) -> PlanningResult:
    """Plan from a sample, on one rank for all ranks. Memory is shared between tables by `plan.placement`.

    setup: its folder may have the measured device. world: with measured links. rows_folder: folder for rows without a
    configured directory. measured: plan of another world, whose measurements of this machine are used, not made again.
    times_small_batches: measure what a sample costs, too, for plans of worlds with other shares of a batch. Raises
    BudgetExceeded if a batch does not fit, ConfigError without a sample or with impossible shardings, StorageError if a
    directory cannot be measured.
    """
    config = setup.config
    run = _sample_run(setup, world, first_step, lookups)
    budgets = read_budgets(run.base_plan, run.tables)
    depth, demands = _choose_depth(run, budgets.main)
    check_batches_fit(demands, budgets)  # before anything is measured, which takes seconds
    paths = list_row_folders(run.base_plan, rows_folder)
    # The run folder may have a measurement of the same directories.
    device = measured.device if measured else read_measured_device(setup.folder, paths)
    device = device or measure_device(paths)
    loads = estimate_sampled_loads(
        setup, run.hashed_sample, run.profile, run.hot_ids, world, run.last_step
    )
    choice = choose_shardings_and_exchanges(setup, loads, world, device, demands)
    placed = _place_rows(run, choice, depth)
    if measured is None:
        costs = run_micro_benchmark(
            setup,
            _select_timed_batches(run),
            folder=Path(paths[0]) if paths else None,
            reads={table.name: table.reads for table in placed.memory},
            small_batches=_select_timed_batches(run, SMALL_SHARES) if times_small_batches else (),
        )
    else:
        rank_samples = run.profile.largest_batch / world.num_trainers
        costs = measured.costs.add_samples(rank_samples - measured.trainer_samples)

    def predict(decision: PlanDecision, rows: _PlacedRows) -> PlannedStep:
        links = estimate_link_costs(decision, loads.loads, device, setup, world, rows.plan)
        return _predict_plan(run, rows, MeasuredCosts(costs, device, links))

    best = predict(choice, placed)
    runners_up = []
    for decision in choice.runners_up:
        with suppress(ColonnadeError):  # its rows do not fit, or a bag would be split
            rows = _place_rows(run, decision, depth)
            check_exchanges_of_features(rows.plan, setup.collection, setup.data)
            runners_up.append(predict(decision, rows))
    runners_up = _order_runners_up(best, runners_up)
    plan = best.plan
    if not is_settled(config.plan, run.tables, world):
        compared = [
            ComparedPlan(step.plan.describe_exchanges(), step.prediction.step_seconds)
            for step in (best, *runners_up)
        ]
        plan = replace(plan, comparison=PlanComparison(tuple(compared)))
    return PlanningResult(
        plan,
        run.profile,
        device,
        costs,
        best.prediction,
        choice,
        tuple(loads.loads),
        world,
        estimate_seconds_by_codec(run.setup.model, world, run.setup.config.plan.codec)
        if world.num_ranks > 1
        else {},
        runners_up=tuple(runners_up),
    )


def _sample_run(setup: RunSetup, world: World, first_step: int, min_lookups: int) -> _SampledRun:
    """Read a sample, profile it, and find its hot rows."""
    config = setup.config
    tables = setup.collection.tables
    declared = setup.collection.declaration
    sample = read_sample_batches(setup.data.train, config.train.samples_per_step, min_lookups)
    hashed_sample = [hash_ids(batch, declared) for batch in sample]
    profile = profile_batches(tables, declared.features, hashed_sample)
    recorded = _read_recorded_shardings(setup.folder)
    hot_ids = choose_hot_ids(config.plan, declared, hashed_sample, world, recorded)
    return _SampledRun(
        setup=setup,
        world=world,
        base_plan=build_plan(
            tables, world, resolve_plan_config(config.plan, tables, world, table_hot_ids=hot_ids)
        ),
        sample=sample,
        hashed_sample=hashed_sample,
        profile=profile,
        hot_ids=hot_ids,
        first_step=first_step,
        last_step=predict_last_step(config, setup.data, first_step, len(sample)),
    )


def _choose_depth(
    sampled_run: _SampledRun, main_bytes: int | None
) -> tuple[int, list[MemoryDemand]]:
    """Return the first lookahead with a window of batches that fits in memory, else the last; and its memory demands.

    A window that fits waits for no batch to finish."""
    lookahead = sampled_run.setup.config.plan.lookahead
    for depth in AUTO_DEPTHS if lookahead == "auto" else (lookahead,):
        demands = sampled_run.predict_demands(depth)
        if main_bytes is None or count_window_bytes(demands) <= main_bytes:
            break
    return depth, demands


def _place_rows(
    sampled_run: _SampledRun, decision: PlanDecision, lookahead_depth: int
) -> _PlacedRows:
    """Divide memory among the tables under a decision."""
    tables = sampled_run.tables
    world = sampled_run.world
    config = sampled_run.setup.config.plan
    plan = build_plan(
        tables, world, resolve_plan_config(config, tables, world, decision, sampled_run.hot_ids)
    )
    demands = sampled_run.predict_demands(lookahead_depth, plan.shardings)
    if config.placement == "even":
        memory = _get_planned_memory(demands, plan)
    else:
        memory = divide_planned_memory(plan, tables, demands)
        plan = apply_placement(plan, tables, memory, lookahead=lookahead_depth)
        # Rows in mapped memory leave fewer reads to the files.
        memory = [
            replace(table, reads=demand.reads_at(table.rows + table_plan.mapped_rows))
            if table_plan.mapped_rows
            else table
            for table, demand, table_plan in zip(memory, demands, plan.tables, strict=True)
        ]
    demands, memory = average_over_ranks(demands, memory, plan.shardings, len(world.owners))
    return _PlacedRows(plan, demands, memory, lookahead_depth)


def _predict_plan(
    sampled_run: _SampledRun, placed_rows: _PlacedRows, measured_costs: MeasuredCosts
) -> PlannedStep:
    """Predict the speed of a plan, and complete it."""
    plan = placed_rows.plan
    config = sampled_run.setup.config.plan
    depth = placed_rows.depth
    if config.placement == "even" and plan.lookahead != "auto":
        depth = plan.lookahead
    elif config.lookahead == "auto":
        depth = choose_lookahead_depth(
            placed_rows.memory, measured_costs.step, measured_costs.device, depth
        )
    prediction = predict_speed(
        sampled_run.tables,
        placed_rows.demands,
        placed_rows.memory,
        [sampled_run.profile.lookups_per_sample(t) for t in range(len(sampled_run.tables))],
        measured_costs,
        PredictedRun(
            batch_size=sampled_run.profile.largest_batch,
            num_batches=sampled_run.last_step - sampled_run.first_step,
            num_ranks=len(sampled_run.world.owners),
            lookahead=depth,
            write_budget=config.write_budget,
        ),
    )
    plan = replace(plan, prediction=asdict(prediction))
    if config.placement != "even":
        plan = replace(plan, lookahead=depth)
        if config.memory.hbm is not None:
            # Bytes of single tables are of main memory.
            demands = sampled_run.predict_demands(depth, plan.shardings, fixed_bytes={})
            plan = place_rows_on_device(plan, sampled_run.tables, demands)
    return PlannedStep(plan, prediction)


def advise(
    setup: RunSetup,
    world: World,
    *,
    run_folder: Path,
    min_efficiency: float,
    max_hosts: int,
    lookups: int = SAMPLE_LOOKUPS,
) -> Advice:
    """Advise numbers of ranks and servers and a batch, from plans of 1, 2, 4, .. hosts up to `max_hosts` like those of
    `world`, on one rank; see `plan_from_sample`.

    Every rank is predicted with processors of its own. run_folder: of an earlier run, which may have measured the noise
    of gradients. Raises ConfigError."""
    if not 0 < min_efficiency <= 1:
        raise ConfigError(
            f"--efficiency: got {min_efficiency:g}, wanted a number above 0 and up to 1, such as 0.8"
        )
    size = setup.config.train.samples_per_step
    worlds = list_worlds(replace(world, crowding=1.0), max_hosts, size)
    plan = partial(plan_world, setup, rows_folder=run_folder, lookups=lookups)
    single = plan(World(origin=world.origin), times_small_batches=True)
    plans = [single, *(plan(other, measured=single) for other in worlds)]
    curve = []
    for prediction, num_ranks in (
        (planned.prediction, planned.world.num_ranks) for planned in plans
    ):
        speedup = single.prediction.step_seconds / prediction.step_seconds
        curve.append(
            ScalingPoint(
                num_ranks=num_ranks,
                step_seconds=prediction.step_seconds,
                speedup=speedup,
                efficiency=speedup / num_ranks,
                limit=prediction.limit,
            )
        )
    efficient = choose_scaling_point(curve, min_efficiency).num_ranks
    wanted = world.num_ranks if world.num_ranks > 1 else efficient
    own = next(planned for planned in plans if planned.world.num_ranks == wanted)
    small_size = max(size // SMALL_SHARES, 1)
    small = plan(own.world, measured=single, batch_size=small_size)
    servers = measure_server_demand(own, setup.config.plan.memory.dram)
    lines = read_metrics_lines(run_folder / FILE_NAME)
    return Advice(
        batch_size=size,
        curve=tuple(curve),
        num_ranks=efficient,
        world=own.world,
        num_servers=servers.count,
        servers=servers,
        staleness_steps=min(own.plan.staleness_by_table),
        batch=fit_batch_cost(
            (small_size, size), (small.prediction.step_seconds, own.prediction.step_seconds)
        ),
        noise=average_noise([line for line in lines if line["kind"] == "noise"]),
    )


def list_worlds(world: World, max_hosts: int, batch_size: int) -> list[World]:
    """Return the worlds to predict beside one rank: of 1, 2, 4, .. hosts, of `max_hosts` and of as many as `world` has,
    ascending, with samples for each rank. Raises ConfigError if `world` has more ranks than samples."""
    if max_hosts < 1:
        raise ConfigError(f"--hosts-up-to: got {max_hosts}, wanted 1 or more")
    if world.num_ranks > batch_size:
        raise ConfigError(
            f"got a batch of {batch_size} samples for {world.num_ranks} ranks, wanted at least one for each: set a "
            "larger train.batch_size, or plan fewer ranks"
        )
    doubled = [1 << n for n in range(max_hosts.bit_length())]
    worlds = [replace(world, num_hosts=n) for n in sorted({*doubled, max_hosts, world.num_hosts})]
    return [other for other in worlds if 1 < other.num_ranks <= batch_size]


def plan_world(
    setup: RunSetup, world: World, *, batch_size: int | None = None, **options: Any
) -> PlanningResult:
    """Plan a world. batch_size: of another run than that of the settings. options: of `plan_from_sample`."""
    config = apply_tower_partition(setup.config, setup.collection, world)
    if batch_size is not None:
        config = override_settings(config, {"train.batch_size": batch_size, "train.accumulate": 1})
    return plan_from_sample(replace(setup, config=config), world, **options)


def measure_server_demand(planned: PlanningResult, memory_bytes: int | None) -> ServerDemand:
    """Return what the trainers of a plan need of servers, with exchange `rows`.

    planned: without servers. memory_bytes: memory for rows of each server; None: no limit."""
    world = planned.world
    rates = planned.device.memory
    split = Split(owners=1, trainers=world.num_trainers)
    (hop,) = EXCHANGES["rows"]
    sent = dict.fromkeys(CHANNELS, 0.0)
    compute_seconds = planned.costs.step_seconds
    server_seconds = 0.0
    for load in planned.loads:
        for flow in hop.flows(load, split):
            sent[flow.channel] += flow.bytes * world.num_trainers
        seconds = predict_processor_seconds("rows", load, split, rates)
        server_seconds += seconds.owner
        compute_seconds += seconds.trainer - predict_single_rank_seconds(load, rates)
    is_one_machine = world.num_hosts == 1 < world.ranks_per_host
    return ServerDemand(
        compute_seconds=compute_seconds,
        requested_rows=world.num_trainers * sum(load.unique_rank for load in planned.loads),
        link_bytes=max(sent["fetch"], sent["route"] + sent["push"]),
        processor_seconds=server_seconds,
        row_bytes=sum(load.total_bytes for load in planned.loads),
        link_bytes_per_second=world.local_bytes_per_second
        if is_one_machine
        else world.remote_bytes_per_second,
        memory_bytes=memory_bytes,
    )


def choose_servers(setup: RunSetup, world: World, *, rows_folder: Path) -> int:
    """Choose the number of servers on each host for `plan.servers=auto`: plan all numbers, on one rank; the smallest
    counts whose predicted step is about the shortest."""
    if world.ranks_per_host == 1:
        return 0
    plan = partial(plan_world, setup, rows_folder=rows_folder)
    without = plan(world, times_small_batches=True)
    seconds = [without.prediction.step_seconds]
    for count in range(1, world.ranks_per_host):
        seconds.append(math.inf)
        with suppress(
            ColonnadeError
        ):  # rows do not fit on so few, or settings name ranks that train
            planned = plan(world.with_servers(count), measured=without)
            seconds[-1] = planned.prediction.step_seconds
    return choose_num_servers(seconds)


def choose_servers_on_rank_0(setup: RunSetup) -> int:
    """Measure links on all ranks, and choose the number of servers on each host on rank 0. Collective.

    A resumed run with as many ranks keeps its number."""
    world = measure_links(setup.mesh)
    folder = setup.folder or Path()

    def make_message() -> dict[str, int]:
        if (folder / "plan.json").is_file():
            recorded = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
            if recorded.num_ranks == world.num_ranks:
                return {"servers": len(recorded.servers) // world.num_hosts}
        return {"servers": choose_servers(setup, world, rows_folder=folder)}

    return broadcast_plan_message(setup.mesh, make_message)["servers"]


def read_measured_device(folder: Path | None, paths: Sequence[str]) -> Device | None:
    """Read the recorded measurement of these paths from a run folder; None if there is none."""
    if folder is None or not (folder / "device.json").is_file():
        return None
    try:
        device = Device.from_json((folder / "device.json").read_text(encoding="utf-8"))
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError):
        return None  # it is measured again
    return device if [directory.path for directory in device.directories] == list(paths) else None


def _order_runners_up(best: PlannedStep, runners_up: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Return the runners-up in the order in which they are timed after `best`."""
    candidates = [best, *runners_up]
    exchanges = [[table.exchange for table in step.plan.tables] for step in candidates]
    seconds = [step.prediction.step_seconds for step in candidates]
    return [candidates[i] for i in order_plans_to_time(exchanges, seconds)[1:]]


def _read_recorded_shardings(folder: Path | None) -> dict[str, Sharding]:
    """Read the shardings of the newest checkpoint of a run by table; {} if there is none."""
    steps = [] if folder is None else list_checkpoints(folder)
    if folder is None or not steps:
        return {}
    header = read_header(folder, steps[-1])
    return dict(zip(header["model"]["tables"], read_table_shardings(header), strict=True))


def _get_planned_memory(memory_demands: Sequence[MemoryDemand], plan: Plan) -> list[TableMemory]:
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


def _select_timed_batches(run: _SampledRun, num_shares: int = 1) -> list[Batch]:
    """Return the batches to time: one rank's share, because communication is predicted separately.

    num_shares: parts of such a share, of which one is returned; the whole share if samples are few."""
    sample = run.sample
    size = run.setup.config.train.samples_per_step
    num_trainers = run.world.num_trainers
    # A small batch has two samples at least, which normalisation needs.
    num_trainers *= min(num_shares, max(size // (2 * num_trainers), 1))
    if num_trainers > 1:
        sample = read_sample_batches(run.setup.data.train, size, 1, num_ranks=num_trainers)
    return [batch for batch in sample if batch.size == sample[0].size][:MAX_TIMED_BATCHES]


def complete_plan(setup: RunSetup, plan: Plan) -> Placement:
    """Return a run's plan with what the data decides: open choices, and memory where not all rows fit. Collective.

    plan: with memory divided evenly; returned as it is if all rows fit and no choice is open, without reading a sample.
    Only choices and a depth of lookahead=auto need a prediction, for which the disk and the model are timed.
    """
    config = setup.config.plan
    tables = setup.collection.tables
    folder = setup.folder
    first_step = 0 if folder is None else max(list_checkpoints(folder), default=0)
    is_placed = config.placement == "profiled" and is_memory_limited(plan, tables)
    # Predictions do not cover device memory.
    is_depth_open = is_placed and config.lookahead == "auto" and config.memory.hbm is None
    if is_depth_open or not is_settled(config, tables, setup.mesh.world):
        plans, device = plan_on_rank_0(setup, first_step)
        return Placement(plans[0], device=device, runners_up=tuple(plans[1:]))
    if not is_placed:
        return Placement(plan)
    return place_on_rank_0(setup, plan, first_step)


def plan_on_rank_0(setup: RunSetup, first_step: int) -> tuple[list[Plan], Device]:
    """Measure links on all ranks, and plan on rank 0 for all. Collective. Nothing stays written.

    Returns the planner's choice, then its runners-up; a run whose folder has a choice that still fits keeps that one,
    without runners-up."""
    world = measure_links(setup.mesh)
    folder = setup.folder

    def make_message() -> dict[str, Any]:
        config = setup.config
        recorded = read_recorded_plan(folder, setup.collection.tables, world, config.plan)
        if recorded is not None:
            config = config.model_copy(update={"plan": fix_choices(config.plan, recorded)})
        planned = plan_from_sample(
            replace(setup, config=config),
            world,
            rows_folder=folder or Path(),
            first_step=first_step,
        )
        plans = [planned.plan, *(runner_up.plan for runner_up in planned.runners_up)]
        if recorded is not None:
            plans = [replace(planned.plan, comparison=recorded.comparison)]
        return {"plans": [plan.to_json() for plan in plans], "device": planned.device.to_json()}

    received = broadcast_plan_message(setup.mesh, make_message)
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
        exchange = None if sharding.is_replicated else get_exchange_setting(planned.exchange)
        if (
            constraint.kind not in (None, sharding.kind)
            or constraint.exchange not in (None, exchange)
            or constraint.ranks not in (None, sharding.ranks)
            or saved.get(planned.name, sharding) != sharding
        ):
            return None
    return plan


def fix_choices(plan_config: PlanConfig, chosen_plan: Plan) -> PlanConfig:
    """Return settings with the shardings, exchanges and caches of a plan; hot rows stay as they are set. Pure."""
    own_settings = {}
    for planned in chosen_plan.tables:
        own = plan_config.tables.get(planned.name, TablePlanConfig())
        is_copied = planned.sharding.is_replicated
        own_settings[planned.name] = own.model_copy(
            update={
                "sharding": replace(planned.sharding, hot=None),
                "ranks": None,
                "exchange": None if is_copied else get_exchange_setting(planned.exchange),
            }
        )
    uncached = [planned.name for planned in chosen_plan.tables if planned.cache is None]
    cache = drop_unchosen_caches(plan_config, own_settings, uncached)
    return plan_config.model_copy(update={"tables": own_settings, "cache": cache})
