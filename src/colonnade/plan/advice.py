"""Advice on ranks, servers and batches: the configuration lemmas of Zou et al. (2017), as pure functions of numbers.

The seconds of a step come from the planner, for each number of ranks. The lemma of ranks explains them and does not
predict them, because what ranks wait for depends on their number.

Legend: N ranks; R overhead: the part of a step that ranks do not divide, over the part that they divide; B samples of
a step over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colonnade.topology.world import World

MIN_GAIN = 0.05
"""Predicted part of the time that a change must save to be advised: predictions are not better than that."""
MIN_NOISE_STEPS = 100
"""Number of steps whose gradients are averaged for a noise scale; of fewer it is mostly chance."""
SKEW_DEVIATIONS = 3.0
"""Standard deviations of a server's rows above the mean that servers have time for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """Predicted step of one number of ranks, at a fixed batch."""

    num_ranks: int
    step_seconds: float
    speedup: float
    """Seconds of a step on one rank over those on N."""
    efficiency: float
    """Speed-up per rank."""
    limit: str
    """Description of the bottleneck."""


def solve_overhead(efficiency: float, num_ranks: int) -> float:
    """Return the overhead R at which N ranks have an efficiency: R = (1 - efficiency) / (efficiency N - 1).

    inf if N ranks of this efficiency are not faster than one; 0 for efficiencies above 1."""
    gain = efficiency * num_ranks - 1
    return max(1 - efficiency, 0.0) / gain if gain > 0 else math.inf


def solve_num_ranks(efficiency: float, overhead: float) -> float:
    """Return the largest N, a real number, with an efficiency (1 + R) / (1 + N R) of at least this; inf if R is 0."""
    return (1 + (1 - efficiency) / overhead) / efficiency if overhead else math.inf


def predict_speedup(overhead: float, num_ranks: int) -> float:
    """Return the speed-up of N ranks over one if R stays the same: N (1 + R) / (1 + N R)."""
    return num_ranks * (1 + overhead) / (1 + num_ranks * overhead)


def limit_speedup(overhead: float) -> float:
    """Return the speed-up that no number of ranks exceeds: 1 + 1/R."""
    return 1 + 1 / overhead if overhead else math.inf


def choose_scaling_point(curve: Sequence[ScalingPoint], min_efficiency: float) -> ScalingPoint:
    """Return the point with the most ranks of at least this efficiency; the first point, if no other has it."""
    efficient = [point for point in curve if point.efficiency >= min_efficiency]
    return max(efficient, key=lambda point: point.num_ranks, default=curve[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerDemand:
    """Work of a step that the servers of all trainers share."""

    compute_seconds: float
    """Seconds that a trainer computes, in which servers have to be done to be hidden."""
    requested_rows: float
    """Number of rows that all trainers request."""
    link_bytes: float
    """Bytes of values that servers send, or of ids and gradients that they receive: the larger."""
    processor_seconds: float
    """Processor time of gathering, summing, updating and packing rows."""
    row_bytes: float
    """Memory of all rows."""
    link_bytes_per_second: float
    """Bandwidth of a server's link, which is full duplex."""
    memory_bytes: int | None
    """Memory for rows of each server; None: no limit."""

    @property
    def link(self) -> float:
        """Number of servers whose links are busy as long as a trainer computes."""
        return self.link_bytes / (self.link_bytes_per_second * self.compute_seconds)

    @property
    def processor(self) -> float:
        """Number of servers whose processors are busy as long as a trainer computes."""
        return self.processor_seconds / self.compute_seconds

    @property
    def room(self) -> float:
        """Number of servers whose memory has all rows."""
        return self.row_bytes / self.memory_bytes if self.memory_bytes else 0.0

    @property
    def count(self) -> int:
        """Smallest number of servers that meets all three, and whose busiest one is hidden."""
        busy = max(self.link, self.processor)
        return max(count_skewed_servers(busy, self.requested_rows), math.ceil(self.room))


def count_skewed_servers(mean_servers: float, num_rows: float) -> int:
    """Return the smallest n >= mean_servers x (1 + 3 sqrt((n - 1) / num_rows)): a hash distributes rows unevenly.

    mean_servers: number of servers that is enough if all have the same number of requested rows."""
    # With s = sqrt(n - 1): s^2 - slope s - (mean_servers - 1) >= 0.
    slope = SKEW_DEVIATIONS * mean_servers / math.sqrt(max(num_rows, 1.0))
    root = (
        (slope + math.sqrt(slope * slope + 4 * (mean_servers - 1))) / 2 if mean_servers > 1 else 0
    )
    return 1 + math.ceil(root * root - 1e-9)


def choose_num_servers(step_seconds: Sequence[float]) -> int:
    """Return the smallest number of servers whose step is not MIN_GAIN slower than the fastest.

    step_seconds: of 0, 1, 2, .. servers; inf where they are impossible."""
    fastest = min(step_seconds)
    return next(n for n, seconds in enumerate(step_seconds) if seconds * (1 - MIN_GAIN) <= fastest)


@dataclass(slots=True)
class GradientNoise:
    """Sums over steps of two estimates from gradients that ranks have anyway: of parts of a batch, and of all of it."""

    steps: int = 0
    variance: float = 0.0
    """Sum of the variance of a batch's mean gradient; times B, that of one sample's gradient."""
    square: float = 0.0
    """Sum of the squared norm of the gradient without noise."""

    def add_step(self, square_of_parts: float, square: float, num_parts: int) -> None:
        """Add a step. square_of_parts: sum of the squared norms of the gradients of equal parts, which add up to the
        batch's gradient, whose squared norm is `square`."""
        noiseless = (square - square_of_parts) / (1 - 1 / num_parts)
        self.steps += 1
        self.square += noiseless
        self.variance += square - noiseless


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """Gradient noise scale: size of the batch in which noise is as large as the gradient, over a window of a run."""

    samples: float | None
    """B_noise; None: the noise of all batches together hides the gradient."""
    first_step: int
    last_step: int


def average_noise(lines: Sequence[Mapping[str, Any]]) -> NoiseScale | None:
    """Return the noise scale over the newest MIN_NOISE_STEPS steps or more; None if fewer were measured.

    Numerator and denominator are averaged before they are divided. lines: of kind `noise` of a run, oldest first."""
    steps = variance = square = 0.0
    for line in reversed(lines):
        steps += line["steps"]
        variance += line["variance"]
        square += line["square"]
        if steps >= MIN_NOISE_STEPS:
            return NoiseScale(
                samples=max(variance, 0.0) / square if square > 0 else None,
                first_step=line["step"] - line["steps"] + 1,
                last_step=lines[-1]["step"],
            )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost:
    """Seconds of a step as a line in the batch: fixed_seconds + sample_seconds x B."""

    fixed_seconds: float
    sample_seconds: float

    def best_batch(self, noise_samples: float) -> float:
        """Return the batch B* = sqrt(fixed_seconds x B_noise / sample_seconds), which reaches a loss soonest."""
        return math.sqrt(self.fixed_seconds * noise_samples / max(self.sample_seconds, 1e-12))

    def relative_time(self, batch_size: float, noise_samples: float) -> float:
        """Return the time to a loss in units of the fewest steps: seconds of a step x (1 + B_noise / B)."""
        seconds = self.fixed_seconds + self.sample_seconds * batch_size
        return seconds * (1 + noise_samples / batch_size)


def fit_batch_cost(sizes: tuple[int, int], seconds: tuple[float, float]) -> BatchCost:
    """Fit the line through the seconds of two sizes, ascending; neither part of it is negative."""
    slope = (seconds[1] - seconds[0]) / max(sizes[1] - sizes[0], 1)
    slope = min(max(slope, 0.0), seconds[1] / sizes[1])
    return BatchCost(fixed_seconds=seconds[1] - slope * sizes[1], sample_seconds=slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Predicted speed by number of ranks, and what it says about one world."""

    batch_size: int
    curve: tuple[ScalingPoint, ...]
    """Steps of all worlds with this batch; the first is one rank."""
    num_ranks: int
    """Largest number of ranks of the curve with the efficiency that the user wants."""
    world: World
    """World of the other advice: the user's or, if that is one rank, the one of `num_ranks`."""
    num_servers: int
    servers: ServerDemand
    staleness_steps: int
    """Smallest number of steps that reads of a table are late: in 0, nothing hides the servers."""
    batch: BatchCost
    noise: NoiseScale | None
    """Gradient noise in the run folder; None: not measured."""
