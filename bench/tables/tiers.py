"""Cases, ratios, bounds and tables of `bench tiers`, computed from its blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness import Measured, open_grid, print_machine, print_ratios
from rich.console import Console
from rich.table import Table as Grid
from workers.tier_stream import Shape

from colonnade import RowWiseAdagrad, Table
from colonnade.store.budget import slot_bytes
from tables.tier_programs import FOREKNOWING, KNOWING, LOOKING, Reads

SPARSE = " sparse only"
NETWORK = ""
PLAIN = " between commits"
COMMITS = " with commits"
BESIDE = " sparse only, beside peers"
WRITES = " writes"
TWO_TABLES = " two tables"
"""Kinds of blocks: what follows a case's name."""
FIRST_EPOCH = " first epoch"
LEVELS = " levels"
ALL = "colonnade all"
POLICIES = (*KNOWING, LOOKING, *FOREKNOWING)
COUNTS = {
    "device_reads": "reads/sample",
    "pages_read": "pages/sample",
    "rows_read": "rows read/sample",
    "rows_mapped": "rows from mapped/sample",
    "bytes_written": "bytes written/sample",
    "cpu_seconds": "processor us/sample",
    "stall_seconds": "stall us/sample",
}
"""A worker's counts, and their units in the report."""
SCALES = {"processor us/sample": 1e6, "stall us/sample": 1e6}


@dataclass
class OtherFigures:
    """Figures that ratios need beside samples/s."""

    model_bytes: dict[str, int] = field(default_factory=dict)  # by case
    raw: list[Reads] = field(default_factory=list)
    reader: list[Reads] = field(default_factory=list)
    writes: list[Mapping[str, float]] = field(default_factory=list)
    """Write amplification and utilisation of space, as workers/tiers_writes.py prints them."""
    commit_slowdowns: list[float] = field(default_factory=list)

    @staticmethod
    def of_measured(measured: Sequence[Measured], model_bytes: Mapping[str, int]) -> OtherFigures:
        """Compute the figures from the rows of a file."""
        result = OtherFigures(dict(model_bytes))
        values = {(m.case, m.system, m.unit): m.values for m in measured}
        for (case, system, unit), rates in values.items():
            if unit == "reads/s":
                pairs = zip(rates, values[case, system, "cores"], strict=True)
                reads = [Reads(*pair) for pair in pairs]
                (result.raw if system == "tier_device" else result.reader).extend(reads)
            elif unit == "samples/s" and case.endswith(COMMITS):
                plain = values[case.removesuffix(COMMITS) + PLAIN, system, unit]
                seconds = {PLAIN: [1 / r for r in plain], COMMITS: [1 / r for r in rates]}
                result.add_commits(case, seconds)
        writes = {
            unit: rates[0] for (case, _, unit), rates in values.items() if case.endswith(WRITES)
        }
        if writes:
            result.writes.append(writes)
        return result

    def add_commits(self, case: str, seconds: Mapping[str, Sequence[float]]) -> None:
        """Compare neighbouring blocks: a machine that slows down meanwhile slows both."""
        pairs = zip(seconds[PLAIN], seconds[COMMITS], strict=True)
        self.commit_slowdowns.append(median(commits / plain for plain, commits in pairs))

    @property
    def device_reads(self) -> float:
        """Reads/s of the bare device; infinite where nothing was measured."""
        return median(r.per_second for r in self.raw) if self.raw else math.inf

    @property
    def read_seconds(self) -> float:
        """Processor seconds of each read of our reader; 0 where nothing was measured."""
        return median(r.cores / r.per_second for r in self.reader) if self.reader else 0.0


def reader_cases_of(
    case: str,
    device: Sequence[Reads],
    seconds: Sequence[float],
    counts: Sequence[Mapping[str, float]],
) -> list[Measured]:
    reader = [
        Reads(c["device_reads"] / s, c["cpu_seconds"] / s)
        for s, c in zip(seconds, counts, strict=True)
    ]
    systems = (("tier_device", device), ("colonnade's reader", reader))
    rates = [
        Measured(f"{case} reads", who, "reads/s", [r.per_second for r in reads])
        for who, reads in systems
    ]
    cores = [
        Measured(f"{case} reads", who, "cores", [r.cores for r in reads]) for who, reads in systems
    ]
    return rates + cores


def model_bytes(shape: Shape, dim: int) -> int:
    """Return the bytes of all rows in memory, of which budgets are fractions."""
    optimizer = RowWiseAdagrad(lr=0.02)
    return sum(
        rows * slot_bytes(Table("C", dim, rows=rows, optimizer=optimizer))
        for rows in shape.cardinalities
    )


def cases_of(
    name: str,
    system: str,
    seconds: Mapping[str, Sequence[float]],
    counts: Mapping[str, Sequence[Mapping[str, float]]],
    batch_size: int,
) -> list[Measured]:
    rows = []
    for kind, spent in seconds.items():
        case = name + kind
        rows.append(Measured(case, system, "samples/s", [batch_size / s for s in spent]))
        for key, unit in COUNTS.items():
            values = [SCALES.get(unit, 1.0) * c[key] / batch_size for c in counts[kind] if key in c]
            if values:
                rows.append(Measured(case, system, unit, values))
    return rows


def policies_of(
    name: str, misses: Mapping[tuple[str, int], list[int]], span: slice, batch_size: int
) -> list[Measured]:
    """Row misses of simulated policies over the batches that were measured, in ten parts."""
    rows = []
    for (policy, fraction), by_batch in misses.items():
        part = by_batch[span]
        size = max(1, len(part) // 10)
        values = [
            sum(part[i : i + size]) / size / batch_size
            for i in range(0, len(part) - size + 1, size)
        ]
        rows.append(Measured(name, f"{policy} 1/{fraction}", "rows missed/sample", values))
    return rows


class Figures:
    """Medians by (case, system, unit)."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self.median = {(m.case, m.system, m.unit): m.median for m in measured}
        self.rates = {k[:2]: v for k, v in self.median.items() if k[2] == "samples/s"}

    def cases(self) -> list[str]:
        """Return the names of cases, without the kinds of blocks that follow them."""
        kinds = (SPARSE, PLAIN, COMMITS, BESIDE)
        names = [case for case, _ in self.rates if not any(case.endswith(k) for k in kinds)]
        return list(dict.fromkeys(names))

    def budgets(self, case: str) -> list[int]:
        systems = [s for c, s in self.rates if c == case and s.startswith("colonnade 1/")]
        return [int(s.split("/")[1]) for s in systems]

    def of_all(self, case: str, fraction: int) -> float | None:
        ours, whole = self.rates.get((case, f"colonnade 1/{fraction}")), self.rates.get((case, ALL))
        return None if ours is None or whole is None else ours / whole

    def rows_read(self, case: str, system: str) -> float | None:
        """Return the rows read from disk per sample."""
        return self.median.get((case + SPARSE, system, "rows read/sample"))

    def missed(self, case: str, policy: str, fraction: int) -> float | None:
        return self.median.get((case, f"{policy} 1/{fraction}", "rows missed/sample"))

    def best_known(self, case: str, fraction: int) -> float | None:
        misses = [self.missed(case, policy, fraction) for policy in (*KNOWING, LOOKING)]
        known = [m for m in misses if m is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Bound:
    """Samples/s without a network that nothing could exceed."""

    device: float
    processor: float

    @property
    def samples(self) -> float:
        return min(self.device, self.processor)

    @property
    def which(self) -> str:
        return "device" if self.device < self.processor else "processor"


def bound_of(
    figures: Figures, others: OtherFigures, case: str, fraction: int, cores: int
) -> Bound | None:
    """Device: its reads/s over our reads/sample. Processor: a sample in memory takes 1 / (rate all in memory), and
    each read some processor time of our reader, spread over the cores."""
    reads = figures.median.get((case + SPARSE, f"colonnade 1/{fraction}", "reads/sample"))
    whole = figures.rates.get((case + SPARSE, ALL))
    if reads is None or whole is None:
        return None
    device = others.device_reads / reads if reads else math.inf
    return Bound(device, 1 / (1 / whole + reads * others.read_seconds / cores))


def ratios_of(
    measured: Sequence[Measured], others: OtherFigures, cores: int, main_skew: float
) -> dict[str, float]:
    """Each is the worst of its cases, which follow it by name."""
    figures, ratios = Figures(measured), {}
    main = [c for c in figures.cases() if c.endswith(f"skew {main_skew}") and FIRST_EPOCH not in c]
    by_case: dict[str, dict[str, float]] = {}

    def add(name: str, case: str, value: float | None) -> None:
        if value is not None:
            by_case.setdefault(name, {})[f"{name}_{slug(case)}"] = value

    for case in figures.cases():
        for n in figures.budgets(case):
            if case not in main or n != 8:
                value = figures.of_all(case, n)
                if value is not None:
                    ratios[f"throughput_of_all_dram_at_1_{n}_{slug(case)}"] = value
    for case in main:
        add("throughput_of_all_dram_at_1_8", case, figures.of_all(case, 8))
        bound = bound_of(figures, others, case, 8, cores)
        rate = figures.rates.get((case + SPARSE, "colonnade 1/8"))
        if bound is not None and rate is not None:
            add("of_bound", case, rate / bound.samples)
        for n in figures.budgets(case):
            ours, best = (
                figures.rows_read(case, f"colonnade 1/{n}"),
                figures.best_known(case, n),
            )
            if ours and best is not None:
                add("of_best_online_policy", f"{case} 1_{n}", best / ours)
        lru, belady = figures.missed(case, "lru", 8), figures.missed(case, "belady", 8)
        hinted = figures.rows_read(case, "colonnade hints 1/8")
        if lru is not None and belady is not None and hinted is not None:
            add("gap_to_belady_closed", case, (lru - hinted) / (lru - belady))
        beside = figures.rates.get((case + BESIDE, "colonnade 1/8"))
        for peer, name in (
            ("rocksdict", "vs_rocksdb"), ("rocksdict 8 shards", "vs_rocksdb_8_shards"), ("mapped", "vs_mmap"),
        ):  # fmt: skip
            peer_rate = figures.rates.get((case + SPARSE, f"{peer} 1/8"))
            if peer_rate is not None and beside is not None:
                add(name, case, beside / peer_rate)
    for name, values in by_case.items():
        ratios |= {name: min(values.values()), **values}
    if others.reader and others.raw:
        ratios["ssd_reads_of_raw_iops"] = (
            median(r.per_second for r in others.reader) / others.device_reads
        )
        ratios["ssd_reads_cores"] = median(r.cores for r in others.reader)
    if others.writes:
        ratios["write_amplification"] = max(w["of_bytes"] for w in others.writes)
        ratios["write_amplification_rows"] = max(w["of_rows"] for w in others.writes)
        ratios["write_amplification_utilisation"] = min(w["utilisation"] for w in others.writes)
    if others.commit_slowdowns:
        ratios["commit_slowdown"] = max(others.commit_slowdowns)
    return ratios


def slug(case: str) -> str:
    """`D=16 skew 1.1` -> `d16_skew_1_1`"""
    return case.lower().replace("=", "").replace(" ", "_").replace(".", "_")


def print_result(
    console: Console,
    measured: Sequence[Measured],
    others: OtherFigures,
    result: Mapping[str, Any],
    cores: int,
) -> None:
    figures = Figures(measured)
    for case in figures.cases():
        console.print(systems_grid(figures, others, case, cores))
        if any((case, f"{p} 1/8", "rows missed/sample") in figures.median for p in POLICIES):
            console.print(policies_grid(figures, case))
    explain_bound(console, others, cores)
    print_ratios(console, result)
    print_machine(console, result)


def systems_grid(figures: Figures, others: OtherFigures, case: str, cores: int) -> Grid:
    model = case.removesuffix(FIRST_EPOCH).removesuffix(LEVELS)
    size = others.model_bytes.get(model, 0) / 2**30
    headings = (
        "system", "samples/s", "of all", "alone", "of all",
        "reads", "pages", "rows read", "mapped", "written", "us", "stall us", "bound", "of bound",
    )  # fmt: skip
    grid = open_grid(headings, title=f"{case}: {size:.1f} GiB in memory")
    whole = [figures.rates.get((case + kind, ALL)) for kind in (NETWORK, SPARSE)]
    for system in dict.fromkeys(s for c, s in figures.rates if c in (case, case + SPARSE)):
        rates = [figures.rates.get((case + kind, system)) for kind in (NETWORK, SPARSE)]
        cells = []
        for rate, all_rate in zip(rates, whole, strict=True):
            cells.append("" if rate is None else f"{rate:,.0f}")
            cells.append("" if rate is None or all_rate is None else f"{rate / all_rate:.2f}")
        for unit, digits in zip(COUNTS.values(), (3, 3, 3, 3, 0, 2, 2), strict=True):
            value = figures.median.get((case + SPARSE, system, unit))
            cells.append("" if value is None else f"{value:.{digits}f}")
        bound = None
        if system.startswith("colonnade 1/") and case == model:
            bound = bound_of(figures, others, case, int(system.split("/")[1]), cores)
        if bound is not None and rates[1] is not None:
            cells += [f"{bound.samples:,.0f} {bound.which}", f"{rates[1] / bound.samples:.2f}"]
        grid.add_row(system, *cells)
    return grid


def policies_grid(figures: Figures, case: str) -> Grid:
    title = "rows missed per sample, simulated; ours: rows read"
    grid = open_grid(("memory", *POLICIES, "ours", "with hints", "of best"), title=title)
    for n in figures.budgets(case):
        cells = [figures.missed(case, policy, n) for policy in POLICIES]
        ours = figures.rows_read(case, f"colonnade 1/{n}")
        cells += [ours, figures.rows_read(case, f"colonnade hints 1/{n}")]
        best = figures.best_known(case, n)
        share = f"{best / ours:.2f}" if best is not None and ours else ""
        words = ["" if cell is None else f"{cell:.3f}" for cell in cells]
        grid.add_row(f"1/{n}", *words, share)
    return grid


def explain_bound(console: Console, others: OtherFigures, cores: int) -> None:
    if others.raw and others.reader:
        console.print(
            f"bound, without a network: the smaller of device ({others.device_reads:,.0f} bare 4 KiB reads/s over "
            f"reads per sample) and processor (a sample all in memory, and {1e6 * others.read_seconds:.1f} us per read "
            f"spread over {cores} cores)",
            soft_wrap=True,
        )
