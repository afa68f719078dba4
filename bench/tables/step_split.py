"""`bench train`: where a step's time goes, in ms, from the step and from its parts measured alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import Measured

SPARSE_ONLY = " sparse only"
"""Follows a case's name where there is no dense network."""
MALLOC = " malloc"
"""Follows a case's name where systems are compared with and without our settings of malloc."""
SPLIT = " split "
"""Separator between the name of a case and that of a part."""
INTERACTION, PRODUCTS = " interaction", " products"
PARTS = ("step", "embeddings", "interaction", "products", "allocator", "rest")
"""rest: the loss, what is between the parts, and caches that a part alone finds warm."""


@dataclass(frozen=True)
class Sources:
    """Cases and systems whose times are the parts of one system's step."""

    step: str
    """The fastest whose name is this or, before a *, begins so."""
    embeddings: str
    network: str
    shipped: str = ""
    """System with malloc as shipped, whose step is compared with that of `ours`; "": the step has our settings."""
    ours: str = ""
    suffix: str = ""
    """Suffix of the step's case."""


SHIPPED = "colonnade, malloc as shipped"
TORCH, TORCHREC = "torch, our malloc", "torchrec, our malloc"
PLANNER = "torchrec helped, planner"
SOURCES = {
    "colonnade": Sources("colonnade", "colonnade", "colonnade"),
    SHIPPED: Sources(SHIPPED, "colonnade", "colonnade", SHIPPED, "colonnade", MALLOC),
    "torch": Sources("torch", TORCH, TORCH, "torch", TORCH),
    "torch helped": Sources("torch helped", "torch helped", "torch helped"),
    "torchrec": Sources("torchrec", "torchrec helped", TORCH, "torchrec", TORCHREC),
    "torchrec helped": Sources("torchrec helped*", "torchrec helped", "torch helped"),
}
"""TorchRec runs torch's network, so its parts are measured there. Its helped embeddings differ by malloc alone."""


def find_best(times: dict[tuple[str, str], float], case: str, pattern: str) -> tuple[float, str]:
    """Return the shortest time of a case and its system, (inf, "") if there is none. A pattern that ends in * matches
    every name that begins so."""
    prefix = pattern.rstrip("*")
    matching = [
        (time, system)
        for (name, system), time in times.items()
        if name == case and (system == pattern or (prefix != pattern and system.startswith(prefix)))
    ]
    return min(matching, default=(float("inf"), ""))


def split_step(
    measured: Sequence[Measured], dim: int, batch_size: int
) -> dict[str, dict[str, float]]:
    """Map each system that has all its parts to ms by part; `rest` makes them the step's time."""
    times = {
        (m.case, m.system): 1e3 * batch_size / m.median for m in measured if m.unit == "samples/s"
    }
    case = f"D={dim}"
    splits: dict[str, dict[str, float]] = {}
    for name, sources in SOURCES.items():
        step, fastest = find_best(times, case + sources.suffix, sources.step)
        keys = {
            "embeddings": (
                case + SPARSE_ONLY,
                PLANNER if fastest == PLANNER else sources.embeddings,
            ),
            "interaction": (case + INTERACTION, sources.network),
            "products": (case + PRODUCTS, sources.network),
        }
        malloc = [(case + MALLOC, system) for system in (sources.shipped, sources.ours) if system]
        if not fastest or not {*keys.values(), *malloc} <= times.keys():
            continue
        parts = {part: times[key] for part, key in keys.items()}
        parts["allocator"] = times[malloc[0]] - times[malloc[1]] if malloc else 0.0
        splits[name] = {"step": step, **parts, "rest": step - sum(parts.values())}
    return splits


def split_rows(measured: Sequence[Measured], dim: int, batch_size: int) -> list[Measured]:
    """Rows of a report: ms of each part of each system's step."""
    return [
        Measured(f"D={dim}{SPLIT}{part}", system, "ms/step", [round(ms, 3)])
        for system, parts in split_step(measured, dim, batch_size).items()
        for part, ms in parts.items()
    ]


def saved_by_part(splits: dict[str, dict[str, float]], dim: int) -> dict[str, float]:
    """ms that a step of ours saves against each peer, as a whole and by part."""
    ours = splits.get("colonnade")
    return {
        f"saved_ms_{part}_vs_{peer.replace(' ', '_')}_d{dim}": parts[part] - ours[part]
        for peer, parts in splits.items()
        if ours and not peer.startswith("colonnade")
        for part in PARTS
    }
