"""Traffic counters of a rank (bytes and messages by channel and link) and timers of waits for other ranks.

`Mesh` counts traffic when it calls torch.distributed: each byte once, on the rank that sends it. All-to-alls go
directly to their receivers. Sums, gathers and broadcasts are counted along gloo's rings and trees, including bytes that
a rank only forwards. Protocol overhead of sockets is not counted.
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
"""Links: to a rank of the same host, and to a rank of another host."""

SEGMENT_BYTES = 1 << 20
"""Largest segment that gloo sums at once."""


def link_between(world: World, rank: int, peer: int) -> Link:
    """Return the link between two ranks."""
    return "local" if world.host(rank) == world.host(peer) else "remote"


@dataclass(slots=True)
class Traffic:
    """Payload that this rank sent to other ranks, by (channel, link). Messages to itself are not counted."""

    sent_bytes: Counter[tuple[str, Link]] = field(default_factory=Counter)
    messages: Counter[tuple[str, Link]] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Lock of the counts, because two threads may send rows on one channel."""

    def count_sent_bytes(
        self,
        channel: str,
        links_by_member: Sequence[Link | None],
        bytes_by_member: Sequence[int],
        messages_per_link: int = 1,
    ) -> None:
        """Count the bytes sent over each link, as `messages_per_link` messages per link. Ignores sends of 0 bytes, and
        sends to itself (link None)."""
        with self._counting:
            for link, count in zip(links_by_member, bytes_by_member, strict=True):
                if count and link is not None:
                    self.sent_bytes[channel, link] += count
                    self.messages[channel, link] += messages_per_link

    def bytes_of(self, channel: str) -> int:
        """Return the bytes sent on a channel over all links."""
        return sum(self.sent_bytes[channel, link] for link in LINKS)

    def to_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return a copy of the counts: {"bytes" or "messages": {channel: {link: count}}}."""
        return {
            "bytes": _group_by_channel(self.sent_bytes),
            "messages": _group_by_channel(self.messages),
        }


def _group_by_channel(counts: Counter[tuple[str, Link]]) -> dict[str, dict[str, int]]:
    by_channel: dict[str, dict[str, int]] = defaultdict(dict)
    # The copy is atomic: another thread may be counting.
    for (channel, link), count in dict(counts).items():
        by_channel[channel][link] = count
    return dict(by_channel)


@lru_cache(maxsize=1024)
def count_ring_sum_traffic(
    buffer_bytes: int, itemsize: int, member_index: int, num_members: int
) -> tuple[int, int]:
    """Count the (bytes, messages) that one member of gloo's ring all-reduce sends to the previous member.

    buffer_bytes: size of the buffer to sum. member_index, num_members: the member's position in the ring, and the
    ring's size. Gloo passes one chunk per member round the ring twice, to sum it and to broadcast it, in two segments
    or more. The last chunks may be short or empty.
    """
    chunk = 2 * itemsize * -(-buffer_bytes // (2 * num_members * itemsize))
    own_chunk, next_chunk = (
        min(max(buffer_bytes - k * chunk, 0), chunk)
        for k in (member_index, (member_index + 1) % num_members)
    )
    segments = max(2, -(-chunk // SEGMENT_BYTES))
    # A member does not forward its own chunk in the sum, or the next member's chunk in the broadcast.
    return 2 * buffer_bytes - own_chunk - next_chunk, 2 * (num_members - 1) * segments


def find_broadcast_children(member_index: int, num_members: int) -> Sequence[int]:
    """Find the members to which one member forwards a broadcast of member 0, in gloo's binomial tree."""
    children = []
    step = 1
    while step < num_members:
        # A member receives along the highest bit of its position, and forwards along all higher bits.
        if member_index < step and member_index + step < num_members:
            children.append(member_index + step)
        step *= 2
    return children


class _ThreadWaits(threading.local):
    """Wait timer of one thread: nesting depth, start, and seconds by channel."""

    def __init__(self) -> None:
        self.depth = 0
        self.since = 0.0
        self.seconds: dict[str, float] = defaultdict(float)


_thread_waits = _ThreadWaits()


def begin_waiting() -> None:
    """Begin a wait of this thread; a nested wait counts as part of the outer one."""
    if not _thread_waits.depth:
        _thread_waits.since = time.perf_counter()
    _thread_waits.depth += 1


def end_waiting(channel: str) -> None:
    """End the innermost wait of this thread; count an outermost wait under `channel`."""
    _thread_waits.depth -= 1
    if not _thread_waits.depth:
        _thread_waits.seconds[channel] += time.perf_counter() - _thread_waits.since


@contextmanager
def count_waiting_time(channel: str) -> Iterator[None]:
    """Count the time inside this context as waiting time of this thread."""
    begin_waiting()
    try:
        yield
    finally:
        end_waiting(channel)


def waiting_seconds() -> Mapping[str, float]:
    """Return this thread's seconds of waiting by channel; the mapping continues to be updated."""
    return _thread_waits.seconds
