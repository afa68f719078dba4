"""Ratios and table of `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import Measured, open_grid, print_machine
from rich.console import Console
from workers.serve_client import quantile

RATE, CLOSED_LOOP = "requests/s", "requests/s closed loop"
STEADY = {"ms p50 at 60 %": "p50", "ms p99 at 60 %": "p99", "ms client late": "late_p99"}
"""Units of the windows at 60 % of the rate, and the client's name of each."""
P99_STEADY = "ms p99 at 60 %"
USER_ONCE, BESIDE, TURNS = ", user once", " beside fastapi", " in turns"
CALL, PRIVATE, READY, FRESH = "one call", "private memory", "ready", "fresh"
BEYOND, LIMITED = "beyond memory", "colonnade 1/4"
FRESH_TAIL_SECONDS = 4.0
"""End of a window whose steps are left out: they may be answered with after it."""
WANTED = {
    "rate_at_p99_10ms": (">=", 500.0), "rate_at_p99_5ms_1": (">=", 1000.0), "fixed_cost_ms": ("<=", 0.2),
    "of_direct_call": (">=", 0.6), "fresh_seconds": ("<=", 2.0), "private_mib_per_worker": ("<=", 80.0),
    "ready_seconds": ("<=", 5.0), "p99_beyond_memory": ("<=", 3.0), "rate_vs_fastapi": (">=", 1.0),
    "rate_vs_fastapi_1": (">=", 1.0), "topk_vs_faiss": (">=", 1.0), "topk_vs_implicit": (">=", 1.0),
}  # fmt: skip
"""Limits of the ratios that have one."""
RATE_NAMES = {100: "rate_at_p99_10ms", 1: "rate_at_p99_5ms_1"}
SUFFIXES = {100: "", 1: "_1"}


def name_case(num_candidates: int) -> str:
    return "1 candidate" if num_candidates == 1 else f"{num_candidates} candidates"


def name_topk(batch_size: int) -> str:
    return f"top-k of {batch_size}"


def read_field_rows(export: Path) -> list[int]:
    """Return the number of rows of each field of an export."""
    return [table["rows"] for table in json.loads((export / "model.json").read_bytes())["tables"]]


def count_row_bytes(export: Path) -> int:
    """Return the bytes of all rows of an export, without their ids."""
    tables = json.loads((export / "model.json").read_bytes())["tables"]
    return sum(table["count"] * table["dim"] * 4 for table in tables)


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the figures by the names of their limits. Rates of a peer are medians over the peer's."""
    values = {(m.case, m.system, m.unit): m.values for m in measured}
    ratios: dict[str, float] = {}

    def add(name: str, case: str, unit: str, system: str = "colonnade") -> None:
        if (case, system, unit) in values:
            ratios[name] = median(values[case, system, unit])

    for count, suffix in SUFFIXES.items():
        add(RATE_NAMES[count], name_case(count), RATE)
        add(f"p99_ms_at_60_percent{suffix}", name_case(count), P99_STEADY)
    add("rate_at_p99_10ms_user_once", name_case(100) + USER_ONCE, RATE)
    add("fixed_cost_ms", CALL, "ms")
    for count, suffix in SUFFIXES.items():
        pairs = compare_turns(values, name_case(count) + TURNS, "direct calls", "candidates/s")
        if pairs:
            ratios[f"of_direct_call{suffix}"] = median(pairs)
    if delays := values.get((FRESH, "colonnade", "s")):
        ratios["fresh_seconds"] = quantile(sorted(delays), 0.99)
        ratios["fresh_seconds_median"] = median(delays)
    for suffix, model in (("", "demo"), ("_1gib", "large")):
        if private := values.get((f"{PRIVATE} {model}", "colonnade", "MiB")):
            ratios[f"private_mib_per_worker{suffix}"] = max(private)
    add("ready_seconds", READY, "s")
    if pairs := compare_turns(values, BEYOND, "colonnade", "ms p99", system=LIMITED):
        ratios["p99_beyond_memory"] = median(pairs)
    return ratios | peer_ratios(values)


Values = Mapping[tuple[str, str, str], list[float]]
"""Values of each case, system and unit."""


def compare_turns(
    values: Values, case: str, other: str, unit: str, system: str = "colonnade"
) -> list[float]:
    """Return a system's value over another's, for each turn of both."""
    ours, bases = (values.get((case, name, unit)) for name in (system, other))
    pairs = zip(ours, bases, strict=True) if ours and bases else ()
    return [value / base for value, base in pairs if base]


def peer_ratios(values: Values) -> dict[str, float]:
    """Return our rates over those of the peers: of servers within the limit and back to back, and of top-k."""
    ratios: dict[str, float] = {}
    for count, suffix in SUFFIXES.items():
        case = name_case(count) + BESIDE
        for name, peer, unit in (
            ("rate_vs_fastapi", "fastapi", RATE),
            ("closed_loop_vs_fastapi", "fastapi", CLOSED_LOOP),
            ("closed_loop_vs_fastapi_stacked", "fastapi stacked", CLOSED_LOOP),
        ):
            if pairs := compare_turns(values, case, peer, unit):
                ratios[name + suffix] = median(pairs)
    sizes = sorted({case for case, _, unit in values if unit == "queries/s"})
    for peer in ("faiss", "implicit"):
        by_case = {
            case: median(pairs)
            for case in sizes
            if (pairs := compare_turns(values, case, peer, "queries/s"))
        }
        if by_case:
            ratios[f"topk_vs_{peer}"] = min(by_case.values())
            ratios |= {
                f"topk_vs_{peer}_{case.split()[-1]}": ratio for case, ratio in by_case.items()
            }
    return ratios


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    """Print medians of all cases, then the ratios with their limits."""
    grid = open_grid(("case", "system", "unit", "median", "values"), texts=3)
    for m in measured:
        grid.add_row(m.case, m.system, m.unit, f"{m.median:,.2f}", f"{len(m.values)}")
    console.print(grid)
    for name, ratio in result["ratios"].items():
        console.print(f"{name}: {ratio:.3f}{describe_limit(name)}", soft_wrap=True)
    print_machine(console, result)


def describe_limit(name: str) -> str:
    """Return the limit of a ratio in words; "" if it has none."""
    if name not in WANTED:
        return ""
    relation, limit = WANTED[name]
    return f" (wanted {relation} {limit:g})"
