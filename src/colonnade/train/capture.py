"""What a commit says of a rank, captured between two steps: from here on training may change everything."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from colonnade import __version__
from colonnade.exchange.cached_state import state
from colonnade.exchange.settling import Before
from colonnade.formats import stamp
from colonnade.store.policies import RowRetention
from colonnade.store.slices import RecordShape
from colonnade.train.commit_header import FORMAT
from colonnade.train.fingerprint import dense_weights, fingerprint
from colonnade.train.retained import retentions

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection
    from colonnade.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Captured:
    """Copies: no tensor in it is trained on. What admission and eviction remember is copied when it is asked for, as of
    the capture."""

    step: int
    rank_state: dict[str, Any]
    dense_state: dict[str, Any] | None
    """Rank 0's."""
    retentions: dict[str, RowRetention]
    """By table, where there are admission or eviction."""
    header: dict[str, Any]


def capture(trainer: Trainer, held: Sequence[dict], run: str, before: Sequence[Before]) -> Captured:
    """Every rank, between two steps. Rows are captured apart (`DramStore.begin_commit`). before: of
    `RowOptimizer.settled`."""
    cached = trainer.collection.cached
    mesh, step = trainer.mesh, trainer.collection.step
    rank_state = {
        "random": torch.get_rng_state(),
        "random_gpus": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "held": list(held),  # `Exchange.hold` gives copies
        "source": None if mesh.is_server else copy.deepcopy(trainer.position.state),
        "is_server": mesh.is_server,
        "dense_residuals": trainer.dense.state(),
        "work": trainer.count_work(),
        "cache": None if cached is None else state(cached, before),
    }
    header = header_of(trainer.collection, trainer.model, run, step)
    header |= {
        "best_step": trainer.best.step,
        "monitor": trainer.best.monitor,
        "schema": asdict(trainer.data.train.schema),
    }
    dense = copy.deepcopy(_dense_state(trainer)) if mesh.rank == 0 else None
    remembered = retentions(trainer.collection)
    for policy in remembered.values():
        policy.begin_state()
    return Captured(step, rank_state, dense, remembered, header)


def header_of(
    collection: EmbeddingCollection, model: torch.nn.Module, run: str, step: int
) -> dict[str, Any]:
    """Say what a commit of this step holds, whose it is and which model it fits."""
    return {
        **stamp(FORMAT),
        "colonnade": __version__,
        "step": step,
        "num_ranks": collection.mesh.num_ranks,
        "shardings": _shardings(collection),
        "run": run,
        "best_step": None,
        "model": fingerprint(collection.declaration, model),
        "schema": None,
    }


def _shardings(collection: EmbeddingCollection) -> dict[str, Any]:
    """By table; of one that is cut, also the scalars of state that its parts have, which say how slices are joined."""
    found = {}
    for table, planned in zip(collection.tables, collection.plan.tables, strict=True):
        found[table.name] = planned.sharding.plain()
        if planned.sharding.slices > 1:
            found[table.name]["states"] = list(RecordShape.of(table).states)
    return found


def _dense_state(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dense_weights(trainer.model),
        "dense_optimizer": trainer.dense_optimizer.state_dict(),
        "dense_optimizer_name": type(trainer.dense_optimizer).__qualname__,
        "dense_parameters": parameter_names(trainer.model, trainer.dense_optimizer),
        "row_groups": [settings_of(group) for group in trainer.rows.param_groups],
        "lr_schedules": [schedule.state_dict() for schedule in trainer.lr_schedules],
        "position": (trainer.position.epoch, trainer.position.step),
        "best": trainer.best.state(),
        "days": trainer.days,
        "loss_scale": trainer.loss_scale.state(),
    }


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of an optimizer's parameters, in its order; "" for one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
