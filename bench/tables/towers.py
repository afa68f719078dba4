"""Tables of `bench towers`, in addition to those of `tables.exchange`: ratios against TorchRec and
against the best exchange that knows no towers, each of systems with the same codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from harness import Measured, open_grid, print_machine, print_ratios
from rich.console import Console

from tables.exchange import LOSSY, PREDICTED, UPLINK, is_peer, names_of, steps_of

TOWERS = "towers"
RATIOS = (2, 4, 8)
CODECS = ("fp16", "int8")
MODEL, OTHER_MODEL = "dlrm", "dcnv2"
"""Models whose tower modules are measured. Names of systems and of ratios leave out the first."""
QUOTED = {"": "2x2 D=64 0.2 Gbit/s", "bags_": "2x2 20-hot D=64 0.2 Gbit/s"}
"""Cases of the quoted ratios against flat exchanges, by prefix."""


def module_of(ratio: int) -> str:
    return f"{TOWERS} CR {ratio}"


def kinds_of(figures: Mapping[str, float], variant: str = "") -> dict[str, float]:
    """Return the least of each kind of systems. variant: a codec of all systems, or a model of the tower modules."""
    codec = variant if variant in CODECS else ""
    kinds: dict[str, list[float]] = {}
    for name, value in figures.items():
        words = name.split()
        if is_peer(name):
            kind = "torchrec"
        elif not name.startswith(TOWERS):
            kind = "flat"
        else:
            kind = module_of(int(words[words.index("CR") + 1])) if "CR" in words else TOWERS
        used = next((word for word in (*CODECS, OTHER_MODEL) if word in words), "")
        if used == (variant if "CR" in words else codec):
            kinds.setdefault(kind, []).append(value)
    return {kind: min(values) for kind, values in kinds.items()}


def what_is(system: str) -> str:
    if not system.startswith(TOWERS):
        return "flat"
    return "modules" if LOSSY in system else TOWERS


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return how many times as fast towers with modules are, by case; over all cases, the geometric mean and the worst
    against TorchRec; and the quoted cases against flat exchanges. Then errors of predictions, the worst case of each.
    """
    ratios: dict[str, float] = {}
    for variant in ("", *CODECS, OTHER_MODEL):
        suffix = variant and f" {variant}"
        best = {c: kinds_of(steps_of(measured, c), variant) for c in names_of(measured)}
        for ratio in RATIOS:
            module = module_of(ratio)
            for base in ("torchrec", "flat"):
                name = f"cr{ratio}_vs_best_{base}"
                faster = {
                    c: k[base] / k[module] for c, k in best.items() if {base, module} <= set(k)
                }
                ratios |= {f"{name} {case}{suffix}": value for case, value in faster.items()}
                if faster and base == "torchrec":
                    ratios[f"{name}_mean{suffix}"] = geometric_mean(faster.values())
                    ratios[f"{name}_worst{suffix}"] = min(faster.values())
                elif base == "flat":
                    quoted = {p: faster[case] for p, case in QUOTED.items() if case in faster}
                    ratios |= {f"{prefix}{name}{suffix}": v for prefix, v in quoted.items()}
    return ratios | prediction_errors(measured)


def prediction_errors(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the largest relative error of predicted steps, of all systems and of each kind."""
    off: dict[str, list[float]] = {}
    for case in names_of(measured):
        steps, text = steps_of(measured, case), steps_of(measured, case + PREDICTED)
        for name in text.keys() & steps.keys():
            off.setdefault(what_is(name), []).append(abs(text[name] - steps[name]) / steps[name])
    if not off:
        return {}
    errors = {f"predicted_time_error_of_{what}": max(item) for what, item in off.items()}
    return {"predicted_time_error": max(errors.values()), **errors}


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
