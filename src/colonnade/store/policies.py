"""Admission and eviction policies of open tables: the settings of `colonnade.retention` applied to one rank's rows.

Legend: N rows of a call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.errors import CheckpointError, ConfigError
from colonnade.ops.reference import GOLDEN
from colonnade.retention import (
    Admission,
    AgeEviction,
    CountMinAdmission,
    Eviction,
    MaxRowsEviction,
    RandomAdmission,
)
from colonnade.store.dram import table_seed
from colonnade.table import Table
from colonnade.topology.sharding import Shard

MOST_BLOCKS = 4096
PIECE_ROWS = 1 << 14
PIECE_BYTES = 1 << 18
LEAST_WIDTH = 256  # counters of a sketch's block: fewer fill up too unevenly
WORD = 2**64 - 1


class RowPolicy(Protocol):
    """Policy that decides at the owner, after an update was applied, which rows of a table it forgets."""

    def select_rows_to_delete(self, ids: Tensor, update_counts: Tensor, step: int) -> Tensor:
        """Return the ids to forget: any of the trained ones (not admitted) or of earlier ones (evicted).

        ids (N,), update_counts (N,) after the update: this rank's rows that step `step` trained. The result must
        depend on the arguments of these calls and their order only, so that a run can be repeated.
        """
        ...


class RowRetention:
    """Admission and eviction of one table's rows on one rank. A `RowPolicy`.

    Its arguments alone decide; `state` is all it remembers. Work and memory per row of a step are bounded, whatever the
    table's size (`work`: rows and counters touched, ever). Used by the training thread, except `finish_state`.
    """

    def __init__(self, table: Table, *, seed: int, shard: Shard | None = None) -> None:
        """shard: this rank's; None: the whole table. Raises ConfigError if its share of `max_rows` is 0."""
        shard = shard or Shard()
        self.name = table.name
        self.admission = table.admission
        self.eviction = table.eviction
        self.shard = shard
        self._seed = table_seed(seed, f"{table.origin[0]}/admission")
        self._sketch = (
            _open_admission_sketch(table.admission, shard)
            if isinstance(table.admission, CountMinAdmission)
            else None
        )
        self._rows = None if table.eviction is None else _open_eviction_order(table, shard)
        self._counted_to = 0  # the sketch's step when a snapshot of it began

    @property
    def reads_norms(self) -> bool:
        """True if `select_rows_to_delete` needs the rows' norms."""
        return isinstance(self.eviction, MaxRowsEviction) and self.eviction.by == "norm"

    def select_rows_to_delete(
        self, ids: Tensor, update_counts: Tensor, step: int, norms: Tensor | None = None
    ) -> Tensor:
        """Return the ids to forget, as `RowPolicy`.

        norms (N,) float64: squared, after the update; only if `reads_norms`.
        """
        # A clock of one: the row was initialised for this update, so it is not admitted yet.
        forgotten = []
        new_rows = torch.nonzero(update_counts == 1).flatten()
        stays = torch.ones(len(ids), dtype=torch.bool)
        if self.admission is not None:
            new_ids = ids[new_rows].contiguous()
            refused = new_rows[~self._admits(new_ids, step)]
            forgotten.append(ids[refused])
            stays[refused] = False
        if self._rows is not None:
            updated = stays & (update_counts > 0)
            row_norms = None if norms is None else norms[updated].contiguous()
            evicted = self._rows.record_updates(ids[updated].contiguous(), row_norms, step)
            forgotten.append(torch.as_tensor(evicted))
        return torch.cat(forgotten) if forgotten else ids[:0]

    def adopt(self, ids: Tensor, step: int, norms: Tensor | None = None) -> Tensor:
        """Record rows (N,) that were written from elsewhere: admitted, and as new as rows updated in `step`.

        Returns the ids to forget.
        """
        if self._rows is None:
            return ids[:0]
        return torch.as_tensor(self._rows.record_updates(ids, norms, step))

    def drop(self, ids: Tensor) -> None:
        """Forget what is remembered of deleted rows."""
        if self._rows is not None:
            self._rows.remove(ids)

    def __len__(self) -> int:
        """Return the number of remembered rows; 0 without an eviction policy."""
        return 0 if self._rows is None else len(self._rows)

    @property
    def work(self) -> int:
        return sum(part.work for part in (self._rows, self._sketch) if part is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        sketch = 0 if self._sketch is None else len(torch.as_tensor(self._sketch.counters))
        return sketch + (0 if self._rows is None else self._rows.bytes)

    def state(self) -> dict[str, list[Tensor]]:
        """Copy what is remembered: `begin_state` and `finish_state`."""
        self.begin_state()
        return self.finish_state()

    def begin_state(self) -> None:
        """Fix the content that `finish_state` copies: the state as of now. Training thread; sets a bit for each row."""
        if self._rows is not None:
            self._rows.begin_snapshot()
        if self._sketch is not None:
            self._sketch.begin_snapshot()
            self._counted_to = self._sketch.step

    def finish_state(self) -> dict[str, list[Tensor]]:
        """Copy the state of `begin_state`: ids (R,), steps and values of the rows; counters; counted_to.

        Any one thread, while training continues. Each list is in pieces, so that neither copying nor writing delays
        training for long.
        """
        state: dict[str, list[Tensor]] = {}
        if self._rows is not None:
            columns: list[list[Tensor]] = [[], [], []]
            while len((part := self._rows.save_some(PIECE_ROWS))[0]):
                for column, values in zip(columns, part, strict=True):
                    column.append(torch.as_tensor(values))
            state |= dict(zip(("ids", "steps", "values"), columns, strict=True))
        if self._sketch is not None:
            counters = torch.as_tensor(self._sketch.saved())
            # Cloned: a piece that shares memory with others would be saved with all of it.
            state["counters"] = [piece.clone() for piece in torch.split(counters, PIECE_BYTES)]
            state["counted_to"] = [torch.tensor([self._counted_to])]
        return state

    def restore(self, states: Sequence[Mapping[str, Sequence[Tensor]]]) -> None:
        """Restore the state of all owners of the table's rows, in order of their indices.

        From as many owners as now, this is exact, and only this owner's state is read; from other numbers, each owner
        takes the rows it owns now and the sum of the counters that cover its ids. Raises CheckpointError if the state
        is of other settings.
        """
        is_same = len(states) == self.shard.num_owners
        index = self.shard.owner_index
        assert index is not None
        owners = [index] if is_same else list(range(len(states)))
        wanted = {"ids", "steps", "values"} if self._rows is not None else set()
        wanted |= {"counters", "counted_to"} if self._sketch is not None else set()
        for state in (states[owner] for owner in owners):
            if set(state) != wanted:
                raise CheckpointError(
                    f"table {self.name!r}: the commit's memory of rows holds {sorted(state) or 'nothing'}, this run's "
                    f"admission and eviction need {sorted(wanted)}; use the settings it was trained with"
                )
        if self._rows is not None:
            owned = [self._select_owned_rows(states[owner]) for owner in owners]
            self._rows.restore(*(torch.cat(column) for column in zip(*owned, strict=True)))
        if self._sketch is not None:
            assert isinstance(self.admission, CountMinAdmission)
            total = torch.as_tensor(self._sketch.counters)
            layout = SketchLayout(self.admission)
            counters = [
                (
                    torch.cat([*states[owner]["counters"]]),
                    range(*layout.blocks_of_owner(len(states), owner)),
                )
                for owner in owners
            ]
            own_blocks = range(*layout.blocks_of_owner(self.shard.num_owners, index))
            layout.merge_counters(total, own_blocks, counters, self.name)
            self._sketch.step = max(int(states[owner]["counted_to"][0]) for owner in owners)

    def _select_owned_rows(
        self, state: Mapping[str, Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *state["ids"]])
        is_owned = self.shard.owns(ids, None)
        steps, values = (
            torch.cat([torch.empty(0, dtype=torch.int32), *state[name]])
            for name in ("steps", "values")
        )
        return ids[is_owned], steps[is_owned], values[is_owned]

    def _admits(self, ids: Tensor, step: int) -> Tensor:
        """Decide the admission of new rows: (N,) bool."""
        if self._sketch is not None:
            return torch.as_tensor(self._sketch.record_updates(ids, step)).bool()
        assert isinstance(self.admission, RandomAdmission)
        return draw_bits(ids, step, self._seed) < int(self.admission.probability * 2**53)


def draw_bits(ids: Tensor, step: int, seed: int) -> Tensor:
    """Draw 53 bits for each id, (N,) int64, that depend on (seed, id, step) only."""
    words = ids.numpy().view(np.uint64)
    step_word = np.uint64((seed + (step + 1) * GOLDEN) & WORD)
    drawn = _mix64(_mix64(words + np.uint64(GOLDEN)) ^ _mix64(np.atleast_1d(step_word)))
    return torch.from_numpy((drawn >> np.uint64(11)).view(np.int64))


class SketchLayout:
    """Layout of a sketch's counters: blocks of (depth, width) bytes, each for an equal share of all ids' hashes."""

    def __init__(self, admission: CountMinAdmission) -> None:
        self.depth = math.ceil(math.log2(1 / admission.error))
        # As in a Bloom filter: with every second counter in use, all `depth` of an id err once in 2^depth.
        width = math.ceil(admission.expected_ids / math.log(2))
        self.count = max(1, min(MOST_BLOCKS, 2 ** int(math.log2(max(1, width / LEAST_WIDTH)))))
        self.width = -(-width // self.count)

    def blocks_of_owner(self, num_owners: int, index: int) -> tuple[int, int]:
        """Return (first, end) of the blocks with the ids of an owner; a block between two owners is in both."""
        return self.count * index // num_owners, -(-self.count * (index + 1) // num_owners)

    def merge_counters(
        self,
        counters_out: Tensor,
        block_range: range,
        owner_counters: Sequence[tuple[Tensor, range]],
        table_name: str,
    ) -> None:
        """Write sums of other owners' counters into `counters_out`, the counters of `block_range`. 255 means 255 or
        more."""
        size = self.depth * self.width
        sums = torch.zeros(len(block_range), size, dtype=torch.int32)
        for values, owner_blocks in owner_counters:
            if len(values) != len(owner_blocks) * size:
                raise CheckpointError(
                    f"table {table_name!r}: the commit's sketch has {len(values)} counters, "
                    f"wanted {len(owner_blocks) * size}; use the admission it was trained with"
                )
            first = max(block_range.start, owner_blocks.start)
            end = min(block_range.stop, owner_blocks.stop)
            if first < end:
                part = values.view(-1, size)[first - owner_blocks.start : end - owner_blocks.start]
                sums[first - block_range.start : end - block_range.start] += part
        counters_out.view(-1, size)[:] = sums.clamp_(max=255).to(torch.uint8)


def open_retention_policies(
    tables: Sequence[Table], shards: Sequence[Shard], *, seed: int
) -> dict[int, RowRetention]:
    """Create the policies of tables with admission or eviction and rows on this rank, by table index.

    shards: by table, this rank's. Raises ConfigError as `RowRetention`.
    """
    return {
        t: RowRetention(table, seed=seed, shard=shard)
        for t, (table, shard) in enumerate(zip(tables, shards, strict=True))
        if shard.owner_index is not None
        and (table.admission is not None or table.eviction is not None)
    }


def check_retention_policies(
    overridden_tables: Collection[tuple[int, ...]],
    declared_tables: Collection[int],
    tables: Sequence[Table],
    *,
    has_copies: Sequence[bool],
) -> None:
    """Raise ConfigError if one of the caller's policies cannot work with a table's sharding, cache or own policy.

    overridden_tables: indices of the slices of each table with a policy by the caller; declared_tables: of tables with
    a policy of their own; has_copies: by slice, whether ranks have copies; [] for none.
    """
    if cut := [tables[slices[0]].origin[0] for slices in overridden_tables if len(slices) > 1]:
        raise ConfigError(
            f"table {cut[0]!r}: got a policy of your own for rows that are cut by columns, or hot and cold; choose "
            "another sharding"
        )
    if copied := sorted(
        tables[t].name for (t,) in overridden_tables if has_copies and has_copies[t]
    ):
        raise ConfigError(
            f"table {copied[0]!r}: got a policy of your own together with copies of its rows (plan.cache), which would "
            "outlive rows that it forgets; leave one of them out"
        )
    if doubled := sorted(tables[t].name for (t,) in overridden_tables if t in declared_tables):
        raise ConfigError(
            f"table {doubled[0]!r}: got a policy for a table with admission or eviction of its own; give one of them"
        )


def describe_retention(admission: Admission | None, eviction: Eviction | None) -> dict[str, str]:
    """Describe the settings in plain JSON, for naming differences; {} if all rows stay."""
    settings = {"admission": admission, "eviction": eviction}
    words = {name: repr(value) for name, value in settings.items() if value is not None}
    # Commits from before `age_steps` existed do not contain it.
    return {name: text.replace(", age_steps=None", "") for name, text in words.items()}


def _open_admission_sketch(admission: CountMinAdmission, shard: Shard) -> _native.CountMinSketch:
    layout = SketchLayout(admission)
    assert shard.owner_index is not None
    first, end = layout.blocks_of_owner(shard.num_owners, shard.owner_index)
    return _native.CountMinSketch(
        admission.updates,
        layout.depth,
        layout.width,
        layout.count,
        first,
        end,
        admission.halve_steps or 0,
    )


def _open_eviction_order(table: Table, shard: Shard) -> _native.Retention:
    num_owners = shard.num_owners
    settings = table.eviction
    if isinstance(settings, AgeEviction):
        return _native.Retention("recency", 0, settings.steps, 0, num_owners)
    assert isinstance(settings, MaxRowsEviction) and shard.owner_index is not None
    share = (settings.rows + shard.owner_index) // num_owners
    if settings.rows < num_owners:
        raise ConfigError(
            f"table {table.name!r}: got MaxRowsEviction(rows={settings.rows}) for {num_owners} ranks, wanted at "
            "least a row for each"
        )
    return _native.Retention(
        settings.by, share, settings.age_steps or 0, settings.halve_steps or 0, num_owners
    )


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
