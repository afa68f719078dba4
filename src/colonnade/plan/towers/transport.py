"""Each thing to one place, as cheaply as the places' room allows: the step of k-means whose clusters are bounded.

Bradley, Bennett and Demiriz 2000. Where all things weigh the same it is a flow of least cost, and solved as one; else
it is packing, which has no quick exact way, and is searched by moves and swaps. Pure functions of numbers, no chance.
Legend: U things, T places, M measures (what a thing weighs).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
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
