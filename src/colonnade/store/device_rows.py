"""Rows of one table as tensors on a device: slots, their conversion to and from records, updates.

Legend: S slots, N rows of a call, D weights of a row, F scalars of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.ops import optimizers, reference
from colonnade.store.contract import RowView
from colonnade.table import Table

OCCUPIED = 1
VALID = 2
DIRTY = 4
PIN = 8
"""Flags of a slot: it has a row; its values are in place; they are newer than below. Pins are counted above them."""
DIRECT_ROWS = 6  # per slot: an array indexes a smaller vocabulary in less memory than a hash table
HALF_LIFE = 32  # uses per slot after which a count of uses is halved
MAX_HALF_LIVES = 60.0  # that float32 counts can distinguish; then all are scaled down
EXACT_SLOTS = 8192  # up to which the lowest scores are found exactly
SAMPLE_SLOTS = 1024  # from which the threshold is estimated in larger directories
MIN_SHARE = 0.02  # of the rows are below the threshold
SWEEP_SLOTS = 1 << 16  # swept at a time
UNKNOWN = 49151  # batches ahead that stand for an unknown next use


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRows:
    """Memory of a table's rows on a device. Slots (N,) are int64 tensors on it, each slot once."""

    table: Table
    weights: Tensor  # (S, D) of the table's dtype
    state: Tensor  # (S, F) of its compute dtype
    lows: Tensor | None  # (S, D) int16: lower halves of bfloat16 masters
    clocks: Tensor  # (S,) int64
    seed: int  # of the table: rounds 16-bit weights

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def rounds_at_random(self) -> bool:
        return self.weights.dtype.itemsize == 2 and self.lows is None

    @property
    def view(self) -> RowView:
        table = self.table
        return RowView(
            self.weights.data_ptr(),
            table.width * table.itemsize,
            table.width,
            table.dtype,
            str(self.device),
            self.weights,
        )

    def records(self, slots: Tensor) -> Tensor:
        """Copy records (N, record_bytes) uint8 of these slots, on the device."""
        lows = None if self.lows is None else self.lows[slots]
        return reference.pack(self.weights[slots], self.state[slots], self.clocks[slots], lows)

    def write_records(self, slots: Tensor, records: Tensor) -> None:
        """Overwrite slots with records (N, record_bytes) uint8 on the device."""
        table = self.table
        weights, state, clocks, lows = reference.unpack(
            records, table.width, table.state_floats, self.weights.dtype, is_split=table.master
        )
        self.weights[slots] = weights
        self.state[slots] = state
        self.clocks[slots] = clocks
        if self.lows is not None and lows is not None:
            self.lows[slots] = lows

    def update(
        self,
        slots: Tensor,
        ids: Tensor | None,
        sums: Tensor,
        kinds: Sequence[int],
        settings: Sequence[optimizers.Settings],
    ) -> None:
        """Apply one update by summed gradients (N, D) of the compute dtype, as `_native.update` does.

        kinds and settings: by part. ids (N,): needed if rows are rounded at random.
        """
        weights = self.weights[slots]
        state = self.state[slots]
        clocks = self.clocks[slots]
        if self.lows is not None:
            values = reference.join(weights, self.lows[slots])
        else:
            values = weights.to(self.state.dtype)
        for part, kind, part_settings in zip(self.table.parts, kinds, settings, strict=True):
            columns = slice(part.column, part.column + part.dim)
            num_states = _native.optimizer_state_elements(kind, part.dim)
            optimizers.apply_optimizer(
                _native.OPTIMIZERS[kind],
                values[:, columns],
                state[:, part.state : part.state + num_states],
                clocks,
                sums[:, columns],
                part_settings,
            )
        if self.lows is not None:
            weights, self.lows[slots] = reference.split_masters(values)
        elif self.rounds_at_random:
            assert ids is not None
            weights = optimizers.round_stochastically(
                values, ids, clocks, self.seed, weights.dtype, first_column=self.table.origin[1]
            )
        else:
            weights = values
        self.weights[slots] = weights
        self.state[slots] = state
        self.clocks[slots] = optimizers.advance_clocks(clocks)


def enlarge_device_rows(rows: DeviceRows, num_slots: int) -> DeviceRows:
    """Copy rows into memory for `num_slots`; new slots have no defined content. Raises what torch raises if it does
    not fit."""
    copy = reserve_device_rows(rows.table, num_slots, rows.device, rows.seed)
    used = slice(len(rows.clocks))
    copy.weights[used] = rows.weights
    copy.state[used] = rows.state
    copy.clocks[used] = rows.clocks
    if copy.lows is not None and rows.lows is not None:
        copy.lows[used] = rows.lows
    return copy


def reserve_device_rows(
    table: Table, num_slots: int, device: torch.device, seed: int
) -> DeviceRows:
    """Reserve memory for `num_slots` rows, `table.record_bytes` each. Raises what torch raises if it does not fit."""
    compute = getattr(torch, table.compute_dtype)
    shape = (num_slots, table.width)
    return DeviceRows(
        table,
        torch.empty(shape, dtype=getattr(torch, table.dtype), device=device),
        torch.empty(num_slots, table.state_floats, dtype=compute, device=device),
        torch.empty(shape, dtype=torch.int16, device=device) if table.master else None,
        torch.empty(num_slots, dtype=torch.int64, device=device),
        seed,
    )


def _decode_next_uses() -> np.ndarray:
    """Decode the codes of `Batch.next_use` into batches ahead: (256,) float32."""
    ahead = np.exp2((np.arange(256) - 1) / 8)
    ahead[0] = UNKNOWN
    ahead[255] = np.inf
    return ahead.astype(np.float32)


BATCHES_AHEAD = _decode_next_uses()


class SlotDirectory:
    """Slots of a table's rows, and an eviction score of each: its access frequency, halved as time passes, or, from the
    first hint on, the time of its next use."""

    def __init__(self, num_slots: int, rows: int | None = None) -> None:
        """rows: vocabulary size; None: an open table."""
        self.num_slots = num_slots
        self.ids = np.zeros(num_slots, np.int64)
        self.flags = np.zeros(num_slots, np.int32)
        self.num_rows = self.num_pinned = 0
        self._scores = np.zeros(num_slots, np.float32)
        self._index: _ArrayIndex | _native.RowIndex = _native.RowIndex()
        if rows is not None and rows < DIRECT_ROWS * num_slots:
            self._index = _ArrayIndex(rows)
        self._num_used = 0  # slots that ever had a row; the free ones of these are in `_free`
        self._free = np.empty(0, np.int64)
        self._hand = 0  # where the next sweep begins
        self._time = 0.0  # half-lives; with hints, acquires
        self._has_hints = False
        self._random = np.random.default_rng(num_slots)

    def find_slots(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots (N,) int64 of ids; -1 where absent."""
        slots = np.empty(len(ids), np.int64)
        self._index.get(ids, slots)
        return slots

    def advance_clock(self, num_rows: int, is_hinted: bool) -> None:
        """Advance the clock of the scores before `num_rows` rows are used."""
        if is_hinted != self._has_hints:  # scores of the two kinds do not compare
            self._has_hints = is_hinted
            self._time = 0.0
            self._scores[:] = -UNKNOWN if is_hinted else 1.0
        self._time += 1.0 if is_hinted else num_rows / (HALF_LIFE * max(1, self.num_slots))
        if not is_hinted and self._time > MAX_HALF_LIVES:
            self._scores *= np.float32(2.0**-self._time)
            self._time = 0.0

    def pin_slots(self, slots: np.ndarray, next_use_codes: np.ndarray | None) -> None:
        """Pin rows in slots (N,) unique, and count their use. next_use_codes (N,) uint8 as in `Batch.next_use`."""
        self._add_pins(slots)
        if next_use_codes is None:
            self._scores[slots] += np.float32(2.0**self._time)
        else:
            self._scores[slots] = self._score_hints(next_use_codes)

    def unpin_slots(self, slots: np.ndarray, *, dirty: bool) -> None:
        """Undo one `pin_slots` or `admit_ids`. Raises ValueError, nothing changed, if a slot is not pinned."""
        flags = self.flags[slots] - np.int32(PIN)
        if len(flags) and flags.min() < 0:
            raise ValueError("a slot that is released is not pinned")
        if dirty:
            flags |= DIRTY
        self.flags[slots] = flags
        self.num_pinned -= int(np.count_nonzero(flags < PIN))

    def is_pinned(self, slots: np.ndarray) -> np.ndarray:
        return np.asarray(self.flags[slots] >= PIN)

    def count_pinned_others(self, own_slots: np.ndarray, num_call_rows: int) -> int:
        """Count the pinned rows outside `own_slots`, which `num_call_rows` rows of a call already have.

        Not exact if all these have room.
        """
        if self.num_pinned + num_call_rows <= self.num_slots:
            return self.num_pinned
        return self.num_pinned - int(np.count_nonzero(self.is_pinned(own_slots)))

    def choose_victim_slots(self, num_new_rows: int) -> np.ndarray:
        """Choose slots to evict for `num_new_rows` new rows: none if enough are free, never pinned ones. They must
        fit."""
        needed = num_new_rows - (self.num_slots - self.num_rows)
        if needed <= 0:
            return np.empty(0, np.int64)
        if self._num_used <= EXACT_SLOTS:
            return self._lowest_scored(self._find_evictable(0, self._num_used), needed)
        sample = self._random.integers(0, self._num_used, SAMPLE_SLOTS)
        scores = self._scores[sample[self._is_evictable(sample)]]
        share = max(MIN_SHARE, 1.5 * needed / (self.num_rows - self.num_pinned))
        if len(scores) and share < 1:
            victims = self._sweep_for_victims(
                needed, float(np.quantile(scores, share, method="lower"))
            )
            if len(victims) == needed:
                return victims
        return self._lowest_scored(self._find_evictable(0, self._num_used), needed)

    def admit_ids(
        self, ids: np.ndarray, victim_slots: np.ndarray, next_use_codes: np.ndarray | None
    ) -> np.ndarray:
        """Evict the victims of `choose_victim_slots(N)` and give pinned slots (N,) to ids (N,), which were absent."""
        self.free_slots(victim_slots)
        num_fresh = max(0, len(ids) - len(self._free))
        num_free = len(self._free) - (len(ids) - num_fresh)
        slots = np.concatenate(
            [self._free[num_free:], np.arange(self._num_used, self._num_used + num_fresh)]
        )
        self._index.put(ids, slots)
        self._free = self._free[:num_free]
        self._num_used = self._num_used + num_fresh
        self.ids[slots] = ids
        self.flags[slots] = OCCUPIED
        self.num_rows += len(slots)
        self._add_pins(slots)
        self._scores[slots] = (
            np.float32(2.0**self._time)
            if next_use_codes is None
            else self._score_hints(next_use_codes)
        )
        return slots

    def free_slots(self, slots: np.ndarray) -> None:
        """Free the slots of unpinned rows."""
        if not len(slots):
            return
        self._index.erase(self.ids[slots])
        self.flags[slots] = 0
        self.num_rows -= len(slots)
        self._free = np.concatenate([self._free, slots])

    def dirty_slots(self) -> np.ndarray:
        """Return the slots of rows that are newer than below."""
        return np.flatnonzero(self.flags[: self._num_used] & DIRTY)

    def pinned_share(self) -> float:
        return self.num_pinned / max(1, self.num_slots)

    def _add_pins(self, slots: np.ndarray) -> None:
        flags = self.flags[slots]
        self.num_pinned += int(np.count_nonzero(flags < PIN))
        self.flags[slots] = flags + np.int32(PIN)

    def _score_hints(self, codes: np.ndarray) -> np.ndarray:
        return np.asarray(-(np.float32(self._time) + BATCHES_AHEAD[codes]))

    def _is_evictable(self, slots: np.ndarray | slice) -> np.ndarray:
        flags = self.flags[slots]
        return np.asarray((flags > 0) & (flags < PIN))

    def _find_evictable(self, begin: int, end: int) -> np.ndarray:
        return np.flatnonzero(self._is_evictable(slice(begin, end))) + begin

    def _lowest_scored(self, slots: np.ndarray, count: int) -> np.ndarray:
        if count >= len(slots):
            return slots
        return slots[np.argpartition(self._scores[slots], count - 1)[:count]]

    def _sweep_for_victims(self, num_victims: int, max_score: float) -> np.ndarray:
        """Return the next `num_victims` evictable slots after the hand scored at most `max_score`; fewer after one
        round."""
        victims: list[np.ndarray] = []
        missing = num_victims
        begin = self._hand % self._num_used
        swept = 0
        while missing and swept < self._num_used:
            end = min(begin + SWEEP_SLOTS, self._num_used, begin + self._num_used - swept)
            slots = self._find_evictable(begin, end)
            slots = slots[self._scores[slots] <= max_score][:missing]
            victims.append(slots)
            missing -= len(slots)
            swept += end - begin
            self._hand = int(slots[-1]) + 1 if not missing and len(slots) else end
            begin = end % self._num_used
        return np.concatenate(victims)


class _ArrayIndex:
    """Index of ids 0 .. rows - 1, with the interface of `_native.RowIndex`."""

    def __init__(self, rows: int) -> None:
        self._slots = np.full(rows, -1, np.int32)

    def get(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._slots[ids]

    def put(self, ids: np.ndarray, slots: np.ndarray) -> None:
        self._slots[ids] = slots

    def erase(self, ids: np.ndarray) -> None:
        self._slots[ids] = -1
