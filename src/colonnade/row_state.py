"""Rows of a collection as tensors: in `state_dict()`, in the optimizer's, in copies and in pickles.

Possible in a world of one rank whose memory holds every row; otherwise rows are saved to a folder
(`train.checkpoint`). Keys, by table: rows.NAME.ids, rows.NAME.weights, ...; beside them `step` and `seed`.

Legend: N trained rows of a table, D its width, S scalars of optimizer state of a part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colonnade.comm.mesh import Mesh
from colonnade.errors import CheckpointError, ConfigError
from colonnade.lookup.layout import Declaration
from colonnade.lookup.views import Slices
from colonnade.pipeline.pipeline import Pipeline, StepCounter
from colonnade.plan.plan import Plan
from colonnade.retention import CountMinAdmission
from colonnade.store.dram import DramStore
from colonnade.store.hbm import HbmStore
from colonnade.store.policies import RowPolicy, RowRetention
from colonnade.store.records import (
    Index,
    bytes_of,
    check_ids,
    check_shape,
    clock_bytes,
    find_misfits,
    find_problems,
    low_bytes,
    records_of,
    state_bytes,
    weight_bytes,
)
from colonnade.table import Part, Table

MAX_STATE_DICT_BYTES = 16 * 2**30
"""Largest size of rows in a state_dict: default of `EmbeddingCollection.max_state_dict_bytes`."""
RUN_BYTES = 1 << 20
"""Size of records that are copied at a time."""
RETENTION = {
    "ids": torch.int64,
    "steps": torch.int32,
    "values": torch.int32,
    "counters": torch.uint8,
    "counted_to": torch.int64,
}
"""What `RowRetention.state` may hold."""
OTHER_WAY = (
    "save rows with collection.save(folder, step) and load them with collection.load(folder); "
    "colonnade.dense_state_dict(model) holds the rest of the model"
)


class DenseDestination(OrderedDict):
    """Destination of a `state_dict()` that leaves rows out."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()  # torch keeps modules' versions in it


def dense_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return `model.state_dict()` without the rows of its collections: small in any world, at any size."""
    destination = DenseDestination()
    model.state_dict(destination=destination)
    state = OrderedDict(destination)  # a class of torch's own list, which weights_only=True loads
    state._metadata = destination._metadata  # type: ignore[attr-defined]
    return state


def load_dense_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `dense_state_dict` returned; no row changes. Raises CheckpointError unless the keys are the same."""
    rows = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, StatefulRows)
        for key in module.row_keys()
    }
    if given := sorted(rows & set(state)):
        raise CheckpointError(
            f"load_dense_state_dict: got rows ({given[0]}), wanted the dense weights alone; "
            "load a whole state with model.load_state_dict"
        )
    result = model.load_state_dict(state, strict=False)
    missing = [key for key in result.missing_keys if key not in rows]
    if missing or result.unexpected_keys:
        raise CheckpointError(
            f"load_dense_state_dict: got the state of another model: missing {missing or 'nothing'}, "
            f"unexpected {result.unexpected_keys or 'nothing'}; build the same model"
        )


class StatefulRows(nn.Module):
    """Base of `EmbeddingCollection`: its rows in state_dicts, copies, pickles and checkpoint folders."""

    max_state_dict_bytes: int = MAX_STATE_DICT_BYTES
    """Size of rows with their optimizer state up to which they go into a state_dict; set it on a collection."""
    checkpoint: Any = None
    """Folder and step that `save` goes on from (`train.checkpoint.Checkpoint`)."""
    _states_loaded_at: int | None = None  # step at which optimizer state was loaded

    if TYPE_CHECKING:  # set by EmbeddingCollection
        declaration: Declaration
        seed: int
        step: int
        mesh: Mesh
        plan: Plan
        slices: Slices
        store: DramStore | HbmStore
        policies: dict[int, RowPolicy]
        pipeline: Pipeline
        _served: Any
        _waiting: dict[str, Any]
        _closed_names: frozenset[str]

        @property
        def is_open(self) -> bool: ...
        def open(self, plan: Plan | None = None, mesh: Mesh | None = None) -> Any: ...
        def ensure_open(self) -> None: ...

    # ---- checkpoint folders

    def save(self, folder: str | Path, step: int, *, optimizer: Any = None) -> None:
        """Collective, between steps: write all rows, with optimizer state, to a folder; any size, any world.

        A later save to the same folder writes what has changed since. The two newest steps stay. `optimizer`: the
        RowOptimizer, whose settings (learning rates) are then saved too; a plan with caches needs it.
        Raises CheckpointError where the folder has saves that this collection does not go on from, StorageError.
        """
        _folders().save(self, Path(folder), step, optimizer)

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: Any = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
    ) -> int:
        """Collective, instead of `open`: open with the rows that `save` wrote, on any number of ranks; return the step.

        `step`: default the newest. `optimizer`: takes over saved settings. Rows that the plan's memory does not hold
        stay in the folder, which is then this collection's alone. Raises CheckpointError, CorruptionError.
        """
        return _folders().load(self, Path(folder), step, optimizer, plan, mesh)

    def _open_in(
        self,
        folder: Path,
        plan: Plan | None,
        mesh: Mesh | None,
        policies: Mapping[str, RowPolicy] | None,
    ) -> Any:
        return _folders().open_in(self, folder, plan, mesh, policies)

    # ---- state_dict

    def row_keys(self) -> list[str]:
        """List the keys of rows in this module's state_dict, in order."""
        names = (
            f"rows.{table.name}.{column}"
            for table in self.declaration.tables
            for column in self._columns_of(table)
        )
        return ["step", "seed", *names]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(destination, DenseDestination):
            return
        rows = self._collect_rows("state_dict()")
        destination[prefix + "step"] = torch.tensor(rows["step"])
        destination[prefix + "seed"] = torch.tensor(rows["seed"])
        for name, columns in rows["tables"].items():
            for column, values in columns.items():
                destination[f"{prefix}rows.{name}.{column}"] = values

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = self.row_keys()
        given = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        others = {
            key: value
            for key, value in state_dict.items()
            if not (key.startswith(prefix) and key[len(prefix) :] in given)
        }
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys.extend(prefix + key for key in keys if key not in given)
        if not given:
            return
        tables, problems = self._read_rows(given)
        if problems:
            error_msgs.extend(f"{prefix.removesuffix('.') or 'rows'}: {each}" for each in problems)
            return
        seed = int(given["seed"])
        if self.is_open and seed != self.seed:
            raise CheckpointError(
                f"load_state_dict: got rows of a collection with seed {seed}, this one is open with seed {self.seed}, "
                f"so rows never trained would differ; load before the first batch, or build it with seed={seed}"
            )
        self.seed = seed
        self._receive("rows", {"step": int(given["step"]), "seed": seed, "tables": tables})

    def _read_rows(
        self, given: Mapping[str, Tensor]
    ) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        """Columns by table, and what is wrong with them. A table none of whose keys are given is left out."""
        problems = [
            f"got rows without the key {key!r}; give the whole state_dict, or no key of rows"
            for key in ("step", "seed")
            if key not in given
        ]
        problems += find_misfits(given)
        if problems:
            return {}, problems
        tables: dict[str, dict[str, Tensor]] = {}
        for table in self.declaration.tables:
            wanted = self._columns_of(table)
            columns = {
                column: given[key]
                for column in wanted
                if (key := f"rows.{table.name}.{column}") in given
            }
            if len(columns) == len(wanted):
                problems += find_problems(table, columns)
                tables[table.name] = columns
            elif columns:
                lacking = [f"rows.{table.name}.{each}" for each in wanted if each not in columns]
                problems.append(
                    f"table {table.name!r}: got part of its keys, without {', '.join(lacking)}; give all or none"
                )
        return tables, problems

    def _columns_of(self, table: Table) -> list[str]:
        """Name what a state_dict holds of a table."""
        columns = ["ids", "weights", *["low_halves"] * table.master, "clocks"]
        order = ["ids", "steps", "values"] if table.eviction is not None else []
        sketch = isinstance(table.admission, CountMinAdmission)
        order += ["counters", "counted_to"] if sketch else []
        return columns + [f"retention_{name}" for name in order]

    def _collect_rows(self, channel: str) -> dict[str, Any]:
        """Copy weights, clocks and the memory of admission and eviction, by table."""
        self._ensure_received()
        if self.is_open:
            self._check_in_memory(channel)
            self.pipeline.updates.settle()
        tables = {}
        for t, table in enumerate(self.declaration.tables):
            places = [weight_bytes(table), low_bytes(table), clock_bytes(table)]
            ids, (weights, low, clocks) = self._copy_columns(t, places)
            columns = {"ids": ids, "weights": weights.view(getattr(torch, table.dtype))}
            if table.master:
                columns["low_halves"] = low.view(torch.int16)
            columns["clocks"] = clocks.view(torch.int64).flatten()
            columns |= self._collect_retention(t, table)
            tables[table.name] = columns
        return {"step": self.step, "seed": self.seed, "tables": tables}

    def _collect_retention(self, t: int, table: Table) -> dict[str, Tensor]:
        if table.admission is None and table.eviction is None:
            return {}
        policy = self.policies[t] if self.is_open else RowRetention(table, seed=self.seed)
        assert isinstance(policy, RowRetention)
        state = policy.state()
        found = {
            name: torch.cat([torch.empty(0, dtype=dtype), *state[name]])
            for name, dtype in RETENTION.items()
            if name in state
        }
        if "ids" in found:
            found["ids"], order = found["ids"].sort()
            found |= {name: found[name][order] for name in ("steps", "values")}
        return {f"retention_{name}": values for name, values in found.items()}

    def _copy_columns(self, t: int, places: Sequence[slice]) -> tuple[Tensor, list[Tensor]]:
        """ids (N,) of trained rows, and these bytes of their records, (N, bytes) uint8 each.

        Two passes, so that each tensor is allocated once, at its final size.
        """
        count = sum(len(ids) for ids, _ in self._scan(t))
        found = torch.empty(count, dtype=torch.int64)
        columns = [torch.empty(count, p.stop - p.start, dtype=torch.uint8) for p in places]
        first = 0
        for ids, records in self._scan(t):
            run = slice(first, first + len(ids))
            found[run] = ids
            for column, place in zip(columns, places, strict=True):
                column[run] = records[:, place]
            first += len(ids)
        return found, columns

    def _scan(self, t: int) -> Any:
        """Yield ids and records of table t's trained rows, some at a time."""
        return self.store.scan(t, self._run_of(t)) if self.is_open else ()

    def _run_of(self, t: int) -> int:
        """Count the rows that are copied at a time."""
        return max(1, RUN_BYTES // self.declaration.tables[t].record_bytes)

    # ---- RowOptimizer.state_dict

    def optimizer_states(self) -> dict[int, dict[str, Tensor]]:
        """By param group of RowOptimizer: ids (N,) and state (N, S) of rows; groups without state are left out."""
        self._ensure_received()
        if self.is_open:
            self._check_in_memory("RowOptimizer.state_dict()")
            self.pipeline.updates.settle()
        states: dict[int, dict[str, Tensor]] = {}
        for t, table in enumerate(self.declaration.tables):
            groups = self._groups_of(t)
            if not groups:
                continue
            places = [state_bytes(table, part) for part in groups.values()]
            ids, columns = self._copy_columns(t, places)
            compute = getattr(torch, table.compute_dtype)
            for number, column in zip(groups, columns, strict=True):
                states[number] = {"ids": ids, "state": column.view(compute)}
        return states

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take `optimizer_states` back. Raises CheckpointError, with nothing changed, for state of other rows, widths
        or groups."""
        wanted = {
            number: (table, part)
            for t, table in enumerate(self.declaration.tables)
            for number, part in self._groups_of(t).items()
        }
        if set(states) != set(wanted):
            raise CheckpointError(
                f"RowOptimizer: got state of param groups {sorted(states)}, wanted {sorted(wanted)}; it was saved "
                "without its rows, or with other tables or optimizers"
            )
        for number, (table, part) in wanted.items():
            columns = states[number]
            if set(columns) != {"ids", "state"}:
                raise CheckpointError(
                    f"RowOptimizer: got {sorted(columns)} of table {table.name!r}, wanted ids and state"
                )
            width, dtype = (
                part.optimizer.state_floats(part.dim),
                getattr(torch, table.compute_dtype),
            )
            problems = check_ids(table, columns["ids"])
            problems += check_shape(
                table, "state", columns["state"], (len(columns["ids"]), width), dtype
            )
            if problems:
                raise CheckpointError(f"RowOptimizer: {problems[0]}")
        self._receive("states", {number: dict(columns) for number, columns in states.items()})

    def _groups_of(self, t: int) -> dict[int, Part]:
        """Parts of table t that have optimizer state, by their param group."""
        return {
            number: part
            for number, (table, part) in enumerate(self.declaration.parts)
            if table == t and part.optimizer.state_floats(part.dim)
        }

    # ---- loading

    def _receive(self, kind: str, state: Any) -> None:
        """Put rows or states in place; before the collection is open, keep them until it is."""
        if not self.is_open:
            self._waiting[kind] = state
            return
        self._check_in_memory("load_state_dict()")
        self._put(kind, state)

    def _ensure_received(self) -> None:
        if self._served is not None:
            raise CheckpointError(
                f"got a collection that serves exported rows, wanted one with rows of its own; {OTHER_WAY}"
            )
        if self._waiting:
            self.ensure_open()

    def _check_waiting(self, plan: Plan, mesh: Mesh, step: int | None) -> None:
        """Before opening: raise CheckpointError where loaded rows cannot be put."""
        if self._waiting and step is not None:
            raise CheckpointError(
                f"got a state_dict that was loaded, and a folder whose rows are those of step {step}; "
                "load one of them"
            )
        if self._waiting:
            _check_plan("load_state_dict()", plan, mesh)

    def _put_waiting(self) -> None:
        """Just opened: put what was loaded before, rows first."""
        waiting, self._waiting = self._waiting, {}
        for kind in ("rows", "states"):
            if kind in waiting:
                self._put(kind, waiting.pop(kind))

    def _put(self, kind: str, state: Any) -> None:
        self.pipeline.updates.settle()
        if kind == "states":
            self._put_states(state)
            return
        for t, table in enumerate(self.declaration.tables):
            if table.name in state["tables"]:
                self._put_rows(t, table, state["tables"][table.name])
        self.step = state["step"]

    def _put_rows(self, t: int, table: Table, columns: Mapping[str, Tensor]) -> None:
        """Make table t hold these rows and no others. Rows that were there keep their optimizer state, as in torch."""
        ids, new = columns["ids"], torch.ones(len(columns["ids"]), dtype=torch.bool)
        index = Index(ids)
        for old_ids, old in self._scan(t):
            position, is_known = index.find(old_ids)
            self.store.delete(t, old_ids[~is_known].contiguous())
            position = position[is_known]
            new[position] = False
            records, old = records_of(table, columns, position), old[is_known]
            # FTRL's weights follow from its state: where they change, its state starts anew with them.
            is_same = (old[:, weight_bytes(table)] == records[:, weight_bytes(table)]).all(dim=1)
            is_same |= self._states_loaded_at == self.step
            for part in table.parts:
                rows = is_same if part.optimizer.name == "ftrl" else slice(None)
                place = state_bytes(table, part)
                records[rows, place] = old[rows, place]
            self._put_run(t, ids[position], records)
        for some in new.nonzero().flatten().split(self._run_of(t)):
            self._put_run(t, ids[some], records_of(table, columns, some))
        policy = self.policies.get(t)
        if isinstance(policy, RowRetention):
            retention = {
                name.removeprefix("retention_"): [values]
                for name, values in columns.items()
                if name.startswith("retention_")
            }
            policy.restore([retention])

    def _put_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        for t, table in enumerate(self.declaration.tables):
            for number, part in self._groups_of(t).items():
                ids, values = states[number]["ids"], bytes_of(states[number]["state"])
                known, index = 0, Index(ids)
                for old_ids, _ in self._scan(t):
                    known += int(index.find(old_ids)[1].sum())
                if known != len(ids):
                    raise CheckpointError(
                        f"RowOptimizer: got state of {len(ids):,} rows of table {table.name!r}, of which the "
                        f"collection has {known:,}; load the model's state_dict first, and of the same step"
                    )
                place = state_bytes(table, part)
                for old_ids, records in self._scan(t):
                    position, is_known = index.find(old_ids)
                    records = records[is_known].contiguous()
                    records[:, place] = values[position[is_known]]
                    self._put_run(t, old_ids[is_known].contiguous(), records)
        self._states_loaded_at = self.step

    def _put_run(self, t: int, ids: Tensor, records: Tensor) -> None:
        if len(ids):
            self.store.put(t, ids.contiguous(), records)

    def _check_in_memory(self, channel: str) -> None:
        """Raise CheckpointError unless every row is in this process's memory, and below `max_state_dict_bytes`."""
        _check_plan(channel, self.plan, self.mesh)
        backings = self.store.backings
        size = sum(
            max(self.store.num_rows(t), len(backings[t]) if backings else 0) * table.record_bytes
            for t, table in enumerate(self.declaration.tables)
        )
        if size > self.max_state_dict_bytes:
            raise CheckpointError(
                f"{channel}: got {size:,} bytes of rows, wanted at most collection.max_state_dict_bytes = "
                f"{self.max_state_dict_bytes:,}; {OTHER_WAY}"
            )

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if self._served is not None:
            raise ConfigError(
                "got a collection that serves exported rows, which cannot be copied or pickled; open the export again"
            )
        if not self.is_open:
            return dict(self.__dict__)
        own = [t for t, policy in self.policies.items() if not isinstance(policy, RowRetention)]
        if own:
            raise ConfigError(
                f"table {self.declaration.tables[own[0]].name!r}: got a policy of your own, which cannot be copied or "
                "pickled with its rows; copy the collection before it is opened"
            )
        waiting = {
            "rows": self._collect_rows("a copy or pickle"),
            "states": self.optimizer_states(),
        }
        state = {name: self.__dict__[name] for name in self._closed_names}
        return {
            **state,
            "steps": StepCounter(self.step),  # a copy counts its own
            "_opened": False,
            "_waiting": waiting,
            "_plan": self.plan,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state.pop("_plan", None)
        super().__setstate__(state)
        if plan is not None:
            self.open(plan)


def _check_plan(channel: str, plan: Plan, mesh: Mesh) -> None:
    """Raise CheckpointError unless the plan keeps every row in this process's memory."""
    if mesh.num_ranks > 1:
        problem = f"rows on {mesh.num_ranks} ranks"
    elif plan.needs_backing:
        problem = "a memory budget that does not hold every row"
    else:
        return
    raise CheckpointError(
        f"{channel}: got {problem}, wanted all rows in this process's memory; {OTHER_WAY}"
    )


def _folders() -> ModuleType:
    """Load the code of checkpoint folders by name: it is built on collections, two layers above."""
    return import_module("colonnade.checkpoint.collection")
