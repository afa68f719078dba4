"""Partition of features into towers within the capacity of each tower.

The tower partitioner of DMT (Luo et al. 2024): embed features in the plane so that similar (or dissimilar) ones are
near each other, then cluster them by k-means with bounded clusters. A table is looked up in one tower, so its features
stay together. Pure functions, deterministic for a seed. Legend: F features, U tables, T towers.

Embedding in the plane: stress minimisation by majorisation (SMACOF, de Leeuw 1977), started from classical scaling
(Torgerson 1952). Deterministic.

Bounded assignment in k-means: Bradley, Bennett and Demiriz 2000. If all items have equal weights it is a minimum-cost
flow, and solved as such. Otherwise it is bin packing, which has no fast exact algorithm, and a local search by moves
and swaps solves it. Deterministic. Legend: U items, T bins, M measures (weights of an item).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.formats import make_format_stamp
from colonnade.plan.towers.affinity import (
    AFFINITIES,
    DISTANCES,
    AffinityKind,
    Distance,
    affinity_distances,
    compute_agreement,
    compute_mean_affinities,
)
from colonnade.topology.towers import Partition

Floats = NDArray[np.float64]
PLANE_ROUNDS = 500
MIN_STRESS_GAIN = 1e-7
"""Part of the stress that a round must remove for another round to follow."""


def embed_in_plane(distances: Floats, dims: int = 2) -> tuple[Floats, float]:
    """Compute points with these distances, (F, dims), and their stress.

    The stress is sum (|x_i - x_j| - d_ij)^2 over sum d_ij^2; 0 is perfect. distances: (F, F), symmetric, 0 on the
    diagonal. If all distances are 0, all points are equal.
    """
    points = classical_scaling(distances, dims)
    total = float((distances**2).sum())
    if not total:
        return points, 0.0
    stress = _stress(points, distances) / total
    for _ in range(PLANE_ROUNDS):
        length = _lengths(points)
        ratio = np.divide(distances, length, out=np.zeros_like(length), where=length > 1e-12)
        guttman = np.diag(ratio.sum(1)) - ratio
        moved = guttman @ points / len(points)
        after = _stress(moved, distances) / total
        if after >= stress:
            break
        gain = stress - after
        points = moved
        stress = after
        if gain < MIN_STRESS_GAIN * stress:
            break
    return points, stress


def classical_scaling(distances: Floats, dims: int) -> Floats:
    """Compute the leading axes of the centred squared distances, (F, dims).

    The largest element of each axis is positive."""
    num = len(distances)
    centre = np.eye(num) - 1.0 / num
    values, vectors = np.linalg.eigh(-0.5 * centre @ (distances**2) @ centre)
    order = np.argsort(-values, kind="stable")[:dims]
    axes = vectors[:, order] * np.sqrt(np.maximum(values[order], 0.0))
    # Of elements that are equal up to rounding, the first determines the sign of an axis.
    longest = (np.abs(axes) >= np.abs(axes).max(0, initial=0.0) * (1 - 1e-9)).argmax(0)
    signs = np.sign(axes[longest, np.arange(len(order))])
    axes = axes * np.where(signs == 0, 1.0, signs)
    return np.hstack([axes, np.zeros((num, dims - len(order)))])


def _lengths(points: Floats) -> Floats:
    lengths: Floats = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
    return lengths


def _stress(points: Floats, distances: Floats) -> float:
    return float(((_lengths(points) - distances) ** 2).sum())


Labels = NDArray[np.int64]
SLACK = 1e-9
"""Relative tolerance of a capacity, for rounding in sums of floats."""


def assign_to_bins(
    assignment_costs: Floats, item_weights: Floats, bin_capacities: Floats
) -> Labels:
    """Assign items to bins at low cost, at least one item in each bin (U >= T). Returns the bin of each item, (U,).

    assignment_costs: (U, T). item_weights: (U, M), not negative. bin_capacities: (M,), of every bin, above 0; inf: no
    bound. The result may exceed capacities (`max_bin_fill`).
    """
    is_bounded = np.isfinite(bin_capacities)
    item_weights = item_weights[:, is_bounded]
    bin_capacities = bin_capacities[is_bounded]
    if not bin_capacities.size or (item_weights == item_weights[0]).all():
        # The capacity in items is the smallest over measures.
        max_items_by_measure = np.divide(
            bin_capacities,
            item_weights[0],
            out=np.full(len(bin_capacities), np.inf),
            where=item_weights[0] > 0,
        )
        max_items = int(
            min(max_items_by_measure.min(initial=np.inf) * (1 + SLACK), len(assignment_costs))
        )
        if max_items * assignment_costs.shape[1] >= len(assignment_costs):
            return assign_by_min_cost_flow(assignment_costs, max_items)
    return assign_by_local_search(assignment_costs, item_weights, bin_capacities)


def assign_by_min_cost_flow(assignment_costs: Floats, max_items: int) -> Labels:
    """Assign items to bins at minimum total cost, 1 .. `max_items` to each bin. max_items * T >= U >= T.

    Returns the bin of each item, (U,). Successive shortest paths: items enter one after another along the cheapest path
    of items that move on to other bins. The first item of a bin has so low a cost that no bin stays empty.
    """
    num_items, num_bins = assignment_costs.shape
    first_cost = -(np.abs(assignment_costs).sum() + 1.0)  # of the first item of an empty bin
    label = np.full(num_items, -1, dtype=np.int64)
    num_in_bin = np.zeros(num_bins, dtype=np.int64)
    # Cheapest move of an item from one bin to another, and this item.
    move_cost = np.full((num_bins, num_bins), np.inf)
    mover = np.zeros((num_bins, num_bins), dtype=np.int64)
    for item in range(num_items):
        path_cost = assignment_costs[item].copy()
        previous = np.full(num_bins, -1, dtype=np.int64)
        for _ in range(num_bins):
            through = path_cost[:, None] + move_cost
            best = through.argmin(0)
            value = through[best, np.arange(num_bins)]
            better = value < path_cost - 1e-12 * (1 + np.abs(path_cost))
            if not better.any():
                break
            path_cost[better] = value[better]
            previous[better] = best[better]
        end_cost = np.where(
            num_in_bin == 0, first_cost, np.where(num_in_bin < max_items, 0.0, np.inf)
        )
        target = int((path_cost + end_cost).argmin())
        num_in_bin[target] += 1
        changed = {target}
        while previous[target] >= 0:
            source = int(previous[target])
            label[mover[source, target]] = target
            target = source
            changed.add(target)
        label[item] = target
        for t in changed:
            members = np.flatnonzero(label == t)
            more = assignment_costs[members] - assignment_costs[members, t][:, None]
            mover[t] = members[more.argmin(0)]
            move_cost[t] = more.min(0)
            move_cost[t, t] = np.inf
    return label


def assign_by_local_search(
    assignment_costs: Floats, item_weights: Floats, bin_capacities: Floats
) -> Labels:
    """Assign items to bins: heaviest first to the cheapest bin with room, then by moves and swaps while they help.

    Reduces the overflow first, then the costs. Returns the bin of each item, (U,)."""
    num_items, num_bins = assignment_costs.shape
    shares = item_weights / bin_capacities  # (U, M): the sum in a bin should not exceed 1
    order = np.lexsort((np.arange(num_items), -shares.max(1, initial=0.0)))
    label = np.full(num_items, -1, dtype=np.int64)
    fill = np.zeros((num_bins, shares.shape[1]))
    num_in_bin = np.zeros(num_bins)
    for u in order.tolist():
        excess = _bin_excess(fill + shares[u], num_in_bin + 1)
        label[u] = np.lexsort((assignment_costs[u], excess))[0]
        fill[label[u]] += shares[u]
        num_in_bin[label[u]] += 1
    items = np.arange(num_items)
    scale = np.ptp(assignment_costs, axis=1).sum() + 1e-300
    while True:
        excess = _bin_excess(fill, num_in_bin)
        own_excess = excess[label]
        without_item = _bin_excess(fill[label] - shares, num_in_bin[label] - 1)
        with_item = _bin_excess(fill[None] + shares[:, None], num_in_bin[None] + 1)  # (U, T)
        moves = without_item[:, None] - own_excess[:, None] + with_item - excess[None]
        swapped = _bin_excess(
            fill[label][:, None] - shares[:, None] + shares[None], num_in_bin[label][:, None]
        )
        swaps = swapped + swapped.T - own_excess[:, None] - own_excess[None]
        move_costs = assignment_costs - assignment_costs[items, label][:, None]
        swap_costs = move_costs[:, label]
        is_other_bin = label[:, None] != label[None]
        stays = label[:, None] == np.arange(num_bins)[None]
        candidates = []
        for excess_change, cost_change, is_void in (
            (moves, move_costs, stays),
            (swaps, swap_costs + swap_costs.T, ~is_other_bin),
        ):
            excess_change = np.where(np.abs(excess_change) < SLACK, 0.0, excess_change)
            change = excess_change * 1e6 + cost_change / scale
            change[is_void] = np.inf
            index = int(change.argmin())
            candidates.append((float(change.flat[index]), *divmod(index, change.shape[1])))
        (move, u, t), (swap, v, w) = candidates
        if min(move, swap) >= -SLACK:
            return label
        if move <= swap:
            label[u] = t
        else:
            label[v], label[w] = label[w], label[v]
        fill = np.stack([shares[label == b].sum(0) for b in range(num_bins)])
        num_in_bin = np.bincount(label, minlength=num_bins).astype(np.float64)


def max_bin_fill(labels: Labels, weights: Floats, capacities: Floats) -> Floats:
    """Return the weight of the fullest bin over its capacity by measure, (M,); at most 1 if all items fit."""
    totals = np.zeros((int(labels.max()) + 1, weights.shape[1]))
    np.add.at(totals, labels, weights)
    fill: Floats = totals.max(0) / capacities
    return fill


def _bin_excess(fill: Floats, num_in_bin: Floats) -> Floats:
    """Return how far bins are above capacity, as a part of it; 1 for an empty bin."""
    above: Floats = np.maximum(fill - (1 + SLACK), 0.0).sum(-1)
    return above + (num_in_bin < 1)


MEASURES = ("count", "bytes", "lookups")
STARTS = 12
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class FeatureLoad:
    """Load of one feature on its tower."""

    name: str
    table: str
    table_bytes: float
    """Bytes of the table's rows, counted once for all features that read it."""
    lookups: float
    """Number of lookups per sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Capacity of a tower relative to the mean of all towers: 1 is an even share. None: no bound.

    `count` counts features, and the bound is rounded up: 26 features on 4 towers are at most 7."""

    count: float | None = 1.0
    bytes: float | None = None
    lookups: float | None = None

    def __post_init__(self) -> None:
        for name in MEASURES:
            ratio = getattr(self, name)
            if ratio is not None and not 1 <= ratio < math.inf:
                raise ConfigError(
                    f"capacity by {name}: got {ratio:g}, wanted 1 or more: a tower's share over the mean"
                )


@dataclass(frozen=True, slots=True)
class Measures:
    """Quality of a partition: mean affinity inside and across towers, and the load of each tower."""

    within: float | None
    """Mean affinity of pairs of features inside one tower; None without such pairs."""
    between: float | None
    """Mean affinity of pairs of features in two towers; None without such pairs."""
    count: tuple[int, ...]
    """Number of features of each tower."""
    bytes: tuple[float, ...]
    """Bytes of the tables of each tower."""
    lookups: tuple[float, ...]
    """Number of lookups per sample of each tower."""


@dataclass(frozen=True, slots=True)
class TowerMap:
    """Partition of features with their points in the plane, compared with round-robin and random partitions."""

    partition: Partition
    distance: Distance
    places: dict[str, tuple[float, float]]
    """Point of each feature in the plane, by name."""
    stress: float
    """Part of the squared distances that the plane does not show."""
    learned: Measures
    """Quality of `partition`."""
    striped: Measures
    """Quality of a round-robin partition."""
    random: Measures
    """Quality of a random partition."""
    silent: tuple[str, ...] = ()
    """Features without an affinity to any other."""
    affinity: AffinityKind = "cosine"
    """Kind of the affinities."""
    agreement: float | None = None
    """Part of the pairs in one tower on which towers of either half of the samples agree; None where that was not
    measured."""
    made: dict[str, int] = field(default_factory=dict)
    """Step of the checkpoint and number of samples that the affinities come from."""

    def to_json(self) -> str:
        """Return the text of a map file, which `Partition.from_json` can read as well."""
        return json.dumps(
            {
                **make_format_stamp("colonnade towers"),
                "towers": [list(tower) for tower in self.partition.towers],
                "distance": self.distance,
                "places": self.places,
                "stress": self.stress,
                "learned": asdict(self.learned),
                "striped": asdict(self.striped),
                "random": asdict(self.random),
                "silent": list(self.silent),
                "affinity": self.affinity,
                "agreement": self.agreement,
                "made": self.made,
            },
            indent=2,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> TowerMap:
        """Read the text of a map file. Raises ConfigError."""
        partition = Partition.from_json(text)
        try:
            fields = json.loads(text)
            kind = fields.get("affinity", "cosine")  # of files before there were interactions
            if fields["distance"] not in DISTANCES or kind not in AFFINITIES:
                raise ValueError(fields["distance"], kind)
            agreement = fields.get("agreement")
            points = {str(name): _read_point(point) for name, point in fields["places"].items()}
            if set(points) != set(partition.features):
                raise ValueError("points of other features")
            learned, striped, random = (
                _read_partition_measures(fields[name], partition)
                for name in ("learned", "striped", "random")
            )
            return cls(
                partition,
                fields["distance"],
                points,
                _read_finite(fields["stress"]),
                learned=learned,
                striped=striped,
                random=random,
                silent=tuple(map(str, fields["silent"])),
                affinity=kind,
                agreement=None if agreement is None else _read_finite(agreement),
                made={str(name): int(value) for name, value in fields["made"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ConfigError(
                "got a map of towers that cannot be read, wanted one that `colonnade towers` wrote; write it again"
            ) from None


def build_tower_map(
    affinity: Floats,
    loads: Sequence[FeatureLoad],
    num_towers: int,
    *,
    distance: Distance = "coherent",
    capacity: Capacity = Capacity(),
    silent: Sequence[str] = (),
    halves: Sequence[Floats] = (),
    seed: int = 0,
) -> TowerMap:
    """Partition features into towers by affinity and compare with round-robin and random partitions.

    affinity: (F, F) in the order of `loads`. halves: affinities of each half of the samples, whose towers are compared.
    Deterministic; towers are ordered by their first features. Raises ConfigError."""
    tables = _features_by_table(loads)
    check_num_towers(loads, num_towers)
    plane, stress = embed_in_plane(affinity_distances(affinity, distance))

    def cluster(points: Floats) -> NDArray[np.int64]:
        return cluster_features(points, loads, num_towers, capacity=capacity, seed=seed)

    learned = cluster(plane)
    by_half = [cluster(embed_in_plane(affinity_distances(half, distance))[0]) for half in halves]
    order = np.random.default_rng([seed, 1]).permutation(len(tables))
    striped = np.empty(len(loads), dtype=np.int64)
    shuffled = striped.copy()
    for t, features in enumerate(tables):
        striped[features] = t % num_towers
        shuffled[features] = int(order[t]) % num_towers
    return TowerMap(
        build_partition(learned, loads, num_towers),
        distance,
        {
            load.name: (round(float(x), 6), round(float(y), 6))
            for load, (x, y) in zip(loads, plane, strict=True)
        },
        round(stress, 6),
        learned=measure_partition_quality(affinity, loads, learned, num_towers),
        striped=measure_partition_quality(affinity, loads, striped, num_towers),
        random=measure_partition_quality(affinity, loads, shuffled, num_towers),
        silent=tuple(silent),
        agreement=round(compute_agreement(*by_half), 6) if by_half else None,
    )


def check_num_towers(loads: Sequence[FeatureLoad], num_towers: int) -> None:
    """Raise ConfigError if there are more towers than tables, or none."""
    tables = len({load.table for load in loads})
    if not 1 <= num_towers <= tables:
        raise ConfigError(
            f"got {num_towers} towers for {len(loads)} features of {tables} tables, wanted 1 .. {tables}: a table is "
            "looked up in one tower"
        )


def cluster_features(
    points: Floats,
    loads: Sequence[FeatureLoad],
    num_towers: int,
    *,
    capacity: Capacity = Capacity(),
    seed: int = 0,
) -> NDArray[np.int64]:
    """Cluster features into towers within their capacity. Returns the tower of each feature, (F,).

    points: (F, 2). Towers are numbered by their first features. Features of one table stay together. Raises ConfigError
    if no towers within the capacity are found.
    """
    tables = _features_by_table(loads)
    weights = np.array(
        [
            [len(features), loads[features[0]].table_bytes, sum(loads[f].lookups for f in features)]
            for features in tables
        ]
    )
    capacities = _absolute_capacities(weights, num_towers, capacity)
    best: tuple[float, NDArray[np.int64]] | None = None
    least_overflow: Floats | None = None
    for centres in _initial_centres(points, tables, num_towers, seed):
        label, cost = _cluster_by_kmeans(points, tables, centres, weights, capacities)
        fill = max_bin_fill(label, weights, capacities)
        if fill.max() > 1 + 1e-6:
            if least_overflow is None or fill.max() < least_overflow.max():
                least_overflow = fill
        elif best is None or cost < best[0] - 1e-9 * (1 + cost):
            best = (cost, label)
    if best is None:
        assert least_overflow is not None
        raise ConfigError(
            _describe_overflow(least_overflow, weights, loads, tables, num_towers, capacity)
        )
    towers = np.empty(len(loads), dtype=np.int64)
    for features, tower in zip(tables, best[1], strict=True):
        towers[features] = tower
    _, first = np.unique(towers, return_index=True)
    new_index = np.empty(num_towers, dtype=np.int64)
    new_index[np.argsort(first, kind="stable")] = np.arange(num_towers)
    return new_index[towers]


def build_partition(
    towers: Sequence[int] | NDArray[np.int64], loads: Sequence[FeatureLoad], num_towers: int
) -> Partition:
    """Build a partition from the tower of each feature."""
    return Partition(
        tuple(
            tuple(load.name for load, t in zip(loads, towers, strict=True) if t == tower)
            for tower in range(num_towers)
        )
    )


def measure_partition_quality(
    affinity: Floats,
    loads: Sequence[FeatureLoad],
    towers: Sequence[int] | NDArray[np.int64],
    num_towers: int,
) -> Measures:
    """Measure the affinities and loads of a partition. towers: index of each feature's tower."""
    within, between = compute_mean_affinities(affinity, list(map(int, towers)))
    count = [0] * num_towers
    lookups = [0.0] * num_towers
    size = [0.0] * num_towers
    counted_tables: set[str] = set()
    for load, tower in zip(loads, towers, strict=True):
        count[tower] += 1
        lookups[tower] += load.lookups
        size[tower] += 0 if load.table in counted_tables else load.table_bytes
        counted_tables.add(load.table)
    return Measures(
        None if math.isnan(within) else round(within, 6),
        None if math.isnan(between) else round(between, 6),
        tuple(count),
        tuple(size),
        tuple(lookups),
    )


def _features_by_table(loads: Sequence[FeatureLoad]) -> list[NDArray[np.int64]]:
    """Return the indices of each table's features; tables in the order of their first features."""
    features: dict[str, list[int]] = {}
    for f, load in enumerate(loads):
        features.setdefault(load.table, []).append(f)
    return [np.array(indices) for indices in features.values()]


def _absolute_capacities(weights: Floats, num_towers: int, capacity: Capacity) -> Floats:
    """Return the largest weight of a tower by measure, (3,); inf without a bound or without weights."""
    capacities = np.full(len(MEASURES), np.inf)
    for m, name in enumerate(MEASURES):
        ratio = getattr(capacity, name)
        total = float(weights[:, m].sum())
        if ratio is not None and total > 0:
            capacities[m] = ratio * total / num_towers
            if name == "count":
                capacities[m] = math.ceil(capacities[m] - 1e-9)
    return capacities


def _initial_centres(
    points: Floats, table_features: Sequence[NDArray[np.int64]], num_towers: int, seed: int
) -> list[Floats]:
    """Return initial centres for k-means: tables far from each other, then tables drawn by the seed."""
    means = np.stack([points[features].mean(0) for features in table_features])
    distant = [int(((means - means.mean(0)) ** 2).sum(1).argmax())]
    distance = np.full(len(means), np.inf)
    while len(distant) < num_towers:
        distance = np.minimum(distance, ((means - means[distant[-1]]) ** 2).sum(1))
        distance[distant] = -1.0
        distant.append(int(distance.argmax()))
    generator = np.random.default_rng([seed, 0])
    drawn = [generator.choice(len(means), num_towers, replace=False) for _ in range(STARTS - 1)]
    return [means[distant], *(means[indices] for indices in drawn)]


def _cluster_by_kmeans(
    points: Floats,
    table_features: Sequence[NDArray[np.int64]],
    initial_centres: Floats,
    weights: Floats,
    capacities: Floats,
) -> tuple[NDArray[np.int64], float]:
    """Return the cluster of each table, and the sum of squared distances of features to their cluster's centre."""
    label = np.full(len(table_features), -1, dtype=np.int64)
    size = weights[:, 0]
    sums = np.stack([points[features].sum(0) for features in table_features])
    squares = np.array([(points[features] ** 2).sum() for features in table_features])
    cost = math.inf
    for _ in range(ROUNDS):
        # Sum of |x - c|^2 over the features of a table.
        costs = (
            squares[:, None]
            - 2 * sums @ initial_centres.T
            + size[:, None] * (initial_centres**2).sum(1)
        )
        moved = assign_to_bins(costs, weights, capacities)
        value = float(costs[np.arange(len(table_features)), moved].sum())
        if (moved == label).all() or value >= cost - 1e-12:
            break
        label = moved
        cost = value
        initial_centres = np.stack(
            [sums[label == t].sum(0) / size[label == t].sum() for t in range(len(initial_centres))]
        )
    return label, cost


def _describe_overflow(
    max_fill: Floats,
    weights: Floats,
    loads: Sequence[FeatureLoad],
    table_features: Sequence[NDArray[np.int64]],
    num_towers: int,
    capacity: Capacity,
) -> str:
    """Return the message for a capacity that cannot be met, and one that can. max_fill: result of `max_bin_fill`."""
    m = int(np.where(np.isfinite(max_fill), max_fill, 0).argmax())
    name = MEASURES[m]
    ratio = float(getattr(capacity, MEASURES[m]))
    mean = weights[:, m].sum() / num_towers
    largest = int(weights[:, m].argmax())
    feasible = (
        max_fill[m] * (math.ceil(ratio * mean - 1e-9) if name == "count" else ratio * mean) / mean
    )
    feasible = math.ceil(feasible * 100 - 1e-6) / 100
    reason = (
        f"table {loads[table_features[largest][0]].table!r} alone is {weights[largest, m] / mean:.3g} of a "
        "tower's even share"
        if weights[largest, m] > ratio * mean
        else f"the least that was found is {feasible:.3g}"
    )
    return (
        f"capacity by {name}: got {ratio:g} for {num_towers} towers, wanted a capacity that their tables fit in; "
        f"{reason}. Set {name}={feasible:g}, or use fewer towers"
    )


def _read_point(values: Sequence[float]) -> tuple[float, float]:
    x, y = map(_read_finite, values)
    return x, y


def _read_finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _read_partition_measures(fields: Mapping[str, Any], partition: Partition) -> Measures:
    within, between = (
        None if fields[name] is None else _read_finite(fields[name])
        for name in ("within", "between")
    )
    loads = [tuple(map(_read_finite, fields[name])) for name in MEASURES]
    if any(len(load) != len(partition.towers) for load in loads):
        raise ValueError("loads of other towers")
    return Measures(within, between, tuple(map(int, loads[0])), loads[1], loads[2])
