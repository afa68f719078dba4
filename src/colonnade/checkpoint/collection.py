"""Checkpoints of a collection alone, for custom training loops, in the format of a run's checkpoints.

    collection.save(folder, step)    collection.load(folder)

A collection with all rows in memory opens the folder's stores during a save only, and writes the rows that changed
since the previous save. A collection with rows in the folder keeps its stores open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.checkpoints import Checkpoints, open_checkpoints
from colonnade.checkpoint.completeness import check_folder_is_shared
from colonnade.checkpoint.fingerprint import (
    check_model_matches_checkpoint,
    dense_weights,
    load_dense,
)
from colonnade.checkpoint.header import list_checkpoints, read_header, resolve_step
from colonnade.checkpoint.snapshot import (
    Snapshot,
    build_checkpoint_header,
    collect_retention_policies,
    restore_retention_policies,
    settings_without_parameters,
)
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import RowFiles
from colonnade.comm.mesh import Mesh
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ConfigError
from colonnade.plan.build import build_plan
from colonnade.plan.plan import Plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.row_state import CHUNK_BYTES
from colonnade.store.dram import DramStore
from colonnade.store.log.backing import LogBacking
from colonnade.store.policies import RowPolicy

NUM_KEPT_SAVES = 2
"""Number of newest saves that are kept in a folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Last save or load of a collection, which the next save continues."""

    folder: Path
    run: str
    """Name of all saves of one folder, which does not change when the folder is moved."""
    step: int | None
    """Saved step; None if rows are stored in the folder and nothing is saved yet."""
    checkpoints: Checkpoints | None
    """Open stores, if rows are stored in the folder."""


def open_collection_in_folder(
    collection: EmbeddingCollection,
    folder: Path,
    plan: Plan | None,
    mesh: Mesh | None,
    policies: Mapping[str, RowPolicy] | None,
) -> EmbeddingCollection:
    """Open an empty collection that stores rows in a folder if they do not fit in memory. Collective."""
    mesh = mesh or Mesh()
    check_folder_is_shared(folder, mesh)
    if steps := list_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: got a folder with saves of steps {steps}, wanted an empty one; collection.load(folder) goes on "
            "from them"
        )
    plan = plan or build_plan(collection.tables, mesh.world)
    checkpoints = _open_row_stores(collection, folder, plan, mesh, None)
    collection.open(plan, mesh, backings=checkpoints.backings, policies=policies)
    collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, None, checkpoints)
    return collection


def save_collection(
    collection: EmbeddingCollection, folder: Path, step: int, optimizer: RowOptimizer | None
) -> None:
    """Implement `EmbeddingCollection.save`."""
    if type(step) is not int or not 0 <= step < 2**63:
        raise CheckpointError(f"save: got step {step!r}, wanted an integer from 0 to 2**63 - 1")
    collection.ensure_open()
    if collection.cached is not None and optimizer is None:
        raise ConfigError(
            "save: got a plan with plan.cache, whose copies hold gradients to be applied first, and no optimizer; "
            "call collection.save(folder, step, optimizer=rows)"
        )
    previous: Checkpoint | None = collection.checkpoint
    _check_save_folder(collection, folder, step, previous)
    checkpoints = previous.checkpoints if previous is not None else None
    if checkpoints is not None:
        _write_collection_checkpoint(collection, checkpoints, step, optimizer)
        run = checkpoints.run
    else:
        run = _save_rows_in_memory(collection, folder, step, optimizer)
    collection.checkpoint = Checkpoint(folder.resolve(), run, step, checkpoints)


def _save_rows_in_memory(
    collection: EmbeddingCollection, save_folder: Path, step: int, optimizer: RowOptimizer | None
) -> str:
    """Save a collection with all rows in memory; return the run name of the folder's saves."""
    previous = collection.checkpoint
    memory = collection.opened.memory
    if previous is None or previous.folder != save_folder.resolve():
        memory.mark_all_dirty()
        memory.deleted = [[] for _ in memory.tables]
    checkpoints = _open_row_stores(collection, save_folder, collection.plan, collection.mesh, None)
    try:
        with _attach_backings_for_save(memory, checkpoints.backings):
            _write_collection_checkpoint(collection, checkpoints, step, optimizer)
    except BaseException:
        memory.mark_all_dirty()  # written rows without a commit are lost
        raise
    finally:
        checkpoints.close()
    memory.deleted = [[] for _ in memory.tables]
    return checkpoints.run


def load_collection(
    collection: EmbeddingCollection,
    folder: Path,
    step: int | None,
    optimizer: RowOptimizer | None,
    plan: Plan | None,
    mesh: Mesh | None,
) -> int:
    """Implement `EmbeddingCollection.load`."""
    if collection.is_open:
        raise ConfigError(
            "load: got a collection that is open already; load instead of open, with the plan and the mesh"
        )
    mesh = mesh or Mesh()
    plan = plan or build_plan(collection.tables, mesh.world)
    step = resolve_step(folder, step)
    header = read_header(folder, step)
    states_folder = folder / "checkpoints" / f"{step:012d}"
    state = load_state(states_folder / "dense", header["run"])
    if "seed" not in state:
        raise CheckpointError(
            f"{folder} is the folder of a run; read it with colonnade.load_checkpoint(model, folder), or resume it "
            "with colonnade.fit"
        )
    check_model_matches_checkpoint(folder, header, collection.declaration, collection)
    collection.seed = state["seed"]
    if plan.needs_backing:
        checkpoints = _open_row_stores(collection, folder, plan, mesh, step)
        collection.open(plan, mesh, backings=checkpoints.backings)
        collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, step, checkpoints)
    else:
        checkpoints, _ = open_checkpoints(
            RowFiles(folder),
            collection.tables,
            mesh,
            read_only=True,
            at=step,
            shardings=plan.shardings,
        )
        collection.open(plan, mesh)
        try:
            _load_rows_to_memory(collection, checkpoints)
        finally:
            checkpoints.close()
        collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, step, None)
    collection.step = state["updates"]
    load_dense(collection, state["model"])
    restore_retention_policies(collection, states_folder, header)
    groups = state["row_groups"]
    if optimizer is not None and groups is not None:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    return step


def _check_save_folder(
    collection: EmbeddingCollection, folder: Path, step: int, previous: Checkpoint | None
) -> None:
    """Raise CheckpointError unless this collection may save this step in `folder`. Collective."""
    if (previous is None or previous.checkpoints is None) and collection.store.backings:
        raise CheckpointError(
            "save: got a collection with rows stored in a run folder, which checkpoints them itself "
            "(colonnade.fit); use "
            "that folder's checkpoints"
        )
    if (
        previous is not None
        and previous.checkpoints is not None
        and previous.folder != folder.resolve()
    ):
        raise CheckpointError(
            f"save: got {folder}, and rows are stored in {previous.folder}; save there, and copy that folder afterwards"
        )
    check_folder_is_shared(folder, collection.mesh)
    steps = list_checkpoints(folder)
    if steps:
        newest = steps[-1]
        is_own = (
            previous is not None
            and previous.folder == folder.resolve()
            and previous.step == newest
            and previous.run == read_header(folder, newest)["run"]
        )
        if not is_own:
            raise CheckpointError(
                f"save: got {folder}, which has saves up to step {newest} that this collection does not go on from; "
                "give an empty folder, or load that step first"
            )
        if step <= newest:
            raise CheckpointError(
                f"save: got step {step}, wanted one after {newest}, the newest in {folder}"
            )
    collection.mesh.barrier()  # every rank must check before any rank writes


def _open_row_stores(
    collection: EmbeddingCollection, folder: Path, plan: Plan, mesh: Mesh, step: int | None
) -> Checkpoints:
    checkpoints, _ = open_checkpoints(
        RowFiles(folder, directories=plan.ssd, write_budget=plan.write_budget),
        collection.tables,
        mesh,
        keep=NUM_KEPT_SAVES,
        shardings=plan.shardings,
        at=step,
    )
    return checkpoints


@contextmanager
def _attach_backings_for_save(dram_store: DramStore, backings: Sequence[Any]) -> Iterator[None]:
    """Attach stores to memory for one save. First delete the rows that memory deleted since the previous save."""
    for log, ids in zip(backings, dram_store.deleted or (), strict=True):
        if ids and isinstance(log, LogBacking):
            log.delete(torch.cat(ids).unique())
    dram_store.attach_backings(backings)
    try:
        yield
    finally:
        dram_store.attach_backings(())


def _write_collection_checkpoint(
    collection: EmbeddingCollection,
    checkpoints: Checkpoints,
    step: int,
    optimizer: RowOptimizer | None,
) -> None:
    """Take a snapshot and write it. Collective."""
    if optimizer is not None:
        with optimizer.synchronized_view():
            snapshot = _take_collection_snapshot(collection, checkpoints.run, step, optimizer)
            collection.store.begin_commit()
    else:
        collection.pipeline.updates.apply_pending()
        snapshot = _take_collection_snapshot(collection, checkpoints.run, step, None)
        collection.store.begin_commit()
    checkpoints.write_snapshot(collection, snapshot, lambda _: None)


def _take_collection_snapshot(
    collection: EmbeddingCollection, run_name: str, step: int, optimizer: RowOptimizer | None
) -> Snapshot:
    rank_state = {"held": [], "is_server": collection.mesh.is_server}
    dense_state = {
        "model": {name: value.clone() for name, value in dense_weights(collection).items()},
        "row_groups": None
        if optimizer is None
        else [settings_without_parameters(group) for group in optimizer.param_groups],
        "seed": collection.seed,
        "updates": collection.step,
    }
    policies = collect_retention_policies(collection)
    for policy in policies.values():
        policy.begin_state()
    is_first = collection.mesh.rank == 0
    header = build_checkpoint_header(collection, collection, run_name, step)
    return Snapshot(step, rank_state, dense_state if is_first else None, policies, header)


def _load_rows_to_memory(collection: EmbeddingCollection, checkpoints: Checkpoints) -> None:
    """Load the rows of a checkpoint that this rank owns into memory."""
    store = collection.store
    for shard_index, source in enumerate(checkpoints.backings):
        table = collection.slices.table_shards[shard_index].table
        rows_per_put = max(1, CHUNK_BYTES // table.record_bytes)
        for batch in source.scan():
            owned = collection.shards[shard_index].owns(batch.ids, table.rows)
            ids = batch.ids[owned]
            records = batch.records[owned]
            for start in range(0, len(ids), rows_per_put):
                part = slice(start, start + rows_per_put)
                store.write_rows(shard_index, ids[part].contiguous(), records[part].contiguous())
    memory = collection.opened.memory
    memory.mark_all_clean()
    memory.deleted = [[] for _ in memory.tables]
