"""Tables of `bench partials`, in addition to those of `tables.exchange`: ratios against the
parameter server.

Legend: K ids of a sample, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import Measured, open_grid, print_machine, print_ratios
from rich.console import Console

from tables.exchange import AUTO, PAYLOAD, PREDICTED_PAYLOAD, is_peer, names_of, steps_of

DES, SERVER, POOLED = "partials", "rows", "pooled"
DEFAULT_LAYOUT = "partials row-wise"
"""Rows split by hash over all ranks, as DES has them by default."""


def best_of(figures: Mapping[str, float], kind: str) -> float | None:
    """The least of a kind of systems."""
    return min((value for name, value in figures.items() if name.startswith(kind)), default=None)


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Best cases where the name says so, else the worst."""
    saved, faster, regret, ids, off = {}, {}, {}, {}, []
    for case in names_of(measured):
        steps, sent = steps_of(measured, case), steps_of(measured, case + PAYLOAD)
        of_des, of_server = best_of(sent, DES), best_of(sent, SERVER)
        if of_des is not None and of_server:
            saved[case] = 1 - of_des / of_server
        of_des, of_server = best_of(steps, DES), best_of(steps, SERVER)
        if of_des is not None and of_server is not None:
            faster[case] = of_server / of_des
        if (
            "over ids" in case
            and case.endswith(" 1 Gbit/s")
            and DEFAULT_LAYOUT in steps
            and of_server
        ):
            ids[case] = steps[DEFAULT_LAYOUT] / of_server
        forced = [ms for n, ms in steps.items() if n != AUTO and not is_peer(n)]
        if AUTO in steps and forced:
            regret[case] = steps[AUTO] / min(forced)
        for system, text in steps_of(measured, case + PREDICTED_PAYLOAD).items():
            if system.startswith(DES) and sent.get(system):
                off.append(abs(text - sent[system]) / sent[system])
    ratios = {}
    for name, best, result in (
        ("des_bytes_saved_vs_ps", max, saved),
        ("des_throughput_vs_ps", max, faster),
        ("chooser_regret", max, regret),
        ("ids_vs_rows", max, ids),
    ):
        if result:
            whole = f"{name}_best" if name.startswith("des_") else name
            ratios[whole] = best(result.values())
            ratios |= {f"{name} {case}": value for case, value in result.items()}
    if off:
        ratios["des_bytes_vs_formula_error"] = max(off)
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    """One line per case: bytes of a host and milliseconds of a step, of the best of each kind."""
    kinds = (SERVER, POOLED, DES)
    headings = (
        "case",
        *(f"{kind} MB" for kind in kinds),
        *(f"{kind} ms" for kind in (*kinds, "torchrec", AUTO)),
    )
    title = "The best of each kind: payload MB a host and step, ms/step"
    grid = open_grid(headings, title=title)
    for case in names_of(measured):
        steps, sent = steps_of(measured, case), steps_of(measured, case + PAYLOAD)
        cells = [best_of(sent, kind) for kind in kinds]
        cells += [best_of(steps, kind) for kind in (*kinds, "torchrec", AUTO)]
        grid.add_row(case, *("" if value is None else f"{value:.2f}" for value in cells))
    console.print(grid)
    print_ratios(console, result)
    print_machine(console, result)
