"""Evictions from memory, against exact simulations of the same policies on the same batches.

Legend: U universe of ids, S steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_native_dram import open_dram

UNIVERSE, CAPACITY, STEPS, LOOKUPS = 40_000, 5_000, 400, 1_000
HALF_LIFE = 32 * CAPACITY  # uses of rows; native/slot_scores.cc


def zipf_batches(exponent: float, seed: int = 0) -> list[np.ndarray]:
    """S sorted arrays of unique ids; popular ids are anywhere in the universe."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, UNIVERSE + 1) ** -exponent
    names = rng.permutation(UNIVERSE)
    drawn = rng.choice(UNIVERSE, size=(STEPS, LOOKUPS), p=weights / weights.sum())
    return [np.unique(names[batch]) for batch in drawn]


def hits_of(score, batches: list[np.ndarray]) -> int:
    """`score(step, ids)` -> the score of each row of the universe once `ids` were used: the lowest leaves."""
    resident, hits = np.zeros(UNIVERSE, bool), 0
    for step, ids in enumerate(batches):
        hits += resident[ids].sum()
        scores = score(step, ids)
        others = resident.copy()
        others[ids] = False
        resident[ids] = True
        surplus = int(resident.sum()) - CAPACITY
        if surplus > 0:
            rows = np.flatnonzero(others)
            resident[rows[np.argpartition(scores[rows], surplus - 1)[:surplus]]] = False
    return int(hits)


def decayed_counts(before: np.ndarray | None = None):
    counts = np.zeros(UNIVERSE) if before is None else before.astype(float)

    def score(step, ids):
        counts[:] *= 2.0 ** (-len(ids) / HALF_LIFE)
        counts[ids] += 1
        return counts

    return score


def last_uses():
    last = np.full(UNIVERSE, -1.0)

    def score(step, ids):
        last[ids] = step
        return last

    return score


def next_uses(batches: list[np.ndarray]) -> np.ndarray:
    """Return (S, U) int32: batches until the id is next used, from those that use it; 2^30 if never."""
    coming = np.full(UNIVERSE, 2**30)
    result = np.zeros((len(batches), UNIVERSE), np.int32)
    for step in range(len(batches) - 1, -1, -1):
        ids = batches[step]
        result[step, ids] = np.minimum(coming[ids] - step, 2**30)
        coming[ids] = step
    return result


def belady(batches: list[np.ndarray]):
    following, coming = next_uses(batches), np.full(UNIVERSE, 2.0**31)

    def score(step, ids):
        coming[ids] = step + following[step, ids]
        return -coming

    return score


def codes_of(distances: np.ndarray) -> np.ndarray:
    codes = np.ceil(8 * np.log2(distances)).astype(np.int64) + 1
    return np.where(distances >= 2**30, 255, np.minimum(codes, 254)).astype(np.uint8)


def hits_of_dram(
    batches: list[np.ndarray],
    hints: np.ndarray | None = None,
    window: int = 1,
    clocks: np.ndarray | None = None,
    steps: int = 0,
):
    """Evicted rows return their access frequency, and `resume` restores it when they come back.

    clocks (U,): of rows that were trained for `steps` steps before."""
    clocks = np.zeros(UNIVERSE, np.int64) if clocks is None else clocks
    dram = open_dram(dims=[1], state=0, capacity=CAPACITY)
    frequencies, known = np.zeros(UNIVERSE, np.uint8), np.zeros(UNIVERSE, bool)
    hits, batches_held = 0, []
    for step, ids in enumerate(batches):
        rows = torch.from_numpy(ids)
        slots, offsets = torch.empty(len(ids), dtype=torch.int32), torch.tensor([0, len(ids)])
        codes = None if hints is None else torch.from_numpy(hints[step, ids])
        victims = dram.acquire(rows, offsets, slots, False, codes)
        missing = torch.as_tensor(victims.missing).long()
        hits += len(ids) - len(missing)
        gone = np.asarray(victims.evicted_ids[0])
        assert len(gone) == victims.num_evicted  # all of them were trained
        frequencies[gone], known[gone] = np.asarray(victims.evicted_frequencies[0]), True
        before = missing[torch.from_numpy(known[ids[missing.numpy()]])]
        dram.resume(
            0, slots[before].contiguous(), torch.from_numpy(frequencies[ids[before.numpy()]])
        )
        came = ids[missing.numpy()]
        records = np.zeros((len(missing), 12), np.uint8)
        records[:, 4:] = np.maximum(clocks[came], 1).astype("<u8").view(np.uint8).reshape(-1, 8)
        dram.unpack(0, slots[missing].contiguous(), torch.from_numpy(records))
        strange = missing[torch.from_numpy(~known[came] & (clocks[came] > 0))]
        dram.recall(0, slots[strange].contiguous(), steps)
        batches_held.append((slots, offsets))
        if len(batches_held) == window:
            dram.release(*batches_held.pop(0), True)
        assert dram.num_rows(0) <= CAPACITY
    return hits


@pytest.mark.parametrize("exponent", [0.8, 1.1])
def test_as_many_hits_as_exact_decayed_counts(exponent):
    batches = zipf_batches(exponent)
    exact, recent = hits_of(decayed_counts(), batches), hits_of(last_uses(), batches)
    ours = hits_of_dram(batches)
    assert ours >= 0.97 * exact
    assert ours - recent >= 0.6 * (exact - recent) > 0  # more than recency can


def test_nearly_as_many_hits_as_the_whole_future_gives():
    batches = zipf_batches(0.8)
    best = hits_of(belady(batches), batches)
    hints = codes_of(np.maximum(next_uses(batches), 1))
    assert hits_of_dram(batches, hints) >= 0.98 * best
    assert best > 1.1 * hits_of(decayed_counts(), batches)


def test_popularity_that_moves_is_followed():
    """Halfway, other ids become popular: counts from before fade."""
    first, second = zipf_batches(1.1, 1), zipf_batches(1.1, 2)
    batches = first[: STEPS // 4] + second
    exact = hits_of(decayed_counts(), batches)
    assert hits_of_dram(batches) >= 0.97 * exact


def uses_of(batches: list[np.ndarray]) -> np.ndarray:
    return np.bincount(np.concatenate(batches), minlength=UNIVERSE)


@pytest.mark.parametrize("times", [1, 20])
def test_a_process_that_goes_on_knows_how_often_rows_were_used(times):
    """Heat ends with its process; clocks are on the disk, of `times` as many steps as were drawn."""
    batches = zipf_batches(0.8, 1)
    first, second = batches[: STEPS // 2], batches[STEPS // 2 :]
    uses, steps = times * uses_of(first), times * len(first)
    decay = times * sum(map(len, first)) / HALF_LIFE * np.log(2)
    exact = hits_of(decayed_counts(uses * -np.expm1(-decay) / decay), second)
    blind = hits_of_dram(second)
    reported = hits_of_dram(second, clocks=uses, steps=steps)
    assert reported >= 0.99 * exact
    assert reported - blind >= 0.8 * (exact - blind) > 0.03 * exact


def test_what_was_popular_long_before_the_process_fades():
    """Clocks of a long run of other popular ids: without its length they would keep memory for long."""
    uses, batches = 20 * uses_of(zipf_batches(0.8, 2)), zipf_batches(0.8, 1)[STEPS // 2 :]
    reported = hits_of_dram(batches, clocks=uses, steps=20 * STEPS)
    assert reported > 1.4 * hits_of_dram(batches, clocks=uses, steps=1)


def test_rows_of_a_window_are_never_chosen():
    batches = zipf_batches(0.8)[:100]
    assert hits_of_dram(batches, window=6) > 0  # pins more than half of the slots


def test_hints_of_nothing_and_hints_that_stop():
    """Codes 0 say nothing; an acquire without hints goes back to counting."""
    batches = zipf_batches(1.1)[:100]
    unknown = np.zeros((len(batches), UNIVERSE), np.uint8)
    assert hits_of_dram(batches, unknown) > 0
    dram = open_dram(capacity=4)
    for codes in ([9, 9, 255, 20], None, [1, 1, 1, 1]):
        slots, _ = torch.empty(4, dtype=torch.int32), None
        hints = None if codes is None else torch.tensor(codes, dtype=torch.uint8)
        dram.acquire(torch.arange(4), torch.tensor([0, 4]), slots, True, hints)
        dram.release(slots, torch.tensor([0, 4]), False)
    for new in range(4, 40):
        slots = torch.empty(1, dtype=torch.int32)
        dram.acquire(torch.tensor([new]), torch.tensor([0, 1]), slots, True)
        dram.release(slots, torch.tensor([0, 1]), False)
    assert dram.num_rows(0) == 4


def test_the_row_used_last_or_never_again_leaves_first():
    dram = open_dram(capacity=4)
    slots = torch.empty(4, dtype=torch.int32)
    hints = torch.tensor([30, 60, 255, 40], dtype=torch.uint8)
    dram.acquire(torch.arange(4), torch.tensor([0, 4]), slots, True, hints)
    dram.release(slots, torch.tensor([0, 4]), False)
    for new, stay in ((9, [0, 1, 3, 9]), (8, [0, 3, 8, 9])):
        slots, one = torch.empty(1, dtype=torch.int32), torch.tensor([3], dtype=torch.uint8)
        dram.acquire(torch.tensor([new]), torch.tensor([0, 1]), slots, True, one)
        assert sorted(dram.resident(0)[0].tolist()) == stay


def test_wrong_hints_are_refused():
    dram = open_dram(capacity=4)
    slots = torch.empty(2, dtype=torch.int32)
    for hints in (torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8)):
        with pytest.raises(ValueError, match="next_use"):
            dram.acquire(torch.arange(2), torch.tensor([0, 2]), slots, True, hints)
    with pytest.raises(ValueError, match="frequencies"):
        dram.resume(0, slots[:0], torch.zeros(1, dtype=torch.uint8))
    assert dram.num_rows(0) == 0
