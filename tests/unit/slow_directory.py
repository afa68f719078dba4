"""A directory's definition, row by row: a dict of copies, of which a batch keeps those with the highest scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

HIT, MISS, EXPIRED = 0, 1, 2
DOUBLING, HALF_LIFE, GAIN_STEP = 1024, 1024 << 20, 16
MOST_TIME, SCORE_DECREMENT = 2**32 - 1 - 64 * DOUBLING, 2**31
GAIN = [
    math.floor(DOUBLING * math.log2(1 + 2 ** (-i * GAIN_STEP / DOUBLING)) + 0.5)
    for i in range(12 * DOUBLING // GAIN_STEP)
]


MOST_USES = 31 << 14


def round_uses(id: int, number: int, uses: int) -> int:
    """Round a number of uses to five significant bits: up with the probability that keeps its mean."""
    if uses < 32:
        return uses
    if uses >= MOST_USES:
        return MOST_USES
    unit = 1 << (uses.bit_length() - 5)
    random = mix64(id % 2**64 ^ mix64(number % 2**20 + 1)) * unit >> 64
    return uses // unit * unit + (unit if random < uses % unit else 0)


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@dataclass
class Row:
    slot: int
    copied: int
    ticks: int = 0
    last: int = 0
    uses: int = 0
    sent_uses: int = 0  # as encoded
    used: int = 0  # last batch
    score: int = 0  # of lfu
    next: int = 0  # of lookahead: the batch, 0: not known


@dataclass
class SlowDecision:
    """Decision about one batch."""

    by_row: dict[int, list] = field(
        default_factory=dict
    )  # slot, outcome, age, ticks, pushed, leaving
    evicted: dict[int, list] = field(default_factory=dict)  # slot, ticks


class SlowDirectory:
    def __init__(
        self,
        capacity: int,
        read_bound: int,
        write_bound: int,
        policy: str,
        write_share: float = 1.0,
        step_bound: int | None = None,
    ) -> None:
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.write_share, self.step_bound = write_share, step_bound
        self.policy, self.rows, self.number, self.time = policy, {}, 0, 0
        self.before: list = []

    def change(self, capacity: int, read_bound: int, write_bound: int) -> dict[int, list]:
        """Change the settings from the next batch on. Returns what is pushed at once: by row, slot and ticks."""
        pushed = self.flush(write_bound)
        for row in self.rows.values():  # so many more may have waited elsewhere when it was read
            row.copied = max(0, row.copied - max(0, self.write_bound - write_bound))
        self.capacity, self.read_bound, self.write_bound = capacity, read_bound, write_bound
        self.before = []
        return pushed

    def flush(self, above: int) -> dict[int, list]:
        """Send what waits in more than `above` batches. Returns slot and ticks by row."""
        beyond = {i: r for i, r in sorted(self.rows.items()) if r.ticks > above}
        pushed = {id: [row.slot, row.ticks] for id, row in beyond.items()}
        for id, row in beyond.items():
            row.sent_uses, row.ticks = round_uses(id, self.number, row.sent_uses + row.ticks), 0
        return pushed

    def score(self, row: Row) -> tuple:
        if self.policy == "lru":
            return (row.last,)
        if self.policy == "lfu":
            return (row.score,)
        if self.policy == "light_lfu":
            return (11,) if row.uses > 10 else (row.uses, row.last)
        return (1, -row.next) if row.next else (0, row.last)

    def decide_batch(
        self, ids: list[int], next_uses=None, entering_ids=(), window: int = 0
    ) -> SlowDecision:
        rows = {id: Row(**vars(row)) for id, row in self.rows.items()}
        self.before.append((rows, self.number, self.time))
        self.number += 1
        if self.policy == "lfu":
            if self.time >> 20 >= MOST_TIME:
                self.time -= SCORE_DECREMENT << 20
                for row in self.rows.values():
                    row.score = max(1, row.score - SCORE_DECREMENT)
            turned = len(ids) * HALF_LIFE // self.capacity if self.capacity else HALF_LIFE
            self.time += min(HALF_LIFE, turned)
        if self.policy == "lookahead" and self.number % 64 == 0:
            for row in self.rows.values():
                if row.next and row.next < self.number:
                    row.next, row.last = 0, 1
        decision, free = SlowDecision(), self.free_slots(len(ids))
        for id, distance in zip(ids, next_uses or [0] * len(ids), strict=True):
            row, outcome, age, gap = self.rows.get(id), MISS, 0, 256
            if row is not None:
                gap = (self.number - row.used - 1) % 256 + 1
                age = self.number - row.copied
                outcome = EXPIRED if self.is_expired(age, gap) else HIT
            else:
                row = self.rows[id] = Row(free.pop(0), self.number)
            if outcome != HIT:
                row.copied = self.number
            self.use(row, distance)
            row.used = self.number
            row.ticks += 1
            is_pushed = self.is_due(row, gap)
            decision.by_row[id] = [row.slot, outcome, age, row.ticks, is_pushed, False]
            if is_pushed:
                row.sent_uses, row.ticks = round_uses(id, self.number, row.sent_uses + row.ticks), 0
        for id in entering_ids if self.policy == "lookahead" else ():
            if id in self.rows and not self.rows[id].next:
                self.rows[id].next = self.number + window
        order = sorted(self.rows, key=lambda id: (self.score(self.rows[id]), id))
        for id in order[: max(0, len(order) - self.capacity)]:
            row = self.rows.pop(id)
            if id in decision.by_row:
                decision.by_row[id][4:] = [True, True]
            elif row.ticks:
                decision.evicted[id] = [row.slot, row.ticks]
        return decision

    def is_due(self, row: Row, gap: int) -> bool:
        uses = row.sent_uses + row.ticks
        limits = self.write_bound, self.write_share * uses, self.most_steps(gap)
        return row.ticks > min(limits)

    def is_expired(self, age: int, gap: int) -> bool:
        return age > self.read_bound or age // gap > self.most_steps(gap)

    def most_steps(self, gap: int) -> float:
        return math.inf if self.step_bound is None else self.step_bound * gap

    def use(self, row: Row, distance: int) -> None:
        now = (self.time >> 20) + 1
        if row.uses:
            larger, below = max(row.score, now), abs(row.score - now) // GAIN_STEP
            row.score = larger + (GAIN[below] if below < len(GAIN) else 0)
        else:
            row.score = now
        row.uses, row.last = row.uses + 1, self.number
        row.next = self.number + distance if distance else 0

    def free_slots(self, count: int) -> list[int]:
        taken = {row.slot for row in self.rows.values()}
        return [s for s in range(len(taken) + count) if s not in taken]

    def undo(self) -> None:
        self.rows, self.number, self.time = self.before.pop()
