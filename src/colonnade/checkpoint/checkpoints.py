"""Checkpoints of a run: the one file that makes every rank's checkpoint of a step count.

run/rows/<home>/<table>/              each rank's stores (stores.py), saved first
run/checkpoints/<step>/rank-<r>           each rank's random state, held reads, residuals of coded dense gradients
run/checkpoints/<step>/retention-<r>      what each rank's admission and eviction remember, where there are any
run/checkpoints/<step>/dense              dense weights, optimizer states, position (rank 0)
run/checkpoints/<step>.json               header (checkpoint_header.py), written last, by rank 0: now the step is saved

A checkpoint is captured between two steps and written while training goes on: `begin`, later `finish`.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from colonnade.checkpoint.completeness import check_whole, describe_files
from colonnade.checkpoint.contract import Destination, TrainerState
from colonnade.checkpoint.fingerprint import check_model, load_dense
from colonnade.checkpoint.header import header_path, list_checkpoints, read_header, state_folder
from colonnade.checkpoint.snapshot import Captured, capture, restore_retentions, settings_of
from colonnade.checkpoint.states import dump, load_state
from colonnade.checkpoint.stores import (
    adopt,
    home,
    homes,
    open_shards,
    open_stores,
    shardings_of,
    to_adopt,
)
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Position
from colonnade.errors import CheckpointError, ColonnadeError, StorageError
from colonnade.exchange.cached import CachedExchange
from colonnade.exchange.cached_state import is_taken_up, load
from colonnade.exchange.prefetched import tables_held
from colonnade.sizes import Place
from colonnade.store.disk import Disk
from colonnade.store.durable import write_durably
from colonnade.store.log import LogBacking
from colonnade.store.shards import AbsentRows, Shards
from colonnade.store.table_shards import Joined, Laid, Rejoined, Sliced, lay_out
from colonnade.store.writer import LogWriter
from colonnade.table import Table
from colonnade.topology.sharding import Sharding, row_wise_in

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection

JOIN_SECONDS = 0.2  # between two looks at signals while a checkpoint is waited for
SLOW_SECONDS = 10.0  # from here on whoever waits is told what for
GIVE_UP_SECONDS = 10.0  # for a checkpoint that is given up to let go of its files


class Checkpoints:
    """One rank's end of a run folder's checkpoints. `newest` and `write` are collective."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        backings: Sequence[LogBacking | Shards | Joined | Rejoined | Sliced | AbsentRows],
        *,
        keep: int,
        disk: Disk,
        run: str = "",
    ) -> None:
        """`run` names the run in its checkpoints, wherever its folder lies."""
        self.folder, self.mesh, self.backings = folder, mesh, tuple(backings)
        self.keep, self.disk = keep, disk
        self.run = run
        self.destinations: list[Destination] = []  # that take each checkpoint
        self.outside: list[Path] = []  # directories of this run beyond its folder
        self._writing: Thread | None = None
        self._say: Callable[[str], None] | None = (
            None  # of the checkpoint under way, until it was used
        )
        self._problem: BaseException | None = None

    def begin(self, trainer: TrainerState, held: Sequence[dict]) -> None:
        """Collective, between steps: capture this step and write it in the background. One at a time: waits for the
        one before, and raises as `finish` does."""
        self.finish()
        with trainer.rows.settled() as before:
            captured = capture(trainer, held, self.run, before)
            trainer.collection.store.begin_commit()
        self._say = trainer.progress.print_line
        # Not a thread that the process must outlive: one that is given up may hang in a disk's call.
        self._writing = Thread(
            target=self._run, args=(trainer, captured), name="checkpoint", daemon=True
        )
        self._writing.start()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def finish(self) -> None:
        """Collective: wait until the checkpoint under way is there. Raises StorageError on every rank if one of them
        could
        not write; the checkpoints made before are then intact and training may go on or end. An interruption gives the
        checkpoint up, and the stores write nothing from then on."""
        self._wait()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def write(self, trainer: TrainerState, held: Sequence[dict]) -> None:
        """Collective, between steps: `begin` and `finish`."""
        self.begin(trainer, held)
        self.finish()

    def _run(self, trainer: TrainerState, captured: Captured) -> None:
        try:
            self.make_durable(trainer.collection, captured, trainer.progress.print_line)
        except BaseException as error:
            self._problem = error

    def make_durable(
        self, collection: EmbeddingCollection, captured: Captured, say: Callable[[str], None]
    ) -> None:
        """Collective, on the channel `checkpoint`: write what was captured and the rows of the store's
        `begin_commit`."""
        step, store = captured.step, collection.store
        place = state_folder(self.folder, step)
        problem: Exception | None = None
        written: list[str] = []
        try:
            self.disk.make_dir(place)
            # First: until it is copied, training notes what changes of it.
            remembered = {
                name: policy.finish_state() for name, policy in captured.retentions.items()
            }
            store.finish_commit(step)
            states = {
                f"rank-{self.mesh.rank}": captured.rank_state,
                f"retention-{self.mesh.rank}": remembered or None,
                "dense": captured.dense_state,
            }
            for name, state in states.items():
                if state is not None:
                    write_durably(self.disk, place / name, dump(state, self.run, place / name))
                    written.append(name)
        except (ColonnadeError, OSError) as error:
            problem = error
            store.abandon_commit()
        self._agree(problem, step)
        stores = [each.directory for each in self.backings if isinstance(each, LogBacking)]
        files = describe_files(self.folder, stores, step, written, self.mesh)
        if self.mesh.rank == 0:
            try:
                content = json.dumps(captured.header | files, indent=2, default=str).encode()
                write_durably(self.disk, header_path(self.folder, step), content)
            except (ColonnadeError, OSError) as error:
                problem = error
        self._agree(problem, step)
        kept = kept_steps(self.folder, self.keep)
        for destination in self.destinations:  # before older checkpoints go: they say what changed
            destination.send(step, kept, say)
        self._prune()

    def end_writing(self) -> None:
        """Let the folder go, for other runs to open; rows can still be read as they were saved."""
        self._wait()
        for backing in self.backings:
            if isinstance(backing, LogBacking):
                backing.end_writing()

    def close(self) -> None:
        """Let go of the stores; what was not saved is given up, a checkpoint under way is not."""
        self._wait()
        for backing in self.backings:
            backing.close()

    def _wait(self) -> None:
        """Until the checkpoint under way is over, however it ended. In the main thread, signals are heard meanwhile;
        what
        they raise ends the checkpoint in bounded time."""
        if self._writing is None:
            return
        began = time.monotonic()
        try:
            while self._writing.is_alive():
                self._writing.join(JOIN_SECONDS)
                if self._say is not None and time.monotonic() - began > SLOW_SECONDS:
                    self._say(slow_words(self._writers()))
                    self._say = None
        except BaseException:
            for writer in self._writers():
                writer.stop()
            self._writing.join(GIVE_UP_SECONDS)
            self._writing = None
            raise
        self._writing = None

    def _writers(self) -> list[LogWriter]:
        """One, where this rank's stores are open for writing."""
        found = [each.writer for each in self.backings if isinstance(each, LogBacking)]
        return list(dict.fromkeys(writer for writer in found if writer is not None))

    def _agree(self, problem: Exception | None, step: int) -> None:
        text = b"" if problem is None else str(problem).encode()
        for rank, said in enumerate(self.mesh.all_gather_bytes("checkpoint", text)):
            if said:
                raise StorageError(
                    f"checkpoint of step {step} failed on rank {rank}: {said.decode()}"
                ) from problem

    def _prune(self) -> None:
        """Drop all but the newest checkpoints and the best: first their word, then their bytes."""
        kept = kept_steps(self.folder, self.keep)
        dropped = [step for step in list_checkpoints(self.folder) if step not in kept]
        # Every rank has looked before the first file goes.
        self.mesh.barrier("checkpoint")
        if self.mesh.rank == 0:
            for step in dropped:
                self.disk.unlink(header_path(self.folder, step))
            # A checkpoint's word must be gone for good before its bytes go.
            self.disk.sync_dir(self.folder / "checkpoints")
        self.mesh.barrier("checkpoint")
        for backing in self.backings:
            if isinstance(backing, LogBacking):
                backing.prune([step for step in kept if step in backing.commits()])
        if self.mesh.rank == 0:
            remove_others([self.folder / "rows", *self.outside], used_homes(self.folder, kept))
            for old in (self.folder / "checkpoints").iterdir():
                # Not those to come: another rank may have begun the next checkpoint.
                is_over = old.name.isdigit() and int(old.name) < kept[-1]
                if is_over and old.is_dir() and int(old.name) not in kept:
                    shutil.rmtree(old, ignore_errors=True)


def slow_words(writers: Sequence[LogWriter]) -> str:
    """What a checkpoint that takes long waits for."""
    left = sum(writer.pending_bytes for writer in writers)
    budget = next((each.bytes_per_second for each in writers if each.bytes_per_second), None)
    if left == 0:
        rate = ""
    elif budget is None:
        rate = ", as fast as the disk takes them"
    else:
        seconds = left / budget
        rate = f", at plan.write_budget of {budget:,.0f} bytes per second {seconds:,.0f} s more"
    return (
        f"waiting for a checkpoint: {left:,} bytes of rows wait in memory to be written{rate}. A second "
        f"Ctrl-C or SIGTERM "
        "gives it up: the checkpoint before it stays"
    )


def kept_steps(folder: Path, keep: int) -> list[int]:
    """Of the saved steps, those that stay: the newest `keep`, and the best as each of these knew it."""
    steps = list_checkpoints(folder)
    newest = steps[-keep:]
    best = {read_header(folder, step).get("best_step") for step in newest}
    return [step for step in steps if step in newest or step in best]


def open_checkpoints(
    folder: Path,
    tables: Sequence[Table],
    mesh: Mesh,
    *,
    keep: int = 2,
    shardings: Sequence[Sharding] | None = None,
    disk: Disk | None = None,
    read_only: bool = False,
    at: int | None = None,
    places: Sequence[Place] = (),
    write_budget: int | None = None,
) -> tuple[Checkpoints, int | None]:
    """Collective. Opens this rank's stores at the newest step all ranks saved; None: a new run.

    With `at`, at that step instead; opened for writing, newer checkpoints are then given up.
    `shardings`: by table, default row_wise over all ranks. A checkpoint of other shardings, of another number of
    ranks or
    not, is carried over: every rank reads the old stores of the tables whose rows it gets and keeps those it owns now,
    of a replicated table from the first copy. `places`: directories outside the run folder that take new rows, each in
    a folder named by the run; those that have rows of it already are found without being named. `write_budget`: bytes
    per second.
    """
    disk = disk or Disk()
    steps = list_checkpoints(folder)
    if at is not None and at not in steps:
        raise CheckpointError(f"{folder} has no checkpoint of step {at}; it has {steps or 'none'}")
    if at is not None:
        if mesh.rank == 0 and not read_only:
            _give_up_newer(folder, disk, [other for other in steps if other > at])
        steps = [other for other in steps if other <= at]
        mesh.barrier()
    newest = torch.tensor(steps[-1] if steps else -1)
    mesh.broadcast("control", newest)
    step = None if newest < 0 else int(newest)
    check_whole(folder, step, mesh)
    run = _agree_on_run(folder, step, mesh)
    wanted = list(shardings or [row_wise_in(mesh.world)] * len(tables))
    had = wanted if step is None else shardings_of(read_header(folder, step))
    if len(had) != len(tables):
        raise CheckpointError(
            f"{folder} was saved with {len(had)} tables, this model has {len(tables)}; build the same model"
        )
    then, now = lay_out(tables, had), lay_out(tables, wanted)
    fresh = to_adopt(then, now, mesh.rank)
    if read_only and fresh and step is not None:
        readers = open_shards(folder, tables, then, now, mesh.rank, disk, step)
        return Checkpoints(folder, mesh, readers, keep=keep, disk=disk, run=run), step
    outside = [replace(place, path=str(Path(place.path) / f"colonnade-{run}")) for place in places]
    if step is not None and not read_only:
        _give_up_overwritten(folder, mesh, disk, steps[:-1], now, fresh)
    backings = open_stores(
        folder, tables, wanted, mesh.rank, disk, step, read_only, outside, write_budget, fresh
    )
    if step is not None:
        adopt(folder, tables, then, now, mesh.rank, disk, step, backings, fresh)
    checkpoints = Checkpoints(folder, mesh, backings, keep=keep, disk=disk, run=run)
    checkpoints.outside = [Path(place.path) for place in outside]
    return checkpoints, step


def _give_up_overwritten(
    folder: Path,
    mesh: Mesh,
    disk: Disk,
    older: Sequence[int],
    now: Sequence[Laid],
    fresh: Sequence[int],
) -> None:
    """Collective: older checkpoints whose rows lie where other rows are about to, from when the world was like this
    before,
    end: first their word, then their bytes."""
    mine = [str(home(now[t].sharding, mesh.rank, now[t].label)) for t in fresh]
    said = mesh.all_gather_bytes("control", json.dumps(mine).encode())
    taken = {path for each in said for path in json.loads(each)}
    if taken and mesh.rank == 0:
        for step in older:
            if taken & used_homes(folder, [step]):
                disk.unlink(header_path(folder, step))
        disk.sync_dir(folder / "checkpoints")
    mesh.barrier()


def used_homes(folder: Path, steps: Sequence[int]) -> set[str]:
    """Inside `rows`: all that these checkpoints have."""
    return {str(each.path) for step in steps for each in homes(read_header(folder, step))}


def remove_others(places: Sequence[Path], used: Collection[str]) -> None:
    """Of directories that hold stores: those that are not `used`."""
    for place in places:
        for store in [*place.glob("*-of-*/*"), *place.glob("copy-*/*")]:
            if str(store.relative_to(place)) not in used:
                shutil.rmtree(store, ignore_errors=True)
        for left in [*place.glob("*-of-*"), *place.glob("copy-*")]:
            with suppress(OSError):
                left.rmdir()  # unless something is in it


def _give_up_newer(folder: Path, disk: Disk, steps: Sequence[int]) -> None:
    """Delete the headers of these checkpoints, which the run that goes on from an older one replaces."""
    for step in steps:
        disk.unlink(header_path(folder, step))
    if steps:
        disk.sync_dir(folder / "checkpoints")


def _agree_on_run(folder: Path, step: int | None, mesh: Mesh) -> str:
    """Collective: return the run's name as the checkpoint of `step` has it, or a new one."""
    run = "" if step is None else read_header(folder, step).get("run", "")
    return mesh.all_gather_bytes("control", (run or uuid.uuid4().hex).encode())[0].decode()


def restore(trainer: TrainerState, folder: Path, step: int) -> None:
    """Every rank: put dense weights, optimizers, position, random state and held reads back to `step`; before
    the dense gradients are laid out, which take up what rounding had kept."""
    header = read_header(folder, step)
    check_model(folder, header, trainer.collection.declaration, trainer.model)
    place = state_folder(folder, step)
    dense = load_state(place / "dense", header["run"])
    _restore_dense(trainer, dense, header, step)
    ranks = [
        load_state(place / f"rank-{rank}", header["run"]) for rank in range(header["num_ranks"])
    ]
    trainer.earlier_work = [state["work"] for state in ranks if "work" in state]
    _restore_position(trainer, folder, dense["position"], ranks)
    restore_retentions(trainer.collection, place, header)
    _restore_held(trainer, folder, header, ranks)
    _restore_copies(trainer, header, ranks)


def _restore_dense(
    trainer: TrainerState, dense: Mapping[str, Any], header: Mapping[str, Any], step: int
) -> None:
    """Put back what all ranks have alike: dense weights, optimizer, best score, learning-rate schedules."""
    load_dense(trainer.model, dense["model"])
    # What was learned comes from the checkpoint; learning rates and the like are this run's configuration.
    configured = [settings_of(group) for group in trainer.dense_optimizer.param_groups]
    trainer.dense_optimizer.load_state_dict(dense["dense_optimizer"])
    for group, settings in zip(trainer.dense_optimizer.param_groups, configured, strict=True):
        group.update(settings)
    monitor = trainer.best.monitor
    if header.get("monitor", monitor) == monitor:  # else scores do not compare
        trainer.best.restore(dense["best"])
    trainer.days = dense["days"]
    trainer.loss_scale.restore(dense.get("loss_scale"))
    groups = {"rows": dense["row_groups"], "dense": dense["dense_optimizer"]["param_groups"]}
    trainer.restore_schedules(dense["lr_schedules"], groups, step)


def _restore_position(
    trainer: TrainerState,
    folder: Path,
    position: tuple[int, int],
    ranks: Sequence[Mapping[str, Any]],
) -> None:
    """Put back each rank's place in its data, its random state, and what rounding of dense gradients had kept.

    position: (epoch, step of the epoch); ranks: state by rank of the world that saved. Raises CheckpointError.
    """
    sources = [state for state in ranks if not state.get("is_server")]
    mesh, own = trainer.mesh.trainers, None
    if len(sources) != mesh.num_ranks and any(state.get("source") is not None for state in sources):
        raise CheckpointError(
            f"{folder} was saved by {len(sources)} ranks in the middle of an epoch of data sets of their own, and "
            f"this run has {mesh.num_ranks}; go on with {len(sources)}, or from a checkpoint at the end of an epoch"
        )
    if not trainer.mesh.is_server and mesh.rank < len(sources):
        own = sources[mesh.rank]
        torch.set_rng_state(own["random"])
        of_gpus = own.get("random_gpus", [])
        if of_gpus and len(of_gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(of_gpus)
    trainer.dense.restore([state.get("dense_residuals") for state in sources])
    source = own.get("source") if own and len(sources) == mesh.num_ranks else None
    epoch, step_of_epoch = position
    trainer.position = Position(epoch, step_of_epoch, source)


def _restore_held(
    trainer: TrainerState,
    folder: Path,
    header: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
) -> None:
    """Put back the reads of coming batches. Raises CheckpointError where they are of tables that were cut otherwise."""
    collection = trainer.collection
    laid = collection.slices.laid
    # No more than this run reads ahead: what is further off is not late enough, and no checkpoint would hold it again.
    num_held = min(collection.opened.reads_ahead, *(len(state["held"]) for state in ranks))
    if num_held and len(collection.opened.bounds) == 1:
        # Where all tables have one bound, what was read of some alone is read anew.
        num_held *= len(tables_held([ranks[0]["held"][0]], len(laid))) == len(laid)
    before = lay_out(collection.tables, shardings_of(header))
    if num_held and [each.label for each in before] != [each.label for each in laid]:
        raise CheckpointError(
            f"{folder}: got a checkpoint that holds what was read ahead of tables that were cut by columns "
            f"otherwise, or "
            "had other hot rows; go on with the shardings of the checkpoint, or from one of a run without staleness"
        )
    trainer.restored_reads = [(i, [state["held"][i] for state in ranks]) for i in range(num_held)]


def _restore_copies(
    trainer: TrainerState, header: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> None:
    """Put back this rank's copies of rows, where they are of the shardings of this run."""
    cached: CachedExchange | None = trainer.collection.cached
    copies: list[Any] = [state.get("cache") for state in ranks]
    shardings = [each.plain() for each in trainer.collection.plan.shardings]
    is_same = shardings == list(header["shardings"].values())
    if cached is not None and is_same and is_taken_up(cached, copies):
        load(cached, copies[trainer.mesh.rank])


def lost_words(checkpoints: Checkpoints) -> list[str]:
    """Collective: what to say of older checkpoints, kept, some of whose rows lie in a directory that is gone."""
    mine = {
        str(step): path
        for backing in checkpoints.backings
        if isinstance(backing, LogBacking)
        for step, path in backing.lost_commits().items()
    }
    found: dict[str, str] = {}
    for said in checkpoints.mesh.all_gather_bytes("control", json.dumps(mine).encode()):
        found |= json.loads(said)
    return [
        f"The checkpoint of step {step} can no longer be opened: {path}, where rows of it lie, is not there. "
        f"The newest "
        "checkpoint is intact; to keep the older one too, bring the directory back"
        for step, path in sorted(found.items(), key=lambda item: int(item[0]))
    ]
