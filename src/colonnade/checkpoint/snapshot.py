"""Snapshot of a rank's state, taken between two steps: from then on training may change everything."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colonnade import __version__
from colonnade.checkpoint.contract import TrainerState
from colonnade.checkpoint.fingerprint import dense_weights, fingerprint
from colonnade.checkpoint.header import FORMAT
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import shardings_of
from colonnade.exchange.cached_state import Before, state
from colonnade.formats import stamp
from colonnade.store.policies import RowRetention
from colonnade.store.table_shards import RecordShape

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection


def retentions(collection: EmbeddingCollection) -> dict[str, RowRetention]:
    """By table."""
    return {
        collection.slices.laid[t].table.origin[0]: policy
        for t, policy in collection.policies.items()
        if isinstance(policy, RowRetention)
    }


def restore_retentions(
    collection: EmbeddingCollection, place: Path, header: Mapping[str, Any]
) -> None:
    """From the files of the ranks that had the rows then; where they were dealt to as many, one of them is enough."""
    remembered = retentions(collection)
    if not remembered:
        return
    mesh, then = collection.mesh, shardings_of(header)
    wanted: dict[str, list[int | None]] = {}  # by table: whose memory, by place then
    for t, (table, planned) in enumerate(
        zip(collection.tables, collection.plan.tables, strict=True)
    ):
        before, now = then[t], planned.sharding
        ranks = list(before.holders)
        if before.is_replicated and mesh.rank in before.ranks:
            ranks = [mesh.rank]
        mine = now.shard_of(mesh.rank).place
        same = before.num_owners == now.num_owners
        wanted[table.name] = [r if not same or p == mine else None for p, r in enumerate(ranks)]
    read = {rank for name in remembered for rank in wanted[name] if rank is not None}
    states = {rank: load_state(place / f"retention-{rank}", header["run"]) for rank in sorted(read)}
    for name, policy in remembered.items():
        policy.restore([{} if rank is None else states[rank][name] for rank in wanted[name]])


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


def capture(
    trainer: TrainerState, held: Sequence[dict], run: str, before: Sequence[Before]
) -> Captured:
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
    """Say what a checkpoint of this step holds, whose it is and which model it fits."""
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


def _dense_state(trainer: TrainerState) -> dict[str, Any]:
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
