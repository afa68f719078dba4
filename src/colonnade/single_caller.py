"""Calls of a collection: by one thread at a time, never compiled."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from colonnade.batch import Batch
from colonnade.errors import ConfigError, DataError

F = TypeVar("F", bound=Callable[..., Any])


def run_eagerly(method: F) -> F:
    """Make a compiled model call this method outside its graphs: one clean break before it, one after.

    `torch.compiler.disable`, but the compiler, which takes longer to import than torch, is imported by programs that
    use it alone.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # Read by the compiler, which then breaks its graph here and does not look inside.
    marks: Any = run
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "rows are looked up outside of compiled graphs"
    result: Any = run
    return result


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
        with collection.caller:
            return forward(collection, batch)

    return checked
