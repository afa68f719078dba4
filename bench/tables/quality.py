"""Tables of `bench quality_partials`: differences of AUC with paired intervals.

An interval is that of a paired bootstrap. Two arms have scored the same blocks of samples, so what is resampled is the
difference of their AUCs on a block; runs of RUN neighbouring blocks are drawn together, for neighbours share their
popular ids, and from each seed's stream as many as it has. It says what another stream of this kind would change. What
another beginning of training would change is seen from the seeds beside it.

Legend: S seeds, K scored blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from harness import Measured, print_machine
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid

AUC, TAIL, LOSS, MISSED = "AUC", "AUC of the tail", "log loss", "updates missed"
BASE, SMALL, CEILING = "synchronous", "synchronous, 256", "ceiling"
PARTS = (("auc", AUC, False), ("late_auc", AUC, True), ("tail_auc", TAIL, False))
"""Parts of the stream: all scored blocks, those of its second half, those after it."""
LOST = ("lost", "95 %", "by seed", "lost late", "on the tail")
RUN = 8
RESAMPLES = 10_000
LEVEL = 0.95

Floats = NDArray[np.float64]


def interval(differences: Sequence[Floats], *, seed: int = 0) -> tuple[float, float, float]:
    """Return (mean, low, high) of differences (K,) by seed: the bootstrap's 2.5 and 97.5 % quantiles."""
    random, means, weights = np.random.default_rng(seed), [], []
    for blocks in differences:
        run = min(RUN, len(blocks))
        runs = np.lib.stride_tricks.sliding_window_view(blocks, run).mean(1)
        drawn = random.integers(len(runs), size=(RESAMPLES, -(-len(blocks) // run)))
        means.append(runs[drawn].mean(1))
        weights.append(len(blocks))
    resampled = np.average(np.stack(means), axis=0, weights=weights)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(np.concatenate(list(differences)).mean()), float(low), float(high)


def differences_of(
    measured: Sequence[Measured],
    kind: str,
    arm: str,
    unit: str,
    *,
    half: bool = False,
    base: str = BASE,
) -> list[Floats]:
    """`base` less `arm`, (K,) for each seed that has both; `half`: of the stream's second half."""
    values = {(m.case, m.system): np.array(m.values) for m in measured if m.unit == unit}
    results = []
    for (case, system), other in values.items():
        if system == arm and case.startswith(f"{kind} seed") and (case, base) in values:
            blocks = values[case, base] - other
            results.append(blocks[len(blocks) // 2 :] if half else blocks)
    return results


def arms_of(measured: Sequence[Measured]) -> dict[str, list[str]]:
    """Return arms with scores by model, in the order in which they were trained."""
    results: dict[str, list[str]] = {}
    for m in measured:
        kind, _, which = m.case.partition(" ")
        if m.unit == AUC and which.startswith("seed"):
            arms = results.setdefault(kind, [])
            if m.system not in arms:
                arms.append(m.system)
    return results


def bases_of(arm: str) -> list[str]:
    """Return the arms it is compared with: synchronous training, and that of as small batches."""
    if arm in (BASE, CEILING):
        return []
    return [BASE, SMALL] if arm.endswith(" x 256") else [BASE]


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the AUC by which synchronous training is ahead of each arm; "... low" and "... high" are the interval's
    ends."""
    ratios: dict[str, float] = {}
    for kind, arms in arms_of(measured).items():
        for arm, base in [(value, base) for value in arms for base in bases_of(value)]:
            for name, unit, half in PARTS:
                if result := differences_of(measured, kind, arm, unit, half=half, base=base):
                    text = f"{name}_lost {kind} {arm} against {base}"
                    mean, low, high = interval(result)
                    ratios |= {text: mean, f"{text} low": low, f"{text} high": high}
    return ratios


def print_result(
    console: Console, measured: Sequence[Measured], result: Mapping[str, object]
) -> None:
    """One line per arm: AUC, and what is lost against synchronous training, with intervals and each seed's mean."""
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "arm", "rows lr", "missed", "AUC", "against", *LOST):
        is_words = heading in ("model", "arm", "against")
        grid.add_column(heading, justify="left" if is_words else "right", no_wrap=True)
    for kind, arms in arms_of(measured).items():
        for arm in arms:
            for base in bases_of(arm) or [""]:
                grid.add_row(*_line(measured, kind, arm, base))
    console.print(grid)
    print_machine(console, result)


def _line(measured: Sequence[Measured], kind: str, arm: str, base: str) -> list[str]:
    own = [m for m in measured if m.system == arm and m.case.startswith(f"{kind} seed")]

    def mean(unit: str) -> float:
        return float(np.mean([np.mean(m.values) for m in own if m.unit == unit] or [np.nan]))

    line = [kind, arm, f"{mean('rows lr'):g}", f"{mean(MISSED):.1f}", f"{mean(AUC):.4f}"]
    result = differences_of(measured, kind, arm, AUC, base=base)
    if not result:
        return line
    lost, low, high = interval(result)
    seeds = " ".join(f"{blocks.mean():+.4f}" for blocks in result)
    line += [base, f"{lost:+.4f}", f"{low:+.4f} .. {high:+.4f}", seeds]
    for _, unit, half in PARTS[1:]:
        parts = differences_of(measured, kind, arm, unit, half=half, base=base)
        lost, low, high = interval(parts)
        line.append(f"{lost:+.4f} ({low:+.4f} .. {high:+.4f})")
    return line
