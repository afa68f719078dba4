"""Embedding collection: the nn.Module built from tables, features, consumers and a plan.

Only this module combines where rows are stored (`store`), what is sent (`exchange`) and when rows may be read
(`staleness`).
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
from colonnade.comm.collectives import notify_servers
from colonnade.comm.mesh import Mesh
from colonnade.errors import ConfigError, DataError
from colonnade.interaction import Interaction
from colonnade.lookup.layout import declare
from colonnade.lookup.row_access import MappedLookup, delete_rows, read_weights, scan_rows
from colonnade.lookup.views import slices_of
from colonnade.ops.memory import keep_freed_memory
from colonnade.pipeline.lookahead import Lookahead
from colonnade.pipeline.open_rows import open_rows
from colonnade.pipeline.pipeline import Pipeline, StepCounter
from colonnade.pipeline.prepared_batches import PrefetchedBatch, PreparedBatch
from colonnade.plan.build import build_plan
from colonnade.plan.plan import Plan
from colonnade.row_state import StatefulRows
from colonnade.store.contract import Backing, Rows
from colonnade.store.mapped import MappedRows
from colonnade.store.policies import RowPolicy
from colonnade.table import Feature, Table
from colonnade.topology.sharding import row_wise

F = TypeVar("F", bound=Callable[..., Any])


def run_eagerly(method: F) -> F:
    """Make a compiled model call this method outside its graphs, with one graph break before it and one after.

    Does the same as `torch.compiler.disable`, but does not import the compiler unless the program uses it: importing
    it takes longer than importing torch.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # The compiler reads these attributes, breaks its graph here and does not look inside.
    attributes: Any = run
    attributes._torchdynamo_disable = True
    attributes._torchdynamo_disable_msg = "rows are looked up outside of compiled graphs"
    result: Any = run
    return result


T = TypeVar("T")


class SingleCallerLock:
    """Lock that raises an error instead of waiting, when a thread enters while another thread is inside."""

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

    def __reduce__(self) -> tuple[type[SingleCallerLock], tuple[()]]:
        return SingleCallerLock, ()  # a copied collection gets its own lock


def reject_concurrent_calls(forward: Callable[[Any, Batch], T]) -> Callable[[Any, Batch], T]:
    """Wrap a collection's `forward` with two checks: the argument is a Batch, and no other thread is inside."""

    @wraps(forward)
    def checked(collection: Any, batch: Batch) -> T:
        if not isinstance(batch, Batch):
            raise DataError(
                f"model(batch): got a {type(batch).__name__}, wanted a colonnade.Batch: "
                "Batch(size, dense, {feature: Ids(values)})"
            )
        if collection._exported_rows is not None:
            # Exported rows never change, so any number of threads may read them.
            return forward(collection, batch)
        with collection.call_lock:
            return forward(collection, batch)

    return checked


class EmbeddingCollection(StatefulRows):
    """Embedding tables with their features and interactions: what TorchRec's EmbeddingBagCollection and
    EmbeddingCollection do together.

    `collection(batch)` returns a dict. For each consumer: the output of its interaction (B, ...). For each feature
    without a consumer: pooled vectors (B, dim), or one vector per lookup (lookups, dim) for a sequence. Rows are not
    parameters: `parameters()` returns the dense parameters, and `RowOptimizer(collection).step()` updates rows.

    Outputs are on the device that the module was moved to. Ids, rows and row gradients are on the CPU. With
    `Plan.hbm_bytes`, rows and gradients are also on the device that the module is on when it is opened. With
    `Plan.cache_tier` set to hbm, cached copies of rows are also there.

    Works in any training loop. `collection.lookahead(batches)` prepares later batches in the background.
    Without `open`, all rows are in this process's memory. Opening makes malloc reuse freed memory in the next
    step (`ops.memory`).
    """

    device_buffer: Tensor

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        consumers: Mapping[str, tuple[Interaction, Sequence[str]]] | None = None,
        output_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """Declare tables and features. `output_dtype`: default float32, or float64 for float64 tables."""
        super().__init__()
        consumers = consumers or {}
        self.declaration = declare(tables, features, consumers, output_dtype)
        self.interactions = nn.ModuleDict({name: pair[0] for name, pair in consumers.items()})
        self.seed = seed
        # Placeholder that makes autograd call our backward. Not a parameter, so that an optimizer over
        # model.parameters() covers the dense network only.
        self.backward_handle = torch.empty(
            0, dtype=self.declaration.output_dtype, requires_grad=True
        )
        # Outputs are on the device of this buffer: `to` moves it with the module, but does not move rows.
        self.register_buffer("device_buffer", torch.empty(0), persistent=False)
        self.steps = StepCounter()
        self.call_lock = SingleCallerLock()
        self._loaded_state: dict[str, Any] = {}  # loaded row state, until `open` stores it
        self._opened = False
        self._exported_rows: MappedRows | None = None

    def extra_repr(self) -> str:
        """List tables and features for `print(model)`, one per line."""
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
        """Allocate rows, caches and exchanges as planned. Collective; call it once, before the first batch.

        `folder`: empty folder for rows that do not fit in memory; `save` saves there.
        `backings`: alternative to `folder`, one per table, for rows that do not fit in memory and for checkpoints.
        `policies`: for a table, the policy that decides after each update which rows to forget. It replaces the
        table's own admission and eviction. Checkpoints do not contain the state of such a policy.
        `step`: step of the checkpoint in the backings. Raises CheckpointError if a loaded state_dict has other rows.
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
        self._refuse_two_row_sources(self.plan, self.mesh, step)
        self.step = self.step if step is None else step
        keep_freed_memory()
        self.opened = open_rows(
            self.declaration,
            self.plan,
            self.mesh,
            seed=self.seed,
            device=self.device_buffer.device,
            backings=backings,
            policies=policies or {},
        )
        self.slices = self.opened.views
        self.shards = self.opened.shards
        self.exchange = self.opened.exchange
        self.store = self.opened.store
        self.policies = dict(self.opened.policies)
        self.cached = self.opened.cached
        self.pipeline = Pipeline(self.opened, self.steps)
        self._opened = True
        self._store_loaded_state()
        return self

    @property
    def step(self) -> int:
        """Number of updates, including pending ones."""
        return self.steps.value

    @step.setter
    def step(self, value: int) -> None:
        self.steps.value = value

    def open_exported(self, rows: MappedRows) -> EmbeddingCollection:
        """Open the collection for prediction only: look up exported rows in place. Replaces `open`."""
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to predict with")
        self.mesh = Mesh()
        self.slices = slices_of(self.declaration, [row_wise(1)] * len(self.tables))
        self._reader = MappedLookup(self.slices.declaration, rows)
        self._exported_rows = rows
        self._opened = True
        return self

    @run_eagerly
    @reject_concurrent_calls
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self._exported_rows is not None:
            rows = self.slices.prepare_ids(batch)
            device = self.device_buffer.device
            values = self._reader.read(rows, device)
            return self.slices.merge_outputs(values, self.slices.sequence_offsets(batch))
        if not self._opened:
            self.ensure_open()
        context = batch.take_context() if isinstance(batch, PreparedBatch) else None
        if not (self.training and torch.is_grad_enabled()):
            if context is not None:
                self.pipeline.drop_batch(context)
            notify_servers(self.mesh, True)
            return self.read(batch)
        if context is None:
            context = self.pipeline.prepare_and_fetch(batch)
        self.pipeline.gradients.add_batch(context)
        return self.pipeline.compute_outputs(
            context, self.backward_handle, self.device_buffer.device
        )

    def lookahead(
        self, batches: Iterable[Batch], *, prefetched: Sequence[PrefetchedBatch] = ()
    ) -> Lookahead:
        """Return an iterator that prefetches: same batches, same order, with ids sent and rows resident.

        A thread prepares `plan.lookahead` batches ahead. Row values are read exactly k updates before their batch is
        used, where k is the plan's staleness. Close the iterator to stop early. `prefetched`: from a checkpoint, one
        for each of the first batches: the number of steps until its use, and the values that every rank had read for
        it.
        """
        self.ensure_open()
        return self.pipeline.lookahead(batches, prefetched)

    def discard_batches(self) -> None:
        """Drop all batches since the last step, with their gradients, without applying them."""
        if self._opened:
            self.pipeline.discard_batches()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Return the current weights (N, dim) of rows. Collective; pass the same ids (N,) on every rank.

        Rows that were never trained have their initial value. The call changes nothing. With `plan.cache`, gradients
        that wait in row caches are not yet part of the rows; read them inside `RowOptimizer.synchronized_view()`, which
        applies all.
        """
        self.ensure_open()
        self.pipeline.updates.apply_pending()
        return read_weights(self.slices, self.shards, self.store, self.mesh, table, ids)

    def delete(self, table: str, ids: Tensor) -> None:
        """Delete rows from memory and storage; the next read of a deleted row returns its initial value.

        Call it on every rank with the same ids (N,). A row that a batch in flight uses is reinitialised in place.
        Ids that were never trained are ignored."""
        self.ensure_open()
        self.pipeline.drop_copies()
        delete_rows(self.slices, self.shards, self.store, self.policies, table, ids)

    def scan(self, table: str) -> Iterator[Rows]:
        """Yield this rank's trained rows from memory and storage, several per item, each row once.

        Every rank has all rows of a replicated table. Of a table sharded by columns, a rank has the columns of its
        slice. Changes nothing; do not train the table meanwhile. Collective while updates are pending."""
        self.ensure_open()
        self.pipeline.updates.apply_pending()
        yield from scan_rows(self.slices, self.store, table)

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Return a batch's outputs for evaluation: reads see every update, and nothing changes.

        Any number of training batches may be in flight. Servers call `read` when the trainers call the
        collection."""
        context = self.pipeline.fetch_for_evaluation(batch)
        return self.pipeline.compute_outputs(
            context, self.backward_handle, self.device_buffer.device
        )

    @property
    def is_open(self) -> bool:
        return self._opened

    def ensure_open(self) -> None:
        """Open with all rows in this process's memory, unless `open` was called."""
        if self._exported_rows is not None:
            raise ConfigError(
                "this collection serves exported rows, which only forward reads; "
                "open the run to train, list or change them"
            )
        if not self._opened:
            self.open()


def find_collection(model: nn.Module) -> EmbeddingCollection:
    """Return the one EmbeddingCollection in a model. Raises ConfigError unless there is exactly one."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    if len(collections) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(collections)} EmbeddingCollections among its modules, wanted one; "
            "declare all tables in one collection"
        )
    return collections[0]
