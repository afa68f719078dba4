"""Tables of `bench towers_quality` and `towers_movielens`: AUC that towers lose, with paired intervals.

Runs: by "model / system" and seed, the AUC of each of K blocks of test samples, which are the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import Any

import numpy as np
from harness import Measured
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid

from tables.intervals import interval

Runs = Mapping[str, Mapping[str, Sequence[float]]]
UNIT, FLAT, SEED = "AUC", "flat", " seed "
MAX_LOSS = 0.0005
"""Loss that is allowed at ratios of 1 and 2."""


def measured_of(runs: Runs) -> list[Measured]:
    """One case for each run: its blocks."""
    results = []
    for name, by_seed in runs.items():
        model, _, system = name.partition(" / ")
        results += [
            Measured(f"{model}{SEED}{seed}", system, UNIT, list(blocks))
            for seed, blocks in by_seed.items()
        ]
    return results


def runs_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Runs that a report was made of."""
    runs: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        model, _, seed = case["case"].partition(SEED)
        runs.setdefault(f"{model} / {case['system']}", {})[seed] = case["values"]
    return runs


def losses_of(runs: Runs) -> dict[str, list[NDArray[np.float64]]]:
    """Return by "model / system" flat less towered AUC (K,), of each seed that both have."""
    results = {}
    for name, by_seed in runs.items():
        model, _, system = name.partition(" / ")
        flat = runs.get(f"{model} / {FLAT}", {})
        if system != FLAT:
            pair = sorted(flat.keys() & by_seed.keys(), key=int)
            results[name] = [np.subtract(flat[seed], by_seed[seed]) for seed in pair]
    return {name: result for name, result in results.items() if result}


def ratios_of(runs: Runs) -> dict[str, float]:
    """Mean loss of AUC of each system; "... +-": half the width of its interval."""
    ratios: dict[str, float] = {}
    for name, losses in losses_of(runs).items():
        mean, half = interval(losses)
        ratios |= {f"loss {name}": round(mean, 6), f"loss {name} +-": round(half, 6)}
    return ratios


def verdict(mean: float, half: float) -> str:
    """Judge a loss by the allowed one."""
    if mean + half <= MAX_LOSS:
        return "shown"
    return "missed" if mean - half > MAX_LOSS else "open"


def print_result(console: Console, runs: Runs, best: float | None = None) -> None:
    """best: the ceiling, where it is known."""
    known = "" if best is None else f", ceiling {best:.4f}"
    grid = Grid(title=f"test AUC{known}; is the loss at most {MAX_LOSS}?")
    for number, column in enumerate(("model / system", "AUC", "lost", "95 %", "by seed", "")):
        grid.add_column(column, justify="right" if number else "left")
    losses = losses_of(runs)
    for name, by_seed in runs.items():
        if not by_seed:
            continue
        lines = [""] * 4
        if name in losses:
            mean, half = interval(losses[name])
            seeds = " ".join(f"{loss.mean():+.5f}" for loss in losses[name])
            width = "" if isnan(half) else f"{half:.5f}"
            lines = [f"{mean:+.5f}", width, seeds, verdict(mean, half)]
        grid.add_row(name, f"{fmean(map(fmean, by_seed.values())):.5f}", *lines)
    console.print(grid)
