"""A world of several ranks in one process: threads that hand each other tensors, for worlds too large to be started.

What a rank sends is counted as in a real one; groups, and who is in them, are the mesh's own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colonnade import Mesh, World
from colonnade.comm.mesh import ALL, THREADS, TRAINING, Scope

PATIENCE = 60.0
"""Seconds that a rank waits for another."""


class Office:
    """Mailbox of simulated ranks: each leaves messages that others collect."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[Any, ...], Tensor] = {}
        self.rounds: Counter[tuple[Any, ...]] = Counter()
        self.ready = threading.Condition()
        self.has_failed = False

    def swap(
        self, group: Any, rank: int, members: Sequence[int], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """parts: by member, for it. Returns them by member, from it."""
        with self.ready:
            now = self.rounds[group, rank]
            self.rounds[group, rank] += 1
            for member, part in zip(members, parts, strict=True):
                self.boxes[group, now, rank, member] = part.clone()
            self.ready.notify_all()
            wanted = [(group, now, member, rank) for member in members]
            came = self.ready.wait_for(
                lambda: self.has_failed or all(value in self.boxes for value in wanted), PATIENCE
            )
            assert came and not self.has_failed, f"rank {rank} waits for {group}"
            return [self.boxes.pop(value) for value in wanted]

    def close(self) -> None:
        with self.ready:
            self.has_failed = True
            self.ready.notify_all()


class Done:
    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Simulated(Mesh):
    office: Office = field(default_factory=Office)

    def all_to_all(
        self,
        channel,
        send,
        send_rows,
        receive_rows,
        *,
        scope=ALL,
        wait=True,
        traffic_tag=None,
        into=None,
    ):
        members = scope.members(self.rank, self.num_ranks)
        if 1 < len(members) < self.num_ranks:
            assert self.group(THREADS[channel], scope) == scope, (
                f"{channel}: a group that nobody opened"
            )
        width = send.element_size() * (send[0].numel() if send.dim() > 1 and len(send) else 1)
        for peer, rows in zip(members, send_rows, strict=True):
            self._count_traffic(traffic_tag or channel, peer, width * rows)
        group = channel, scope, members[0]
        blocks = self.office.swap(group, self.rank, members, send.split(list(send_rows)))
        assert [len(block) for block in blocks] == list(receive_rows)
        received = torch.cat(blocks)
        if into is not None:
            received = into.copy_(received)
        return received, None if wait else Done()

    def all_gather(self, channel, values):
        members = range(self.num_ranks)
        return self.office.swap((channel, members[0]), self.rank, members, [values] * len(members))

    def all_reduce(self, channel, values, *, traffic_tag=None):
        return values.copy_(torch.stack(self.all_gather(channel, values)).sum(0))


def run_simulated(world: World, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(mesh, *arguments)` on every rank; what each returned, in rank order."""
    office, results, errors = Office(), [None] * world.num_ranks, []
    sizes = [size for size in range(1, world.num_ranks + 1) if world.num_ranks % size == 0]
    groups: dict[tuple[str, Scope], Any] = {
        (thread, scope): scope
        for thread in ("lookahead", TRAINING)
        for size in sizes
        for scope in (Scope(size), Scope(size, is_across=True))
    }

    def run(rank: int) -> None:
        try:
            results[rank] = function(
                Simulated(world, rank, dict(groups), office=office), *arguments
            )
        except BaseException as error:
            errors.append(error)
            office.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
