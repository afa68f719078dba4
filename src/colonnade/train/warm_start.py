"""A new run that starts from another one's weights, where names and widths agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CheckpointError, ConfigError
from colonnade.table import Table
from colonnade.train.commits import (
    dense_weights,
    identity_of,
    load_dense,
    load_state,
    open_recorded_stores,
    parameter_names,
    read_header,
    resolve,
)
from colonnade.train.transfer import fresh_records, put_records

if TYPE_CHECKING:
    from colonnade.train.trainer import Trainer


@dataclass(slots=True)
class Taken:
    """What a warm start did, by name of tables and dense parameters."""

    source: str
    rows: dict[str, int] = field(default_factory=dict)  # by table, on this rank
    dense: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)  # weights only: another optimizer

    def __str__(self) -> str:
        lines = [
            f"warm start from {self.source}: {len(self.dense)} dense parameters and the rows of "
            f"{len(self.rows)} tables ({sum(self.rows.values()):,} here)"
        ]
        for words, names in (
            ("new", self.new),
            ("not taken over", self.dropped),
            ("weights without optimizer state", self.without_state),
        ):
            if names:
                lines.append(f"  {words}: {', '.join(names)}")
        return "\n".join(lines)


def warm_start(trainer: Trainer, source: str, skip: Collection[str] = ()) -> Taken:
    """Collective, on a run without steps. `source`: FOLDER, FOLDER@best, FOLDER@last or FOLDER@<step>.

    Tables and dense parameters of both models are taken over, those only here start at their first values, those
    only there are left. Optimizer state comes along where the optimizer is the same. Raises CheckpointError, with
    nothing changed, where one has another width or shape and is not in `skip`; ConfigError for an unknown name there.
    """
    folder, step = parse_source(source)
    header = read_header(folder, step)
    tables = {table.name: table for table in trainer.collection.tables}
    theirs, own = header["model"]["tables"], dense_weights(trainer.model)
    dense = load_state(folder / "commits" / f"{step:012d}" / "dense")
    their_names, own_names = {*theirs, *dense["model"]}, {*tables, *own}
    if unknown := sorted(set(skip) - their_names - own_names):
        raise ConfigError(
            f"train.warm_start_skip: {unknown[0]!r} is no table or dense parameter of either model"
        )
    shared = [n for n in tables if n in theirs and n not in skip]
    alike = [n for n in own if n in dense["model"] and n not in skip]
    _refuse_other_shapes(folder, tables, theirs, shared, own, dense["model"], alike)
    taken = Taken(f"{folder}@{step}", dense=alike)
    used = {*shared, *alike}
    taken.new = [n for n in (*tables, *own) if n not in used]
    taken.dropped = [n for n in (*theirs, *dense["model"]) if n not in used]
    load_dense(trainer.model, {**own, **{name: dense["model"][name] for name in alike}})
    _take_dense_state(trainer, dense, alike, taken)
    for name in shared:
        number = list(theirs).index(name)
        taken.rows[name] = _take_rows(trainer, folder, header, number, tables[name], taken)
    return taken


def parse_source(source: str) -> tuple[Path, int]:
    """(folder, committed step) of "FOLDER" or "FOLDER@best|last|<step>"."""
    folder, at, name = source.rpartition("@")
    if at and (name in ("best", "last") or name.isdigit()):
        return Path(folder), resolve(Path(folder), name)
    return Path(source), resolve(Path(source), None)


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


def _take_dense_state(
    trainer: Trainer, dense: Mapping[str, Any], alike: Collection[str], taken: Taken
) -> None:
    """Optimizer state by parameter name, if the optimizer is of the same class."""
    optimizer = trainer.dense_optimizer
    if dense.get("dense_optimizer_name") != type(optimizer).__qualname__:
        taken.without_state.append("dense parameters")
        return
    theirs = {name: i for i, name in enumerate(dense["dense_parameters"])}
    state = optimizer.state_dict()
    for i, name in enumerate(parameter_names(trainer.model, optimizer)):
        there = dense["dense_optimizer"]["state"].get(theirs.get(name, -1))
        if name in alike and there is not None:
            state["state"][i] = there
    optimizer.load_state_dict(state)


def _take_rows(
    trainer: Trainer,
    folder: Path,
    header: dict[str, Any],
    number: int,
    table: Table,
    taken: Taken,
) -> int:
    """Copy the rows this rank owns; returns how many."""
    collection, mesh = trainer.collection, trainer.mesh
    t = [each.name for each in collection.tables].index(table.name)
    said = list(header["model"]["tables"].values())[number]
    dtype, num_taken = getattr(torch, said["dtype"].split()[0]), 0
    stores = open_recorded_stores(folder, header, number)
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
            owner = _native.owner_of(ids, table.rows or 0, mesh.num_ranks)
            mine = torch.as_tensor(owner) == mesh.rank
            ids, records = ids[mine], records[mine]
            if not whole:
                weights = records[:, :row_bytes].contiguous().view(dtype)
                records = fresh_records(table, weights.reshape(len(ids), table.width))
            put_records(collection, t, ids, records)
            num_taken += len(ids)
        store.close()
    return num_taken
