"""Checkpoints of a collection alone, for a training loop of one's own: the files of a run's checkpoints.

    collection.save(folder, step)    collection.load(folder)

A collection that holds every row in memory opens the folder's stores for as long as a save takes: rows changed since
the save before go there. One whose rows rest in the folder keeps its stores open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.checkpoints import Checkpoints, open_checkpoints
from colonnade.checkpoint.completeness import check_shared
from colonnade.checkpoint.fingerprint import check_model, dense_weights, load_dense
from colonnade.checkpoint.header import list_checkpoints, read_header, resolve
from colonnade.checkpoint.snapshot import (
    Captured,
    header_of,
    restore_retentions,
    retentions,
    settings_of,
)
from colonnade.checkpoint.states import load_state
from colonnade.comm.mesh import Mesh
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ConfigError
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_optimizer import RowOptimizer
from colonnade.row_state import RUN_BYTES
from colonnade.store.dram import DramStore
from colonnade.store.hbm import HbmStore
from colonnade.store.log import LogBacking
from colonnade.store.policies import RowPolicy

KEEP = 2
"""Saves that stay in a folder: the newest."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save that a collection goes on from."""

    folder: Path
    run: str
    """Name of all saves of one folder, whichever folder they are moved to."""
    step: int | None
    """None: rows rest in the folder, and nothing was saved yet."""
    checkpoints: Checkpoints | None
    """Open stores, where rows rest in the folder."""


def open_in(
    collection: EmbeddingCollection,
    folder: Path,
    plan: Plan | None,
    mesh: Mesh | None,
    policies: Mapping[str, RowPolicy] | None,
) -> EmbeddingCollection:
    """Collective: open an empty collection whose rows rest in a folder where memory has no room for them."""
    mesh = mesh or Mesh()
    check_shared(folder, mesh)
    if steps := list_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: got a folder with saves of steps {steps}, wanted an empty one; collection.load(folder) goes on "
            "from them"
        )
    plan = plan or build_plan(collection.tables, mesh.world)
    checkpoints = _open_stores(collection, folder, plan, mesh, None)
    collection.open(plan, mesh, backings=checkpoints.backings, policies=policies)
    collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, None, checkpoints)
    return collection


def save(
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
    before: Checkpoint | None = collection.checkpoint
    _check_folder(collection, folder, step, before)
    checkpoints = before.checkpoints if before is not None else None
    if checkpoints is not None:
        _save_checkpoint(collection, checkpoints, step, optimizer)
        run = checkpoints.run
    else:
        run = _save_memory(collection, folder, step, optimizer)
    collection.checkpoint = Checkpoint(folder.resolve(), run, step, checkpoints)


def _save_memory(
    collection: EmbeddingCollection, folder: Path, step: int, optimizer: RowOptimizer | None
) -> str:
    """Save a collection whose rows are all in memory; return the name of the folder's saves."""
    store, before = collection.store, collection.checkpoint
    memory = store.below if isinstance(store, HbmStore) else store
    if before is None or before.folder != folder.resolve():
        memory.mark_dirty()
        memory.deleted = [[] for _ in memory.tables]
    checkpoints = _open_stores(collection, folder, collection.plan, collection.mesh, None)
    try:
        with _attached(memory, checkpoints.backings):
            _save_checkpoint(collection, checkpoints, step, optimizer)
    except BaseException:
        memory.mark_dirty()  # what was written and not saved is lost
        raise
    finally:
        checkpoints.close()
    memory.deleted = [[] for _ in memory.tables]
    return checkpoints.run


def load(
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
    step = resolve(folder, step)
    header = read_header(folder, step)
    place = folder / "checkpoints" / f"{step:012d}"
    state = load_state(place / "dense", header["run"])
    if "seed" not in state:
        raise CheckpointError(
            f"{folder} is the folder of a run; colonnade.load_run(model, folder) reads it, and colonnade.fit goes on"
        )
    check_model(folder, header, collection.declaration, collection)
    collection.seed = state["seed"]
    if plan.needs_backing:
        checkpoints = _open_stores(collection, folder, plan, mesh, step)
        collection.open(plan, mesh, backings=checkpoints.backings)
        collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, step, checkpoints)
    else:
        checkpoints, _ = open_checkpoints(
            folder, collection.tables, mesh, read_only=True, at=step, shardings=plan.shardings
        )
        collection.open(plan, mesh)
        try:
            _copy_rows(collection, checkpoints)
        finally:
            checkpoints.close()
        collection.checkpoint = Checkpoint(folder.resolve(), checkpoints.run, step, None)
    collection.step = state["updates"]
    load_dense(collection, state["model"])
    restore_retentions(collection, place, header)
    groups = state["row_groups"]
    if optimizer is not None and groups is not None:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    return step


def _check_folder(
    collection: EmbeddingCollection, folder: Path, step: int, before: Checkpoint | None
) -> None:
    """Collective. Raise CheckpointError unless this collection may save this step there."""
    if (before is None or before.checkpoints is None) and collection.store.backings:
        raise CheckpointError(
            "save: got a collection whose rows rest in a run folder, which checkpoints them itself "
            "(colonnade.fit); use "
            "that folder's checkpoints"
        )
    if before is not None and before.checkpoints is not None and before.folder != folder.resolve():
        raise CheckpointError(
            f"save: got {folder}, and rows rest in {before.folder}; save there, and copy that folder afterwards"
        )
    check_shared(folder, collection.mesh)
    steps = list_checkpoints(folder)
    if steps:
        newest = steps[-1]
        is_own = (
            before is not None
            and before.folder == folder.resolve()
            and before.step == newest
            and before.run == read_header(folder, newest)["run"]
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
    collection.mesh.barrier()  # every rank has looked before one writes


def _open_stores(
    collection: EmbeddingCollection, folder: Path, plan: Plan, mesh: Mesh, step: int | None
) -> Checkpoints:
    checkpoints, _ = open_checkpoints(
        folder,
        collection.tables,
        mesh,
        keep=KEEP,
        shardings=plan.shardings,
        at=step,
        places=plan.ssd,
        write_budget=plan.write_budget,
    )
    return checkpoints


@contextmanager
def _attached(memory: DramStore, backings: Sequence[Any]) -> Iterator[None]:
    """Let rows rest in these stores meanwhile. They forget first what memory has forgotten since the save before."""
    for log, ids in zip(backings, memory.deleted or (), strict=True):
        if ids and isinstance(log, LogBacking):
            log.delete(torch.cat(ids).unique())
    memory.attach(backings)
    try:
        yield
    finally:
        memory.attach(())


def _save_checkpoint(
    collection: EmbeddingCollection,
    checkpoints: Checkpoints,
    step: int,
    optimizer: RowOptimizer | None,
) -> None:
    """Collective: capture this moment and write it."""
    if optimizer is not None:
        with optimizer.settled():
            captured = _capture(collection, checkpoints.run, step, optimizer)
            collection.store.begin_commit()
    else:
        collection.pipeline.updates.settle()
        captured = _capture(collection, checkpoints.run, step, None)
        collection.store.begin_commit()
    checkpoints.make_durable(collection, captured, lambda _: None)


def _capture(
    collection: EmbeddingCollection, run: str, step: int, optimizer: RowOptimizer | None
) -> Captured:
    rank_state = {"held": [], "is_server": collection.mesh.is_server}
    dense_state = {
        "model": {name: value.clone() for name, value in dense_weights(collection).items()},
        "row_groups": None
        if optimizer is None
        else [settings_of(group) for group in optimizer.param_groups],
        "seed": collection.seed,
        "updates": collection.step,
    }
    remembered = retentions(collection)
    for policy in remembered.values():
        policy.begin_state()
    is_first = collection.mesh.rank == 0
    header = header_of(collection, collection, run, step)
    return Captured(step, rank_state, dense_state if is_first else None, remembered, header)


def _copy_rows(collection: EmbeddingCollection, checkpoints: Checkpoints) -> None:
    """Put the rows of a checkpoint that this rank owns into memory."""
    store = collection.store
    for t, source in enumerate(checkpoints.backings):
        table = collection.slices.laid[t].table
        rows = max(1, RUN_BYTES // table.record_bytes)
        for batch in source.scan():
            owned = collection.shards[t].owns(batch.ids, table.rows)
            ids, records = batch.ids[owned], batch.records[owned]
            for start in range(0, len(ids), rows):
                run = slice(start, start + rows)
                store.put(t, ids[run].contiguous(), records[run].contiguous())
    memory = store.below if isinstance(store, HbmStore) else store
    memory.mark_clean()
    memory.deleted = [[] for _ in memory.tables]
