"""Settings of admission and eviction in open tables: frozen values.

A row's owner decides after each update, from ids, clocks, steps and the row's values. Memory budgets, lookahead and
thread counts do not affect the decision. A row that is not admitted, or is evicted, is deleted with its optimizer state
and clock; the next read of its id returns its initial value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field as Limits

from colonnade.config.validation import Expected, validate_dataclass_fields
from colonnade.errors import ConfigError

EvictionOrder = Literal["recency", "frequency", "norm"]
HalvingSteps = Annotated[int, Limits(ge=1, le=2**32)]
AgeSteps = Annotated[int, Limits(ge=1, le=2**31)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountMinAdmission:
    """Admission of an id at its `updates`-th update, counted by a count-min sketch.

    Until admission the row is deleted after every update: lookups read its initial value, gradients pass through it to
    the dense network, and its own update is lost. An update is a step that trained the id, however often the id occurs
    in that step. An evicted id must be admitted again; the sketch still has its count.

    The sketch never counts too few updates. Sized for `expected_ids` distinct ids over all ranks, it admits a new id
    too early with a probability of at most about `error`. It needs 1.44 * log2(1 / error) bytes for each expected id,
    divided among the ranks. With `halve_steps`, all counts are halved every `halve_steps` steps, so that only frequent
    ids are admitted.
    """

    updates: Annotated[
        int,
        Limits(ge=2, le=255),
        Expected("a whole number, 2 .. 255: counters are bytes"),
    ]
    expected_ids: Annotated[int, Limits(ge=1, le=2**40)]
    error: Annotated[float, Limits(ge=1e-6, le=0.5), Expected("1e-6 .. 0.5, such as 0.01")] = 0.01
    halve_steps: HalvingSteps | None = None

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAdmission:
    """Admission at random: each update of an id admits its row with this probability.

    The draw is a hash of (seed, table, id, step), so it is the same in every run. Until admission the row is treated as
    in `CountMinAdmission`. Needs no memory."""

    probability: Annotated[float, Limits(gt=0, lt=1), Expected("more than 0, less than 1")]

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgeEviction:
    """Eviction of rows that were not updated for `steps` steps. Needs 31 bytes of memory per row."""

    steps: AgeSteps

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxRowsEviction:
    """Eviction from a table with more than `rows` rows: after each step, until `rows` rows remain. Needs 31 bytes of
    memory for each of them and for each row that one step adds.

    `rows` counts the rows of all ranks. Each rank has an equal share of it; a hash assigns ids evenly to ranks, so the
    shares fill up at about the same time. `by` selects the row to evict first:

    "recency": the row with the oldest last update.
    "frequency": the row with the fewest updates. With `halve_steps`, counts are halved at every multiple of it.
        Without it a row that was popular once is never evicted, and a full table of such rows evicts a new row at once.
    "norm": the row with the smallest 2-norm of its weights (all parts together) after its last update.

    Frequencies and squared norms are compared after rounding to three significant binary digits: four levels for each
    doubling. Among equal rows, the one with the oldest update is evicted.

    With `age_steps` (by recency), a row that was not updated for `age_steps` steps is evicted too, as by `AgeEviction`,
    even if the table is not full.
    """

    rows: Annotated[int, Limits(ge=1, le=2**48)]
    by: EvictionOrder = "recency"
    halve_steps: HalvingSteps | None = None
    age_steps: AgeSteps | None = None

    def __post_init__(self) -> None:
        validate_dataclass_fields(self)
        if self.halve_steps is not None and self.by != "frequency":
            raise ConfigError(
                f"MaxRowsEviction: got halve_steps={self.halve_steps} with by={self.by!r}; only counts are halved: "
                "leave it out, or evict by='frequency'"
            )
        if self.age_steps is not None and self.by != "recency":
            raise ConfigError(
                f"MaxRowsEviction: got age_steps={self.age_steps} with by={self.by!r}; only the order of recency tells "
                "the age of a row: leave it out, or evict by='recency'"
            )


Admission = CountMinAdmission | RandomAdmission
Eviction = AgeEviction | MaxRowsEviction
