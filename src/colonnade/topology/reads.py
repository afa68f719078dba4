"""Reads for evaluation where some ranks are servers: each is announced, for servers do not know how many will come."""

from __future__ import annotations

import torch

from colonnade.topology.mesh import Mesh


def announced(mesh: Mesh, mine: bool) -> bool:
    """Collective where there are servers, on the purpose "evaluate": whether the trainers read once more, or (all of
    them `mine` False) have read all. A server, which only listens, says False."""
    if not mesh.world.has_servers:
        return mine
    return bool(mesh.all_reduce("evaluate", torch.tensor(float(mine))))
