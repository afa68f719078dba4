"""Callbacks of a run: objects with methods that rank 0 calls while it trains. TensorBoard is written by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from colonnade.errors import CallbackError, ConfigError


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Event of a run. Its values are copies: whatever a callback does with them, training does not change."""

    step: int
    """Number of trained steps; of `on_checkpoint` the saved step."""
    epoch: int
    """Number of finished epochs."""
    metrics: dict[str, float]
    """Numbers by name; each method says which."""
    folder: Path | None
    """Run folder; None if the run has none."""


class Callback:
    """Base class of callbacks. Overwrite what you need; an object with any of these methods will do as well.

    Rank 0 alone calls callbacks, in their order, in the thread that trains. They do not change a run's bits: torch's
    random generators are put back after each call. What a method raises ends the run as CallbackError, on every rank,
    and the run resumes from its newest checkpoint. A callback must not call the model where there are several ranks,
    because the other ranks do not.
    """

    def on_start(self, event: RunEvent) -> None:
        """Begin at `event.step`: 0, or the step that the run resumes from."""

    def on_step(self, event: RunEvent) -> None:
        """Receive {"loss": mean over the step's batch}, after every step."""

    def on_log(self, event: RunEvent) -> None:
        """Receive the numbers that TensorBoard shows, as "train/loss": at most every 20 steps and half a second."""

    def on_evaluate(self, event: RunEvent) -> bool | None:
        """Receive the metrics of an evaluation, as "validation_auc". Return True to stop early, on all ranks."""

    def on_checkpoint(self, event: RunEvent) -> None:
        """Act on a checkpoint that is saved on all ranks, at the first step after that."""

    def on_end(self, event: RunEvent) -> None:
        """End, with the metrics of the result; with none where an error ends the run."""


METHODS = [name for name in vars(Callback) if name.startswith("on_")]


@dataclass(slots=True)
class Callbacks:
    """Callbacks that this rank calls."""

    callbacks: Sequence[object]
    folder: Path | None
    epoch: int = field(default=0, init=False)
    """Number of finished epochs, for the next events."""

    def call(self, method: str, step: int, metrics: Mapping[str, float]) -> bool:
        """Call a method of every callback that has it; return whether one returned True. Raises CallbackError."""
        is_any_true = False
        for callback in self.callbacks:
            function = getattr(callback, method, None)
            if function is None or getattr(function, "__func__", None) is vars(Callback)[method]:
                continue
            event = RunEvent(step, self.epoch, dict(metrics), self.folder)
            with name_user_code_in_errors(f"{type(callback).__name__}.{method}"):
                result = function(event)
            is_any_true |= isinstance(result, bool | np.bool_) and bool(result)
        return is_any_true


@contextmanager
def name_user_code_in_errors(name: str) -> Iterator[None]:
    """Convert exceptions to CallbackError with this name, and put torch's random generators back at the end."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    except Exception as error:
        raise CallbackError(
            f"{name}: got {type(error).__name__}: {error}, wanted no exception; correct it and start the run again, "
            "which goes on from its newest checkpoint"
        ) from error


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise ConfigError for a callback without any method of `Callback`, or with one that is never called."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: got {callbacks!r}, wanted a list of callbacks")
    for callback in callbacks:
        methods = [name for name in dir(callback) if name.startswith("on_")]
        unknown = [name for name in methods if name not in METHODS]
        if isinstance(callback, type) or unknown or not methods:
            raise ConfigError(
                f"callbacks: got {callback!r}{f' with {unknown[0]}' if unknown else ''}, wanted objects with any of "
                f"{', '.join(METHODS)}, as colonnade.Callback has them"
            )
