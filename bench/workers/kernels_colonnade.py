"""Colonnade's core, called as `exchange.rows` calls it on one process; the only file of the bench that names it.

Systems of this worker:

    colonnade   vocabulary tables. A step makes `Lookups` (with its checks) and the plan (plan); acquires the rows,
                lays slots out by lookup, releases the rows (slots); pools (forward); updates (rows). Nothing is
                prepared before the clock starts. Outputs and gradients lie in memory that the worker keeps; autograd
                and `EmbeddingCollection` are not in these figures: `api` has them.
    open        the same with open tables that hold the same ids
    roofline    roofline.cc on the rows and plans of `colonnade`, plans made before the clock starts
    api         EmbeddingCollection over open tables, lookahead, one gradient through backward, RowOptimizer.step

Every row of every table is born before anything is measured.

Legend: T tables, F features, B samples, E lookups, U unique rows, D dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

import colonnade
from colonnade import Batch, EmbeddingCollection, Feature, Ids, RowOptimizer, Table, _native
from colonnade.interaction import Concat
from workers.kernels_loop import EPS, SCALE, Step, System, gradient_of, serve
from workers.loop import Laps
from workers.roofline import (
    GATHER_SETTINGS,
    UPDATE_SETTINGS,
    Lookup,
    Roofline,
    Rows,
    Task,
    sweep,
)
from workers.workload import NUM_FEATURES, Tables, Workload

OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "RowWiseAdagrad", "adagrad": "Adagrad"}
NUM_SETTINGS = 16
LR_COLUMN, EPS_COLUMN, SCALE_COLUMN = 0, 2, 12
UNUSED_LIMITS = slice(9, 12)  # max_norm, clip_value, weight_bound
SUM, SEQUENCE = 0, 2
FILL_ROWS = 1 << 16
"""Rows of each table that one call brings to life."""
NUM_PLANNED = 8
"""Batches that the sweep of the roofline goes round."""
FLOAT = "float32"


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Outputs:
    """Memory for a workload's outputs or their gradients, laid out as `gradient_of` says."""

    def __init__(self, values: Tensor, workload: Workload) -> None:
        self.values = values  # kept: the addresses below do not
        dim = values.shape[1] // NUM_FEATURES if workload.pooled else values.shape[1]
        self.feature_floats = dim if workload.pooled else workload.num_outputs * dim
        self.row_floats = values.shape[1]
        self.bases = values.data_ptr() + torch.arange(NUM_FEATURES) * (self.feature_floats * 4)
        self.strides = torch.full((NUM_FEATURES,), self.row_floats * 4)


class Colonnade:
    phases = ("plan", "slots", "forward", "rows")

    def __init__(self, tables: Tables, *, is_open: bool = False) -> None:
        self.tables = tables
        n, dim = NUM_FEATURES, tables.dim
        self.state_elements = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[tables.optimizer]
        self.indices = torch.arange(n, dtype=torch.int32)  # features and tables are numbered alike
        self.parts = _native.Parts(
            self.indices, int32(*[0] * n), int32(*[dim] * n), int32(*[0] * n)
        )
        self.reads = _native.Reads(self.indices, int32(*[0] * n), int32(*[dim] * n))
        self.declared_rows = torch.full((n,), 0 if is_open else tables.rows)
        self.undealt = torch.ones(n, dtype=torch.int64)
        settings_by_table = [
            _native.TableSettings(
                parts=[_native.PartInitialValues(dim, 0, SCALE, 0.0, 0)],
                state_elements=self.state_elements,
                rows=0 if is_open else tables.rows,
                capacity_rows=tables.rows,
                seed=t,
            )
            for t in range(n)
        ]
        self.dram = _native.Dram(settings_by_table, FLOAT, False)
        bring_to_life(self.dram, tables.rows)
        self.bases = torch.tensor([self.dram.weights_address(t) for t in range(n)])
        self.strides = torch.tensor([self.dram.stride_bytes(t) for t in range(n)])
        self.kinds = int32(*[_native.OPTIMIZERS.index(tables.optimizer)] * n)
        settings = torch.zeros(n, NUM_SETTINGS, dtype=torch.float64)
        settings[:, LR_COLUMN], settings[:, EPS_COLUMN] = tables.lr, EPS
        settings[:, SCALE_COLUMN] = 1.0
        settings[:, UNUSED_LIMITS] = math.inf
        self.settings = settings

    def lookups(self, workload: Workload, ids: Tensor) -> _native.Lookups:
        """ids (E,), feature-major."""
        num = workload.batch_size * workload.lookups
        bags = None
        if workload.lookups > 1 or not workload.pooled:
            bags = torch.arange(0, len(ids) + 1, workload.lookups)
        pooling = SUM if workload.pooled else SEQUENCE
        return _native.Lookups(
            ids,
            torch.arange(0, len(ids) + 1, num),
            self.indices,
            torch.full((NUM_FEATURES,), pooling, dtype=torch.uint8),
            workload.batch_size,
            bags,
            None,
        )

    def acquire(self, plan: _native.Plan) -> tuple[Tensor, Tensor]:
        """slots (U,), index (E,), both int32. Pins the rows."""
        slots = torch.empty(plan.num_unique, dtype=torch.int32)
        self.dram.acquire(plan.unique_ids, plan.block_offsets, slots, True)
        inverse = torch.as_tensor(plan.inverse)
        index = torch.empty_like(inverse)
        _native.take(slots, inverse, index)
        return slots, index

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        outputs, gradients = self.outputs(workload), self.outputs(workload)
        gradients.values.copy_(gradient_of(workload, self.tables.dim))

        def step(laps: Laps) -> None:
            ids = next(batches).view(-1)
            laps.start()
            lookups = self.lookups(workload, ids)
            plan = _native.make_plan(lookups, self.declared_rows, self.undealt)
            laps("plan")
            slots, index = self.acquire(plan)
            laps("slots")
            _native.pool(
                lookups, index, self.bases, self.strides, self.reads,
                outputs.bases, outputs.strides, FLOAT, FLOAT,
            )  # fmt: skip
            laps("forward")
            source = _native.OutputGradients(
                lookups, self.reads, gradients.bases, gradients.strides, FLOAT
            )
            _native.update(
                self.dram, slots, plan.block_offsets, plan.segment_offsets, plan.entries, source,
                self.parts, self.kinds, self.settings,
            )  # fmt: skip
            laps("rows")
            self.dram.release(slots, plan.block_offsets, True)
            laps("slots")

        return step

    def outputs(self, workload: Workload) -> Outputs:
        return Outputs(torch.zeros_like(gradient_of(workload, self.tables.dim)), workload)


class Bare:
    """The roofline. State is a plane of its own, of the bytes that row-wise Adagrad keeps: accumulator and clock."""

    phases = ("forward", "rows")
    STATE_BYTES = 8

    def __init__(self, system: Colonnade) -> None:
        self.system = system
        self.loops = Roofline(torch.get_num_threads())
        tables = system.tables
        # numpy asks for huge pages, as the core does; torch does not.
        self.states = np.ones((NUM_FEATURES, tables.rows, 2), dtype=np.float32)
        starts = np.arange(NUM_FEATURES) * self.states[0].nbytes
        self.rows = Rows(
            tables.dim,
            system.bases,
            int(system.strides[0]),
            torch.from_numpy(self.states.ctypes.data + starts),
            self.STATE_BYTES,
        )

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        out = self.system.outputs(workload)
        task = Task(
            num_bags=workload.num_outputs,
            bag=workload.lookups if workload.pooled else 1,
            out=out.values,
            feature_floats=out.feature_floats,
            bag_floats=out.row_floats,
            gradients=gradient_of(workload, self.rows.dim),
        )
        retained = [self.plan(workload, next(batches).view(-1)) for _ in range(NUM_PLANNED)]
        gather = sweep(partial(self.try_gather, task), retained, GATHER_SETTINGS)
        update = sweep(partial(self.try_update, task), retained, UPDATE_SETTINGS)
        retained.clear()

        def step(laps: Laps) -> None:
            batch = self.plan(workload, next(batches).view(-1))
            laps.start()
            self.try_gather(task, batch, gather)
            laps("forward")
            self.try_update(task, batch, update)
            laps("rows")

        return step

    def try_gather(self, task: Task, batch: Lookup, setting: tuple[int, int]) -> None:
        self.loops.gather(self.rows, batch, task, setting)

    def try_update(self, task: Task, batch: Lookup, setting: tuple[int, int]) -> None:
        self.loops.update(self.rows, batch, task, setting)

    def plan(self, workload: Workload, ids: Tensor) -> Lookup:
        system = self.system
        plan = _native.make_plan(
            system.lookups(workload, ids), system.declared_rows, system.undealt
        )
        slots, index = self.system.acquire(plan)
        self.system.dram.release(slots, plan.block_offsets, False)
        return Lookup(index, slots, torch.as_tensor(plan.block_offsets).clone())


class Api:
    phases = ("wait", "forward", "backward", "rows")

    def __init__(self, tables: Tables) -> None:
        self.names = [f"C{f + 1}" for f in range(NUM_FEATURES)]
        optimizer = getattr(colonnade, OPTIMIZERS[tables.optimizer])(lr=tables.lr)
        self.collection = EmbeddingCollection(
            [Table(name, tables.dim, optimizer=optimizer) for name in self.names],
            [Feature(name, name) for name in self.names],
            consumers={"fields": (Concat(), self.names)},
        ).open()
        self.dim = tables.dim
        self.rows = RowOptimizer(self.collection)
        bring_to_life(self.collection.store.native, tables.rows)

    def step(self, workload: Workload, batches: Iterator[Tensor]) -> Step:
        if not workload.pooled or workload.lookups > 1:
            raise ValueError(f"api measures one-hot lookups, got {workload}")
        gradient = gradient_of(workload, self.dim)
        ready = self.collection.lookahead(self.read(batches, workload.batch_size))

        def step(laps: Laps) -> None:
            laps.start()
            batch = next(ready)
            laps("wait")
            fields = self.collection(batch)["fields"]
            laps("forward")
            torch.autograd.backward(fields, gradient)
            laps("backward")
            self.rows.step()
            laps("rows")

        return step

    def read(self, batches: Iterator[Tensor], batch_size: int) -> Iterator[Batch]:
        dense = torch.empty(batch_size, 0)
        for ids in batches:
            by_name = {name: Ids(ids[f]) for f, name in enumerate(self.names)}
            yield Batch(size=batch_size, dense=dense, ids=by_name)


def bring_to_life(dram: _native.Dram, num_rows: int) -> None:
    """Rows 0 .. num_rows - 1 of every table."""
    for first in range(0, num_rows, FILL_ROWS):
        ids = torch.arange(first, min(first + FILL_ROWS, num_rows))
        offsets = torch.arange(NUM_FEATURES + 1) * len(ids)
        slots = torch.empty(int(offsets[-1]), dtype=torch.int32)
        dram.acquire(ids.repeat(NUM_FEATURES), offsets, slots, True)
        dram.release(slots, offsets, True)


def open_systems(tables: Tables, also: Sequence[str]) -> Mapping[str, System]:
    if "api" in also:
        return {"api": Api(tables)}
    systems: dict[str, System] = {"colonnade": (system := Colonnade(tables))}
    if "open" in also:
        systems["open"] = Colonnade(tables, is_open=True)
    if "roofline" in also:
        systems["roofline"] = Bare(system)
    return systems


if __name__ == "__main__":
    serve(open_systems)
