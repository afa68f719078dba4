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
from colonnade.cache import count_sent_record_bytes
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
    predict_cache_load,
)
from colonnade.plan.plan import EXACT, Codecs
from colonnade.staleness import TableCache
from colonnade.store.budget import slot_bytes
from colonnade.table import Feature, Table, TableSide, describe_whole_row_setting
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS
from colonnade.wire.packing import measure_packed_bytes

Ids = NDArray[np.int64]
Curve = tuple[tuple[float, ...], tuple[float, ...]]

MOMENTS = 6
"""Number of points in a run at which reads are predicted; the run's reads are their mean."""
LISTED_BATCHES = 8
"""Number of batches in which the size of packed ids is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatches:
    """Batches of a run for which memory is planned."""

    batch_size: int
    window: int = 1
    """Number of batches in flight."""
    at_once: int = 1
    """Number of batches that must be in memory at once."""
    num_samples: int | None = None
    """Number of samples of the data set, if known; no batch has more distinct rows than the data set."""
    first_batch: int = 0
    last_batch: int = 0
    """Batches first_batch .. last_batch are still to train."""

    @property
    def batches_per_epoch(self) -> float:
        """Number of batches of an epoch; inf if the data's length is unknown."""
        return (
            math.inf if self.num_samples is None else max(self.num_samples / self.batch_size, 1.0)
        )

    @property
    def moments(self) -> list[float]:
        """Evenly spaced batches at which reads are predicted."""
        return [self.first_batch + self.span * (i + 0.5) / MOMENTS for i in range(MOMENTS)]

    @property
    def span(self) -> int:
        """Number of batches that are still to train."""
        return max(self.last_batch - self.first_batch, 1)


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

    def interpolate_size_ratios(self, num_samples: float) -> tuple[float, float]:
        """Return the two size ratios of `listing` for a number of samples; 1 if nothing was measured."""
        sizes, distinct, repeated = self.listing
        if not sizes or num_samples <= 0:
            return 1.0, 1.0
        log_samples = math.log(num_samples)
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

    def scale(self, factor: float) -> ColumnLoad:
        """Return the lookups of `factor` times as many samples."""
        return ColumnLoad(self.lookups * factor, self.longest, self.is_weighted)


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
        self, table_index: int, num_samples: float, popularity: Popularity
    ) -> float:
        """Return the expected number of distinct rows of table t among `num_samples` samples of a batch.

        Scales the prediction from the table's popularity by its error at the nearest counted sizes."""
        sizes, rows = self.tables[table_index].unique
        sample_lookups = self.lookups_per_sample(table_index)
        if not sizes or not sample_lookups or num_samples <= 0:
            return popularity.unique(sample_lookups * max(num_samples, 0.0))
        ratios = [
            counted / max(popularity.unique(sample_lookups * size), 1e-300)
            for size, counted in zip(sizes, rows, strict=True)
        ]
        ratio = float(np.interp(math.log(num_samples), np.log(sizes), ratios))
        return min(
            ratio * popularity.unique(sample_lookups * num_samples), sample_lookups * num_samples
        )

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
    batches = [batch for batch in batches if batch.size]
    if not batches:
        raise ConfigError(
            "the sample has no samples, so there is nothing to profile; give more data"
        )
    sizes = [] if is_brief else _halved_sizes(batches[0].size)
    pieces = np.array([sum(batch.size // size for batch in batches) for size in sizes])
    is_counted = pieces > 0
    profiles = []
    for table in tables:
        readers = [feature.name for feature in features if feature.table == table.name]
        lookups = []  # (id, sample index) of each lookup, by batch
        for batch in batches:
            columns = [batch.ids[name] for name in readers]
            ids = [column.values.numpy() for column in columns]
            samples = [column.samples.numpy() for column in columns]
            none = np.zeros(0, np.int64)
            lookups.append((np.concatenate([*ids, none]), np.concatenate([*samples, none])))
        num_unique = [len(np.unique(ids)) for ids, _ in lookups]
        counts = np.zeros(len(sizes))
        if sizes:
            for batch, by_batch in zip(batches, lookups, strict=True):
                counts += count_unique_by_size(*by_batch, sizes, batch.size)
        packed = np.zeros((4, len(sizes)))
        for by_batch in lookups[:LISTED_BATCHES]:
            packed += measure_packed_id_bytes(*by_batch, sizes, table.rows or 0)
        all_ids = np.concatenate([ids for ids, _ in lookups])
        profiles.append(
            replace(
                profile_ids(table.name, all_ids, sum(num_unique) / len(batches)),
                most_unique=max(num_unique),
                unique=(
                    _floats(np.array(sizes)[is_counted]),
                    _floats(counts[is_counted] / pieces[is_counted]),
                ),
                listing=_compute_size_ratios(sizes, packed),
            )
        )
    return Profile(
        sum(batch.size for batch in batches),
        len(batches),
        tuple(profiles),
        max(batch.size for batch in batches),
        tuple(_profile_feature(feature.name, batches) for feature in features),
    )


def _profile_feature(name: str, batches: Sequence[Batch]) -> FeatureProfile:
    ids = [batch.ids[name] for batch in batches]
    return FeatureProfile(
        name,
        lookups=sum(len(column.values) for column in ids),
        longest=max(int(column.counts.max()) for column in ids),
        is_weighted=any(column.weights is not None for column in ids),
    )


def _halved_sizes(size: int) -> list[int]:
    """Return a batch size, half of it, a quarter and so on, ascending."""
    return sorted({-(-size >> k) for k in range(size.bit_length())} - {0} | {size})


def count_unique_by_size(
    ids: Ids, sample_indices: Ids, sample_counts: Sequence[int], batch_size: int
) -> Ids:
    """Count the distinct ids of each run of that many samples, summed over the complete runs, for each of
    `sample_counts`.

    sample_indices: sample index of each id. Returns (len(sample_counts),)."""
    order = np.lexsort((sample_indices, ids))
    ids = ids[order]
    sample_indices = sample_indices[order]
    is_same = ids[1:] == ids[:-1]
    num_unique = np.zeros(len(sample_counts), dtype=np.int64)
    for i, size in enumerate(sample_counts):
        run = sample_indices // size
        is_new = run < batch_size // size
        is_new[1:] &= ~(is_same & (run[1:] == run[:-1]))
        num_unique[i] = is_new.sum()
    return num_unique


def measure_packed_id_bytes(
    ids: Ids, sample_indices: Ids, sample_counts: Sequence[int], num_table_rows: int
) -> NDArray[np.float64]:
    """Measure the packed bytes of the ids of a batch's first samples, for each of `sample_counts`. Returns (4,
    len(sizes)).

    The rows of the result: distinct ids; as many evenly spread ids; all ids with repeats; as many evenly spread ids.
    num_table_rows: of the table; 0: an open table."""
    sizes_in_bytes = np.zeros((4, len(sample_counts)))
    for i, size in enumerate(sample_counts):
        first_ids = ids[sample_indices < size]
        if len(first_ids):
            distinct, repeated = measure_packed_bytes(torch.from_numpy(first_ids), num_table_rows)
            distinct_spread = expected_id_list_bytes(len(np.unique(first_ids)), num_table_rows, 1)
            head = list_header_bytes(len(first_ids), num_table_rows)
            repeated_spread = expected_unsorted_list_bytes(len(first_ids), num_table_rows, 1) - head
            sizes_in_bytes[:, i] = (
                distinct,
                distinct_spread,
                max(repeated - head, 0.0),
                repeated_spread,
            )
    return sizes_in_bytes


def _compute_size_ratios(
    sample_counts: Sequence[int], packed_bytes: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return `TableProfile.listing` from the sums of `measure_packed_id_bytes` over batches."""
    has_ids = packed_bytes[1] > 0
    distinct, distinct_spread, repeated, repeated_spread = packed_bytes[:, has_ids]
    return (
        _floats(np.array(sample_counts, dtype=np.float64)[has_ids]),
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
    batches: RunBatches,
    codecs: Codecs = EXACT,
    caches: Mapping[str, TableCache] | None = None,
) -> list[TableLoad]:
    """Predict the load of each table per step from a profile of a sample.

    batches: of all ranks together; the last one determines the rows of open tables and the births per step. codecs:
    encoding of rows and gradients. caches: row cache of each rank, by name of the table."""
    batch_size = batches.batch_size
    last_batch = batches.last_batch
    rank_samples = batch_size / world.num_trainers
    profiled = {feature.name: feature for feature in profile.features}
    loads = []
    for t, table in enumerate(tables):
        popularity = profile.tables[t].popularity(table.rows)
        sample_lookups = profile.lookups_per_sample(t)
        used_rows = expected_used_rows(
            popularity, sample_lookups * batch_size, min(last_batch, batches.batches_per_epoch)
        )
        unique_world = profile.expected_unique_rows(t, batch_size, popularity)
        unique_rank = profile.expected_unique_rows(t, rank_samples, popularity)
        cache = (caches or {}).get(table.name.removesuffix("[cold]"))
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
                unique_rank=unique_rank,
                unique_host=profile.expected_unique_rows(
                    t, rank_samples * world.trainers_per_host, popularity
                ),
                unique_world=unique_world,
                lookups=sample_lookups * rank_samples,
                columns=tuple(column.scale(rank_samples / profile.samples) for column in columns),
                vocabulary=table.rows or 0,
                is_pooled=all(feature.pooling != "sequence" for feature in readers),
                may_be_cut=not isinstance(table, TableSide)
                and not describe_whole_row_setting(
                    table, [p.name for p in table.parts if p.dim > 1]
                ),
                births=used_rows / last_batch if last_batch else 0.0,
                cache=None
                if cache is None
                else predict_cache_load(
                    popularity,
                    sample_lookups * rank_samples,
                    unique_rank,
                    cache,
                    world.num_trainers,
                    (0, last_batch),
                    # A codec of values shortens the weights alone.
                    count_sent_record_bytes(table, cache.clock.is_late)
                    + values.row_bytes(dims, dtype)
                    - table.width * dtype.itemsize,
                ),
            )
        )
    return loads
