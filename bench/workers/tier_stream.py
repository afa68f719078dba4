"""The stream of `bench tiers`: the 26 fields of Criteo Kaggle, each id drawn by itself with P(k-th id) ~ 1 / k**skew.

A folder holds the stream and what endless training before it would have left, drawn from the same law, so that
neither millions of samples are replayed nor a first pass is mistaken for a later one. Of row r (all fields in one
numbering, `Shape.starts`):

    rows.i32   (batches, fields, samples): the row of each lookup
    hints.u8   as rows.i32: a next-use code for each lookup, made by tier_policies.cc
    first.f32  (rows,) batches from the start to the first lookup, made likewise
    rate.f32   (rows,) lookups per sample
    count.f32  (rows,) lookups in the last `history` samples
    age.f32    (rows,) batches since the last lookup
    after.f32  (rows,) batches from the end of the stream to the next lookup: draws are independent, so it is
               exponential whatever the stream did
    shape.txt  rows, batches, lookups of a batch, half-life of counts in batches

Ids are scattered over a field's vocabulary by a fixed permutation: neighbours in frequency are no neighbours.
Legend: N batches, F fields, B samples, R rows of all fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEAD = 4096
"""Ranks whose probabilities are summed one by one; later ones are integrated: 1e-8 from the sum."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    cardinalities: tuple[int, ...]
    skew: float
    batch_size: int
    num_batches: int
    history: float
    """Samples that rows were counted over before the stream begins."""
    seed: int = 0

    @property
    def starts(self) -> NDArray[np.int64]:
        """First row of each field, and R: (F + 1,)."""
        return np.cumsum([0, *self.cardinalities])

    @property
    def num_rows(self) -> int:
        return sum(self.cardinalities)

    @property
    def lookups(self) -> int:
        return len(self.cardinalities) * self.batch_size


class Stream:
    """A written stream, mapped: batches are read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        values = json.loads((folder / "stream.json").read_text())
        values["cardinalities"] = tuple(values["cardinalities"])
        self.shape = Shape(**values)

    def rows(self) -> NDArray[np.int32]:
        """Map the row of each lookup: (N, F, B)."""
        return self._mapped("rows.i32", np.int32)

    def hints(self) -> NDArray[np.uint8]:
        """Map the next-use code of each lookup: (N, F, B)."""
        return self._mapped("hints.u8", np.uint8)

    def state(self, name: str) -> NDArray[np.float32]:
        """Map a value of each row, (R,): "rate", "count", "age", "after" or "first"."""
        return np.memmap(self.folder / f"{name}.f32", np.float32, "r")

    def _mapped(self, name: str, dtype: type) -> np.memmap:
        shape = self.shape
        sizes = (shape.num_batches, len(shape.cardinalities), shape.batch_size)
        return np.memmap(self.folder / name, dtype, "r", shape=sizes)


def write_stream(folder: Path, shape: Shape) -> Stream:
    """Write everything but the hints. A pure function of `shape`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = (shape.num_batches, len(shape.cardinalities), shape.batch_size)
    out = np.memmap(folder / "rows.i32", np.int32, "w+", shape=sizes)
    rate = np.empty(shape.num_rows)
    for f, (cardinality, start) in enumerate(
        zip(shape.cardinalities, shape.starts[:-1], strict=True)
    ):
        generator = np.random.Generator(np.random.SFC64([shape.seed, f]))
        place = generator.permutation(cardinality).astype(np.int32)  # of each rank
        rate[start + place] = probabilities(cardinality, shape.skew)
        place += np.int32(start)
        law = Law(cardinality, shape.skew)
        for b in range(0, shape.num_batches, 64):
            part = out[b : b + 64, f]
            part[:] = place[law.draw(generator, part.size)].reshape(part.shape)
    out.flush()
    generator = np.random.Generator(np.random.SFC64([shape.seed, len(shape.cardinalities)]))
    for name, values in draw_state(generator, rate, shape).items():
        values.astype(np.float32).tofile(folder / f"{name}.f32")
    half_life = shape.history / shape.batch_size
    words = (shape.num_rows, shape.num_batches, shape.lookups, half_life)
    (folder / "shape.txt").write_text(" ".join(map(str, words)))
    (folder / "stream.json").write_text(json.dumps(asdict(shape)))
    return Stream(folder)


class Law:
    """Ranks 0 .. n-1 with P(k) ~ 1 / (k + 1)**skew."""

    def __init__(self, n: int, skew: float) -> None:
        self.n, self.power = n, 1 - skew
        head = np.arange(1, min(n, HEAD) + 1, dtype=np.float64) ** -skew
        self.upto = np.cumsum(head)
        self.low = (HEAD + 0.5) ** self.power
        self.tail = ((n + 0.5) ** self.power - self.low) / self.power if n > HEAD else 0.0

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        drawn = generator.random(size) * (self.upto[-1] + self.tail)
        ranks = np.searchsorted(self.upto, drawn, side="right")
        late = np.flatnonzero(ranks == len(self.upto))
        if self.n > HEAD:
            rest = drawn[late] - self.upto[-1]
            ranks[late] = np.rint((rest * self.power + self.low) ** (1 / self.power)) - 1
        return np.minimum(ranks, self.n - 1)


def probabilities(n: int, skew: float) -> Floats:
    """Return the probability of each rank: (n,)."""
    weight = np.arange(1, n + 1, dtype=np.float64) ** -skew
    return weight / weight.sum()


def draw_state(generator: np.random.Generator, rate: Floats, shape: Shape) -> dict[str, Floats]:
    """Draw the state that independent lookups at `rate` (R,) per sample leave of each row: see the module."""
    count = generator.poisson(rate * shape.history).astype(np.float64)
    # The last of `count` uniform moments in the history; where there is none, the wait began before it.
    inside = shape.history * (1 - generator.random(len(rate)) ** (1 / np.maximum(count, 1)))
    before = shape.history + generator.standard_exponential(len(rate)) / rate
    age = np.where(count > 0, inside, before) / shape.batch_size
    after = generator.standard_exponential(len(rate)) / (rate * shape.batch_size)
    return {"rate": rate, "count": count, "age": age, "after": after}


def scaled(cardinalities: Sequence[int], factor: float) -> tuple[int, ...]:
    """A smaller model of the same shape: big fields shrink, small ones stay."""
    return tuple(min(n, max(10_000, int(n * factor))) for n in cardinalities)
