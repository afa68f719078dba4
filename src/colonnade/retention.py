"""Which rows of an open table stay: settings of admission and eviction, plain frozen values.

Both are decided by a row's owner when an update has been applied, from ids, clocks, steps and the row's values, never
from what happens to be in memory: budgets, lookahead and threads change nothing. A row that is not admitted, or is
evicted, is forgotten with its optimizer state and clock; the next read of its id gives its first value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field as Limits

from colonnade.config.validation import Expected, validate_fields
from colonnade.errors import ConfigError

HalvingSteps = Annotated[int, Limits(ge=1, le=2**32)]
AgeSteps = Annotated[int, Limits(ge=1, le=2**31)]


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

    updates: Annotated[
        int,
        Limits(ge=2, le=255),
        Expected("a whole number, 2 .. 255: it is a byte that counts"),
    ]
    expected_ids: Annotated[int, Limits(ge=1, le=2**40)]
    error: Annotated[float, Limits(ge=1e-6, le=0.5), Expected("1e-6 .. 0.5, such as 0.01")] = 0.01
    halve_steps: HalvingSteps | None = None

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAdmission:
    """A row stays from an update on with this probability, drawn at each of its updates until it does: by a hash of
    (seed, table, id, step), the same in every run. Until then as `CountMinAdmission` has it. Takes no memory."""

    probability: Annotated[float, Limits(gt=0, lt=1), Expected("more than 0, less than 1")]

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgeEviction:
    """A row is forgotten when `steps` steps have passed without an update of it. 31 bytes of memory a row."""

    steps: AgeSteps

    def __post_init__(self) -> None:
        validate_fields(self)


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

    rows: Annotated[int, Limits(ge=1, le=2**48)]
    by: Literal["frequency", "norm", "recency"] = "recency"
    halve_steps: HalvingSteps | None = None
    age_steps: AgeSteps | None = None

    def __post_init__(self) -> None:
        validate_fields(self)
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
