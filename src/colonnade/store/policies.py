"""Who stays in an open table: the settings of `colonnade.retention` at work on one rank's rows.

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
LEAST_WIDTH = 256  # counters of a sketch's block: fewer would be filled too unevenly
WORD = 2**64 - 1


class RowPolicy(Protocol):
    """Which rows of a table stay: admission and eviction, decided at the owner when an update has been applied."""

    def forget(self, ids: Tensor, clocks: Tensor, step: int) -> Tensor:
        """ids (N,), clocks (N,) after the update: the rows that step `step` trained, here. Returns the ids to forget:
        any of these (not admitted) or of earlier ones (evicted). Must depend on nothing but what it is told, and
        in no other order, so that a run can be repeated."""
        ...


class RowRetention:
    """Admission and eviction of one table's rows on one rank. A `RowPolicy`.

    What it hears decides; `state` is all it remembers. Work and memory are bounded for each row of a step, whatever
    the table's size (`work`: rows and counters touched, ever). Used by the training thread, but for `finish_state`.
    """

    def __init__(self, table: Table, *, seed: int, shard: Shard | None = None) -> None:
        """shard: what this rank has of the table; None: all. Raises ConfigError where it has none of `max_rows`."""
        shard = shard or Shard()
        self.name, self.admission, self.eviction = table.name, table.admission, table.eviction
        self.shard = shard
        self._seed = table_seed(seed, f"{table.origin[0]}/admission")
        self._sketch = (
            _sketch(table.admission, shard)
            if isinstance(table.admission, CountMinAdmission)
            else None
        )
        self._rows = None if table.eviction is None else _order(table, shard)
        self._counted_to = 0  # the sketch's step when a copy of it began

    @property
    def reads_norms(self) -> bool:
        """Whether `forget` wants the rows' norms."""
        return isinstance(self.eviction, MaxRowsEviction) and self.eviction.by == "norm"

    def forget(self, ids: Tensor, clocks: Tensor, step: int, norms: Tensor | None = None) -> Tensor:
        """See `RowPolicy`. norms (N,) float64: squared, after the update; only where `reads_norms`."""
        # A clock of one: the row was born for this update, so it has not been admitted yet.
        found, asks = [], torch.nonzero(clocks == 1).flatten()
        stays = torch.ones(len(ids), dtype=torch.bool)
        if self.admission is not None:
            new = ids[asks].contiguous()
            refused = asks[~self._admits(new, step)]
            found.append(ids[refused])
            stays[refused] = False
        if self._rows is not None:
            updated = stays & (clocks > 0)
            heard = None if norms is None else norms[updated].contiguous()
            left = self._rows.hear(ids[updated].contiguous(), heard, step)
            found.append(torch.as_tensor(left))
        return torch.cat(found) if found else ids[:0]

    def adopt(self, ids: Tensor, step: int, norms: Tensor | None = None) -> Tensor:
        """These rows were put here from elsewhere (N,): they are admitted, and as new as rows updated in `step`.
        Returns the ids to forget."""
        if self._rows is None:
            return ids[:0]
        return torch.as_tensor(self._rows.hear(ids, norms, step))

    def drop(self, ids: Tensor) -> None:
        """These rows were deleted."""
        if self._rows is not None:
            self._rows.remove(ids)

    def __len__(self) -> int:
        """Rows remembered; 0 where only admission is decided."""
        return 0 if self._rows is None else len(self._rows)

    @property
    def work(self) -> int:
        return sum(part.work for part in (self._rows, self._sketch) if part is not None)

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        sketch = 0 if self._sketch is None else len(torch.as_tensor(self._sketch.counters))
        return sketch + (0 if self._rows is None else self._rows.bytes)

    def state(self) -> dict[str, list[Tensor]]:
        """A copy of what is remembered: `begin_state` and `finish_state`."""
        self.begin_state()
        return self.finish_state()

    def begin_state(self) -> None:
        """Training thread: what is remembered now is what `finish_state` copies. A bit for each row, nothing is copied
        yet."""
        if self._rows is not None:
            self._rows.begin_snapshot()
        if self._sketch is not None:
            self._sketch.begin_snapshot()
            self._counted_to = self._sketch.step

    def finish_state(self) -> dict[str, list[Tensor]]:
        """Any one thread, training may go on: ids (R,), steps, values of the rows; counters; counted_to. Each in
        pieces, so that neither copying nor writing them keeps training waiting for long."""
        found: dict[str, list[Tensor]] = {}
        if self._rows is not None:
            columns: list[list[Tensor]] = [[], [], []]
            while len((part := self._rows.save_some(PIECE_ROWS))[0]):
                for column, values in zip(columns, part, strict=True):
                    column.append(torch.as_tensor(values))
            found |= dict(zip(("ids", "steps", "values"), columns, strict=True))
        if self._sketch is not None:
            counters = torch.as_tensor(self._sketch.saved())
            # A piece that shares its memory with others would be written with them.
            found["counters"] = [piece.clone() for piece in counters.split(PIECE_BYTES)]
            found["counted_to"] = [torch.tensor([self._counted_to])]
        return found

    def restore(self, states: Sequence[Mapping[str, Sequence[Tensor]]]) -> None:
        """Put back what all owners of the table's rows remembered, in order of their places. From as many as there are
        now, this is exact, and only this one's is looked at; from others, each takes the rows it owns now and the sum
        of the counters that cover its ids. Raises CheckpointError where it is of other settings."""
        same, place = len(states) == self.shard.num_owners, self.shard.place
        assert place is not None
        places = [place] if same else list(range(len(states)))
        wanted = {"ids", "steps", "values"} if self._rows is not None else set()
        wanted |= {"counters", "counted_to"} if self._sketch is not None else set()
        for state in (states[p] for p in places):
            if set(state) != wanted:
                raise CheckpointError(
                    f"table {self.name!r}: the commit's memory of rows holds {sorted(state) or 'nothing'}, this run's "
                    f"admission and eviction need {sorted(wanted)}; use the settings it was trained with"
                )
        if self._rows is not None:
            kept = [self._owned(states[p]) for p in places]
            self._rows.restore(*(torch.cat(column) for column in zip(*kept, strict=True)))
        if self._sketch is not None:
            assert isinstance(self.admission, CountMinAdmission)
            mine = torch.as_tensor(self._sketch.counters)
            layout = Blocks(self.admission)
            counters = [
                (torch.cat([*states[p]["counters"]]), range(*layout.of(len(states), p)))
                for p in places
            ]
            layout.put(mine, range(*layout.of(self.shard.num_owners, place)), counters, self.name)
            self._sketch.step = max(int(states[p]["counted_to"][0]) for p in places)

    def _owned(self, state: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *state["ids"]])
        mine = self.shard.owns(ids, None)
        steps, values = (
            torch.cat([torch.empty(0, dtype=torch.int32), *state[name]])
            for name in ("steps", "values")
        )
        return ids[mine], steps[mine], values[mine]

    def _admits(self, ids: Tensor, step: int) -> Tensor:
        """(N,) bool."""
        if self._sketch is not None:
            return torch.as_tensor(self._sketch.hear(ids, step)).bool()
        assert isinstance(self.admission, RandomAdmission)
        return chance(ids, step, self._seed) < int(self.admission.probability * 2**53)


def chance(ids: Tensor, step: int, seed: int) -> Tensor:
    """(N,) int64, 53 bits that depend on (seed, id, step) only."""
    words = ids.numpy().view(np.uint64)
    of_step = np.uint64((seed + (step + 1) * GOLDEN) & WORD)
    drawn = _mix64(_mix64(words + np.uint64(GOLDEN)) ^ _mix64(np.atleast_1d(of_step)))
    return torch.from_numpy((drawn >> np.uint64(11)).view(np.int64))


class Blocks:
    """How a sketch's counters lie: blocks of (depth, width) bytes, each of an equal part of all ids' hashes."""

    def __init__(self, admission: CountMinAdmission) -> None:
        self.depth = math.ceil(math.log2(1 / admission.error))
        # As in a Bloom filter: with every second counter in use, depth of them err together once in 2^depth.
        width = math.ceil(admission.expected_ids / math.log(2))
        self.count = max(1, min(MOST_BLOCKS, 2 ** int(math.log2(max(1, width / LEAST_WIDTH)))))
        self.width = -(-width // self.count)

    def of(self, num_owners: int, place: int) -> tuple[int, int]:
        """(first, end) of the blocks that hold the ids of an owner; a block between two owners is in both."""
        return self.count * place // num_owners, -(-self.count * (place + 1) // num_owners)

    def put(
        self, mine: Tensor, blocks: range, counters: Sequence[tuple[Tensor, range]], table: str
    ) -> None:
        """Sums of counters of other owners' blocks into `mine`, of `blocks`: 255 stands for more."""
        size = self.depth * self.width
        total = torch.zeros(len(blocks), size, dtype=torch.int32)
        for values, there in counters:
            if len(values) != len(there) * size:
                raise CheckpointError(
                    f"table {table!r}: the commit's sketch has {len(values)} counters, wanted {len(there) * size}; "
                    "use the admission it was trained with"
                )
            first, end = max(blocks.start, there.start), min(blocks.stop, there.stop)
            if first < end:
                part = values.view(-1, size)[first - there.start : end - there.start]
                total[first - blocks.start : end - blocks.start] += part
        mine.view(-1, size)[:] = total.clamp_(max=255).to(torch.uint8)


def open_policies(
    tables: Sequence[Table], shards: Sequence[Shard], *, seed: int
) -> dict[int, RowRetention]:
    """By number of the table, for those with rows here that ask for admission or eviction; shards: by table, what this
    rank has. Raises ConfigError as `RowRetention`."""
    return {
        t: RowRetention(table, seed=seed, shard=shard)
        for t, (table, shard) in enumerate(zip(tables, shards, strict=True))
        if shard.place is not None and (table.admission is not None or table.eviction is not None)
    }


def check_policies(
    given: Collection[tuple[int, ...]],
    own: Collection[int],
    tables: Sequence[Table],
    *,
    has_copies: Sequence[bool],
) -> None:
    """given: numbers of the slices of each table that gets a policy by hand; own: of those that have one; has_copies:
    by slice, whether ranks keep copies; [] of none. Raises ConfigError for what one policy cannot see."""
    if cut := [tables[numbers[0]].origin[0] for numbers in given if len(numbers) > 1]:
        raise ConfigError(
            f"table {cut[0]!r}: got a policy of your own for rows that are cut by columns, or hot and cold; choose "
            "another sharding"
        )
    if kept := sorted(tables[t].name for (t,) in given if has_copies and has_copies[t]):
        raise ConfigError(
            f"table {kept[0]!r}: got a policy of your own beside copies of its rows (plan.cache), which would outlive "
            "rows that it forgets; leave one of them out"
        )
    if both := sorted(tables[t].name for (t,) in given if t in own):
        raise ConfigError(
            f"table {both[0]!r}: got a policy for a table with admission or eviction of its own; give one of them"
        )


def retention_words(admission: Admission | None, eviction: Eviction | None) -> dict[str, str]:
    """Plain JSON that a difference can be named by; {} where all rows stay."""
    said = {"admission": admission, "eviction": eviction}
    words = {name: repr(value) for name, value in said.items() if value is not None}
    # Commits of before `age_steps` was there do not say it.
    return {name: each.replace(", age_steps=None", "") for name, each in words.items()}


def _sketch(admission: CountMinAdmission, shard: Shard) -> _native.CountMinSketch:
    blocks = Blocks(admission)
    assert shard.place is not None
    first, end = blocks.of(shard.num_owners, shard.place)
    return _native.CountMinSketch(
        admission.updates, blocks.depth, blocks.width, blocks.count, first, end, admission.halve_steps or 0
    )  # fmt: skip


def _order(table: Table, shard: Shard) -> _native.Retention:
    num_owners = shard.num_owners
    said = table.eviction
    if isinstance(said, AgeEviction):
        return _native.Retention("recency", 0, said.steps, 0, num_owners)
    assert isinstance(said, MaxRowsEviction) and shard.place is not None
    share = (said.rows + shard.place) // num_owners
    if said.rows < num_owners:
        raise ConfigError(
            f"table {table.name!r}: got MaxRowsEviction(rows={said.rows}) for {num_owners} ranks, wanted at "
            "least a row for each"
        )
    return _native.Retention(said.by, share, said.age_steps or 0, said.halve_steps or 0, num_owners)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
