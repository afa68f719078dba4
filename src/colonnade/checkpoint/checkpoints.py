"""Checkpoints of a run: written by all ranks, and valid once rank 0 has written the header.

run/rows/<home>/<table>/              each rank's stores (stores.py), saved first
run/checkpoints/<step>/rank-<r>           each rank's random state, prefetched rows, residuals of coded dense gradients
run/checkpoints/<step>/retention-<r>      each rank's state of admission and eviction policies, if there are any
run/checkpoints/<step>/dense              dense weights, optimizer states, position (rank 0)
run/checkpoints/<step>.json               header (header.py), written last, by rank 0: now the step is saved

A snapshot is taken between two steps and written while training continues: `begin_checkpoint`, later
`finish_checkpoint`.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from colonnade.checkpoint.completeness import check_checkpoint_complete, collect_file_entries
from colonnade.checkpoint.contract import Destination, TrainerState
from colonnade.checkpoint.fingerprint import check_model_matches_checkpoint, load_dense
from colonnade.checkpoint.header import header_path, list_checkpoints, read_header, state_folder
from colonnade.checkpoint.snapshot import (
    Snapshot,
    restore_retention_policies,
    settings_without_parameters,
    take_trainer_snapshot,
)
from colonnade.checkpoint.states import load_state, serialize_rank_state
from colonnade.checkpoint.stores import (
    RowFiles,
    SavedShards,
    copy_rows_to_new_shards,
    find_new_shard_indices,
    list_store_folders,
    open_saved_shards,
    open_stores,
    read_table_shardings,
    store_folder,
)
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Position
from colonnade.errors import CheckpointError, ColonnadeError, StorageError
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.cached_state import can_load_cache, restore_cache_state
from colonnade.exchange.prefetched import prefetched_tables
from colonnade.files.disk import Disk
from colonnade.files.durable import write_durably
from colonnade.store.log.backing import LogBacking
from colonnade.store.log.writer import LogWriter
from colonnade.store.shards import AbsentRows, ShardReader
from colonnade.store.table_shards import (
    ColumnShardReader,
    ColumnSliceReader,
    HotColdReader,
    TableShard,
    shard_tables,
)
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, row_wise_over_owners

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection

SIGNAL_CHECK_SECONDS = 0.2  # between checks for signals during a wait for a checkpoint
SLOW_SECONDS = 10.0  # of waiting before a message is printed
GIVE_UP_SECONDS = 10.0  # for an aborted checkpoint to close its files


class Checkpoints:
    """Checkpoints of a run folder as one rank sees them: its stores, and the writer of new checkpoints."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        backings: Sequence[
            LogBacking
            | ShardReader
            | ColumnShardReader
            | HotColdReader
            | ColumnSliceReader
            | AbsentRows
        ],
        *,
        keep: int,
        disk: Disk,
        run: str = "",
    ) -> None:
        """run: name of the run in its checkpoints, which does not change when the folder is moved."""
        self.folder = folder
        self.mesh = mesh
        self.backings = tuple(backings)
        self.keep = keep
        self.disk = disk
        self.run = run
        self.sealed_settings: dict[str, Any] = {}  # for the headers of new checkpoints; {}: none
        self.destinations: list[Destination] = []  # each receives every checkpoint
        self.outside_folders: list[Path] = []  # directories of this run outside its folder
        # Steps that the checkpoint thread has saved, for the training thread to report.
        self.saved_steps: deque[int] = deque()
        self._writing: Thread | None = None
        # Reports a slow checkpoint once; None if there is none under way, or after the report.
        self._print_line: Callable[[str], None] | None = None
        self._error: BaseException | None = None

    def begin_checkpoint(self, trainer: TrainerState, prefetched_batches: Sequence[dict]) -> None:
        """Take a snapshot of this step and write it in the background. Collective, between steps.

        Waits for the previous checkpoint, and raises as `finish_checkpoint` does.
        """
        self.finish_checkpoint()
        if change := trainer.collection.opened.balance_memory(trainer.collection.step):
            trainer.progress.print_line(change)
        with trainer.rows.synchronized_view() as pending_copies:
            snapshot = take_trainer_snapshot(trainer, prefetched_batches, self.run, pending_copies)
            trainer.collection.store.begin_commit()
        self._print_line = trainer.progress.print_line
        # A daemon thread, because an aborted checkpoint may hang in a system call of the disk.
        self._writing = Thread(
            target=self._write_in_background,
            args=(trainer, snapshot),
            name="checkpoint",
            daemon=True,
        )
        self._writing.start()

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._writing is not None and self._writing.is_alive()

    def finish_checkpoint(self) -> None:
        """Wait until the current checkpoint is written. Collective.

        Raises StorageError on every rank if any rank could not write; earlier checkpoints are then intact, and training
        may continue or end. An interruption aborts the checkpoint, and the stores write nothing from then on.
        """
        self._wait_for_writer()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def save(self, trainer: TrainerState, prefetched: Sequence[dict]) -> None:
        """Write a checkpoint and wait for it: `begin_checkpoint` and `finish_checkpoint`. Collective, between steps."""
        self.begin_checkpoint(trainer, prefetched)
        self.finish_checkpoint()

    def _write_in_background(self, trainer: TrainerState, snapshot: Snapshot) -> None:
        """Write a snapshot on the checkpoint thread; `finish_checkpoint` raises its errors."""
        try:
            self.write_snapshot(trainer.collection, snapshot, trainer.progress.print_line)
        except BaseException as error:
            self._error = error

    def write_snapshot(
        self, collection: EmbeddingCollection, snapshot: Snapshot, print_line: Callable[[str], None]
    ) -> None:
        """Write a snapshot, and the rows of the store's `begin_commit`, as a checkpoint.

        Collective, on the channel `checkpoint`.
        """
        step = snapshot.step
        store = collection.store
        folder = state_folder(self.folder, step)
        own_error: Exception | None = None
        written: list[str] = []
        try:
            self.disk.make_dir(folder)
            # First, because training tracks changes of it until it is copied.
            remembered = {
                name: policy.finish_state() for name, policy in snapshot.retentions.items()
            }
            store.finish_commit(step)
            states = {
                f"rank-{self.mesh.rank}": snapshot.rank_state,
                f"retention-{self.mesh.rank}": remembered or None,
                "dense": snapshot.dense_state,
            }
            for name, state in states.items():
                if state is not None:
                    write_durably(
                        self.disk,
                        folder / name,
                        serialize_rank_state(state, self.run, folder / name),
                    )
                    written.append(name)
        except (ColonnadeError, OSError) as error:
            own_error = error
            store.abandon_commit()
        self._raise_on_all_ranks(own_error, step)
        stores = [backing.directory for backing in self.backings if isinstance(backing, LogBacking)]
        files = collect_file_entries(self.folder, stores, step, written, self.mesh)
        if self.mesh.rank == 0:
            try:
                header = snapshot.header | {"settings": self.sealed_settings} | files
                content = json.dumps(header, indent=2, default=str).encode()
                write_durably(self.disk, header_path(self.folder, step), content)
            except (ColonnadeError, OSError) as error:
                own_error = error
        self._raise_on_all_ranks(own_error, step)
        retained = steps_to_keep(self.folder, self.keep)
        # Before older checkpoints are deleted, because deltas need them.
        for destination in self.destinations:
            destination.send(step, retained, print_line)
        self._delete_old_checkpoints()
        self.saved_steps.append(step)

    def stop_writing(self) -> None:
        """Stop writing, so that other runs can open the folder. Saved rows can still be read."""
        self._wait_for_writer()
        for backing in self.backings:
            if isinstance(backing, LogBacking):
                backing.stop_writing()

    def close(self) -> None:
        """Close the stores after the current checkpoint is written. Unsaved changes are lost."""
        self._wait_for_writer()
        for backing in self.backings:
            backing.close()

    def _wait_for_writer(self) -> None:
        """Wait until the current checkpoint ends, with or without an error.

        In the main thread, signals are handled meanwhile. If a handler raises, the checkpoint is aborted in bounded
        time.
        """
        if self._writing is None:
            return
        start = time.monotonic()
        try:
            while self._writing.is_alive():
                self._writing.join(SIGNAL_CHECK_SECONDS)
                if self._print_line is not None and time.monotonic() - start > SLOW_SECONDS:
                    self._print_line(describe_slow_checkpoint(self._writers()))
                    self._print_line = None
        except BaseException:
            for writer in self._writers():
                writer.stop()
            self._writing.join(GIVE_UP_SECONDS)
            self._writing = None
            raise
        self._writing = None

    def _writers(self) -> list[LogWriter]:
        """Return the writer of this rank's stores; [] if they are not open for writing."""
        writers = [backing.writer for backing in self.backings if isinstance(backing, LogBacking)]
        return list(dict.fromkeys(writer for writer in writers if writer is not None))

    def _raise_on_all_ranks(self, own_error: Exception | None, step: int) -> None:
        """Raise StorageError on every rank if any rank has an error. Collective."""
        own_message = b"" if own_error is None else str(own_error).encode()
        for rank, message in enumerate(self.mesh.all_gather_bytes("checkpoint", own_message)):
            if message:
                raise StorageError(
                    f"checkpoint of step {step} failed on rank {rank}: {message.decode()}"
                ) from own_error

    def _delete_old_checkpoints(self) -> None:
        """Delete all but the newest checkpoints and the best: first their headers, then their data."""
        retained = steps_to_keep(self.folder, self.keep)
        dropped = [step for step in list_checkpoints(self.folder) if step not in retained]
        # Every rank lists the checkpoints before the first file is deleted.
        self.mesh.barrier("checkpoint")
        if self.mesh.rank == 0:
            for step in dropped:
                self.disk.unlink(header_path(self.folder, step))
            # The deletion of headers must be durable before data is deleted.
            self.disk.sync_dir(self.folder / "checkpoints")
        self.mesh.barrier("checkpoint")
        for backing in self.backings:
            if isinstance(backing, LogBacking):
                available_steps = {*backing.commits(), *backing.lost_commits()}
                backing.prune([step for step in retained if step in available_steps])
        if self.mesh.rank == 0:
            remove_unused_stores(
                [self.folder / "rows", *self.outside_folders],
                used_store_folders(self.folder, retained),
            )
            for state_path in (self.folder / "checkpoints").iterdir():
                # Not newer folders: another rank may have begun the next checkpoint.
                is_over = state_path.name.isdigit() and int(state_path.name) < retained[-1]
                if is_over and state_path.is_dir() and int(state_path.name) not in retained:
                    shutil.rmtree(state_path, ignore_errors=True)


def describe_slow_checkpoint(log_writers: Sequence[LogWriter]) -> str:
    """Describe the remaining work of a slow checkpoint."""
    pending_bytes = sum(writer.pending_bytes for writer in log_writers)
    bytes_per_second = next(
        (writer.bytes_per_second for writer in log_writers if writer.bytes_per_second), None
    )
    if pending_bytes == 0:
        rate_text = ""
    elif bytes_per_second is None:
        rate_text = ", as fast as the disk takes them"
    else:
        seconds = pending_bytes / bytes_per_second
        rate_text = f", at plan.write_budget of {bytes_per_second:,.0f} bytes per second {seconds:,.0f} s more"
    return (
        f"waiting for a checkpoint: {pending_bytes:,} bytes of rows wait in memory to be written{rate_text}. A second "
        "Ctrl-C or SIGTERM aborts it; the previous checkpoint is kept"
    )


def _read_intact_headers(run_folder: Path, steps: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Read the headers of these checkpoints by step, less damaged ones, which `describe_lost_checkpoints` names."""
    headers = {}
    for step in steps:
        with suppress(StorageError):
            headers[step] = read_header(run_folder, step)
    return headers


def steps_to_keep(folder: Path, keep: int) -> list[int]:
    """Return the saved steps to keep: the newest `keep`, and the best step that each of their headers names."""
    steps = list_checkpoints(folder)
    newest = steps[-keep:]
    best = {header.get("best_step") for header in _read_intact_headers(folder, newest).values()}
    return [step for step in steps if step in newest or step in best]


def open_checkpoints(
    files: RowFiles,
    tables: Sequence[Table],
    mesh: Mesh,
    *,
    keep: int = 2,
    shardings: Sequence[Sharding] | None = None,
    read_only: bool = False,
    at: int | None = None,
) -> tuple[Checkpoints, int | None]:
    """Open this rank's stores at the newest saved step. Collective. Returns the step; None for a new run.

    at: open at this step instead; newer checkpoints are then deleted, unless read_only.
    shardings: by table; default row_wise over all ranks. A checkpoint with other shardings or another number of ranks
    is resharded: every rank reads the old stores of the tables it has rows of, and copies the rows that it owns now;
    of a replicated table from the first copy.
    files: new rows are written to a subfolder of each directory that is named by the run. Directories that already have
    rows of the run are opened without being listed here.
    """
    folder = files.folder
    disk = files.disk
    steps = list_checkpoints(folder)
    if at is not None and at not in steps:
        raise CheckpointError(f"{folder} has no checkpoint of step {at}; it has {steps or 'none'}")
    if at is not None:
        if mesh.rank == 0 and not read_only:
            _delete_newer_headers(folder, disk, [other for other in steps if other > at])
        steps = [other for other in steps if other <= at]
        mesh.barrier()
    newest = torch.tensor(steps[-1] if steps else -1)
    mesh.broadcast("control", newest)
    step = None if newest < 0 else int(newest)
    check_checkpoint_complete(folder, step, mesh)
    run_name = _share_run_name(folder, step, mesh)
    wanted_shardings = list(shardings or [row_wise_over_owners(mesh.world)] * len(tables))
    saved_shardings = (
        wanted_shardings if step is None else read_table_shardings(read_header(folder, step))
    )
    if len(saved_shardings) != len(tables):
        raise CheckpointError(
            f"{folder} was saved with {len(saved_shardings)} tables, this model has {len(tables)}; build the same model"
        )
    saved_shards = shard_tables(tables, saved_shardings)
    saved = None if step is None else SavedShards(files, step, tables, saved_shards)
    shards = shard_tables(tables, wanted_shardings)
    new_shards = find_new_shard_indices(saved_shards, shards, mesh.rank)
    if read_only and new_shards and saved is not None:
        readers = open_saved_shards(saved, shards, mesh.rank)
        return Checkpoints(folder, mesh, readers, keep=keep, disk=disk, run=run_name), step
    stripe_folders = [
        replace(directory, path=str(Path(directory.path) / f"colonnade-{run_name}"))
        for directory in files.directories
    ]
    if step is not None and not read_only:
        _delete_overwritten_checkpoints(folder, mesh, disk, steps[:-1], shards, new_shards)
    run_files = replace(files, directories=stripe_folders)
    backings = open_stores(
        run_files, tables, wanted_shardings, mesh.rank, step, read_only, new_shards
    )
    if saved is not None:
        copy_rows_to_new_shards(saved, shards, mesh.rank, backings, new_shards)
    checkpoints = Checkpoints(folder, mesh, backings, keep=keep, disk=disk, run=run_name)
    checkpoints.outside_folders = [Path(directory.path) for directory in stripe_folders]
    return checkpoints, step


def _delete_overwritten_checkpoints(
    run_folder: Path,
    mesh: Mesh,
    disk: Disk,
    older_steps: Sequence[int],
    table_shards: Sequence[TableShard],
    new_shard_indices: Sequence[int],
) -> None:
    """Delete the headers of older checkpoints with rows in folders that are about to be overwritten. Collective.

    Such checkpoints are from an earlier time when the run had these shardings. Their data is deleted later.
    """
    own_paths = [
        str(
            store_folder(
                table_shards[shard_index].sharding, mesh.rank, table_shards[shard_index].label
            )
        )
        for shard_index in new_shard_indices
    ]
    gathered = mesh.all_gather_bytes("control", json.dumps(own_paths).encode())
    overwritten_paths = {path for paths_of_rank in gathered for path in json.loads(paths_of_rank)}
    if overwritten_paths and mesh.rank == 0:
        for step in older_steps:
            if overwritten_paths & used_store_folders(run_folder, [step]):
                disk.unlink(header_path(run_folder, step))
        disk.sync_dir(run_folder / "checkpoints")
    mesh.barrier()


def used_store_folders(folder: Path, steps: Sequence[int]) -> set[str]:
    """Return the store folders inside `rows` that these checkpoints use."""
    headers = _read_intact_headers(folder, steps).values()
    return {str(store.path) for header in headers for store in list_store_folders(header)}


def remove_unused_stores(store_folders: Sequence[Path], used_folders: Collection[str]) -> None:
    """Delete the stores in these directories that are not `used_folders`."""
    for root in store_folders:
        for store in [*root.glob("*-of-*/*"), *root.glob("copy-*/*")]:
            if str(store.relative_to(root)) not in used_folders:
                shutil.rmtree(store, ignore_errors=True)
        for empty_folder in [*root.glob("*-of-*"), *root.glob("copy-*")]:
            with suppress(OSError):
                empty_folder.rmdir()  # fails if it is not empty


def _delete_newer_headers(folder: Path, disk: Disk, steps: Sequence[int]) -> None:
    """Delete the headers of these checkpoints, because the run resumes from an older one."""
    for step in steps:
        disk.unlink(header_path(folder, step))
    if steps:
        disk.sync_dir(folder / "checkpoints")


def _share_run_name(folder: Path, step: int | None, mesh: Mesh) -> str:
    """Return the run's name from the checkpoint of `step`, or a new one; the same on all ranks. Collective."""
    run = "" if step is None else read_header(folder, step).get("run", "")
    return mesh.all_gather_bytes("control", (run or uuid.uuid4().hex).encode())[0].decode()


def restore_trainer(trainer: TrainerState, folder: Path, step: int) -> None:
    """Restore dense weights, optimizers, position, random state and prefetched rows of `step`, on every rank.

    Call it before the buckets of dense gradients are built, which load the residuals.
    """
    header = read_header(folder, step)
    check_model_matches_checkpoint(folder, header, trainer.collection.declaration, trainer.model)
    states = state_folder(folder, step)
    dense = load_state(states / "dense", header["run"])
    _restore_dense_state(trainer, dense, header, step)
    ranks = [
        load_state(states / f"rank-{rank}", header["run"]) for rank in range(header["num_ranks"])
    ]
    trainer.earlier_work = [state["work"] for state in ranks if "work" in state]
    _restore_data_position(trainer, folder, dense["position"], ranks)
    restore_retention_policies(trainer.collection, states, header)
    _restore_prefetched_reads(trainer, folder, header, ranks)
    _restore_cached_rows(trainer, header, ranks)


def _restore_dense_state(
    trainer: TrainerState, dense_state: Mapping[str, Any], header: Mapping[str, Any], step: int
) -> None:
    """Restore the state that is equal on all ranks: dense weights, optimizer, best score, learning rate schedules."""
    load_dense(trainer.model, dense_state["model"])
    # Optimizer state comes from the checkpoint, but learning rates and other settings from this run.
    configured = [
        settings_without_parameters(group) for group in trainer.dense_optimizer.param_groups
    ]
    trainer.dense_optimizer.load_state_dict(dense_state["dense_optimizer"])
    for group, settings in zip(trainer.dense_optimizer.param_groups, configured, strict=True):
        group.update(settings)
    monitor = trainer.best.monitor
    if header.get("monitor", monitor) == monitor:  # else scores are not comparable
        trainer.best.restore(dense_state["best"])
    trainer.days = dense_state["days"]
    trainer.loss_scale.restore(dense_state.get("loss_scale"))
    groups = {
        "rows": dense_state["row_groups"],
        "dense": dense_state["dense_optimizer"]["param_groups"],
    }
    trainer.restore_schedules(dense_state["lr_schedules"], groups, step)


def _restore_data_position(
    trainer: TrainerState,
    run_folder: Path,
    position: tuple[int, int],
    rank_states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore each rank's position in its data, its random state, and the residuals of dense gradients.

    position: (epoch, step of the epoch); rank_states: state by rank of the saving world. Raises CheckpointError.
    """
    sources = [state for state in rank_states if not state.get("is_server")]
    mesh = trainer.mesh.trainers
    own_state = None
    if len(sources) != mesh.num_ranks and any(state.get("source") is not None for state in sources):
        raise CheckpointError(
            f"{run_folder} was saved by {len(sources)} ranks in the middle of an epoch of data sets of their own, and "
            f"this run has {mesh.num_ranks}; go on with {len(sources)}, or from a checkpoint at the end of an epoch"
        )
    if not trainer.mesh.is_server and mesh.rank < len(sources):
        own_state = sources[mesh.rank]
        torch.set_rng_state(own_state["random"])
        gpu_states = own_state.get("random_gpus", [])
        if gpu_states and len(gpu_states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpu_states)
    trainer.dense.set_checkpoint_residuals([state.get("dense_residuals") for state in sources])
    source = own_state.get("source") if own_state and len(sources) == mesh.num_ranks else None
    epoch, step_of_epoch = position
    trainer.position = Position(epoch, step_of_epoch, source)


def _restore_prefetched_reads(
    trainer: TrainerState,
    run_folder: Path,
    header: Mapping[str, Any],
    rank_states: Sequence[Mapping[str, Any]],
) -> None:
    """Restore the prefetched rows of coming batches. Raises CheckpointError if tables are sharded differently now."""
    collection = trainer.collection
    shards = collection.slices.table_shards
    # At most as many batches as this run reads ahead: rows for later batches must be read later, to be fresh enough.
    num_reads = min(collection.opened.reads_ahead, *(len(state["held"]) for state in rank_states))
    if num_reads and len(collection.opened.staleness_bounds) == 1:
        # If all tables have one bound, reads of only some tables are repeated.
        num_reads *= len(prefetched_tables([rank_states[0]["held"][0]], len(shards))) == len(shards)
    saved_shards = shard_tables(collection.tables, read_table_shardings(header))
    if num_reads and [shard.label for shard in saved_shards] != [shard.label for shard in shards]:
        raise CheckpointError(
            f"{run_folder}: got a checkpoint with rows read ahead of tables that were cut by columns otherwise, or "
            "had other hot rows; go on with the shardings of the checkpoint, or from one of a run without staleness"
        )
    trainer.restored_reads = [
        (i, [state["held"][i] for state in rank_states]) for i in range(num_reads)
    ]


def _restore_cached_rows(
    trainer: TrainerState, header: Mapping[str, Any], rank_states: Sequence[Mapping[str, Any]]
) -> None:
    """Restore this rank's cached rows, if the checkpoint has the shardings of this run."""
    cached: CachedExchange | None = trainer.collection.cached
    copies: list[Any] = [state.get("cache") for state in rank_states]
    is_same = [*trainer.collection.plan.shardings] == [*read_table_shardings(header)]
    if cached is not None and is_same and can_load_cache(cached, copies):
        restore_cache_state(cached, copies[trainer.mesh.rank])


def describe_lost_checkpoints(checkpoints: Checkpoints) -> list[str]:
    """Describe older checkpoints that cannot be opened because files are missing or damaged. Collective."""
    folder = checkpoints.folder
    steps = list_checkpoints(folder)
    own_lost = {
        str(step): f"{header_path(folder, step)} is damaged"
        for step in {*steps} - {*_read_intact_headers(folder, steps)}
    }
    own_lost |= {
        str(step): problem
        for backing in checkpoints.backings
        if isinstance(backing, LogBacking)
        for step, problem in backing.lost_commits().items()
    }
    lost: dict[str, str] = {}
    for lost_of_rank in checkpoints.mesh.all_gather_bytes("control", json.dumps(own_lost).encode()):
        lost |= json.loads(lost_of_rank)
    return [
        f"The checkpoint of step {step} can no longer be opened: {problem}. The newest checkpoint is intact; to keep "
        "the older one too, bring that back"
        for step, problem in sorted(lost.items(), key=lambda item: int(item[0]))
    ]
