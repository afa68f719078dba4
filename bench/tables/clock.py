"""Tables of `bench staleness`: speedup of a step by cached rows, by system, link and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import Measured, print_machine
from rich.console import Console
from rich.table import Table as Grid

from tables.exchange import CLOCK, PROCESSOR, UPLINK, names_of, steps_of

NO_CACHE = "no cache"
WANTED = 2.5
"""`row_clock_vs_no_cache`, at the slowest rate."""


def best_of(steps: Mapping[str, float], kind: str) -> str | None:
    """The fastest of the systems whose names begin so; None where there is none."""
    return min(
        (name for name in steps if name.startswith(kind)), key=steps.__getitem__, default=None
    )


def best_synchronous(steps: Mapping[str, float]) -> str | None:
    """The fastest that keeps no copies."""
    return best_of({n: ms for n, ms in steps.items() if not n.startswith(CLOCK)}, "")


def stream_of(case: str) -> str:
    """Return the stream of a case with its rate."""
    return case.rsplit(" ", 2)[0]


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return each ratio by case; names without a case hold the first one: the first stream at the slowest rate."""
    ratios: dict[str, float] = {}
    for case in names_of(measured):
        steps = steps_of(measured, case)
        sync = best_synchronous(steps)
        bases = {"no_cache": steps.get(NO_CACHE), "sync_best": sync and steps[sync]}
        fastest_clock = best_of(steps, CLOCK)
        for base, milliseconds in bases.items():
            if fastest_clock is not None and milliseconds:
                name = f"row_clock_vs_{base}"
                ratio = milliseconds / steps[fastest_clock]
                ratios.setdefault(name, ratio)
                ratios[f"{name} {case}"] = ratio
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    results = {(m.case, m.system): m.median for m in measured}
    for case in names_of(measured):
        steps = steps_of(measured, case)
        sync = best_synchronous(steps)
        grid = Grid(box=None, title_justify="left", padding=(0, 1, 0, 0), title=case)
        headings = (
            "system",
            "ms/step",
            "x no cache",
            "x best synchronous",
            "uplink MB",
            "processor ms",
        )
        for heading in headings:
            grid.add_column(
                heading, justify="left" if heading == "system" else "right", no_wrap=True
            )
        for system, ms in sorted(steps.items(), key=lambda pair: pair[1]):
            bases = [steps.get(NO_CACHE), sync and steps[sync]]
            grid.add_row(
                system, f"{ms:.1f}", *(f"{base / ms:.2f}" if base else "" for base in bases),
                f"{results[case + UPLINK, system]:.2f}", f"{results.get((case + PROCESSOR, system), 0.0):.0f}",
            )  # fmt: skip
        console.print(grid)
    for name, ratio in result["ratios"].items():
        wanted = f" (wanted >= {WANTED})" if name == "row_clock_vs_no_cache" else ""
        console.print(f"{name}: {ratio:.2f}{wanted}", soft_wrap=True)
    for what in result["machine"]["left_out"]:
        console.print(f"left out: {what}", style="yellow", markup=False)
    print_machine(console, result)
