"""Planning from the data: a sample is profiled, the disk and the model are timed, memory goes where it saves most; and
predictions beside what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.batch import Batch
from colonnade.checkpoint.header import committed_steps, read_header
from colonnade.checkpoint.stores import shardings_of
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig
from colonnade.data.contract import Source, Splits, bags_of, num_steps
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.lookup.stacking import stacked, stacks_of
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
from colonnade.plan.measure.device import Device, measure
from colonnade.plan.measure.links import measure_links
from colonnade.plan.measure.profile import Profile, profile
from colonnade.plan.plan import Plan, placed_plan, plan_of
from colonnade.plan.search.candidates import Choice
from colonnade.plan.towers.advice import Advice
from colonnade.run.micro_benchmark import rehearse
from colonnade.run.planner import choose_for, hot_of, link_costs, loads_of
from colonnade.store.budget import slot_bytes
from colonnade.store.table_shards import lay_out
from colonnade.store.tier_counts import tier_counts
from colonnade.topology.sharding import Sharding
from colonnade.topology.world import World
from colonnade.train.objective import Objective
from colonnade.train.record import table_sizes

PURPOSES = ("route", "fetch", "push")
"""Of what a plan foretells: ids, rows and their gradients."""


def mean_sent(mesh: Mesh, steps: int) -> dict[str, float]:
    """Collective: bytes that a rank sent per step, the mean over ranks, by purpose."""
    if mesh.num_ranks == 1 or not steps:
        return {}
    counted = [float(mesh.traffic.bytes_of(purpose)) for purpose in PURPOSES]  # before this sends
    told = mesh.all_gather("control", torch.tensor(counted, dtype=torch.float64))
    means = torch.stack(list(told)).mean(0) / steps
    return dict(zip(PURPOSES, means.tolist(), strict=True))


def rows_of_first_owner(mesh: Mesh, collection: EmbeddingCollection) -> dict[str, Any]:
    """Collective where there are servers: as a run's summary has it, where rows came from, by tier and table. Rank 0's
    own where it has rows."""
    store = collection.store
    found = {
        "row_sources": asdict(store.sources),
        "tiers": {name: counts.plain() for name, counts in tier_counts(store).items()},
        "resident_bytes": store.resident_bytes(),
        "tables": table_sizes(collection),
    }
    if not mesh.world.has_servers:
        return found
    heard = mesh.all_gather_bytes("control", json.dumps(found).encode())
    return json.loads(heard[mesh.world.owners[0]])


def checked(
    plan: Plan, rate: float, batch_size: int, sent: Mapping[str, float]
) -> dict[str, float]:
    """As a run's summary has it; nothing where the plan foretold nothing. `rate`: samples per second of all ranks;
    errors are relative to what was measured."""
    foretold = plan.prediction
    if foretold is None or not rate:
        return {}
    found = {
        "predicted_samples_per_second": foretold["samples_per_second"],
        "prediction_error": foretold["samples_per_second"] / rate - 1,
    }
    if foretold.get("step_seconds"):
        found["predicted_step_seconds"] = foretold["step_seconds"]
        found["step_seconds"] = batch_size / rate
    counted = sum(sent.values())
    if counted:
        said = sum(sum(links.values()) for links in foretold["sent"].values())
        found |= {
            "predicted_sent_bytes": said,
            "counted_sent_bytes": counted,
            "sent_error": said / counted - 1,
        }
    return found


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
    owners, trainers = len(world.owners), world.num_trainers
    even = plan_of(config.plan, collection.tables, world)
    sample = read_sample(data.train, config.train.samples_per_step, lookups)
    declared = collection.declaration
    lookups_of = [stacked(batch, declared) for batch in sample]
    found = profile(collection.tables, declared.features, lookups_of)
    hot = hot_of(config.plan, declared, lookups_of, world, _recorded(folder))
    every = lay_out(
        collection.tables, plan_of(config.plan, collection.tables, world, hot=hot).shardings
    )
    dram = beside_hot(every, config.plan.memory.dram, "plan.memory.dram", slot_bytes)
    steps = _steps(config, data.train)
    if steps is None:
        steps = first_step + UNKNOWN_LENGTH * len(sample)
    memory = config.plan.memory
    mapped_bytes = 0 if even.mapped is None else even.mapped.bytes
    is_auto = config.plan.lookahead == "auto"
    batch_size = found.largest_batch  # of data smaller than a batch: what there is
    at_once = 1 + even.latest

    def asked(depth: int, shardings: Sequence[Sharding] | None = None) -> list[Demand]:
        return demands(
            collection.tables,
            found,
            batch_size=batch_size,
            window=depth + at_once,
            at_once=at_once,
            num_ranks=owners,
            num_samples=data.train.num_samples,
            first_batch=first_step,
            last_batch=max(steps, first_step + 1),
            fixed_bytes=memory.tables,
            shardings=shardings,
        )

    for depth in AUTO_DEPTHS if is_auto else (int(config.plan.lookahead),):
        wanted = asked(depth)
        if window_fits(wanted, dram):
            break
    place(wanted, dram, mapped_bytes, at_once=at_once)
    # Only now is the disk touched: what does not fit has been said.
    places = [each.path for each in even.ssd] or [str(place_of_rows)]
    if not even.needs_backing:
        places = []
    device = device or measured_before(folder, places) or measure(places)
    sides, seen = sides_of(declared, hot, lookups_of) if hot else (declared, found)
    loads = loads_of(
        sides, seen, world, last_batch=steps, num_samples=data.train.num_samples,
        codecs=even.codecs,
    )  # fmt: skip
    bags = bags_of(data.train.schema) | set(stacks_of(declared))
    choice = choose_for(collection, sides, loads, config, world, device, wanted, bags, hot)
    even = plan_of(config.plan, collection.tables, world, choice, hot)
    # Of who has which rows, now that it is known.
    shardings = [table.sharding for table in even.tables]
    wanted = asked(depth, shardings)
    if config.plan.placement == "even":
        placed = as_planned(wanted, even)
    else:
        placed = place_on_ranks(
            wanted, shardings, world.num_ranks, dram, mapped_bytes, at_once=at_once
        )
    capacities = {each.name: (each.rows, each.tier) for each in placed}
    wanted, placed = mean_over_ranks(wanted, placed, shardings, owners)
    if costs is None:
        mine = sample
        if trainers > 1:  # a rank's own share: what travels between ranks is not foretold
            mine = read_sample(data.train, config.train.samples_per_step, 1, trainers)
        costs = rehearse(
            model,
            [batch for batch in mine if batch.size == mine[0].size][:REHEARSED],
            data.train.schema,
            objective,
            make_optimizer,
            batch_size=config.train.samples_per_step,
            place=Path(places[0]) if places else None,
            reads={each.name: each.reads for each in placed},
        )
    if config.plan.placement == "even" and even.lookahead != "auto":
        depth = even.lookahead
    elif is_auto:
        depth = depth_for(placed, costs, device, depth)
    prediction = predict(
        collection.tables,
        wanted,
        placed,
        [found.lookups_per_sample(t) for t in range(len(collection.tables))],
        costs,
        device,
        batch_size=batch_size,
        num_batches=max(steps - first_step, 1),
        num_ranks=owners,
        lookahead=depth,
        write_budget=config.plan.write_budget,
        links=link_costs(choice, loads, device, model, world, collection.declaration, even),
    )
    plan = replace(even, prediction=asdict(prediction))
    if config.plan.placement == "profiled":
        plan = placed_plan(
            even,
            collection.tables,
            capacities,
            lookahead=depth,
            prediction=asdict(prediction),
        )
    return Planned(plan, found, device, costs, prediction, choice, tuple(loads), world)


def _recorded(folder: Path | None) -> dict[str, Sharding]:
    """By table: of the newest commit of a run."""
    steps = [] if folder is None else committed_steps(folder)
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
