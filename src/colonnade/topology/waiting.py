"""Time that a thread spends waiting for other ranks, by purpose: communication that nothing hides."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
