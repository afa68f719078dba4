"""Reads of outputs: the parts of rows that lookups pool into columns of an output, and squares of them.

Squares of a field are, by sample, the sum over its ids of (x v)^2 (`interaction.contract.SQUARES`). They are computed
from the vectors that lookups read, which are kept for the gradients: natively on the CPU, in torch on a device. Several
fields may have the same columns of an output: it gets the sum of them.

Legend: B samples, E lookups of a feature, D elements of a field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade import _native
from colonnade.lookup.layout import (
    EmbeddingDeclaration,
    LookupColumns,
    Lookups,
    Output,
    replace_poolings,
)
from colonnade.ops import reference
from colonnade.ops.memory import empty
from colonnade.table import POOLINGS, Part, Pooling


@dataclass(frozen=True, slots=True)
class Read:
    """Part of a table that an output reads through a column of lookups: its pooled vectors, or their squares."""

    column: int  # of lookups
    table: int
    part: Part
    output: int
    start: int  # first column in the output
    is_squared: bool

    @property
    def key(self) -> tuple[int, int]:
        """Column of lookups, and first element of the part in a row."""
        return self.column, self.part.column

    @property
    def columns(self) -> slice:
        """Columns in the output."""
        return slice(self.start, self.start + self.part.dim)


def list_reads(
    declaration: EmbeddingDeclaration, lookup_columns: LookupColumns, outputs: Sequence[Output]
) -> tuple[list[Read], list[Read]]:
    """List reads of pooled vectors in the order of the outputs' fields, and those of squares in the order of their
    vectors."""
    starts = [(i, start) for i, output in enumerate(outputs) for start in output.columns]
    reads = [
        Read(c, *declaration.parts[p], *start, is_squared)
        for (c, p), start, is_squared in zip(
            lookup_columns.reads, starts, lookup_columns.squared, strict=True
        )
    ]
    vectors = [r for r in reads if not r.is_squared]
    numbers = {r.key: n for n, r in reversed(list(enumerate(vectors)))}
    squares = sorted(
        (r for r in reads if r.is_squared), key=lambda r: numbers.get(r.key, len(reads))
    )
    return vectors, squares


def find_shared_columns(reads: Sequence[Read]) -> dict[tuple[int, int], slice]:
    """Return columns to which several of these reads are added, by output and first column."""
    counts = Counter((read.output, read.start) for read in reads)
    return {(r.output, r.start): r.columns for r in reads if counts[r.output, r.start] > 1}


def build_native_reads(reads: Iterable[Read]) -> _native.Reads:
    return _native.Reads(
        *transpose_int32((read.column, read.part.column, read.part.dim) for read in reads)
    )


def transpose_int32(rows: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return the transposed rows, (3, N) int32."""
    return torch.tensor(list(rows), dtype=torch.int32).reshape(-1, 3).T.contiguous()


class PairedReads:
    """Reads of vectors and of their squares that one native pass over the rows pools: all reads of squares, and those
    of vectors that have squares, or share columns of an output with others."""

    def __init__(self, vector_reads: Sequence[Read], square_reads: Sequence[Read]) -> None:
        self.shared_columns = find_shared_columns((*vector_reads, *square_reads))
        squares: dict[tuple[int, int], list[Read]] = {}
        for read in square_reads:
            squares.setdefault(read.key, []).append(read)
        self.pairs: list[tuple[Read | None, Read | None]] = []
        for read in vector_reads:
            square = squares[read.key].pop(0) if squares.get(read.key) else None
            if square is not None or (read.output, read.start) in self.shared_columns:
                self.pairs.append((read, square))
        self.pairs += [(None, read) for reads in squares.values() for read in reads]
        self.native = build_native_reads(
            next(read for read in pair if read is not None) for pair in self.pairs
        )

    def pool(
        self,
        lookups: Lookups,
        index: Tensor,
        bases: np.ndarray,
        strides: np.ndarray,
        row_dtype: str,
        out_tensors: Sequence[Tensor],
    ) -> None:
        """Write sums and squares into their columns of the outputs, and keep the vectors whose squares were pooled for
        the gradients. Rows are located as `NativeKernels` locates them."""
        dtype = torch.float64 if row_dtype == "float64" else torch.float32
        values = [
            out if out.dtype == dtype else empty(*out.shape, dtype=dtype) for out in out_tensors
        ]
        for (output, _), columns in self.shared_columns.items():
            values[output][:, columns].zero_()
        counts = lookups.feature_offsets.diff().tolist()
        rows = {
            square.key: empty(counts[square.column], square.part.dim, dtype=dtype)
            for _, square in self.pairs
            if square is not None
        }
        lookups.squared_rows.update(rows)
        places = [
            (
                *self._locate(read, values),
                *self._locate(square, values),
                0 if square is None else rows[square.key].data_ptr(),
            )
            for read, square in self.pairs
        ]
        numbers = np.array(places, dtype=np.int64)
        _native.pool_squares(lookups.native, index, bases, strides, self.native, numbers, row_dtype)
        for read in (read for pair in self.pairs for read in pair if read is not None):
            if values[read.output] is not out_tensors[read.output]:
                out_tensors[read.output][:, read.columns] = values[read.output][:, read.columns]

    def _locate(self, read: Read | None, out_tensors: Sequence[Tensor]) -> tuple[int, int, bool]:
        """Return the address of a read's columns, the bytes between rows, and whether others are added there, too."""
        if read is None:
            return 0, 0, False
        out = out_tensors[read.output]
        return (
            out.data_ptr() + read.start * out.element_size(),
            out.stride(0) * out.element_size(),
            (read.output, read.start) in self.shared_columns,
        )


Bag = tuple[Tensor | None, Pooling, Tensor | None]
"""Offsets, pooling and weights of the lookups of one column, as `ops.reference.pool` takes them."""


def get_column_bag(
    lookups: Lookups, lookup_columns: LookupColumns, column_index: int, compute_like: Tensor
) -> Bag:
    """Return the bags of a column of lookups. compute_like: a tensor of the compute dtype."""
    offsets = lookups.bags[column_index]
    weights = lookups.weights[column_index]
    pooling = POOLINGS[int(lookup_columns.poolings[column_index])]
    # A sample's only lookup is not divided.
    kind: Pooling = "sequence" if offsets is None else pooling
    return offsets, kind, None if weights is None else weights.to(compute_like)


def pool_squares(row_vectors: Tensor, bag: Bag) -> Tensor:
    """Return the squares (B, D) of these vectors (E, D), summed in lookup order."""
    offsets, kind, _ = bag
    values = (
        row_vectors
        if (factors := _compute_factors(row_vectors, bag)) is None
        else row_vectors * factors
    )
    squares = values.square()
    return (
        squares
        if kind == "sequence" or offsets is None
        else reference.ordered_sum(squares, offsets)
    )


def add_gradients(
    reads: Sequence[Read], output_gradients: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Add up the gradients (B, D) that a part receives from these reads: those of its pooled vectors, and of its
    pooled squares; None without such a read. output_gradients: by output."""
    sums: list[Tensor | None] = [None, None]
    for read in reads:
        before = sums[read.is_squared]
        own = output_gradients[read.output][:, read.columns]
        sums[read.is_squared] = own if before is None else before + own
    return sums[0], sums[1]


def compute_lookup_gradients(
    vector_gradient: Tensor | None,
    square_gradient: Tensor | None,
    row_vectors: Tensor | None,
    bag: Bag,
    num_lookups: int,
) -> Tensor:
    """Return the gradients (E, D) of the lookups of one column, from what `add_gradients` returns.

    With coefficient x and gradient g of the lookup's bag this is x g, and of squares 2 v (x g) x. row_vectors: v (E,
    D), if squares were pooled; None: gradients of squares are zeros.
    """
    terms = None
    if vector_gradient is not None:
        terms = reference.lookup_gradients(vector_gradient, *bag, num_lookups=num_lookups)
    if square_gradient is None:
        assert terms is not None, "wanted a read of vectors or of squares"
        return terms
    squares = reference.lookup_gradients(square_gradient, *bag, num_lookups=num_lookups)
    if row_vectors is not None:
        row_vectors = row_vectors.to(squares)
        factors = _compute_factors(row_vectors, bag)
        squares = 2 * row_vectors * (squares if factors is None else squares * factors)
    return squares if terms is None else terms + squares


def separate_lookups(
    lookups: Lookups, lookup_columns: LookupColumns, dtype: torch.dtype
) -> Lookups:
    """Return the lookups with columns whose squares are read as sequences without weights: an output row, or a
    gradient, for each lookup. dtype: the compute dtype."""
    squared = squared_columns(lookup_columns)
    weights = [None if c in squared else column for c, column in enumerate(lookups.weights)]
    return replace_poolings(lookups, weights, lookup_columns, squared, dtype)


def squared_columns(lookup_columns: LookupColumns) -> frozenset[int]:
    """Return the columns of lookups whose squares are read."""
    reads = zip(lookup_columns.reads, lookup_columns.squared, strict=True)
    return frozenset(column for (column, _), is_squared in reads if is_squared)


def _compute_factors(rows: Tensor, bag: Bag) -> Tensor | None:
    """Return x of each lookup, (E, 1); None: 1."""
    offsets, kind, weights = bag
    if kind in ("sum", "sequence") or offsets is None:
        return None if weights is None else weights[:, None]
    ones = rows.new_ones(len(offsets) - 1, 1)
    return reference.lookup_gradients(ones, offsets, kind, weights, num_lookups=len(rows))
