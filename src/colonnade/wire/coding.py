"""The codecs of one run's exchanges, and where their random bits begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colonnade.lookup.contract import Exactness
from colonnade.store.dram import table_seed
from colonnade.wire.codec import CODECS, EXACT, Codecs

NARROWING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""What values lose once more where rows are kept in 16 bits."""


@dataclass(frozen=True, slots=True)
class Coding:
    codecs: Codecs = EXACT
    run_seed: int = 0

    def seed(self, name: str, rank: int, number: int) -> int:
        """Of gradients: a table's or a field's, from this rank, of the `number`-th batch of a step. Ranks differ, so
        that what they round of the same row does not add up."""
        return table_seed(self.run_seed, f"{name}/gradients/{rank}/{number}")

    def exactness(self, exact: Exactness, dtype: torch.dtype, num_ranks: int) -> Exactness:
        """Of an exchange whose sums are `exact`, for rows of this dtype."""
        if self.codecs.is_exact or num_ranks == 1:
            return exact
        values = CODECS[self.codecs.values].nearest_error
        if values:
            values += NARROWING.get(dtype, 0.0)
        return Exactness("lossy", max(values, CODECS[self.codecs.gradients].random_error))


AS_IT_IS = Coding()
