"""SlotDirectory: against a dictionary, small and large, by counts and by hints."""

from __future__ import annotations

import numpy as np
import pytest

from colonnade.store import device_rows
from colonnade.store.device_rows import SlotDirectory


def use(directory, ids, codes=None):
    """Pins ids (N,), unique, as a store does; their slots."""
    directory.advance_clock(len(ids), codes is not None)
    slots = directory.find_slots(ids)
    is_here = slots >= 0
    count = int((~is_here).sum())
    assert directory.count_pinned_others(slots[is_here], len(ids)) + len(ids) <= directory.num_slots
    directory.pin_slots(slots[is_here], None if codes is None else codes[is_here])
    victims = directory.choose_victim_slots(count)
    slots[~is_here] = directory.admit_ids(
        ids[~is_here], victims, None if codes is None else codes[~is_here]
    )
    return slots


@pytest.mark.parametrize(("exact", "rows"), [(8192, None), (0, None), (0, 900)])
def test_rows_are_where_it_says(monkeypatch, exact, rows):
    """Also where victims are swept for; a pinned row never leaves."""
    monkeypatch.setattr(device_rows, "EXACT_SLOTS", exact)
    monkeypatch.setattr(device_rows, "SWEEP_SLOTS", 64)
    random = np.random.default_rng(1)
    directory, memory = SlotDirectory(300, rows), np.full(300, -1)
    scale = 1 if rows else 0x1234567
    pinned: list[np.ndarray] = []
    for _ in range(150):
        ids = random.permutation(900)[:80] * scale
        before = {int(i): int(s) for stored in pinned for i, s in zip(*stored, strict=True)}
        slots = use(directory, ids)
        assert len(np.unique(slots)) == len(ids)
        for i, s in zip(ids.tolist(), slots.tolist(), strict=True):
            assert before.get(i, s) == s
            assert s not in before.values() or before.get(i) == s
        memory[slots] = ids
        pinned.append((ids, slots))
        if len(pinned) > 2:
            directory.unpin_slots(pinned.pop(0)[1], dirty=False)
        if random.random() < 0.2:
            local = directory.find_slots(random.permutation(900)[:50] * scale)
            local = local[local >= 0]
            directory.free_slots(local[~directory.is_pinned(local)])
        stored = np.flatnonzero(directory.flags & device_rows.OCCUPIED)
        assert directory.num_rows == len(stored) and np.array_equal(
            directory.ids[stored], memory[stored]
        )
        assert np.array_equal(directory.find_slots(directory.ids[stored]), stored)
        assert directory.num_pinned == len(np.unique(np.concatenate([s for _, s in pinned])))


def test_releasing_what_is_not_pinned_is_refused():
    directory = SlotDirectory(4)
    slots = use(directory, np.array([7, 8]))
    directory.unpin_slots(slots[:1], dirty=False)
    with pytest.raises(ValueError, match="not pinned"):
        directory.unpin_slots(slots, dirty=True)
    assert directory.is_pinned(slots).tolist() == [False, True] and not len(directory.dirty_slots())


def hits(directory, stream, codes=None):
    """Return the hit rate of the stream's second half."""
    result = total = 0
    for step, ids in enumerate(stream):
        if 2 * step >= len(stream):
            result += int((directory.find_slots(ids) >= 0).sum())
            total += len(ids)
        directory.unpin_slots(use(directory, ids, codes), dirty=False)
    return result / total


def skewed(seed, steps, rows=60_000):
    """Unique ids of batches drawn with probability falling as 1 / rank."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(1, rows + 1)
    chances /= chances.sum()
    return [np.unique(random.choice(rows, 2000, p=chances)) for _ in range(steps)]


def test_sweeping_keeps_as_good_rows_as_the_exact_choice(monkeypatch):
    stream = skewed(0, 150)
    exact = hits(SlotDirectory(4000), stream)
    monkeypatch.setattr(device_rows, "EXACT_SLOTS", 0)
    swept = hits(SlotDirectory(4000), stream)
    # All that counts can do: the rows that are likeliest.
    best = np.mean([(ids < 4000).mean() for ids in stream[75:]])
    assert exact > 0.9 * best and swept > 0.98 * exact


@pytest.mark.parametrize("half_lives", [0.5, 2.0, 60.0])
def test_victims_have_the_lowest_decayed_counts(monkeypatch, half_lives):
    """The clock begins anew after `half_lives`, with all counts scaled down: nothing of the order changes."""
    monkeypatch.setattr(device_rows, "MAX_HALF_LIVES", half_lives)
    random, directory = np.random.default_rng(4), SlotDirectory(100)
    now, uses = (
        0.0,
        dict[int, float](),
    )  # log2 of each row's count, with the clock that never begins anew
    chances = 1 / np.arange(1, 301)
    for step in range(800):
        if step == 400:  # what was popular is not any more
            chances = chances[::-1]
        ids = random.choice(300, 20, replace=False, p=chances / chances.sum())
        before = set(directory.ids[directory.flags > 0].tolist())
        directory.unpin_slots(use(directory, ids), dirty=False)
        after = set(directory.ids[directory.flags > 0].tolist())
        now += 20 / (device_rows.HALF_LIFE * 100)
        evicted = before - after
        highest = max((uses[i] for i in evicted), default=-np.inf)
        assert (
            highest <= min(uses[i] for i in before & after - set(ids)) + 1e-3 if evicted else True
        )
        uses = {i: uses[i] for i in uses.keys() & before & after}
        uses |= {i: np.logaddexp2(uses.get(i, -np.inf), now) for i in ids.tolist()}
    assert now > 2 * half_lives or half_lives == 60.0
    assert np.isfinite(directory._scores).all()


def test_hints_beat_what_is_least_recent():
    """A ring of rows larger than memory, each needed again as far ahead as any other: those here stay."""
    code = 1 + int(np.ceil(8 * np.log2(15)))
    stream = [np.arange(20) + 20 * (step % 15) for step in range(300)]
    assert hits(SlotDirectory(200), stream, np.full(20, code, np.uint8)) > 0.5
