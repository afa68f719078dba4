"""Commits of a run: the one file that makes every rank's commit of a step count.

run/rows/<rank>-of-<ranks>/<table>/   each rank's stores, committed first
run/commits/<step>/rank-<r>           each rank's random state and held reads
run/commits/<step>/dense              dense weights, optimizer states, position (rank 0)
run/commits/<step>.json               written last, by rank 0: from here on the step is committed
"""

from __future__ import annotations

import io
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colonnade import __version__, _native
from colonnade.data.contract import Position
from colonnade.errors import CheckpointError, ColonnadeError, CorruptionError, StorageError
from colonnade.exchange.layout import Declaration
from colonnade.store.disk import Disk
from colonnade.store.durable import read_verified, write_durably
from colonnade.store.manifest import describe
from colonnade.store.shards import Shards
from colonnade.store.ssd import SsdBacking, open_ssd
from colonnade.table import Table
from colonnade.topology.mesh import Mesh
from colonnade.train.mirror import Mirror
from colonnade.train.schedules import restore_schedule

if TYPE_CHECKING:
    from colonnade.train.trainer import Trainer

FORMAT = 2
READ_THREADS = 8  # an SSD answers most random reads per second from about six in flight


class Commits:
    """One rank's end of a run folder's commits. `newest` and `write` are collective."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        backings: Sequence[SsdBacking | Shards],
        *,
        keep: int,
        disk: Disk,
        run: str = "",
    ) -> None:
        """`run` names the run in its commits, wherever its folder lies."""
        self.folder, self.mesh, self.backings = folder, mesh, tuple(backings)
        self.keep, self.disk = keep, disk
        self.run = run
        self.mirror: Mirror | None = None

    def write(self, trainer: Trainer, held: Sequence[dict]) -> None:
        """Collective, between steps. Raises StorageError on every rank if one of them could not write;
        the commits made before are then intact and training may go on or end."""
        step = trainer.collection.step
        place = self.folder / "commits" / f"{step:012d}"
        problem = None
        try:
            self.disk.make_dir(place)
            trainer.collection.store.commit(step)
            rank_state = {
                "random": torch.get_rng_state(),
                "held": list(held),
                "source": trainer.position.state,
            }
            write_durably(self.disk, place / f"rank-{self.mesh.rank}", _dump(rank_state))
            if self.mesh.rank == 0:
                write_durably(self.disk, place / "dense", _dump(_dense_state(trainer)))
        except (ColonnadeError, OSError) as error:
            problem = error
        self._agree(problem, step)
        if self.mesh.rank == 0:
            try:
                header = {
                    "format": FORMAT,
                    "version": __version__,
                    "step": step,
                    "num_ranks": self.mesh.num_ranks,
                    "run": self.run,
                    "best_step": trainer.best.step,
                    "model": fingerprint(trainer.collection.declaration, trainer.model),
                    "schema": asdict(trainer.data.train.schema),
                }
                content = json.dumps(header, indent=2, default=str).encode()
                write_durably(self.disk, _header_path(self.folder, step), content)
            except (ColonnadeError, OSError) as error:
                problem = error
        self._agree(problem, step)
        trainer.collection.committed = (self.run, step)
        self._prune()
        if self.mirror is not None and self.mesh.rank == 0:
            self.mirror.send(step, kept_steps(self.folder, self.keep), trainer.progress.say)

    def end_writing(self) -> None:
        """Let the folder go, for other runs to open; rows can still be read as they were committed."""
        for backing in self.backings:
            if isinstance(backing, SsdBacking):
                backing.end_writing()

    def close(self) -> None:
        """Let go of the stores; what was not committed is given up."""
        for backing in self.backings:
            backing.close()

    def _agree(self, problem: Exception | None, step: int) -> None:
        text = b"" if problem is None else str(problem).encode()
        for rank, said in enumerate(self.mesh.all_gather_bytes("control", text)):
            if said:
                raise StorageError(
                    f"commit of step {step} failed on rank {rank}: {said.decode()}"
                ) from problem

    def _prune(self) -> None:
        """Drop all but the newest commits and the best: first their word, then their bytes."""
        kept = kept_steps(self.folder, self.keep)
        dropped = [step for step in committed_steps(self.folder) if step not in kept]
        # Every rank has looked before the first file goes.
        self.mesh.barrier()
        if self.mesh.rank == 0:
            for step in dropped:
                self.disk.unlink(_header_path(self.folder, step))
            # A commit's word must be gone for good before its bytes go.
            self.disk.sync_dir(self.folder / "commits")
        self.mesh.barrier()
        for backing in self.backings:
            assert isinstance(backing, SsdBacking)  # shards of another world are never committed
            backing.prune([step for step in kept if step in backing.commits()])
        if self.mesh.rank == 0:
            worlds = {read_header(self.folder, step)["num_ranks"] for step in kept}
            for place in (self.folder / "rows").glob("*-of-*"):
                ranks = place.name.split("-of-")[1]
                if ranks.isdigit() and int(ranks) not in worlds:
                    shutil.rmtree(place, ignore_errors=True)
            for old in (self.folder / "commits").iterdir():
                if old.is_dir() and old.name.isdigit() and int(old.name) not in kept:
                    shutil.rmtree(old, ignore_errors=True)


def committed_steps(folder: Path) -> list[int]:
    """Steps that every rank has committed, ascending."""
    found = (folder / "commits").glob("*.json")
    return sorted(int(path.stem) for path in found if path.stem.isdigit())


def kept_steps(folder: Path, keep: int) -> list[int]:
    """Of the committed steps, those that stay: the newest `keep`, and the best as each of these knew it."""
    steps = committed_steps(folder)
    newest = steps[-keep:]
    best = {read_header(folder, step).get("best_step") for step in newest}
    return [step for step in steps if step in newest or step in best]


def open_commits(
    folder: Path,
    tables: Sequence[Table],
    mesh: Mesh,
    *,
    keep: int = 2,
    disk: Disk | None = None,
    read_only: bool = False,
    at: int | None = None,
) -> tuple[Commits, int | None]:
    """Collective. Opens this rank's stores at the newest step all ranks committed; None: a new run.

    With `at`, at that step instead; opened for writing, newer commits are then given up.
    A commit of another number of ranks is carried over: every rank reads all old stores and keeps the
    rows it owns now.
    """
    disk = disk or Disk()
    steps = committed_steps(folder)
    if at is not None and at not in steps:
        raise CheckpointError(f"{folder} has no commit of step {at}; it has {steps or 'none'}")
    if at is not None:
        newer = [other for other in steps if other > at]
        steps = [other for other in steps if other <= at]
        if newer and mesh.rank == 0 and not read_only:
            for other in newer:
                disk.unlink(_header_path(folder, other))
            disk.sync_dir(folder / "commits")
        mesh.barrier()
    newest = torch.tensor(steps[-1] if steps else -1)
    mesh.broadcast("control", newest)
    step = None if newest < 0 else int(newest)
    run = "" if step is None else read_header(folder, step).get("run", "")
    run = mesh.all_gather_bytes("control", (run or uuid.uuid4().hex).encode())[0].decode()
    ranks_then = mesh.num_ranks if step is None else read_header(folder, step)["num_ranks"]
    same = ranks_then == mesh.num_ranks
    if read_only and not same:
        shards = [
            open_stores(folder, tables, rank, ranks_then, disk, step, read_only=True)
            for rank in range(ranks_then)
        ]
        readers = [
            Shards(stores, table.rows)
            for table, stores in zip(tables, zip(*shards, strict=True), strict=True)
        ]
        return Commits(folder, mesh, readers, keep=keep, disk=disk, run=run), step
    backings = open_stores(
        folder, tables, mesh.rank, mesh.num_ranks, disk, step if same else None, read_only
    )
    if step is not None and not same:
        for rank in range(ranks_then):
            _adopt(folder, tables, rank, ranks_then, disk, step, backings, mesh)
        for backing in backings:
            backing.commit(step)
    return Commits(folder, mesh, backings, keep=keep, disk=disk, run=run), step


def restore(trainer: Trainer, folder: Path, step: int) -> None:
    """Every rank: put dense weights, optimizers, position, random state and held reads back to `step`."""
    header = read_header(folder, step)
    check_model(folder, header, trainer.collection.declaration, trainer.model)
    place = folder / "commits" / f"{step:012d}"
    dense = load_state(place / "dense")
    load_dense(trainer.model, dense["model"])
    # What was learned comes from the commit; learning rates and the like are this run's configuration.
    chosen = [_settings(group) for group in trainer.dense_optimizer.param_groups]
    trainer.dense_optimizer.load_state_dict(dense["dense_optimizer"])
    for group, settings in zip(trainer.dense_optimizer.param_groups, chosen, strict=True):
        group.update(settings)
    trainer.best.restore(dense["best"])
    trainer.days = dense["days"]
    groups = {"rows": dense["row_groups"], "dense": dense["dense_optimizer"]["param_groups"]}
    said = dense["lr_schedules"] or [{}] * len(trainer.lr_schedules)
    if len(said) != len(trainer.lr_schedules):
        raise CheckpointError(
            f"{folder} was committed with {len(said)} learning rate schedules, this run has "
            f"{len(trainer.lr_schedules)}; give as many"
        )
    for schedule, state in zip(trainer.lr_schedules, said, strict=True):
        of = groups["rows" if schedule.optimizer is trainer.rows else "dense"]
        restore_schedule(schedule, state, of, step)
    ranks = [load_state(place / f"rank-{rank}") for rank in range(header["num_ranks"])]
    if trainer.mesh.rank < len(ranks):
        torch.set_rng_state(ranks[trainer.mesh.rank]["random"])
    sources = [state.get("source") for state in ranks]
    if len(ranks) != trainer.mesh.num_ranks and any(state is not None for state in sources):
        raise CheckpointError(
            f"{folder} was committed by {len(ranks)} ranks in the middle of an epoch of data sets of their own, and "
            f"this run has {trainer.mesh.num_ranks}; go on with {len(ranks)}, or from a commit at the end of an epoch"
        )
    source = None if len(ranks) != trainer.mesh.num_ranks else sources[trainer.mesh.rank]
    epoch, step_of_epoch = dense["position"]
    trainer.position = Position(epoch, step_of_epoch, source)
    num_held = min(len(state["held"]) for state in ranks)
    trainer.held = [[state["held"][i] for state in ranks] for i in range(num_held)]


def resolve(folder: Path, at: int | str | None) -> int:
    """The committed step that `at` names: a step, "best" (by the validation part) or "last", which is also None.

    Raises CheckpointError where there is no such commit, naming those there are.
    """
    steps = committed_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no commit; train it first (`colonnade train --run`)")
    if at is None or at == "last":
        return steps[-1]
    if at == "best":
        best = read_header(folder, steps[-1]).get("best_step")
        if best is None:
            raise CheckpointError(
                f"{folder}: no commit is known to be the best: the data had no validation part, or it was "
                "not evaluated yet. Ask for the last"
            )
        at = best
    if isinstance(at, str) and at.isdecimal():
        at = int(at)
    if at not in steps:
        raise CheckpointError(
            f"{folder} has no commit of step {at}; it has {steps}, also called best and last"
        )
    return int(at)


def open_recorded_stores(folder: Path, header: dict[str, Any], number: int) -> list[SsdBacking]:
    """Table `number`'s stores of every rank of a commit, read-only, as their manifests describe them: nothing
    needs to be known of the model."""
    name, step, num_ranks = (
        list(header["model"]["tables"])[number],
        header["step"],
        header["num_ranks"],
    )
    stores = []
    for rank in range(num_ranks):
        place = folder / "rows" / f"{rank}-of-{num_ranks}" / f"{number:03d}"
        said = describe(place, step)
        stores.append(
            open_ssd(
                place,
                table_name=name,
                record_bytes=said["record_bytes"],
                identity=said["identity"],
                step=step,
                read_only=True,
            )
        )
    return stores


def check_model(
    folder: Path, header: Mapping[str, Any], declaration: Declaration, model: torch.nn.Module
) -> None:
    """Raises CheckpointError, naming the first difference, unless the commit is of such a model."""
    wanted = fingerprint(declaration, model)
    if header["model"] != wanted:
        raise CheckpointError(
            f"{folder} was committed by another model: {difference(header['model'], wanted)}. "
            "Train the same model, or give this run another folder"
        )


def fingerprint(declaration: Declaration, model: torch.nn.Module) -> dict[str, Any]:
    """What must agree for a commit to belong to a model; plain JSON, so that a difference can be named."""
    return {
        "tables": {
            table.name: {
                "dim": dict(table.dim) if isinstance(table.dim, Mapping) else table.dim,
                "rows": table.rows,
                "optimizer": "+".join(part.optimizer.name for part in table.parts),
                "dtype": dtype_words(table),
            }
            for table in declaration.tables
        },
        "features": {f.name: [f.table, f.pooling] for f in declaration.features},
        "dense": {name: list(value.shape) for name, value in dense_weights(model).items()},
    }


def dense_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state_dict without what only names a commit (`EmbeddingCollection.get_extra_state`)."""
    return {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith("_extra_state")
    }


def load_dense(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put `dense_weights` back."""
    kept = {k: v for k, v in model.state_dict().items() if k.endswith("_extra_state")}
    model.load_state_dict({**kept, **weights})


def identity_of(table: Table) -> str:
    """What the bytes of a table's records mean."""
    dims = "+".join(
        f"{part.name}:{part.dim}" if part.name else f"{part.dim}" for part in table.parts
    )
    optimizers = "+".join(part.optimizer.name for part in table.parts)
    return f"{table.name}/{dims}/{optimizers}/{dtype_words(table)}"


def dtype_words(table: Table) -> str:
    return f"{table.dtype} with master" if table.master else table.dtype


def open_stores(
    folder: Path,
    tables: Sequence[Table],
    rank: int,
    num_ranks: int,
    disk: Disk,
    step: int | None,
    read_only: bool = False,
) -> list[SsdBacking]:
    """One rank's stores, by table, as committed at `step`; None: empty. They share reading threads."""
    reader = _native.SegmentReader(READ_THREADS)
    return [
        open_ssd(
            folder / "rows" / f"{rank}-of-{num_ranks}" / f"{t:03d}",
            table_name=table.name,
            record_bytes=table.record_bytes,
            identity=identity_of(table),
            disk=disk,
            reader=reader,
            step=step,
            read_only=read_only,
        )
        for t, table in enumerate(tables)
    ]


def _adopt(folder, tables, rank, num_ranks, disk, step, backings, mesh) -> None:
    """Copy the rows this rank owns now out of one old rank's stores."""
    old = open_stores(folder, tables, rank, num_ranks, disk, step, True)
    for table, source, target in zip(tables, old, backings, strict=True):
        for rows in source.scan():
            owner = torch.as_tensor(_native.owner_of(rows.ids, table.rows or 0, mesh.num_ranks))
            mine = owner == mesh.rank
            target.write(rows.ids[mine], rows.records[mine]).wait()
        source.close()


def _dense_state(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dense_weights(trainer.model),
        "dense_optimizer": trainer.dense_optimizer.state_dict(),
        "dense_optimizer_name": type(trainer.dense_optimizer).__qualname__,
        "dense_parameters": parameter_names(trainer.model, trainer.dense_optimizer),
        "row_groups": [_settings(group) for group in trainer.rows.param_groups],
        "lr_schedules": [schedule.state_dict() for schedule in trainer.lr_schedules],
        "position": (trainer.position.epoch, trainer.position.step),
        "best": trainer.best.state(),
        "days": trainer.days,
    }


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of an optimizer's parameters, in its order; "" for one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _header_path(folder: Path, step: int) -> Path:
    return folder / "commits" / f"{step:012d}.json"


def read_header(folder: Path, step: int) -> dict[str, Any]:
    path = _header_path(folder, step)
    try:
        header = json.loads(read_verified(path))
    except ValueError as error:
        raise CorruptionError(f"{path}: not a commit: {error}") from None
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: got format {header.get('format')}, this version reads {FORMAT}; "
            f"it was written by Colonnade {header.get('version')}"
        )
    return header


def _dump(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_state(path: Path) -> dict[str, Any]:
    return torch.load(io.BytesIO(read_verified(path)), weights_only=True)


def difference(saved: Any, wanted: Any, path: str = "") -> str:
    """The first place where two plain values differ, in words."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in [*saved, *wanted]:
            here = f"{path}.{key}" if path else str(key)
            if key not in saved:
                return f"it has no {here}"
            if key not in wanted:
                return f"it has {here}, this model has not"
            if saved[key] != wanted[key]:
                return difference(saved[key], wanted[key], here)
    return f"{path} was {saved}, is {wanted}"
