"""Probabilities of the edges of made-up graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.data.sets.power_law import EdgeDistribution


def neighbour_probabilities(law: EdgeDistribution, nodes: Tensor) -> Tensor:
    """Return the probability (B, N) float64 of each node to be the other end of an edge from `nodes` (B,).

    A ranking by these scores is the best possible one without knowledge of the edges.
    """
    community_share = torch.zeros(int(law.community.max()) + 1, dtype=torch.float64)
    community_share.index_add_(0, law.community, law.share)
    is_same = law.community[nodes][:, None] == law.community
    shares = community_share[law.community[nodes]][:, None]
    return law.share * (is_same * (1 - law.mixing) / shares + law.mixing)
