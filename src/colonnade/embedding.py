"""The one composition point: (tables, consumers, plan) -> an nn.Module.

Where rows rest (`store`), what travels (`exchange`) and when it may be read (`consistency`) meet here
and nowhere else. Legend: B samples, T tables.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from colonnade import _native
from colonnade.batch import Batch
from colonnade.consistency import consistency
from colonnade.data.lookahead import Lookahead
from colonnade.errors import BudgetExceeded, CheckpointError, ConfigError, IdRangeError
from colonnade.exchange import EXCHANGES
from colonnade.exchange.contract import RowGradients, RowSource, Ticket
from colonnade.exchange.layout import declare
from colonnade.interaction import Interaction
from colonnade.ops.memory import keep_freed_memory
from colonnade.plan.plan import Plan, build_plan
from colonnade.store.contract import Backing, RowView
from colonnade.store.dram import open_dram
from colonnade.store.mapped import MappedRows
from colonnade.table import CLOCK_BYTES, Feature, Table
from colonnade.topology.mesh import Mesh

PACKED = torch.contiguous_format


class EmbeddingCollection(nn.Module):
    """Embedding tables, the features that look ids up in them, and the operators that take the results.

    `collection(batch)` gives a dict: by consumer, what its interaction combined (B, ...); by feature
    without a consumer, pooled (B, dim) or, for a sequence, (lookups, dim). Rows are no parameters:
    `parameters()` are the dense ones, and rows change in `RowOptimizer(collection).step()`.

    On the device the module was moved to; ids, rows and their gradients stay on the CPU.

    Works in anyone's loop. `collection.lookahead(batches)` prepares coming batches in the background.
    Until `open` is called, everything is on this process, in memory. Opening tells malloc to keep freed memory
    for the next step (`ops.memory`).
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
        """`output_dtype`: of what it returns; default float32, or float64 for float64 tables."""
        super().__init__()
        consumers = consumers or {}
        self.declaration = declare(tables, features, consumers, output_dtype)
        self.interactions = nn.ModuleDict({name: pair[0] for name, pair in consumers.items()})
        self.seed = seed
        # A placeholder that makes torch call our backward; no parameter, so that an optimizer over
        # model.parameters() is an optimizer over the dense network.
        self.handle = torch.empty(0, dtype=self.declaration.output_dtype, requires_grad=True)
        # Says where outputs go: `to` moves it with the module, while rows and their gradients stay in DRAM.
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.live: list[Ticket] = []  # forward done, not yet stepped
        self.pushed: Pushed | None = None  # gradients of `live` that have reached their owners
        self.step = 0  # updates applied
        self.committed: tuple[str, int] | None = (
            None  # (run, step) of the newest commit of the rows
        )
        self._expected: tuple[str, int] | None = None  # that of a state_dict loaded before opening
        self._opened = False
        self._served: MappedRows | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.declaration.tables

    def open(
        self,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        *,
        backings: Sequence[Backing] = (),
        policies: Mapping[str, RowPolicy] | None = None,
        committed: tuple[str, int] | None = None,
    ) -> EmbeddingCollection:
        """Lay the rows out as planned. Once, before the first batch; every rank calls it.

        `backings`: one per table, for rows that memory has no room for and for commits.
        `policies`: by table, who decides after each update which rows are forgotten (admission, eviction).
        `committed`: the run and step whose commit the backings hold. Raises CheckpointError where a state_dict that
        was loaded before belongs to other rows.
        """
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to change its plan")
        self.mesh = mesh or Mesh()
        self.plan = plan or build_plan(self.tables, self.mesh.num_ranks)
        if self.plan.num_ranks != self.mesh.num_ranks:
            raise ConfigError(
                f"the plan is for {self.plan.num_ranks} ranks, this world has {self.mesh.num_ranks}; "
                "build the plan for this world"
            )
        if self.plan.needs_backing and not backings:
            raise ConfigError(
                "the memory budget does not hold every row, and there is nowhere to put the rest; "
                "open the collection with backings (a run folder has them), or raise the plan's dram_bytes"
            )
        if self._expected not in (None, committed):
            raise CheckpointError(_other_rows(self._expected, committed or ("", 0)))
        self.committed, self._expected = committed, None
        if committed is not None:
            self.step = committed[1]
        keep_freed_memory()
        self.consistency = consistency(self.plan.staleness_steps)
        self.exchange = EXCHANGES[self.plan.exchange](self.declaration, self.mesh)
        self.store = open_dram(
            self.tables,
            [table.capacity_rows for table in self.plan.tables],
            seed=self.seed,
            num_ranks=self.mesh.num_ranks,
            rank=self.mesh.rank,
            backings=backings,
        )
        self.policies = {self._number(name): policy for name, policy in (policies or {}).items()}
        self._starved = threading.Event()
        self._opened = True
        return self

    def serve(self, rows: MappedRows) -> EmbeddingCollection:
        """Instead of `open`: look rows up in exported ones, in place, for prediction only."""
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to predict with")
        self.mesh = Mesh()
        self.exchange = EXCHANGES["rows"](self.declaration, self.mesh)
        self._served, self._opened = rows, True
        return self

    def get_extra_state(self) -> Tensor:
        """In a state_dict: never rows, but a token (JSON as bytes) of the commit that holds them: run and step. No run
        where the rows have changed since the last commit, or there is none."""
        run = self.committed[0] if self.committed and self.committed[1] == self.step else ""
        token = json.dumps({"run": run, "step": self.step}).encode()
        return torch.frombuffer(bytearray(token), dtype=torch.uint8).clone()

    def set_extra_state(self, state: Tensor) -> None:
        """Raises CheckpointError for a token of rows that are not those here; warns where they were not committed."""
        token = json.loads(bytes(state.cpu().numpy()))
        said = (token["run"], token["step"])
        if not said[0]:
            if said[1] and (self.committed, self.step) != (None, said[1]):
                warnings.warn(
                    f"this state_dict was taken after {said[1]} steps whose rows were not committed: it holds the "
                    "dense weights only, and the rows stay as they are here. Commit to a run folder to keep rows",
                    stacklevel=2,
                )
        elif not self._opened:
            self._expected = said
        elif self.committed != said or self.step != said[1]:
            here = self.committed if self.committed else ("", self.step)
            raise CheckpointError(_other_rows(said, here))

    def __getstate__(self) -> dict:
        if self._opened:
            raise ConfigError(
                "rows cannot be copied or pickled with an open collection, and its state_dict holds none of them: "
                "copy the model before its first batch, or read rows with `collection.rows` or `scan`"
            )
        return self.__dict__

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self._served is not None:
            return self.exchange.read(batch, self._served, self.place.device)
        self.ensure_open()
        ticket, batch.ticket = batch.ticket, None
        if not (self.training and torch.is_grad_enabled()):
            if ticket is not None:
                self.drop(ticket)
            return self._read_only(batch)
        if ticket is None:
            if self.consistency.reads_ahead:
                raise ConfigError(
                    f"{self.consistency.name} staleness reads {self.consistency.reads_ahead} steps "
                    "ahead: iterate over collection.lookahead(batches)"
                )
            # Not on the group of the lookahead's thread, whose order of calls must stay its own.
            ticket = self.prepare(batch, purpose="control")
            self.fetch(ticket)
        self.live.append(ticket)
        return self.exchange.values(ticket, self.handle, self.place.device)

    def lookahead(self, batches: Iterable[Batch]) -> Lookahead:
        """The same batches in the same order, each ready to use: its ids have travelled, its rows are resident.

        A thread runs `plan.lookahead` batches ahead; a batch's values are read exactly as many updates
        before its use as the plan's staleness says. Close the iterator to stop early.
        """
        self.ensure_open()
        return Lookahead(
            batches,
            prepare=self.prepare,
            fetch=self.fetch,
            drop=self.drop,
            starved=self._starved,
            depth=self.plan.lookahead,
            reads_ahead=self.consistency.reads_ahead,
        )

    def prepare(self, batch: Batch, *, purpose: str = "route") -> Ticket:
        """Collective, any one thread: ids travel, owners make the rows resident and pin them."""
        self.ensure_open()
        ticket = self.exchange.route(batch, self.step, purpose=purpose)
        batch.world_weight = ticket.weight
        while True:
            seen = self.store.releases
            try:
                ticket.slots = self.store.acquire(ticket.owned_ids, ticket.owned_offsets)
                self.exchange.place(ticket)
                if batch.held is not None:
                    self.exchange.restore(ticket, batch.held)
                return ticket
            except BudgetExceeded:
                # Rows of batches in flight may leave soon; not if training itself waits for this one.
                waiting = self._starved.is_set()
                if not self.store.wait_for_release(seen, 0.05) and waiting:
                    raise
                if threading.current_thread() is threading.main_thread():
                    raise

    def fetch(self, ticket: Ticket) -> None:
        """Collective, training thread: read the rows as they are now."""
        source = RowSource(self.store.views(), ticket.pinned, not self.consistency.reads_ahead)
        self.exchange.fetch(ticket, source)

    def finite(self) -> bool:
        """Whether every gradient recorded on this rank is finite."""
        return all(
            _all_finite(part)
            for ticket in self.live
            for gradients in ticket.gradients
            for part in gradients
        )

    def collect(self) -> RowGradients | None:
        """Collective: push what backward recorded since the last step to the rows' owners. None: there is nothing.

        Once per step: `push` then applies what is here. RuntimeError if a backward came in between.
        """
        for ticket in self.live:
            for gradients, versions in zip(ticket.gradients, ticket.versions, strict=False):
                if [gradient._version for gradient in gradients] != versions:
                    raise RuntimeError(
                        "a gradient given to backward was changed in place before step(); rows keep no copy of "
                        "it: give backward a tensor of its own"
                    )
        recorded = sum(len(ticket.gradients) for ticket in self.live)
        if self.pushed is None:
            self.pushed = Pushed(self.exchange.push(self.live), recorded)
        elif self.pushed.recorded != recorded:
            raise RuntimeError(
                "backward was called after the gradients were clipped; clip between the last backward "
                "and step()"
            )
        return self.pushed.gradients

    def squared_gradient_norm(self) -> float:
        """Collective: the sum of squares of all rows' summed gradients, over all ranks."""
        gradients, square = self.collect(), 0.0
        if gradients is not None:
            summed, values = self.exchange.summed(gradients)
            self.pushed = Pushed(summed, self.pushed.recorded if self.pushed else 0)
            square = _native.squared_norm(
                values.data_ptr(), values.numel(), self.tables[0].compute_dtype
            )
        total = self.mesh.all_reduce("push", torch.tensor([square], dtype=torch.float64))
        return float(total)

    def push(self, optimizers: Tensor, settings: Tensor) -> None:
        """Collective: push what backward recorded, apply it once, release the rows.

        optimizers (P,) int32, settings (P, 16) float64 by part: see `_native.update`.
        """
        gradients, tickets = self.collect(), self.live
        if gradients is not None:
            _native.update(
                self.store.native, gradients.slots, gradients.offsets,
                gradients.segment_offsets, gradients.entries, gradients.source,
                self.declaration.native_parts, optimizers, settings,
            )  # fmt: skip
        self.live, self.pushed = [], None
        for t, policy in self.policies.items():
            self._ask(policy, t, tickets)
        for ticket in tickets:
            self.store.release(ticket.pinned, ticket.owned_offsets, dirty=True)
            ticket.slots, ticket.is_done = None, True
        self.step += 1

    def keep(self, tickets: Sequence[Ticket]) -> None:
        """Drop the other batches since the last step: no rank had a gradient for them."""
        kept = {id(ticket) for ticket in tickets}
        for ticket in self.live:
            if id(ticket) not in kept:
                self.drop(ticket)
        self.live, self.pushed = list(tickets), None

    def forget(self) -> None:
        """Drop every batch since the last step without applying it."""
        self.keep([])

    def drop(self, ticket: Ticket) -> None:
        """Give a prepared batch up: nothing of it is applied, its rows are unpinned."""
        self.exchange.drop(ticket)
        ticket.is_done = True
        if ticket.slots is not None:
            self.store.release(ticket.slots, ticket.owned_offsets, dirty=False)
            ticket.slots = None

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Collective, every rank with the same ids (N,): their weights (N, dim) as they are now.

        Rows never trained read as their first value; nothing is remembered of the call.
        """
        self.ensure_open()
        t = self._number(table)
        rows = self.tables[t].rows
        unique, inverse = torch.unique(ids, return_inverse=True)
        if rows is not None and len(unique) and not (unique[0] >= 0 and unique[-1] < rows):
            raise IdRangeError(
                f"table {table!r}: got ids {int(unique[0])} .. {int(unique[-1])}, wanted 0 .. {rows - 1}"
            )
        owner = torch.as_tensor(_native.owner_of(unique, rows or 0, self.mesh.num_ranks))
        owned = owner == self.mesh.rank
        num_owned = int(owned.sum())
        offsets = torch.tensor([0] * (t + 1) + [num_owned] * (len(self.tables) - t))
        compute, dtype = self.declaration.compute_dtype, self.declaration.dtype
        found = torch.zeros(len(unique), self.tables[t].width, dtype=compute)
        found[owned] = self.store.read(unique[owned].contiguous(), offsets)[t].to(compute)
        # One rank's values and zeros: exact.
        return self.mesh.all_reduce("evaluate", found).to(dtype)[inverse]

    def delete(self, table: str, ids: Tensor) -> None:
        """Every rank with the same ids (N,): their rows are forgotten, wherever they are; the next read of one gives
        its first value. A row that a batch in flight uses is born again in place. Ids never trained are passed over."""
        self.ensure_open()
        t = self._number(table)
        owner = torch.as_tensor(
            _native.owner_of(ids, self.tables[t].rows or 0, self.mesh.num_ranks)
        )
        self.store.delete(t, ids[owner == self.mesh.rank].unique())

    def scan(self, table: str) -> Iterator[Rows]:
        """This rank's trained rows, each once, a run at a time, in memory or below it. Changes nothing; the table must
        not be trained meanwhile."""
        self.ensure_open()
        t = self._number(table)
        kind = self.tables[t]
        for ids, records in self.store.scan(t):
            # Copied even where one row is contiguous already: its clock may lie at any byte.
            weights = records[:, : kind.width * kind.itemsize].clone(memory_format=PACKED)
            clocks = records[:, -CLOCK_BYTES:].clone(memory_format=PACKED)
            yield Rows(
                ids, weights.view(self.declaration.dtype), clocks.view(torch.int64).flatten()
            )

    def _number(self, table: str) -> int:
        names = [each.name for each in self.tables]
        if table not in names:
            raise ConfigError(f"unknown table {table!r}; choose from {', '.join(names)}")
        return names.index(table)

    def _ask(self, policy: RowPolicy, t: int, tickets: Sequence[Ticket]) -> None:
        """The policy hears of the rows of table t that were just updated here, and names those to forget."""
        ids, slots = [], []
        for ticket in tickets:
            first, last = ticket.owned_offsets[t : t + 2].tolist()
            ids.append(ticket.owned_ids[first:last])
            slots.append(ticket.pinned[first:last])
        updated, where = torch.cat(ids), torch.cat(slots)
        clocks = torch.as_tensor(self.store.native.clocks(t, where))
        self.store.delete(t, policy.forget(updated, clocks, self.step).unique())

    def _read_only(self, batch: Batch) -> dict[str, Tensor]:
        """Evaluation: sees every update, leaves no trace; any number of training batches may be in flight."""
        ticket = self.exchange.route(batch, self.step, purpose="evaluate")
        batch.world_weight = ticket.weight
        found = self.store.read(ticket.owned_ids, ticket.owned_offsets)
        views = [
            RowView(rows.data_ptr(), table.width * table.itemsize, table.width, table.dtype)
            for rows, table in zip(found, self.tables, strict=True)
        ]
        numbers = [torch.arange(len(rows), dtype=torch.int32) for rows in found]
        self.exchange.fetch(ticket, RowSource(views, torch.cat(numbers), True, found))
        return self.exchange.values(ticket, self.handle, self.place.device)

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


class RowPolicy(Protocol):
    """Which rows of a table stay: admission and eviction, decided at the owner when an update has been applied."""

    def forget(self, ids: Tensor, clocks: Tensor, step: int) -> Tensor:
        """ids (N,), clocks (N,) after the update: the rows that step `step` trained, here. Returns the ids to forget:
        any of these (not admitted) or of earlier ones (evicted). Must depend on nothing but what it is told, and
        in no other order, so that a run can be repeated."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Some trained rows of a table."""

    ids: Tensor  # (N,) int64
    weights: Tensor  # (N, width) of the table's dtype
    clocks: Tensor  # (N,) int64: updates applied


@dataclass(frozen=True, slots=True)
class Pushed:
    """Gradients at their owners, and how many backwards they are of."""

    gradients: RowGradients | None
    recorded: int


def _other_rows(said: tuple[str, int] | None, here: tuple[str, int]) -> str:
    run, step = said or ("", 0)
    rows = f"step {here[1]} of run {here[0]}" if here[0] else f"no commit (step {here[1]})"
    return (
        f"got a state_dict whose rows are the commit of step {step} of run {run}, the rows here are {rows}; "
        f"open that run at step {step}, or leave the keys ending in _extra_state out to load the dense weights alone"
    )


def _all_finite(values: Tensor) -> bool:
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        return bool(torch.isfinite(values).all())
    return _native.all_finite(values.data_ptr(), values.numel(), dtype)
