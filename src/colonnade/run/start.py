"""Start of a run: from another run's weights, or not at all where it has finished."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.completeness import read_checkpoint
from colonnade.checkpoint.fingerprint import dense_weights, identity_of, load_dense, tower_words
from colonnade.checkpoint.header import list_checkpoints, read_header, resolve, state_folder
from colonnade.checkpoint.snapshot import parameter_names
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import open_recorded_stores
from colonnade.comm.mesh import Mesh
from colonnade.config.run import TrainConfig
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.formats import read_stamped
from colonnade.publish.transfer import put_records
from colonnade.store.records import fresh_records
from colonnade.table import Table
from colonnade.train.trainer import Outcome, Trainer


def read_final_summary(
    folder: Path, config: TrainConfig, num_epochs: int, mesh: Mesh
) -> dict[str, Any] | None:
    """Collective: the summary that rank 0 reads in a run folder, if it is that of the newest checkpoint and these
    settings
    leave nothing to train; None where there is something to do, or to mend."""
    text = b""
    if mesh.rank == 0:
        try:
            summary = _final_summary(folder, config, num_epochs)
            text = b"" if summary is None else json.dumps(summary).encode()
        except (ColonnadeError, OSError):
            pass  # opening the run says what is wrong
    text = mesh.all_gather_bytes("control", text)[0]
    return json.loads(text) if text else None


def outcome_of(summary: Mapping[str, Any]) -> Outcome:
    """Return the outcome that a summary recorded."""
    return Outcome(**{each.name: summary[each.name] for each in fields(Outcome)})


def complete_outcome(trainer: Trainer, outcome: Outcome, samples: int) -> int:
    """Fill in the outcome of a run that was killed between its last checkpoint and its summary, from the counts that
    the
    checkpoint holds. Returns the samples of all ranks: `samples` as it is for any other run."""
    work = trainer.earlier_work
    if outcome.steps or not work:
        return samples
    for name in ("steps", "samples", "skipped", "seconds"):
        setattr(outcome, name, work[0][name])
    trainer.phases.seconds.update(work[0]["phases"])
    return sum(of_rank["samples"] for of_rank in work)


def describe_end(folder: Path, step: int) -> str:
    """Say that a run is finished, and how to go on."""
    return (
        f"{folder} is finished at step {step:,}: nothing is left to train, and nothing was changed. To go on, give "
        "more epochs (--set train.epochs=N, train.max_steps or train.patience, whichever ended it); to train anew, "
        "give another folder (--run)"
    )


def _final_summary(folder: Path, config: TrainConfig, num_epochs: int) -> dict[str, Any] | None:
    steps, path = list_checkpoints(folder), folder / "summary.json"
    if not steps or not path.is_file():
        return None
    summary = read_stamped(path, path.read_bytes(), "colonnade summary")
    is_newest = summary.get("step") == steps[-1] and not summary.get("stopped")
    if not is_newest or not {each.name for each in fields(Outcome)} <= set(summary):
        return None
    place = state_folder(folder, steps[-1]) / "dense"
    state = load_state(place, read_header(folder, steps[-1])["run"])
    is_over = (
        state["position"][0] >= num_epochs
        or (config.max_steps is not None and steps[-1] >= config.max_steps)
        or 0 < (config.patience or 0) <= state["best"]["num_since"]
    )
    return summary if is_over else None


@dataclass(slots=True)
class Taken:
    """What a warm start takes over, by name of tables and dense parameters."""

    folder: Path
    step: int
    tables: list[str]
    dense: list[str]
    new: list[str]
    dropped: list[str]
    anew: list[str] = field(default_factory=list)  # dense, for its towers are others
    without_state: list[str] = field(default_factory=list)  # weights only: another optimizer
    num_rows: int = 0  # taken over on this rank

    def __str__(self) -> str:
        lines = [
            f"warm start from {self.folder}@{self.step}: {len(self.dense)} dense parameters and the rows of "
            f"{len(self.tables)} tables ({self.num_rows:,} here)"
        ]
        for words, names in (
            ("new", self.new),
            ("not taken over", self.dropped),
            ("started anew, for towers or their modules are others", self.anew),
            ("weights without optimizer state", self.without_state),
        ):
            if names:
                lines.append(f"  {words}: {', '.join(names)}")
        return "\n".join(lines)


def plan_warm_start(
    model: nn.Module, tables: Sequence[Table], source: str, skip: Collection[str] = ()
) -> Taken:
    """What a model would take over from `source`: FOLDER, FOLDER@best, FOLDER@last or FOLDER@<step>.

    Tables and dense parameters of both models are taken over, those only here start at their first values, those
    only there are left. Where towers differ, so do the meaning and often the shape of what reads them: modules of
    other towers, weights that follow the order of the fields (`SplitModel.ordered`) and dense ones of other shapes
    start anew. Changes nothing. Raises CheckpointError where one has another width or shape and is not in
    `skip`; ConfigError for an unknown name there.
    """
    folder, step = parse_source(source)
    own_tables = {table.name: table for table in tables}
    said, own = read_checkpoint(folder, step)["model"], dense_weights(model)
    theirs = said["tables"]
    dense = _dense_state(folder, step)["model"]
    if unknown := sorted(set(skip) - {*theirs, *dense, *own_tables, *own}):
        raise ConfigError(
            f"train.warm_start_skip: {unknown[0]!r} is no table or dense parameter of either model"
        )
    shared = [n for n in own_tables if n in theirs and n not in skip]
    alike = [n for n in own if n in dense and n not in skip]
    anew = _of_other_towers(model, said.get("towers", {}), {n: dense[n] for n in alike})
    alike = [n for n in alike if n not in anew]
    _refuse_other_shapes(folder, own_tables, theirs, shared, own, dense, alike)
    used = {*shared, *alike, *anew}
    return Taken(
        folder,
        step,
        shared,
        alike,
        new=[n for n in (*own_tables, *own) if n not in used],
        dropped=[n for n in (*theirs, *dense) if n not in used],
        anew=anew,
    )


def warm_start(trainer: Trainer, taken: Taken) -> None:
    """Collective, before the first step: take over what was planned. Optimizer state comes along where the optimizer
    is the same; `taken` then says what came without."""
    dense = _dense_state(taken.folder, taken.step)
    weights = {name: dense["model"][name] for name in taken.dense}
    load_dense(trainer.model, {**dense_weights(trainer.model), **weights})
    _take_dense_state(trainer, dense, taken)
    header = read_header(taken.folder, taken.step)
    for table in trainer.collection.tables:
        if table.name in taken.tables:
            taken.num_rows += _take_rows(trainer, header, table, taken)


def _dense_state(folder: Path, step: int) -> dict[str, Any]:
    run = read_header(folder, step)["run"]
    return load_state(folder / "checkpoints" / f"{step:012d}" / "dense", run)


def parse_source(source: str) -> tuple[Path, int]:
    """(folder, saved step) of "FOLDER" or "FOLDER@best|last|<step>"."""
    folder, at, name = source.rpartition("@")
    if at and (name in ("best", "last") or name.isdigit()):
        return Path(folder), resolve(Path(folder), name)
    return Path(source), resolve(Path(source), None)


def _of_other_towers(
    model: nn.Module, theirs: Mapping[str, Any], dense: Mapping[str, Tensor]
) -> list[str]:
    """Of weights that both models have, by name: those that mean something else where towers differ."""
    (collection,) = (m for m in model.modules() if isinstance(m, EmbeddingCollection))
    towers = tower_words(collection.declaration)
    if towers == theirs:
        return []
    others = [f".interactions.{n}." for n, each in towers.items() if theirs.get(n) != each]
    ordered = getattr(model, "ordered", ())
    own = dense_weights(model)
    return [
        name
        for name, value in dense.items()
        if any(other in f".{name}" for other in others)
        or name.startswith(tuple(ordered))
        or value.shape != own[name].shape
    ]


def _refuse_other_shapes(
    folder: Path,
    tables: Mapping[str, Table],
    theirs: Mapping[str, Any],
    shared: list[str],
    own: Mapping[str, Tensor],
    dense: Mapping[str, Tensor],
    alike: list[str],
) -> None:
    problems = []
    for name in shared:
        dim = tables[name].dim
        wanted = dict(dim) if isinstance(dim, Mapping) else dim
        if theirs[name]["dim"] != wanted:
            problems.append((name, f"width {theirs[name]['dim']}", f"{wanted}"))
        hashed = _hashed(theirs[name].get("hashes"), theirs[name]["rows"])
        if hashed != (mine := _hashed(tables[name].hashes, tables[name].rows)):
            problems.append((name, hashed, mine))
    for name in alike:
        got, shape = tuple(dense[name].shape), tuple(own[name].shape)
        if got != shape:
            problems.append((name, f"shape {got}", f"{shape}"))
    if problems:
        said = "; ".join(f"{name} has {got} there, {here} here" for name, got, here in problems)
        raise CheckpointError(
            f"{folder} does not fit: {said}. To start these anew: "
            f"train.warm_start_skip={[name for name, _, _ in problems]}"
        )


def _hashed(hashes: int | None, rows: int | None) -> str:
    """How ids become rows: where that is another way, rows are other ids'."""
    return "ids as rows" if hashes is None else f"{hashes} hashes into {rows} rows"


def _take_dense_state(trainer: Trainer, dense: Mapping[str, Any], taken: Taken) -> None:
    """Optimizer state by parameter name, if the optimizer is of the same class."""
    optimizer = trainer.dense_optimizer
    if dense.get("dense_optimizer_name") != type(optimizer).__qualname__:
        taken.without_state.append("dense parameters")
        return
    theirs = {name: i for i, name in enumerate(dense["dense_parameters"])}
    state = optimizer.state_dict()
    for i, name in enumerate(parameter_names(trainer.model, optimizer)):
        there = dense["dense_optimizer"]["state"].get(theirs.get(name, -1))
        if name in taken.dense and there is not None:
            state["state"][i] = there
    optimizer.load_state_dict(state)


def _take_rows(trainer: Trainer, header: dict[str, Any], table: Table, taken: Taken) -> int:
    """Copy the rows this rank owns; returns how many."""
    collection = trainer.collection
    t = [each.name for each in collection.tables].index(table.name)
    theirs = header["model"]["tables"]
    dtype, num_taken = getattr(torch, theirs[table.name]["dtype"].split()[0]), 0
    stores = open_recorded_stores(taken.folder, header, list(theirs).index(table.name))
    whole = all(
        store.identity == identity_of(table) and store.record_bytes == table.record_bytes
        for store in stores
    )
    if not whole:
        taken.without_state.append(table.name)
    row_bytes = table.width * dtype.itemsize
    for store in stores:
        for rows in store.scan():
            here = torch.ones(len(rows.ids), dtype=torch.bool)
            if table.rows is not None:
                here = (rows.ids >= 0) & (rows.ids < table.rows)
            ids, records = rows.ids[here], rows.records[here]
            mine = torch.zeros(len(ids), dtype=torch.bool)
            for number in collection.slices.of_table[t]:
                mine |= collection.shards[number].owns(ids, table.rows)
            ids, records = ids[mine], records[mine]
            if not whole:
                weights = records[:, :row_bytes].contiguous().view(dtype)
                records = fresh_records(table, weights.reshape(len(ids), table.width))
            put_records(collection, t, ids, records)
            num_taken += len(ids)
        store.close()
    return num_taken
