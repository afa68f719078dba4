"""Loss scale: factor of losses before backward, so that small gradients do not vanish in 16 bits.

It changes by the rule of torch.amp.GradScaler. Every rank has the same value, since all see the same steps, and a
checkpoint saves it. Gradients are divided by it before they are clipped or applied. So a power of two changes no bit of
a run in which nothing overflows or vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
# steps
GROWTH_FACTOR = 2.0
GROWTH_INTERVAL = 2000
BACKOFF_FACTOR = 0.5
MIN_SCALE = 1.0
"""Smallest scale: at 1, a gradient that is not finite is not caused by the scale."""


@dataclass(slots=True)
class LossScale:
    """Current loss scale, and the number of good steps since it changed."""

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0
    """Number of applied steps since the last change."""

    def record_good_step(self) -> None:
        """Record an applied step; grow the scale after GROWN_AFTER of them in a row."""
        if not self.is_dynamic:
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value = self.value * GROWTH_FACTOR
            self.good_steps = 0

    def lower(self) -> bool:
        """Lower the scale, because a finite loss gave gradients that are not finite. Returns False if it cannot."""
        if not self.is_dynamic or self.value <= MIN_SCALE:
            return False
        self.value = self.value * BACKOFF_FACTOR
        self.good_steps = 0
        return True

    def state(self) -> tuple[float, int] | None:
        """Return the state for a checkpoint; None if the scale is constant."""
        return (self.value, self.good_steps) if self.is_dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Restore the state of a checkpoint; None, of a run with a constant scale, changes nothing."""
        if self.is_dynamic and state is not None:
            self.value, self.good_steps = state


def build_loss_scale(setting: float | str | None) -> LossScale:
    """Build the loss scale that the setting `train.loss_scale` asks for."""
    if setting == "dynamic":
        return LossScale(INITIAL_SCALE, is_dynamic=True)
    return LossScale(1.0 if setting is None else float(setting))
