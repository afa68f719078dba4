"""Configuration sections for admission and eviction of rows of open tables."""

from __future__ import annotations

from pydantic import Field, model_validator

from colonnade.config.section import Section
from colonnade.retention import EvictionOrder


class AdmissionConfig(Section):
    """Admission of new rows to open tables (CountMinAdmission, RandomAdmission). Default: every row is admitted at its
    first update."""

    updates: int | None = Field(None, ge=2, le=255)
    """Number of steps that must train an id before its row is admitted, counted by a count-min sketch; 2 to 255.
    Default: 1, without a sketch."""
    expected_ids: int | None = Field(None, ge=1)
    """Number of different ids of a table over all ranks, for which the sketch is sized. Required with updates."""
    error: float = Field(0.01, ge=1e-6, le=0.5)
    """Probability that the sketch mistakes a new id for a known one and admits it too early; used with updates."""
    halve_steps: int | None = Field(None, ge=1)
    """Number of steps after which every count of the sketch is halved; used with updates. Default: never."""
    probability: float | None = Field(None, gt=0, lt=1)
    """Probability that an update admits the row, drawn at each update until it is admitted; excludes updates. Default:
    1."""

    @model_validator(mode="after")
    def _check_admission_settings(self) -> AdmissionConfig:
        if self.updates is not None and self.probability is not None:
            raise ValueError("got both updates and probability, wanted one of them")
        if self.updates is not None and self.expected_ids is None:
            raise ValueError("got updates without expected_ids, which sizes the sketch")
        if self.updates is None and (self.expected_ids or self.halve_steps):
            raise ValueError(
                "got settings of a sketch without updates, the count that admits a row"
            )
        return self


class EvictionConfig(Section):
    """Eviction of rows from open tables (colonnade.AgeEviction, MaxRowsEviction). Default: no row is evicted."""

    age_steps: int | None = Field(None, ge=1)
    """Number of steps without an update after which a row is evicted. Can be combined with max_rows if by=recency.
    Default: never."""
    max_rows: int | None = Field(None, ge=1)
    """Largest number of rows of a table over all ranks; rows beyond it are evicted after each step. Default: no
    limit."""
    by: EvictionOrder = "recency"
    """Order of eviction under max_rows: oldest update first (recency), fewest updates first (frequency) or smallest
    weights first (norm)."""
    halve_steps: int | None = Field(None, ge=1)
    """Number of steps after which the update counts of by=frequency are halved. Default: never."""

    @model_validator(mode="after")
    def _check_eviction_settings(self) -> EvictionConfig:
        if self.age_steps is not None and self.by != "recency":
            raise ValueError("got age_steps, which goes with by=recency")
        if self.halve_steps is not None and self.by != "frequency":
            raise ValueError("got halve_steps, which goes with by=frequency")
        if self.max_rows is None and (self.by != "recency" or self.halve_steps):
            raise ValueError("got by or halve_steps without max_rows")
        return self


class OpenTableConfig(Section):
    """Settings of one open table, which replace embedding.admission and embedding.eviction."""

    admission: AdmissionConfig = AdmissionConfig()
    eviction: EvictionConfig = EvictionConfig()
    rows: int | None = Field(None, ge=1)
    """Number of rows that all ids of the table share by hashing; excludes admission and eviction. Default: each id has
    a row of its own."""
    hashes: int | None = Field(None, ge=1, le=16)
    """Number of shared rows, selected by hashes, that are summed to the vector of an id; used with rows. Default: 2."""

    @model_validator(mode="after")
    def _check_open_table_settings(self) -> OpenTableConfig:
        sections = {"admission": self.admission, "eviction": self.eviction}
        changed = [name for name, section in sections.items() if section != type(section)()]
        if self.rows is not None and changed:
            raise ValueError(
                f"got rows={self.rows} and {changed[0]}, wanted one of them: rows that ids share are never evicted"
            )
        if self.rows is None and self.hashes is not None:
            raise ValueError(
                f"got hashes={self.hashes} without rows; set how many rows all ids share, such as rows=100000"
            )
        return self
