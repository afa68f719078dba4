"""Tables of `bench staleness`: speedup of a step by cached rows, by system, link and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import Measured, open_grid, print_machine
from rich.console import Console

from tables.exchange import CLOCK, LOSSY, PROCESSOR, UPLINK, names_of, steps_of

NO_CACHE = "no cache"
DEFAULT = f"{CLOCK} default"
INT8 = f" int8 {LOSSY}"
"""End of the names of systems that send dense gradients in bytes."""
WANTED = {"default_vs_no_cache": 2.2, "default_vs_no_cache_int8": 2.3}
"""Ratios at the slowest rate, worst case."""


def best_clock(steps: Mapping[str, float]) -> float | None:
    """ms of the fastest with copies; None where there is none."""
    return min(
        (ms for n, ms in steps.items() if n.startswith(CLOCK) and LOSSY not in n), default=None
    )


def best_synchronous(steps: Mapping[str, float]) -> float | None:
    """ms of the fastest that keeps no copies."""
    exact = {n: ms for n, ms in steps.items() if LOSSY not in n}
    return min((ms for n, ms in exact.items() if not n.startswith(CLOCK)), default=None)


def gigabits_of(case: str) -> float:
    """Rate of a case, in Gbit/s."""
    return float(case.rsplit(" ", 2)[1])


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return each ratio by case. Names without a case: `default_*` the worst at the slowest rate, by batch size; others
    the first."""
    ratios: dict[str, float] = {}
    by_case = {case: steps_of(measured, case) for case in names_of(measured)}
    slowest = min(map(gigabits_of, by_case), default=0.0)
    for case, steps in by_case.items():
        pairs = {
            "default_vs_no_cache": (steps.get(NO_CACHE), steps.get(DEFAULT)),
            "default_vs_no_cache_int8": (steps.get(NO_CACHE + INT8), steps.get(DEFAULT + INT8)),
            "default_vs_sync_best": (best_synchronous(steps), steps.get(DEFAULT)),
            "row_clock_vs_no_cache": (steps.get(NO_CACHE), best_clock(steps)),
            "row_clock_vs_sync_best": (best_synchronous(steps), best_clock(steps)),
        }
        for name, (base, ms) in pairs.items():
            if base is None or ms is None:
                continue
            ratios[f"{name} {case}"] = base / ms
            if not name.startswith("default"):
                ratios.setdefault(name, base / ms)
            elif gigabits_of(case) == slowest:
                of_size = name + ("_128" if " 128 samples" in case else "")
                ratios[of_size] = min(base / ms, ratios.get(of_size, float("inf")))
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    results = {(m.case, m.system): m.median for m in measured}
    for case in names_of(measured):
        steps = steps_of(measured, case)
        sync = best_synchronous(steps)
        headings = (
            "system",
            "ms/step",
            "x no cache",
            "x best synchronous",
            "uplink MB",
            "processor ms",
        )
        grid = open_grid(headings, title=case)
        for system, ms in sorted(steps.items(), key=lambda pair: pair[1]):
            bases = [steps.get(NO_CACHE), sync]
            grid.add_row(
                system, f"{ms:.1f}", *(f"{base / ms:.2f}" if base else "" for base in bases),
                f"{results[case + UPLINK, system]:.2f}", f"{results.get((case + PROCESSOR, system), 0.0):.0f}",
            )  # fmt: skip
        console.print(grid)
    for name, ratio in result["ratios"].items():
        wanted = f" (wanted >= {WANTED[name]})" if name in WANTED else ""
        console.print(f"{name}: {ratio:.2f}{wanted}", soft_wrap=True)
    print_machine(console, result)
