"""From a configuration to a run: everything a trainer needs, opened in the right order on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from colonnade import _native
from colonnade.cache.next_use import splits_with_next_use
from colonnade.checkpoint.checkpoints import Checkpoints, lost_words, open_checkpoints, restore
from colonnade.checkpoint.completeness import check_shared
from colonnade.checkpoint.header import list_checkpoints, resolve
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import with_servers
from colonnade.config.plan import MemoryConfig
from colonnade.config.run import RunConfig, dump_config, load_config, override
from colonnade.data import Splits, num_steps
from colonnade.data.processes import read_ahead
from colonnade.data.tabular.tables import lasting_options
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, StorageError
from colonnade.formats import stamp
from colonnade.interaction import TowerModule
from colonnade.models.build import build_model, lasting_towers
from colonnade.models.tower_modules import words_of
from colonnade.plan.constraints import is_settled, settle_plan
from colonnade.plan.measure.device import Device
from colonnade.plan.plan import Plan, build_plan
from colonnade.plan.search.candidates import Memory
from colonnade.plan.towers.advice import advised
from colonnade.processors import usable_processors
from colonnade.publish.delivery import open_destinations
from colonnade.publish.mirror import explained, fetch_run, mirrored_steps, open_url
from colonnade.row_optimizer import RowOptimizer
from colonnade.run.cross_rank_check import agree_on_config, agree_on_model, agree_on_plan, flatten
from colonnade.run.defaults import open_data, settle, warn_of_few_steps
from colonnade.run.machine import machine_facts
from colonnade.run.planner import placed_in_towers
from colonnade.run.planning import SAMPLE_LOOKUPS, Planned, plan_for_all, plan_from_sample
from colonnade.run.start import (
    Taken,
    complete_outcome,
    outcome_of,
    plan_warm_start,
    read_final_summary,
    warm_start,
)
from colonnade.run.validation import check_data, check_lookups, find_collection
from colonnade.store.disk import Disk
from colonnade.store.durable import write_durably
from colonnade.store.storage_locations import check_tiers
from colonnade.table import Table
from colonnade.terminal import Terminal
from colonnade.topology.world import World
from colonnade.train.dense import DenseGradients
from colonnade.train.loss_scale import build_loss_scale
from colonnade.train.objective import Objective, objective_of
from colonnade.train.progress import Progress
from colonnade.train.record import (
    compare_with_prediction,
    gather_row_summary,
    mean_sent_bytes,
    record_part_of,
)
from colonnade.train.schedules import build_schedule
from colonnade.train.tower_weights import find_tower_weights
from colonnade.train.trainer import Outcome, Schedule, Trainer

OWN = "own"
"""data.name of a run whose model and data came from Python (`colonnade.fit`)."""

OptimizerMaker = Callable[[Sequence[nn.Parameter]], Optimizer]
ScheduleMaker = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau | None]

DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


@dataclass(slots=True)
class Run:
    """One rank's end of a run. Use `train`, then `close`."""

    config: RunConfig
    mesh: Mesh
    trainer: Trainer
    folder: Path | None
    checkpoints: Checkpoints | None
    resumed_at: int | None
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes that a rank sent per step, the mean over ranks, by channel: once trained."""
    rows: dict[str, Any] = field(default_factory=dict)
    """What the first rank that has rows says of them: once trained."""
    samples: int = 0
    """That all ranks trained on, whose shares may differ: once trained."""
    final_summary: dict[str, Any] | None = None
    """Of a run that had nothing left to train when it was opened: what it recorded. It is open for reading."""

    def train(self) -> Outcome:
        """Collective. Writes the run folder's summary on rank 0."""
        if self.final_summary is not None:
            return outcome_of(self.final_summary)
        self.trainer.progress.open(self.trainer.collection.step, self.trainer)
        try:
            outcome = self.trainer.train()
        finally:
            self.trainer.progress.close()
        self.sent = mean_sent_bytes(self.mesh, outcome.steps)
        self.rows = gather_row_summary(self.mesh, self.trainer.collection)
        self.samples = int(self.mesh.all_reduce("control", torch.tensor(outcome.samples)))
        self.samples = complete_outcome(self.trainer, outcome, self.samples)
        for destination in self.checkpoints.destinations if self.checkpoints is not None else ():
            destination.close()
        if self.folder is not None and self.mesh.rank == 0:
            text = json.dumps({**stamp("colonnade summary"), **self.summary(outcome)}, indent=2)
            write_durably(Disk(), self.folder / "summary.json", text.encode(), checked=False)
        return outcome

    def summary(self, outcome: Outcome) -> dict[str, Any]:
        """Plain values, once trained: metrics, time by phase and what was sent by channel and link (this rank's), rows
        by source and tier."""
        if self.final_summary is not None:
            return self.final_summary
        collection, phases = self.trainer.collection, self.trainer.phases.seconds
        trained = outcome.seconds - phases.get("evaluate", 0.0) - phases.get("checkpoint", 0.0)
        rate = self.samples / max(trained, 1e-9)
        return {
            **asdict(outcome),
            "step": collection.step,
            "monitor": self.trainer.best.monitor,
            "samples": self.samples,
            "samples_per_second": rate,
            **compare_with_prediction(
                collection.plan, rate, self.config.train.samples_per_step, self.sent
            ),
            "num_ranks": self.mesh.num_ranks,
            "num_trainers": self.mesh.world.num_trainers,
            "phases_seconds": dict(self.trainer.phases.seconds),
            "sent": self.mesh.traffic.plain(),
            **self.rows,
        }

    def close(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()


def open_run(
    config: RunConfig,
    mesh: Mesh,
    folder: Path | None,
    *,
    console: Console | None = None,
    disk: Disk | None = None,
    read_only: bool = False,
    at: int | str | None = None,
    data: Splits | None = None,
) -> Run:
    """Collective. A folder with checkpoints is resumed at the newest, or at `at`: a step, "best" or "last". Raises
    before anything is written where ranks disagree or the folder is another run's.

    Without a folder nothing is written, and every row must fit in memory.
    """
    agree_on_config(config, mesh)
    if config.data.name == OWN:
        raise ConfigError(
            f"{folder} was trained by colonnade.fit on a model and data of your own; go on with it there, or "
            "read it with colonnade.load_run"
        )
    set_threads(config.train.threads, mesh)
    if data is None:
        config, data, chosen = open_data(config, folder)
        if console and chosen:
            console.print(chosen, highlight=False)
        # What the run folder records opens the same data tomorrow: an inferred schema is written out.
        config = override(config, {"data.options": lasting_options(config.data.options, data)})
    config = lasting_towers(data.train.schema, config)
    data = read_ahead(data, config.data.readers)
    model = build_model(data.train.schema, config)
    return prepare(
        model,
        data,
        config,
        mesh,
        folder,
        objective=objective_of(model),
        console=console,
        disk=disk,
        read_only=read_only,
        at=at,
    )


def prepare(
    model: nn.Module,
    data: Splits,
    config: RunConfig,
    mesh: Mesh,
    folder: Path | None,
    *,
    objective: Objective,
    dense_optimizer: OptimizerMaker | None = None,
    dense_schedule: ScheduleMaker | None = None,
    row_schedule: ScheduleMaker | None = None,
    console: Console | None = None,
    disk: Disk | None = None,
    read_only: bool = False,
    at: int | str | None = None,
) -> Run:
    """Collective: the one way from a model and its data to a run, whoever built them; as `open_run`."""
    config = settle(config, objective)
    collection, mesh_of_all = find_collection(model), mesh
    mesh = _mesh_of_run(collection, mesh, config, read_only)
    agree_on_model(
        model, collection, data, mesh,
        objective=type(objective).__name__, monitor=config.train.monitor, at=at, has_folder=folder is not None,
    )  # fmt: skip
    final_summary = None
    if folder is not None and not read_only:
        _check_same_run(folder, config)
        if at is None:
            final_summary = _read_final_summary(folder, config, data, mesh)
        if final_summary is not None:  # open it for reading
            read_only, mesh = True, mesh_of_all
    if not read_only:
        _prepare_training(model, data, config, mesh, objective)
    opening = _Opening(
        model, collection, data, config, mesh, folder, objective, read_only,
        dense_optimizer or partial(_dense_optimizer, config=config), console, disk or Disk(),
    )  # fmt: skip
    rows = RowOptimizer(collection, clip_value=config.embedding.clip_value)
    optimizer = opening.make_optimizer(opening.parameters or [nn.Parameter(torch.empty(0))])
    run_steps = total_steps(config, data)
    if console is not None and not read_only:
        warn_of_few_steps(config, run_steps, console)
    schedules = [
        row_schedule(rows) if row_schedule else build_schedule(rows, config.embedding.schedule, run_steps),
        dense_schedule(optimizer) if dense_schedule else build_schedule(optimizer, config.dense.schedule, run_steps),
    ]  # fmt: skip
    plan, device = _make_plan(opening, optimizer)
    plan_of_start = _plan_warm_start(opening)
    checkpoints, step = _open_rows(opening, plan, at)
    trainer = _build_trainer(opening, rows, optimizer, schedules, run_steps, checkpoints)
    if folder is not None and step is not None:
        with _closed_on_error(checkpoints):
            restore(trainer, folder, step)
    elif plan_of_start is not None:
        warm_start(trainer, plan_of_start)
        if console is not None:
            console.print(str(plan_of_start), highlight=False)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trainer.dense.broadcast_parameters([*frozen, *model.buffers()])
    trainer.dense.attach()
    if folder is not None and not read_only:
        if mesh.rank == 0:
            _write_run_files(opening, folder, device)
        if checkpoints is not None:
            checkpoints.destinations = open_destinations(
                config.train, folder, checkpoints, step, opening.disk
            )
    return Run(config, mesh, trainer, folder, checkpoints, step, final_summary=final_summary)


@dataclass(frozen=True, slots=True)
class _Opening:
    """Run that is being opened: what all steps of that need."""

    model: nn.Module
    collection: EmbeddingCollection
    data: Splits
    config: RunConfig
    mesh: Mesh
    folder: Path | None
    objective: Objective
    read_only: bool
    make_optimizer: OptimizerMaker
    console: Console | None
    disk: Disk

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Dense parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def trained_folder(self) -> Path | None:
        """Folder that the run writes to; None: it writes nothing."""
        return None if self.read_only else self.folder


def _mesh_of_run(
    collection: EmbeddingCollection, mesh: Mesh, config: RunConfig, read_only: bool
) -> Mesh:
    """Return the mesh with the servers of the plan. Reading a run needs none because it was trained with some."""
    if collection.is_open and collection.mesh.world.has_servers:
        return collection.mesh
    return mesh if read_only else with_servers(mesh, config.plan.servers)


def _read_final_summary(
    folder: Path, config: RunConfig, data: Splits, mesh: Mesh
) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to train, None of any other."""
    num_epochs = len(data.days) if config.train.progressive else config.train.num_epochs
    return read_final_summary(folder, config.train, num_epochs, mesh)


def _prepare_training(
    model: nn.Module, data: Splits, config: RunConfig, mesh: Mesh, objective: Objective
) -> None:
    """Check the data; move the network to its device, which servers do not need. Raises before anything is opened."""
    check_data(data, config, objective)
    if config.data.next_use_hints:
        splits_with_next_use(data, config.train.num_epochs)
    if not mesh.is_server:
        move_network(model, config.train.device, mesh)


def _make_plan(opening: _Opening, optimizer: Optimizer) -> tuple[Plan | None, Device | None]:
    """Collective: plan the rows; None where the collection is open already. Nothing is written before ranks agree.

    Returns the plan, and the device as it was measured for one. Raises ConfigError.
    """
    collection, config, mesh, folder = (
        opening.collection, opening.config, opening.mesh, opening.folder,
    )  # fmt: skip
    if collection.is_open and (folder is not None or opening.read_only):
        raise ConfigError(
            "this model's collection is open already, so a run folder cannot back its rows; build the model anew"
        )
    plan, laid = None, config
    if not collection.is_open:
        laid = placed_in_towers(config, collection, mesh.world)
        wanted = laid.plan
        if opening.read_only:  # what was saved is found where it is, and nothing is written
            memory = MemoryConfig(dram=wanted.memory.dram)
            wanted = wanted.model_copy(update={"memory": memory})
        settled = settle_plan(wanted, collection.tables, mesh.world)
        plan = build_plan(collection.tables, mesh.world, settled)
        check_lookups(plan, collection, opening.data)
        if not opening.read_only:
            check_tiers(plan.ssd, plan.mapped)
    agree_on_plan(plan, optimizer, mesh)  # the last word before anything is written
    if (folder := opening.trained_folder) is not None:
        check_shared(folder, mesh)
        _fetch_if_bare(folder, config, mesh, opening.console)
    if plan is None or opening.read_only:
        return plan, None
    if is_settled(laid.plan, collection.tables, mesh.world) and config.plan.placement != "profiled":
        return plan, None
    plan, device = plan_for_all(
        opening.model, collection, opening.data, laid, mesh, folder, objective=opening.objective,
        make_optimizer=opening.make_optimizer,
        first_step=0 if folder is None else max(list_checkpoints(folder), default=0),
    )  # fmt: skip
    check_lookups(plan, collection, opening.data)
    return plan, device


def _plan_warm_start(opening: _Opening) -> Taken | None:
    """Plan what a run without checkpoints takes from another one; None: nothing."""
    train, folder = opening.config.train, opening.folder
    if train.warm_start is None or opening.read_only:
        return None
    if folder is not None and list_checkpoints(folder):
        return None
    return plan_warm_start(
        opening.model, opening.collection.tables, train.warm_start, train.warm_start_skip
    )


def _open_rows(
    opening: _Opening, plan: Plan | None, at: int | str | None
) -> tuple[Checkpoints | None, int | None]:
    """Collective: open the run folder's checkpoints, and the rows of a collection that is not open yet.

    Returns the checkpoints, and the step of the one that the run goes on from; None where there is no folder or no
    checkpoint.
    """
    folder, console, checkpoints, step = opening.folder, opening.console, None, None
    if folder is not None:
        checkpoints, step = open_checkpoints(
            folder,
            opening.collection.tables,
            opening.mesh,
            keep=opening.config.train.keep_checkpoints,
            disk=opening.disk,
            read_only=opening.read_only,
            at=None if at is None else resolve(folder, at),
            shardings=None if plan is None else plan.shardings,
            places=() if plan is None else plan.ssd,
            write_budget=None if plan is None else plan.write_budget,
        )
        if step is not None and not opening.read_only and console is not None:
            for words in lost_words(checkpoints):
                console.print(words, style="yellow", highlight=False)
    if plan is not None:
        backings = checkpoints.backings if checkpoints else ()
        with _closed_on_error(checkpoints):
            opening.collection.open(plan, opening.mesh, backings=backings, step=step)
    return checkpoints, step


def _build_trainer(
    opening: _Opening,
    rows: RowOptimizer,
    optimizer: Optimizer,
    schedules: Sequence[LRScheduler | ReduceLROnPlateau | None],
    run_steps: int | None,
    checkpoints: Checkpoints | None,
) -> Trainer:
    """Build the trainer of an open collection; print how the model's towers go together."""
    collection, config, mesh, console = (
        opening.collection, opening.config, opening.mesh, opening.console,
    )  # fmt: skip
    exchange, data, part = collection.exchange, opening.data, record_part_of(mesh)
    if config.data.next_use_hints and not opening.read_only:
        data = splits_with_next_use(data, config.train.num_epochs)
    trainer = Trainer(
        opening.model,
        collection,
        data,
        _schedule(config),
        objective=opening.objective,
        dense_optimizer=optimizer,
        rows=rows,
        dense=DenseGradients(
            opening.parameters, mesh, collection.plan.codecs.dense, late=exchange.pushed_parameters,
            towers=find_tower_weights(collection.declaration, exchange.inside, mesh.num_ranks, optimizer),
        ),
        lr_schedules=[schedule for schedule in schedules if schedule is not None],
        progress=Progress(
            total_steps=run_steps,
            console=console or Terminal(quiet=True),
            folder=None if part is None else opening.trained_folder,
            part=part or "all",
            is_quiet=console is None or mesh.rank > 0,
        ),
        checkpoints=checkpoints,
        loss_scale=build_loss_scale(config.train.loss_scale),
    )  # fmt: skip
    if console is not None and (words := words_of(opening.model, collection)):
        console.print(words, highlight=False)
    return trainer


def _write_run_files(opening: _Opening, folder: Path, device: Device | None) -> None:
    """Write what describes the run into its folder; one rank does."""
    write = partial(write_durably, opening.disk, checked=False)
    write(folder / "config.yaml", dump_config(opening.config).encode())
    write(folder / "plan.json", opening.collection.plan.to_json().encode())
    if device is not None:
        write(folder / "device.json", device.to_json().encode())
    facts = json.dumps(stamp("colonnade machine") | machine_facts(folder), indent=2)
    write(folder / "machine.json", facts.encode())


@contextmanager
def _closed_on_error(checkpoints: Checkpoints | None) -> Iterator[None]:
    """A run that is refused leaves its folder to others."""
    try:
        yield
    except BaseException:
        if checkpoints is not None:
            checkpoints.close()
        raise


def plan_run(
    config: RunConfig,
    place: Path,
    world: World,
    *,
    lookups: int = SAMPLE_LOOKUPS,
    table: str | None = None,
) -> tuple[Planned, tuple[Table, ...]]:
    """What `open_run` would plan with `plan.placement` profiled, for such a world, on this process alone; of a model
    without tower modules also what these would save; and the model's tables. `place`: where the run folder is to lie.
    Nothing stays written. `table`: one that the caller is to show; ConfigError before anything is measured where the
    model has none of this name."""
    world = world.with_servers(config.plan.servers)
    if config.data.name == OWN:
        raise ConfigError(
            "a model of your own is planned for by colonnade.fit, with placement='profiled'"
        )
    if config.plan.memory.hbm is not None:
        raise ConfigError(
            "got plan.memory.hbm, which the plan of a sample does not foretell; leave it out to plan memory and disks"
        )
    config = override(config, {"plan.placement": "profiled"})
    set_threads(config.train.threads, Mesh())
    config, data, _ = open_data(config, None)
    model = build_model(data.train.schema, config)
    collection = find_collection(model)
    names = [each.name for each in collection.tables]
    if table is not None and table not in names:
        raise ConfigError(
            f"--table: got {table!r}, wanted a table of this model: {', '.join(names)}"
        )
    config = placed_in_towers(config, collection, world)
    even = build_plan(collection.tables, world, settle_plan(config.plan, collection.tables, world))
    check_tiers(even.ssd, even.mapped)
    move_network(model, config.train.device, Mesh())
    found = plan_from_sample(
        model,
        collection,
        data,
        config,
        objective=objective_of(model),
        make_optimizer=partial(_dense_optimizer, config=config),
        world=world,
        place_of_rows=place,
        lookups=lookups,
    )
    if not any(isinstance(each, TowerModule) for each in collection.interactions.values()):
        memory = Memory(config.plan.memory.dram)
        rates = found.device.memory
        advice = advised(found.loads, world, found.choice, memory=memory, rates=rates)
        found = replace(found, advice=advice)
    return found, collection.tables


def _fetch_if_bare(folder: Path, config: RunConfig, mesh: Mesh, console: Console | None) -> None:
    """Collective: a folder without checkpoints gets the newest one of its mirror, if there is one."""
    url = config.train.mirror
    if url is None:
        return
    problem = ""
    if mesh.rank == 0 and not list_checkpoints(folder):
        try:
            with explained(url, "read"):
                steps = mirrored_steps(*open_url(url))
            if steps:
                step = fetch_run(url, folder)
                if console is not None:
                    console.print(
                        f"fetched the checkpoint of step {step} from {url}", highlight=False
                    )
        except ColonnadeError as error:
            problem = str(error)
    if said := mesh.all_gather_bytes("control", problem.encode())[0].decode():
        raise StorageError(said)


def move_network(model: nn.Module, device: str, mesh: Mesh) -> None:
    """The dense network to where it computes. Raises ConfigError where there is no such device."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "got train.device=cuda, but torch sees no GPU on this machine; leave it out to compute on the "
                "processor, or install a CUDA build of torch"
            )
        here = mesh.rank % mesh.world.ranks_per_host
        model.to(f"cuda:{here % torch.cuda.device_count()}")


def set_threads(wanted: int, mesh: Mesh) -> None:
    """Set the threads of this rank: `wanted`, what OMP_NUM_THREADS says, or its share of the usable processors."""
    if wanted:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        share = max(1, usable_processors() // mesh.world.ranks_per_host)
        torch.set_num_threads(min(share, torch.get_num_threads()))
        pa.set_cpu_count(min(share, pa.cpu_count()))
    # OpenMP keeps what torch is told for this thread alone: the lookahead's and a checkpoint's would take
    # OMP_NUM_THREADS.
    _native.set_num_threads(torch.get_num_threads())


def load_run_config(folder: Path) -> RunConfig:
    """The configuration a run folder was trained with. Raises CheckpointError where there is none."""
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{folder} is no run folder: it has no config.yaml. Give a folder that `colonnade train` wrote"
        )
    return load_config(folder / "config.yaml")


def _check_same_run(folder: Path, config: RunConfig) -> None:
    """Refuse a folder of a run that cannot go on with these settings. Learning rates and the plan may change."""
    path = folder / "config.yaml"
    if not path.exists() or not list_checkpoints(folder):
        return
    recorded = load_config(path)
    if not path.read_bytes().strip():
        raise CheckpointError(f"{path} is empty, wanted the run's settings; restore it from a copy")
    fixed = (
        "model.", "embedding.optimizer", "embedding.wide.optimizer",
        "embedding.admission", "embedding.eviction", "embedding.tables",
        "dense.optimizer", "data.name", "data.options", "train.seed", "train.progressive",
    )  # fmt: skip
    free = ["model.compile", "data.options.threads"]
    before, now = flatten(recorded.model_dump()), flatten(config.model_dump())
    if before.get("model.tower_dim") is now["model.tower_dim"] is None:
        free.append("model.towers")  # they only say where rows lie
    for name in [*now, *before]:
        is_fixed = name.startswith((*fixed, "train.batch_size")) and name not in free
        is_fixed |= name.startswith("embedding.by_table.") and name.endswith(".optimizer")
        if is_fixed and before.get(name) != now.get(name):
            anew = "tower" in name and (
                f". Modules of other towers start anew; train.warm_start={folder} takes what agrees to another folder"
            )
            raise CheckpointError(
                f"{folder} holds a run with {name}={before.get(name)!r}, this one has {now.get(name)!r}; "
                f"give it another folder (--run), or the same settings to go on with it{anew or ''}"
            )


def _schedule(config: RunConfig) -> Schedule:
    train = config.train
    return Schedule(
        batch_size=train.samples_per_step,
        epochs=train.num_epochs,
        max_steps=train.max_steps,
        accumulate=train.accumulate,
        evaluate_steps=train.evaluate_steps,
        monitor=train.monitor,
        patience=train.patience or 0,
        min_delta=train.min_delta,
        progressive=train.progressive,
        embedding_clip_norm=config.embedding.clip_norm,
        dense_clip_norm=config.dense.clip_norm,
        checkpoint_steps=train.checkpoint_steps,
        checkpoint_seconds=train.checkpoint_seconds,
        skip_non_finite=train.on_non_finite == "skip",
    )


def _dense_optimizer(
    parameters: Sequence[nn.Parameter], *, config: RunConfig
) -> torch.optim.Optimizer:
    chosen = DENSE_OPTIMIZERS[config.dense.optimizer]
    return chosen(
        parameters, lr=config.dense.learning_rate, weight_decay=config.dense.weight_decay or 0.0
    )


def total_steps(config: RunConfig, data: Splits) -> int | None:
    """Of the whole run; None: nobody knows before the end."""
    most, train = config.train.max_steps, config.train
    parts = data.days if train.progressive else (data.train,) * train.num_epochs
    counts = [part.num_samples for part in parts]
    steps = sum(num_steps(count, train.samples_per_step) for count in counts if count is not None)
    if any(count is None for count in counts):
        return most
    return steps if most is None else min(steps, most)
