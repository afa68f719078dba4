"""Shardings and exchanges for a run: what a profile says its tables ask for, on the links of its world."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from colonnade.batch import Batch
from colonnade.comm.collectives import choose_way, sent, way_of_layout
from colonnade.config.plan import PlanConfig
from colonnade.config.run import RunConfig
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.formats import read_text
from colonnade.lookup.hops import BY_TOWERS
from colonnade.lookup.layout import Declaration
from colonnade.plan.constraints import forced_by, towered
from colonnade.plan.cost.comm_volume import alone
from colonnade.plan.cost.consumers import model_load
from colonnade.plan.cost.memory import Demand, place
from colonnade.plan.cost.prediction import LinkCosts
from colonnade.plan.cost.table_stats import TableLoad, table_loads
from colonnade.plan.hot import popular
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import Profile
from colonnade.plan.plan import Plan
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Choice, Forced, Memory
from colonnade.topology.sharding import Sharding
from colonnade.topology.towers import Partition
from colonnade.topology.world import World
from colonnade.wire.codec import EXACT, CodecName, Codecs
from colonnade.wire.coded_sums import CODED_DTYPES, SIGNAL_BYTES, coded_size

FILLED = 0.9
"""Part of the memory whose rows are compared with those of all of it, to say what a byte is worth."""


def hot_of(
    config: PlanConfig,
    declared: Declaration,
    sample: Sequence[Batch],
    world: World,
    before: Mapping[str, Sharding],
) -> dict[str, Sequence[int]]:
    """By table whose hot rows are asked for: their ids. `before`: shardings of the run's newest checkpoint, whose ids
    a run
    goes on with, as long as as many are wanted."""
    found: dict[str, Sequence[int]] = {}
    for name, said in config.tables.items():
        if not said.replicated_rows or world.num_ranks == 1:
            continue
        if not isinstance(said.replicated_rows, int):
            found[name] = said.replicated_rows
            continue
        readers = [feature.name for feature in declared.features if feature.table == name]
        found[name] = popular(sample, readers, said.replicated_rows)
        had = before[name].hot if name in before else None
        if had is not None and len(had.ids) == len(found[name]):
            found[name] = had.ids
    return found


def loads_of(
    declared: Declaration,
    profile: Profile,
    world: World,
    *,
    last_batch: float,
    num_samples: int | None,
    codecs: Codecs = EXACT,
) -> list[TableLoad]:
    """Of full batches as the sample has them."""
    return table_loads(
        declared.tables,
        declared.features,
        profile,
        world,
        batch_size=profile.largest_batch,
        last_batch=last_batch,
        num_samples=num_samples,
        codecs=codecs,
    )


def choose_for(
    collection: EmbeddingCollection,
    sides: Declaration,
    loads: Sequence[TableLoad],
    config: RunConfig,
    world: World,
    device: Device,
    wanted: Sequence[Demand] = (),
    bags: Collection[str] = (),
    hot: Collection[str] = (),
) -> Choice:
    """What `config` leaves open is chosen, the rest is as it says. `sides`: the collection's declaration with hot rows
    beside cold ones, whose tables `loads` are of; `wanted`: what tables ask of memory, where it is limited; `bags`:
    features whose samples may have several ids; `hot`: tables that have hot rows. Raises ConfigError where what is said
    cannot be."""
    forced = forced_by(config.plan, collection.tables, world)
    for name in hot:
        forced[f"{name}[cold]"] = forced[name]
        forced[f"{name}[hot]"] = Forced("replicated")
    budget = config.plan.memory.dram
    memory = Memory(budget)
    if budget is not None and wanted:
        memory = Memory(budget, memory_price(wanted, budget, device))
    return choose(
        loads,
        world,
        memory=memory,
        rates=device.memory,
        forced=forced,
        is_fetched_ahead=config.plan.is_late,
        model=model_load(
            sides,
            loads,
            codecs=Codecs(config.plan.codec.values, config.plan.codec.gradients),
            bags=bags,
            world=world,
            reads_ahead=int(config.plan.is_late),
            declared=collection.declaration,
        ),
        towers=config.plan.towers if isinstance(config.plan.towers, int) else None,
    )


def placed_in_towers(config: RunConfig, collection: EmbeddingCollection, world: World) -> RunConfig:
    """`config`, whose plan says where tables lie that travel by towers. Raises ConfigError for a partition that cannot
    be read, or is for another model, and for towers that this world has not."""
    said, partition = config.plan, None
    if isinstance(said.towers, str):
        try:
            text = read_text(Path(said.towers))
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"plan.towers: got {said.towers!r}, wanted a number of towers, or a file that says which features "
                'stand together: {"towers": [["feature", ...], ...]}'
            ) from None
        try:
            partition = Partition.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"plan.towers: {said.towers}: {error}") from None
    declared = collection.declaration
    plan = towered(said, declared.tables, declared.features, partition, world)
    return config if plan is said else config.model_copy(update={"plan": plan})


def memory_price(wanted: Sequence[Demand], budget: int, device: Device) -> float:
    """Seconds of a step that a byte of memory saves, in reads of files; inf: there are no files to read."""
    pages = sum(place.pages for place in device.directories)
    if not pages:
        return float("inf")
    least = sum(each.least_rows * each.slot_bytes for each in wanted)
    full = min(budget, sum(each.most_bytes for each in wanted))
    less = max(int(FILLED * full), least)
    if less >= full:
        return float("inf")
    reads = [sum(each.reads for each in place(wanted, size)) for size in (less, full)]
    return max(reads[0] - reads[1], 0.0) / pages / (full - less)


def link_costs(
    choice: Choice,
    loads: Sequence[TableLoad],
    device: Device,
    model: nn.Module,
    world: World,
    declared: Declaration,
    plan: Plan,
) -> LinkCosts:
    """What the choice, of a `plan` for a model that `declared` its tables, adds to a step that one rank would take
    alone."""
    if world.num_ranks == 1:
        return LinkCosts()
    own = weights_inside(choice, declared)
    num_towers = plan.towers or world.num_hosts
    trainers, codec = world.of_trainers(), plan.codecs.dense
    reduced = reduction_seconds(model, trainers, codec, own, num_towers)
    mine = sum(alone(load, device.memory) for load in loads)
    return LinkCosts(
        processor_seconds=choice.seconds.processor - mine,
        waited_seconds=choice.seconds.waited + reduced,
        behind_seconds=choice.seconds.behind,
        crowding=world.crowding,
        sent=by_purpose(choice.sent),
    )


def weights_inside(choice: Choice, declared: Declaration) -> list[nn.Parameter]:
    """Those of operators that are evaluated inside a tower."""
    table_of = {
        field.name: declared.tables[declared.parts[field.part][0]].name for field in declared.fields
    }
    found: list[nn.Parameter] = []
    for each in choice.consumers:
        fields = declared.consumers[each.name].features
        if each.is_partial and all(choice.exchanges.get(table_of[f]) in BY_TOWERS for f in fields):
            found += declared.consumers[each.name].interaction.parameters()
    return found


def reduction_seconds(
    model: nn.Module,
    trainers: World,
    codec: CodecName,
    inside: Sequence[nn.Parameter] = (),
    num_towers: int = 1,
) -> float:
    """Of the dense gradients' sum over ranks, if it were one buffer of those that are coded and one of the others.
    `inside`: those that are summed inside one of so many towers, as if each had its share."""
    seconds, own = 0.0, {id(each) for each in inside}
    size = trainers.num_ranks // num_towers
    if own and 1 < size < trainers.num_ranks:
        local = min(size, trainers.ranks_per_host)
        tower = replace(trainers, num_hosts=size // local, ranks_per_host=local)
        share = sum(p.numel() * p.element_size() for p in inside) / num_towers
        seconds = sent(choose_way(tower, share), tower, share).seconds(tower)
    if size == trainers.num_ranks:  # one tower of all
        own = set()
    learned = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    coded = [p for p in learned if codec != "exact" and p.dtype in CODED_DTYPES]
    size = sum(p.numel() * p.element_size() for p in coded)
    rest = sum(p.numel() * p.element_size() for p in learned) - size
    if rest:
        seconds += sent(choose_way(trainers, rest), trainers, rest).seconds(trainers)
    if size:
        slow = coded_size(codec, sum(p.numel() for p in coded), trainers.num_ranks)
        seconds += sent(way_of_layout(trainers), trainers, size, slow).seconds(trainers)
        seconds += sent("whole", trainers, SIGNAL_BYTES).seconds(trainers)
    return seconds


def by_purpose(sent: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (channel, link), size in sent.items():
        found.setdefault(channel, {})[link] = size
    return found
