"""Tables of `bench towers`, in addition to those of `tables.exchange`: ratios against TorchRec and
against the best exchange that knows no towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import Measured, open_grid, print_machine, print_ratios
from rich.console import Console

from tables.exchange import LOSSY, PREDICTED, UPLINK, is_peer, names_of, steps_of

TOWERS = "towers"
RATIOS = (2, 4, 8)


def module_of(ratio: int) -> str:
    return f"{TOWERS} CR {ratio} {LOSSY}"


def ratio_of(system: str) -> int:
    """Return the ratio of a system with modules, whatever is gathered in its towers."""
    return int(system.split(" CR ")[1].split()[0])


def kinds_of(figures: Mapping[str, float]) -> dict[str, float]:
    """The least of each kind of systems."""
    kinds: dict[str, list[float]] = {}
    for name, value in figures.items():
        if is_peer(name):
            kind = "torchrec"
        elif not name.startswith(TOWERS):
            kind = "flat"
        else:
            kind = module_of(ratio_of(name)) if LOSSY in name else TOWERS
        kinds.setdefault(kind, []).append(value)
    return {kind: min(values) for kind, values in kinds.items()}


def what_is(system: str) -> str:
    if not system.startswith(TOWERS):
        return "flat"
    return "modules" if LOSSY in system else TOWERS


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """The worst case of each, and the best where the name says so."""
    results: dict[str, dict[str, float]] = {}
    off: dict[str, list[float]] = {}
    for case in names_of(measured):
        steps, text = steps_of(measured, case), steps_of(measured, case + PREDICTED)
        for name in text.keys() & steps.keys():
            off.setdefault(what_is(name), []).append(abs(text[name] - steps[name]) / steps[name])
        best = kinds_of(steps)
        for ratio in RATIOS:
            module = best.get(module_of(ratio))
            if module is None:
                continue
            if "torchrec" in best:
                results.setdefault(f"towers_cr{ratio}_vs_torchrec", {})[case] = (
                    best["torchrec"] / module
                )
            if "flat" in best:
                results.setdefault(f"towers_cr{ratio}_vs_best_flat", {})[case] = (
                    best["flat"] / module
                )
        if TOWERS in best and "flat" in best:
            results.setdefault("towers_vs_best_flat", {})[case] = best["flat"] / best[TOWERS]
        if TOWERS in best and "torchrec" in best:
            results.setdefault("towers_vs_torchrec", {})[case] = best["torchrec"] / best[TOWERS]
    ratios = {}
    for name, values in results.items():
        ratios[name], ratios[f"{name}_best"] = min(values.values()), max(values.values())
        ratios |= {f"{name} {case}": value for case, value in values.items()}
    if off:
        ratios["predicted_time_error"] = max(map(max, off.values()))
        ratios |= {f"predicted_time_error_of_{what}": max(item) for what, item in off.items()}
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    """Milliseconds of a step and megabytes over a host's uplink, of the best of each kind."""
    kinds = ("torchrec", "flat", TOWERS, *map(module_of, RATIOS))
    for title, what in (("ms/step", ""), ("uplink, MB a host and step", UPLINK)):
        headings = "case", *(kind.removesuffix(f" {LOSSY}") for kind in kinds)
        grid = open_grid(headings, title=title)
        for case in names_of(measured):
            best = kinds_of(steps_of(measured, case + what))
            grid.add_row(case, *(f"{best[k]:.2f}" if k in best else "" for k in kinds))
        console.print(grid)
    print_ratios(console, result)
    print_machine(console, result)
