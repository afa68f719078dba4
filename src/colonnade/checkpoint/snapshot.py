"""Snapshot of a rank's state between two steps, which later training does not change."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colonnade import __version__
from colonnade.checkpoint.contract import TrainerState
from colonnade.checkpoint.fingerprint import build_model_fingerprint, dense_weights
from colonnade.checkpoint.header import FORMAT
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import read_table_shardings
from colonnade.exchange.cached_state import SavedRows, capture_cache_state
from colonnade.formats import make_format_stamp
from colonnade.store.policies import RowRetention
from colonnade.store.table_shards import RecordShape

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection


def collect_retention_policies(collection: EmbeddingCollection) -> dict[str, RowRetention]:
    """Return the admission and eviction policies with state, by table."""
    return {
        collection.slices.table_shards[shard_index].table.origin[0]: policy
        for shard_index, policy in collection.policies.items()
        if isinstance(policy, RowRetention)
    }


def restore_retention_policies(
    collection: EmbeddingCollection, states_folder: Path, header: Mapping[str, Any]
) -> None:
    """Restore the policies from the files of the ranks that had the rows.

    If the number of shards is the same, the file of this rank's shard is enough.
    """
    policies = collect_retention_policies(collection)
    if not policies:
        return
    mesh = collection.mesh
    saved_shardings = read_table_shardings(header)
    needed_ranks: dict[str, list[int | None]] = {}  # by table: ranks to read, by saved shard
    for table_index, (table, planned) in enumerate(
        zip(collection.tables, collection.plan.tables, strict=True)
    ):
        saved = saved_shardings[table_index]
        current = planned.sharding
        ranks = list(saved.row_owners)
        if saved.is_replicated and mesh.rank in saved.ranks:
            ranks = [mesh.rank]
        own_shard = current.shard_of(mesh.rank).owner_index
        is_same_count = saved.num_owners == current.num_owners
        needed_ranks[table.name] = [
            rank if not is_same_count or shard == own_shard else None
            for shard, rank in enumerate(ranks)
        ]
    ranks_to_read = {rank for name in policies for rank in needed_ranks[name] if rank is not None}
    states = {
        rank: load_state(states_folder / f"retention-{rank}", header["run"])
        for rank in sorted(ranks_to_read)
    }
    for name, policy in policies.items():
        policy.restore([{} if rank is None else states[rank][name] for rank in needed_ranks[name]])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of a rank's state. Policies of admission and eviction copy theirs later, as of the snapshot."""

    step: int
    rank_state: dict[str, Any]
    dense_state: dict[str, Any] | None
    """State of the dense network; None except on rank 0."""
    retentions: dict[str, RowRetention]
    """Policies with state, by table."""
    header: dict[str, Any]


def take_trainer_snapshot(
    trainer: TrainerState,
    prefetched_batches: Sequence[dict],
    run_name: str,
    pending_copies: Sequence[SavedRows],
) -> Snapshot:
    """Copy this rank's state between two steps; call it on every rank.

    Rows are not included: `DramStore.begin_commit` tracks them. pending_copies: from `RowOptimizer.synchronized_view`.
    """
    cached = trainer.collection.cached
    mesh = trainer.mesh
    step = trainer.collection.step
    rank_state = {
        "random": torch.get_rng_state(),
        "random_gpus": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "held": list(prefetched_batches),  # `ExchangePart.prefetched` returns copies
        "source": None if mesh.is_server else copy.deepcopy(trainer.position.state),
        "is_server": mesh.is_server,
        "dense_residuals": trainer.dense.export_residuals(),
        "work": trainer.count_work(),
        "cache": None if cached is None else capture_cache_state(cached, pending_copies),
    }
    header = build_checkpoint_header(trainer.collection, trainer.model, run_name, step)
    header |= {
        "best_step": trainer.best.step,
        "monitor": trainer.best.monitor,
        "schema": asdict(trainer.data.train.schema),
    }
    dense_state = copy.deepcopy(_collect_dense_state(trainer)) if mesh.rank == 0 else None
    policies = collect_retention_policies(trainer.collection)
    for policy in policies.values():
        policy.begin_state()
    return Snapshot(step, rank_state, dense_state, policies, header)


def build_checkpoint_header(
    collection: EmbeddingCollection, model: torch.nn.Module, run_name: str, step: int
) -> dict[str, Any]:
    """Build the header of a checkpoint: step, run, shardings and the model it belongs to."""
    return {
        **make_format_stamp(FORMAT),
        "colonnade": __version__,
        "step": step,
        "num_ranks": collection.mesh.num_ranks,
        "shardings": _describe_shardings(collection),
        "run": run_name,
        "best_step": None,
        "model": build_model_fingerprint(collection.declaration, model),
        "schema": None,
    }


def _describe_shardings(collection: EmbeddingCollection) -> dict[str, Any]:
    """Describe the shardings by table; for tables cut by columns also the state sizes of parts, to join slices."""
    shardings = {}
    for table, planned in zip(collection.tables, collection.plan.tables, strict=True):
        shardings[table.name] = planned.sharding.to_dict()
        if planned.sharding.slices > 1:
            shardings[table.name]["states"] = list(RecordShape.of(table).states)
    return shardings


def _collect_dense_state(trainer: TrainerState) -> dict[str, Any]:
    """Collect weights, optimizer, schedules, position and scores; equal on all ranks."""
    return {
        "model": dense_weights(trainer.model),
        "dense_optimizer": trainer.dense_optimizer.state_dict(),
        "dense_optimizer_name": type(trainer.dense_optimizer).__qualname__,
        "dense_parameters": parameter_names(trainer.model, trainer.dense_optimizer),
        "row_groups": [settings_without_parameters(group) for group in trainer.rows.param_groups],
        "lr_schedules": [schedule.state_dict() for schedule in trainer.lr_schedules],
        "position": (trainer.position.epoch, trainer.position.step),
        "best": trainer.best.state(),
        "days": trainer.days,
        "loss_scale": trainer.loss_scale.state(),
    }


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; "" for one outside the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def settings_without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
