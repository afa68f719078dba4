"""The codecs of one run's exchanges, and where their random bits begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.lookup.contract import Exactness
from colonnade.lookup.layout import Declaration
from colonnade.lookup.row_layout import RowLayout
from colonnade.ops.memory import empty
from colonnade.store.dram import table_seed
from colonnade.wire.codec import CODECS, EXACT, Block, Codec, Codecs, Draw, decode, encode

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


class RowCodec:
    """Codecs of the rows of a declaration's tables, and of their gradients."""

    def __init__(self, declaration: Declaration, rank: int, coding: Coding) -> None:
        """rank: whose gradients are rounded; `coding` makes their random bits."""
        self.values = CODECS[coding.codecs.values]
        self.gradients = CODECS[coding.codecs.gradients]
        self.coding, self.rank = coding, rank
        self.names = [table.name for table in declaration.tables]
        self.dims = [tuple(part.dim for part in table.parts) for table in declaration.tables]

    def encode_values(self, elements: Tensor, layout: RowLayout) -> Tensor:
        """Return rows as they are sent, uint8."""
        return encode(self.values, elements, self._blocks(layout))

    def decode_values(self, data: Tensor, layout: RowLayout, out: Tensor) -> None:
        """Write what `encode_values` gave to `out`, rounded to its dtype."""
        decode(self.values, data, self._blocks(layout), out)

    def encode_gradients(
        self, elements: Tensor, layout: RowLayout, draws: Sequence[Draw]
    ) -> Tensor:
        """Return sums of gradients as they are sent, uint8. draws: by block."""
        return encode(self.gradients, elements, self._blocks(layout), draws)

    def decode_gradients(self, data: Tensor, layout: RowLayout, dtype: torch.dtype) -> Tensor:
        """Return what `encode_gradients` gave, as elements of `dtype`."""
        elements = empty(layout.num_elements, dtype=dtype)
        decode(self.gradients, data, self._blocks(layout), elements)
        return elements

    def rank_bytes(self, codec: Codec, layout: RowLayout, dtype: torch.dtype) -> list[int]:
        """Return the bytes to or from each rank, of elements of `dtype`."""
        widths = [codec.row_bytes(dims, dtype) for dims in self.dims]
        return (layout.counts @ np.array(widths)).tolist()

    def draws(self, plan: _native.Plan, blocks: np.ndarray, step: int, number: int) -> list[Draw]:
        """Return the draws of a plan's unique rows, rank by rank, table by table. blocks: `OwnerMap.blocks` of it;
        step, number: see `ExchangePart.begin_push`."""
        borders, unique = blocks.tolist(), torch.as_tensor(plan.unique_ids)
        num_tables = len(self.names)
        num_ranks = (len(borders) - 1) // num_tables
        seeds = [self.coding.seed(name, self.rank, number) for name in self.names]
        places = [(t, t * num_ranks + r) for r in range(num_ranks) for t in range(num_tables)]
        return [Draw(unique[borders[b] : borders[b + 1]], seeds[t], step) for t, b in places]

    def _blocks(self, layout: RowLayout) -> list[Block]:
        """Return the blocks of a message, rank by rank, table by table."""
        counts = layout.counts.tolist()
        return [Block(n, self.dims[t]) for of_rank in counts for t, n in enumerate(of_rank)]
