"""Profile of a sample of the data: lookups of each table and feature, and how often rows repeat.

`profile_batches` reads batches; all other functions are pure. A profile is a frozen value that can be converted to
and from JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.batch import Batch
from colonnade.batch import Ids as FeatureIds
from colonnade.errors import ConfigError, CorruptionError
from colonnade.formats import make_format_stamp, parse_stamped_json
from colonnade.hops.load import ColumnLoad, TableLoad
from colonnade.hops.message_bytes import (
    expected_id_list_bytes,
    expected_unsorted_list_bytes,
    list_header_bytes,
)
from colonnade.plan.measure.popularity import (
    OPEN_ROOM,
    Popularity,
    estimate_from_spectrum,
    expected_used_rows,
)
from colonnade.plan.plan import EXACT, Codecs
from colonnade.store.budget import slot_bytes
from colonnade.table import Feature, Table, TableSide, describe_whole_row_setting
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS
from colonnade.wire.packing import measure_packed_bytes

Ids = NDArray[np.int64]
Curve = tuple[tuple[float, ...], tuple[float, ...]]

LISTED_BATCHES = 8
"""Number of batches in which the size of packed ids is measured."""


@dataclass(frozen=True, slots=True)
class TableProfile:
    """Profile of one table; rows and lookups are those of the sample."""

    name: str
    lookups: int
    unique_per_batch: float
    """Mean number of distinct rows of a batch."""
    spectrum: tuple[tuple[int, ...], tuple[int, ...]]
    """Counts that rows have in the sample, and the number of rows with each count, ascending."""
    most_unique: int = 0
    """Number of distinct rows of the batch with most; 0: unknown."""
    unique: Curve = ((), ())
    """Numbers of samples of a batch, and mean number of distinct rows among them, ascending up to a full batch."""
    listing: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]] = ((), (), ())
    """Numbers of samples of a batch, ascending; size of their packed distinct ids relative to evenly spread ids; the
    same for all ids with repeats."""

    def interpolate_size_ratios(self, samples: float) -> tuple[float, float]:
        """Return the two size ratios of `listing` for a number of samples; 1 if nothing was measured."""
        sizes, distinct, repeated = self.listing
        if not sizes or samples <= 0:
            return 1.0, 1.0
        log_samples = math.log(samples)
        log_sizes = np.log(sizes)
        return (
            float(np.interp(log_samples, log_sizes, distinct)),
            float(np.interp(log_samples, log_sizes, repeated)),
        )

    @property
    def rows(self) -> int:
        """Number of distinct rows."""
        return sum(self.spectrum[1])

    def popularity(self, table_rows: int | None) -> Popularity:
        """Estimate the popularity of the table's rows. table_rows: of a vocabulary table, else None."""
        values, rows = (np.array(part, dtype=np.float64) for part in self.spectrum)
        return estimate_from_spectrum(values, rows, table_rows)


@dataclass(frozen=True, slots=True)
class FeatureProfile:
    """Lookups of one feature in the sample."""

    name: str
    lookups: int
    longest: int
    """Largest number of lookups of a sample."""
    is_weighted: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of all tables and features in a sample of the data."""

    samples: int
    batches: int
    tables: tuple[TableProfile, ...]
    largest_batch: int = 0
    """Number of samples of the largest batch; 0: unknown."""
    features: tuple[FeatureProfile, ...] = ()
    digest: str = ""
    """Digest of the tables, features and data that the profile is of; "": unknown."""

    @property
    def batch_size(self) -> float:
        """Mean number of samples of a batch."""
        return self.samples / self.batches

    def lookups_per_sample(self, table_index: int) -> float:
        """Return the mean number of lookups of table t per sample."""
        return self.tables[table_index].lookups / self.samples

    def expected_unique_rows(
        self, table_index: int, samples: float, popularity: Popularity
    ) -> float:
        """Return the expected number of distinct rows of table t among `samples` samples of a batch.

        Scales the prediction from the table's popularity by its error at the nearest counted sizes."""
        sizes, rows = self.tables[table_index].unique
        sample_lookups = self.lookups_per_sample(table_index)
        if not sizes or not sample_lookups or samples <= 0:
            return popularity.unique(sample_lookups * max(samples, 0.0))
        ratios = [
            counted / max(popularity.unique(sample_lookups * size), 1e-300)
            for size, counted in zip(sizes, rows, strict=True)
        ]
        ratio = float(np.interp(math.log(samples), np.log(sizes), ratios))
        return min(ratio * popularity.unique(sample_lookups * samples), sample_lookups * samples)

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        return json.dumps({**make_format_stamp("colonnade profile"), **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile from JSON text. Raises CorruptionError for values that no profile has, CheckpointError for
        another format version."""
        values = parse_stamped_json("profile", text, "colonnade profile")
        try:
            tables = tuple(TableProfile(**_tuples(table)) for table in values.pop("tables"))
            features = tuple(FeatureProfile(**feature) for feature in values.pop("features"))
            for table in tables:
                _check_table_profile(table)
            return cls(tables=tables, features=features, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"profile: got values that no profile has ({type(error).__name__}: {error}), wanted those that "
                "Colonnade writes; profile the data again"
            ) from None


def _check_table_profile(table: TableProfile) -> None:
    """Raise ValueError or TypeError for values that no sample has."""
    counts = (table.lookups, table.unique_per_batch, table.most_unique)
    if not all(0 <= count < 2**63 for count in counts):
        raise ValueError(f"lookups and rows of table {table.name!r}: {counts}")
    for name, num_lists in (("spectrum", 2), ("unique", 2), ("listing", 3)):
        lists = getattr(table, name)
        lengths = [len(values) for values in lists]
        if len(lengths) != num_lists or len(set(lengths)) > 1:
            raise ValueError(f"{name} of table {table.name!r}: lists of {lengths} numbers")
        if not all(0 <= value < 2**63 for values in lists for value in values):
            raise ValueError(f"{name} of table {table.name!r}: numbers less than 0, or too large")
        first = list(lists[0])
        if first != sorted(set(first)) or 0 in first:
            raise ValueError(
                f"{name} of table {table.name!r}: numbers that do not ascend from above 0"
            )


def profile_batches(
    tables: Sequence[Table],
    features: Sequence[Feature],
    batches: Iterable[Batch],
    *,
    is_brief: bool = False,
) -> Profile:
    """Profile the lookups of a sample of the data; reads all batches. Raises ConfigError if there are no samples.

    is_brief: count only what a division of memory needs: no packed sizes or distinct rows of smaller batches."""
    table_indices = {table.name: t for t, table in enumerate(tables)}
    parts: list[list[Ids]] = [[] for _ in tables]
    uniques = [0] * len(tables)
    max_unique = [0] * len(tables)
    columns = {feature.name: FeatureProfile(feature.name, 0, 0, False) for feature in features}
    sizes: list[int] = []
    counts = np.zeros((len(tables), 0))
    packed = np.zeros((len(tables), 4, 0))
    pieces = np.zeros(0)
    samples = count = largest = 0
    for batch in batches:
        if not batch.size:
            continue
        if not sizes:
            sizes = [] if is_brief else _halved_sizes(batch.size)
            counts = np.zeros((len(tables), len(sizes)))
            pieces = np.zeros(len(sizes))
            packed = np.zeros((len(tables), 4, len(sizes)))
        samples = samples + batch.size
        count = count + 1
        largest = max(largest, batch.size)
        table_ids: list[list[Ids]] = [[] for _ in tables]
        table_samples: list[list[Ids]] = [[] for _ in tables]
        for feature in features:
            t = table_indices[feature.table]
            feature_ids = batch.ids[feature.name]
            ids, sample_indices = _list_ids_and_samples(feature_ids, batch.size)
            table_ids[t].append(ids)
            table_samples[t].append(sample_indices)
            columns[feature.name] = _add_batch_lookups(
                columns[feature.name], feature_ids, sample_indices
            )
        pieces += [batch.size // size for size in sizes]
        for t, id_arrays in enumerate(table_ids):
            ids = np.concatenate(id_arrays) if id_arrays else np.zeros(0, np.int64)
            sample_indices = np.concatenate(table_samples[t]) if id_arrays else ids
            parts[t].append(ids)
            unique = len(np.unique(ids))
            uniques[t] = uniques[t] + unique
            max_unique[t] = max(max_unique[t], unique)
            if sizes:
                counts[t] += count_unique_by_size(ids, sample_indices, sizes, batch.size)
            if sizes and count <= LISTED_BATCHES:
                packed[t] += measure_packed_id_bytes(
                    ids, sample_indices, sizes, tables[t].rows or 0
                )
    if not count:
        raise ConfigError(
            "the sample has no samples, so there is nothing to profile; give more data"
        )
    is_counted = pieces > 0
    profiles = [
        replace(
            profile_ids(table.name, np.concatenate(parts[t]), uniques[t] / count),
            most_unique=max_unique[t],
            unique=(
                _floats(np.array(sizes)[is_counted]),
                _floats(counts[t][is_counted] / pieces[is_counted]),
            ),
            listing=_compute_size_ratios(sizes, packed[t]),
        )
        for t, table in enumerate(tables)
    ]
    return Profile(samples, count, tuple(profiles), largest, tuple(columns.values()))


def _halved_sizes(size: int) -> list[int]:
    """Return a batch size, half of it, a quarter and so on, ascending."""
    return sorted({-(-size >> k) for k in range(size.bit_length())} - {0} | {size})


def _list_ids_and_samples(ids: FeatureIds, size: int) -> tuple[Ids, Ids]:
    """Return the ids of a feature and the sample index of each, both (E,)."""
    values = ids.values.numpy()
    samples = np.arange(size)
    return values, samples if ids.offsets is None else np.repeat(
        samples, ids.offsets.diff().numpy()
    )


def _add_batch_lookups(profile: FeatureProfile, ids: FeatureIds, samples: Ids) -> FeatureProfile:
    """Return a feature's profile with the lookups of one more batch. samples: sample index of each lookup."""
    longest = int(np.bincount(samples).max()) if len(samples) else 0
    return replace(
        profile,
        lookups=profile.lookups + len(samples),
        longest=max(profile.longest, longest),
        is_weighted=profile.is_weighted or ids.weights is not None,
    )


def count_unique_by_size(ids: Ids, samples: Ids, sizes: Sequence[int], batch_size: int) -> Ids:
    """Count the distinct ids of each run of `size` samples, summed over the complete runs, for each of `sizes`.

    samples: sample index of each id. Returns (len(sizes),)."""
    order = np.lexsort((samples, ids))
    ids = ids[order]
    samples = samples[order]
    is_same = ids[1:] == ids[:-1]
    num_unique = np.zeros(len(sizes), dtype=np.int64)
    for i, size in enumerate(sizes):
        run = samples // size
        is_new = run < batch_size // size
        is_new[1:] &= ~(is_same & (run[1:] == run[:-1]))
        num_unique[i] = is_new.sum()
    return num_unique


def measure_packed_id_bytes(
    ids: Ids, samples: Ids, sizes: Sequence[int], rows: int
) -> NDArray[np.float64]:
    """Measure the packed bytes of the ids of a batch's first samples, for each of `sizes`. Returns (4, len(sizes)).

    The rows of the result: distinct ids; as many evenly spread ids; all ids with repeats; as many evenly spread ids.
    rows: of the table; 0: an open table."""
    sizes_in_bytes = np.zeros((4, len(sizes)))
    for i, size in enumerate(sizes):
        first_ids = ids[samples < size]
        if len(first_ids):
            distinct, repeated = measure_packed_bytes(torch.from_numpy(first_ids), rows)
            distinct_spread = expected_id_list_bytes(len(np.unique(first_ids)), rows, 1)
            head = list_header_bytes(len(first_ids), rows)
            repeated_spread = expected_unsorted_list_bytes(len(first_ids), rows, 1) - head
            sizes_in_bytes[:, i] = (
                distinct,
                distinct_spread,
                max(repeated - head, 0.0),
                repeated_spread,
            )
    return sizes_in_bytes


def _compute_size_ratios(
    sizes: Sequence[int], packed: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return `TableProfile.listing` from the sums of `measure_packed_id_bytes` over batches."""
    has_ids = packed[1] > 0
    distinct, distinct_spread, repeated, repeated_spread = packed[:, has_ids]
    return (
        _floats(np.array(sizes, dtype=np.float64)[has_ids]),
        _floats(distinct / distinct_spread),
        _floats(repeated / np.maximum(repeated_spread, 1.0)),
    )


def profile_ids(name: str, ids: Ids, unique_per_batch: float) -> TableProfile:
    """Profile the lookups of one table, in any order."""
    _, counts = np.unique(ids, return_counts=True)
    values, rows = np.unique(counts, return_counts=True)
    return TableProfile(name, len(ids), unique_per_batch, (_ints(values), _ints(rows)))


def _ints(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).tolist())


def _floats(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float64).tolist())


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(map(tuple, value)) if isinstance(value, list) else value
        for name, value in values.items()
    }


def build_table_loads(
    tables: Sequence[Table],
    features: Sequence[Feature],
    profile: Profile,
    world: World,
    *,
    batch_size: float,
    last_batch: float = 0.0,
    num_samples: int | None = None,
    codecs: Codecs = EXACT,
) -> list[TableLoad]:
    """Predict the load of each table per step from a profile of a sample.

    batch_size: samples over all ranks. last_batch: last batch of the run, which determines the rows of open tables and
    the births per step. num_samples: size of the data set, if known. codecs: encoding of rows and gradients."""
    rank_samples = batch_size / world.num_trainers
    profiled = {feature.name: feature for feature in profile.features}
    epoch = math.inf if num_samples is None else max(num_samples / batch_size, 1.0)
    loads = []
    for t, table in enumerate(tables):
        popularity = profile.tables[t].popularity(table.rows)
        sample_lookups = profile.lookups_per_sample(t)
        used_rows = expected_used_rows(
            popularity, sample_lookups * batch_size, min(last_batch, epoch)
        )
        unique_world = profile.expected_unique_rows(t, batch_size, popularity)
        readers = [feature for feature in features if feature.table == table.name]
        columns = [profiled[feature.name] for feature in readers if feature.name in profiled]
        dims = [part.dim for part in table.parts]
        dtype = getattr(torch, table.dtype)
        compute = getattr(torch, table.compute_dtype)
        list_ratio, raw_list_ratio = profile.tables[t].interpolate_size_ratios(rank_samples)
        values = CODECS[codecs.values]
        gradients = CODECS[codecs.gradients]
        loads.append(
            TableLoad(
                name=table.name,
                width=table.width,
                value_bytes=values.row_bytes(dims, dtype),
                gradient_bytes=gradients.row_bytes(dims, compute),
                bag_bytes=values.row_bytes(dims, compute),
                row_bytes=table.width * dtype.itemsize,
                weight_bytes=compute.itemsize,
                list_ratio=list_ratio,
                raw_list_ratio=raw_list_ratio,
                rows=float(table.rows) if table.rows else max(used_rows * OPEN_ROOM, unique_world),
                slot_bytes=slot_bytes(table),
                samples=rank_samples,
                unique_rank=profile.expected_unique_rows(t, rank_samples, popularity),
                unique_host=profile.expected_unique_rows(
                    t, rank_samples * world.trainers_per_host, popularity
                ),
                unique_world=unique_world,
                lookups=sample_lookups * rank_samples,
                columns=tuple(
                    ColumnLoad(
                        column.lookups * rank_samples / profile.samples,
                        column.longest,
                        column.is_weighted,
                    )
                    for column in columns
                ),
                vocabulary=table.rows or 0,
                is_pooled=all(feature.pooling != "sequence" for feature in readers),
                may_be_cut=not isinstance(table, TableSide)
                and not describe_whole_row_setting(
                    table, [p.name for p in table.parts if p.dim > 1]
                ),
                births=used_rows / last_batch if last_batch else 0.0,
            )
        )
    return loads
