"""What admission and eviction remember, as part of commits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.store.policies import RowRetention
from colonnade.train.states import load_state
from colonnade.train.stores import shardings_of

if TYPE_CHECKING:
    from colonnade.embedding import EmbeddingCollection


def retentions(collection: EmbeddingCollection) -> dict[str, RowRetention]:
    """By table."""
    return {
        collection.slices.laid[t].table.origin[0]: policy
        for t, policy in collection.policies.items()
        if isinstance(policy, RowRetention)
    }


def restore_retentions(
    collection: EmbeddingCollection, place: Path, header: Mapping[str, Any]
) -> None:
    """From the files of the ranks that had the rows then; where they were dealt to as many, one of them is enough."""
    remembered = retentions(collection)
    if not remembered:
        return
    mesh, then = collection.mesh, shardings_of(header)
    wanted: dict[str, list[int | None]] = {}  # by table: whose memory, by place then
    for t, (table, planned) in enumerate(
        zip(collection.tables, collection.plan.tables, strict=True)
    ):
        before, now = then[t], planned.sharding
        ranks = list(before.holders)
        if before.is_replicated and mesh.rank in before.ranks:
            ranks = [mesh.rank]
        mine = now.shard_of(mesh.rank).place
        same = before.num_owners == now.num_owners
        wanted[table.name] = [r if not same or p == mine else None for p, r in enumerate(ranks)]
    read = {rank for name in remembered for rank in wanted[name] if rank is not None}
    states = {rank: load_state(place / f"retention-{rank}", header["run"]) for rank in sorted(read)}
    for name, policy in remembered.items():
        policy.restore([{} if rank is None else states[rank][name] for rank in wanted[name]])
