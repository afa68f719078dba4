"""Points, ratios and tables of `bench cache`."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median

from harness import Measured, open_grid
from rich.console import Console

DIMS = (16, 128)
OURS, OPTIMUM, HET_POLICY, HET = "lookahead", "optimum", "light_lfu", "HET"
PREDICTED = ("lru", "lfu", OURS)
PHASES = ("plan", "decide", "gather", "update")


@dataclass(frozen=True)
class Point:
    """Point at which bytes were counted."""

    stream: str
    batch: str
    share: float  # of all rows that a rank's cache holds
    staleness: int

    def __str__(self) -> str:
        return f"{self.stream} {self.batch} cache {self.share:.0%} s={self.staleness}"


@dataclass
class Figures:
    saved: dict[tuple[Point, int, str], float] = field(default_factory=dict)
    """Share, by point, dim and system, of a parameter server's bytes that it saves."""
    predicted: dict[tuple[Point, int, str], float] = field(default_factory=dict)
    """Predicted bytes over counted ones, by point, dim and system."""
    windows: dict[Point, int] = field(default_factory=dict)
    """Batches that `OURS` sees ahead."""
    recovery: dict[tuple[str, str], int | None] = field(default_factory=dict)
    """Batches until hits recover, by batch and policy; None: not in the stream."""
    seconds: dict[tuple[int, int], dict[str, list[float]]] = field(default_factory=dict)
    """Seconds of a step by dim and keys of a batch, of each phase and of "roofline", by block."""

    def keys_per_second(self, dim: int, keys: int, *names: str) -> float:
        by_name = self.seconds[dim, keys]
        blocks = zip(*(by_name[name] for name in names or PHASES), strict=True)
        return keys / median(map(sum, blocks))

    def gaps(self) -> dict[tuple[Point, int], float]:
        """Return the part of the gap between HET's policy and the optimum, under the same bounds, that ours closes."""
        results = {}
        for point, dim, system in self.saved:
            if system == OPTIMUM and point.staleness == 100 and point.share < 1:
                least, limit = (self.saved[point, dim, name] for name in (HET_POLICY, OPTIMUM))
                results[point, dim] = (self.saved[point, dim, OURS] - least) / (limit - least)
        return results

    def full(self) -> dict[tuple[Point, int], float]:
        return {
            (point, dim): saved
            for (point, dim, system), saved in self.saved.items()
            if system == "lru" and point.share == 1 and point.staleness == 100
        }

    def measured(self) -> list[Measured]:
        """Counts have one value, times one per block."""
        return [
            *(
                Measured(f"{point} D={dim}", system, "bytes saved", [round(saved, 4)])
                for (point, dim, system), saved in self.saved.items()
            ),
            *(
                Measured(f"{point} D={dim}", system, "bytes predicted", [round(ratio, 4)])
                for (point, dim, system), ratio in self.predicted.items()
            ),
            *(
                Measured(f"zipf {batch} after a change", policy, "batches", [float(batches)])
                for (batch, policy), batches in self.recovery.items()
                if batches is not None
            ),
            *(
                Measured(f"D={dim} {keys} keys", name, "ms", [round(1e3 * s, 4) for s in values])
                for (dim, keys), by_name in self.seconds.items()
                for name, values in by_name.items()
            ),
        ]


def ratios_of(figures: Figures) -> dict[str, float]:
    """Compute ratios of measurements: of the worst points, except the `_mean`."""
    ratios: dict[str, float] = {}
    if gaps := figures.gaps().values():
        ratios["gap_to_optimum_closed"] = min(gaps)
        ratios["gap_to_optimum_closed_mean"] = fmean(gaps)
    if full := figures.full().values():
        ratios["saved_row_clock_100_full"] = min(full)
    if predicted := figures.predicted.values():
        ratios["predicted_bytes_error"] = max(abs(ratio - 1) for ratio in predicted)
    for policy in ("lfu", OURS):
        results = [
            n for (_, value), n in figures.recovery.items() if value == policy and n is not None
        ]
        if results:
            ratios[f"batches_to_recover_{policy}"] = max(results)
    for dim in DIMS:
        if rates := [figures.keys_per_second(*at) for at in figures.seconds if at[0] == dim]:
            ratios[f"cache_keys_per_second_d{dim}"] = min(rates)
            ratios[f"cache_of_roofline_d{dim}"] = min(
                figures.keys_per_second(*at) / figures.keys_per_second(*at, "roofline")
                for at in figures.seconds
                if at[0] == dim
            )
    return ratios


WANTED = {
    "gap_to_optimum_closed": ">= 0.8",
    "saved_row_clock_100_full": ">= 0.88",
    "predicted_bytes_error": "<= 0.10",
    "batches_to_recover_lfu": "<= 20",
    "cache_keys_per_second_d16": ">= 20,000,000",
    "cache_keys_per_second_d128": ">= 6,000,000",
}
SYSTEMS = ("lru", "lfu", HET_POLICY, OURS, OPTIMUM, HET)
TITLE = (
    "Payload bytes saved, of those of a parameter server with ids deduplicated, D=16 / D=128. lru .. lookahead:\n"
    "row_clock; optimum: Belady's with the whole future, same bounds; HET: its protocol and light LFU."
)


def print_figures(console: Console, figures: Figures) -> None:
    headings = "stream", "batch", "cache", "s", *SYSTEMS, "window"
    table = open_grid(headings, texts=0, title=TITLE)
    for point in dict.fromkeys(point for point, _, _ in figures.saved):
        words = [
            " / ".join(f"{figures.saved[point, dim, system]:.3f}" for dim in DIMS)
            if (point, DIMS[0], system) in figures.saved
            else ""
            for system in SYSTEMS
        ]
        window = str(figures.windows.get(point, ""))
        table.add_row(
            point.stream, point.batch, f"{point.share:.0%}", str(point.staleness), *words, window
        )
    console.print(table)
    for (batch, policy), batches in figures.recovery.items():
        console.print(
            f"zipf {batch}, other rows become popular: {policy} hits as before after "
            f"{'more batches than there were' if batches is None else f'{batches} batches'}"
        )
    for (dim, keys), by_name in figures.seconds.items():
        phases = ", ".join(f"{name} {1e3 * median(by_name[name]):.3f}" for name in PHASES)
        console.print(
            f"D={dim}, {keys:,} keys a batch: {figures.keys_per_second(dim, keys) / 1e6:.1f} million keys/s "
            f"(ms: {phases}); bare loops {figures.keys_per_second(dim, keys, 'roofline') / 1e6:.1f} million",
            soft_wrap=True,
        )


def print_ratios(console: Console, ratios: dict[str, float]) -> None:
    for name, value in ratios.items():
        wanted = f" (wanted {WANTED[name]})" if name in WANTED else ""
        text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        console.print(f"{name}: {text}{wanted}")
