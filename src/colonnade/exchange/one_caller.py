"""Calls of a collection from several threads at once, which would mix their batches up: refused, not queued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from colonnade.batch import Batch
from colonnade.errors import ConfigError, DataError

T = TypeVar("T")


class OneCaller:
    """Lock that is only tried: whoever comes while another thread is inside gets an error, and nothing waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                f"got a call from thread {threading.current_thread().name} while another thread uses this collection, "
                "wanted one at a time. Call the model and step its optimizer from one thread, or hold a lock of your "
                "own; this call changed nothing"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OneCaller], tuple[()]]:
        return OneCaller, ()  # a copy has a lock of its own


def caller_of(collection: Any) -> OneCaller:
    """Return the lock of a collection, made at its first use."""
    caller: OneCaller = collection.__dict__.setdefault("_caller", OneCaller())
    return caller


def one_at_a_time(forward: Callable[[Any, Batch], T]) -> Callable[[Any, Batch], T]:
    """Wrap a collection's `forward`: check that it gets a batch, and that no other thread is inside."""

    @wraps(forward)
    def checked(collection: Any, batch: Batch) -> T:
        if not isinstance(batch, Batch):
            raise DataError(
                f"model(batch): got a {type(batch).__name__}, wanted a colonnade.Batch: "
                "Batch(size, dense, {feature: Ids(values)})"
            )
        if collection._served is not None:  # rows that nobody changes: any number of threads
            return forward(collection, batch)
        with caller_of(collection):
            return forward(collection, batch)

    return checked
