"""The one composition point: (tables, consumers, plan) -> an nn.Module.

Where rows rest (`store`), what travels (`exchange`) and when it may be read (`consistency`) meet here
and nowhere else. Legend: B samples, T tables.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.collectives import announced
from colonnade.comm.mesh import Mesh
from colonnade.errors import BudgetExceeded, ConfigError, IdRangeError
from colonnade.exchange import open_exchange
from colonnade.exchange.cached import cached_end, without_copies
from colonnade.exchange.rows import RowsExchange
from colonnade.exchange.updates import Update, Updates
from colonnade.interaction import Interaction
from colonnade.lookup.contract import Pushed, RowSource, Ticket
from colonnade.lookup.layout import declare
from colonnade.lookup.lookahead import LATE, Lookahead, Window
from colonnade.lookup.outputs import all_finite
from colonnade.lookup.views import slices_of
from colonnade.ops.memory import keep_freed_memory
from colonnade.plan.plan import Plan, build_plan
from colonnade.row_state import StatefulRows
from colonnade.single_caller import one_at_a_time, run_eagerly
from colonnade.staleness import of_tables
from colonnade.store.contract import Backing, Rows, RowView
from colonnade.store.dram import DramStore, open_dram
from colonnade.store.hbm import HbmStore, open_hbm
from colonnade.store.mapped import MappedRows
from colonnade.store.policies import RowPolicy, RowRetention, check_policies, open_policies
from colonnade.table import CLOCK_BYTES, Feature, Table
from colonnade.topology.sharding import row_wise

PACKED = torch.contiguous_format


class EmbeddingCollection(StatefulRows):
    """Embedding tables, the features that look ids up in them, and the operators that take the results.

    `collection(batch)` gives a dict: by consumer, what its interaction combined (B, ...); by feature
    without a consumer, pooled (B, dim) or, for a sequence, (lookups, dim). Rows are no parameters:
    `parameters()` are the dense ones, and rows change in `RowOptimizer(collection).step()`.

    On the device the module was moved to; ids, rows and their gradients stay on the CPU. With `Plan.hbm_bytes` rows and
    gradients are there, too, where the module lies when it is opened; with `Plan.cache_tier` hbm copies of rows are.

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
        # Says where outputs go: `to` moves it with the module, while rows stay where they were opened.
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.live: list[Ticket] = []  # forward done, not yet stepped
        self.pushed: Pushed | None = None  # gradients of `live`
        self.step = 0  # updates, with those under way
        # Batches, by updates that reads missed: a read for each bound of tables; without what a commit held.
        self.missed: Counter[int] = Counter()
        self._waiting: dict[str, Any] = {}  # loaded state of rows, until they have a place
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
        """Lay the rows out as planned. Once, before the first batch; every rank calls it.

        `folder`: an empty one, for rows that memory has no room for; `save` saves there.
        `backings`: instead, one per table, for rows that memory has no room for and for commits.
        `policies`: by table, who decides after each update which rows are forgotten, where it is not the table's own
        admission and eviction. What such a policy remembers is its own: commits do not hold it.
        `step`: whose commit the backings hold. Raises CheckpointError where a loaded state_dict has other rows.
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
        if self.plan.needs_backing and not backings:
            raise ConfigError(
                "the memory budget does not hold every row, and there is nowhere to put the rest; "
                "open the collection with folder=..., or raise plan.memory.dram"
            )
        self._check_waiting(self.plan, self.mesh, step)
        self.step = self.step if step is None else step
        keep_freed_memory()
        self._open_exchange()
        self._open_store(backings)
        self._open_policies(policies or {})
        self.updates = Updates(self.exchange, self.store, self.policies, self.missed)
        waits = bool(self.cached or self.policies or self.exchange.pushed_parameters)
        may_be_late = self.bounds[0] >= LATE and self.mesh.num_ranks > 1
        # Agreed, for ranks have policies only of tables whose rows they have, and all must call in one order.
        self._lands_late = may_be_late and bool(self.mesh.least(int(not waits)))
        self._window = Window(
            stall_seconds=lambda: self.store.sources.stall_seconds,
            share=self.store.pinned_share,
            starved=threading.Event(),
            crowded=threading.Event(),
            closing=threading.Event(),
        )
        self._opened = True
        self._put_waiting()
        return self

    def _open_exchange(self) -> None:
        """Collective: lay the tables out as the plan says, and open what travels between ranks."""
        is_read = [self.declaration.is_read(table) for table in self.tables]
        self.consistency, late = of_tables(self.plan.bounds, is_read)
        self.bounds = sorted(set(late))  # that reads of some table are late by
        planned, shardings = self.plan.tables, self.plan.shardings
        names = [each.exchange for each in planned]
        self.slices = slices_of(self.declaration, shardings, names, late)
        laid = self.slices.laid
        self.shards = tuple(each.sharding.shard_of(self.mesh.rank) for each in laid)
        self.exchange = open_exchange(
            self.slices.declaration,
            self.mesh,
            exchanges=[planned[each.number].exchange for each in laid],
            shardings=[each.sharding for each in laid],
            codecs=self.plan.codecs,
            seed=self.seed,
            reads_ahead=[late[each.number] for each in laid],
            towers=self.plan.towers,
            caches=[planned[each.number].cache for each in laid],
            copies_on=self.place.device if self.plan.cache_tier == "hbm" else None,
        )

    def _open_store(self, backings: Sequence[Backing]) -> None:
        """Make room for this rank's rows: in memory, mapped memory, and in its device's above these."""
        planned, laid = self.plan.tables, self.slices.laid
        tiers = ["dram" if each.is_hot else planned[each.number].tier for each in laid]
        memory = open_dram(
            [each.stored for each in laid],
            [each.room(planned[each.number].capacity_rows) for each in laid],
            seed=self.seed,
            shards=self.shards,
            backings=backings,
            directories=[
                Path(self.plan.mapped.path) if self.plan.mapped and tier == "mapped" else None
                for tier in tiers
            ],
        )
        self.store: DramStore | HbmStore = memory
        if self.plan.hbm_bytes is not None:
            slots = [
                0 if shard.place is None else each.room(planned[each.number].hbm_rows)
                for shard, each in zip(self.shards, laid, strict=True)
            ]
            self.store = open_hbm(memory, slots, self.place.device, seed=self.seed)
        self.cached = cached_end(self.exchange, memory)

    def _open_policies(self, by_hand: Mapping[str, RowPolicy]) -> None:
        """Open what each table's admission and eviction ask for. by_hand: by table, instead of these."""
        tables = [each.table for each in self.slices.laid]
        declared = open_policies(tables, self.shards, seed=self.seed)
        overrides = {self._slices(name): policy for name, policy in by_hand.items()}
        has_copies = self.cached.has_copies if self.cached else []
        check_policies(overrides, declared, tables, has_copies=has_copies)
        by_number = {t: policy for (t,), policy in overrides.items()}
        self.policies: dict[int, RowPolicy] = declared | by_number

    def serve(self, rows: MappedRows) -> EmbeddingCollection:
        """Instead of `open`: look rows up in exported ones, in place, for prediction only."""
        if self._opened:
            raise ConfigError("this collection is open already; build a new one to predict with")
        self.mesh = Mesh()
        self.slices = slices_of(self.declaration, [row_wise(1)] * len(self.tables))
        self._reader = RowsExchange(self.slices.declaration, self.mesh)
        self._served, self._opened = rows, True
        return self

    @run_eagerly
    @one_at_a_time
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self._served is not None:
            rows, device = self.slices.looked_up(batch), self.place.device
            found = self._reader.read(rows, self._served, device)
            return self.slices.seen(found, self.slices.offsets_of(batch))
        self.ensure_open()
        ticket, batch.ticket = batch.ticket, None
        if not (self.training and torch.is_grad_enabled()):
            if ticket is not None:
                self.drop(ticket)
            announced(self.mesh, True)
            return self.read(batch)
        if ticket is None:
            if self.consistency.reads_ahead:
                raise ConfigError(
                    f"{self.consistency.name} staleness reads ahead: iterate over collection.lookahead(batches)"
                )
            # Not on the group of the lookahead's thread, whose order of calls must stay its own.
            ticket = self.prepare(batch, purpose="control")
            try:
                self.fetch(ticket)
            except BaseException:  # nobody else has it to give up
                self.drop(ticket)
                raise
        self.live.append(ticket)
        return self.slices.values(self.exchange, ticket, self.handle, self.place.device)

    def lookahead(self, batches: Iterable[Batch]) -> Lookahead:
        """The same batches in the same order, each ready to use: its ids have travelled, its rows are resident.

        A thread runs `plan.lookahead` batches ahead; a batch's values are read exactly as many updates before its use
        as the plan's staleness says. Close the iterator to stop early.
        """
        self.ensure_open()
        self.updates.settle()
        found = Lookahead(
            batches if self.cached is None else self.cached.in_sight(batches, self.slices),
            prepare=self.prepare,
            fetch=self.fetch,
            drop=self.drop,
            window=self._window,
            depth=self.plan.lookahead,
            bounds=self.bounds,
            is_alone=self.mesh.num_ranks == 1,
            land=self.updates.land,
            is_in_order=self.cached is not None,
        )
        self.updates.read_by(found)
        return found

    def prepare(self, batch: Batch, *, purpose: str = "route") -> Ticket:
        """Collective, any one thread: ids travel, owners make the rows resident and pin them. While a lookahead
        closes, rows that have no room are left out: the ticket is good for `drop` alone."""
        self.ensure_open()
        ticket = self.slices.route(self.exchange, batch, self.step, purpose)
        batch.world_weight, batch.foreseen = ticket.weight, None
        owned = ticket.owned_ids, ticket.owned_offsets, ticket.next_use
        try:
            while True:
                seen = self.store.releases
                try:
                    ticket.slots, ticket.job = self.store.acquire(*owned)
                    self.exchange.place(ticket, self.store.views())
                    if batch.held is not None:
                        ticket.steps_left, held = batch.held
                        self.exchange.restore(ticket, held)
                    return ticket
                except BudgetExceeded:
                    # Rows of batches in flight may leave soon; not if training itself waits for this one.
                    waiting = self._window.starved.is_set()
                    is_main = threading.current_thread() is threading.main_thread()
                    if not (waiting or is_main):
                        self._window.crowded.set()
                    if self._window.closing.is_set() and not waiting:
                        return ticket  # without rows. Not an error: other ranks' threads wait for this one's ids
                    released = self.store.wait_for_release(seen, 0.05)
                    if is_main or (waiting and not released and self._window.starved.is_set()):
                        raise
        except BaseException:  # nobody else has it to give up
            self.drop(ticket)
            raise

    def fetch(self, ticket: Ticket, steps_left: int = 0) -> None:
        """Collective, training thread: read rows that are due so many steps before their use, as they are now."""
        ticket.steps_left = steps_left
        if not (unread := ticket.unread()):
            return
        self.store.wait(ticket.job)
        in_place = not self.consistency.reads_ahead
        self.exchange.fetch(ticket, RowSource(self.store.views(), ticket.pinned, in_place))
        for each in unread:
            each.seen = None if each.reads is None else self.step - len(self.updates)

    def finite(self) -> bool:
        """Whether every gradient recorded on this rank is finite."""
        return all(
            all_finite(part)
            for ticket in self.live
            for gradients, _ in ticket.recorded()
            for part in gradients
        )

    def collect(self) -> Pushed:
        """Collective: push what backward recorded since the last step to the rows' owners. It has arrived there, but
        where updates land late (`push`). Completes the gradients of `exchange.pushed_parameters`.

        Once per step: `push` then applies it. RuntimeError if a backward came in between.
        """
        for ticket in self.live:
            for gradients, versions in ticket.recorded():
                if [gradient._version for gradient in gradients] != versions:
                    raise RuntimeError(
                        "a gradient given to backward was changed in place before step(); rows keep no copy of "
                        "it: give backward a tensor of its own"
                    )
        recorded = sum(ticket.num_backwards for ticket in self.live)
        if self.pushed is None:
            pushed = Pushed(self.exchange.begin_push(self.live, self.step), recorded)
            if not self._lands_late:
                pushed.arrive()
            self.pushed = pushed
        elif self.pushed.recorded != recorded:
            raise RuntimeError(
                "backward was called after the gradients were clipped; clip between the last backward "
                "and step()"
            )
        return self.pushed

    def squared_gradient_norm(self) -> float:
        """Collective: the sum of squares of all rows' summed gradients, over all ranks."""
        pushed, square = self.collect(), 0.0
        if (gradients := pushed.arrive()) is not None:
            pushed.gradients, square = self.exchange.squared_norm(gradients)
        total = torch.tensor([square], dtype=torch.float64)
        return float(self.mesh.all_reduce("push", total, counts_as="control"))

    def push(self, optimizers: Tensor, settings: Tensor) -> None:
        """Collective: push what backward recorded, apply it once, release the rows.

        Where reads are `LATE` steps early or more it only begins (`exchange.updates`), unless gradients were waited for
        (clipping), or a policy or a cache must hear of each update. optimizers (P,) int32, settings (P, 16)
        float64 by declared part: see `_native.update`."""
        optimizers, settings = map(self.slices.by_part, (optimizers, settings))
        update = Update(self.step, self.collect(), self.live, optimizers, settings.clone())
        self.updates.make(update)
        self.live, self.pushed, self._has_loaded_states = [], None, False
        self.step += 1

    def take_back(self) -> None:
        """What `collect` pushed since the last step will not be applied."""
        pushed, self.pushed = self.pushed, None
        if pushed is not None:
            pushed.arrive()

    def keep(self, tickets: Sequence[Ticket]) -> None:
        """Drop the other batches since the last step: no rank had a gradient for them."""
        self.take_back()
        kept = {id(ticket) for ticket in tickets}
        for ticket in self.live:
            if id(ticket) not in kept:
                self.drop(ticket)
        self.live = list(tickets)

    def forget(self) -> None:
        """Drop every batch since the last step without applying it."""
        self.keep([])

    def drop(self, ticket: Ticket) -> None:
        """Give a prepared batch up: nothing of it is applied, its rows are unpinned."""
        self.exchange.drop(ticket)
        slots = ticket.slots
        ticket.finish()
        if slots is not None:
            try:
                self.store.wait(ticket.job)  # its rows may still be on their way into their slots
            finally:
                self.store.release(slots, ticket.owned_offsets, dirty=False)

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Collective, every rank with the same ids (N,): their weights (N, dim) as they are now.

        Rows never trained read as their first value; nothing is remembered of the call.
        """
        self.ensure_open()
        self.updates.settle()
        numbers = self._slices(table)
        rows = self.slices.laid[numbers[0]].table.rows
        unique, inverse = torch.unique(ids, return_inverse=True)
        if rows is not None and len(unique) and not (unique[0] >= 0 and unique[-1] < rows):
            raise IdRangeError(
                f"table {table!r}: got ids {int(unique[0])} .. {int(unique[-1])}, wanted 0 .. {rows - 1}"
            )
        compute, dtype = self.declaration.compute_dtype, self.declaration.dtype
        width = self.tables[self._number(table)].width
        found = torch.zeros(len(unique), width, dtype=compute)
        for t in numbers:
            owned = self.shards[t].owns(unique, rows)
            if self.mesh.rank not in self.slices.laid[t].sharding.holders:
                owned[:] = False  # another's copy of a replicated row
            num_owned = int(owned.sum())
            offsets = torch.tensor([0] * (t + 1) + [num_owned] * (len(self.shards) - t))
            read = self.store.read(unique[owned].contiguous(), offsets)[t].to(compute)
            found[owned, slice(*self.slices.laid[t].columns)] = read
        # One rank's values and zeros: exact.
        return self.mesh.all_reduce("evaluate", found).to(dtype)[inverse]

    def delete(self, table: str, ids: Tensor) -> None:
        """Every rank with the same ids (N,): their rows are forgotten, wherever they are; the next read of one gives
        its first value. A row that a batch in flight uses is born again in place. Ids never trained are passed over."""
        self.ensure_open()
        self.updates.settle()
        for t in without_copies(self.cached, self._slices(table)):
            mine = ids[self.shards[t].owns(ids, self.slices.laid[t].table.rows)].unique()
            self.store.delete(t, mine)
            policy = self.policies.get(t)
            if isinstance(policy, RowRetention):
                policy.drop(mine)

    def scan(self, table: str) -> Iterator[Rows]:
        """This rank's trained rows, each once, a run at a time, in memory or below it; of a replicated table every rank
        has them all, of one cut by columns those of its slice. Changes nothing; the table must not be trained
        meanwhile. Collective where updates land late."""
        self.ensure_open()
        self.updates.settle()
        for t in self._slices(table):
            kind = self.slices.laid[t].table
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

    def _slices(self, table: str) -> tuple[int, ...]:
        """Numbers of a table's slices, from the left, among all that were laid out."""
        return self.slices.of_table[self._number(table)]

    def adopt(self, t: int, ids: Tensor, records: Tensor) -> None:
        """Between steps: these rows of slice t came here from elsewhere. They are admitted, and others may have to
        leave for them. ids (N,) unique; records (N, record_bytes) uint8."""
        policy = self.policies.get(t)
        if isinstance(policy, RowRetention):
            norms, table = None, self.slices.laid[t].table
            if policy.reads_norms:
                every = torch.arange(len(ids), dtype=torch.int32)
                rows = RowView(records.data_ptr(), table.record_bytes, table.width, table.dtype)
                norms = self.exchange.squared_norms(rows, every)
            self.store.delete(t, policy.adopt(ids, self.step, norms).unique())

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Evaluation: sees every update, leaves no trace; any number of training batches may be in flight. A server
        calls it where the others call the collection: `topology.reads`."""
        self.updates.settle()
        ticket = self.slices.route(self.exchange, batch, self.step, "evaluate")
        batch.world_weight = ticket.weight
        found = self.store.read(ticket.owned_ids, ticket.owned_offsets)
        views = [
            RowView(rows.data_ptr(), table.width * table.itemsize, table.width, table.dtype)
            for rows, table in zip(found, self.store.tables, strict=True)
        ]
        numbers = [torch.arange(len(rows), dtype=torch.int32) for rows in found]
        self.exchange.fetch(ticket, RowSource(views, torch.cat(numbers), True, found))
        return self.slices.values(self.exchange, ticket, self.handle, self.place.device)

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
