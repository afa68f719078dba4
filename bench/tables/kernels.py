"""Ratios and table of `bench kernels`.

A ratio is the geometric mean over its points, unless its name ends in `_min` or `_max`: the worst point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from harness import Measured, open_grid
from rich.console import Console

OURS = "colonnade"
ROWWISE = "rowwise_adagrad"
API_BATCH_SIZE = 4096
CASE = re.compile(r"D=(\d+) (\S+) (uniform|zipf \S+) (\S+)(?: beside (.+))? (\S+)")
"""A `Point` and a phase."""


@dataclass(frozen=True)
class Point:
    """Width, lookups, ids and optimizer with which systems were measured in turns."""

    dim: int
    workload: str  # "one-hot", "20-hot", "sequence"; "api": one-hot through the Python API
    ids: str
    optimizer: str
    beside: str = ""
    """The peers, where the same was measured beside several."""

    def __str__(self) -> str:
        words = f"D={self.dim} {self.workload} {self.ids} {self.optimizer}"
        return f"{words} beside {self.beside}" if self.beside else words


@dataclass
class Figures:
    """Seconds per step of every block, by point, system and phase."""

    seconds: dict[tuple[Point, str], dict[str, list[float]]] = field(default_factory=dict)

    @staticmethod
    def of_measured(measured: Iterable[Measured]) -> Figures:
        """Read back what `measured` makes."""
        figures = Figures()
        for row in measured:
            case = CASE.fullmatch(row.case)
            assert case is not None, f"no case of this bench: {row.case!r}"
            dim, workload, ids, optimizer, beside, phase = case.groups(default="")
            point = Point(int(dim), workload, ids, optimizer, beside)
            by_phase = figures.seconds.setdefault((point, row.system), {})
            by_phase[phase] = [ms / 1e3 for ms in row.values]
        return figures

    def points(self, system: str, peer: str = OURS) -> list[Point]:
        """Return the points at which both were measured."""
        return [p for p, name in self.seconds if name == system and (p, peer) in self.seconds]

    def median(self, point: Point, system: str, *phases: str) -> float:
        """Return the median over blocks of these phases' sum, in seconds per step; of all phases if none is named."""
        by_phase = self.seconds[point, system]
        return median(map(sum, zip(*(by_phase[name] for name in phases or by_phase), strict=True)))

    def update(self, point: Point, system: str) -> float:
        return self.median(
            point, system, *(n for n in self.seconds[point, system] if n != "forward")
        )

    def forward(self, point: Point, system: str) -> float:
        return self.median(point, system, "forward")

    def rows(self, point: Point, system: str) -> float:
        return self.median(point, system, "rows")

    def step(self, point: Point, system: str) -> float:
        return self.median(point, system)

    def measured(self) -> list[Measured]:
        """Every phase, in ms per step."""
        return [
            Measured(f"{point} {phase}", system, "ms/step", [round(1e3 * s, 4) for s in values])
            for (point, system), by_phase in self.seconds.items()
            for phase, values in by_phase.items()
        ]


@dataclass(frozen=True)
class Ratio:
    """`of` gives the ratio of a point in `points`. `worst` is min or max, `min_name` its own name if it has one."""

    name: str
    points: Callable[[Figures], Iterable[Point]]
    of: Callable[[Figures, Point], float]
    wanted: float
    wanted_worst: float | None = None
    worst: Callable[..., Point] = min

    def values(self, figures: Figures) -> dict[Point, float]:
        return {point: self.of(figures, point) for point in self.points(figures)}


def _pooled(*optimizers: str, system: str) -> Callable[[Figures], Iterable[Point]]:
    return lambda f: [
        p
        for p in f.points(system)
        if p.workload not in ("sequence", "api") and p.optimizer in optimizers
    ]


def _sequences(*optimizers: str, system: str) -> Callable[[Figures], Iterable[Point]]:
    return lambda f: [
        p for p in f.points(system) if p.workload == "sequence" and p.optimizer in optimizers
    ]


def _planned(figures: Figures) -> list[Point]:
    """Each case once: beside torch, Adagrad's was measured again."""
    return [p for p in figures.points(OURS) if p.beside != "torch"]


RATIOS = (
    Ratio(
        "forward_vs_fbgemm", _pooled(ROWWISE, system="fbgemm"),
        lambda f, p: f.forward(p, "fbgemm") / f.forward(p, OURS), 4.5, 2.3,
    ),
    Ratio(
        "update_vs_fbgemm_rowwise_adagrad", _pooled(ROWWISE, system="fbgemm"),
        lambda f, p: f.update(p, "fbgemm") / f.update(p, OURS), 3.8, 2.5,
    ),
    Ratio(
        "update_vs_fbgemm_other_optimizers", _pooled("sgd", "adagrad", system="fbgemm"),
        lambda f, p: f.update(p, "fbgemm") / f.update(p, OURS), 9, 5,
    ),
    Ratio(
        "sequence_backward_vs_fbgemm", _sequences(ROWWISE, system="fbgemm"),
        lambda f, p: f.update(p, "fbgemm") / f.update(p, OURS), 20,
    ),
    Ratio(
        "step_vs_torch_embeddingbag", _pooled("sgd", "adagrad", system="torch"),
        lambda f, p: f.step(p, "torch") / f.step(p, OURS), 9,
    ),
    Ratio(
        "forward_of_roofline", lambda f: f.points("roofline"),
        lambda f, p: f.forward(p, "roofline") / f.forward(p, OURS), 0.95,
    ),
    Ratio(
        "update_of_roofline", lambda f: f.points("roofline"),
        lambda f, p: f.rows(p, "roofline") / f.rows(p, OURS), 0.8,
    ),
    Ratio(
        "planning_of_update", _planned,
        lambda f, p: f.median(p, OURS, "plan") / f.rows(p, OURS), 0.5, worst=max,
    ),
    Ratio(
        "hashed_vs_direct", lambda f: f.points("open"),
        lambda f, p: f.step(p, OURS) / f.step(p, "open"), 0.7,
    ),
    Ratio(
        "sparse_samples_per_second", lambda f: f.points("api", "api"),
        lambda f, p: API_BATCH_SIZE / f.step(p, "api"), 900_000,
    ),
)  # fmt: skip
"""Ratios of the bench, with the values that are wanted; `worst` is max where less is better."""


def ratios_of(figures: Figures) -> dict[str, float]:
    """Every ratio that has a point, and its worst as NAME_min or NAME_max."""
    ratios: dict[str, float] = {}
    for ratio in RATIOS:
        if values := ratio.values(figures):
            ratios[ratio.name] = geometric_mean(list(values.values()))
            ratios[f"{ratio.name}_{ratio.worst.__name__}"] = ratio.worst(values.values())
    return ratios


def print_figures(console: Console, figures: Figures) -> None:
    """One line per case: our time, and what others' time is as a multiple of it."""
    table = open_grid(HEADINGS, texts=0, title=TITLE)
    cases = dict.fromkeys((p.dim, p.workload, p.ids) for p in figures.points(OURS))
    for case in cases:
        table.add_row(*_line(figures, *case))
    console.print(table)
    for point in figures.points("api", "api"):
        rate = API_BATCH_SIZE / figures.step(point, "api")
        phases = ", ".join(
            f"{name} {1e3 * figures.median(point, 'api', name):.2f}"
            for name in figures.seconds[point, "api"]
        )
        console.print(f"Python API, open tables, {point}: {rate:,.0f} samples/s (ms: {phases})")


TITLE = (
    "ms of Colonnade; /f, /t: FBGEMM's, torch's time as a multiple of it; /roof: the bare loop's.\n"
    "upd: planning, slots and update; plan: planning as a share of the update alone; open: the whole step of\n"
    "vocabulary tables as a share of that of open tables."
)
HEADINGS = (
    "D", "lookups", "ids", "fwd", "/f", "/roof", "rowwise upd", "/f", "/roof", "plan", "open",
    "SGD upd", "/f", "step/t", "Adagrad upd", "/f", "step/t",
)  # fmt: skip


def _line(figures: Figures, dim: int, workload: str, ids: str) -> list[str]:
    def ms(seconds: Callable[[Point, str], float], optimizer: str) -> str:
        points = [p for p in case_points if p.optimizer == optimizer]
        return f"{1e3 * seconds(points[0], OURS):.2f}" if points else ""

    def over(
        seconds: Callable[[Point, str], float], optimizer: str, other: str, digits: int = 1
    ) -> str:
        for p in case_points:
            if p.optimizer == optimizer and (p, other) in figures.seconds:
                return f"{seconds(p, other) / seconds(p, OURS):.{digits}f}"
        return ""

    case = dim, workload, ids
    case_points = [p for p in figures.points(OURS) if (p.dim, p.workload, p.ids) == case]
    plan = is_open = ""
    for rowwise in (p for p in case_points if p.optimizer == ROWWISE):
        plan = f"{figures.median(rowwise, OURS, 'plan') / figures.rows(rowwise, OURS):.2f}"
        if (rowwise, "open") in figures.seconds:
            is_open = f"{figures.step(rowwise, OURS) / figures.step(rowwise, 'open'):.2f}"
    return [
        str(dim), workload, ids,
        ms(figures.forward, ROWWISE), over(figures.forward, ROWWISE, "fbgemm"),
        over(figures.forward, ROWWISE, "roofline", 2),
        ms(figures.update, ROWWISE), over(figures.update, ROWWISE, "fbgemm"),
        over(figures.rows, ROWWISE, "roofline", 2), plan, is_open,
        *(
            word
            for optimizer in ("sgd", "adagrad")
            for word in (
                ms(figures.update, optimizer), over(figures.update, optimizer, "fbgemm"),
                over(figures.step, optimizer, "torch"),
            )
        ),
    ]  # fmt: skip


def print_ratios(console: Console, figures: Figures) -> None:
    for ratio in RATIOS:
        if not (values := ratio.values(figures)):
            console.print(f"{ratio.name}: not measured")
            continue
        sign = "<=" if ratio.worst is max else ">="
        worst = ratio.worst(values, key=values.__getitem__)
        wanted = f", wanted {sign} {ratio.wanted_worst:g}" if ratio.wanted_worst else ""
        console.print(
            f"{ratio.name}: {_short(geometric_mean(list(values.values())))} (wanted {sign} "
            f"{ratio.wanted:,g}); worst {_short(values[worst])}{wanted}, at {worst}",
            soft_wrap=True,
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
