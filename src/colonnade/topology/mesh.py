"""The running world: this process's rank and its process groups, one per purpose.

A gloo or NCCL group must see the same calls in the same order on every rank, so each purpose that
may run at its own pace has a group of its own: ids of later batches (`route`) travel while rows
(`fetch`), gradients (`push`) and dense gradients (`dense`) of earlier ones do.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import PeerLost
from colonnade.topology.world import World

PURPOSES = ("route", "fetch", "push", "dense", "evaluate", "control")


@dataclass(frozen=True, slots=True)
class Mesh:
    """`groups` is empty in a world of one rank; every collective is then the identity."""

    world: World = field(default_factory=World)
    rank: int = 0
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    def all_to_all(
        self,
        purpose: str,
        send: Tensor,  # (sum of send_rows, ...): block r goes to rank r
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        *,
        wait: bool = True,
    ) -> tuple[Tensor, dist.Work | None]:
        """Collective. Returns (received, work); with `wait=False` both buffers belong to the work until it is done."""
        if self.num_ranks == 1:
            return send, None
        received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        work = self._guarded(
            purpose,
            lambda group: dist.all_to_all_single(
                received, send, list(receive_rows), list(send_rows), group=group, async_op=not wait
            ),
        )
        return received, work

    def all_reduce(self, purpose: str, values: Tensor) -> Tensor:
        """Collective, in place: the sum over ranks, the same bits on every rank."""
        if self.num_ranks > 1:
            self._guarded(purpose, lambda group: dist.all_reduce(values, group=group))
        return values

    def all_gather(self, purpose: str, values: Tensor) -> list[Tensor]:
        """Collective: every rank's tensor, in rank order; shapes must agree."""
        if self.num_ranks == 1:
            return [values]
        out = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self._guarded(purpose, lambda group: dist.all_gather(out, values, group=group))
        return out

    def all_gather_bytes(self, purpose: str, data: bytes) -> list[bytes]:
        """Collective: every rank's byte string, in rank order; lengths may differ."""
        if self.num_ranks == 1:
            return [data]
        sizes = [int(n) for n in self.all_gather(purpose, torch.tensor(len(data)))]
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [
            bytes(block[:size].numpy())
            for block, size in zip(self.all_gather(purpose, padded), sizes, strict=True)
        ]

    def broadcast(self, purpose: str, values: Tensor) -> Tensor:
        """Collective, in place: rank 0's tensor."""
        if self.num_ranks > 1:
            self._guarded(purpose, lambda group: dist.broadcast(values, 0, group=group))
        return values

    def barrier(self) -> None:
        self.all_gather("control", torch.zeros(1))

    def _guarded(self, purpose, call):
        try:
            return call(self.groups[purpose])
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.rank} of {self.num_ranks} lost a peer during {purpose!r}; that rank's own words "
                f"say why. The run goes on from its newest commit. ({str(error).splitlines()[0]})"
            ) from error


def open_mesh(
    *, timeout: timedelta = timedelta(minutes=5), ranks_per_host: int | None = None
) -> Mesh:
    """Join the world torchrun describes in the environment; without torchrun, a world of one rank.

    Collective: every rank calls it once, first.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        return Mesh()
    local = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)
        atexit.register(_leave)  # gloo's threads abort a process that ends without it
    groups = {purpose: dist.new_group(timeout=timeout) for purpose in PURPOSES}
    world = World(num_hosts=num_ranks // local, ranks_per_host=local)
    return Mesh(world, dist.get_rank(), groups)


def close_mesh(mesh: Mesh) -> None:
    """Collective: leave the world."""
    if mesh.num_ranks > 1:
        _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
