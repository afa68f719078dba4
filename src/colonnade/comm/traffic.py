"""Traffic of a rank, bytes and messages by purpose and link, and the time that its threads wait for other ranks.

Counted where calls leave for torch.distributed (`Mesh`), each byte once, on the rank that it leaves. All-to-alls go
straight to their receivers. Sums, gathers and broadcasts are counted along the rings and the tree by which gloo
moves them, so bytes that a rank only passes on count as its own, too. Protocol overhead of sockets is left out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from colonnade.topology.world import World

Link = Literal["local", "remote"]
LINKS: tuple[Link, ...] = ("local", "remote")
"""To a rank of the same host, and of another."""

SEGMENT_BYTES = 1 << 20
"""What gloo sums at once, at most."""


def link(world: World, rank: int, peer: int) -> Link:
    return "local" if world.host(rank) == world.host(peer) else "remote"


@dataclass(slots=True)
class Traffic:
    """Payload this rank sent to other ranks, by (purpose, link). What stays on the rank does not count."""

    sent_bytes: Counter[tuple[str, Link]] = field(default_factory=Counter)
    messages: Counter[tuple[str, Link]] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Rows of one purpose leave on two threads."""

    def count(
        self, purpose: str, world: World, rank: int, peer: int, num_bytes: int, messages: int = 1
    ) -> None:
        """`rank`, which is this one, sends `num_bytes` to `peer`. Nothing is counted of 0 bytes or to itself."""
        if not num_bytes or peer == rank:
            return
        key = (purpose, link(world, rank, peer))
        with self._counting:
            self.sent_bytes[key] += num_bytes
            self.messages[key] += messages

    def bytes_of(self, purpose: str) -> int:
        return sum(self.sent_bytes[purpose, each] for each in LINKS)

    def plain(self) -> dict[str, dict[str, dict[str, int]]]:
        """{"bytes" or "messages": {purpose: {link: number}}}, a copy."""
        return {"bytes": _nested(self.sent_bytes), "messages": _nested(self.messages)}


def _nested(counts: Counter[tuple[str, Link]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    # At once: another thread may be counting.
    for (purpose, each), number in dict(counts).items():
        found[purpose][each] = number
    return dict(found)


@lru_cache(maxsize=1024)
def ring_sum(num_bytes: int, itemsize: int, place: int, size: int) -> tuple[int, int]:
    """(bytes, messages) that the member at `place` of `size` sends to the one before it, to sum `num_bytes` over all.

    gloo's ring: a chunk for each member goes round once to be summed and once to be spread, in two segments or more.
    The last chunks may be short or empty.
    """
    chunk = 2 * itemsize * -(-num_bytes // (2 * size * itemsize))
    own, after = (min(max(num_bytes - k * chunk, 0), chunk) for k in (place, (place + 1) % size))
    segments = max(2, -(-chunk // SEGMENT_BYTES))
    # Summing, a member never sends its own chunk on; spreading, not the one that the ring ends with.
    return 2 * num_bytes - own - after, 2 * (size - 1) * segments


def tree_children(place: int, size: int) -> Sequence[int]:
    """Members that the one at `place` sends a broadcast of member 0 on to: gloo's binomial tree."""
    found, step = [], 1
    while step < size:
        # The highest bit of `place` is how it came there; it sends on across all higher ones.
        if place < step and place + step < size:
            found.append(place + step)
        step *= 2
    return found


_of_thread = threading.local()


@contextmanager
def waiting(purpose: str) -> Iterator[None]:
    """What runs inside is a wait of this thread's; one inside another is part of it."""
    if getattr(_of_thread, "is_waiting", False):
        yield
        return
    start, _of_thread.is_waiting = time.perf_counter(), True
    try:
        yield
    finally:
        _of_thread.is_waiting = False
        _seconds()[purpose] += time.perf_counter() - start


def waited() -> Mapping[str, float]:
    """Seconds by purpose since this thread began; it goes on counting."""
    return _seconds()


def _seconds() -> dict[str, float]:
    if not hasattr(_of_thread, "seconds"):
        _of_thread.seconds = defaultdict(float)
    return _of_thread.seconds
