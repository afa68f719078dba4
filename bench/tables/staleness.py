"""Tables of `bench quality_staleness`: AUC lost against synchronous training, with paired intervals.

All systems score the same test samples, in the same blocks, so what has an interval is the difference of AUCs on a
block (`bench/tables/intervals.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

import numpy as np
from harness import Measured, print_machine
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid

from tables.intervals import interval

AUC, BASE, CEILING, SEED = "AUC", "synchronous", "ceiling", " seed "
FACTS = ("updates missed", "used without a word", "rows lr")
HEADINGS = ("data, optimizer", "system", AUC, "lost", "95 %", "by seed", *FACTS)

Floats = NDArray[np.float64]


def differences_of(measured: Sequence[Measured], group: str, system: str) -> list[Floats]:
    """Synchronous less `system`, (K,) for each seed of the group that has both. group: data and optimizer."""
    values = {(m.case, m.system): np.array(m.values) for m in measured if m.unit == AUC}
    return [
        values[case, BASE] - other
        for (case, name), other in values.items()
        if name == system and case.startswith(group + SEED) and (case, BASE) in values
    ]


def groups_of(measured: Sequence[Measured]) -> dict[str, list[str]]:
    """Return systems with scores by data and optimizer, in the order in which they were trained."""
    results: dict[str, list[str]] = {}
    for m in measured:
        if m.unit == AUC and SEED in m.case:
            systems = results.setdefault(m.case.split(SEED)[0], [])
            if m.system not in systems:
                systems.append(m.system)
    return results


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the AUC by which synchronous training is ahead; "... +-": half its interval. And the worlds' largest
    gap."""
    ratios: dict[str, float] = {}
    for group, systems in groups_of(measured).items():
        for system in systems:
            if system != BASE and (result := differences_of(measured, group, system)):
                mean, half = interval(result)
                name = f"auc_lost {group} {system}"
                ratios |= {name: round(mean, 6), f"{name} +-": round(half, 6)}
    gaps = [gap for m in measured if m.case == "world" for gap in m.values]
    return ratios | ({"world_gap": max(gaps)} if gaps else {})


def print_result(
    console: Console, measured: Sequence[Measured], result: Mapping[str, object]
) -> None:
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for number, heading in enumerate(HEADINGS):
        grid.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for group, systems in groups_of(measured).items():
        for system in systems:
            grid.add_row(*_line(measured, group, system))
    console.print(grid)
    for m in measured:
        if m.case == "world":
            console.print(f"{m.system}: {m.unit} {m.median:.1e}")
        if m.system == CEILING:
            console.print(f"{m.case}: ceiling {m.median:.4f}")
    print_machine(console, result)


def _line(measured: Sequence[Measured], group: str, system: str) -> list[str]:
    own = [m for m in measured if m.system == system and m.case.startswith(group + SEED)]

    def mean(unit: str) -> float:
        return float(np.mean([np.mean(m.values) for m in own if m.unit == unit] or [np.nan]))

    line, facts = [group, system, f"{mean(AUC):.5f}"], [mean(unit) for unit in FACTS]
    results = [] if system == BASE else differences_of(measured, group, system)
    if results:
        lost, half = interval(results)
        seeds = " ".join(f"{result.mean():+.5f}" for result in results)
        line += [f"{lost:+.5f}", f"{half:.5f}", seeds]
    else:
        line += [""] * 3
    return line + ["" if isnan(fact) else f"{fact:.3g}" for fact in facts]
