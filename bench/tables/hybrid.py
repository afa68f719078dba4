"""Tables of `bench hybrid`: part of the shorter of computing and communicating that is hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import geometric_mean
from typing import Any

from harness import ROOT, Measured, open_grid, print_machine
from rich.console import Console

from tables.exchange import EXPOSED, LATE, PROCESSOR, is_peer, names_of, steps_of

ALONE = 0
ALIKE = 3.0
"""Computing and communicating that differ by more have little to hide of each other, and much noise for it."""
WANTED = 0.7
CORES = " cores"
"""Number of processors that all ranks share, by world and workload."""


@dataclass(frozen=True)
class Overlap:
    """One case, in ms a step."""

    case: str
    sync: float
    best_sync: str
    late: float
    best_late: str
    four_late: float
    """Time of the best plan that reads four steps late; nan: none was measured."""
    compute: float
    communication: float
    peer: float | None
    processors: float | None
    """Time that the synchronous step needs if all processors are always busy. None: not recorded."""

    @property
    def hideable(self) -> float:
        """Return the time that a perfect overlap saves."""
        return self.sync - max(self.compute, self.communication)

    @property
    def won(self) -> float:
        return (self.sync - self.late) / self.hideable

    @property
    def reached(self) -> float | None:
        """Likewise of what processors leave to be hidden, which compute and communicate; None: nothing."""
        remaining = self.sync - max(self.compute, self.communication, self.processors or 0.0)
        return (
            None
            if self.processors is None or remaining <= 0
            else (self.sync - self.late) / remaining
        )

    @property
    def is_judged(self) -> bool:
        least, limit = sorted((self.compute, self.communication))
        return self.hideable > 0 and limit <= ALIKE * least


def name_of(hidden: int) -> str:
    """Return the name of a workload."""
    return f"{hidden} units"


def overlaps(measured: Sequence[Measured]) -> list[Overlap]:
    """Return the overlap of every case with dense work whose exchange was measured alone at the same rate."""
    results = []
    exposed = {(m.case, m.system): m.median for m in measured if m.case.endswith(EXPOSED)}
    processor = {(m.case, m.system): m.median for m in measured if m.case.endswith(PROCESSOR)}
    cores = {m.case: m.median for m in measured if m.case.endswith(CORES)}
    for case in names_of(measured):
        alone = re.sub(r"\d+ units", name_of(ALONE), case)
        steps, bare = steps_of(measured, case), steps_of(measured, alone)
        ours = {name: ms for name, ms in steps.items() if not is_peer(name)}
        sync = {name: ms for name, ms in ours.items() if LATE not in name and name in bare}
        late = {name: ms for name, ms in ours.items() if LATE in name}
        if case == alone or not sync or not late:
            continue
        name, best = min(sync, key=sync.__getitem__), min(late, key=late.__getitem__)
        shared = cores.get(case.rsplit(" ", 2)[0] + CORES)
        peers = [ms for peer, ms in steps.items() if is_peer(peer)]
        results.append(
            Overlap(
                case, sync[name], name, late[best], best,
                min((ms for plan, ms in late.items() if f"{LATE}(4)" in plan), default=nan),
                sync[name] - exposed.get((case + EXPOSED, name), 0.0),
                bare[name], min(peers, default=None),
                None if shared is None else processor[case + PROCESSOR, name] / shared,
            )
        )  # fmt: skip
    return results


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    actual = overlaps(measured)
    ratios = {f"hybrid_vs_sync_best {result.case}": result.sync / result.late for result in actual}
    if actual:
        ratios["hybrid_vs_sync_best"] = min(ratios.values())
    judged = {result.case: result.won for result in actual if result.is_judged}
    ratios |= {f"overlap_won {case}": won for case, won in judged.items()}
    if judged:
        ratios["overlap_won"] = min(judged.values())
    reached = {result.case: result.reached for result in actual if result.is_judged}
    ratios |= {f"overlap_reached {case}": x for case, x in reached.items() if x is not None}
    if peers := [result.peer / result.late for result in actual if result.peer is not None]:
        ratios["hybrid_vs_torchrec_best"] = min(peers)
    if (steps := read_steps_share()) is not None and judged:
        times = {r.case: r.sync / r.four_late / steps for r in actual if r.is_judged}
        ratios |= {f"time_to_score_bounded4 {case}": ratio for case, ratio in times.items()}
        ratios["time_to_score_bounded4_mean"] = geometric_mean(times.values())
        ratios["time_to_score_bounded4_worst"] = min(times.values())
    return ratios


def read_steps_share() -> float | None:
    """Return the steps after which reads four steps late have synchronous training's last score, over those of that
    training itself, by `bench quality`; None where that was not measured."""
    path = ROOT / "bench" / "results" / "quality_late.json"
    if not path.exists():
        return None
    ratios = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    late, synchronous = (
        ratios.get(f"steps_to_score stream adagrad {arm}") for arm in (f"{LATE}(4)", "synchronous")
    )
    return late / synchronous if late and synchronous else None


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    headings = (
        "case",
        "synchronous",
        "ms",
        "bounded",
        "ms",
        "compute",
        "links",
        "processors",
        "torchrec",
        "won",
        "reached",
    )
    grid = open_grid(headings, texts=("case", "synchronous", "bounded"), title="ms/step")
    for overlap in overlaps(measured):
        grid.add_row(
            overlap.case, overlap.best_sync, f"{overlap.sync:.1f}", overlap.best_late, f"{overlap.late:.1f}",
            f"{overlap.compute:.1f}", f"{overlap.communication:.1f}",
            *(f"{x:.1f}" if x is not None else "" for x in (overlap.processors, overlap.peer)),
            *(f"{x:.2f}" if x is not None and overlap.is_judged else "" for x in (overlap.won, overlap.reached)),
        )  # fmt: skip
    console.print(grid)
    for name, value in result["ratios"].items():
        wanted = f" (wanted >= {WANTED})" if name.startswith("overlap_won") else ""
        console.print(f"{name}: {value:.2f}{wanted}", soft_wrap=True)
    print_machine(console, result)
