"""Sections of a configuration that say which rows of open tables stay."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from colonnade.config.section import Section


class AdmissionConfig(Section):
    """From which update on rows of open tables stay (CountMinAdmission, RandomAdmission). Default: the first."""

    updates: int | None = Field(None, ge=2, le=255)
    """A row stays once its id was seen in so many steps, counted by a count-min sketch."""
    expected_ids: int | None = Field(None, ge=1)
    """Different ids of a table over all ranks, which the sketch is sized for; with updates."""
    error: float = Field(0.01, ge=1e-6, le=0.5)
    """Chance of a new id to be taken for one seen before; with updates."""
    halve_steps: int | None = Field(None, ge=1)
    """Every count is halved once in so many steps; with updates."""
    probability: float | None = Field(None, gt=0, lt=1)
    """Instead of updates: chance of a row to stay, at each of its updates until it does."""

    @model_validator(mode="after")
    def _check(self) -> AdmissionConfig:
        if self.updates is not None and self.probability is not None:
            raise ValueError("got both updates and probability, wanted one of them")
        if self.updates is not None and self.expected_ids is None:
            raise ValueError("got updates without expected_ids, by which the sketch is sized")
        if self.updates is None and (self.expected_ids or self.halve_steps):
            raise ValueError("got settings of a sketch without updates, the count that admits")
        return self


class EvictionConfig(Section):
    """Which rows of open tables leave (colonnade.AgeEviction, MaxRowsEviction). Default: none."""

    age_steps: int | None = Field(None, ge=1)
    """Rows without an update for so many steps leave; with max_rows, too, by=recency."""
    max_rows: int | None = Field(None, ge=1)
    """Rows of a table over all ranks; of more, some leave after each step."""
    by: Literal["recency", "frequency", "norm"] = "recency"
    """Who leaves first, with max_rows: oldest update, fewest updates, smallest weights."""
    halve_steps: int | None = Field(None, ge=1)
    """Numbers of updates are halved at every multiple of it; with by=frequency."""

    @model_validator(mode="after")
    def _check(self) -> EvictionConfig:
        if self.age_steps is not None and self.by != "recency":
            raise ValueError("got age_steps, which goes with by=recency")
        if self.halve_steps is not None and self.by != "frequency":
            raise ValueError("got halve_steps, which goes with by=frequency")
        if self.max_rows is None and (self.by != "recency" or self.halve_steps):
            raise ValueError("got by or halve_steps without max_rows")
        return self


class OpenTableConfig(Section):
    """One open table's own settings, instead of embedding.admission and embedding.eviction."""

    admission: AdmissionConfig = AdmissionConfig()
    eviction: EvictionConfig = EvictionConfig()
    rows: int | None = Field(None, ge=1)
    """Instead of both: all its ids share so many rows. Default: each id has its own."""
    hashes: int | None = Field(None, ge=1, le=16)
    """How many of these rows an id's vector is the sum of, chosen by hashes; with rows. Default: 2."""

    @model_validator(mode="after")
    def _check(self) -> OpenTableConfig:
        both = {"admission": self.admission, "eviction": self.eviction}
        kept = [name for name, said in both.items() if said != type(said)()]
        if self.rows is not None and kept:
            raise ValueError(
                f"got rows={self.rows} and {kept[0]}, wanted one of them: rows that ids share all stay"
            )
        if self.rows is None and self.hashes is not None:
            raise ValueError(
                f"got hashes={self.hashes} without rows; say how many rows all ids share, such as rows=100000"
            )
        return self
