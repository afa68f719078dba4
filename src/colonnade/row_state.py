"""Rows of a collection as tensors: in `state_dict()`, in the optimizer's `state_dict()`, in copies and in pickles.

Works only in a world of one rank with every row in memory; otherwise save rows to a folder (`checkpoint/`).
Keys for each table: rows.NAME.ids, rows.NAME.weights, ...; in addition `step` and `seed`.

Legend: N trained rows of a table, D its width, S scalars of optimizer state of a part.
"""

from __future__ import annotations

import warnings
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
from colonnade.lookup.layout import EmbeddingDeclaration
from colonnade.lookup.views import Slices
from colonnade.pipeline.pipeline import Pipeline, StepCounter
from colonnade.plan.plan import Plan
from colonnade.retention import CountMinAdmission
from colonnade.store.contract import Resident
from colonnade.store.policies import RowPolicy, RowRetention
from colonnade.store.records import (
    IdIndex,
    build_records_from_columns,
    byte_positions,
    clock_bytes,
    find_column_problems,
    find_id_problems,
    find_shape_problem,
    list_invalid_values,
    low_bytes,
    state_bytes,
    weight_bytes,
)
from colonnade.table import Part, Table

MAX_STATE_DICT_BYTES = 16 * 2**30
"""Default of `EmbeddingCollection.max_state_dict_bytes`: largest size of rows in a state_dict."""
CHUNK_BYTES = 1 << 20
"""Bytes of records that are copied at a time."""
RETENTION_DTYPES = {
    "ids": torch.int64,
    "steps": torch.int32,
    "values": torch.int32,
    "counters": torch.uint8,
    "counted_to": torch.int64,
}
"""Dtypes of the tensors that `RowRetention.state` may contain."""
USE_FOLDERS = (
    "save rows with collection.save(folder, step) and load them with collection.load(folder); "
    "colonnade.dense_state_dict(model) holds the rest of the model"
)


class DenseDestination(OrderedDict):
    """Destination of a `state_dict()` call that omits rows."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()  # torch stores modules' versions here


def dense_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return `model.state_dict()` without the rows of its collections; works in any world, at any size."""
    destination = DenseDestination()
    model.state_dict(destination=destination)
    state = OrderedDict(destination)  # a class that torch.load(weights_only=True) accepts
    state._metadata = destination._metadata  # type: ignore[attr-defined]
    return state


def load_dense_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state from `dense_state_dict`; no row changes. Raises CheckpointError if the keys differ."""
    rows = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, StatefulRows)
        for key in module.row_keys()
    }
    if row_keys := sorted(rows & set(state)):
        raise CheckpointError(
            f"load_dense_state_dict: got rows ({row_keys[0]}), wanted the dense weights alone; "
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
    """Base class of `EmbeddingCollection`: rows in state_dicts, copies, pickles and checkpoint folders."""

    max_state_dict_bytes: int = MAX_STATE_DICT_BYTES
    """Largest size of rows with optimizer state that a state_dict may contain; you can set it on a collection."""
    checkpoint: Any = None
    """Folder and step that the next `save` continues from (`checkpoint.collection.Checkpoint`)."""
    _states_loaded_at: int | None = None  # step at which optimizer state was loaded
    _lacks_optimizer_state: bool = False  # trained rows were loaded without theirs

    if TYPE_CHECKING:  # set by EmbeddingCollection
        declaration: EmbeddingDeclaration
        seed: int
        step: int
        mesh: Mesh
        plan: Plan
        slices: Slices
        store: Resident
        policies: dict[int, RowPolicy]
        pipeline: Pipeline
        _exported_rows: Any
        _loaded_state: dict[str, Any]
        _closed_names: frozenset[str]

        @property
        def is_open(self) -> bool: ...
        def open(self, plan: Plan | None = None, mesh: Mesh | None = None) -> Any: ...
        def ensure_open(self) -> None: ...

    # ---- checkpoint folders

    def save(self, folder: str | Path, step: int, *, optimizer: Any = None) -> None:
        """Write all rows with their optimizer state to a folder. Collective, between steps; any size, any world.

        A later save to the same folder writes only changes. The two newest steps are retained. `optimizer`: the
        RowOptimizer, to save its settings (learning rates) too; required for a plan with caches.
        Raises StorageError, and CheckpointError if the folder has saves that this collection does not continue from.
        """
        _import_checkpoint_folders().save_collection(self, Path(folder), step, optimizer)

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: Any = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
    ) -> int:
        """Open the collection with the rows that `save` wrote, on any number of ranks; return the step.

        Collective; replaces `open`. `step`: default the newest. `optimizer`: receives the saved settings. Rows that do
        not fit in the plan's memory remain in the folder, which no other collection may then use.
        Raises CheckpointError, CorruptionError.
        """
        return _import_checkpoint_folders().load_collection(
            self, Path(folder), step, optimizer, plan, mesh
        )

    def _open_in(
        self,
        folder: Path,
        plan: Plan | None,
        mesh: Mesh | None,
        policies: Mapping[str, RowPolicy] | None,
    ) -> Any:
        return _import_checkpoint_folders().open_collection_in_folder(
            self, folder, plan, mesh, policies
        )

    # ---- state_dict

    def row_keys(self) -> list[str]:
        """List the keys of rows in this module's state_dict, in order."""
        names = (
            f"rows.{table.name}.{column}"
            for table in self.declaration.tables
            for column in self._list_column_names(table)
        )
        return ["step", "seed", *names]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(destination, DenseDestination):
            return
        rows = self._copy_rows_to_state("state_dict()")
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
        row_state = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        dense_state = {
            key: value
            for key, value in state_dict.items()
            if not (key.startswith(prefix) and key[len(prefix) :] in row_state)
        }
        super()._load_from_state_dict(
            dense_state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys.extend(prefix + key for key in keys if key not in row_state)
        if not row_state:
            return
        tables, problems = self._read_table_columns(row_state)
        if problems:
            error_msgs.extend(
                f"{prefix.removesuffix('.') or 'rows'}: {problem}" for problem in problems
            )
            return
        seed = int(row_state["seed"])
        if self.is_open and seed != self.seed:
            raise CheckpointError(
                f"load_state_dict: got rows of a collection with seed {seed}, this one is open with seed {self.seed}, "
                f"so rows never trained would differ; load before the first batch, or build it with seed={seed}"
            )
        self.seed = seed
        self._store_or_defer_state(
            "rows", {"step": int(row_state["step"]), "seed": seed, "tables": tables}
        )

    def _read_table_columns(
        self, row_state: Mapping[str, Tensor]
    ) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        """Return the columns of each table in a state_dict, and problems with them. Tables without keys are omitted."""
        problems = [
            f"got rows without the key {key!r}; give the whole state_dict, or no key of rows"
            for key in ("step", "seed")
            if key not in row_state
        ]
        problems += list_invalid_values(row_state)
        if problems:
            return {}, problems
        tables: dict[str, dict[str, Tensor]] = {}
        for table in self.declaration.tables:
            wanted = self._list_column_names(table)
            columns = {
                column: row_state[key]
                for column in wanted
                if (key := f"rows.{table.name}.{column}") in row_state
            }
            if len(columns) == len(wanted):
                problems += find_column_problems(table, columns)
                tables[table.name] = columns
            elif columns:
                missing = [f"rows.{table.name}.{name}" for name in wanted if name not in columns]
                problems.append(
                    f"table {table.name!r}: got part of its keys, without {', '.join(missing)}; give all or none"
                )
        return tables, problems

    def _list_column_names(self, table: Table) -> list[str]:
        """Return the names of the columns that a state_dict contains for a table."""
        columns = ["ids", "weights", *["low_halves"] * table.master, "clocks"]
        retention = ["ids", "steps", "values"] if table.eviction is not None else []
        has_sketch = isinstance(table.admission, CountMinAdmission)
        retention += ["counters", "counted_to"] if has_sketch else []
        return columns + [f"retention_{name}" for name in retention]

    def _copy_rows_to_state(self, operation: str) -> dict[str, Any]:
        """Copy weights, clocks and the state of admission and eviction policies of each table."""
        self._apply_loaded_state()
        if self.is_open:
            self._check_in_memory(operation)
            self.pipeline.updates.apply_pending()
        tables = {}
        for t, table in enumerate(self.declaration.tables):
            byte_ranges = [weight_bytes(table), low_bytes(table), clock_bytes(table)]
            ids, (weights, low, clocks) = self._copy_row_columns(t, byte_ranges)
            columns = {"ids": ids, "weights": weights.view(getattr(torch, table.dtype))}
            if table.master:
                columns["low_halves"] = low.view(torch.int16)
            columns["clocks"] = clocks.view(torch.int64).flatten()
            columns |= self._copy_retention_state(t, table)
            tables[table.name] = columns
        return {"step": self.step, "seed": self.seed, "tables": tables}

    def _copy_retention_state(self, table_index: int, table: Table) -> dict[str, Tensor]:
        if table.admission is None and table.eviction is None:
            return {}
        policy = self.policies[table_index] if self.is_open else RowRetention(table, seed=self.seed)
        assert isinstance(policy, RowRetention)
        state = policy.state()
        columns = {
            name: torch.cat([torch.empty(0, dtype=dtype), *state[name]])
            for name, dtype in RETENTION_DTYPES.items()
            if name in state
        }
        if "ids" in columns:
            columns["ids"], order = columns["ids"].sort()
            columns |= {name: columns[name][order] for name in ("steps", "values")}
        return {f"retention_{name}": values for name, values in columns.items()}

    def _copy_row_columns(
        self, table_index: int, byte_ranges: Sequence[slice]
    ) -> tuple[Tensor, list[Tensor]]:
        """Copy the ids (N,) of trained rows, and these byte ranges of their records, (N, bytes) uint8 each.

        Makes two passes, so that each tensor is allocated once, at its final size.
        """
        count = sum(len(ids) for ids, _ in self._scan_records(table_index))
        all_ids = torch.empty(count, dtype=torch.int64)
        columns = [torch.empty(count, b.stop - b.start, dtype=torch.uint8) for b in byte_ranges]
        first = 0
        for ids, records in self._scan_records(table_index):
            chunk = slice(first, first + len(ids))
            all_ids[chunk] = ids
            for column, byte_range in zip(columns, byte_ranges, strict=True):
                column[chunk] = records[:, byte_range]
            first += len(ids)
        return all_ids, columns

    def _scan_records(self, t: int) -> Any:
        """Yield ids and records of table t's trained rows, one chunk at a time."""
        return self.store.scan(t, self._rows_per_chunk(t)) if self.is_open else ()

    def _rows_per_chunk(self, t: int) -> int:
        """Return the number of rows of table t that are copied at a time."""
        return max(1, CHUNK_BYTES // self.declaration.tables[t].record_bytes)

    # ---- RowOptimizer.state_dict

    def optimizer_states(self) -> dict[int, dict[str, Tensor]]:
        """Return ids (N,) and state (N, S) of rows by param group of RowOptimizer, without groups that have no
        state."""
        self._apply_loaded_state()
        if self.is_open:
            self._check_in_memory("RowOptimizer.state_dict()")
            self.pipeline.updates.apply_pending()
        states: dict[int, dict[str, Tensor]] = {}
        for t, table in enumerate(self.declaration.tables):
            groups = self._list_parts_by_group(t)
            if not groups:
                continue
            byte_ranges = [state_bytes(table, part) for part in groups.values()]
            ids, columns = self._copy_row_columns(t, byte_ranges)
            dtype = getattr(torch, table.compute_dtype)
            for group, column in zip(groups, columns, strict=True):
                states[group] = {"ids": ids, "state": column.view(dtype)}
        return states

    def load_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load the result of `optimizer_states`. Raises CheckpointError, and changes nothing, for state of other rows,
        widths or groups."""
        wanted = {
            group: (table, part)
            for t, table in enumerate(self.declaration.tables)
            for group, part in self._list_parts_by_group(t).items()
        }
        if set(states) != set(wanted):
            raise CheckpointError(
                f"RowOptimizer: got state of param groups {sorted(states)}, wanted {sorted(wanted)}; it was saved "
                "without its rows, or with other tables or optimizers"
            )
        for group, (table, part) in wanted.items():
            columns = states[group]
            if set(columns) != {"ids", "state"}:
                raise CheckpointError(
                    f"RowOptimizer: got {sorted(columns)} of table {table.name!r}, wanted ids and state"
                )
            width = part.optimizer.state_floats(part.dim)
            dtype = getattr(torch, table.compute_dtype)
            problems = find_id_problems(table, columns["ids"])
            problems += find_shape_problem(
                table, "state", columns["state"], (len(columns["ids"]), width), dtype
            )
            if problems:
                raise CheckpointError(f"RowOptimizer: {problems[0]}")
        self._store_or_defer_state(
            "states", {group: dict(columns) for group, columns in states.items()}
        )

    def _list_parts_by_group(self, table_index: int) -> dict[int, Part]:
        """Return the parts of table t that have optimizer state, by param group."""
        return {
            group: part
            for group, (table, part) in enumerate(self.declaration.parts)
            if table == table_index and part.optimizer.state_floats(part.dim)
        }

    # ---- loading

    def _store_or_defer_state(self, state_kind: str, loaded_state: Any) -> None:
        """Store loaded rows or optimizer states; if the collection is not open yet, defer this to `open`."""
        if not self.is_open:
            self._loaded_state[state_kind] = loaded_state
            return
        self._check_in_memory("load_state_dict()")
        self._store_state(state_kind, loaded_state)

    def _apply_loaded_state(self) -> None:
        if self._exported_rows is not None:
            raise CheckpointError(
                f"got a collection that serves exported rows, wanted one with rows of its own; {USE_FOLDERS}"
            )
        if self._loaded_state:
            self.ensure_open()

    def _refuse_two_row_sources(self, plan: Plan, mesh: Mesh, step: int | None) -> None:
        """Check, before opening, that loaded rows can be stored. Raises CheckpointError."""
        if self._loaded_state and step is not None:
            raise CheckpointError(
                f"got a state_dict that was loaded, and a folder whose rows are those of step {step}; "
                "load one of them"
            )
        if self._loaded_state:
            _check_plan_in_memory("load_state_dict()", plan, mesh)

    def _store_loaded_state(self) -> None:
        """Store the state that was loaded before opening, rows first."""
        state = self._loaded_state
        self._loaded_state = {}
        for kind in ("rows", "states"):
            if kind in state:
                self._store_state(kind, state.pop(kind))

    def _store_state(self, state_kind: str, loaded_state: Any) -> None:
        self.pipeline.updates.apply_pending()
        if state_kind == "states":
            self._store_optimizer_states(loaded_state)
            return
        for t, table in enumerate(self.declaration.tables):
            if table.name in loaded_state["tables"]:
                self._replace_table_rows(t, table, loaded_state["tables"][table.name])
        self.step = loaded_state["step"]

    def warn_of_missing_optimizer_state(self) -> None:
        """Warn, before the first step, of trained rows that were loaded without their optimizer's state."""
        if self._lacks_optimizer_state:
            self._lacks_optimizer_state = False
            warnings.warn(
                f"got trained rows of step {self.step} and no optimizer state for them, so that accumulators and "
                "moments begin anew; load the state that was saved with them, rows.load_state_dict(...), after the "
                "model's. Nothing to do if the optimizer is meant to begin anew",
                stacklevel=5,
            )

    def _replace_table_rows(
        self, table_index: int, table: Table, columns: Mapping[str, Tensor]
    ) -> None:
        """Replace the rows of table t by these. Rows that existed before keep their optimizer state, as in torch."""
        ids = columns["ids"]
        is_new = torch.ones(len(columns["ids"]), dtype=torch.bool)
        index = IdIndex(ids)
        for old_ids, old in self._scan_records(table_index):
            position, is_known = index.find(old_ids)
            self.store.delete(table_index, old_ids[~is_known].contiguous())
            position = position[is_known]
            is_new[position] = False
            records = build_records_from_columns(table, columns, position)
            old = old[is_known]
            # FTRL computes weights from its state, so where weights change its state restarts from them.
            is_same = (old[:, weight_bytes(table)] == records[:, weight_bytes(table)]).all(dim=1)
            is_same |= self._states_loaded_at == self.step
            for part in table.parts:
                rows = is_same if part.optimizer.name == "ftrl" else slice(None)
                state = state_bytes(table, part)
                records[rows, state] = old[rows, state]
            self._store_records(table_index, ids[position], records)
        for chunk in is_new.nonzero().flatten().split(self._rows_per_chunk(table_index)):
            self._store_records(
                table_index, ids[chunk], build_records_from_columns(table, columns, chunk)
            )
            self._lacks_optimizer_state |= bool(self._list_parts_by_group(table_index))
        policy = self.policies.get(table_index)
        if isinstance(policy, RowRetention):
            retention = {
                name.removeprefix("retention_"): [values]
                for name, values in columns.items()
                if name.startswith("retention_")
            }
            policy.restore([retention])

    def _store_optimizer_states(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        for t, table in enumerate(self.declaration.tables):
            for group, part in self._list_parts_by_group(t).items():
                ids = states[group]["ids"]
                values = byte_positions(states[group]["state"])
                num_present = 0
                index = IdIndex(ids)
                for old_ids, _ in self._scan_records(t):
                    num_present += int(index.find(old_ids)[1].sum())
                if num_present != len(ids):
                    raise CheckpointError(
                        f"RowOptimizer: got state of {len(ids):,} rows of table {table.name!r}, of which the "
                        f"collection has {num_present:,}; load the model's state_dict first, and of the same step"
                    )
                state = state_bytes(table, part)
                for old_ids, records in self._scan_records(t):
                    position, is_known = index.find(old_ids)
                    records = records[is_known].contiguous()
                    records[:, state] = values[position[is_known]]
                    self._store_records(t, old_ids[is_known].contiguous(), records)
        self._states_loaded_at = self.step
        self._lacks_optimizer_state = False

    def _store_records(self, t: int, ids: Tensor, records: Tensor) -> None:
        if len(ids):
            self.store.write_rows(t, ids.contiguous(), records)

    def _check_in_memory(self, operation: str) -> None:
        """Check that all rows are in this process's memory, within `max_state_dict_bytes`. Raises CheckpointError."""
        _check_plan_in_memory(operation, self.plan, self.mesh)
        backings = self.store.backings
        size = sum(
            max(self.store.num_rows(t), len(backings[t]) if backings else 0) * table.record_bytes
            for t, table in enumerate(self.declaration.tables)
        )
        if size > self.max_state_dict_bytes:
            raise CheckpointError(
                f"{operation}: got {size:,} bytes of rows, wanted at most collection.max_state_dict_bytes = "
                f"{self.max_state_dict_bytes:,}; {USE_FOLDERS}"
            )

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        if self._exported_rows is not None:
            raise ConfigError(
                "got a collection that serves exported rows, which cannot be copied or pickled; open the export again"
            )
        if not self.is_open:
            return dict(self.__dict__)
        custom = [t for t, policy in self.policies.items() if not isinstance(policy, RowRetention)]
        if custom:
            raise ConfigError(
                f"table {self.declaration.tables[custom[0]].name!r}: got a policy of your own, which cannot be copied "
                "or pickled with its rows; copy the collection before it is opened"
            )
        row_state = {
            "rows": self._copy_rows_to_state("a copy or pickle"),
            "states": self.optimizer_states(),
        }
        state = {name: self.__dict__[name] for name in self._closed_names}
        return {
            **state,
            "steps": StepCounter(self.step),  # a copy has its own counter
            "_opened": False,
            "_loaded_state": row_state,
            "_plan": self.plan,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state.pop("_plan", None)
        super().__setstate__(state)
        if plan is not None:
            self.open(plan)


def _check_plan_in_memory(operation: str, plan: Plan, mesh: Mesh) -> None:
    """Check that the plan stores every row in this process's memory. Raises CheckpointError."""
    if mesh.num_ranks > 1:
        problem = f"rows on {mesh.num_ranks} ranks"
    elif plan.needs_backing:
        problem = "a memory budget that does not hold every row"
    else:
        return
    raise CheckpointError(
        f"{operation}: got {problem}, wanted all rows in this process's memory; {USE_FOLDERS}"
    )


def _import_checkpoint_folders() -> ModuleType:
    """Import the module of checkpoint folders by name, because it is two layers above this one."""
    return import_module("colonnade.checkpoint.collection")
