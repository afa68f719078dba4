"""What losses are multiplied by before backward, so that small gradients do not vanish in 16 bits, and how it changes.

The rule is that of torch.amp.GradScaler. Every rank has the same number, since all hear of the same steps; a
checkpoint has
it, and it is divided out before gradients are clipped or applied. So a power of two changes no bit of a run in which
nothing overflows or vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**16
GROWTH, GROWN_AFTER = 2.0, 2000  # steps
BACKOFF = 0.5
LEAST = 1.0
"""From here on down a gradient that is not finite is so by itself."""


@dataclass(slots=True)
class LossScale:
    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0
    """Applied since it changed."""

    def applied(self) -> None:
        """A step was."""
        if not self.is_dynamic:
            return
        self.good_steps += 1
        if self.good_steps == GROWN_AFTER:
            self.value, self.good_steps = self.value * GROWTH, 0

    def fall(self) -> bool:
        """Gradients were not finite, of a loss that was. Whether a lower scale may mend that."""
        if not self.is_dynamic or self.value <= LEAST:
            return False
        self.value, self.good_steps = self.value * BACKOFF, 0
        return True

    def state(self) -> tuple[float, int] | None:
        """None where it does not change."""
        return (self.value, self.good_steps) if self.is_dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Of a run that may have had none: then it begins."""
        if self.is_dynamic and state is not None:
            self.value, self.good_steps = state


def loss_scale(said: float | str | None) -> LossScale:
    """As `train.loss_scale` says."""
    if said == "dynamic":
        return LossScale(FIRST, is_dynamic=True)
    return LossScale(1.0 if said is None else float(said))
