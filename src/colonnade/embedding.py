"""Embedding collection: the nn.Module built of tables, features, consumers and a plan.

It alone combines where rows are stored (`store`), what is sent (`exchange`) and when rows may be read (`staleness`).
Legend: B samples, T tables.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.collectives import announced
from colonnade.comm.mesh import Mesh
from colonnade.errors import ConfigError, DataError
from colonnade.interaction import Interaction
from colonnade.lookup.layout import declare
from colonnade.lookup.views import slices_of
from colonnade.ops.memory import keep_freed_memory
from colonnade.pipeline.lookahead import Lookahead
from colonnade.pipeline.open_rows import open_rows
from colonnade.pipeline.pipeline import Pipeline, StepCounter
from colonnade.pipeline.prepared_batches import Held, PreparedBatch
from colonnade.pipeline.row_access import MappedLookup, delete_rows, read_weights, scan_rows
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_state import StatefulRows
from colonnade.store.contract import Backing, Rows
from colonnade.store.mapped import MappedRows
from colonnade.store.policies import RowPolicy
from colonnade.table import Feature, Table
from colonnade.topology.sharding import row_wise

F = TypeVar("F", bound=Callable[..., Any])


def run_eagerly(method: F) -> F:
    """Make a compiled model call this method outside its graphs: one clean break before it, one after.

    This is `torch.compiler.disable`, except that the compiler, which takes longer to import than torch, is imported
    only by programs that use it.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # Read by the compiler, which then breaks its graph here and does not look inside.
    marks: Any = run
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "rows are looked up outside of compiled graphs"
    result: Any = run
    return result


T = TypeVar("T")


class OneCaller:
    """Lock that never waits: a thread that enters while another is inside gets an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                f"got a call from thread {threading.current_thread().name} while another thread uses this collection, "
                "wanted one at a time. Call the model and step its optimizer from one thread, or hold a lock of your "
                "own; this call changed nothing"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OneCaller], tuple[()]]:
        return OneCaller, ()  # a copy has a lock of its own


def one_at_a_time(forward: Callable[[Any, Batch], T]) -> Callable[[Any, Batch], T]:
    """Wrap a collection's `forward`: check that it gets a batch, and that no other thread is inside."""

    @wraps(forward)
    def checked(collection: Any, batch: Batch) -> T:
        if not isinstance(batch, Batch):
            raise DataError(
                f"model(batch): got a {type(batch).__name__}, wanted a colonnade.Batch: "
                "Batch(size, dense, {feature: Ids(values)})"
            )
        if collection._served is not None:  # rows that nobody changes: any number of threads
            return forward(collection, batch)
        with collection.caller:
            return forward(collection, batch)

    return checked


class EmbeddingCollection(StatefulRows):
    """Embedding tables, the features that look ids up in them, and the operators that take the results. It does what
    TorchRec's EmbeddingBagCollection and EmbeddingCollection do.

    `collection(batch)` returns a dict: by consumer, the output of its interaction (B, ...); by feature
    without a consumer, pooled (B, dim) or, for a sequence, (lookups, dim). Rows are no parameters:
    `parameters()` are the dense ones, and rows change in `RowOptimizer(collection).step()`.

    Outputs are on the device the module was moved to; ids, rows and their gradients are on the CPU. With
    `Plan.hbm_bytes` rows and gradients are also on the device that the module is on when it is opened; with
    `Plan.cache_tier` hbm copies of rows are.

    Works in any training loop. `collection.lookahead(batches)` prepares later batches in the background.
    Until `open` is called, everything is in this process, in memory. Opening makes malloc reuse freed memory
    in the next step (`ops.memory`).
    """

    place: Tensor

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        consumers: Mapping[str, tuple[Interaction, Sequence[str]]] | None = None,
        output_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """Declare tables and features. `output_dtype`: of outputs; default float32, or float64 for float64 tables."""
        super().__init__()
        consumers = consumers or {}
        self.declaration = declare(tables, features, consumers, output_dtype)
        self.interactions = nn.ModuleDict({name: pair[0] for name, pair in consumers.items()})
        self.seed = seed
        # A placeholder that makes torch call our backward. Not a parameter, so that an optimizer over
        # model.parameters() is an optimizer over the dense network.
        self.handle = torch.empty(0, dtype=self.declaration.output_dtype, requires_grad=True)
        # Its device is that of outputs: `to` moves it with the module, but does not move rows.
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.steps = StepCounter()
        self.caller = OneCaller()
        self._waiting: dict[str, Any] = {}  # loaded state of rows, until `open` stores it
        self._opened = False
        self._served: MappedRows | None = None

    def extra_repr(self) -> str:
        """List tables and features for `print(model)`, one a line."""
        lines = [
            f"table {t.name!r}: dim {t.dim}, {'any id' if t.rows is None else f'{t.rows:,} rows'}"
            for t in self.tables
        ]
        lines += [
            f"feature {f.name!r}: table {f.table!r}, pooling {f.pooling}"
            for f in self.declaration.features
        ]
        return "\n".join(lines)

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.declaration.tables

    def open(
        self,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        *,
        folder: str | Path | None = None,
        backings: Sequence[Backing] = (),
        policies: Mapping[str, RowPolicy] | None = None,
        step: int | None = None,
    ) -> EmbeddingCollection:
        """Lay the rows out as planned. Collective; call it once, before the first batch.

        `folder`: an empty one, for rows that memory has no room for; `save` saves there.
        `backings`: instead, one per table, for rows that memory has no room for and for checkpoints.
        `policies`: by table, policies that decide after each update which rows are forgotten, instead of the table's
        own admission and eviction. Checkpoints do not hold their state.
        `step`: step of the checkpoint in the backings. Raises CheckpointError where a loaded state_dict has other rows.
        """
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to change its plan")
        if folder is not None:
            return self._open_in(Path(folder), plan, mesh, policies)
        self._closed_names = frozenset(self.__dict__)
        self.mesh = mesh or Mesh()
        servers = self.mesh.world.servers
        self.plan = plan or build_plan(self.tables, self.mesh.world)
        self.plan.check_world(self.mesh.num_ranks, servers)
        self.plan.check_tables([table.name for table in self.tables])
        if self.plan.needs_backing and not backings:
            raise ConfigError(
                "the memory budget does not hold every row, and there is nowhere to put the rest; "
                "open the collection with folder=..., or raise plan.memory.dram"
            )
        self._check_waiting(self.plan, self.mesh, step)
        self.step = self.step if step is None else step
        keep_freed_memory()
        self.opened = open_rows(
            self.declaration,
            self.plan,
            self.mesh,
            seed=self.seed,
            device=self.place.device,
            backings=backings,
            policies=policies or {},
        )
        self.slices, self.shards = self.opened.views, self.opened.shards
        self.exchange, self.store = self.opened.exchange, self.opened.store
        self.policies, self.cached = dict(self.opened.policies), self.opened.cached
        self.pipeline = Pipeline(self.opened, self.steps)
        self._opened = True
        self._put_waiting()
        return self

    @property
    def step(self) -> int:
        """Number of updates, pending ones included."""
        return self.steps.value

    @step.setter
    def step(self, value: int) -> None:
        self.steps.value = value

    def serve(self, rows: MappedRows) -> EmbeddingCollection:
        """Open for prediction only, instead of `open`: look up exported rows in place."""
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to predict with")
        self.mesh = Mesh()
        self.slices = slices_of(self.declaration, [row_wise(1)] * len(self.tables))
        self._reader = MappedLookup(self.slices.declaration, rows)
        self._served, self._opened = rows, True
        return self

    @run_eagerly
    @one_at_a_time
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self._served is not None:
            rows, device = self.slices.prepare_ids(batch), self.place.device
            values = self._reader.read(rows, device)
            return self.slices.merge_outputs(values, self.slices.offsets_of(batch))
        if not self._opened:
            self.ensure_open()
        context = batch.take_context() if isinstance(batch, PreparedBatch) else None
        if not (self.training and torch.is_grad_enabled()):
            if context is not None:
                self.pipeline.drop(context)
            announced(self.mesh, True)
            return self.read(batch)
        if context is None:
            context = self.pipeline.begin(batch)
        self.pipeline.gradients.contexts.append(context)
        return self.pipeline.values(context, self.handle, self.place.device)

    def lookahead(self, batches: Iterable[Batch], *, held: Sequence[Held] = ()) -> Lookahead:
        """Return an iterator over the same batches in the same order, each ready to use: its ids were sent, its rows
        are resident.

        A thread prepares `plan.lookahead` batches ahead; a batch's values are read exactly as many updates before its
        use as the plan's staleness. Close the iterator to stop early. held: from a checkpoint, for each of the first
        batches, steps until its use and the values that every rank had read for it.
        """
        self.ensure_open()
        return self.pipeline.lookahead(batches, held)

    def forget(self) -> None:
        """Drop every batch since the last step without applying it."""
        if self._opened:
            self.pipeline.gradients.forget()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Return the current weights (N, dim) of rows. Collective, with the same ids (N,) on every rank.

        Rows never trained have their initial value; the call changes nothing.
        """
        self.ensure_open()
        self.pipeline.updates.settle()
        return read_weights(self.opened, table, ids)

    def delete(self, table: str, ids: Tensor) -> None:
        """Delete rows from memory and storage; the next read of one returns its initial value. Call it on every rank
        with the same ids (N,). A row that a batch in flight uses is initialised again in place. Ids never trained are
        ignored."""
        self.ensure_open()
        self.pipeline.updates.settle()
        delete_rows(self.opened, table, ids)

    def scan(self, table: str) -> Iterator[Rows]:
        """Yield this rank's trained rows, each once, in runs, from memory and storage. Every rank has all rows of a
        replicated table, and its slice's columns of one cut by columns. Changes nothing; the table must not be trained
        meanwhile. Collective while updates are pending."""
        self.ensure_open()
        self.pipeline.updates.settle()
        yield from scan_rows(self.opened, table)

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Return a batch's outputs for evaluation: after every update, and without changing anything; any number of
        training batches may be in flight. A server calls it where the others call the collection: `topology.reads`."""
        context = self.pipeline.read(batch)
        return self.pipeline.values(context, self.handle, self.place.device)

    @property
    def is_open(self) -> bool:
        return self._opened

    def ensure_open(self) -> None:
        """Open with everything on this process, in memory, unless `open` was called."""
        if self._served is not None:
            raise ConfigError(
                "this collection serves exported rows, which are read by forward and nothing else; "
                "open the run to train, list or change them"
            )
        if not self._opened:
            self.open()
