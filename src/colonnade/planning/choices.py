"""Choice of shardings and exchanges for a run, from the profile of its tables and the links of its world."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.collectives import (
    choose_sum_algorithm,
    estimate_sum_traffic,
    sum_algorithm_of_layout,
)
from colonnade.config.plan import CodecConfig, PlanConfig
from colonnade.config.run import RunConfig
from colonnade.data.contract import Splits, multi_id_columns
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.formats import read_text_file
from colonnade.hops.kinds import BY_TOWERS
from colonnade.hops.load import TableLoad
from colonnade.lookup.hot import split_hot_rows
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.stacking import hashed_tables_by_feature
from colonnade.lookup.views import slices_of
from colonnade.plan.caching import build_table_caches
from colonnade.plan.constraints import apply_towers, read_table_constraints
from colonnade.plan.cost.consumers import build_model_load, check_whole_bags
from colonnade.plan.cost.memory import Budgets, MemoryDemand, divide
from colonnade.plan.cost.prediction import LinkCosts
from colonnade.plan.cost.step_time import predict_single_rank_seconds
from colonnade.plan.hot import add_hot_rows_to_shardings
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import (
    Profile,
    RunBatches,
    build_table_loads,
    profile_batches,
)
from colonnade.plan.names import DenseCodec
from colonnade.plan.plan import Codecs, Plan
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Memory, PlanDecision, Problem
from colonnade.topology.sharding import Sharding, row_wise
from colonnade.topology.towers import Partition
from colonnade.topology.world import World
from colonnade.train.setup import RunSetup
from colonnade.wire.dense_sums import SIGNAL_BYTES, coded_buffer_bytes, is_coded

NUM_RUNNERS_UP = 4
"""Largest number of plans of other kinds that are predicted, and timed, beside the predicted fastest."""
REDUCED_FRACTION = 0.9
"""Fraction of the memory that is compared with all of it, to estimate what a byte saves."""


def choose_hot_ids(
    config: PlanConfig,
    declared: EmbeddingDeclaration,
    sample_batches: Sequence[Batch],
    world: World,
    recorded_shardings: Mapping[str, Sharding],
) -> dict[str, Sequence[int]]:
    """Choose the hot ids of each table with a `replicated_rows` setting.

    recorded_shardings: of the run's newest checkpoint, by table. A resumed run keeps their ids if their number is the
    same.
    """
    hot_ids: dict[str, Sequence[int]] = {}
    for name, settings in config.tables.items():
        if not settings.replicated_rows or world.num_ranks == 1:
            continue
        if not isinstance(settings.replicated_rows, int):
            hot_ids[name] = settings.replicated_rows
            continue
        readers = [feature.name for feature in declared.features if feature.table == name]
        hot_ids[name] = find_most_popular_ids(sample_batches, readers, settings.replicated_rows)
        recorded_hot = recorded_shardings[name].hot if name in recorded_shardings else None
        if recorded_hot is not None and len(recorded_hot.ids) == len(hot_ids[name]):
            hot_ids[name] = recorded_hot.ids
    return hot_ids


@dataclass(frozen=True, slots=True)
class SampledLoads:
    """Loads of a run's tables, estimated from a sample, with hot and cold rows as separate tables."""

    declared: EmbeddingDeclaration
    """Declaration of these tables."""
    loads: Sequence[TableLoad]
    bags: Collection[str]
    """Features with several ids per sample."""
    hot: Collection[str]
    """Names of tables with hot rows."""


def estimate_sampled_loads(
    setup: RunSetup,
    hashed_sample: Sequence[Batch],
    profile: Profile,
    hot_ids: Mapping[str, Sequence[int]],
    world: World,
    last_step: int,
) -> SampledLoads:
    """Estimate the load of each table for full batches like those of the sample."""
    declared = setup.collection.declaration
    sides, side_profile = declared, profile
    if hot_ids:
        sides, side_profile = profile_hot_and_cold(declared, hot_ids, hashed_sample)
    train_data = setup.data.train
    codec = setup.config.plan.codec
    loads = build_table_loads(
        sides.tables,
        sides.features,
        side_profile,
        world,
        RunBatches(
            batch_size=side_profile.largest_batch,
            num_samples=train_data.num_samples,
            last_batch=last_step,
        ),
        Codecs(codec.values, codec.gradients),
        build_table_caches(setup.config.plan.cache, declared.tables) if world.num_ranks > 1 else {},
    )
    bags = multi_id_columns(train_data.schema) | set(hashed_tables_by_feature(declared))
    return SampledLoads(sides, loads, bags, hot_ids)


def choose_shardings_and_exchanges(
    setup: RunSetup,
    sampled: SampledLoads,
    world: World,
    device: Device,
    memory_demands: Sequence[MemoryDemand] = (),
) -> PlanDecision:
    """Choose the shardings and exchanges that the settings do not fix.

    memory_demands: memory that tables need, if it is limited. Raises ConfigError for impossible constraints.
    """
    config = setup.config.plan
    collection = setup.collection
    constraints = read_table_constraints(config, collection.tables, world)
    for name in sampled.hot:
        constraints[f"{name}[cold]"] = constraints[name]
        constraints[f"{name}[hot]"] = Constraint("replicated")
    constraints |= {
        load.name: replace(constraints[load.name], exchange="cached")
        for load in sampled.loads
        if load.cache is not None and constraints[load.name].exchange == "rows"
    }
    budget = config.memory.dram
    memory = Memory(budget)
    if budget is not None and memory_demands:
        memory = Memory(budget, estimate_seconds_per_byte(memory_demands, budget, device))
    problem = Problem(
        sampled.loads,
        world,
        memory=memory,
        rates=device.memory,
        forced=constraints,
        is_fetched_ahead=config.is_late,
        model=build_model_load(
            sampled.declared,
            sampled.loads,
            codecs=Codecs(config.codec.values, config.codec.gradients),
            bags=sampled.bags,
            world=world,
            reads_ahead=int(config.is_late),
            declared=collection.declaration,
        ),
        towers=config.towers if isinstance(config.towers, int) else None,
    )
    return choose(problem, NUM_RUNNERS_UP if world.num_ranks > 1 else 0)


def apply_tower_partition(
    config: RunConfig, collection: EmbeddingCollection, world: World
) -> RunConfig:
    """Return `config` with a plan that places tables in towers, by the partition file or number in `plan.towers`.

    Raises ConfigError for a partition that cannot be read or is for another model, and for towers that do not fit this
    world.
    """
    plan_config = config.plan
    partition = None
    if isinstance(plan_config.towers, str):
        try:
            text = read_text_file(Path(plan_config.towers))
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"plan.towers: got {plan_config.towers!r}, wanted a number of towers, or a file that lists the "
                'features of each: {"towers": [["feature", ...], ...]}'
            ) from None
        try:
            partition = Partition.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"plan.towers: {plan_config.towers}: {error}") from None
    declared = collection.declaration
    plan = apply_towers(plan_config, declared.tables, declared.features, partition, world)
    return config if plan is plan_config else config.model_copy(update={"plan": plan})


def estimate_seconds_per_byte(
    memory_demands: Sequence[MemoryDemand], budget_bytes: int, device: Device
) -> float:
    """Estimate the seconds of a step that a byte of memory saves in reads of files; inf if there are no files."""
    pages = sum(directory.pages for directory in device.directories)
    if not pages:
        return float("inf")
    min_bytes = sum(demand.least_rows * demand.slot_bytes for demand in memory_demands)
    full_bytes = min(budget_bytes, sum(demand.max_bytes for demand in memory_demands))
    reduced_bytes = max(int(REDUCED_FRACTION * full_bytes), min_bytes)
    if reduced_bytes >= full_bytes:
        return float("inf")
    reads = [
        sum(placement.reads for placement in divide(memory_demands, Budgets(size)))
        for size in (reduced_bytes, full_bytes)
    ]
    return max(reads[0] - reads[1], 0.0) / pages / (full_bytes - reduced_bytes)


def estimate_link_costs(
    plan_decision: PlanDecision,
    table_loads: Sequence[TableLoad],
    device: Device,
    setup: RunSetup,
    world: World,
    plan: Plan,
) -> LinkCosts:
    """Estimate the seconds and bytes that communication adds to a step of one rank alone.

    plan: has the dense codec and the number of towers.
    """
    if world.num_ranks == 1:
        return LinkCosts()
    tower_parameters = find_weights_in_towers(plan_decision, setup.collection.declaration)
    num_towers = plan.towers or world.num_hosts
    trainers = world.trainer_world()
    codec = plan.codecs.dense
    reduce_seconds = estimate_reduction_seconds(
        setup.model, trainers, codec, tower_parameters, num_towers
    )
    one_rank_seconds = sum(predict_single_rank_seconds(load, device.memory) for load in table_loads)
    return LinkCosts(
        processor_seconds=plan_decision.seconds.processor - one_rank_seconds,
        waited_seconds=plan_decision.seconds.waited + reduce_seconds,
        behind_seconds=plan_decision.seconds.behind,
        crowding=world.crowding,
        sent=group_by_channel(plan_decision.sent),
    )


def find_weights_in_towers(
    plan_decision: PlanDecision, declared: EmbeddingDeclaration
) -> list[nn.Parameter]:
    """Return the weights of operators that are evaluated inside a tower."""
    table_of = {
        field.name: declared.tables[declared.parts[field.part][0]].name for field in declared.fields
    }
    parameters: list[nn.Parameter] = []
    for consumer in plan_decision.consumers:
        fields = declared.consumers[consumer.name].features
        if consumer.is_partial and all(
            plan_decision.exchanges.get(table_of[f]) in BY_TOWERS for f in fields
        ):
            parameters += declared.consumers[consumer.name].interaction.parameters()
    return parameters


def estimate_seconds_by_codec(
    model: nn.Module, world: World, config: CodecConfig
) -> dict[str, float]:
    """Estimate the seconds to sum dense gradients over ranks, by codec: exact, the configured one, and those that save
    most. Towers sum all weights here."""
    thresholded = config.model_copy(update={"dense": "thresholded"}).choose_dense_codec()
    codecs = dict.fromkeys(("exact", config.choose_dense_codec(), "int8", thresholded))
    trainers = world.trainer_world()
    return {str(codec): estimate_reduction_seconds(model, trainers, codec) for codec in codecs}


def estimate_reduction_seconds(
    model: nn.Module,
    trainer_world: World,
    dense_codec: DenseCodec,
    tower_weights: Sequence[nn.Parameter] = (),
    num_towers: int = 1,
) -> float:
    """Estimate the seconds to sum dense gradients over ranks, as one buffer of coded and one of other gradients.

    tower_weights: weights that are summed inside one of `num_towers` towers, in equal shares.
    """
    seconds = 0.0
    tower_ids = {id(parameter) for parameter in tower_weights}
    size = trainer_world.num_ranks // num_towers
    if tower_ids and 1 < size < trainer_world.num_ranks:
        local_ranks = min(size, trainer_world.ranks_per_host)
        tower = replace(trainer_world, num_hosts=size // local_ranks, ranks_per_host=local_ranks)
        bytes_per_tower = sum(p.numel() * p.element_size() for p in tower_weights) / num_towers
        seconds = estimate_sum_traffic(
            choose_sum_algorithm(tower, bytes_per_tower), tower, bytes_per_tower
        ).predict_seconds(tower)
    if size == trainer_world.num_ranks:  # one tower has all ranks
        tower_ids = set()
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in tower_ids]
    coded = [p for p in trained if is_coded(dense_codec, p)]
    size = sum(p.numel() * p.element_size() for p in coded)
    other_bytes = sum(p.numel() * p.element_size() for p in trained) - size
    if other_bytes:
        seconds += estimate_sum_traffic(
            choose_sum_algorithm(trainer_world, other_bytes), trainer_world, other_bytes
        ).predict_seconds(trainer_world)
    if size:
        coded_bytes = coded_buffer_bytes(
            dense_codec, [p.numel() for p in coded], trainer_world.num_ranks
        )
        seconds += estimate_sum_traffic(
            sum_algorithm_of_layout(trainer_world), trainer_world, size, coded_bytes
        ).predict_seconds(trainer_world)
        seconds += estimate_sum_traffic("whole", trainer_world, SIGNAL_BYTES).predict_seconds(
            trainer_world
        )
    return seconds


def group_by_channel(sent: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Group bytes by channel, then link: {(channel, link): bytes} -> {channel: {link: bytes}}."""
    by_channel: dict[str, dict[str, float]] = {}
    for (channel, link), size in sent.items():
        by_channel.setdefault(channel, {})[link] = size
    return by_channel


def check_exchanges_of_features(plan: Plan, collection: EmbeddingCollection, data: Splits) -> None:
    """Raise ConfigError if a table's exchange does not support features with several ids per sample."""
    exchanges = [table.exchange for table in plan.tables]
    check_whole_bags(
        collection.declaration, plan.shardings, exchanges, multi_id_columns(data.train.schema)
    )


def find_most_popular_ids(
    batches: Sequence[Batch], feature_names: Iterable[str], num_ids: int
) -> list[int]:
    """Return the `num_ids` ids that these features look up most often, ascending; of equally frequent ids the smaller.

    Returns fewer if the batches have fewer ids."""
    ids = [batch.ids[name].values.numpy() for name in feature_names for batch in batches]
    values, lookups = np.unique(np.concatenate([*ids, np.zeros(0, np.int64)]), return_counts=True)
    first = np.lexsort((values, -lookups))[:num_ids]
    return sorted(values[first].tolist())


def profile_hot_and_cold(
    declared: EmbeddingDeclaration,
    table_hot_ids: Mapping[str, Iterable[int] | Tensor],
    batches: Iterable[Batch],
) -> tuple[EmbeddingDeclaration, Profile]:
    """Split each table with hot rows into a hot and a cold table, and profile a sample of the data split likewise.

    Returns the declaration with the split tables and the profile. Consumers of no split table are unchanged."""
    tables = declared.tables
    # Any sharding and any exchange that evaluates operators gives the same split.
    shardings = add_hot_rows_to_shardings(tables, [row_wise(2)] * len(tables), table_hot_ids, 2)
    slices = slices_of(declared, shardings, ["partials"] * len(tables))
    split_batches = (split_hot_rows(batch, declared, slices.hot_ids).batch for batch in batches)
    sides = slices.declaration
    declared_consumers = {
        name: consumer for name, consumer in sides.consumers.items() if name in declared.consumers
    }
    sides = replace(sides, consumers=declared_consumers)
    return sides, profile_batches(sides.tables, sides.features, split_batches)
