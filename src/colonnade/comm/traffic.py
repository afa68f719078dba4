"""Traffic of a rank, bytes and messages by channel and link, and the time that its threads wait for other ranks.

Traffic is counted where `Mesh` calls torch.distributed, each byte once, on the rank that sends it. All-to-alls go
directly to their receivers. Sums, gathers and broadcasts are counted along gloo's rings and trees, so bytes that a rank
only forwards are counted, too. Protocol overhead of sockets is not counted.
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
"""Links to ranks of the same host, and of another."""

SEGMENT_BYTES = 1 << 20
"""Largest segment that gloo sums at once."""


def link(world: World, rank: int, peer: int) -> Link:
    return "local" if world.host(rank) == world.host(peer) else "remote"


@dataclass(slots=True)
class Traffic:
    """Payload this rank sent to other ranks, by (channel, link). Messages to itself are not counted."""

    sent_bytes: Counter[tuple[str, Link]] = field(default_factory=Counter)
    messages: Counter[tuple[str, Link]] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Lock of the counts, because two threads send rows of one channel."""

    def count(
        self,
        channel: str,
        links: Sequence[Link | None],
        num_bytes: Sequence[int],
        messages: int = 1,
    ) -> None:
        """Count bytes that this rank sends over links, `messages` for each. Sends of 0 bytes, or to itself (link None),
        are not counted."""
        with self._counting:
            for link, count in zip(links, num_bytes, strict=True):
                if count and link is not None:
                    self.sent_bytes[channel, link] += count
                    self.messages[channel, link] += messages

    def bytes_of(self, channel: str) -> int:
        return sum(self.sent_bytes[channel, link] for link in LINKS)

    def plain(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts as a new dict {"bytes" or "messages": {channel: {link: number}}}."""
        return {"bytes": _nested(self.sent_bytes), "messages": _nested(self.messages)}


def _nested(counts: Counter[tuple[str, Link]]) -> dict[str, dict[str, int]]:
    by_purpose: dict[str, dict[str, int]] = defaultdict(dict)
    # At once: another thread may be counting.
    for (channel, link), number in dict(counts).items():
        by_purpose[channel][link] = number
    return dict(by_purpose)


@lru_cache(maxsize=1024)
def ring_sum(num_bytes: int, itemsize: int, place: int, size: int) -> tuple[int, int]:
    """Return (bytes, messages) that the member at `place` of `size` sends to the one before it, to sum `num_bytes`.

    In gloo's ring a chunk for each member is passed round once to be summed and once to be broadcast, in two segments
    or more. The last chunks may be short or empty.
    """
    chunk = 2 * itemsize * -(-num_bytes // (2 * size * itemsize))
    own, after = (min(max(num_bytes - k * chunk, 0), chunk) for k in (place, (place + 1) % size))
    segments = max(2, -(-chunk // SEGMENT_BYTES))
    # In the sum a member never forwards its own chunk; in the broadcast, not the one that the ring ends with.
    return 2 * num_bytes - own - after, 2 * (size - 1) * segments


def tree_children(place: int, size: int) -> Sequence[int]:
    """Return the members that the one at `place` forwards a broadcast of member 0 to, in gloo's binomial tree."""
    children, step = [], 1
    while step < size:
        # A member receives over the highest bit of its place, and forwards over all higher ones.
        if place < step and place + step < size:
            children.append(place + step)
        step *= 2
    return children


class _OfThread(threading.local):
    """Waits of one thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.since = 0.0
        self.seconds: dict[str, float] = defaultdict(float)


_of_thread = _OfThread()


def begin_waiting() -> None:
    """Begin a wait of this thread; one inside another is part of it."""
    if not _of_thread.depth:
        _of_thread.since = time.perf_counter()
    _of_thread.depth += 1


def end_waiting(channel: str) -> None:
    """End the wait that began last."""
    _of_thread.depth -= 1
    if not _of_thread.depth:
        _of_thread.seconds[channel] += time.perf_counter() - _of_thread.since


@contextmanager
def waiting(channel: str) -> Iterator[None]:
    """Count the time inside this context as a wait of this thread."""
    begin_waiting()
    try:
        yield
    finally:
        end_waiting(channel)


def waited() -> Mapping[str, float]:
    """Return this thread's seconds of waiting by channel, a mapping that continues to count."""
    return _of_thread.seconds
