"""Partition of features into towers: which features are looked up together, within what a tower may hold.

Features in the plane: stress minimisation by majorisation (SMACOF, de Leeuw 1977) from classical scaling (Torgerson
1952): no chance in it.

The bounded step of k-means: Bradley, Bennett and Demiriz 2000. Where all things weigh the same it is a flow of least
cost, and solved as one; else it is packing, which has no quick exact way, and is searched by moves and swaps. Pure
functions of numbers, no chance. Legend: U things, T places, M measures (what a thing weighs).

The tower partitioner of DMT (Luo et al. 2024): alike features (or unlike ones) near each other in space, then k-means
with bounded clusters. A table is looked up in one tower, so its features go together. Pure functions, no chance but a
seed's. Legend: F features, U tables, T towers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import ConfigError
from colonnade.formats import stamp
from colonnade.plan.towers.affinity import DISTANCES, Distance, distances, within_and_between
from colonnade.topology.towers import Partition

Floats = NDArray[np.float64]
PLANE_ROUNDS = 500
WORTH = 1e-7
"""Of the stress: a round that takes less of it is the last."""


def place(distances: Floats, dims: int = 2) -> tuple[Floats, float]:
    """(F, dims) points, and their stress: sum (|x_i - x_j| - d_ij)^2 over sum d_ij^2; 0 is perfect.

    distances: (F, F), symmetric, 0 on the diagonal. Points that are all alike lie on one spot.
    """
    points = classical(distances, dims)
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
        gain, points, stress = stress - after, moved, after
        if gain < WORTH * stress:
            break
    return points, stress


def classical(distances: Floats, dims: int) -> Floats:
    """(F, dims): the leading axes of the centred squares. Each axis points to where its longest element is positive."""
    num = len(distances)
    centre = np.eye(num) - 1.0 / num
    values, vectors = np.linalg.eigh(-0.5 * centre @ (distances**2) @ centre)
    order = np.argsort(-values, kind="stable")[:dims]
    axes = vectors[:, order] * np.sqrt(np.maximum(values[order], 0.0))
    # Of elements that are as long up to rounding, the first says which way an axis points.
    longest = (np.abs(axes) >= np.abs(axes).max(0, initial=0.0) * (1 - 1e-9)).argmax(0)
    signs = np.sign(axes[longest, np.arange(len(order))])
    axes = axes * np.where(signs == 0, 1.0, signs)
    return np.hstack([axes, np.zeros((num, dims - len(order)))])


def _lengths(points: Floats) -> Floats:
    return np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))


def _stress(points: Floats, distances: Floats) -> float:
    return float(((_lengths(points) - distances) ** 2).sum())


Labels = NDArray[np.int64]
SLACK = 1e-9
"""Of a capacity: sums of floats may be so much above it."""


def assign(costs: Floats, weights: Floats, capacities: Floats) -> Labels:
    """(U,): the place of each thing, at least one in each (U >= T). `overflow` says whether all fit.

    costs: (U, T). weights: (U, M), not negative. capacities: (M,), of every place, above 0; inf: no bound.
    """
    bounded = np.isfinite(capacities)
    weights, capacities = weights[:, bounded], capacities[bounded]
    if not capacities.size or (weights == weights[0]).all():
        # The room for each is the least over measures.
        rooms = np.divide(
            capacities, weights[0], out=np.full(len(capacities), np.inf), where=weights[0] > 0
        )
        room = int(min(rooms.min(initial=np.inf) * (1 + SLACK), len(costs)))
        if room * costs.shape[1] >= len(costs):
            return flow(costs, room)
    return searched(costs, weights, capacities)


def flow(costs: Floats, room: int) -> Labels:
    """(U,): the least sum of costs with 1 .. `room` things in each place. room * T >= U >= T.

    Successive shortest paths: thing after thing comes in at the cheapest way of making room, along a path of things
    that move on. A place's first thing is so cheap that no place stays empty.
    """
    num, places = costs.shape
    first = -(np.abs(costs).sum() + 1.0)  # of a place that is empty
    label = np.full(num, -1, dtype=np.int64)
    held = np.zeros(places, dtype=np.int64)
    step = np.full((places, places), np.inf)  # the cheapest move of a thing from one to another
    mover = np.zeros((places, places), dtype=np.int64)
    for thing in range(num):
        far, before = costs[thing].copy(), np.full(places, -1, dtype=np.int64)
        for _ in range(places):
            through = far[:, None] + step
            best = through.argmin(0)
            value = through[best, np.arange(places)]
            better = value < far - 1e-12 * (1 + np.abs(far))
            if not better.any():
                break
            far[better], before[better] = value[better], best[better]
        end = np.where(held == 0, first, np.where(held < room, 0.0, np.inf))
        place = int((far + end).argmin())
        held[place] += 1
        touched = {place}
        while before[place] >= 0:
            source = int(before[place])
            label[mover[source, place]] = place
            place = source
            touched.add(place)
        label[thing] = place
        for t in touched:
            members = np.flatnonzero(label == t)
            more = costs[members] - costs[members, t][:, None]
            mover[t] = members[more.argmin(0)]
            step[t] = more.min(0)
            step[t, t] = np.inf
    return label


def searched(costs: Floats, weights: Floats, capacities: Floats) -> Labels:
    """(U,): heaviest first to the cheapest place with room, then moves and swaps while they help: the overflow first,
    then the costs."""
    num, places = costs.shape
    shares = weights / capacities  # (U, M): a place may hold 1 of each
    order = np.lexsort((np.arange(num), -shares.max(1, initial=0.0)))
    label = np.full(num, -1, dtype=np.int64)
    full, held = np.zeros((places, shares.shape[1])), np.zeros(places)
    for u in order.tolist():
        over = _over(full + shares[u], held + 1)
        label[u] = np.lexsort((costs[u], over))[0]
        full[label[u]] += shares[u]
        held[label[u]] += 1
    things = np.arange(num)
    scale = np.ptp(costs, axis=1).sum() + 1e-300
    while True:
        over = _over(full, held)
        mine = over[label]
        left = _over(full[label] - shares, held[label] - 1)
        came = _over(full[None] + shares[:, None], held[None] + 1)  # (U, T)
        moves = left[:, None] - mine[:, None] + came - over[None]
        swapped = _over(full[label][:, None] - shares[:, None] + shares[None], held[label][:, None])
        swaps = swapped + swapped.T - mine[:, None] - mine[None]
        dearer = costs - costs[things, label][:, None]
        exchanged = dearer[:, label]
        apart = label[:, None] != label[None]
        stays = label[:, None] == np.arange(places)[None]
        best_of = []
        for by_room, by_cost, is_none in (
            (moves, dearer, stays),
            (swaps, exchanged + exchanged.T, ~apart),
        ):
            by_room = np.where(np.abs(by_room) < SLACK, 0.0, by_room)
            worth = by_room * 1e6 + by_cost / scale
            worth[is_none] = np.inf
            at = int(worth.argmin())
            best_of.append((float(worth.flat[at]), *divmod(at, worth.shape[1])))
        (move, u, t), (swap, v, w) = best_of
        if min(move, swap) >= -SLACK:
            return label
        if move <= swap:
            label[u] = t
        else:
            label[v], label[w] = label[w], label[v]
        full = np.stack([shares[label == p].sum(0) for p in range(places)])
        held = np.bincount(label, minlength=places).astype(np.float64)


def overflow(labels: Labels, weights: Floats, capacities: Floats) -> Floats:
    """(M,): of the fullest place, its weight over the capacity; 1 or less where it fits."""
    found = np.zeros((int(labels.max()) + 1, weights.shape[1]))
    np.add.at(found, labels, weights)
    return found.max(0) / capacities


def _over(full: Floats, held: Floats) -> Floats:
    """How far places are from being as they should: what is above 1, and 1 for an empty one."""
    above = np.maximum(full - (1 + SLACK), 0.0).sum(-1)
    return above + (held < 1)


MEASURES = ("count", "bytes", "lookups")
STARTS = 12
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class FeatureLoad:
    """What a feature asks of the tower that has it."""

    name: str
    table: str
    table_bytes: float
    """Of the table's rows at rest: once, whatever number of features reads it."""
    lookups: float
    """Of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What a tower may hold, over the mean of all towers: 1 is an even share. None: no bound.

    `count` is of features, and a share of them is rounded up: 26 features on 4 towers are 7 at most."""

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
    """A partition judged: mean affinity of pairs inside towers and across, and what each tower holds."""

    within: float | None
    between: float | None
    count: tuple[int, ...]
    bytes: tuple[float, ...]
    lookups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TowerMap:
    """A partition, where features lie in the plane, and how it compares with striped and with random towers."""

    partition: Partition
    distance: Distance
    places: dict[str, tuple[float, float]]
    stress: float
    """Of the plane: what of the distances it does not show."""
    learned: Measures
    striped: Measures
    random: Measures
    silent: tuple[str, ...] = ()
    """Features that had no vector in any sample."""
    made: dict[str, int] = field(default_factory=dict)
    """From which step, and how many samples."""

    def to_json(self) -> str:
        """Also a `Partition`, for whoever reads no more."""
        return json.dumps(
            {
                **stamp("colonnade towers"),
                "towers": [list(tower) for tower in self.partition.towers],
                "distance": self.distance,
                "places": self.places,
                "stress": self.stress,
                "learned": asdict(self.learned),
                "striped": asdict(self.striped),
                "random": asdict(self.random),
                "silent": list(self.silent),
                "made": self.made,
            },
            indent=2,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> TowerMap:
        """Raises ConfigError."""
        partition = Partition.from_json(text)
        try:
            said = json.loads(text)
            if said["distance"] not in DISTANCES:
                raise ValueError(said["distance"])
            places = {str(name): _point(at) for name, at in said["places"].items()}
            if set(places) != set(partition.features):
                raise ValueError("places of other features")
            learned, striped, random = (
                _measures(said[name], partition) for name in ("learned", "striped", "random")
            )
            return cls(
                partition,
                said["distance"],
                places,
                _finite(said["stress"]),
                learned=learned,
                striped=striped,
                random=random,
                silent=tuple(map(str, said["silent"])),
                made={str(name): int(value) for name, value in said["made"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ConfigError(
                "got a map of towers that cannot be read, wanted one that `colonnade towers` wrote; write it again"
            ) from None


def tower_map(
    affinity: Floats,
    loads: Sequence[FeatureLoad],
    num_towers: int,
    *,
    distance: Distance = "coherent",
    capacity: Capacity = Capacity(),
    silent: Sequence[str] = (),
    made: Mapping[str, int] | None = None,
    seed: int = 0,
) -> TowerMap:
    """affinity: (F, F) in the order of `loads`. The same input gives the same towers, which come in the order of
    their first features. Raises ConfigError."""
    units = _units(loads)
    check(loads, num_towers)
    wanted = distances(affinity, distance)
    plane, stress = place(wanted)
    learned = clustered(plane, loads, num_towers, capacity=capacity, seed=seed)
    order = np.random.default_rng([seed, 1]).permutation(len(units))
    striped = np.empty(len(loads), dtype=np.int64)
    shuffled = striped.copy()
    for number, unit in enumerate(units):
        striped[unit] = number % num_towers
        shuffled[unit] = int(order[number]) % num_towers
    return TowerMap(
        partition_of(learned, loads, num_towers),
        distance,
        {
            load.name: (round(float(x), 6), round(float(y), 6))
            for load, (x, y) in zip(loads, plane, strict=True)
        },
        round(stress, 6),
        learned=judge(affinity, loads, learned, num_towers),
        striped=judge(affinity, loads, striped, num_towers),
        random=judge(affinity, loads, shuffled, num_towers),
        silent=tuple(silent),
        made=dict(made or {}),
    )


def check(loads: Sequence[FeatureLoad], num_towers: int) -> None:
    """Raises ConfigError where so many towers cannot each have a table."""
    tables = len({load.table for load in loads})
    if not 1 <= num_towers <= tables:
        raise ConfigError(
            f"got {num_towers} towers for {len(loads)} features of {tables} tables, wanted 1 .. {tables}: a table is "
            "looked up in one tower"
        )


def clustered(
    points: Floats,
    loads: Sequence[FeatureLoad],
    num_towers: int,
    *,
    capacity: Capacity = Capacity(),
    seed: int = 0,
) -> NDArray[np.int64]:
    """(F,): by feature its tower, numbered by their first features. Features of a table count as one thing.

    points: (F, 2). Raises ConfigError where no towers within the capacity are found.
    """
    units = _units(loads)
    weights = np.array(
        [
            [len(unit), loads[unit[0]].table_bytes, sum(loads[f].lookups for f in unit)]
            for unit in units
        ]
    )
    room = _room(weights, num_towers, capacity)
    best: tuple[float, NDArray[np.int64]] | None = None
    nearest: Floats | None = None
    for centres in _starts(points, units, num_towers, seed):
        label, cost = _kmeans(points, units, centres, weights, room)
        over = overflow(label, weights, room)
        if over.max() > 1 + 1e-6:
            if nearest is None or over.max() < nearest.max():
                nearest = over
        elif best is None or cost < best[0] - 1e-9 * (1 + cost):
            best = (cost, label)
    if best is None:
        assert nearest is not None
        raise ConfigError(_refusal(nearest, weights, loads, units, num_towers, capacity))
    found = np.empty(len(loads), dtype=np.int64)
    for unit, tower in zip(units, best[1], strict=True):
        found[unit] = tower
    _, first = np.unique(found, return_index=True)
    number = np.empty(num_towers, dtype=np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(num_towers)
    return number[found]


def partition_of(
    towers: Sequence[int] | NDArray[np.int64], loads: Sequence[FeatureLoad], num_towers: int
) -> Partition:
    return Partition(
        tuple(
            tuple(load.name for load, t in zip(loads, towers, strict=True) if t == tower)
            for tower in range(num_towers)
        )
    )


def judge(
    affinity: Floats,
    loads: Sequence[FeatureLoad],
    towers: Sequence[int] | NDArray[np.int64],
    num_towers: int,
) -> Measures:
    within, between = within_and_between(affinity, list(map(int, towers)))
    count, lookups, size = [0] * num_towers, [0.0] * num_towers, [0.0] * num_towers
    seen: set[str] = set()
    for load, tower in zip(loads, towers, strict=True):
        count[tower] += 1
        lookups[tower] += load.lookups
        size[tower] += 0 if load.table in seen else load.table_bytes
        seen.add(load.table)
    return Measures(
        None if math.isnan(within) else round(within, 6),
        None if math.isnan(between) else round(between, 6),
        tuple(count),
        tuple(size),
        tuple(lookups),
    )


def _units(loads: Sequence[FeatureLoad]) -> list[NDArray[np.int64]]:
    """By table, in the order of first features: the numbers of its features."""
    found: dict[str, list[int]] = {}
    for number, load in enumerate(loads):
        found.setdefault(load.table, []).append(number)
    return [np.array(unit) for unit in found.values()]


def _room(weights: Floats, num_towers: int, capacity: Capacity) -> Floats:
    """(3,): what a tower may hold; inf where nothing is said or nothing weighs."""
    found = np.full(len(MEASURES), np.inf)
    for m, name in enumerate(MEASURES):
        ratio, total = getattr(capacity, name), float(weights[:, m].sum())
        if ratio is not None and total > 0:
            found[m] = ratio * total / num_towers
            if name == "count":
                found[m] = math.ceil(found[m] - 1e-9)
    return found


def _starts(
    points: Floats, units: Sequence[NDArray[np.int64]], num_towers: int, seed: int
) -> list[Floats]:
    """Centres to begin with: tables far from each other, and tables drawn by the seed."""
    means = np.stack([points[unit].mean(0) for unit in units])
    chosen = [int(((means - means.mean(0)) ** 2).sum(1).argmax())]
    far = np.full(len(means), np.inf)
    while len(chosen) < num_towers:
        far = np.minimum(far, ((means - means[chosen[-1]]) ** 2).sum(1))
        far[chosen] = -1.0
        chosen.append(int(far.argmax()))
    generator = np.random.default_rng([seed, 0])
    drawn = [generator.choice(len(means), num_towers, replace=False) for _ in range(STARTS - 1)]
    return [means[chosen], *(means[each] for each in drawn)]


def _kmeans(
    points: Floats,
    units: Sequence[NDArray[np.int64]],
    centres: Floats,
    weights: Floats,
    room: Floats,
) -> tuple[NDArray[np.int64], float]:
    """By table its cluster, and the sum of squared distances of features to their clusters' centres."""
    label = np.full(len(units), -1, dtype=np.int64)
    size = weights[:, 0]
    sums = np.stack([points[unit].sum(0) for unit in units])
    squares = np.array([(points[unit] ** 2).sum() for unit in units])
    cost = math.inf
    for _ in range(ROUNDS):
        # Over the features of a table, |x - c|^2 adds up to this.
        costs = squares[:, None] - 2 * sums @ centres.T + size[:, None] * (centres**2).sum(1)
        moved = assign(costs, weights, room)
        value = float(costs[np.arange(len(units)), moved].sum())
        if (moved == label).all() or value >= cost - 1e-12:
            break
        label, cost = moved, value
        centres = np.stack(
            [sums[label == t].sum(0) / size[label == t].sum() for t in range(len(centres))]
        )
    return label, cost


def _refusal(
    over: Floats,
    weights: Floats,
    loads: Sequence[FeatureLoad],
    units: Sequence[NDArray[np.int64]],
    num_towers: int,
    capacity: Capacity,
) -> str:
    """What could not be met, and what could."""
    m = int(np.where(np.isfinite(over), over, 0).argmax())
    name, ratio = MEASURES[m], float(getattr(capacity, MEASURES[m]))
    mean = weights[:, m].sum() / num_towers
    largest = int(weights[:, m].argmax())
    would = over[m] * (math.ceil(ratio * mean - 1e-9) if name == "count" else ratio * mean) / mean
    would = math.ceil(would * 100 - 1e-6) / 100
    because = (
        f"table {loads[units[largest][0]].table!r} alone is {weights[largest, m] / mean:.3g} of a tower's even share"
        if weights[largest, m] > ratio * mean
        else f"the nearest that was found is {would:.3g}"
    )
    return (
        f"capacity by {name}: got {ratio:g} for {num_towers} towers, wanted what their tables can be dealt within; "
        f"{because}. Say {name}={would:g}, or have fewer towers"
    )


def _point(said: Sequence[float]) -> tuple[float, float]:
    x, y = map(_finite, said)
    return x, y


def _finite(said: float) -> float:
    value = float(said)
    if not math.isfinite(value):
        raise ValueError(said)
    return value


def _measures(said: Mapping, partition: Partition) -> Measures:
    within, between = (
        None if said[name] is None else _finite(said[name]) for name in ("within", "between")
    )
    loads = [tuple(map(_finite, said[name])) for name in MEASURES]
    if any(len(each) != len(partition.towers) for each in loads):
        raise ValueError("loads of other towers")
    return Measures(within, between, tuple(map(int, loads[0])), loads[1], loads[2])
