"""Ctrl-C and SIGTERM while a run trains: save a checkpoint and stop. The same call resumes from it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.train.trainer import Trainer

REPEAT_SECONDS = 2.0  # a terminal and torchrun may both deliver the same Ctrl-C


@contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """Make the first signal stop training on all ranks after a checkpoint, and a later one interrupt at once.

    Does nothing in threads other than the main one, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_signal_at = 0.0

    def request_stop(number: int, frame: object) -> None:
        nonlocal first_signal_at
        now = time.monotonic()
        if first_signal_at and now - first_signal_at > REPEAT_SECONDS:
            raise KeyboardInterrupt
        first_signal_at = first_signal_at or now
        trainer.stop_requested = True

    with handle_stop_signals(request_stop):
        yield


@contextmanager
def handle_stop_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by `handler` inside the block."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
