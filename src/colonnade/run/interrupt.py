"""Ctrl-C and SIGTERM while a run trains: it checkpoints and ends, and the same call goes on from there."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colonnade.train.trainer import Trainer

REPEAT_SECONDS = 2.0  # a terminal and torchrun may both deliver the same Ctrl-C


@contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """The first signal asks all ranks to checkpoint and end; a later one is obeyed at once. In other threads than the
    main
    one, which alone hears signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at = 0.0

    def ask(number: int, frame: object) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at and now - asked_at > REPEAT_SECONDS:
            raise KeyboardInterrupt
        asked_at = asked_at or now
        trainer.stop_requested = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
