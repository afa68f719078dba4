"""A graph made to order: degrees by a power law, communities, and the best ranking of neighbours known by construction.

Legend: N nodes, n edges, B nodes asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.batch import Ids
from colonnade.data.contract import Column, Splits
from colonnade.data.counter import permutation, stream_key, words
from colonnade.data.sets.graph import FAN_OUTS, open_graph
from colonnade.data.sets.interactions import Interactions, bags_of
from colonnade.errors import ConfigError

STREAM = 30


PRESET = {
    "model": {"name": "graphsage", "dim": 32, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.1},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
}


@dataclass(frozen=True, slots=True, eq=False)
class EdgeLaw:
    """What edges are drawn by (Chung and Lu 2002, with communities): one end by its node's share; the other by its
    share, too, with chance `mixing` among all nodes, else among those of the first one's community."""

    share: Tensor  # (N,) float64, sums to 1
    community: Tensor  # (N,) int64
    mixing: float

    def scores(self, nodes_B: Tensor) -> Tensor:
        """(B,) -> (B, N) float64: how likely each node is the other end of an edge drawn from it. Ranking by it is the
        best that can be done by whoever does not know the edges."""
        inside = torch.zeros(int(self.community.max()) + 1, dtype=torch.float64)
        inside.index_add_(0, self.community, self.share)
        same = self.community[nodes_B][:, None] == self.community
        inside_B = inside[self.community[nodes_B]][:, None]
        return self.share * (same * (1 - self.mixing) / inside_B + self.mixing)

    def draw(self, count: int, key: int) -> tuple[Tensor, Tensor]:
        """Ends (count,) each: as drawn, so some edges are loops or there twice."""
        share, community = self.share.numpy(), self.community.numpy()
        order = np.argsort(community, kind="stable")  # a community's nodes side by side
        ends = np.concatenate([[0.0], np.cumsum(share[order])])
        first = np.searchsorted(community[order], np.arange(int(community.max()) + 2))

        def pick(begin: np.ndarray | float, end: np.ndarray | float, stream: int) -> np.ndarray:
            at = begin + (end - begin) * _uniform(stream_key(key, stream), count)
            return np.clip(np.searchsorted(ends, at, side="right") - 1, 0, len(share) - 1)

        one = pick(0.0, ends[-1], 0)
        mine = community[order][one]
        inside = pick(ends[first[mine]], ends[first[mine + 1]], 1)
        inside = np.clip(inside, first[mine], first[mine + 1] - 1)  # rounding of sums
        is_mixed = _uniform(stream_key(key, 3), count) < self.mixing
        other = np.where(is_mixed, pick(0.0, ends[-1], 2), inside)
        return torch.from_numpy(order[one]), torch.from_numpy(order[other])


def edge_law(
    nodes: int, *, exponent: float, communities: int, mixing: float, graph_seed: int
) -> EdgeLaw:
    """Shares that make degrees fall as degree^-`exponent`, dealt to nodes at random; so are communities."""
    rank = np.empty(nodes, dtype=np.int64)
    rank[permutation(nodes, stream_key(STREAM, graph_seed, 0))] = np.arange(nodes)
    share = torch.from_numpy((rank + 1.0) ** (-1 / (exponent - 1)))
    drawn = words(stream_key(STREAM, graph_seed, 1), 0, nodes) % np.uint64(communities)
    _, community = np.unique(drawn, return_inverse=True)
    return EdgeLaw(share / share.sum(), torch.from_numpy(community.astype(np.int64)), mixing)


def open_power_law(
    *,
    nodes: int = 10_000,
    degree: float = 20.0,
    exponent: float = 2.5,
    communities: int = 100,
    mixing: float = 0.1,
    graph_seed: int = 0,
    seed: int = 0,
    fan_outs: Sequence[int] = FAN_OUTS,
    max_pairs: int | None = None,
) -> Splits:
    """Which nodes is a node beside? A tenth of the edges tests, a twentieth validates.

    nodes        of the graph
    degree       edges that are drawn, times 2, for each node; loops and repetitions are left out
    exponent     of the degrees' power law, above 2
    communities  that nodes are dealt to
    mixing       chance that an edge's other end is any node, not one of the community
    graph_seed   names the graph and its split; `seed` orders what an epoch reads and draws
    fan_outs, max_pairs  as of `graph.open_graph`

    Raises ConfigError for numbers that make no graph.
    """
    wrong = {
        "nodes": (nodes, nodes >= 2, "2 or more"),
        "degree": (degree, degree > 0, "more than 0"),
        "exponent": (exponent, exponent > 2, "more than 2"),
        "communities": (communities, communities >= 1, "1 or more"),
        "mixing": (mixing, 0 <= mixing <= 1, "0 to 1"),
    }
    for name, (got, is_right, wanted) in wrong.items():
        if not is_right:
            raise ConfigError(
                f"power_law: got {name}={got}, wanted {wanted}; set data.options.{name}"
            )
    law = edge_law(
        nodes, exponent=exponent, communities=communities, mixing=mixing, graph_seed=graph_seed
    )
    ends = law.draw(int(nodes * degree / 2), stream_key(STREAM, graph_seed, 2))
    one, other = torch.minimum(*ends), torch.maximum(*ends)
    edges = torch.unique((one * nodes + other)[one != other])
    chance = _uniform(stream_key(STREAM, graph_seed, 3), len(edges))
    parts = [chance >= 0.15, (chance >= 0.1) & (chance < 0.15), chance < 0.1]
    train, validation, test = (_both_ways(edges[torch.from_numpy(part)], nodes) for part in parts)
    itself = Ids(torch.arange(nodes))
    columns = (Column("user", nodes), Column("item", nodes))
    of_nodes = ({"user": itself}, {"item": itself})
    found = Interactions(train, validation, test, *of_nodes, columns)
    return open_graph(found, first_item=0, seed=seed, fan_outs=fan_outs, max_pairs=max_pairs)


def _both_ways(edges_n: Tensor, nodes: int) -> Ids:
    """(nodes,) bags: all that are beside each."""
    one, other = edges_n // nodes, edges_n % nodes
    return bags_of(torch.cat([one, other]), torch.cat([other, one]), nodes)


def _uniform(key: int, count: int) -> np.ndarray:
    """(count,) float64 in [0, 1)."""
    return (words(key, 0, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
