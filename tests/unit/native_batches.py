"""Random batches of lookups for the tests of the native core: structure drawn by hypothesis, content by its seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from colonnade import _native

POOLINGS = ("sum", "mean", "sequence", "sqrtn")
LIMITS = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1]


@dataclass
class RandomBatch:
    """T tables, F features, B samples, E lookups; ids feature-major."""

    table_rows: list[int]
    dims: list[int]
    feature_tables: list[int]
    poolings: list[str]
    batch_size: int
    ids: Tensor  # (E,)
    lengths: np.ndarray  # (F, B) lookups per bag; for a sequence without bags: (E_f, 0, 0 ...)
    has_bags: bool
    weights: Tensor | None
    dtype: torch.dtype
    seed: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def itemsize(self) -> int:
        return 8 if self.dtype == torch.float64 else 4

    @property
    def feature_offsets(self) -> list[int]:
        return [0, *np.cumsum(self.lengths.sum(1)).tolist()]

    def bags(self, f: int) -> Tensor:
        """Return offsets (B + 1,) of the samples' lookups of a feature."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths[f])]))

    def lookups(self) -> _native.Lookups:
        bag_offsets = None
        if self.has_bags:
            bag_offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)]))
        return _native.Lookups(
            self.ids,
            torch.tensor(self.feature_offsets),
            torch.tensor(self.feature_tables, dtype=torch.int32),
            torch.tensor([POOLINGS.index(p) for p in self.poolings], dtype=torch.uint8),
            self.batch_size,
            bag_offsets,
            self.weights,
        )

    def owners(self, pattern: Sequence[int] = (1,)) -> list[int]:
        """Return the number of owners of each table, (T,), over and over as in `pattern`."""
        return list(islice(cycle(pattern), len(self.table_rows)))

    def plan(self, pattern: Sequence[int] = (1,)) -> _native.Plan:
        owners = torch.tensor(self.owners(pattern), dtype=torch.int64)
        return _native.make_plan(self.lookups(), torch.tensor(self.table_rows), owners)

    def outputs(self, f: int) -> int:
        if self.poolings[f] == "sequence":
            return int(self.lengths[f].sum())
        return self.batch_size

    def features(self) -> Iterator[tuple[int, slice, int]]:
        """Yield each feature, its lookups and its dim."""
        offsets = self.feature_offsets
        for f, t in enumerate(self.feature_tables):
            yield f, slice(offsets[f], offsets[f + 1]), self.dims[t]


def unmix64(word: int) -> int:
    """The id whose mix64 is `word`, as a signed number."""

    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(64 // bits):
            y = x ^ y >> bits
        return y

    word = unshift(word, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    word = unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    word = unshift(word, 30)
    return word - 2**64 if word >= 2**63 else word


def random_ids(rng: np.random.Generator, n: int, rows: int) -> np.ndarray:
    """Few or many duplicates; open tables: also the limits of int64, and hashes that differ only at their end."""
    if rows:
        pool = rng.integers(0, rows, size=max(1, int(rng.choice([1, 5, 1000]))))
    else:
        close = [unmix64(0xABCDEF << 40 | int(low)) for low in rng.integers(0, 2**20, size=20)]
        pool = rng.integers(-(2**63), 2**63 - 1, size=int(rng.choice([1, 5, 1000])))
        pool = np.concatenate([pool, LIMITS, close])
    return rng.choice(pool, size=n).astype(np.int64)


@st.composite
def batches(draw: st.DrawFn, dims=(1, 3, 16, 17, 64), vocabularies=(0, 1, 7, 10_007, 2**40, 2**62)):
    num_tables = draw(st.integers(1, 4))
    num_features = draw(st.integers(1, 6))
    batch_size = draw(st.sampled_from([0, 1, 2, 7, 31, 127, 521]))
    has_bags = draw(st.booleans())
    poolings = draw(
        st.lists(st.sampled_from(POOLINGS), min_size=num_features, max_size=num_features)
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    table_rows = draw(
        st.lists(st.sampled_from(vocabularies), min_size=num_tables, max_size=num_tables)
    )
    feature_tables = rng.integers(0, num_tables, size=num_features).tolist()
    lengths = np.ones((num_features, batch_size), np.int64)
    if has_bags:
        longest = draw(st.sampled_from([1, 2, 9]))
        lengths = rng.integers(0, longest + 1, size=lengths.shape)
    elif batch_size:
        for f in range(num_features):
            if poolings[f] == "sequence":
                lengths[f] = 0
                lengths[f, 0] = rng.integers(0, 300)
    if all(p == "sequence" for p in poolings):
        has_bags = False
    ids = [
        random_ids(rng, int(lengths[f].sum()), table_rows[t]) for f, t in enumerate(feature_tables)
    ]
    num_lookups = int(lengths.sum())
    weights = None
    if draw(st.booleans()):
        weights = torch.from_numpy(rng.standard_normal(num_lookups)).to(dtype)
    return RandomBatch(
        table_rows=table_rows,
        dims=rng.choice(dims, size=num_tables).tolist(),
        feature_tables=feature_tables,
        poolings=poolings,
        batch_size=batch_size,
        ids=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids])),
        lengths=lengths,
        has_bags=has_bags,
        weights=weights,
        dtype=dtype,
        seed=seed,
    )


@contextmanager
def running_on(isa: str, num_threads: int) -> Iterator[None]:
    before = _native.isa()
    _native.set_isa(isa)
    _native.set_num_threads(num_threads)
    try:
        yield
    finally:
        _native.set_isa(before)
        _native.set_num_threads(0)


def everywhere() -> Iterator[tuple[str, int]]:
    """Cases (instruction set, threads): each set with one and three threads, the best also with two."""
    for isa in _native.available_isas():
        yield from ((isa, n) for n in (1, 3))
    yield _native.isa(), 2


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
