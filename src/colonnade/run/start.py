"""Start of a run: the mirror's newest checkpoint, warm start from another run, detection of finished runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from colonnade.checkpoint.completeness import read_checkpoint
from colonnade.checkpoint.fingerprint import (
    dense_weights,
    describe_declared_towers,
    get_record_identity,
    load_dense,
)
from colonnade.checkpoint.header import list_checkpoints, read_header, resolve_step, state_folder
from colonnade.checkpoint.snapshot import parameter_names
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import open_recorded_stores
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig, TrainConfig
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, StorageError
from colonnade.formats import parse_stamped_json
from colonnade.publish.mirror import fetch_run, list_mirrored_steps, name_url_in_errors, open_url
from colonnade.publish.transfer import store_records
from colonnade.store.records import build_fresh_records
from colonnade.table import Table
from colonnade.train.trainer import Outcome, Trainer


def read_final_summary(
    folder: Path, config: TrainConfig, num_epochs: int, mesh: Mesh
) -> dict[str, Any] | None:
    """Return the recorded summary of a finished run; None if there is something to train or to repair. Collective.

    A run is finished if its summary is of the newest checkpoint and these settings leave nothing to train.
    """
    text = b""
    if mesh.rank == 0:
        try:
            summary = _read_summary_if_finished(folder, config, num_epochs)
            text = b"" if summary is None else json.dumps(summary).encode()
        except (ColonnadeError, OSError):
            pass  # opening the run raises it again
    text = mesh.all_gather_bytes("control", text)[0]
    return json.loads(text) if text else None


def build_outcome(summary: Mapping[str, Any]) -> Outcome:
    """Return the outcome that a summary recorded."""
    return Outcome(
        **{outcome_field.name: summary[outcome_field.name] for outcome_field in fields(Outcome)}
    )


def complete_killed_run_outcome(trainer: Trainer, outcome: Outcome, num_samples: int) -> int:
    """Complete the outcome of a run that was killed between its last checkpoint and its summary.

    Counts are taken from the checkpoint. Returns the samples of all ranks; `num_samples` unchanged for any other run.
    """
    work = trainer.earlier_work
    if outcome.steps or not work:
        return num_samples
    for name in ("steps", "samples", "skipped", "seconds"):
        setattr(outcome, name, work[0][name])
    trainer.phases.seconds.update(work[0]["phases"])
    return sum(of_rank["samples"] for of_rank in work)


def describe_finished_run(folder: Path, step: int) -> str:
    """Describe that a run is finished, and how to continue it."""
    return (
        f"{folder} is finished at step {step:,}: nothing is left to train, and nothing was changed. To go on, give "
        "more epochs (--set train.epochs=N, train.max_steps or train.patience, whichever ended it); to train anew, "
        "give another folder (--run)"
    )


def _read_summary_if_finished(
    folder: Path, config: TrainConfig, num_epochs: int
) -> dict[str, Any] | None:
    """Read the summary of a run folder if these settings leave nothing to train; else None."""
    steps = list_checkpoints(folder)
    path = folder / "summary.json"
    if not steps or not path.is_file():
        return None
    summary = parse_stamped_json(path, path.read_bytes(), "colonnade summary")
    is_newest = summary.get("step") == steps[-1] and not summary.get("stopped")
    if not is_newest or not {outcome_field.name for outcome_field in fields(Outcome)} <= set(
        summary
    ):
        return None
    path = state_folder(folder, steps[-1]) / "dense"
    state = load_state(path, read_header(folder, steps[-1])["run"])
    is_over = (
        state["position"][0] >= num_epochs
        or (config.max_steps is not None and steps[-1] >= config.max_steps)
        or 0 < (config.patience or 0) <= state["best"]["num_since"]
    )
    return summary if is_over else None


@dataclass(slots=True)
class WarmStart:
    """Warm start: which tables and dense parameters are loaded from another run, by name."""

    folder: Path
    step: int
    tables: list[str]
    dense: list[str]
    new: list[str]
    dropped: list[str]
    reset: list[str] = field(default_factory=list)  # dense, because towers differ
    without_state: list[str] = field(default_factory=list)  # weights only: the optimizer differs
    num_rows: int = 0  # loaded on this rank

    def __str__(self) -> str:
        lines = [
            f"warm start from {self.folder}@{self.step}: {len(self.dense)} dense parameters and the rows of "
            f"{len(self.tables)} tables ({self.num_rows:,} here)"
        ]
        for words, names in (
            ("new", self.new),
            ("not taken over", self.dropped),
            ("started anew, because towers or their modules differ", self.reset),
            ("weights without optimizer state", self.without_state),
        ):
            if names:
                lines.append(f"  {words}: {', '.join(names)}")
        return "\n".join(lines)


def plan_warm_start(
    model: nn.Module, tables: Sequence[Table], source_run: str, skipped_names: Collection[str] = ()
) -> WarmStart:
    """Plan the warm start of a model from `source_run`: FOLDER, FOLDER@best, FOLDER@last or FOLDER@<step>.

    Tables and dense parameters of both models are loaded. Those of this model alone keep their initial values; those
    of the other model alone are dropped. If towers differ, weights that read them have another meaning and often
    another shape, so they are reset: modules of other towers, weights that follow the order of fields
    (`SplitModel.ordered`), and dense weights of other shapes. Changes nothing. Raises CheckpointError if a width or
    shape differs and the name is not in `skipped_names`; ConfigError for an unknown name in `skipped_names`.
    """
    folder, step = parse_warm_start_source(source_run)
    own_tables = {table.name: table for table in tables}
    their_model = read_checkpoint(folder, step)["model"]
    own_dense = dense_weights(model)
    their_tables = their_model["tables"]
    their_dense = _read_dense_state(folder, step)["model"]
    if unknown_names := sorted(
        set(skipped_names) - {*their_tables, *their_dense, *own_tables, *own_dense}
    ):
        raise ConfigError(
            f"train.warm_start_skip: {unknown_names[0]!r} is no table or dense parameter of either model"
        )
    shared_tables = [n for n in own_tables if n in their_tables and n not in skipped_names]
    shared_dense = [n for n in own_dense if n in their_dense and n not in skipped_names]
    reset_dense = _find_weights_of_other_towers(
        model, their_model.get("towers", {}), {n: their_dense[n] for n in shared_dense}
    )
    shared_dense = [n for n in shared_dense if n not in reset_dense]
    _check_shared_shapes(
        folder, own_tables, their_tables, shared_tables, own_dense, their_dense, shared_dense
    )
    used = {*shared_tables, *shared_dense, *reset_dense}
    return WarmStart(
        folder,
        step,
        shared_tables,
        shared_dense,
        new=[n for n in (*own_tables, *own_dense) if n not in used],
        dropped=[n for n in (*their_tables, *their_dense) if n not in used],
        reset=reset_dense,
    )


def apply_warm_start(trainer: Trainer, warm_start: WarmStart) -> None:
    """Load the planned weights and rows, before the first step. Collective.

    Optimizer state is loaded if the optimizer is the same; otherwise `warm_start.without_state` lists the names.
    """
    dense = _read_dense_state(warm_start.folder, warm_start.step)
    weights = {name: dense["model"][name] for name in warm_start.dense}
    load_dense(trainer.model, {**dense_weights(trainer.model), **weights})
    _load_dense_optimizer_state(trainer, dense, warm_start)
    header = read_header(warm_start.folder, warm_start.step)
    for table in trainer.collection.tables:
        if table.name in warm_start.tables:
            warm_start.num_rows += _load_table_rows(trainer, header, table, warm_start)


def _read_dense_state(folder: Path, step: int) -> dict[str, Any]:
    run = read_header(folder, step)["run"]
    return load_state(folder / "checkpoints" / f"{step:012d}" / "dense", run)


def parse_warm_start_source(source: str) -> tuple[Path, int]:
    """Parse "FOLDER" or "FOLDER@best|last|<step>" to folder and saved step."""
    folder, at, name = source.rpartition("@")
    if at and (name in ("best", "last") or name.isdigit()):
        return Path(folder), resolve_step(Path(folder), name)
    return Path(source), resolve_step(Path(source), None)


def _find_weights_of_other_towers(
    model: nn.Module, recorded_towers: Mapping[str, Any], saved_dense: Mapping[str, Tensor]
) -> list[str]:
    """Return names of shared weights that have another meaning because towers differ."""
    (collection,) = (m for m in model.modules() if isinstance(m, EmbeddingCollection))
    towers = describe_declared_towers(collection.declaration)
    if towers == recorded_towers:
        return []
    changed_modules = [
        f".interactions.{n}." for n, words in towers.items() if recorded_towers.get(n) != words
    ]
    ordered = getattr(model, "ordered", ())
    own = dense_weights(model)
    return [
        name
        for name, value in saved_dense.items()
        if any(other in f".{name}" for other in changed_modules)
        or name.startswith(tuple(ordered))
        or value.shape != own[name].shape
    ]


def _check_shared_shapes(
    folder: Path,
    tables: Mapping[str, Table],
    their_tables: Mapping[str, Any],
    shared_tables: list[str],
    own_dense: Mapping[str, Tensor],
    their_dense: Mapping[str, Tensor],
    shared_dense: list[str],
) -> None:
    """Raise CheckpointError if shared tables or dense parameters have other shapes."""
    problems = []
    for name in shared_tables:
        dim = tables[name].dim
        own_dims = dict(dim) if isinstance(dim, Mapping) else dim
        if their_tables[name]["dim"] != own_dims:
            problems.append((name, f"width {their_tables[name]['dim']}", f"{own_dims}"))
        their_hashing = _describe_hashing(
            their_tables[name].get("hashes"), their_tables[name]["rows"]
        )
        if their_hashing != (
            own_hashing := _describe_hashing(tables[name].hashes, tables[name].rows)
        ):
            problems.append((name, their_hashing, own_hashing))
    for name in shared_dense:
        their_shape = tuple(their_dense[name].shape)
        own_shape = tuple(own_dense[name].shape)
        if their_shape != own_shape:
            problems.append((name, f"shape {their_shape}", f"{own_shape}"))
    if problems:
        problem_text = "; ".join(
            f"{name} has {saved} there, {current} here" for name, saved, current in problems
        )
        raise CheckpointError(
            f"{folder} does not fit: {problem_text}. To start these anew: "
            f"train.warm_start_skip={[name for name, _, _ in problems]}"
        )


def _describe_hashing(hashes: int | None, rows: int | None) -> str:
    """Describe how ids map to rows. With another mapping, rows belong to other ids."""
    return "ids as rows" if hashes is None else f"{hashes} hashes into {rows} rows"


def _load_dense_optimizer_state(
    trainer: Trainer, dense: Mapping[str, Any], start: WarmStart
) -> None:
    """Load optimizer state by parameter name, if the optimizer has the same class."""
    optimizer = trainer.dense_optimizer
    if dense.get("dense_optimizer_name") != type(optimizer).__qualname__:
        start.without_state.append("dense parameters")
        return
    index_of_parameter = {name: index for index, name in enumerate(dense["dense_parameters"])}
    state = optimizer.state_dict()
    for index, name in enumerate(parameter_names(trainer.model, optimizer)):
        saved_state = dense["dense_optimizer"]["state"].get(index_of_parameter.get(name, -1))
        if name in start.dense and saved_state is not None:
            state["state"][index] = saved_state
    optimizer.load_state_dict(state)


def _load_table_rows(
    trainer: Trainer, header: dict[str, Any], table: Table, start: WarmStart
) -> int:
    """Load the rows of a table that this rank owns; return their number."""
    collection = trainer.collection
    t = [own.name for own in collection.tables].index(table.name)
    their_tables = header["model"]["tables"]
    dtype = getattr(torch, their_tables[table.name]["dtype"].split()[0])
    num_rows = 0
    stores = open_recorded_stores(start.folder, header, list(their_tables).index(table.name))
    is_same_format = all(
        store.identity == get_record_identity(table) and store.record_bytes == table.record_bytes
        for store in stores
    )
    if not is_same_format:
        start.without_state.append(table.name)
    row_bytes = table.width * dtype.itemsize
    for store in stores:
        for rows in store.scan():
            is_valid = torch.ones(len(rows.ids), dtype=torch.bool)
            if table.rows is not None:
                is_valid = (rows.ids >= 0) & (rows.ids < table.rows)
            ids = rows.ids[is_valid]
            records = rows.records[is_valid]
            is_owned = torch.zeros(len(ids), dtype=torch.bool)
            for shard_index in collection.slices.slices_of_table[t]:
                is_owned |= collection.shards[shard_index].owns(ids, table.rows)
            ids = ids[is_owned]
            records = records[is_owned]
            if not is_same_format:
                weights = records[:, :row_bytes].contiguous().view(dtype)
                records = build_fresh_records(table, weights.reshape(len(ids), table.width))
            store_records(collection, t, ids, records)
            num_rows += len(ids)
        store.close()
    return num_rows


def fetch_from_mirror_if_empty(
    folder: Path, config: RunConfig, mesh: Mesh, console: Console | None
) -> None:
    """Fetch the newest checkpoint of the mirror into a folder without checkpoints. Collective."""
    url = config.train.mirror
    if url is None:
        return
    own_error = ""
    if mesh.rank == 0 and not list_checkpoints(folder):
        try:
            with name_url_in_errors(url, "read"):
                steps = list_mirrored_steps(*open_url(url))
            if steps:
                step = fetch_run(url, folder)
                if console is not None:
                    console.print(
                        f"fetched the checkpoint of step {step} from {url}", highlight=False
                    )
        except ColonnadeError as error:
            own_error = str(error)
    if error_text := mesh.all_gather_bytes("control", own_error.encode())[0].decode():
        raise StorageError(error_text)
