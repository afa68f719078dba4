"""Synthetic graph with power-law degrees and communities, for which the best ranking of neighbours is known.

Legend: N nodes, n edges, B requested nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.data.contract import Splits
from colonnade.data.counter import random_permutation, random_words, stream_key
from colonnade.data.graph import FAN_OUTS, open_edge_parts
from colonnade.errors import ConfigError

STREAM_KEY = 30


PRESET = {
    "model": {"name": "graphsage", "dim": 32, "temperature": 0.1},
    "embedding": {"optimizer": "adam", "lr": 0.005, "init_scale": 0.1},
    "dense": {"lr": 2e-3},
    "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
}


@dataclass(frozen=True, slots=True, eq=False)
class EdgeDistribution:
    """Distribution of edges (Chung and Lu 2002, with communities).

    Both ends are drawn in proportion to the nodes' shares: the first among all nodes, the second among all nodes with
    probability `mixing`, else among the nodes of the first one's community.
    """

    share: Tensor  # (N,) float64, sums to 1
    community: Tensor  # (N,) int64
    mixing: float

    def draw_edges(self, num_edges: int, random_key: int) -> tuple[Tensor, Tensor]:
        """Draw the two ends (count,) of edges. Some edges are loops or repeated."""
        share = self.share.numpy()
        community = self.community.numpy()
        order = np.argsort(community, kind="stable")  # nodes grouped by community
        ends = np.concatenate([[0.0], np.cumsum(share[order])])
        first = np.searchsorted(community[order], np.arange(int(community.max()) + 2))

        def draw_nodes(
            begin: np.ndarray | float, end: np.ndarray | float, stream: int
        ) -> np.ndarray:
            x = begin + (end - begin) * _draw_uniform(stream_key(random_key, stream), num_edges)
            return np.clip(np.searchsorted(ends, x, side="right") - 1, 0, len(share) - 1)

        one = draw_nodes(0.0, ends[-1], 0)
        group = community[order][one]
        inside = draw_nodes(ends[first[group]], ends[first[group + 1]], 1)
        inside = np.clip(inside, first[group], first[group + 1] - 1)  # rounding of sums
        is_mixed = _draw_uniform(stream_key(random_key, 3), num_edges) < self.mixing
        other = np.where(is_mixed, draw_nodes(0.0, ends[-1], 2), inside)
        return torch.from_numpy(order[one]), torch.from_numpy(order[other])


def build_edge_distribution(
    nodes: int, *, exponent: float, communities: int, mixing: float, graph_seed: int
) -> EdgeDistribution:
    """Assign nodes random communities and shares such that degrees follow the power law degree^-`exponent`."""
    rank = np.empty(nodes, dtype=np.int64)
    rank[random_permutation(nodes, stream_key(STREAM_KEY, graph_seed, 0))] = np.arange(nodes)
    share = torch.from_numpy((rank + 1.0) ** (-1 / (exponent - 1)))
    drawn = random_words(stream_key(STREAM_KEY, graph_seed, 1), 0, nodes) % np.uint64(communities)
    _, community = np.unique(drawn, return_inverse=True)
    return EdgeDistribution(
        share / share.sum(), torch.from_numpy(community.astype(np.int64)), mixing
    )


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
    """Open a synthetic graph; the task is to predict a node's neighbours. A tenth of the edges tests, 5 % validate.

    nodes        number of nodes
    degree       mean degree before loops and repeated edges are dropped
    exponent     exponent of the power law of degrees, above 2
    communities  number of communities
    mixing       probability that an edge's other end is any node, not one of the community
    graph_seed   determines the graph and its split; `seed` the order and the draws of an epoch
    fan_outs, max_pairs  as in `graph.open_graph`

    Raises ConfigError for invalid numbers.
    """
    checks = {
        "nodes": (nodes, nodes >= 2, "2 or more"),
        "degree": (degree, degree > 0, "more than 0"),
        "exponent": (exponent, exponent > 2, "more than 2"),
        "communities": (communities, communities >= 1, "1 or more"),
        "mixing": (mixing, 0 <= mixing <= 1, "0 to 1"),
    }
    for name, (got, is_valid, wanted) in checks.items():
        if not is_valid:
            raise ConfigError(
                f"power_law: got {name}={got}, wanted {wanted}; set data.options.{name}"
            )
    distribution = build_edge_distribution(
        nodes, exponent=exponent, communities=communities, mixing=mixing, graph_seed=graph_seed
    )
    ends = distribution.draw_edges(int(nodes * degree / 2), stream_key(STREAM_KEY, graph_seed, 2))
    one = torch.minimum(*ends)
    other = torch.maximum(*ends)
    edges = torch.unique((one * nodes + other)[one != other])
    u = _draw_uniform(stream_key(STREAM_KEY, graph_seed, 3), len(edges))
    masks = [u >= 0.15, (u >= 0.1) & (u < 0.15), u < 0.1]
    pairs = torch.stack([edges // nodes, edges % nodes], 1)
    return open_edge_parts(
        [pairs[torch.from_numpy(mask)] for mask in masks],
        nodes,
        seed=seed,
        fan_outs=fan_outs,
        max_pairs=max_pairs,
    )


def _draw_uniform(key: int, count: int) -> np.ndarray:
    """Draw numbers (count,) float64 in [0, 1)."""
    return (random_words(key, 0, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
