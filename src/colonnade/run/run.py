"""Opening of runs: build everything that a trainer needs, in the same order on every rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from colonnade.cache.next_use import add_next_use_to_splits
from colonnade.checkpoint.checkpoints import (
    Checkpoints,
    describe_lost_checkpoints,
    open_checkpoints,
    restore_trainer,
)
from colonnade.checkpoint.completeness import check_folder_is_shared, find_edited_setting
from colonnade.checkpoint.header import list_checkpoints, read_header, resolve_step
from colonnade.checkpoint.stores import RowFiles
from colonnade.comm.mesh import Mesh
from colonnade.comm.peer_status import report_errors_to_peers
from colonnade.comm.process_groups import assign_server_ranks
from colonnade.comm.traffic import Traffic
from colonnade.config.plan import MemoryConfig
from colonnade.config.run import (
    OWN,
    RunConfig,
    dump_config,
    list_fixed_settings,
    load_config,
    override_settings,
)
from colonnade.data import Splits
from colonnade.data.contract import has_samples
from colonnade.data.processes import read_in_processes
from colonnade.data.tabular.tables import build_portable_options
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.files.disk import Disk
from colonnade.files.durable import write_durably
from colonnade.formats import make_format_stamp
from colonnade.machine import check_worker_count, collect_machine_facts
from colonnade.models.build import build_model, resolve_tower_settings
from colonnade.plan.build import build_plan
from colonnade.plan.constraints import resolve_plan_config
from colonnade.plan.plan import Plan
from colonnade.planning.choices import apply_tower_partition, check_exchanges_of_features
from colonnade.planning.placement import PROFILE_FILE, SAMPLE_LOOKUPS, Placement, count_run_steps
from colonnade.planning.planner import (
    PlanningResult,
    choose_servers,
    choose_servers_on_rank_0,
    complete_plan,
    plan_from_sample,
)
from colonnade.planning.timing import choose_plan
from colonnade.processors import count_usable_processors
from colonnade.publish.delivery import open_destinations
from colonnade.row_optimizer import RowOptimizer
from colonnade.run.codistill import Codistilled, wrap_objective
from colonnade.run.cross_rank_check import (
    check_config_on_all_ranks,
    check_model_on_all_ranks,
    check_plan_on_all_ranks,
)
from colonnade.run.defaults import (
    check_data_for_settings,
    check_thresholded_sums,
    describe_settings,
    open_data,
    resolve_settings,
    warn_of_few_steps,
)
from colonnade.run.start import (
    WarmStart,
    apply_warm_start,
    build_outcome,
    complete_killed_run_outcome,
    fetch_from_mirror_if_empty,
    plan_warm_start,
    read_final_summary,
)
from colonnade.store.log.stripes import check_tier_directories
from colonnade.table import Table
from colonnade.topology.world import World
from colonnade.train.callbacks import check_callbacks
from colonnade.train.objective import get_objective
from colonnade.train.record import (
    average_sent_bytes,
    compare_with_prediction,
    gather_row_summary,
)
from colonnade.train.schedules import build_schedule
from colonnade.train.setup import RunSetup, apply_late_directions, build_trainer
from colonnade.train.trainer import Outcome, Trainer


@dataclass(slots=True)
class TrainingRun:
    """Run as one rank sees it: trainer, folder and checkpoints. Call `train`, then `close`."""

    config: RunConfig
    mesh: Mesh
    trainer: Trainer
    folder: Path | None
    checkpoints: Checkpoints | None
    resumed_at: int | None
    summary: dict[str, Any] = field(default_factory=dict)
    """Summary of a trained run; set by `train`."""
    final_summary: dict[str, Any] | None = None
    """Recorded summary if the run was finished when it was opened; it is then open for reading only."""
    full_mesh: Mesh = field(default_factory=Mesh)
    """Mesh in which servers are trainers too, as in runs that are open for reading only."""

    def train(self) -> Outcome:
        """Train, and write the run folder's summary on rank 0. Collective."""
        if self.final_summary is not None:
            self.summary = self.final_summary
            return build_outcome(self.final_summary)
        progress = self.trainer.progress
        with report_errors_to_peers(self.mesh.peer_monitor):
            try:
                progress.start_reporting(self.trainer.collection.step, self.trainer)
                outcome = self.trainer.train()
                self._add_test_metrics(outcome)
            except BaseException:
                with suppress(ColonnadeError):  # the first error is the one to correct
                    progress.close({})
                raise
            progress.close(outcome.metrics)
        self.summary = self._build_summary(outcome)
        for destination in self.checkpoints.destinations if self.checkpoints is not None else ():
            destination.close()
        if self.folder is not None and self.mesh.rank == 0:
            text = json.dumps({**make_format_stamp("colonnade summary"), **self.summary}, indent=2)
            write_durably(Disk(), self.folder / "summary.json", text.encode(), checked=False)
        return outcome

    def _add_test_metrics(self, outcome: Outcome) -> None:
        """Add the test part's metrics to an outcome without them: of the best step, else of the last. Collective."""
        trainer = self.trainer
        started = time.perf_counter()
        is_tested = any(name.startswith("test_") for name in outcome.metrics)
        has_test = has_samples(trainer.data.test)
        if outcome.stopped or is_tested or not outcome.metrics or not has_test:
            return  # without metrics nothing was trained
        last_step = trainer.collection.step
        step = last_step if trainer.best.step is None else trainer.best.step
        metrics = trainer.test() if step == last_step else self._test_checkpoint(step)
        outcome.metrics |= metrics
        epoch = outcome.metrics["epoch"]  # of the same step
        trainer.progress.record_line(step, "evaluate", lambda: {"epoch": epoch, **metrics})
        outcome.seconds += time.perf_counter() - started

    def _test_checkpoint(self, step: int) -> dict[str, float]:
        """Compute the test part's metrics of a saved step; {} if this folder does not have it. Collective."""
        trainer = self.trainer
        folder = self.folder
        if folder is None or step not in list_checkpoints(folder):
            trainer.progress.print_line(
                f"the test part was not evaluated: the checkpoint of step {step}, the best, is not in {folder}"
            )
            return {}
        config = override_settings(self.config, {"data.readers": 0})
        mesh = replace(self.full_mesh, traffic=Traffic())
        with trainer.phases("evaluate", include_waits=True), torch.random.fork_rng():
            run = open_run(config, mesh, folder, read_only=True, at=step, data=trainer.data)
            run.trainer.progress = trainer.progress
            try:
                return run.trainer.test()
            finally:
                run.close()

    def _build_summary(self, outcome: Outcome) -> dict[str, Any]:
        """Return the summary of a trained run as plain values. Collective.

        It has metrics, this rank's time by phase and sent bytes by channel and link, and rows by source and tier of
        the first rank that owns rows.
        """
        collection = self.trainer.collection
        sent_bytes = average_sent_bytes(self.mesh, outcome.steps)
        row_summary = gather_row_summary(self.mesh, collection)
        num_samples = int(self.mesh.all_reduce("control", torch.tensor(outcome.samples)))
        num_samples = complete_killed_run_outcome(self.trainer, outcome, num_samples)
        phases = self.trainer.phases.seconds
        training_seconds = (
            outcome.seconds - phases.get("evaluate", 0.0) - phases.get("checkpoint", 0.0)
        )
        samples_per_second = num_samples / max(training_seconds, 1e-9)
        return {
            **asdict(outcome),
            "step": collection.step,
            "monitor": self.trainer.best.monitor,
            "samples": num_samples,
            "samples_per_second": samples_per_second,
            **compare_with_prediction(
                collection.plan,
                samples_per_second,
                self.config.train.samples_per_step,
                sent_bytes,
            ),
            "num_ranks": self.mesh.num_ranks,
            "num_trainers": self.mesh.world.num_trainers,
            "phases_seconds": dict(self.trainer.phases.seconds),
            "sent": self.mesh.traffic.to_dict(),
            **row_summary,
        }

    def close(self) -> None:
        """Close the checkpoints of the run, and its teacher."""
        if isinstance(self.trainer.objective, Codistilled):
            self.trainer.objective.close()
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
) -> TrainingRun:
    """Open a new run, or resume the run of a folder. Collective.

    A folder with checkpoints is resumed at the newest, or at `at`: a step, "best" or "last". Without a folder nothing
    is written, and every row must fit in memory. Raises before anything is written if ranks have different settings or
    the folder is another run's.
    """
    check_config_on_all_ranks(config, mesh)
    if config.data.name == OWN:
        raise ConfigError(
            f"{folder} was trained by colonnade.fit on a model and data of your own; go on with it there, or "
            "read it with colonnade.load_checkpoint"
        )
    set_num_threads(config.train.threads, mesh)
    if folder is not None and list_checkpoints(folder):
        # Before data and model are opened by settings that may have been edited.
        header = read_header(folder, resolve_step(folder, "last" if at is None else at))
        if edit := find_edited_setting(folder, header):
            raise CheckpointError(f"{folder}: {edit}. Restore it from a copy")
    if data is None:
        recorded_config = config
        config, data, chosen_settings = open_data(config, folder)
        if console and chosen_settings:
            console.print(chosen_settings, highlight=False)
        # Write out an inferred schema, so that the recorded configuration opens the same data later.
        recorded_options = build_portable_options(config.data.options, data)
        missing = recorded_options.keys() - recorded_config.data.options.keys()
        if read_only and missing:
            raise CheckpointError(
                f"{folder} has no data.options.{min(missing)}, which runs on {recorded_config.data.name} record: the "
                "version that trained it read the data otherwise. Train again in another folder (--run)"
            )
        config = override_settings(config, {"data.options": recorded_options})
    config = resolve_tower_settings(data.train.schema, config)
    data = read_in_processes(data, config.data.readers)
    model = build_model(data.train.schema, config)
    return prepare_run(
        RunSetup(
            model=model,
            data=data,
            config=config,
            mesh=mesh,
            folder=folder,
            objective=get_objective(model),
            console=console,
            disk=disk or Disk(),
            read_only=read_only,
            at=at,
        )
    )


def prepare_run(requested: RunSetup) -> TrainingRun:
    """Open a run of a model and data, for `open_run` and `fit`. Collective.

    A finished run is opened for reading only.
    """
    config = resolve_settings(requested.config, requested.objective)
    if config.plan.servers == "auto" and not requested.read_only:
        num_servers = choose_servers_on_rank_0(replace(requested, config=config))
        config = override_settings(config, {"plan.servers": num_servers})
    requested = wrap_objective(replace(requested, config=config))
    config = requested.config
    setup = replace(requested, mesh=_select_mesh(requested))
    check_model_on_all_ranks(
        setup.model,
        setup.collection,
        setup.data,
        setup.mesh,
        objective=type(setup.objective).__name__,
        metrics=list(getattr(setup.objective, "metrics", ())),
        monitor=config.train.monitor,
        at=setup.at,
        has_folder=setup.folder is not None,
    )
    final_summary = _read_final_summary(setup)
    if final_summary is not None:
        setup = requested.for_reading()
    if not setup.read_only:
        _prepare_training(setup)
    rows = RowOptimizer(setup.collection, clip_value=config.embedding.clip_value)
    optimizer = setup.make_optimizer(setup.parameters or [nn.Parameter(torch.empty(0))])
    run_steps = count_run_steps(config, setup.data)
    if setup.mesh.num_ranks > 1 and not setup.read_only:
        check_thresholded_sums(config, run_steps)
    if setup.console is not None and not setup.read_only:
        for note in setup.data.notes:
            setup.console.print(note, highlight=False, markup=False)
        if config.data.name != OWN:
            setup.console.print(
                describe_settings(config, setup.data.train.schema.labels), highlight=False
            )
        warn_of_few_steps(config, run_steps, setup.console)
    schedules = _build_schedules(setup, rows, optimizer, run_steps)
    placed = _plan_rows(setup, optimizer)
    start_plan = _plan_warm_start(setup)
    checkpoints, step = _open_checkpoints_and_rows(setup, None if placed is None else placed.plan)
    trainer = build_trainer(setup, rows, optimizer, schedules, run_steps, checkpoints)
    if setup.folder is not None and step is not None:
        with _close_checkpoints_on_error(checkpoints):
            restore_trainer(trainer, setup.folder, step)
    elif start_plan is not None:
        apply_warm_start(trainer, start_plan)
        if setup.console is not None:
            setup.console.print(str(start_plan), highlight=False)
    frozen = [p for p in setup.model.parameters() if not p.requires_grad]
    trainer.dense.broadcast_parameters([*frozen, *setup.model.buffers()])
    trainer.dense.build_buckets()
    apply_late_directions(optimizer, trainer.dense.late_directions)
    if setup.trained_folder is not None:
        if setup.mesh.rank == 0:
            _write_run_files(setup, setup.trained_folder, placed)
            if isinstance(setup.objective, Codistilled):
                setup.objective.mark_running()
        if checkpoints is not None:
            checkpoints.destinations = open_destinations(
                config.train, setup.trained_folder, checkpoints, step, setup.disk
            )
    return TrainingRun(
        config,
        setup.mesh,
        trainer,
        setup.folder,
        checkpoints,
        step,
        final_summary=final_summary,
        full_mesh=requested.mesh,
    )


def _select_mesh(setup: RunSetup) -> Mesh:
    """Return the mesh with the servers of the plan. A run opened for reading needs no servers."""
    collection = setup.collection
    if collection.is_open and collection.mesh.world.has_servers:
        return collection.mesh
    if setup.read_only:
        return setup.mesh
    return assign_server_ranks(setup.mesh, setup.config.plan.num_servers)


def _read_final_summary(setup: RunSetup) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if there is something to train.

    Raises CheckpointError for a folder whose run cannot resume with these settings."""
    folder = setup.trained_folder
    if folder is None:
        return None
    _check_can_resume(folder, setup.config)
    if setup.at is not None:
        return None
    train = setup.config.train
    num_epochs = len(setup.data.days) if train.progressive else train.num_epochs
    return read_final_summary(folder, train, num_epochs, setup.mesh)


def _prepare_training(setup: RunSetup) -> None:
    """Check callbacks and data; move the network to its device, which servers do not need.

    Raises before anything is opened."""
    config = setup.config
    check_callbacks(setup.callbacks)
    check_data_for_settings(setup.data, config, setup.objective)
    if config.data.next_use_hints:
        add_next_use_to_splits(setup.data, config.train.num_epochs)
    if not setup.mesh.is_server:
        move_dense_network(setup.model, config.train.device, setup.mesh)


def _build_schedules(
    setup: RunSetup, rows: RowOptimizer, optimizer: Optimizer, run_steps: int | None
) -> list[LRScheduler | ReduceLROnPlateau | None]:
    """Build the learning rate schedules of the rows and of the dense network: the caller's, or the configured ones."""
    config = setup.config
    return [
        setup.row_schedule(rows)
        if setup.row_schedule
        else build_schedule(rows, config.embedding.schedule, run_steps),
        setup.dense_schedule(optimizer)
        if setup.dense_schedule
        else build_schedule(optimizer, config.dense.schedule, run_steps),
    ]


def _plan_rows(setup: RunSetup, optimizer: Optimizer) -> Placement | None:
    """Plan the rows; check that all ranks have the same plan before anything is written. Collective.

    Returns None if the collection is open already. Raises ConfigError, BudgetExceeded.
    """
    collection = setup.collection
    config = setup.config
    mesh = setup.mesh
    folder = setup.folder
    if collection.is_open and (folder is not None or setup.read_only):
        raise ConfigError(
            "this model's collection is open already, so a run folder cannot back its rows; build the model anew"
        )
    plan = None
    placed_config = config
    if not collection.is_open:
        placed_config = apply_tower_partition(config, collection, mesh.world)
        plan_config = placed_config.plan
        if setup.read_only:  # saved rows are read where they are, and nothing is written
            memory = MemoryConfig(dram=plan_config.memory.dram)
            plan_config = plan_config.model_copy(update={"memory": memory})
        settled_config = resolve_plan_config(plan_config, collection.tables, mesh.world)
        plan = build_plan(collection.tables, mesh.world, settled_config)
        check_exchanges_of_features(plan, collection, setup.data)
        if not setup.read_only:
            check_tier_directories(plan.ssd, plan.mapped)
    check_plan_on_all_ranks(plan, optimizer, mesh)  # last check before anything is written
    if (folder := setup.trained_folder) is not None:
        check_folder_is_shared(folder, mesh)
        fetch_from_mirror_if_empty(folder, config, mesh, setup.console)
    if plan is None or setup.read_only:
        return Placement(plan) if plan else None
    placed = complete_plan(replace(setup, config=placed_config), plan)
    check_exchanges_of_features(placed.plan, collection, setup.data)
    if placed.note and setup.console is not None:
        setup.console.print(placed.note, style="yellow", highlight=False)
    plans = [placed.plan, *placed.runners_up]
    return replace(placed, plan=choose_plan(setup, plans, count_run_steps(config, setup.data)))


def _plan_warm_start(setup: RunSetup) -> WarmStart | None:
    """Plan the warm start of a run without checkpoints from another run; None if there is none."""
    train = setup.config.train
    folder = setup.folder
    if train.warm_start is None or setup.read_only:
        return None
    if folder is not None and list_checkpoints(folder):
        return None
    return plan_warm_start(
        setup.model, setup.collection.tables, train.warm_start, train.warm_start_skip
    )


def _open_checkpoints_and_rows(
    setup: RunSetup, plan: Plan | None
) -> tuple[Checkpoints | None, int | None]:
    """Open the run folder's checkpoints, and the rows of a collection that is not open yet. Collective.

    Returns the checkpoints, and the step to resume from; None without a folder or a checkpoint.
    """
    folder = setup.folder
    console = setup.console
    checkpoints = None
    step = None
    if folder is not None:
        files = RowFiles(folder, setup.disk)
        if plan is not None:
            files = replace(files, directories=plan.ssd, write_budget=plan.write_budget)
        checkpoints, step = open_checkpoints(
            files,
            setup.collection.tables,
            setup.mesh,
            keep=setup.config.train.keep_checkpoints,
            read_only=setup.read_only,
            at=None if setup.at is None else resolve_step(folder, setup.at),
            shardings=None if plan is None else plan.shardings,
        )
        checkpoints.sealed_settings = list_fixed_settings(setup.config)
        if step is not None and not setup.read_only:
            lost_checkpoints = describe_lost_checkpoints(checkpoints)  # collective
            if console is not None:
                for line in lost_checkpoints:
                    console.print(line, style="yellow", highlight=False)
    if plan is not None:
        backings = checkpoints.backings if checkpoints else ()
        with _close_checkpoints_on_error(checkpoints):
            setup.collection.open(plan, setup.mesh, backings=backings, step=step)
    return checkpoints, step


def _write_run_files(setup: RunSetup, folder: Path, placed: Placement | None) -> None:
    """Write configuration, plan, device, profile and machine facts into the run folder, on one rank."""
    write = partial(write_durably, setup.disk, checked=False)
    write(folder / "config.yaml", dump_config(setup.config).encode())
    write(folder / "plan.json", setup.collection.plan.to_json().encode())
    if placed and placed.device:
        write(folder / "device.json", placed.device.to_json().encode())
    if placed and placed.profile:
        write(folder / PROFILE_FILE, placed.profile.to_json().encode())
    facts = json.dumps(
        make_format_stamp("colonnade machine") | collect_machine_facts(folder), indent=2
    )
    write(folder / "machine.json", facts.encode())


@contextmanager
def _close_checkpoints_on_error(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Close the checkpoints on an error, so that other processes can open the folder."""
    try:
        yield
    except BaseException:
        if checkpoints is not None:
            checkpoints.close()
        raise


def plan_run(
    config: RunConfig,
    run_folder: Path,
    world: World,
    *,
    lookups: int = SAMPLE_LOOKUPS,
    table: str | None = None,
) -> tuple[PlanningResult, tuple[Table, ...]]:
    """Plan as `open_run` does with `plan.placement` profiled, for the given world, in this process alone.

    Returns the plan and the model's tables. run_folder: future run folder; nothing stays written. table: name of a
    table that the caller shows; raises ConfigError before anything is measured if the model does not have it.
    """
    setup = open_planned_setup(config)
    config = setup.config
    collection = setup.collection
    table_names = [table.name for table in collection.tables]
    if table is not None and table not in table_names:
        raise ConfigError(
            f"--table: got {table!r}, wanted a table of this model: {', '.join(table_names)}"
        )
    if config.plan.servers == "auto":
        num_servers = choose_servers(setup, world, rows_folder=run_folder)
        config = override_settings(config, {"plan.servers": num_servers})
    world = world.with_servers(config.plan.num_servers)
    config = apply_tower_partition(config, collection, world)
    default_plan = build_plan(
        collection.tables, world, resolve_plan_config(config.plan, collection.tables, world)
    )
    check_tier_directories(default_plan.ssd, default_plan.mapped)
    setup = replace(setup, config=config)
    planned = plan_from_sample(setup, world, rows_folder=run_folder, lookups=lookups)
    return planned, collection.tables


def open_planned_setup(config: RunConfig) -> RunSetup:
    """Open data and model of a run that is planned in this process alone. Raises ConfigError."""
    if config.data.name == OWN:
        raise ConfigError(
            "a model of your own is planned for by colonnade.fit, with placement='profiled'"
        )
    if config.plan.memory.hbm is not None:
        raise ConfigError(
            "got plan.memory.hbm, which the plan of a sample does not predict; leave it out to plan memory and disks"
        )
    config = override_settings(config, {"plan.placement": "profiled"})
    set_num_threads(config.train.threads, Mesh())
    config, data, _ = open_data(config, None)
    model = build_model(data.train.schema, config)
    move_dense_network(model, config.train.device, Mesh())
    return RunSetup(
        model=model, data=data, config=config, mesh=Mesh(), objective=get_objective(model)
    )


def move_dense_network(model: nn.Module, device: str, mesh: Mesh) -> None:
    """Move the dense network to its device. Raises ConfigError if there is no such device."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "got train.device=cuda, but torch sees no GPU on this machine; leave it out to compute on the "
                "processor, or install a CUDA build of torch"
            )
        local_rank = mesh.rank % mesh.world.ranks_per_host
        model.to(f"cuda:{local_rank % torch.cuda.device_count()}")


def set_num_threads(num_threads: int, mesh: Mesh) -> None:
    """Set the threads of this rank: `num_threads`, or OMP_NUM_THREADS, or its share of the usable processors.

    Raises ConfigError for too many."""
    if num_threads:
        torch.set_num_threads(check_worker_count("train.threads", num_threads))
    elif "OMP_NUM_THREADS" not in os.environ:
        share = max(1, count_usable_processors() // mesh.world.ranks_per_host)
        torch.set_num_threads(min(share, torch.get_num_threads()))
        pa.set_cpu_count(min(share, pa.cpu_count()))
    # OpenMP applies torch's setting to this thread alone. The lookahead and checkpoint threads would use
    # OMP_NUM_THREADS.
    _native.set_num_threads(torch.get_num_threads())


def load_run_config(folder: Path) -> RunConfig:
    """Load the configuration of a run folder. Raises CheckpointError if there is none."""
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{folder} is no run folder: it has no config.yaml. Give a folder that `colonnade train` wrote"
        )
    return load_config(folder / "config.yaml")


def _check_can_resume(folder: Path, config: RunConfig) -> None:
    """Raise CheckpointError if a folder's run cannot resume with these settings (`list_fixed_settings`)."""
    path = folder / "config.yaml"
    if not path.exists() or not list_checkpoints(folder):
        return
    if not path.read_bytes().strip():
        raise CheckpointError(f"{path} is empty, wanted the run's settings; restore it from a copy")
    recorded_settings, settings = map(list_fixed_settings, (load_config(path), config))
    for name in [*settings, *recorded_settings]:
        if recorded_settings.get(name) != settings.get(name):
            tower_note = "tower" in name and (
                f". Modules of other towers start anew; train.warm_start={folder} takes what agrees to another folder"
            )
            raise CheckpointError(
                f"{folder} holds a run with {name}={recorded_settings.get(name)!r}, this one has "
                f"{settings.get(name)!r}; "
                f"give it another folder (--run), or the same settings to go on with it{tower_note or ''}"
            )
