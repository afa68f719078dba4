"""Which rows of an open table stay: settings of admission and eviction, plain frozen values.

Both are decided by a row's owner when an update has been applied, from ids, clocks, steps and the row's values, never
from what happens to be in memory: budgets, lookahead and threads change nothing. A row that is not admitted, or is
evicted, is forgotten with its optimizer state and clock; the next read of its id gives its first value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from colonnade.errors import ConfigError

ORDERS = ("frequency", "norm", "recency")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountMinAdmission:
    """A row stays from the update on in which its id was seen for the `updates`-th time, counted by a count-min sketch.

    Before, it is forgotten after every update: its lookups read its first value, a gradient reaches the dense
    network through it, and what the row itself learned is lost. An update is a step that trained the id, however often
    it occurs in that step. An id that was evicted is admitted anew, with the count that the sketch still has.

    The sketch never counts too few. Sized for `expected_ids` different ids over all ranks, it admits a new id too
    early with a probability of at most about `error`: 1.44 * log2(1 / error) bytes for each expected id, dealt among
    the ranks. With `halve_steps`, every count is halved once in so many steps, so that only ids pass that come often.
    """

    updates: int
    expected_ids: int
    error: float = 0.01
    halve_steps: int | None = None

    def __post_init__(self) -> None:
        _whole(self, "updates", 2, 255, "it is a byte that counts")
        _whole(self, "expected_ids", 1, 2**40)
        _whole(self, "halve_steps", 1, 2**32)
        if not _is_number(self.error) or not 1e-6 <= self.error <= 0.5:
            raise ConfigError(
                f"CountMinAdmission: got error={self.error}, wanted 1e-6 .. 0.5, such as 0.01"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAdmission:
    """A row stays from an update on with this probability, drawn at each of its updates until it does: by a hash of
    (seed, table, id, step), the same in every run. Until then as `CountMinAdmission` has it. Takes no memory."""

    probability: float

    def __post_init__(self) -> None:
        if not _is_number(self.probability) or not 0 < self.probability < 1:
            raise ConfigError(
                f"RandomAdmission: got probability={self.probability}, wanted more than 0, less than 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgeEviction:
    """A row is forgotten when `steps` steps have passed without an update of it. 31 bytes of memory a row."""

    steps: int

    def __post_init__(self) -> None:
        _whole(self, "steps", 1, 2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxRowsEviction:
    """Of a table of more than `rows` rows, some are forgotten after each step until there are as many. 31 bytes of
    memory for each of these, and for those that one step adds.

    `rows` counts over all ranks, each of which keeps its share: ids are dealt evenly by a hash, so a rank's share
    is full when about as many are there in all. Who leaves first, `by`:

    "recency": whose newest update is oldest.
    "frequency": whose number of updates is smallest, halved at every multiple of `halve_steps` where that is given.
        Without it a row that was popular once stays, and in a full table of such rows a new one leaves at once.
    "norm": whose weights, after its newest update, have the smallest 2-norm (all parts together).

    Frequencies and squared norms are compared as numbers of two binary digits after the first, four to a doubling; of
    rows alike, the one whose update is oldest leaves.

    With `age_steps` (by recency) a row is forgotten, too, when so many steps have passed without an update of it, as by
    `AgeEviction`, whether the table is full or not.
    """

    rows: int
    by: Literal["recency", "frequency", "norm"] = "recency"
    halve_steps: int | None = None
    age_steps: int | None = None

    def __post_init__(self) -> None:
        _whole(self, "rows", 1, 2**48)
        _whole(self, "halve_steps", 1, 2**32)
        _whole(self, "age_steps", 1, 2**31)
        if self.by not in ORDERS:
            raise ConfigError(
                f"MaxRowsEviction: got by={self.by!r}; choose from {', '.join(ORDERS)}"
            )
        if self.halve_steps is not None and self.by != "frequency":
            raise ConfigError(
                f"MaxRowsEviction: got halve_steps={self.halve_steps} with by={self.by!r}; only counts are halved: "
                "leave it out, or evict by='frequency'"
            )
        if self.age_steps is not None and self.by != "recency":
            raise ConfigError(
                f"MaxRowsEviction: got age_steps={self.age_steps} with by={self.by!r}; only the order of recency says "
                "who is that old: leave it out, or evict by='recency'"
            )


Admission = CountMinAdmission | RandomAdmission
Eviction = AgeEviction | MaxRowsEviction


def _whole(value: Any, name: str, least: int, most: int, why: str = "") -> None:
    number = getattr(value, name)
    if number is None and name in ("halve_steps", "age_steps"):
        return
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(
            f"{type(value).__name__}: got {name}={number!r}, wanted a whole number, {least} .. {most}"
            + (f": {why}" if why else "")
        )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
