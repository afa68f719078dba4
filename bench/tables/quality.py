"""Tables and ratios of `bench quality`: AUC lost against synchronous training, a flat model or models over fields.

Cases are "GROUP seed N". All arms of a case score the same test samples, in the same blocks, so what has an interval is
the difference of AUCs on a block (`bench/tables/intervals.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isnan, nan
from statistics import fmean

import numpy as np
from harness import Measured, open_grid, print_machine
from numpy.typing import NDArray
from rich.console import Console

from tables.intervals import interval

AUC, SEED = "AUC", " seed "
BASES = ("synchronous", "flat", "fields", "interactions", "0 steps late")
"""Arms that the others of a group are compared with: a group has one of them."""
SMALL, CEILING = "synchronous, 256", "ceiling"
SCORES = {"auc_lost": AUC, "late_auc_lost": "AUC, second half", "tail_auc_lost": "AUC of the tail"}
SAVED, STEPS, CURVE = "row messages saved", "scored steps", "AUC by step"
NEAR = 0.0005
"""Difference of AUC below which a score counts as reached in `steps_to_near_score`."""
PURITY = "purity"
TOWER_LOSS = re.compile(
    r"auc_lost \w+(?P<movielens> on ml-1m)? (?P<kind>learned|striped) towers CR (?P<ratio>\d+)"
)
EXCESS, PREDICTED, ON_TIME = "excess loss", "predicted loss", BASES[-1]
"""Loss above the minimum, as measured and as derived, and the arm that both are compared with."""
FACTS = (
    "rows lr",
    "updates missed",
    SAVED,
    "planted pairs together",
    PURITY,
    "agreement",
    EXCESS,
    PREDICTED,
    CEILING,
)
CURVE_ARMS = {"default": "default", "share 0.1": "share_0.1", "share 0.2": "share_0.2"}
"""Arms with a worst case over the data sets of their own, and its name."""

Floats = NDArray[np.float64]
Groups = dict[str, dict[str, dict[str, dict[str, Sequence[float]]]]]
"""Values by group, arm, seed and unit."""


def groups_of(measured: Sequence[Measured]) -> Groups:
    """Sort all that was measured from a seed, in the order in which it was trained."""
    groups: Groups = {}
    for m in measured:
        group, _, seed = m.case.partition(SEED)
        if seed:
            arms = groups.setdefault(group, {})
            arms.setdefault(m.system, {}).setdefault(seed, {})[m.unit] = m.values
    return groups


def bases_of(arms: Sequence[str], arm: str) -> list[str]:
    """Return the arms that `arm` is compared with: the group's base, and synchronous training in as small batches."""
    bases = [base for base in BASES if base in arms and arm not in (base, CEILING)]
    return bases + ([SMALL] if arm.endswith(" x 256") and SMALL in arms else [])


def differences_of(
    arms: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], arm: str, base: str, unit: str
) -> list[Floats]:
    """Return `base` less `arm` by block, (K,), for each seed that both have."""
    pairs = [
        (arms[base][seed].get(unit), values.get(unit))
        for seed, values in arms[arm].items()
        if seed in arms[base]
    ]
    return [
        np.subtract(one, other) for one, other in pairs if one is not None and other is not None
    ]


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return AUC lost by group and arm ("... +-": half its interval), messages saved, the purity of the worst seed, and
    steps to the base's score; and the worst cases over the data sets of a row cache."""
    ratios: dict[str, float] = {}
    for group, arms in groups_of(measured).items():
        for arm, seeds in arms.items():
            for base in bases_of(list(arms), arm):
                against = f" against {base}" if base == SMALL else ""
                for name, unit in SCORES.items():
                    if differences := differences_of(arms, arm, base, unit):
                        mean, half = interval(differences)
                        text = f"{name} {group} {arm}{against}"
                        ratios |= {text: round(mean, 6), f"{text} +-": round(half, 6)}
            if not isnan(saved := mean_of(seeds, SAVED)):
                ratios[f"saved {group} {arm}"] = round(saved, 4)
            if purities := [fmean(values[PURITY]) for values in seeds.values() if PURITY in values]:
                ratios[f"purity {group} {arm}"] = round(min(purities), 4)
            for name, tolerance in (("steps_to_score", 0.0), ("steps_to_near_score", NEAR)):
                if steps := steps_to_score(arms, arm, tolerance):
                    ratios[f"{name} {group} {arm}"] = steps
    cells = late_cells(groups_of(measured))
    if len(cells) > 1:
        observed, derived = np.array(cells).T
        rest = ((observed - derived) ** 2).sum() / ((observed - observed.mean()) ** 2).sum()
        ratios["theory_r2"] = round(1 - float(rest), 4)
    return ratios | worst_cases(ratios) | tower_losses(ratios)


def late_cells(groups: Groups) -> list[tuple[float, float]]:
    """Return what late reads add to the loss, as measured and as derived, of each group and number of steps."""
    return [
        (
            mean_of(seeds, EXCESS) - mean_of(arms[ON_TIME], EXCESS),
            mean_of(seeds, PREDICTED) - mean_of(arms[ON_TIME], PREDICTED),
        )
        for arms in groups.values()
        for arm, seeds in arms.items()
        if ON_TIME in arms and arm != ON_TIME
    ]


def worst_cases(ratios: Mapping[str, float]) -> dict[str, float]:
    """Return what the caches of CURVE_ARMS lose at most and save at least: Adagrad over all data sets, and SGD on the
    stream, where the default is."""
    worst: dict[str, float] = {}
    for arm, name in CURVE_ARMS.items():
        lost = {key: ratios[key] for key in ratios if is_cache_ratio(key, "auc_lost", arm)}
        adagrad = [key for key in lost if "adagrad" in key]
        if adagrad:
            worst[f"auc_lost_at_{name}"] = max(lost[key] for key in adagrad)
            worst[f"auc_lost_at_{name} high"] = max(
                lost[key] + ratios[f"{key} +-"] for key in adagrad
            )
            worst[f"saved_at_{name}"] = min(
                ratios[key.replace("auc_lost", "saved")] for key in adagrad
            )
        sgd = [lost[key] for key in lost if "stream" in key and "sgd" in key]
        if sgd and arm == "default":
            worst["sgd_lost"] = max(sgd)
    return worst


def tower_losses(ratios: Mapping[str, float]) -> dict[str, float]:
    """Return what tower modules lose by ratio: learned towers in the worst of the models, striped ones in the best."""
    lost: dict[str, list[float]] = {}
    for key, value in ratios.items():
        if match := TOWER_LOSS.fullmatch(key):
            striped, suffix = match["kind"] == "striped", "_ml1m" if match["movielens"] else ""
            name = f"{'striped_' * striped}loss_cr{match['ratio']}{suffix}"
            lost.setdefault(name, []).append(value)
    return {name: (min if "striped" in name else max)(values) for name, values in lost.items()}


def is_cache_ratio(key: str, name: str, arm: str) -> bool:
    return key.startswith((f"{name} ml-1m ", f"{name} stream ")) and key.endswith(f" {arm}")


def mean_of(seeds: Mapping[str, Mapping[str, Sequence[float]]], unit: str) -> float:
    """Return the mean of a unit over the seeds that have it; nan if none does."""
    means = [fmean(values[unit]) for values in seeds.values() if unit in values]
    return fmean(means) if means else nan


def steps_to_score(
    arms: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], arm: str, tolerance: float
) -> float | None:
    """Return the first scored step at which the mean AUC over seeds reaches the base's at its end, less `tolerance`;
    None if it never does. Only seeds that both have count."""
    base = next((base for base in BASES if base in arms), arm)
    seeds = [seed for seed in arms[arm] if seed in arms[base] and arms[arm][seed].get(CURVE)]
    if not seeds:
        return None
    score = fmean(fmean(arms[base][seed][AUC]) for seed in seeds) - tolerance
    curve = np.mean([arms[arm][seed][CURVE] for seed in seeds], axis=0)
    steps = arms[arm][seeds[0]][STEPS]
    return next((step for step, auc in zip(steps, curve, strict=True) if auc >= score), None)


def print_result(
    console: Console, measured: Sequence[Measured], result: Mapping[str, object]
) -> None:
    """Print a line for each arm and each base: AUC, and what is lost, with its interval and each seed's mean."""
    units = [unit for unit in FACTS if any(m.unit == unit for m in measured)]
    headings = ("group", "arm", AUC, "against", "lost", "95 %", "by seed", "steps to score", *units)
    grid = open_grid(headings, texts=("group", "arm", "against"))
    for group, arms in groups_of(measured).items():
        for arm, seeds in arms.items():
            steps = steps_to_score(arms, arm, 0.0)
            facts = [mean_of(seeds, unit) for unit in units]
            end = ["" if steps is None else f"{steps:,.0f}"]
            end += ["" if isnan(fact) else f"{fact:.4g}" for fact in facts]
            for base in bases_of(list(arms), arm) or [""]:
                lost = ["", "", "", ""]
                if base and (differences := differences_of(arms, arm, base, AUC)):
                    mean, half = interval(differences)
                    by_seed = " ".join(f"{blocks.mean():+.5f}" for blocks in differences)
                    lost = [base, f"{mean:+.5f}", f"{half:.5f}", by_seed]
                grid.add_row(group, arm, f"{mean_of(seeds, AUC):.5f}", *lost, *end)
    console.print(grid)
    print_machine(console, result)
