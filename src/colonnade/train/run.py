"""From a configuration to a run: everything a trainer needs, opened in the right order on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from colonnade import _native
from colonnade.config import RunConfig, dump_config, load_config, override
from colonnade.data import Splits, num_steps, open_source
from colonnade.data.tables import lasting_options
from colonnade.errors import CheckpointError, WorldError
from colonnade.models.build import build_model
from colonnade.plan.plan import build_plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.store.disk import Disk
from colonnade.store.durable import write_durably
from colonnade.topology.mesh import Mesh
from colonnade.train.commits import Commits, open_commits, restore
from colonnade.train.dense import DenseGradients
from colonnade.train.machine import machine_facts
from colonnade.train.objective import Probability
from colonnade.train.progress import Progress
from colonnade.train.record import table_sizes
from colonnade.train.trainer import Outcome, Schedule, Trainer

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
    commits: Commits | None
    resumed_at: int | None

    def train(self) -> Outcome:
        """Collective. Writes the run folder's summary on rank 0."""
        self.trainer.progress.open(self.trainer.collection.step, self.trainer)
        try:
            outcome = self.trainer.train()
        finally:
            self.trainer.progress.close()
        if self.folder is not None and self.mesh.rank == 0:
            text = json.dumps(self.summary(outcome), indent=2)
            write_durably(Disk(), self.folder / "summary.json", text.encode(), checked=False)
        return outcome

    def summary(self, outcome: Outcome) -> dict[str, Any]:
        """Plain values: metrics, time by phase, rows by source, bytes by purpose (this rank's)."""
        collection = self.trainer.collection
        return {
            **asdict(outcome),
            "num_ranks": self.mesh.num_ranks,
            "phases_seconds": dict(self.trainer.phases.seconds),
            "row_sources": asdict(collection.store.sources),
            "sent_bytes": dict(collection.exchange.traffic.sent_bytes),
            "resident_bytes": collection.store.native.resident_bytes(),
            "tables": table_sizes(collection),
        }

    def close(self) -> None:
        if self.commits is not None:
            self.commits.close()


def open_run(
    config: RunConfig,
    mesh: Mesh,
    folder: Path | None,
    *,
    console: Console | None = None,
    disk: Disk | None = None,
    read_only: bool = False,
    at: int | None = None,
    data: Splits | None = None,
) -> Run:
    """Collective. A folder with commits is resumed at the newest, or at step `at`. Raises before anything is
    written where ranks disagree or the folder is another run's.

    Without a folder nothing is written, and every row must fit in memory.
    """
    agree_on(config, mesh)
    set_threads(config.train.threads, mesh)
    if data is None:
        data = open_source(config.data.name, config.data.path, **config.data.options)
        # What the run folder records opens the same data tomorrow: an inferred schema is written out.
        lasting = {"data.options": lasting_options(config.data.options, data)}
        config = override(config, lasting)
    model = build_model(data.train.schema, config)
    collection = model.embeddings
    plan = build_plan(
        collection.tables,
        mesh.num_ranks,
        dram_bytes=config.plan.dram,
        lookahead=config.plan.lookahead,
        staleness_steps=config.plan.staleness_steps,
        exchange=config.plan.exchange,
    )
    commits, step = None, None
    if folder is not None:
        if not read_only:
            _check_same_run(folder, config)
        commits, step = open_commits(
            folder,
            collection.tables,
            mesh,
            keep=config.train.keep_commits,
            disk=disk,
            read_only=read_only,
            at=at,
        )
    collection.open(plan, mesh, backings=commits.backings if commits else ())
    dense = DenseGradients(list(model.parameters()), mesh)
    trainer = Trainer(
        model,
        collection,
        data,
        _schedule(config),
        objective=Probability(),
        dense_optimizer=_dense_optimizer(model, config),
        rows=RowOptimizer(collection),
        dense=dense,
        progress=Progress(
            total_steps=_total_steps(config, data),
            console=console or Console(),
            folder=folder if mesh.rank == 0 and not read_only else None,
            is_quiet=console is None or mesh.rank > 0,
        ),
        commits=commits,
    )
    if folder is not None and step is not None:
        restore(trainer, folder, step)
    dense.synchronise()
    dense.attach()
    if folder is not None and mesh.rank == 0 and not read_only:
        files = disk or Disk()
        write_durably(files, folder / "config.yaml", dump_config(config).encode(), checked=False)
        write_durably(files, folder / "plan.json", plan.to_json().encode(), checked=False)
        facts = json.dumps(machine_facts(folder), indent=2).encode()
        write_durably(files, folder / "machine.json", facts, checked=False)
    return Run(config, mesh, trainer, folder, commits, step)


def set_threads(wanted: int, mesh: Mesh) -> None:
    """Threads per rank: `wanted`, or this machine's processors shared among its ranks."""
    if wanted:
        torch.set_num_threads(wanted)
    elif mesh.world.ranks_per_host > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // mesh.world.ranks_per_host))
    _native.set_num_threads(0)


def agree_on(config: RunConfig, mesh: Mesh) -> None:
    """Collective. Raises WorldError on every rank, naming the first difference."""
    texts = mesh.all_gather_bytes("control", config.model_dump_json().encode())
    flat = [_flatten(json.loads(text)) for text in texts]
    for rank, settings in enumerate(flat):
        for name, value in flat[0].items():
            if settings.get(name) != value:
                raise WorldError(
                    f"rank {rank} was started with {name}={settings.get(name)!r}, rank 0 with {value!r}; "
                    "start every rank with the same configuration"
                )


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
    if not path.exists():
        return
    if not path.read_text(encoding="utf-8").strip():
        raise CheckpointError(f"{path} is empty, wanted the run's settings; restore it from a copy")
    fixed = (
        "model.",
        "rows.optimizer",
        "dense.optimizer",
        "data.name",
        "data.options",
        "train.seed",
    )
    before, now = _flatten(load_config(path).model_dump()), _flatten(config.model_dump())
    for name in [*now, *before]:
        if name.startswith((*fixed, "train.batch_size")) and before.get(name) != now.get(name):
            raise CheckpointError(
                f"{folder} holds a run with {name}={before.get(name)!r}, this one has {now.get(name)!r}; "
                "give it another folder (--run), or the same settings to go on with it"
            )


def _schedule(config: RunConfig) -> Schedule:
    train = config.train
    return Schedule(
        batch_size=train.batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        commit_steps=train.commit_steps,
        skip_non_finite=train.on_non_finite == "skip",
    )


def _dense_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    chosen = DENSE_OPTIMIZERS[config.dense.optimizer]
    return chosen(model.parameters(), lr=config.dense.lr, weight_decay=config.dense.weight_decay)


def _total_steps(config: RunConfig, data: Splits) -> int | None:
    """None: nobody knows before the end."""
    most = config.train.max_steps
    if data.train.num_samples is None:
        return most
    steps = config.train.epochs * num_steps(data.train.num_samples, config.train.batch_size)
    return steps if most is None else min(steps, most)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= _flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat
